"""Where a JSON object or list ends, in a text that comes bit by bit. What is in it is not checked."""

from __future__ import annotations

import re

_NEXT = re.compile(r'[][{}"]')
_IN_STRING = re.compile(r'["\\]')


class JsonExtent:
    """Reads an object or a list from its first character on. Each character is looked at once."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._after_backslash = False

    def read(self, text: str) -> int | None:
        """Goes on by ``text``; how much of it belongs to the value, or None where all does and the value
        is not over. Not called after that."""
        at = 0
        while at < len(text):
            if self._after_backslash:
                self._after_backslash = False
                at += 1
                continue
            found = (_IN_STRING if self._in_string else _NEXT).search(text, at)
            if found is None:
                return None
            at = found.end()
            if found[0] == '"':
                self._in_string = not self._in_string
            elif found[0] == "\\":
                self._after_backslash = True
            else:
                self._depth += 1 if found[0] in "[{" else -1
                if self._depth == 0:
                    return at
        return None
