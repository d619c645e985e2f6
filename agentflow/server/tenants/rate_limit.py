"""Rate limits of a tenant: requests and tokens per minute, and unfinished requests.

Each limit per minute is a token bucket that has the capacity of one minute, begins full, and refills at a
constant rate. A request takes one from the bucket of requests. It needs a positive level in the bucket of
tokens, from which its prompt is taken at its start. At its end, its output is taken and the cached part of
its prompt is given back: which part is cached is not known before. Nothing is reserved for output, so the
level can become negative; then the tenant's requests are rejected until it is positive again. In any t
minutes a tenant starts at most (1 + t) times its requests per minute.

A large body is charged before it is read, with one token for each ``BYTES_PER_TOKEN``. Of these, as
many are given back as its prompt is charged.

Times are in nanoseconds and levels in fractions of a token as integers, so that nothing is rounded.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from agentflow.engine.tenant import AdmittedRequest, Tenant
from agentflow.errors import NotAuthorized, RateLimited

MINUTE_NS = 60_000_000_000
BYTES_PER_TOKEN = 64
"""The bytes of a body that cost about as much to read and encode as one token costs to compute."""
MIN_SWEPT = 64
"""The number of accounts at which idle ones are first removed."""


@dataclass(frozen=True, slots=True)
class BucketState:
    """The state of a limit per minute."""

    limit: int
    remaining: int  # can be used immediately
    reset_ns: int  # the time until the whole limit remains, if nothing else is used


@dataclass(frozen=True, slots=True)
class LimitState:
    """The limits per minute of a tenant. None: there is no such limit."""

    requests: BucketState | None = None
    tokens: BucketState | None = None


class Bucket:
    """A token bucket with the capacity of one minute. One token (or request) counts ``MINUTE_NS`` in its
    level, so that it gains ``per_minute`` each nanosecond."""

    def __init__(self, per_minute: int, now_ns: int) -> None:
        self.per_minute = per_minute
        self._level = per_minute * MINUTE_NS
        self._filled_ns = now_ns

    def set_limit(self, per_minute: int, now_ns: int) -> None:
        """Changes the rate and the capacity. The level stays, up to the capacity."""
        self._fill(now_ns)
        self.per_minute = per_minute
        self._level = min(self._level, per_minute * MINUTE_NS)

    def wait_ns(self, now_ns: int, amount: int = 1) -> int:
        """The time until the bucket has ``amount`` if nothing else is taken; 0 if it has."""
        self._fill(now_ns)
        return max(0, -((self._level - amount * MINUTE_NS) // self.per_minute))

    def take(self, amount: int, now_ns: int) -> None:
        """Takes ``amount``, also more than the level. A negative amount is given back."""
        self._fill(now_ns)
        self._level = min(self._level - amount * MINUTE_NS, self.per_minute * MINUTE_NS)

    def state(self, now_ns: int) -> BucketState:
        """The current state. An empty bucket has nothing remaining, also if its level is negative."""
        reset_ns = self.wait_ns(now_ns, self.per_minute)
        return BucketState(self.per_minute, max(0, self._level // MINUTE_NS), reset_ns)

    def is_full(self, now_ns: int) -> bool:
        """Whether the level is at the capacity."""
        self._fill(now_ns)
        return self._level == self.per_minute * MINUTE_NS

    def _fill(self, now_ns: int) -> None:
        level = self._level + max(0, now_ns - self._filled_ns) * self.per_minute
        self._level = min(level, self.per_minute * MINUTE_NS)
        self._filled_ns = max(now_ns, self._filled_ns)


class _Account:
    """The buckets and unfinished requests of one tenant."""

    def __init__(self) -> None:
        self.requests: Bucket | None = None
        self.tokens: Bucket | None = None
        self.num_unfinished = 0

    def set_limits(self, tenant: Tenant, now_ns: int) -> None:
        """Applies the tenant's limits. A bucket without a limit is kept, so that earlier use counts when
        there is a limit again."""
        self.requests = _limited(self.requests, tenant.requests_per_minute, now_ns)
        self.tokens = _limited(self.tokens, tenant.tokens_per_minute, now_ns)

    def is_idle(self, now_ns: int) -> bool:
        """Whether it equals a new account."""
        buckets = (self.requests, self.tokens)
        return not self.num_unfinished and all(b is None or b.is_full(now_ns) for b in buckets)


def _limited(bucket: Bucket | None, per_minute: int | None, now_ns: int) -> Bucket | None:
    if per_minute is None or (bucket is not None and bucket.per_minute == per_minute):
        return bucket
    if bucket is None:
        return Bucket(per_minute, now_ns)
    bucket.set_limit(per_minute, now_ns)
    return bucket


class TenantGate:
    """Admits requests within the limits of their tenants. For one event loop.

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
        self._accounts: dict[str, _Account] = {}
        self._sweep_at = MIN_SWEPT

    def __len__(self) -> int:
        """The number of accounts."""
        return len(self._accounts)

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
        """The state of the tenant's limits per minute. A request within both of them is admitted, unless too
        many are unfinished."""
        now_ns = self._clock_ns()
        _, requests, tokens = self._buckets(tenant, now_ns)
        return LimitState(
            None if requests is None else requests.state(now_ns),
            None if tokens is None else tokens.state(now_ns),
        )

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
        """The scope of one request. ``RateLimited`` if it is not admitted, which costs nothing. Its
        ``retry_after_s`` is exact if the tenant uses nothing until then, and None if it depends on the end of
        another request."""
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
    ) -> tuple[_Account, Bucket | None, Bucket | None]:
        """The result of ``_buckets``, if ``num_requests`` requests may start."""
        if self._current is not None:
            tenant = self._current(tenant)
        account, requests, tokens = self._buckets(tenant, now_ns)
        _check_unfinished(tenant, account.num_unfinished, num_requests)
        _check_buckets(((requests, "requests", num_requests), (tokens, "tokens", 1)), now_ns)
        return account, requests, tokens

    def _buckets(self, tenant: Tenant, now_ns: int) -> tuple[_Account, Bucket | None, Bucket | None]:
        """The tenant's account and its current buckets."""
        if self._current is not None:
            tenant = self._current(tenant)
        account = self._account(tenant, now_ns)
        requests = None if tenant.requests_per_minute is None else account.requests
        tokens = None if tenant.tokens_per_minute is None else account.tokens
        return account, requests, tokens

    def _account(self, tenant: Tenant, now_ns: int) -> _Account:
        """The tenant's account with its current limits, which may have changed with the keys file."""
        account = self._accounts.get(tenant.name)
        if account is None:
            if len(self._accounts) >= self._sweep_at:
                self._accounts = {n: a for n, a in self._accounts.items() if not a.is_idle(now_ns)}
                self._sweep_at = max(MIN_SWEPT, 2 * len(self._accounts))
            account = self._accounts[tenant.name] = _Account()
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
        if bucket is not None and amount > bucket.per_minute:
            raise RateLimited(
                f"{amount} {what} at once exceed the limit of this API key's tenant, {bucket.per_minute:,} a "
                "minute: send fewer"
            )
    waits = [
        (bucket.wait_ns(now_ns, amount), f"{bucket.per_minute:,} {what} a minute")
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
