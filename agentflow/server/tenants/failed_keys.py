"""Wrong API keys are few from each address: trying many is refused before they are looked up.

Each address has a bucket of failures, which fills again over a minute. While it is empty, every key from
there is refused but those that were right from there before: so clients that share an address with one that
tries keys go on, and what is tried is not answered. Both tables are bounded; what was used longest ago goes
first. This machine is exempt, because a proxy on it may stand for all clients (``addresses.client_of``)."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

from agentflow.errors import RateLimited
from agentflow.server.http.addresses import client_of
from agentflow.server.tenants.rate_limit import Bucket

FAILURES_PER_MINUTE = 30
MAX_ENTRIES = 10_000


class FailedKeys:
    """For one event loop. ``address``: an IP address as the server sees it, None where it is not known.
    ``clock_ns``: nanoseconds."""

    def __init__(self, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._clock_ns = clock_ns
        self._failures: OrderedDict[str, Bucket] = OrderedDict()
        self._right: OrderedDict[tuple[str, str], None] = OrderedDict()

    def __len__(self) -> int:
        """Entries of the larger table."""
        return max(len(self._failures), len(self._right))

    def check(self, address: str | None, hashed: str) -> None:
        """``RateLimited`` where this address has failed too often to try this key."""
        client = _client(address)
        bucket = self._failures.get(client) if client is not None else None
        if client is None or bucket is None or (client, hashed) in self._right:
            return
        wait_ns = bucket.wait_ns(self._clock_ns())
        if wait_ns:
            error = RateLimited(
                f"too many wrong API keys came from this address: try again in {wait_ns / 1e9:,.2f} s"
            )
            error.retry_after_s = wait_ns / 1e9
            raise error

    def failed(self, address: str | None) -> None:
        """A key from there was wrong."""
        client = _client(address)
        if client is None:
            return
        now_ns = self._clock_ns()
        bucket = self._failures.get(client)
        if bucket is None:
            bucket = self._failures[client] = Bucket(FAILURES_PER_MINUTE, now_ns)
        bucket.take(1, now_ns)
        self._failures.move_to_end(client)
        if len(self._failures) > MAX_ENTRIES:
            self._failures.popitem(last=False)

    def passed(self, address: str | None, hashed: str) -> None:
        """This key from there was right."""
        client = _client(address)
        if client is None:
            return
        self._right[client, hashed] = None
        self._right.move_to_end((client, hashed))
        if len(self._right) > MAX_ENTRIES:
            self._right.popitem(last=False)


def _client(address: str | None) -> str | None:
    return None if address is None else client_of(address)
