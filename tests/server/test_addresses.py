"""Loopback addresses, and addresses that count as one client."""

from __future__ import annotations

import pytest

from agentflow.server.addresses import client_network, is_loopback


@pytest.mark.parametrize(
    ("host", "is_own"),
    [
        *((host, True) for host in ("localhost", "LOCALHOST", "localhost.", "127.0.0.1", "127.9.8.7")),
        *((host, True) for host in ("::1", "[::1]", "0:0:0:0:0:0:0:1", "::ffff:127.0.0.1", "::1%lo")),
        *(
            (host, False)
            for host in ("0.0.0.0", "::", "", "192.0.2.1", "::ffff:192.0.2.1", "localhost.example")
        ),
        *((host, False) for host in ("my-machine", "127.0.0.1.example", "1.127.0.0", "fe80::1%lo")),
    ],
)
def test_one_predicate_says_what_is_loopback(host: str, is_own: bool) -> None:
    assert is_loopback(host) == is_own
    if is_own:
        assert client_network(host) is None


def test_an_ipv6_network_counts_as_one_client() -> None:
    assert (
        client_network("2001:db8::1")
        == client_network("2001:db8:0:0:ffff::")
        != client_network("2001:db8:0:1::1")
    )
    assert client_network("::ffff:192.0.2.1") == client_network("192.0.2.1") != client_network("192.0.2.2")
