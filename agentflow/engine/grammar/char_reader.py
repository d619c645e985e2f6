"""A machine over bytes, read character by character again: for people, who do not think in UTF-8."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np

from agentflow.engine.grammar.dfa import DEAD, Fsm
from agentflow.engine.grammar.regex_tree import Ranges

Spans: TypeAlias = "list[tuple[int, int, int]]"
"""First and last number, and the state that they lead to; sorted."""

_LEADS = ((0xC2, 0xDF, 1, 0xC0), (0xE0, 0xEF, 2, 0xE0), (0xF0, 0xF4, 3, 0xF0))
"""First bytes from and to, how many bytes follow, and from which byte on their bits count."""


class CharReader:
    """Of a machine that accepts nothing but UTF-8."""

    def __init__(self, fsm: Fsm) -> None:
        self._fsm = fsm
        self._spans: dict[tuple[int, int], Spans] = {}

    def leads_on(self, state: int) -> dict[int, Ranges]:
        """The characters that lead from a state between characters to each next one. Ranges go on over the
        surrogates, which no text has."""
        chars: Spans = []
        for first, last, target in self._row(state):
            if first < 0x80:
                chars.append((first, min(last, 0x7F), target))
            for low, high, num_bytes, base in _LEADS:
                for byte in range(max(first, low), min(last, high) + 1):
                    chars += _shifted(self._below(target, num_bytes), (byte - base) << 6 * num_bytes)
        found: dict[int, list[tuple[int, int]]] = {}
        for first, last, target in _joined(chars):
            found.setdefault(target, []).append((first, last))
        return {target: tuple(ranges) for target, ranges in found.items()}

    def _below(self, state: int, num_bytes: int) -> Spans:
        """What so many more bytes of a character lead to, by the number that their bits make."""
        if num_bytes == 0:
            return [(0, 0, state)]
        known = self._spans.get((state, num_bytes))
        if known is None:
            spans: Spans = []
            for first, last, target in self._row(state):
                inner = self._below(target, num_bytes - 1)
                for byte in range(first, last + 1):
                    spans += _shifted(inner, (byte - 0x80) << 6 * (num_bytes - 1))
            known = self._spans[(state, num_bytes)] = _joined(spans)
        return known

    def _row(self, state: int) -> Spans:
        """The bytes that may follow."""
        row = self._fsm.transitions[state][self._fsm.class_of_byte]
        starts = [0, *[int(at) + 1 for at in np.flatnonzero(row[1:] != row[:-1])], 256]
        spans = [(starts[at], starts[at + 1] - 1, int(row[starts[at]])) for at in range(len(starts) - 1)]
        return [span for span in spans if span[2] != DEAD]


def _shifted(spans: Spans, by: int) -> Spans:
    return [(first + by, last + by, target) for first, last, target in spans]


def _joined(spans: Spans) -> Spans:
    """With neighbours that lead to the same state made one."""
    joined: Spans = []
    for first, last, target in spans:
        before = joined[-1] if joined else (-2, -2, DEAD)
        if before[2] == target and first in (before[1] + 1, 0xE000 if before[1] == 0xD7FF else -1):
            joined[-1] = (before[0], last, target)
        else:
            joined.append((first, last, target))
    return joined
