"""The search for a ``stop_regex`` in growing text, with limits on processor time.

Used by the engine and the scripted backend: one or many patterns with nested repeats must not occupy their
event loop or step.
"""

from __future__ import annotations

import time

import regex

from agentflow.errors import RequestRefused
from agentflow.protocol.bounds.client_pattern import InvalidPattern, compiled
from agentflow.protocol.bounds.cpu_allowance import CpuAllowance
from agentflow.protocol.sampling import MATCHES_NOTHING, stop_regex_error

# Processor time that one request may use for its searches: a burst, and more with each token. A search with a
# sound pattern takes a microsecond.
BURST_S = 0.05
PER_TOKEN_S = 0.0005
# All searches of one client together: a burst, and then a part of the time. Beyond it, requests fail that
# have used more than ``SOUND_S`` in addition to the time of their tokens.
SHARED_BURST_S = 0.05
SHARED_PART = 0.1
SOUND_S = 0.001


def shared_time() -> CpuAllowance:
    """The shared time of all searches of one client."""
    return CpuAllowance(SHARED_BURST_S, SHARED_PART, time.monotonic)


class StopPattern:
    """Searches growing text. The text ends as soon as the pattern has a match, before the leftmost match.
    ``num_safe``: the number of leading characters in which no match can begin, now or later.

    Uses the package ``regex``, which can tell whether the end of a text may begin a match, and which stops a
    search after a time limit; Python's ``re`` does neither. ``BadArgument`` if the pattern is invalid or
    matches the empty text; ``RequestRefused``, then or from any ``step``, if it takes too long.

    Args:
        source: The pattern.
        shared: The shared time of all searches of the client; None: only this search is limited.
    """

    def __init__(self, source: str, shared: CpuAllowance | None = None) -> None:
        try:
            self._pattern = compiled(source)
            matches_nothing = self._pattern.search("", timeout=BURST_S) is not None
        except TimeoutError:
            raise _too_slow() from None
        except InvalidPattern as error:
            raise stop_regex_error(
                f"must be a regular expression that the engine accepts ({error})", source
            ) from None
        if matches_nothing:
            raise stop_regex_error(MATCHES_NOTHING, source)
        self._text = ""
        self._num_read = 0
        self._shared = shared
        self._left_s = BURST_S
        self.num_safe = 0

    def skip(self, new: str) -> None:
        """Adds text in which no match may begin; look-behinds see it."""
        self._text += new
        self._num_read = self.num_safe = len(self._text)

    def add(self, new: str) -> None:
        """Adds the text of one token. Call ``step`` or ``pass_over`` once for each character."""
        self._text += new
        self._left_s = min(BURST_S, self._left_s + PER_TOKEN_S)

    def step(self) -> int | None:
        """Reads one character. Returns the start of the match, if there is one now; do not call it after
        that."""
        self._num_read += 1
        found = self._search()
        if found is not None and not found.partial:
            return int(found.start())
        self.num_safe = self._num_read if found is None else found.start()
        return None

    def pass_over(self) -> None:
        """Reads one character, at or before which no match may begin."""
        self._num_read += 1
        self.num_safe = self._num_read

    def _search(self) -> regex.Match[str] | None:
        """A match, a partial match or None. The time limit of ``regex`` is wall-clock time, which includes
        other threads' work. Only this thread's processor time counts, so the search may be repeated."""
        while True:
            reserved_s = 0.0
            if self._shared is not None and self._shared.left_s <= 0:
                reserved_s = BURST_S - SOUND_S
                if self._left_s <= reserved_s:
                    raise _too_slow()
            began = time.thread_time()
            try:
                found = self._pattern.search(
                    self._text,
                    self.num_safe,
                    self._num_read,
                    partial=True,
                    timeout=self._left_s - reserved_s,
                )
                is_done = True
            except TimeoutError:
                is_done = False
            except MemoryError:
                raise _too_slow() from None
            took_s = time.thread_time() - began
            self._left_s -= took_s
            if self._shared is not None:
                self._shared.spend(took_s)
            if self._left_s <= 0:
                raise _too_slow()
            if is_done:
                return found


def _too_slow() -> RequestRefused:
    return RequestRefused(
        f"stop_regex takes too long to search for: more than {BURST_S * 1000:g} ms of processor time, alone "
        "or with those of your other requests, beyond its share of each token; avoid nested repeats, or use "
        "stop strings",
        param="stop_regex",
    )
