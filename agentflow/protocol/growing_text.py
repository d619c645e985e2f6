"""A text that arrives in parts."""

from __future__ import annotations

import io


class GrowingText:
    """A text that grows. Adding a part, or reading one, takes time linear in the part.

    >>> text = GrowingText()
    >>> text.put(0, "Plants turn")
    >>> text.put(11, " light into sugar")
    >>> text.part(7, 10), len(text), str(text)
    ('turn light', 28, 'Plants turn light into sugar')
    """

    __slots__ = ("_growing", "_num_chars", "_text")

    def __init__(self, text: str = "") -> None:
        self._text = text
        self._growing: io.StringIO | None = None
        self._num_chars = len(text)

    def __len__(self) -> int:
        return self._num_chars

    def __str__(self) -> str:
        return self._text if self._growing is None else self._growing.getvalue()

    def put(self, at: int, part: str) -> None:
        """The text continues with ``part`` at character ``at``, in the place of the characters there."""
        if self._growing is None:
            self._growing, text = io.StringIO(), self._text
            self._growing.write(text)
            self._text = ""
        at = min(at, self._num_chars)
        self._growing.seek(at)
        if at < self._num_chars:
            self._growing.truncate()
        self._growing.write(part)
        self._num_chars = at + len(part)

    def end(self) -> None:
        """No more parts come: the text is kept in less memory."""
        self._text, self._growing = str(self), None

    def part(self, at: int, most: int = -1) -> str:
        """The text from character ``at`` on, which may be its end, or at most ``most`` characters of it."""
        if self._growing is None:
            return self._text[at:] if most < 0 else self._text[at : at + most]
        self._growing.seek(at)
        return self._growing.read(most)
