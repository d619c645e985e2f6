"""What a machine forces: where only one byte may follow, and the text cannot end, it need not be sampled.

``ForcedRuns`` is what decoding asks, and knows bytes. ``CompressedFsm`` is the same machine over characters,
with each such run made one edge, to be printed and drawn.

A machine over bytes, read character by character again: for people, who do not think in UTF-8.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from agentflow.engine.grammar.dfa import DEAD, START, Fsm
from agentflow.engine.grammar.regex import MAX_CODE_POINT, Ranges, all_but

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


ForcedBytes: TypeAlias = NDArray[np.int16]
NextStates: TypeAlias = NDArray[np.int32]


class ForcedRuns:
    """``forced_byte`` [states]: the only byte that may follow, -1 where there are several or the text may
    end. ``forced_next`` [states]: the state after it, ``DEAD`` where there is none."""

    def __init__(self, fsm: Fsm) -> None:
        bytes_in_class = np.bincount(fsm.class_of_byte, minlength=fsm.transitions.shape[1])
        leads_on = (fsm.transitions != DEAD) & (bytes_in_class > 0)
        only_class = np.argmax(leads_on, axis=1)
        one_byte = np.array(bytes_in_class == 1)[only_class]
        is_forced = (np.count_nonzero(leads_on, axis=1) == 1) & one_byte & ~fsm.accepting
        byte_of_class: ForcedBytes = np.zeros(len(bytes_in_class), dtype=np.int16)
        byte_of_class[fsm.class_of_byte] = np.arange(256, dtype=np.int16)
        after = fsm.transitions[np.arange(len(fsm.transitions)), only_class]
        self.forced_byte: ForcedBytes = np.where(is_forced, byte_of_class[only_class], np.int16(-1))
        self.forced_next: NextStates = np.where(is_forced, after, np.int32(DEAD))
        self._runs: dict[int, tuple[bytes, int]] = {}

    def run(self, state: int) -> tuple[bytes, int]:
        """The bytes that must follow, and the state after them: nothing and the same state where there is a
        choice, be it that between going on and the end. They may end inside a character.

        >>> ForcedRuns(build_fsm(parse_regex("(yes|yesterday)"))).run(START)
        (b'yes', 4)
        """
        known = self._runs.get(state)
        if known is None:
            known = self._runs[state] = self._follow(state)
        return known

    def _follow(self, state: int) -> tuple[bytes, int]:
        text = bytearray()
        byte = int(self.forced_byte[state])
        while byte >= 0:  # and not for ever: in a trimmed machine a text can end behind every state
            text.append(byte)
            state = int(self.forced_next[state])
            byte = int(self.forced_byte[state])
        return bytes(text), state


@dataclass(frozen=True, slots=True)
class Edge:
    """From ``source`` to ``target`` by ``text``, or, where that is empty, by one character of the ranges
    ``one_of`` (code points from and to, inclusive)."""

    source: int
    target: int
    text: str
    one_of: Ranges

    @property
    def label(self) -> str:
        """For people: the text, or the characters between brackets, whichever are fewer, these or all others.

        >>> Edge(1, 2, "", ((0, 0x21), (0x23, 0x10FFFF))).label
        '[^"]'
        """
        if self.text:
            return "".join([_shown(char) for char in self.text])
        others = all_but(self.one_of)
        if not others:
            return "any character"
        is_negated = len(others) < len(self.one_of) or self.one_of[-1][1] == MAX_CODE_POINT
        shown = []
        for first, last in others if is_negated else self.one_of:
            edges = [chr(first)] if first == last else [chr(first), chr(last)]
            shown.append("-".join([f"\\{edge}" if edge in "]^-" else _shown(edge) for edge in edges]))
        return f"[{'^' if is_negated else ''}{''.join(shown)}]"


@dataclass(frozen=True, slots=True)
class CompressedFsm:
    """The states that remain, under the numbers they have in the machine, and the edges between them, in
    the order in which a reader comes to them. ``accepting``: where the text may end."""

    edges: tuple[Edge, ...]
    accepting: frozenset[int]

    def __str__(self) -> str:
        """A line for each edge; a star behind a state says that the text may end there."""
        ends = self.accepting
        lines = [
            f"{edge.source}{'*' if edge.source in ends else ''} --{edge.label}--> "
            f"{edge.target}{'*' if edge.target in ends else ''}"
            for edge in self.edges
        ]
        return "\n".join(lines)


def compress(fsm: Fsm) -> CompressedFsm:
    """The machine, over characters again, with each run of characters that alone can follow made one edge.

    >>> print(compress(build_fsm(parse_regex("true|false|[0-9]"))))
    1 --[0-9]--> 2*
    1 --false--> 2*
    1 --true--> 2*
    """
    reader = CharReader(fsm)
    edges: list[Edge] = []
    waiting = [START]
    seen = {START}
    for state in waiting:  # grows as it is read
        for target, ranges in reader.leads_on(state).items():
            char = _only_char(ranges)
            after, text = target, ""
            while char:
                text += char
                following = {} if fsm.accepting[after] else reader.leads_on(after)
                char = ""
                if len(following) == 1:
                    [(next_state, next_ranges)] = following.items()
                    char = _only_char(next_ranges)
                    after = next_state if char else after
            edges.append(Edge(state, after, text, () if text else ranges))
            if after not in seen:
                seen.add(after)
                waiting.append(after)
    return CompressedFsm(tuple(edges), frozenset([state for state in waiting if fsm.accepting[state]]))


def _only_char(ranges: Ranges) -> str:
    """Empty where there are several."""
    return chr(ranges[0][0]) if len(ranges) == 1 and ranges[0][0] == ranges[0][1] else ""


def _shown(char: str) -> str:
    return char if char.isprintable() and char != "\\" else char.encode("unicode_escape").decode()
