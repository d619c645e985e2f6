"""Session tickets of several fronts, in a real Redis."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from support.redis_server import RedisServer, shared_store
from support.server.http_clients import only_asyncio

from agentflow.engine.tenant import Tenant
from agentflow.errors import Overloaded, RateLimited
from agentflow.server.tenants.keys import Tenants, hashed_key
from agentflow.server.tenants.shared_tickets import SharedTickets
from agentflow.server.tenants.tickets import MAX_UNUSED_TICKETS, TICKET_LIFE_S

pytestmark = pytest.mark.anyio
KEY = "af-right"


anyio_backend = pytest.fixture(only_asyncio)


async def test_a_ticket_of_one_front_opens_one_session_at_another(redis: RedisServer) -> None:
    async with shared_store(redis) as here, shared_store(redis, here.prefix) as there:
        tenant = Tenants([KEY]).of(KEY)
        issued = await SharedTickets(here).issue(tenant, hashed_key(KEY))
        tenants = Tenants([KEY])
        tenants.tickets = SharedTickets(there)
        assert await tenants.of_ticket(issued.ticket, None) == (tenant, hashed_key(KEY))
        assert await SharedTickets(here).redeem(issued.ticket) is None


async def test_tickets_of_a_tenant_are_limited_over_all_fronts(redis: RedisServer) -> None:
    async with shared_store(redis) as here, shared_store(redis, here.prefix) as there:
        fronts, ann = [SharedTickets(here), SharedTickets(there)], Tenant("ann")
        issued = [await fronts[n % 2].issue(ann, "a") for n in range(MAX_UNUSED_TICKETS)]
        with pytest.raises(RateLimited) as caught:
            await fronts[0].issue(ann, "a")
        assert 0 < (caught.value.retry_after_s or 0) <= TICKET_LIFE_S
        await fronts[1].issue(Tenant("bob"), "b")
        assert await fronts[1].redeem(issued[0].ticket) == ("ann", "a")
        await fronts[0].issue(ann, "a")


async def test_f37_a_ticket_is_valid_although_the_list_of_tickets_keeps_it(
    redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second call of the store fails, when the first one has used the ticket up."""
    async with shared_store(redis) as store:
        tickets = SharedTickets(store)
        issued = await tickets.issue(Tenant("ann"), "a")
        call, num_calls = store.call, 0

        async def once(operation: Callable[[Any], Awaitable[Any]]) -> Any:
            nonlocal num_calls
            num_calls += 1
            if num_calls > 1:
                raise Overloaded("the connection was reset")
            return await call(operation)

        monkeypatch.setattr(store, "call", once)
        assert await tickets.redeem(issued.ticket) == ("ann", "a")


async def test_a_foreign_value_is_no_ticket(redis: RedisServer) -> None:
    async with shared_store(redis) as store:
        tickets = SharedTickets(store)
        issued = await tickets.issue(Tenant("ann"), "a")
        [key] = await store.call(lambda client: client.keys(f"{store.prefix}ticket:*"))
        for value in (b"", b"\xc1", b"\x93\x01\x02\x03", b"text"):
            await store.call(lambda client, value=value: client.set(key, value))
            assert await tickets.redeem(issued.ticket) is None
