"""Wrong keys from one address: few are looked up, and earlier valid requests continue."""

from __future__ import annotations

import pytest
from support.clocks import ClockNs

from agentflow.cli.operating.serve import _warn_of_open_keys
from agentflow.errors import NotAuthorized, RateLimited
from agentflow.server.config.schema import NetworkConfig
from agentflow.server.tenants import keys as failed_keys
from agentflow.server.tenants.keys import FAILURES_PER_MINUTE, FailedKeys, Tenants

HERE, THERE, LOCAL = "192.0.2.1", "192.0.2.2", "127.0.0.1"
KEY, OTHER = "af-right", "af-right-too"


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture
def clock() -> ClockNs:
    return ClockNs()


@pytest.fixture
def tenants(clock: ClockNs) -> Tenants:
    tenants = Tenants([KEY, OTHER])
    tenants.failed_keys = FailedKeys(clock)
    return tenants


def fail(tenants: Tenants, address: str, count: int = FAILURES_PER_MINUTE) -> None:
    for number in range(count):
        with pytest.raises(NotAuthorized):
            tenants.of_request(bearer(f"af-wrong-{number}"), address)


def test_an_address_that_tries_keys_is_refused_without_a_look(tenants: Tenants, clock: ClockNs) -> None:
    fail(tenants, HERE)
    for key in ("af-wrong", KEY):  # the answer does not show which one is right
        with pytest.raises(RateLimited) as caught:
            tenants.of_request(bearer(key), HERE)
        assert caught.value.retry_after_s == pytest.approx(60 / FAILURES_PER_MINUTE)
    assert tenants.of_request(bearer(KEY), THERE).name == "default"
    clock.now_ns += 2_000_000_000
    fail(tenants, HERE, 1)
    with pytest.raises(RateLimited):
        tenants.of_request(bearer(KEY), HERE)
    clock.now_ns += 60_000_000_000
    assert tenants.of_request(bearer(KEY), HERE).name == "default"
    fail(tenants, HERE)


def test_a_key_that_was_right_from_there_goes_on(tenants: Tenants) -> None:
    tenants.of_request(bearer(KEY), HERE)
    fail(tenants, HERE)
    assert tenants.of_request(bearer(KEY), HERE).name == "default"
    with pytest.raises(RateLimited):
        tenants.of_request(bearer(OTHER), HERE)


def test_missing_keys_and_local_clients_are_no_failures(tenants: Tenants) -> None:
    for _ in range(2 * FAILURES_PER_MINUTE):
        with pytest.raises(NotAuthorized):
            tenants.of_request({}, HERE)  # no key was tried
        with pytest.raises(NotAuthorized):
            tenants.of_request(bearer("af-wrong"), LOCAL)
        with pytest.raises(NotAuthorized):
            tenants.of_request(bearer("af-wrong"), None)
    assert tenants.of_request(bearer(KEY), HERE).name == "default"
    fail(tenants, HERE)
    with pytest.raises(NotAuthorized):
        tenants.of_request({}, HERE)


def test_an_ipv6_network_is_one_address(tenants: Tenants) -> None:
    for number in range(FAILURES_PER_MINUTE):
        fail(tenants, f"2001:db8::{number:x}", 1)
    with pytest.raises(RateLimited):
        tenants.of_request(bearer(KEY), "2001:db8::ffff")


def test_the_tables_are_bounded(tenants: Tenants, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failed_keys, "MAX_ENTRIES", 10)
    for number in range(100):
        fail(tenants, f"192.0.2.{number}", 1)
        tenants.of_request(bearer(KEY), f"198.51.100.{number}")
        assert len(tenants.failed_keys) <= 10
    fail(tenants, "192.0.2.99", FAILURES_PER_MINUTE - 1)
    with pytest.raises(RateLimited):
        tenants.of_request(bearer(KEY), "192.0.2.99")


@pytest.mark.parametrize(
    ("host", "tls_cert", "need_keys", "warns"),
    [
        ("0.0.0.0", None, True, True),
        ("models.example", None, True, True),
        ("0.0.0.0", "chain.pem", True, False),
        ("0.0.0.0", None, False, False),
        ("127.0.0.1", None, True, False),
        ("LOCALHOST", None, True, False),
    ],
)
def test_keys_on_a_public_address_without_tls_log_a_warning(
    host: str, tls_cert: str | None, need_keys: bool, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    _warn_of_open_keys(NetworkConfig(host=host, tls_cert=tls_cert), need_keys)
    assert [record.levelname for record in caplog.records] == ["WARNING"] * warns


def test_a_key_names_its_tenant_until_it_is_taken_away() -> None:
    tenants = Tenants([KEY])
    tenant = tenants.of(KEY)
    assert tenants.still_names(KEY, tenant)
    assert not tenants.still_names("af-wrong", tenant)
    assert not tenants.still_names(None, tenant)
    assert Tenants().still_names(None, Tenants().of(None))
