"""Session tickets, with which a page opens a websocket: browsers let no page set the headers of one.

The page sends its key to ``POST /v1/session-ticket`` and offers the ticket as a subprotocol of the websocket.
A ticket stands for the key once and for a short time, so one that a proxy's log has is worthless. The store
has the hashes of tickets, in the order of their expiry."""

from __future__ import annotations

import hashlib
import secrets
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from agentflow.engine.tenant import Tenant
from agentflow.errors import RateLimited

TICKET_LIFE_S = 30
MAX_UNUSED_TICKETS = 64
"""The most unused tickets of one tenant."""
TICKET_BYTES = 32
TICKET_SUBPROTOCOL = "agentflow.ticket."
"""The prefix of the ticket in a subprotocol that a websocket offers."""


class SessionTicket(msgspec.Struct, frozen=True):
    """A ticket for one websocket, within ``expires_in_s`` seconds."""

    ticket: str
    expires_in_s: int


@dataclass(frozen=True, slots=True)
class _Unused:
    tenant: Tenant
    key: str | None
    expires_ns: int


class SessionTickets:
    """The unused tickets of a server. ``clock_ns``: nanoseconds. For one event loop."""

    def __init__(self, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._clock_ns = clock_ns
        self._unused: OrderedDict[bytes, _Unused] = OrderedDict()
        self._num_of: Counter[str] = Counter()

    def __len__(self) -> int:
        """The number of tickets in memory."""
        return len(self._unused)

    def issue(self, tenant: Tenant, key: str | None) -> SessionTicket:
        """A ticket in place of ``key``, which identifies ``tenant``. ``RateLimited`` if the tenant has
        ``MAX_UNUSED_TICKETS``."""
        now_ns = self._clock_ns()
        self._drop_expired(now_ns)
        if self._num_of[tenant.name] >= MAX_UNUSED_TICKETS:
            oldest = next(one for one in self._unused.values() if one.tenant.name == tenant.name)
            error = RateLimited(
                f"{MAX_UNUSED_TICKETS} session tickets are unused: try again when one has expired"
            )
            error.retry_after_s = (oldest.expires_ns - now_ns) / 1e9
            raise error
        ticket = secrets.token_urlsafe(TICKET_BYTES)
        self._unused[_hashed(ticket)] = _Unused(tenant, key, now_ns + TICKET_LIFE_S * 1_000_000_000)
        self._num_of[tenant.name] += 1
        return SessionTicket(ticket, TICKET_LIFE_S)

    def redeem(self, ticket: str) -> tuple[Tenant, str | None] | None:
        """The tenant and the key that the ticket stands for, once; None for one that is unknown, used or
        expired."""
        self._drop_expired(self._clock_ns())
        # By its hash, so that the time of the search says nothing about the tickets that there are.
        found = self._unused.pop(_hashed(ticket), None)
        if found is None:
            return None
        self._forget(found)
        return found.tenant, found.key

    def _drop_expired(self, now_ns: int) -> None:
        while self._unused and next(iter(self._unused.values())).expires_ns <= now_ns:
            self._forget(self._unused.popitem(last=False)[1])

    def _forget(self, one: _Unused) -> None:
        self._num_of[one.tenant.name] -= 1
        if not self._num_of[one.tenant.name]:
            del self._num_of[one.tenant.name]


def ticket_of(subprotocols: Sequence[str]) -> str | None:
    """The ticket among the subprotocols that a websocket offers."""
    for offered in subprotocols:
        if offered.startswith(TICKET_SUBPROTOCOL):
            return offered.removeprefix(TICKET_SUBPROTOCOL)
    return None


def _hashed(ticket: str) -> bytes:
    return hashlib.sha256(ticket.encode("utf-8", "surrogatepass")).digest()
