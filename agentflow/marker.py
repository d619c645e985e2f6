"""References inside ordinary strings: ``f"Answer: {s['x']}"`` keeps ``s['x']`` a reference.

Formatting a variable gives a marker that carries the session's 128-bit nonce; the client's own text
op finds it again. Text from elsewhere cannot contain a marker without knowing the nonce. The
server never looks for markers.
"""

from __future__ import annotations

import re
import secrets

from agentflow.errors import BadArgument
from agentflow.ops import Ref

_OPEN, _CLOSE = "\u27e6af:", "\u27e7"


class Markers:
    """Makes and finds the markers of one session."""

    def __init__(self) -> None:
        self._nonce = secrets.token_hex(16)
        self._pattern = re.compile(f"{_OPEN}{self._nonce}:([0-9]+){_CLOSE}")

    def mark(self, var: int) -> str:
        """The marker of variable ``var``."""
        return f"{_OPEN}{self._nonce}:{var}{_CLOSE}"

    def split(self, text: str) -> list[str | Ref]:
        """``text`` with its markers as references. A damaged marker raises ``BadArgument``."""
        if self._nonce not in text:
            return [text] if text else []
        parts: list[str | Ref] = []
        for index, piece in enumerate(self._pattern.split(text)):
            if index % 2:
                parts.append(Ref(int(piece)))
            elif self._nonce in piece:
                raise BadArgument(
                    "a variable's marker in this text is damaged (cut, padded or changed): "
                    "append the variable itself, or format it with a plain {…}"
                )
            elif piece:
                parts.append(piece)
        return parts
