"""Searches a text that still grows for a regular expression, and bounds what that may cost.

The package ``regex`` can say of a text whether its end may be the beginning of a match, and gives up
when a search takes too long; Python's own ``re`` can do neither.
"""

from __future__ import annotations

import functools
import time

import regex

from agentflow.errors import RequestRefused
from agentflow.protocol.stop_regex import MATCHES_NOTHING, refused

# Processor time that one request may take the engine for its searches: so much at once, and so much more
# with each token. A search is a microsecond where the pattern is sound.
BURST_S = 0.05
PER_TOKEN_S = 0.0005


class StopPattern:
    """Reads a text character by character: the text ends where the pattern first has a match in what was
    read so far, before the leftmost one. ``num_safe``: characters at the front that no match can begin in,
    now or later.

    ``BadArgument`` for what is no pattern, or matches the empty text; ``RequestRefused``, then or from any
    ``step``, when it takes too long.
    """

    def __init__(self, source: str) -> None:
        try:
            self._pattern = _compiled(source)
            matches_nothing = self._pattern.search("", timeout=BURST_S) is not None
        except TimeoutError:
            raise _too_slow() from None
        except (regex.error, OverflowError, RecursionError, MemoryError) as error:
            raise refused(f"must be a regular expression that the engine takes ({error})", source) from None
        if matches_nothing:
            raise refused(MATCHES_NOTHING, source)
        self._text = ""
        self._num_read = 0
        self._left_s = BURST_S
        self.num_safe = 0

    def skip(self, new: str) -> None:
        """More text, in which no match may begin; look-behinds see it."""
        self._text += new
        self._num_read = self.num_safe = len(self._text)

    def add(self, new: str) -> None:
        """More text, the next token's: to be read by one ``step`` for each character."""
        self._text += new
        self._left_s = min(BURST_S, self._left_s + PER_TOKEN_S)

    def step(self) -> int | None:
        """Reads one character; where the match begins, if there is one now. Not called after that."""
        self._num_read += 1
        found = self._search()
        if found is not None and not found.partial:
            return int(found.start())
        self.num_safe = self._num_read if found is None else found.start()
        return None

    def _search(self) -> regex.Match[str] | None:
        """A match in what was read, a partial one, or None. ``regex`` looks at the clock on the wall, which
        also runs while others have the processor: only what this thread has used counts."""
        while True:
            began = time.thread_time()
            try:
                found = self._pattern.search(
                    self._text, self.num_safe, self._num_read, partial=True, timeout=self._left_s
                )
                is_done = True
            except TimeoutError:
                is_done = False
            except MemoryError:
                raise _too_slow() from None
            self._left_s -= time.thread_time() - began
            if self._left_s <= 0:
                raise _too_slow()
            if is_done:
                return found


@functools.lru_cache(maxsize=32)  # its own: that of ``regex`` is large, and a pattern may be too
def _compiled(source: str) -> regex.Pattern[str]:
    return regex.compile(source, cache_pattern=False)


def _too_slow() -> RequestRefused:
    return RequestRefused(
        f"stop_regex takes too long to search for: more than {BURST_S * 1000:g} ms of processor time "
        "beyond its share of each token; write it without repeats within repeats, or use stop strings"
    )
