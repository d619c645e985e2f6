"""IP addresses: which are this machine's own, and which count as one client."""

from __future__ import annotations

import ipaddress
from functools import lru_cache

# An IPv6 client has a whole network of this length to choose addresses from.
IPV6_PREFIX = 64


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the host: ``localhost`` in any case, or a loopback address in any
    spelling, also in brackets or mapped into IPv6. Any other name counts as reachable from elsewhere.

    >>> is_loopback("LOCALHOST"), is_loopback("0:0:0:0:0:0:0:1"), is_loopback("::ffff:127.0.0.1")
    (True, True, True)
    >>> is_loopback("0.0.0.0"), is_loopback("localhost.example")
    (False, False)
    """
    address = address_of(host)
    if address is None:
        return host.lower().removesuffix(".") == "localhost"
    return address.is_loopback


def address_of(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The address that the host spells out, one that is mapped into IPv6 as IPv4; None for a name."""
    try:
        address = ipaddress.ip_address(host.removeprefix("[").removesuffix("]").partition("%")[0])
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


@lru_cache(maxsize=4096)
def client_of(host: str) -> str | None:
    """What limits by address count as one client: an IPv4 address, or an IPv6 network of 64 bits. None for
    this machine, where a proxy may stand for many clients, and for what is no address.

    >>> client_of("192.0.2.7"), client_of("2001:db8::1"), client_of("127.0.0.1")
    ('192.0.2.7', '2001:db8::/64', None)
    """
    address = address_of(host)
    if address is None or address.is_loopback:
        return None
    if address.version == 4:
        return str(address)
    return str(ipaddress.ip_network((address, IPV6_PREFIX), strict=False))
