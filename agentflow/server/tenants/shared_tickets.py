"""Session tickets that several fronts share: a page can get a ticket at one front and use it at another."""

from __future__ import annotations

import secrets
from contextlib import suppress
from typing import Final

import msgspec

from agentflow.engine.tenant import Tenant
from agentflow.errors import Overloaded
from agentflow.server.stores.shared import SharedStore
from agentflow.server.tenants.tickets import (
    MAX_UNUSED_TICKETS,
    TICKET_BYTES,
    TICKET_LIFE_S,
    SessionTicket,
    too_many_tickets,
)
from agentflow.server.tenants.tickets import hashed_ticket as hashed

# Returns 0, or the milliseconds until the tenant's oldest unused ticket expires.
_ISSUE: Final = """
local time = redis.call('TIME')
local now, life = time[1] * 1000 + math.floor(time[2] / 1000), tonumber(ARGV[3])
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now)
if redis.call('ZCARD', KEYS[2]) >= tonumber(ARGV[2]) then
  return math.max(1, redis.call('ZRANGE', KEYS[2], 0, 0, 'WITHSCORES')[2] - now)
end
redis.call('SET', KEYS[1], ARGV[1], 'PX', life)
redis.call('ZADD', KEYS[2], now + life, ARGV[4])
redis.call('PEXPIRE', KEYS[2], life)
return 0
"""


class _Ticket(msgspec.Struct, frozen=True, array_like=True):
    tenant: str
    hashed_key: str


class SharedTickets:
    """The unused tickets of several fronts, in Redis."""

    def __init__(self, store: SharedStore) -> None:
        self._store = store

    async def issue(self, tenant: Tenant, hashed_key: str) -> SessionTicket:
        """Like ``SessionTickets.issue``. ``Overloaded`` if the store does not answer."""
        ticket = secrets.token_urlsafe(TICKET_BYTES)
        digest = hashed(ticket).hex()
        keys = [self._store.key("ticket", digest), self._store.key("tickets", tenant.name)]
        value = msgspec.msgpack.encode(_Ticket(tenant.name, hashed_key))
        arguments = [value, MAX_UNUSED_TICKETS, TICKET_LIFE_S * 1_000, digest]
        wait_ms = int(await self._store.run(_ISSUE, keys, arguments))
        if wait_ms:
            raise too_many_tickets(wait_ms / 1_000)
        return SessionTicket(ticket, TICKET_LIFE_S)

    async def redeem(self, ticket: str) -> tuple[str, str] | None:
        """Like ``SessionTickets.redeem``. ``Overloaded`` if the store does not answer."""
        digest = hashed(ticket).hex()
        key = self._store.key("ticket", digest)
        data = await self._store.call(lambda client: client.getdel(key))
        found = None if data is None else self._store.decoded(key, data, _Ticket)
        if found is None:
            return None
        issued = self._store.key("tickets", found.tenant)
        with suppress(Overloaded):  # the ticket is used up, and its entry expires
            await self._store.call(lambda client: client.zrem(issued, digest))
        return found.tenant, found.hashed_key
