"""Session tickets, with which a page opens a websocket: browsers do not let pages set its headers.

The page sends its key to ``POST /v1/session-ticket`` and offers the ticket as a subprotocol of the websocket.
A ticket replaces the key once and for a short time, so a ticket in a proxy's log is worthless. The store has
the hashes of tickets and keys. ``shared_tickets`` has a store for several fronts."""

from __future__ import annotations

import hashlib
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from agentflow.engine.tenant import Tenant
from agentflow.errors import RateLimited

TICKET_LIFE_S = 30
MAX_UNUSED_TICKETS = 64
"""The limit of unused tickets of one tenant."""
TICKET_BYTES = 32
TICKET_SUBPROTOCOL = "agentflow.ticket."
"""The prefix of the ticket in a subprotocol that a websocket offers."""


class SessionTicket(msgspec.Struct, frozen=True):
    """A ticket for one websocket, within ``expires_in_s`` seconds."""

    ticket: str
    expires_in_s: int


class TicketStore(Protocol):
    """The unused tickets of one front, or of several."""

    async def issue(self, tenant: Tenant, hashed_key: str) -> SessionTicket:
        """Creates a ticket that replaces the key with this hash, which identifies ``tenant``. ``RateLimited``
        if the tenant has ``MAX_UNUSED_TICKETS``."""

    async def redeem(self, ticket: str) -> tuple[str, str] | None:
        """Uses a ticket. Returns the name of the tenant and the hash of the key that the ticket replaces.
        None if the ticket is unknown, used or expired."""


@dataclass(frozen=True, slots=True)
class _Unused:
    tenant: str
    hashed_key: str
    expires_ns: int


class SessionTickets:
    """The unused tickets of one front, in its memory. ``clock_ns``: nanoseconds. Not thread-safe."""

    def __init__(self, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._clock_ns = clock_ns
        self._unused: OrderedDict[bytes, _Unused] = OrderedDict()
        # The times at which each tenant's tickets expire, by their hashes, the oldest first.
        self._expires_ns_of: dict[str, dict[bytes, int]] = {}

    def __len__(self) -> int:
        """The number of tickets in memory."""
        return len(self._unused)

    async def issue(self, tenant: Tenant, hashed_key: str) -> SessionTicket:
        """See ``TicketStore``."""
        now_ns = self._clock_ns()
        self._drop_expired(now_ns)
        own = self._expires_ns_of.get(tenant.name, {})
        if len(own) >= MAX_UNUSED_TICKETS:
            raise too_many_tickets((next(iter(own.values())) - now_ns) / 1e9)
        ticket = secrets.token_urlsafe(TICKET_BYTES)
        digest, expires_ns = hashed_ticket(ticket), now_ns + TICKET_LIFE_S * 1_000_000_000
        self._unused[digest] = _Unused(tenant.name, hashed_key, expires_ns)
        self._expires_ns_of.setdefault(tenant.name, own)[digest] = expires_ns
        return SessionTicket(ticket, TICKET_LIFE_S)

    async def redeem(self, ticket: str) -> tuple[str, str] | None:
        """See ``TicketStore``."""
        self._drop_expired(self._clock_ns())
        # By its hash, so that the time of the search reveals nothing about existing tickets.
        digest = hashed_ticket(ticket)
        found = self._unused.pop(digest, None)
        if found is None:
            return None
        self._forget(digest, found)
        return found.tenant, found.hashed_key

    def _drop_expired(self, now_ns: int) -> None:
        while self._unused and next(iter(self._unused.values())).expires_ns <= now_ns:
            self._forget(*self._unused.popitem(last=False))

    def _forget(self, digest: bytes, one: _Unused) -> None:
        own = self._expires_ns_of[one.tenant]
        del own[digest]
        if not own:
            del self._expires_ns_of[one.tenant]


def too_many_tickets(retry_after_s: float) -> RateLimited:
    """The error of a tenant with too many unused tickets, the oldest of which expires after this time."""
    error = RateLimited(f"{MAX_UNUSED_TICKETS} session tickets are unused: try again when one has expired")
    error.retry_after_s = retry_after_s
    return error


def find_ticket(subprotocols: Sequence[str]) -> str | None:
    """The ticket among the subprotocols that a websocket offers."""
    for offered in subprotocols:
        if offered.startswith(TICKET_SUBPROTOCOL):
            return offered.removeprefix(TICKET_SUBPROTOCOL)
    return None


def hashed_ticket(ticket: str) -> bytes:
    """The hash of a ticket, as in a store."""
    return hashlib.sha256(ticket.encode("utf-8", "surrogatepass")).digest()
