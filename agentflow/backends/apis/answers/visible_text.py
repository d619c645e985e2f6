"""The part of a streamed text that programs may see: the text up to its first stop.

A provider applies the stops too, but not each of them in the same way, so that all text passes here.
"""

from __future__ import annotations

from collections.abc import Sequence

from agentflow.protocol.text.stop_pattern import StopPattern


class StopFilter:
    """Holds text back while it may belong to a stop, and ends it at the first stop that is complete.

    Args:
        stops: Strings that end the text.
        stop_regex: A regular expression that ends the text.

    >>> visible = StopFilter(["END"])
    >>> visible.push("one E"), visible.push("ach two EN"), visible.push("D three"), visible.is_stopped
    ('one ', 'Each two ', '', True)
    """

    def __init__(self, stops: Sequence[str] = (), stop_regex: str | None = None) -> None:
        self._stops = tuple(stops)
        self._pattern = None if stop_regex is None else StopPattern(stop_regex)
        self._text = ""  # all of it with a pattern, otherwise the part that is held back
        self._num_given = 0  # the characters of ``_text`` that were given
        self._num_read = 0
        self.is_stopped = False

    def push(self, delta: str) -> str:
        """The text that has become visible."""
        if self.is_stopped:
            return ""
        if self._pattern is not None:
            return self._searched(self._pattern, delta)
        if not self._stops:
            return delta
        text = self._text + delta
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            end = min(found)[0]
            self.is_stopped, self._text = True, ""
            return text[: min(at for stop_end, at in found if stop_end == end)]
        num_held = max(_num_begun(text, stop) for stop in self._stops)
        self._text = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def finish(self) -> str:
        """The text that was held back, at the end."""
        if self.is_stopped:
            return ""
        rest, self._text = self._text[self._num_given :], ""
        self._num_given = 0
        return rest

    def _searched(self, pattern: StopPattern, delta: str) -> str:
        self._text += delta
        pattern.add(delta)
        for end in range(self._num_read + 1, len(self._text) + 1):
            begins = [end - len(stop) for stop in self._stops if self._text.endswith(stop, 0, end)]
            found = pattern.step()
            if found is not None:
                begins.append(found)
            if begins:
                self.is_stopped = True
                return self._give(min(begins))
        self._num_read = len(self._text)
        num_held = max([_num_begun(self._text, stop) for stop in self._stops], default=0)
        return self._give(min(pattern.num_safe, len(self._text) - num_held))

    def _give(self, end: int) -> str:
        start, self._num_given = self._num_given, max(self._num_given, end)
        return self._text[start : self._num_given]


def _num_begun(text: str, stop: str) -> int:
    """The length of the longest end of ``text`` with which ``stop`` begins.

    >>> _num_begun("two E", "END"), _num_begun("two", "END")
    (1, 0)
    """
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
