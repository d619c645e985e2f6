"""A finite-state machine that reads a text's UTF-8 byte by byte: what a regular expression is compiled to.

Deterministic and trimmed: from every state but ``DEAD`` the text can still end well. So a byte is
allowed where it does not lead to ``DEAD``.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Classes: TypeAlias = NDArray[np.uint8]
Transitions: TypeAlias = NDArray[np.int32]
Accepting: TypeAlias = NDArray[np.bool_]

DEAD = 0
START = 1

_HEADER = struct.Struct("<II")


@dataclass(frozen=True, slots=True, eq=False)
class Fsm:
    """``class_of_byte`` [256]: bytes of one class lead everywhere to the same states. ``transitions``
    [states, classes]: the next state; row ``DEAD`` leads to itself. ``accepting`` [states]: whether the
    text may end there. Reading begins in ``START``."""

    class_of_byte: Classes
    transitions: Transitions
    accepting: Accepting

    @property
    def num_states(self) -> int:
        """Without ``DEAD``."""
        return len(self.transitions) - 1

    def matches(self, text: bytes) -> bool:
        """Whether the whole text is accepted."""
        return bool(self.accepting[self.read(START, text)])

    def read(self, state: int, text: bytes) -> int:
        """The state after ``text``."""
        for byte in text:
            state = int(self.transitions[state, self.class_of_byte[byte]])
        return state

    def to_bytes(self) -> bytes:
        """For ``from_bytes``, elsewhere. States have numbers of 16 bits there, where that is enough."""
        num_rows, num_classes = self.transitions.shape
        header = _HEADER.pack(num_rows, num_classes)
        transitions = self.transitions.astype(_number_type(num_rows))
        return header + self.class_of_byte.tobytes() + self.accepting.tobytes() + transitions.tobytes()

    @classmethod
    def from_bytes(cls, data: bytes) -> Fsm:
        """The machine that ``to_bytes`` wrote."""
        num_rows, num_classes = _HEADER.unpack_from(data)
        accepting_at = _HEADER.size + 256
        transitions_at = accepting_at + num_rows
        transitions = np.frombuffer(data, dtype=_number_type(num_rows), offset=transitions_at)
        return cls(
            np.frombuffer(data, dtype=np.uint8, count=256, offset=_HEADER.size),
            transitions.astype(np.int32).reshape(num_rows, num_classes),
            np.frombuffer(data, dtype=np.bool_, count=num_rows, offset=accepting_at),
        )


def _number_type(num_rows: int) -> type[np.uint16] | type[np.int32]:
    return np.uint16 if num_rows <= 1 << 16 else np.int32
