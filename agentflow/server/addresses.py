"""IP addresses: loopback addresses, and addresses that count as one client."""

from __future__ import annotations

import ipaddress
from functools import lru_cache

# An IPv6 client can choose its address within a network of this prefix length.
IPV6_PREFIX = 64


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the host: ``localhost`` in any case, or a loopback address in any
    notation, also in brackets or mapped into IPv6. All other names count as reachable from other machines.

    >>> is_loopback("LOCALHOST"), is_loopback("0:0:0:0:0:0:0:1"), is_loopback("::ffff:127.0.0.1")
    (True, True, True)
    >>> is_loopback("0.0.0.0"), is_loopback("localhost.example")
    (False, False)
    """
    address = parse_address(host)
    if address is None:
        return host.lower().removesuffix(".") == "localhost"
    return address.is_loopback


def parse_address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The address that a host denotes, or None for a name. An IPv4 address mapped into IPv6 is returned as
    IPv4."""
    try:
        address = ipaddress.ip_address(host.removeprefix("[").removesuffix("]").partition("%")[0])
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


@lru_cache(maxsize=4096)
def client_network(host: str) -> str | None:
    """The client to which limits by address apply: an IPv4 address, or an IPv6 network of 64 bits. None for
    this machine, on which a proxy may serve many clients, and for names.

    >>> client_network("192.0.2.7"), client_network("2001:db8::1"), client_network("127.0.0.1")
    ('192.0.2.7', '2001:db8::/64', None)
    """
    address = parse_address(host)
    if address is None or address.is_loopback:
        return None
    if address.version == 4:
        return str(address)
    return str(ipaddress.ip_network((address, IPV6_PREFIX), strict=False))
