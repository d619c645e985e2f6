"""Session tickets: a page exchanges its key for one, and opens one websocket with it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
from support.api_server import ApiServer, api_server
from support.clocks import ClockNs
from support.counted_lines import counted_lines
from websockets.exceptions import InvalidStatus
from websockets.sync.client import ClientConnection, connect
from websockets.typing import Subprotocol

from agentflow.engine.tenant import ANONYMOUS, Tenant
from agentflow.errors import NotAuthorized, RateLimited
from agentflow.protocol.wire import SESSION_PATH, SUBPROTOCOL, VERSION, Hello, encode, server_frames
from agentflow.server.tenants.keys import FAILURES_PER_MINUTE, FailedKeys, Tenants, hashed_key
from agentflow.server.tenants.tickets import (
    MAX_UNUSED_TICKETS,
    TICKET_LIFE_S,
    TICKET_SUBPROTOCOL,
    SessionTickets,
)

KEY = "af-right"
PATH = "/v1/session-ticket"
HERE = "192.0.2.1"


@pytest.fixture
def clock() -> ClockNs:
    return ClockNs()


@pytest.fixture
def keyed(tmp_path: Path, clock: ClockNs) -> Iterator[tuple[ApiServer, Tenants, Path]]:
    file = tmp_path / "keys.toml"
    file.write_text(f'[tenants.ann]\nkeys = ["{hashed_key(KEY)}"]')
    tenants = Tenants(file=file)
    tenants.tickets = SessionTickets(clock)
    with api_server(tenants=tenants, constraints=False) as server:
        yield server, tenants, file


def ticket_from(server: ApiServer, key: str | None = KEY) -> str:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    answer = httpx2.post(server.url + PATH, headers=headers)
    assert answer.status_code == 200
    assert answer.json().keys() == {"ticket", "expires_in_s"}
    return str(answer.json()["ticket"])


def opened(server: ApiServer, *subprotocols: str) -> ClientConnection:
    url = server.url.replace("http", "ws") + SESSION_PATH
    return connect(url, subprotocols=[Subprotocol(name) for name in subprotocols] or None, compression=None)


def opened_with(server: ApiServer, ticket: str) -> ClientConnection:
    return opened(server, SUBPROTOCOL, TICKET_SUBPROTOCOL + ticket)


def is_refused(server: ApiServer, ticket: str) -> bool:
    with pytest.raises(InvalidStatus) as caught:
        opened_with(server, ticket)
    return caught.value.response.status_code == 401


def test_a_ticket_opens_one_session(keyed: tuple[ApiServer, Tenants, Path]) -> None:
    server, _, _ = keyed
    ticket = ticket_from(server)
    with opened_with(server, ticket) as socket:
        assert socket.subprotocol == SUBPROTOCOL
        socket.send(encode(Hello(VERSION), binary=True))
        assert server_frames().decode(socket.recv()).__class__.__name__ == "Welcome"
    assert is_refused(server, ticket)
    assert is_refused(server, ticket_from(server) + "x")
    assert is_refused(server, "")
    assert is_refused(server, KEY)


def test_a_ticket_expires(keyed: tuple[ApiServer, Tenants, Path], clock: ClockNs) -> None:
    server, _, _ = keyed
    early, late = ticket_from(server), ticket_from(server)
    clock.now_ns += TICKET_LIFE_S * 10**9 - 1
    with opened_with(server, early):
        pass
    clock.now_ns += 1
    assert is_refused(server, late)


def test_a_ticket_ends_with_its_key(keyed: tuple[ApiServer, Tenants, Path]) -> None:
    server, _, file = keyed
    ticket = ticket_from(server)
    file.write_text(f'[tenants.ann]\nkeys = ["{hashed_key("af-new")}"]')
    server.call(server.service.reload_tenants)
    assert is_refused(server, ticket)


def test_a_ticket_needs_a_key(keyed: tuple[ApiServer, Tenants, Path]) -> None:
    server, _, _ = keyed
    for headers in ({}, {"authorization": "Bearer af-wrong"}):
        assert httpx2.post(server.url + PATH, headers=headers).status_code == 401


def test_a_server_without_keys_needs_no_ticket_and_takes_any() -> None:
    with api_server(constraints=False) as server:
        for ticket in (ticket_from(server, None), "any"):
            with opened_with(server, ticket) as socket:
                assert socket.subprotocol == SUBPROTOCOL
        with opened(server) as plain, opened(server, "another.protocol") as other:
            assert plain.subprotocol is other.subprotocol is None


@pytest.mark.anyio
async def test_the_unused_tickets_of_a_tenant_are_limited(clock: ClockNs) -> None:
    tickets = SessionTickets(clock)
    ann, bob = Tenant("ann"), Tenant("bob")
    first = await tickets.issue(ann, "a")
    clock.now_ns += 10**9
    for _ in range(MAX_UNUSED_TICKETS - 1):
        await tickets.issue(ann, "a")
    with pytest.raises(RateLimited) as caught:
        await tickets.issue(ann, "a")
    assert caught.value.retry_after_s == TICKET_LIFE_S - 1
    assert await tickets.redeem((await tickets.issue(bob, "b")).ticket) == ("bob", "b")
    assert await tickets.redeem(first.ticket) == ("ann", "a")
    assert await tickets.redeem((await tickets.issue(ann, "a")).ticket) == ("ann", "a")
    clock.now_ns += TICKET_LIFE_S * 10**9
    for _ in range(MAX_UNUSED_TICKETS):
        await tickets.issue(ann, "a")
    assert len(tickets) == MAX_UNUSED_TICKETS


@pytest.mark.anyio
@pytest.mark.timeout(60)
async def test_f37_a_refusal_takes_as_many_steps_with_thousands_of_tickets(clock: ClockNs) -> None:
    """A refusal walked through the tickets of all tenants to the oldest one of its tenant."""

    async def steps(num_others: int) -> int:
        tickets, ann = SessionTickets(clock), Tenant("ann")
        for number in range(num_others):
            await tickets.issue(Tenant(f"t{number}"), "t")
        for _ in range(MAX_UNUSED_TICKETS):
            await tickets.issue(ann, "a")
        with counted_lines() as lines, pytest.raises(RateLimited):
            await tickets.issue(ann, "a")
        return lines.num

    await steps(1)
    assert await steps(1) == await steps(2_000)


@pytest.mark.anyio
async def test_wrong_tickets_count_as_wrong_keys_and_right_ones_always_work() -> None:
    tenants = Tenants([KEY])
    tenants.failed_keys = FailedKeys(ClockNs())
    tenant = tenants.of(KEY)
    right = (await tenants.tickets.issue(tenant, hashed_key(KEY))).ticket
    for number in range(FAILURES_PER_MINUTE):
        with pytest.raises(NotAuthorized):
            await tenants.of_ticket(f"wrong-{number}", HERE)
    with pytest.raises(RateLimited):
        await tenants.of_ticket("wrong", HERE)
    with pytest.raises(RateLimited):
        tenants.of_request({"authorization": f"Bearer {KEY}"}, HERE)
    assert await tenants.of_ticket(right, HERE) == (tenant, hashed_key(KEY))


@pytest.mark.anyio
async def test_without_keys_every_ticket_is_the_anonymous_tenant() -> None:
    assert await Tenants().of_ticket("any", HERE) == (ANONYMOUS, "")
