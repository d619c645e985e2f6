"""How much of a provider's rate limits is left, by the headers of its answers.

The provider counts requests and tokens, and refuses a request for which a counter has too little left. An
answer reports the counter at some time between the request and the answer, and nothing about the requests
that were on their way then. ``Counter`` therefore keeps two bounds of the rest: ``low`` is the
least, provided that no other client uses the key, and ``high`` the most. A request is sent when ``low``
suffices, and its expected tokens are taken from both; its usage corrects them.

Counters are token buckets, which refill all the time, or windows, which are full again at a time.
"""

from __future__ import annotations

import email.utils
import math
import re
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Final, Literal, NamedTuple

from agentflow.protocol.events import Usage

FIRST_TOKENS_PER_CHAR = 0.25
FIRST_OUTPUT = 256
"""The output that is expected before one was seen."""
_NEW_SHARE = 0.1  # of the newest usage in the mean
_SHARE_MARGIN = 1.5
_CAUTION = 0.99  # of the rate, for the lowest estimate
_LIMIT_S = 60.0  # the time in which a counter refills, if no answer reports it
_ON_THE_WAY_S = 10.0
_MIN_RESOLUTIONS = 10  # a shorter reset is too coarse for a first rate
_SHORTEST_WAIT_S = 0.01
_SLOWEST_S = 32 * 86_400.0
_LEAST_MOVE_S = 5.0  # of the time at which a counter is full, to tell a bucket from a window
_ROUNDED_TO = 1_000  # Anthropic rounds tokens to the nearest thousand
_MIN_ROUNDED_LIMIT = 10_000
_LONGEST_DIGITS = 15
_LEAST = 1e-6  # below the rounding of floats

CounterName = Literal["requests", "tokens", "input", "output"]


class _Headers(NamedTuple):
    """The names of the headers of one counter."""

    counter: CounterName
    limit: str
    remaining: str
    reset: str


def _name_headers(counter: CounterName, pattern: str) -> _Headers:
    return _Headers(counter, *[pattern.format(part) for part in ("limit", "remaining", "reset")])


# The first of a counter that an answer has is read.
_HEADERS: Final = (
    _name_headers("requests", "x-ratelimit-{}-requests"),  # OpenAI and most others
    _name_headers("requests", "anthropic-ratelimit-requests-{}"),
    _name_headers("requests", "x-ratelimit-{}"),  # OpenRouter
    _name_headers("tokens", "x-ratelimit-{}-tokens"),
    _name_headers("tokens", "anthropic-ratelimit-tokens-{}"),
    _name_headers("input", "anthropic-ratelimit-input-tokens-{}"),
    _name_headers("output", "anthropic-ratelimit-output-tokens-{}"),
)


class Demand(NamedTuple):
    """Properties of a request that are known before it is sent.

    Attributes:
        num_chars: About the characters of its prompt.
        max_output: The limit of its output, in tokens; None: it has none.
        usage: Returns the usage after the answer; None: it is not known.
    """

    num_chars: int
    max_output: int | None = 0
    usage: Callable[[], Usage | None] = lambda: None


class Reading(NamedTuple):
    """A counter by an answer's headers. ``reset_s``: until it is full; None: unknown."""

    limit: float
    remaining: float
    reset_s: float | None
    resolution_s: float


class _Part:
    """The part that one request takes from a counter.

    Attributes:
        ahead: Is counted when the provider receives the request.
        after: Is counted by its end: the output.
        most: The limit of its output.
        known_ahead, known_after: The provider's count at least, when the request was sent.
        begun_after: The output of the requests whose answers had begun then.
        total_ahead, total_most: Of all requests up to this one.
        is_read: An answer to it has reported the counter.
    """

    __slots__ = (
        "after",
        "ahead",
        "begun_after",
        "is_read",
        "known_after",
        "known_ahead",
        "most",
        "number",
        "sent_at",
        "total_ahead",
        "total_most",
    )

    def __init__(self, ahead: float, after: float, most: float) -> None:
        self.ahead, self.after, self.most = ahead, after, most
        self.number = 0
        self.sent_at = self.known_ahead = self.known_after = self.begun_after = 0.0
        self.total_ahead = self.total_most = 0.0
        self.is_read = False


class _Seen(NamedTuple):
    """The latest reading of a counter. ``part``: of the request whose answer had it."""

    part: _Part
    reading: Reading
    at: float


class Counter:
    """The rest of one limit. Until an answer reports it, it is unlimited.

    Attributes:
        limit: The rest when nothing is used; None: unknown.
        low: The rest at least.
        high: The rest at most.
        rate: How much it refills in a second.
    """

    def __init__(self) -> None:
        self.limit: float | None = None
        self.low = self.high = math.inf
        self.rate = math.inf
        self._mean_share = 1.0
        self._is_window = False
        self._full_at: float | None = None  # of a window: when it begins again
        self._at = 0.0  # the time of the bounds
        self._sent_ahead = self._sent_after = self._known_ahead = self._known_after = 0.0
        self._begun_after = self._sent_most = 0.0
        self._top = math.inf  # the rest if the provider has counted the output of the answers that run
        self._num_sent = 0
        self._sent_at = -math.inf
        self._seen: _Seen | None = None
        self._anchor: _Seen | None = None  # an earlier reading

    @property
    def share(self) -> float:
        """The part of a request's ``max_tokens`` that the provider counts."""
        return 1.0 if self._mean_share > 0.5 else max(0.0, _SHARE_MARGIN * self._mean_share)

    def wait_s(self, amount: float, now: float, count: int = 1) -> float:
        """The seconds until ``count`` requests that each take ``amount`` may be sent; 0: now."""
        if self.limit is None:
            return 0.0
        self._advance(now)
        missing = min(amount, self.limit) * count - self.low
        if missing <= _LEAST:
            return 0.0
        if self._is_window and self._full_at is not None and self._full_at > now:
            return self._full_at - now
        return max(_SHORTEST_WAIT_S, missing / (_CAUTION * self.rate))

    def send(self, ahead: float, after: float, most: float, now: float) -> _Part:
        """Takes the part of a request that is sent now."""
        self._advance(now)
        part = _Part(ahead, after, most)
        part.sent_at, part.known_ahead, part.known_after = now, self._known_ahead, self._known_after
        part.begun_after = self._begun_after
        self._sent_ahead += ahead
        self._sent_after += after
        self._sent_most += most
        self._num_sent += 1
        self._sent_at = now
        part.number, part.total_ahead, part.total_most = self._num_sent, self._sent_ahead, self._sent_most
        self.low -= ahead + after
        self.high -= ahead + after
        self._top -= ahead + after
        return part

    def read(self, part: _Part, reading: Reading, now: float) -> None:
        """The headers of the answer to a request have arrived."""
        self._advance(now)
        is_first, self.limit = self.limit is None, reading.limit
        self._learn_rate(reading, is_first=is_first)
        in_order = self._seen is None or part.number > self._seen.part.number
        if in_order:
            self._learn_kind(part, reading, now)
            if self._seen is not None:
                self._learn_share(self._seen, part, reading)
        if reading.reset_s is not None and in_order:
            self._full_at = now + reading.reset_s
        # Requests that were not answered when this one was sent may be missing in the reported number, and so
        # may the output of those that had not ended. Providers that count the output in advance have it in
        # the number already: subtracting it again may at most halve the rest.
        unknown_ahead = self._sent_ahead - part.known_ahead - part.ahead
        unknown_after = min(self._sent_after - part.known_after, self.limit / 2)
        low = reading.remaining - unknown_ahead - unknown_after
        if reading.limit >= _MIN_ROUNDED_LIMIT and reading.remaining % _ROUNDED_TO == 0:
            low -= _ROUNDED_TO / 2
        unbegun_after = self._sent_after - part.begun_after - part.after
        self._top = reading.remaining - unknown_ahead - unbegun_after
        refilled = 0.0 if self._is_window else self.rate * (now - part.sent_at)
        high = min(self.limit, reading.remaining + refilled)
        if not in_order:
            high = min(high, self.high)
        self.low = min(low, high) if is_first else min(max(self.low, low), high)
        self.high = high
        part.is_read = True
        if in_order:
            self._seen = _Seen(part, reading, now)

    def answered(self, part: _Part) -> None:
        """The answer to a request has begun: the provider has counted the request."""
        self._known_ahead += part.ahead
        self._begun_after += part.after
        part.known_ahead = math.inf  # once

    def refused(self, part: _Part, now: float) -> None:
        """A request was refused, and was not counted. Perhaps ``max_tokens`` counts in advance after all."""
        self.end(part, 0.0, 0.0, now)
        if part.most:
            self._mean_share, self._seen = 1.0, None

    def end(self, part: _Part, used_ahead: float | None, used_after: float | None, now: float) -> None:
        """A request has ended.

        Args:
            part: The part of the request.
            used_ahead: The actual use in place of ``ahead``; None: not known.
            used_after: The actual use in place of ``after``.
            now: The time.
        """
        self._advance(now)
        if part.known_ahead != math.inf:
            self.answered(part)
        self._known_after += part.after
        back = 0.0 if used_after is None else part.after - used_after
        if part.is_read:  # the reported number has the prompt
            self.low = max(self.low, min(self.low + back, self._top)) if back > 0 else self.low + back
            return
        back += 0.0 if used_ahead is None else part.ahead - used_ahead
        self.low, self.high, self._top = self.low + back, self.high + back, self._top + back

    def _advance(self, now: float) -> None:
        """Refills the counter."""
        elapsed, self._at = max(0.0, now - self._at), max(now, self._at)
        if self.limit is None:
            return
        if not self._is_window or self._full_at is None:
            # A full counter does not refill while requests are on their way to it.
            is_recent = now - self._sent_at < _ON_THE_WAY_S
            full = self.limit - (self._sent_ahead - self._known_ahead if is_recent else 0.0)
            self.low = max(self.low, min(full, self.low + _CAUTION * self.rate * elapsed))
            self.high = min(self.limit, self.high + self.rate * elapsed)
            self._top = min(self.limit, self._top + _CAUTION * self.rate * elapsed)
        elif now >= self._full_at:
            on_their_way = self._sent_ahead - self._known_ahead
            self.low, self.high, self._top = self.limit - on_their_way, self.limit, self.limit
            self._full_at = None  # until an answer reports the end of the next window, it refills evenly

    def _learn_rate(self, reading: Reading, *, is_first: bool) -> None:
        """Narrows the rate by the used part and the time of its refill, both of which are rounded."""
        if is_first:
            self.rate = reading.limit / _LIMIT_S
        if reading.reset_s is None or reading.remaining >= reading.limit:
            return
        missing = reading.limit - reading.remaining
        if is_first and reading.reset_s >= _MIN_RESOLUTIONS * reading.resolution_s:
            self.rate = missing / (reading.reset_s + reading.resolution_s)
        least = (missing - 1) / (reading.reset_s + reading.resolution_s)
        most = missing / max(reading.reset_s - reading.resolution_s, 1e-3)
        self.rate = max(min(max(self.rate, least), most), reading.limit / _SLOWEST_S)

    def _learn_kind(self, part: _Part, reading: Reading, now: float) -> None:
        """Learns whether the counter is a window. A bucket is full the later, the more was taken, and the end
        of a window does not move."""
        if reading.reset_s is None:
            return
        if self._anchor is None or self._anchor.reading.reset_s is None:
            self._anchor = _Seen(part, reading, now)
            return
        then = self._anchor
        assert then.reading.reset_s is not None
        expected_s = now - then.at + (then.reading.remaining - reading.remaining) / self.rate
        unsure_s = max(reading.resolution_s, then.reading.resolution_s, now - part.sent_at)
        if expected_s < max(_LEAST_MOVE_S, 4 * unsure_s):
            return
        moved_s = now + reading.reset_s - then.at - then.reading.reset_s
        if abs(moved_s) < 0.2 * expected_s:
            self._is_window = True
        elif abs(moved_s - expected_s) < 0.5 * expected_s:
            self._is_window = False
        self._anchor = _Seen(part, reading, now)

    def _learn_share(self, seen: _Seen, part: _Part, reading: Reading) -> None:
        """Learns from two readings how much of ``max_tokens`` counts."""
        most = part.total_most - seen.part.total_most
        if most > 0 and reading.remaining < reading.limit:
            refilled = 0.0 if self._is_window else self.rate * (part.sent_at - seen.part.sent_at)
            fell = seen.reading.remaining - reading.remaining + refilled
            counted = fell - (part.total_ahead - seen.part.total_ahead)
            sample = min(3.0, max(-1.0, counted / most))
            self._mean_share += _NEW_SHARE * (sample - self._mean_share)


class SentRequest(NamedTuple):
    """A request that was sent, with its part of each counter."""

    demand: Demand
    parts: Mapping[CounterName, _Part]


class RateLimits:
    """The counters of one key and model, and the average use of its requests."""

    def __init__(self) -> None:
        self.counters: dict[CounterName, Counter] = {
            "requests": Counter(),
            "tokens": Counter(),
            "input": Counter(),
            "output": Counter(),
        }
        self._tokens_per_char = FIRST_TOKENS_PER_CHAR
        self._paid_per_char = FIRST_TOKENS_PER_CHAR  # without those that the provider had in its cache
        self._output = float(FIRST_OUTPUT)

    @property
    def are_known(self) -> bool:
        """Whether an answer has reported a limit."""
        return any(counter.limit is not None for counter in self.counters.values())

    def wait_s(self, demand: Demand, now: float, count: int = 1) -> float:
        """The seconds until ``count`` requests like this may be sent; 0: now."""
        if not self.are_known:
            return 0.0
        return max(
            self.counters[name].wait_s(ahead + after, now, count)
            for name, (ahead, after, _) in self._amounts(demand).items()
        )

    def send(self, demand: Demand, now: float) -> SentRequest:
        """Takes the expected tokens of a request that is sent now."""
        amounts = self._amounts(demand)
        return SentRequest(
            demand, {name: self.counters[name].send(*taken, now) for name, taken in amounts.items()}
        )

    def answered(self, sent: SentRequest, headers: Mapping[str, str], now: float) -> None:
        """The headers of an answer have arrived, also of a refusal."""
        for name, reading in read_headers(headers).items():
            self.counters[name].read(sent.parts[name], reading, now)
        for name, part in sent.parts.items():
            self.counters[name].answered(part)

    def end(self, sent: SentRequest, now: float, *, is_refused: bool = False) -> None:
        """A request has ended. ``is_refused``: the provider has not generated anything."""
        if is_refused:
            for name, part in sent.parts.items():
                self.counters[name].refused(part, now)
            return
        usage = sent.demand.usage()
        used: dict[CounterName, tuple[float | None, float | None]] = {}
        if usage is not None:
            paid = max(0, usage.prompt_tokens - usage.cached_tokens)
            self._learn(sent.demand, usage, paid)
            used = {
                "tokens": (usage.prompt_tokens, usage.output_tokens),
                "input": (paid, 0.0),
                "output": (0.0, usage.output_tokens),
            }
        for name, part in sent.parts.items():
            self.counters[name].end(part, *used.get(name, (None, None)), now)

    def _learn(self, demand: Demand, usage: Usage, paid: int) -> None:
        """``paid``: the tokens of the prompt that the provider did not have in its cache."""
        if demand.num_chars > 0 and usage.prompt_tokens > 0:
            self._tokens_per_char += _NEW_SHARE * (
                usage.prompt_tokens / demand.num_chars - self._tokens_per_char
            )
            self._paid_per_char += _NEW_SHARE * (paid / demand.num_chars - self._paid_per_char)
        if demand.max_output != 0:
            self._output += _NEW_SHARE * (usage.output_tokens - self._output)

    def _amounts(self, demand: Demand) -> dict[CounterName, tuple[float, float, float]]:
        """A request's use of each counter: ahead, after, and the limit of its output."""
        num_read = demand.num_chars * self._tokens_per_char
        most = math.inf if demand.max_output is None else float(demand.max_output)
        written = min(most, self._output)
        # OpenAI counts ``max_tokens`` in advance; the count of others is learned. Anthropic's requests always
        # have one, which does not count.
        tokens, counted = self.counters["tokens"], 0.0 if most == math.inf else most
        in_advance = max(written, tokens.share * counted)
        return {
            "requests": (1.0, 0.0, 0.0),
            "tokens": (num_read, in_advance, counted),
            "input": (demand.num_chars * self._paid_per_char, 0.0, 0.0),
            "output": (0.0, written, 0.0),
        }


def read_headers(headers: Mapping[str, str]) -> dict[CounterName, Reading]:
    """The counters that an answer with these headers reports. Values that make no sense are left out. A reset
    at a time of the day is relative to the answer's ``date``, or else to the clock.

    >>> found = read_headers({"x-ratelimit-limit-tokens": "9", "x-ratelimit-remaining-tokens": "4"})
    >>> found["tokens"].limit, found["tokens"].remaining
    (9.0, 4.0)
    """
    found: dict[CounterName, Reading] = {}
    now_s: float | None = None
    if not any("ratelimit" in name for name in headers):
        return found
    for names in _HEADERS:
        if names.counter in found or (value := headers.get(names.remaining)) is None:
            continue
        remaining, limit = _amount(value), _amount(headers.get(names.limit, "1"))
        if remaining is None or limit is None or limit < 1:
            continue  # servers without a limit report 0 or -1
        value = headers.get(names.reset, "")
        if now_s is None and not _is_duration(value):
            now_s = _date_s(headers.get("date", ""))
        seconds = reset_s(value, now_s)
        resolution_s = 0.01 if "." in value and _is_duration(value) else 0.001 if "ms" in value else 1.0
        found[names.counter] = Reading(max(limit, remaining), max(0.0, remaining), seconds, resolution_s)
    return found


_NUMBER = re.compile(rf"-?\d{{1,{_LONGEST_DIGITS}}}(?:\.\d{{1,{_LONGEST_DIGITS}}})?")
_UNITS = {
    "d": 86_400.0,
    "h": 3_600.0,
    "m": 60.0,
    "s": 1.0,
    "ms": 1e-3,
    "us": 1e-6,
    "µs": 1e-6,
    "μs": 1e-6,
    "ns": 1e-9,
}
_DURATION_PART = re.compile(r"(\d{1,15}(?:\.\d{1,15})?)(ms|us|µs|μs|ns|d|h|m|s)")
_FIRST_EPOCH_S = 1e9
_FIRST_EPOCH_MS = 1e12


def _amount(text: str) -> float | None:
    return float(text) if _NUMBER.fullmatch(text.strip()) else None


def _is_duration(value: str) -> bool:
    return "T" not in value and ":" not in value


def _date_s(value: str) -> float:
    """The Unix time of a ``date`` header, or of the clock: the provider's clock may be wrong, too."""
    try:
        return email.utils.parsedate_to_datetime(value).timestamp()
    except (ValueError, OverflowError):
        return time.time()


def reset_s(value: str, now_s: float | None = None) -> float | None:
    """The seconds until a limit is reset: from a duration in the form of Go, a number of seconds, a Unix time
    in seconds or milliseconds, or a time of RFC 3339. None for anything else.

    Args:
        value: The value of a header.
        now_s: Unix time, by default from the clock.

    >>> reset_s("1m30s"), reset_s("250ms"), reset_s("12"), reset_s("soon")
    (90.0, 0.25, 12.0, None)
    """
    value = value.strip()
    if _NUMBER.fullmatch(value):
        seconds = float(value)
        if seconds >= _FIRST_EPOCH_S:
            now_s = time.time() if now_s is None else now_s
            seconds = (seconds / 1_000 if seconds >= _FIRST_EPOCH_MS else seconds) - now_s
        return max(0.0, seconds)
    parts = _DURATION_PART.findall(value)
    if parts and "".join([number + unit for number, unit in parts]) == value:
        return math.fsum([float(number) * _UNITS[unit] for number, unit in parts])
    try:
        at = datetime.fromisoformat(value)
    except ValueError:
        return None
    if at.tzinfo is None:
        return None
    try:
        return max(0.0, at.timestamp() - (time.time() if now_s is None else now_s))
    except (OverflowError, ValueError):
        return None
