"""The headers that show a client the remaining limits of its tenant, in the format of each API.

They show the buckets that admit requests (``rate_limit``): while at least 1 of each limit remains, another
request is admitted. A limit that the tenant does not have has no headers.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta

from agentflow.server.tenants.rate_limit import NANODOLLARS, BucketState, LimitState

ANY_LIMITS = LimitState(BucketState(0, 0, 0), BucketState(0, 0, 0), BucketState(0, 0, 0))
"""All limits: a source of the names of all headers."""
_MS_NS = 1_000_000
_MINUTE_MS = 60_000
_HOUR_MS = 3_600_000
_SECOND_NS = 1_000_000_000
# Input and output are charged to one bucket, so each of the two has all that remains.
_ANTHROPIC_TOKENS = ("tokens", "input-tokens", "output-tokens")


def openai_limit_headers(limits: LimitState) -> dict[bytes, bytes]:
    """``x-ratelimit-{limit,remaining,reset}-{requests,tokens,cost}``; the reset is a duration such as
    ``6m0s``."""
    headers: dict[bytes, bytes] = {}
    for name, one in (("requests", limits.requests), ("tokens", limits.tokens), ("cost", limits.cost)):
        if one is not None:
            limit, remaining = _amounts(name, one)
            values = ("limit", limit), ("remaining", remaining), ("reset", duration(one.reset_ns))
            headers |= {f"x-ratelimit-{key}-{name}".encode(): f"{value}".encode() for key, value in values}
    return headers


def anthropic_limit_headers(limits: LimitState, now_s: float | None = None) -> dict[bytes, bytes]:
    """``anthropic-ratelimit-{requests,tokens,input-tokens,output-tokens,cost}-{limit,remaining,reset}``; the
    reset is a time in RFC 3339. ``now_s``: Unix time, by default from the clock."""
    now_s = time.time() if now_s is None else now_s
    headers: dict[bytes, bytes] = {}
    of_tokens = [(name, limits.tokens) for name in _ANTHROPIC_TOKENS]
    shown = [("requests", limits.requests), *of_tokens, ("cost", limits.cost)]
    for name, one in shown:
        if one is not None:
            limit, remaining = _amounts(name, one)
            values = ("limit", limit), ("remaining", remaining), ("reset", _time(one, now_s))
            headers |= {
                f"anthropic-ratelimit-{name}-{key}".encode(): f"{value}".encode() for key, value in values
            }
    return headers


def _amounts(name: str, one: BucketState) -> tuple[str, str]:
    """The limit and its remainder; costs in US dollars, rounded down."""
    if name != "cost":
        return f"{one.limit}", f"{one.remaining}"
    return _dollars(one.limit), _dollars(one.remaining)


def _dollars(amount: int) -> str:
    whole, part = divmod(amount, NANODOLLARS)
    return f"{whole}.{part:09}"[:-3]


def duration(ns: int) -> str:
    """A duration in the format of OpenAI's API, rounded up to milliseconds.

    >>> duration(0), duration(120_000_000), duration(1_500_000_000), duration(360_000_000_000)
    ('0s', '120ms', '1.5s', '6m0s')
    """
    ms = -(-ns // _MS_NS)
    if 0 < ms < 1_000:
        return f"{ms}ms"
    hours, ms_of_hour = divmod(ms, _HOUR_MS)
    minutes, ms_of_minute = divmod(ms_of_hour, _MINUTE_MS)
    seconds = f"{ms_of_minute / 1_000:.3f}".rstrip("0").rstrip(".") + "s"
    if hours:
        return f"{hours}h{minutes}m{seconds}"
    return f"{minutes}m{seconds}" if minutes else seconds


def _time(one: BucketState, now_s: float) -> str:
    """When the whole limit is available again, rounded up to seconds."""
    ns = int(now_s * _SECOND_NS) + one.reset_ns
    whole_s = -(-ns // _SECOND_NS)
    return (datetime.fromtimestamp(0, UTC) + timedelta(seconds=whole_s)).strftime("%Y-%m-%dT%H:%M:%SZ")
