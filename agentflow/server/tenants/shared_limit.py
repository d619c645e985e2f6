"""Rate limits of tenants over several fronts: the buckets are in Redis, and each front leases from them.

Admission stays synchronous. Before a request, ``ready`` makes sure that this front holds a *lease*: at least
one request and one token of the tenant, taken from the shared buckets. A lease is a 32nd of a bucket, so most
requests need no round trip; below a capacity of 64 a lease covers one request. Used tokens beyond the lease
are a debt, which is taken from the shared bucket within ``SETTLE_S``. A lease that is unused for ``IDLE_NS``
is given back. For costs, exactly the highest cost of each call is leased, and a call is only admitted by its
lease.

So, with F fronts, a tenant starts within a minute at most (1 + F/32) times the requests that one front would
start, and each front may admit one more prompt that takes the bucket of tokens below zero. The limit of costs
is never exceeded. If a front is lost, so are its lease and the highest costs of its calls. If an answer of
Redis is lost, the front cannot know whether its exchange took effect until Redis answers again: Redis keeps
the id of the front's last exchange. The limit of unfinished requests applies to each front separately.

The value of a tenant in Redis is the text of its buckets. It is computed in Python, whose integers are exact,
and Redis replaces it only if it is still the value that was read. The time is Redis's.
"""

from __future__ import annotations

import math
import re
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Final

import anyio

from agentflow.engine.tenant import Tenant
from agentflow.errors import NotAuthorized, Overloaded, RateLimited
from agentflow.runtime.task_group import open_task_group
from agentflow.server.stores.shared import SharedStore
from agentflow.server.tenants.rate_limit import (
    DAY_NS,
    MINUTE_NS,
    NANODOLLARS,
    Bucket,
    BucketState,
    TenantBuckets,
    TenantGate,
)

PARTS: Final = 32
"""A lease is a bucket's capacity divided by this number."""
SETTLE_S: Final = 0.25
IDLE_NS: Final = 1_000_000_000
_MAX_TRIES: Final = 100
_SECOND_NS: Final = 1_000_000_000
_BUCKET: Final = re.compile(rb"([0-9]{1,40}) (-?[0-9]{1,40}) ([0-9]{1,20})")
_NAMES: Final = ("requests", "tokens", "cost")

_READ: Final = "return {redis.call('GET', KEYS[1]), redis.call('TIME'), redis.call('GET', KEYS[2])}"
_REPLACE: Final = """
local found = redis.call('GET', KEYS[1])
if (found or '') ~= ARGV[1] then return {found, redis.call('TIME'), redis.call('GET', KEYS[2])} end
redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
redis.call('SET', KEYS[2], ARGV[4], 'PX', ARGV[3])
return 1
"""


class Lease(Bucket):
    """The part of a shared bucket that this front holds. As a ``Bucket``, it is everything that the front may
    use: its credit, and the level of the shared bucket when it was last read, which refills."""

    def __init__(self, capacity: int, now_ns: int, period_ns: int) -> None:
        super().__init__(capacity, now_ns, period_ns)
        self.credit = 0
        """In the unit of the level. Negative: a debt."""
        self.used_ns = now_ns

    def wait_ns(self, now_ns: int, amount: int = 1) -> int:
        refill_ns = self.refill_ns(now_ns, amount)
        if self.period_ns == DAY_NS and not self.has(amount):
            return max(1, refill_ns)  # another front may spend the shared level first
        return refill_ns

    def refill_ns(self, now_ns: int, amount: int) -> int:
        """The time until the credit and the shared level together are ``amount``, as far as is known here."""
        self._fill(now_ns)
        return max(0, -((self._level + self.credit - amount * self.period_ns) // self.capacity))

    def take(self, amount: int, now_ns: int) -> None:
        self.credit -= amount * self.period_ns
        self.used_ns = now_ns

    def state(self, now_ns: int) -> BucketState:
        self._fill(now_ns)
        left = min(self._level + self.credit, self.capacity * self.period_ns)
        reset_ns = -((left - self.capacity * self.period_ns) // self.capacity)
        return BucketState(self.capacity, max(0, left // self.period_ns), reset_ns)

    def is_full(self, now_ns: int) -> bool:
        return not self.credit and super().is_full(now_ns)

    def has(self, amount: int) -> bool:
        """Whether the front holds this amount."""
        return self.credit >= amount * self.period_ns

    def is_idle(self, now_ns: int) -> bool:
        """Whether credit should be given back. For costs, credit is the unused part of a reservation."""
        return self.period_ns == DAY_NS or now_ns - self.used_ns > IDLE_NS

    def exchange(self, shared: Bucket, shared_ns: int, wanted: int, gives_back: bool) -> int:
        """Changes the shared bucket: pays a debt, or gives back the credit, and takes at least ``wanted`` if
        the bucket has that. Returns the change of the credit, which the caller applies."""
        change = 0
        if self.credit < 0 or gives_back:
            change = -self.credit
            shared.shift(-change, shared_ns)
        if wanted and self.credit + change < wanted * self.period_ns:
            missing = wanted * self.period_ns - (self.credit + change)
            there = shared.level(shared_ns)
            if there >= missing:
                most = max(missing, self.capacity // PARTS * self.period_ns if self.period_ns < DAY_NS else 0)
                granted = max(missing, min(most, there // self.period_ns * self.period_ns))
                shared.shift(-granted, shared_ns)
                change += granted
        return change


@dataclass
class _Exchange:
    """An exchange of this front. ``changes``: of the credit of each lease."""

    id: bytes  # Redis keeps the last one longer than this front keeps the account
    changes: list[tuple[Lease, int]]


class SharedAccount(TenantBuckets):
    """The leases and unfinished requests of one tenant."""

    def __init__(self) -> None:
        super().__init__()
        self.exchanging = anyio.Lock()
        self._unsure: list[_Exchange] = []  # the exchanges without an answer; at most one took effect

    def begin(self, changes: list[tuple[Lease, int]]) -> _Exchange:
        """The start of an exchange. Credit that it returns is gone from now on: others may get it."""
        made = _Exchange(secrets.token_hex(8).encode(), changes)
        self._unsure.append(made)
        for lease, change in changes:
            lease.credit += min(0, change)
        return made

    def roll_back(self, made: _Exchange, last: object) -> None:
        """The end of an exchange that did not take effect. ``last``: as for ``apply_last``."""
        self._undo(made)
        self.apply_last(last)

    def apply_last(self, last: object) -> None:
        """Applies an exchange that took effect although its answer was lost. ``last``: the id of this
        front's last exchange in Redis."""
        for made in self._unsure:
            if made.id == last:
                self._apply(made)
                return

    def finish(self, made: _Exchange) -> None:
        """The end of an exchange that took effect. It changed the shared value, so earlier ones no longer
        can."""
        self._apply(made)
        for earlier in [*self._unsure]:
            self._undo(earlier)

    def _apply(self, made: _Exchange) -> None:
        self._unsure.remove(made)
        for lease, change in made.changes:
            lease.credit += max(0, change)  # requests may have used some meanwhile

    def _undo(self, made: _Exchange) -> None:
        self._unsure.remove(made)
        for lease, change in made.changes:
            lease.credit -= min(0, change)

    def new_bucket(self, capacity: int, now_ns: int, period_ns: int) -> Bucket:
        return Lease(capacity, now_ns, period_ns)

    def is_idle(self, now_ns: int) -> bool:
        return not self.exchanging.locked() and not self._unsure and super().is_idle(now_ns)

    def leases(self) -> list[tuple[str, Lease]]:
        """The leases of the limits that the tenant has, or had."""
        found = zip(_NAMES, (self.requests, self.tokens, self.cost), strict=True)
        return [(name, lease) for name, lease in found if isinstance(lease, Lease)]

    def is_unsettled(self, now_ns: int) -> bool:
        """Whether the shared buckets should change, or be read."""
        return (
            self.must_read
            or bool(self._unsure)
            or any(lease.credit < 0 or (lease.credit and lease.is_idle(now_ns)) for _, lease in self.leases())
        )


@dataclass
class _Shared:
    """The buckets of a tenant in Redis."""

    value: bytes
    now_ns: int
    buckets: dict[str, Bucket] = field(default_factory=dict)


class SharedGate(TenantGate):
    """Admits requests of one front within limits that several fronts share. ``running`` settles them."""

    def __init__(
        self,
        store: SharedStore,
        clock_ns: Callable[[], int] = time.monotonic_ns,
        *,
        current: Callable[[Tenant], Tenant] | None = None,
    ) -> None:
        super().__init__(clock_ns, current=current)
        self._store = store

    def new_account(self) -> SharedAccount:
        return SharedAccount()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """The scope in which debts are paid and unused leases given back. At its end, all leases are."""
        async with open_task_group() as group:
            group.start_soon(self._settle_all)
            try:
                yield
            finally:
                group.cancel_scope.cancel()
                with anyio.move_on_after(2, shield=True):
                    for name, account in self._shared_accounts():
                        await self._settle(name, account, is_last=True)

    def ready(self, tenant: Tenant) -> Awaitable[None] | None:
        """See ``RequestGate``. ``Overloaded`` if a lease is needed and the store does not answer."""
        return self._take_lease(tenant, {"requests": 1, "tokens": 1})

    def ready_to_pay(self, tenant: Tenant, highest: float) -> Awaitable[None] | None:
        """See ``TenantGate``. ``Overloaded`` as for ``ready``."""
        return self._take_lease(tenant, {"cost": math.ceil(highest * NANODOLLARS)})

    def check(self, tenant: Tenant, num_requests: int = 1) -> None:
        try:
            super().check(tenant, num_requests)
        except RateLimited:
            if (account := self._accounts.get(tenant.name)) is not None:
                account.must_read = True
            raise

    def _take_lease(self, tenant: Tenant, wanted: dict[str, int]) -> Awaitable[None] | None:
        try:
            now = tenant if self._current is None else self._current(tenant)
        except NotAuthorized:  # the request itself raises it
            return None
        limits = {
            "requests": now.requests_per_minute,
            "tokens": now.tokens_per_minute,
            "cost": now.max_cost_per_day,
        }
        wanted = {name: amount for name, amount in wanted.items() if limits[name] is not None}
        if not wanted:
            return None
        account = self._find_account(now)
        return self._lease(now.name, account, wanted) if _lacks(account, wanted) else None

    async def _lease(self, name: str, account: SharedAccount, wanted: dict[str, int]) -> None:
        has_waited = account.exchanging.locked()
        async with account.exchanging:
            while _lacks(account, wanted):
                # Otherwise each of many requests would wait for the timeouts of all earlier ones.
                if has_waited:
                    self._store.check_answers()
                with anyio.CancelScope(shield=True):
                    await self._exchange(name, account, wanted)
                # During an exchange, other calls may have taken credit, or given it back.
                now_ns, leases = self._clock_ns(), dict(account.leases())
                if any(leases[kind].refill_ns(now_ns, amount) for kind, amount in wanted.items()):
                    break

    async def _settle_all(self) -> None:
        while True:
            await anyio.sleep(SETTLE_S)  # noqa: TID251 - the time is the purpose
            for name, account in self._shared_accounts():
                if account.is_unsettled(self._clock_ns()):
                    await self._settle(name, account)

    async def _settle(self, name: str, account: SharedAccount, *, is_last: bool = False) -> None:
        """Pays the debts of one account and returns its idle credit; ``is_last``: all of its credit. If the
        store does not answer, or has a foreign value for this account, a later round settles it."""
        async with account.exchanging:
            with suppress(Overloaded), anyio.CancelScope(shield=not is_last):
                await self._exchange(name, account, {}, is_last=is_last)

    async def _exchange(
        self, name: str, account: SharedAccount, wanted: dict[str, int], *, is_last: bool = False
    ) -> None:
        """Pays debts, returns idle credit, and takes new leases, in one step. The caller holds
        ``account.exchanging``. Must not be cancelled before the server ends: its credit would be there only
        after the next exchange. Takes at most a few times ``ANSWER_TIMEOUT_S``."""
        key = self._store.key("limits", name)
        keys = [key, self._store.key("limits-exchange", name, self._store.front)]
        reply = await self._store.run(_READ, keys, [])
        account.apply_last(reply[2])
        for _ in range(_MAX_TRIES):
            shared = self._read(key, reply)
            changes: list[tuple[Lease, int]] = []
            buckets: list[tuple[Lease, Bucket]] = []
            now_ns = self._clock_ns()
            for kind, lease in account.leases():
                bucket = shared.buckets.setdefault(
                    kind, Bucket(lease.capacity, shared.now_ns, lease.period_ns)
                )
                bucket.set_limit(lease.capacity, shared.now_ns)
                is_idle = is_last or (kind not in wanted and lease.is_idle(now_ns))
                change = lease.exchange(bucket, shared.now_ns, wanted.get(kind, 0), is_idle)
                changes.append((lease, change))
                buckets.append((lease, bucket))
            made = account.begin(changes)
            # The lifetime is longer than an empty bucket needs to fill.
            arguments = [shared.value, _text(shared.buckets), 2 * DAY_NS // 1_000_000, made.id]
            reply = await self._store.run(_REPLACE, keys, arguments)
            if reply == 1:
                account.finish(made)
                for lease, bucket in buckets:
                    lease.renew(bucket.level(shared.now_ns), self._clock_ns())
                account.must_read = False
                return
            account.roll_back(made, reply[2])
        raise Overloaded("the limits of this tenant change too often: try again in a moment")

    def _read(self, key: str, reply: list[object]) -> _Shared:
        value, now = reply[0] or b"", reply[1]
        assert isinstance(value, bytes)
        assert isinstance(now, list)
        shared = _Shared(value, int(now[0]) * _SECOND_NS + int(now[1]) * 1_000)
        for part in value.split(b"\n") if value else ():
            kind, _, rest = part.partition(b" ")
            found = _BUCKET.fullmatch(rest)
            if found is None or kind.decode(errors="replace") not in _NAMES:
                self._store.ignore(key, "it is not a rate limit")
                return _Shared(value, shared.now_ns)
            capacity, level, filled_ns = map(int, found.groups())
            period_ns = DAY_NS if kind == b"cost" else MINUTE_NS
            if not capacity or filled_ns > shared.now_ns + DAY_NS:
                self._store.ignore(key, "it is not a rate limit")
                return _Shared(value, shared.now_ns)
            shared.buckets[kind.decode()] = Bucket.restored(capacity, level, filled_ns, period_ns)
        return shared

    def _find_account(self, tenant: Tenant) -> SharedAccount:
        account = self._account(tenant, self._clock_ns())
        assert isinstance(account, SharedAccount)
        return account

    def _shared_accounts(self) -> list[tuple[str, SharedAccount]]:
        return [(name, one) for name, one in self._accounts.items() if isinstance(one, SharedAccount)]


def _lacks(account: SharedAccount, wanted: dict[str, int]) -> bool:
    leases = dict(account.leases())
    return any(not leases[name].has(amount) for name, amount in wanted.items())


def _text(buckets: dict[str, Bucket]) -> bytes:
    return b"\n".join(b"%b %b" % (name.encode(), bucket.kept()) for name, bucket in buckets.items())
