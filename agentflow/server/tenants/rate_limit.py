"""Rate limits of a tenant: requests and tokens per minute, costs per day, and unfinished requests.

Each limit per minute is a token bucket that has the capacity of one minute, begins full, and refills at a
constant rate. A request takes one from the bucket of requests. It needs a positive level in the bucket of
tokens, from which its prompt is taken at its start. At its end, its output is taken, and the cached part of
its prompt, which is not known before, is given back. Nothing is reserved for output, so the level can become
negative; then the tenant's requests are rejected until it is positive again. In any t minutes a tenant starts
at most (1 + t) times its requests per minute.

A large body is charged while it is received, with one token for each ``BYTES_PER_TOKEN``. At the end of the
request, the tokens that its prompt is charged are given back.

The limit of costs, for models behind an API, is a bucket with the capacity of one day. The highest possible
cost of a call is taken before the call is sent, and the difference to the actual cost is given back at its
end. So a tenant never exceeds its limit.

``shared_limit`` has the same limits for several fronts.

Times are in nanoseconds and levels in fractions of a token, or of a nanodollar, as integers, so that nothing
is rounded.
"""

from __future__ import annotations

import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from agentflow.engine.tenant import AdmittedRequest, Tenant
from agentflow.errors import NotAuthorized, RateLimited

MINUTE_NS = 60_000_000_000
DAY_NS = 24 * 60 * MINUTE_NS
NANODOLLARS = 1_000_000_000
"""The unit of costs in a dollar."""
COST_PARAM = "max_cost_per_day"
"""The ``param`` of errors about the limit of costs."""
BYTES_PER_TOKEN = 64
"""The bytes of a body that cost about as much to read and encode as one token costs to compute."""
MIN_SWEPT = 64
"""The number of accounts at which idle accounts are first removed."""


@dataclass(frozen=True, slots=True)
class BucketState:
    """The state of a limit. Costs are in nanodollars."""

    limit: int
    remaining: int  # can be used immediately
    reset_ns: int  # the time until the whole limit is available, if nothing else is used


@dataclass(frozen=True, slots=True)
class LimitState:
    """The limits of a tenant. None: there is no such limit."""

    requests: BucketState | None = None
    tokens: BucketState | None = None
    cost: BucketState | None = None


class Bucket:
    """A token bucket with the capacity of one period, by default a minute. One token (or request, or
    nanodollar) counts ``period_ns`` in its level, so that the level grows by ``capacity`` each nanosecond."""

    def __init__(self, capacity: int, now_ns: int, period_ns: int = MINUTE_NS) -> None:
        self.capacity = capacity
        self.period_ns = period_ns
        self._level = capacity * self.period_ns
        self._filled_ns = now_ns

    @classmethod
    def restored(cls, capacity: int, level: int, filled_ns: int, period_ns: int) -> Bucket:
        """A bucket from the numbers that ``kept`` writes."""
        bucket = cls(capacity, filled_ns, period_ns)
        bucket._level = min(level, capacity * period_ns)
        return bucket

    def kept(self) -> bytes:
        """The capacity, the level and the time of the level, as decimal numbers."""
        return b"%d %d %d" % (self.capacity, self._level, self._filled_ns)

    def level(self, now_ns: int) -> int:
        """The tokens in the bucket, times ``period_ns``."""
        self._fill(now_ns)
        return self._level

    def shift(self, change: int, now_ns: int) -> None:
        """Adds ``change`` to the level, up to the capacity."""
        self._fill(now_ns)
        self._level = min(self._level + change, self.capacity * self.period_ns)

    def renew(self, level: int, now_ns: int) -> None:
        """Replaces the level."""
        self._level, self._filled_ns = level, now_ns

    def set_limit(self, capacity: int, now_ns: int) -> None:
        """Changes the rate and the capacity. The level is kept, up to the capacity."""
        self._fill(now_ns)
        self.capacity = capacity
        self._level = min(self._level, capacity * self.period_ns)

    def wait_ns(self, now_ns: int, amount: int = 1) -> int:
        """The time until the bucket has ``amount`` if nothing else is taken; 0 if it has that already."""
        self._fill(now_ns)
        return max(0, -((self._level - amount * self.period_ns) // self.capacity))

    def take(self, amount: int, now_ns: int) -> None:
        """Takes ``amount``, which may exceed the level. A negative amount is given back."""
        self._fill(now_ns)
        self._level = min(self._level - amount * self.period_ns, self.capacity * self.period_ns)

    def state(self, now_ns: int) -> BucketState:
        """The current state. ``remaining`` is 0 if the level is negative."""
        reset_ns = self.wait_ns(now_ns, self.capacity)
        return BucketState(self.capacity, max(0, self._level // self.period_ns), reset_ns)

    def is_full(self, now_ns: int) -> bool:
        """Whether the level is at the capacity."""
        self._fill(now_ns)
        return self._level == self.capacity * self.period_ns

    def _fill(self, now_ns: int) -> None:
        level = self._level + max(0, now_ns - self._filled_ns) * self.capacity
        self._level = min(level, self.capacity * self.period_ns)
        self._filled_ns = max(now_ns, self._filled_ns)


class TenantBuckets:
    """The buckets and unfinished requests of one tenant."""

    def __init__(self) -> None:
        self.requests: Bucket | None = None
        self.tokens: Bucket | None = None
        self.cost: Bucket | None = None
        self.num_unfinished = 0
        self.must_read = False
        """Set when a check fails: shared buckets then read the store again."""

    def set_limits(self, tenant: Tenant, now_ns: int) -> None:
        """Applies the tenant's limits. If a limit is removed, its bucket is kept, so that earlier use counts
        when the limit is set again."""
        self.requests = self._limited(self.requests, tenant.requests_per_minute, now_ns)
        self.tokens = self._limited(self.tokens, tenant.tokens_per_minute, now_ns)
        dollars = tenant.max_cost_per_day
        most = None if dollars is None else math.ceil(dollars * NANODOLLARS)
        self.cost = self._limited(self.cost, most, now_ns, DAY_NS)

    def new_bucket(self, capacity: int, now_ns: int, period_ns: int) -> Bucket:
        """A full bucket."""
        return Bucket(capacity, now_ns, period_ns)

    def _limited(
        self, bucket: Bucket | None, capacity: int | None, now_ns: int, period_ns: int = MINUTE_NS
    ) -> Bucket | None:
        if capacity is None or (bucket is not None and bucket.capacity == capacity):
            return bucket
        if bucket is None:
            return self.new_bucket(capacity, now_ns, period_ns)
        bucket.set_limit(capacity, now_ns)
        return bucket

    def is_idle(self, now_ns: int) -> bool:
        """Whether the account equals a new one."""
        buckets = (self.requests, self.tokens, self.cost)
        return not self.num_unfinished and all(b is None or b.is_full(now_ns) for b in buckets)


class TenantGate:
    """Admits requests within the limits of their tenants. Not thread-safe.

    Args:
        clock_ns: the time in nanoseconds.
        current: returns a tenant with its current limits, or raises ``NotAuthorized``.

    >>> gate = TenantGate()
    >>> with gate.request(tenant, prompt_tokens=len(token_ids)) as admitted:
    ...     async for token_id in generate(token_ids):
    ...         admitted.output_tokens += 1
    """

    def __init__(
        self,
        clock_ns: Callable[[], int] = time.monotonic_ns,
        *,
        current: Callable[[Tenant], Tenant] | None = None,
    ) -> None:
        self._clock_ns = clock_ns
        self._current = current
        self._accounts: dict[str, TenantBuckets] = {}
        self._sweep_at = MIN_SWEPT

    def __len__(self) -> int:
        """The number of accounts."""
        return len(self._accounts)

    def new_account(self) -> TenantBuckets:
        """An account that has used nothing."""
        return TenantBuckets()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """The scope in which the gate is used."""
        yield

    def ready(self, tenant: Tenant) -> Awaitable[None] | None:
        """See ``RequestGate``. None, since all limits are in this process."""
        return None

    def ready_to_pay(self, tenant: Tenant, highest: float) -> Awaitable[None] | None:
        """Returns an awaitable to be awaited immediately before ``reserve_cost``, if one is needed."""
        return None

    def num_unfinished(self, tenant: Tenant) -> int:
        """The tenant's requests that were admitted and have not ended."""
        account = self._accounts.get(tenant.name)
        return 0 if account is None else account.num_unfinished

    def check(self, tenant: Tenant, num_requests: int = 1) -> None:
        """``RateLimited`` unless ``num_requests`` requests would be admitted now."""
        self._admit(tenant, self._clock_ns(), num_requests)

    def is_unlimited(self, tenant: Tenant) -> bool:
        """Whether the tenant has no limit per minute."""
        try:
            now = tenant if self._current is None else self._current(tenant)
        except NotAuthorized:
            return False
        return now.tokens_per_minute is None and now.requests_per_minute is None

    def state(self, tenant: Tenant) -> LimitState:
        """The state of the tenant's limits. A request within the limits per minute is admitted, unless the
        tenant has too many unfinished requests."""
        now_ns = self._clock_ns()
        _, requests, tokens = self._buckets(tenant, now_ns)
        cost = self._cost_bucket(tenant, now_ns)
        return LimitState(
            None if requests is None else requests.state(now_ns),
            None if tokens is None else tokens.state(now_ns),
            None if cost is None else cost.state(now_ns),
        )

    def limits_cost(self, tenant: Tenant) -> bool:
        """Whether the tenant has a limit of costs."""
        return self._cost_bucket(tenant, self._clock_ns()) is not None

    def reserve_cost(self, tenant: Tenant, highest: float) -> Callable[[float | None], None]:
        """Takes the highest cost of a call from the tenant's limit.

        Args:
            tenant: The tenant.
            highest: The highest cost, in US dollars.

        Returns:
            A function to be called with the actual cost when the call ends; it gives back the difference. If
            the cost is unknown (None), nothing is given back.

        Raises:
            RateLimited: The tenant has less left. ``retry_after_s`` is exact if the tenant spends nothing
                until then, and None if the limit itself is lower.
        """
        now_ns = self._clock_ns()
        bucket = self._cost_bucket(tenant, now_ns)
        if bucket is None:
            return lambda cost: None
        amount = math.ceil(highest * NANODOLLARS)
        _check_cost(bucket, amount, now_ns)
        bucket.take(amount, now_ns)

        def settle(cost: float | None) -> None:
            if cost is not None:
                bucket.take(math.ceil(cost * NANODOLLARS) - amount, self._clock_ns())

        return settle

    def check_buckets(self, tenant: Tenant) -> None:
        """``RateLimited`` if a bucket is empty."""
        now_ns = self._clock_ns()
        _, requests, tokens = self._buckets(tenant, now_ns)
        _check_buckets(((requests, "requests", 1), (tokens, "tokens", 1)), now_ns)

    def charge(self, tenant: Tenant, num_tokens: int) -> None:
        """Takes tokens outside of a request. A negative number is given back."""
        now_ns = self._clock_ns()
        _, _, tokens = self._buckets(tenant, now_ns)
        if tokens is not None:
            tokens.take(num_tokens, now_ns)

    @contextmanager
    def request(self, tenant: Tenant, prompt_tokens: int) -> Iterator[AdmittedRequest]:
        """The scope of one request. ``RateLimited`` if it is not admitted; then nothing is charged. The
        error's ``retry_after_s`` is exact if the tenant uses nothing until then, and None if it depends on
        the end of another request."""
        now_ns = self._clock_ns()
        account, requests, tokens = self._admit(tenant, now_ns)
        if requests is not None:
            requests.take(1, now_ns)
        if tokens is not None:
            tokens.take(prompt_tokens, now_ns)
        account.num_unfinished += 1
        admitted = AdmittedRequest(prompt_tokens)
        try:
            yield admitted
        finally:
            account.num_unfinished -= 1
            if tokens is not None:
                computed = admitted.prompt_tokens - min(admitted.cached_tokens, admitted.prompt_tokens)
                tokens.take(computed + admitted.output_tokens - prompt_tokens, self._clock_ns())

    def _admit(
        self, tenant: Tenant, now_ns: int, num_requests: int = 1
    ) -> tuple[TenantBuckets, Bucket | None, Bucket | None]:
        """Returns the result of ``_buckets``. ``RateLimited`` unless ``num_requests`` requests may start."""
        if self._current is not None:
            tenant = self._current(tenant)
        account, requests, tokens = self._buckets(tenant, now_ns)
        _check_unfinished(tenant, account.num_unfinished, num_requests)
        _check_buckets(((requests, "requests", num_requests), (tokens, "tokens", 1)), now_ns)
        return account, requests, tokens

    def _buckets(self, tenant: Tenant, now_ns: int) -> tuple[TenantBuckets, Bucket | None, Bucket | None]:
        """The tenant's account and its current buckets."""
        if self._current is not None:
            tenant = self._current(tenant)
        account = self._account(tenant, now_ns)
        requests = None if tenant.requests_per_minute is None else account.requests
        tokens = None if tenant.tokens_per_minute is None else account.tokens
        return account, requests, tokens

    def _cost_bucket(self, tenant: Tenant, now_ns: int) -> Bucket | None:
        if self._current is not None:
            tenant = self._current(tenant)
        return None if tenant.max_cost_per_day is None else self._account(tenant, now_ns).cost

    def _account(self, tenant: Tenant, now_ns: int) -> TenantBuckets:
        """The tenant's account with its current limits, which may have changed with the keys file."""
        account = self._accounts.get(tenant.name)
        if account is None:
            if len(self._accounts) >= self._sweep_at:
                self._accounts = {n: a for n, a in self._accounts.items() if not a.is_idle(now_ns)}
                self._sweep_at = max(MIN_SWEPT, 2 * len(self._accounts))
            account = self._accounts[tenant.name] = self.new_account()
        account.set_limits(tenant, now_ns)
        return account


def _check_unfinished(tenant: Tenant, num_unfinished: int, num_requests: int) -> None:
    if tenant.max_unfinished is not None and num_unfinished + num_requests > tenant.max_unfinished:
        raise RateLimited(
            f"this API key's tenant has {num_unfinished} unfinished requests, and its limit is "
            f"{tenant.max_unfinished}: wait until some have ended"
        )


def _check_buckets(buckets: Sequence[tuple[Bucket | None, str, int]], now_ns: int) -> None:
    for bucket, what, amount in buckets:
        if bucket is not None and amount > bucket.capacity:
            raise RateLimited(
                f"{amount} {what} at once exceed the limit of this API key's tenant, {bucket.capacity:,} a "
                "minute: send fewer"
            )
    waits = [
        (bucket.wait_ns(now_ns, amount), f"{bucket.capacity:,} {what} a minute")
        for bucket, what, amount in buckets
        if bucket is not None
    ]
    wait_ns = max((wait for wait, _ in waits), default=0)
    if wait_ns:
        limits = " and ".join(limit for wait, limit in waits if wait)
        retry_after_s = wait_ns / 1e9
        error = RateLimited(
            f"this API key's tenant has used up its limit of {limits}: try again in {retry_after_s:,.2f} s"
        )
        error.retry_after_s = retry_after_s
        raise error


def _check_cost(bucket: Bucket, amount: int, now_ns: int) -> None:
    wait_ns = bucket.wait_ns(now_ns, amount)
    if not wait_ns:
        return
    limit = f"its tenant's limit of ${bucket.capacity / NANODOLLARS:g} a day"
    advice = "send a lower max_tokens or a shorter prompt"
    if amount > bucket.capacity:
        raise RateLimited(
            f"this request may cost ${amount / NANODOLLARS:.4g}, more than {limit}: {advice}",
            param=COST_PARAM,
        )
    left = max(0, bucket.state(now_ns).remaining) / NANODOLLARS
    error = RateLimited(
        f"this request may cost ${amount / NANODOLLARS:.4g}, and ${left:.4g} are left of {limit}: try "
        f"again in {wait_ns / 1e9:,.0f} s, or {advice}",
        param=COST_PARAM,
    )
    error.retry_after_s = wait_ns / 1e9
    raise error
