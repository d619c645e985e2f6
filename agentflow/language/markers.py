"""References inside ordinary strings: ``f"Answer: {s['x']}"`` keeps ``s['x']`` a reference.

Formatting a variable gives a marker that carries the session's 128-bit nonce; the client's own text
op finds it again. Text from elsewhere cannot contain a marker without knowing the nonce. The
server never looks for markers.
"""

from __future__ import annotations

import re
import secrets
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from agentflow.errors import BadArgument, StateClosed

if TYPE_CHECKING:
    from agentflow.language.variable import Reference

_OPEN, _CLOSE = "\u27e6af:", "\u27e7"
_NUM_DIGITS = 32


class Markers:
    """Makes and finds the markers of one session."""

    def __init__(self) -> None:
        nonce = secrets.token_hex(_NUM_DIGITS // 2)
        self._nonce = nonce
        self._whole = re.compile(f"{_OPEN}{nonce}:([0-9]+){_CLOSE}")
        # What betrays a damaged marker. Any 15 digits of the nonce in a row hold one of its quarters; what
        # was cut closer to an end still has a bracket and some digits.
        quarters = [nonce[start : start + 8] for start in range(0, _NUM_DIGITS, 8)]
        self._remains = (*quarters, _OPEN + nonce[:4])
        self._tail = re.compile(f"{nonce[-4:]}:[0-9]+{_CLOSE}", re.IGNORECASE)
        # Weak: a marker in some string must not keep a reference to a variable of a run that has ended.
        self._marked: weakref.WeakValueDictionary[int, Reference[Any]] = weakref.WeakValueDictionary()

    def mark(self, reference: Reference[Any]) -> str:
        """The marker of ``reference``."""
        self._marked[reference.marker_id] = reference
        return f"{_OPEN}{self._nonce}:{reference.marker_id}{_CLOSE}"

    def split(self, text: str) -> list[str | Reference[Any]]:
        """``text`` with its markers as references. Raises ``BadArgument`` for a damaged marker,
        ``StateClosed`` for one whose variable is gone."""
        if not self._has_remains(text):
            return [text] if text else []
        parts: list[str | Reference[Any]] = []
        for index, piece in enumerate(self._whole.split(text)):
            if index % 2:
                parts.append(self._reference(int(piece)))
            elif self._has_remains(piece):
                raise BadArgument(
                    "a variable's marker in this text is damaged (cut, padded or changed): "
                    "append the variable itself, or format it with a plain {…}"
                )
            elif piece:
                parts.append(piece)
        return parts

    def refuse(self, texts: Iterable[object], where: str) -> None:
        """``BadArgument`` where one of these holds a marker, and is sent as it is."""
        if any(isinstance(text, str) and self._has_remains(text) for text in texts):
            raise BadArgument(
                f"{where} cannot hold a variable that is passed on by reference: await it and use its value"
            )

    def _has_remains(self, text: str) -> bool:
        lowered = text.lower()
        return any(part in lowered for part in self._remains) or (
            _CLOSE in text and self._tail.search(text) is not None
        )

    def _reference(self, marker_id: int) -> Reference[Any]:
        reference = self._marked.get(marker_id)
        if reference is None:
            raise StateClosed("a variable in this text has ended with its run: await it before that")
        return reference
