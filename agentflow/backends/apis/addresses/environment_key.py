"""The key in the environment variable AGENTFLOW_API_KEY, and the servers that may have it."""

from __future__ import annotations

import ipaddress
import os
from typing import Final
from urllib.parse import urlsplit

KEY_VARIABLE: Final = "AGENTFLOW_API_KEY"
URL_VARIABLE: Final = "AGENTFLOW_URL"
VENDOR_PREFIXES: Final = ("openai:", "anthropic:")
"""How the addresses of the vendors' models begin."""
_SCHEMES: Final = {"http": ("plain", 80), "ws": ("plain", 80), "https": ("tls", 443), "wss": ("tls", 443)}


def environment_key(address: str, first: str | None = None) -> str | None:
    """The key for the server of an address, if the variable is meant for that server.

    It is meant for agentflow servers (``ws://``, ``wss://``), for the server in AGENTFLOW_URL, for this
    machine, and for the first server of a session.

    Args:
        address: The address.
        first: The first address of the session; None: there is none.
    """
    key = os.environ.get(KEY_VARIABLE) or None
    if key is None or address.startswith(("ws://", "wss://")):
        return key
    known = [one for one in (first, os.environ.get(URL_VARIABLE)) if one]
    return key if any(is_same_server(address, one) for one in known) or _is_here(address) else None


def is_same_server(address: str, other: str) -> bool:
    """Whether two addresses belong to one server, so that its key may be sent to both. A key for a server
    with TLS is sent to no other port and over no plain connection, and no host is a vendor.

    >>> is_same_server("https://host/v1", "wss://HOST:443"), is_same_server("https://host", "http://host")
    (True, False)
    """
    server = _read_server(address)
    return server is not None and server == _read_server(other)


def _read_server(address: str) -> tuple[str, str, int] | None:
    """The vendor, or the kind of connection with the host and its port. None if the address has no server."""
    if address.startswith(VENDOR_PREFIXES):
        return "vendor", address.partition(":")[0], 0
    try:
        parts = urlsplit(address)
        host, port = parts.hostname, parts.port
    except ValueError:
        return None
    if not host or parts.scheme not in _SCHEMES:
        return None
    connection, default_port = _SCHEMES[parts.scheme]
    return connection, host, default_port if port is None else port


def _is_here(address: str) -> bool:
    """Whether the address is of this machine."""
    try:
        host = urlsplit(address).hostname or ""
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
