"""The key in the environment variable AGENTFLOW_API_KEY, and the servers that may have it."""

from __future__ import annotations

import ipaddress
import os
from typing import Final
from urllib.parse import urlsplit

KEY_VARIABLE: Final = "AGENTFLOW_API_KEY"
URL_VARIABLE: Final = "AGENTFLOW_URL"


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
    server = server_of(address)
    known = [server_of(one) for one in (first, os.environ.get(URL_VARIABLE)) if one]
    return key if server in known or _is_here(address) else None


def server_of(address: str) -> str:
    """The vendor, or the host with its port.

    >>> server_of("http://host:8000/v1"), server_of("openai:gpt-4.1-mini")
    ('host:8000', 'openai')
    """
    _, is_url, rest = address.partition("://")
    return rest.partition("/")[0] if is_url else address.partition(":")[0]


def _is_here(address: str) -> bool:
    """Whether the address is of this machine."""
    try:
        host = urlsplit(address).hostname or ""
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
