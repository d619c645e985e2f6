"""Deterministic finite automata that read the UTF-8 of a text byte by byte: the compiled form of regular
expressions.

``build_dfa`` converts the expression's tree to a graph over characters, the graph to a DFA over characters
(both in ``char_dfa``), and this to a DFA over bytes. The last step writes few distinct rows: the byte rows of
a state depend only on its character sets, and most states of an expression share these with many others.

A ``Dfa`` is trimmed: an accepting state is reachable from every state except ``DEAD``. So a byte is allowed
exactly if it does not lead to ``DEAD``.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from agentflow.engine.grammar.char_dfa import (
    END,
    NOWHERE,
    TEXT_START,
    Arcs,
    CharClasses,
    CharDfa,
    CharGraph,
    LookAheadStates,
    WorkLimit,
    char_classes,
    check_graph_size,
    determinised,
)
from agentflow.engine.grammar.regex import Regex, TooLargeForDfa
from agentflow.errors import BadArgument

DfaRow: TypeAlias = "tuple[tuple[int, int, int], ...]"
"""First byte, last byte, target."""

_LEADS = ((0x80, 0x7FF, 0xC0, 1), (0x800, 0xFFFF, 0xE0, 2), (0x10000, 0x10FFFF, 0xF0, 3))
"""First and last code point of a length, the base of its first byte, and the number of bytes that follow."""


@lru_cache(maxsize=4096)
def utf8_rows(labelled: DfaRow) -> tuple[DfaRow, ...]:
    """Returns the rows that read one character. ``labelled``: ranges of code points with their label; sorted,
    disjoint, without surrogates, labels numbered from 1. The first row reads the first byte. A byte leads to
    a label if it completes the character, else to the number of labels plus the index of the row that reads
    the next byte. Equal rows are merged.

    >>> utf8_rows(((0x61, 0x7A, 1), (0xE9, 0xE9, 2)))  # a to z, and é, which is C3 A9
    (((97, 122, 1), (195, 195, 3)), ((169, 169, 2),))
    """
    builder = _RowBuilder(max([label for _, _, label in labelled]))
    first: list[tuple[int, int, int]] = []
    for low, high, label in labelled:
        if low < 0x80:
            first.append((low, min(high, 0x7F), label))
    for low, high, lead, num_bytes in _LEADS:
        inside = [
            (max(start, low), min(end, high), label)
            for start, end, label in labelled
            if start <= high and end >= low
        ]
        if inside:
            first.extend(builder.row(inside, 0, num_bytes, lead))
    return (_joined(first), *builder.rows)


class _RowBuilder:
    def __init__(self, num_labels: int) -> None:
        self.rows: list[DfaRow] = []
        self._num_labels = num_labels
        self._index_of: dict[DfaRow, int] = {}

    def row(self, labelled: list[tuple[int, int, int]], base: int, num_bytes: int, lead: int) -> DfaRow:
        """Returns the row for the code points from ``base``; each byte value covers 64 ** ``num_bytes`` of
        them."""
        if num_bytes == 0:
            return _joined([(lead + low - base, lead + high - base, label) for low, high, label in labelled])
        span = 64**num_bytes
        found: list[tuple[int, int, int]] = []
        split: dict[int, list[tuple[int, int, int]]] = {}  # ranges that share their first byte with others
        for low, high, label in labelled:
            first, last = (low - base) // span, (high - base) // span
            if base + first * span < low:
                end = min(high, base + (first + 1) * span - 1)
                split.setdefault(first, []).append((low, end, label))
                first += 1
            if first <= last and high < base + (last + 1) * span - 1:
                split.setdefault(last, []).append((base + last * span, high, label))
                last -= 1
            if first <= last:
                found.append((lead + first, lead + last, self._whole(label, num_bytes)))
        for byte, inside in split.items():
            below = self.row(inside, base + byte * span, num_bytes - 1, 0x80)
            found.append((lead + byte, lead + byte, self._number(below)))
        return _joined(sorted(found))

    def _whole(self, label: int, num_bytes: int) -> int:
        """Returns a target from which any ``num_bytes`` continuation bytes lead to the label."""
        target = label
        for _ in range(num_bytes):
            target = self._number(((0x80, 0xBF, target),))
        return target

    def _number(self, row: DfaRow) -> int:
        index = self._index_of.get(row)
        if index is None:
            self.rows.append(row)
            index = self._index_of[row] = len(self.rows)
        return self._num_labels + index


def _joined(entries: list[tuple[int, int, int]]) -> DfaRow:
    """Merges neighbours with the same target."""
    joined: list[tuple[int, int, int]] = []
    for first, last, target in entries:
        if joined and joined[-1][1] + 1 == first and joined[-1][2] == target:
            joined[-1] = (joined[-1][0], last, target)
        else:
            joined.append((first, last, target))
    return tuple(joined)


Classes: TypeAlias = NDArray[np.uint8]
Transitions: TypeAlias = NDArray[np.int32]
Accepting: TypeAlias = NDArray[np.bool_]

DEAD = 0
START = 1

_HEADER = struct.Struct("<II")


@dataclass(frozen=True, slots=True, eq=False)
class Dfa:
    """A DFA over bytes. The start state is ``START``."""

    class_of_byte: Classes  # [256]; bytes of one class lead to the same states everywhere
    transitions: Transitions  # [states, classes]: the next state; ``DEAD`` leads to itself
    accepting: Accepting  # [states]: whether the text may end there

    @property
    def num_states(self) -> int:
        """The number of states without ``DEAD``."""
        return len(self.transitions) - 1

    def matches(self, text: bytes) -> bool:
        """Whether the whole text is accepted."""
        return bool(self.accepting[self.read(START, text)])

    def read(self, state: int, text: bytes) -> int:
        """Returns the state after ``text``."""
        for byte in text:
            state = int(self.transitions[state, self.class_of_byte[byte]])
        return state

    def to_bytes(self) -> bytes:
        """Serialises the DFA for ``from_bytes``, with 16-bit states where they suffice."""
        num_rows, num_classes = self.transitions.shape
        header = _HEADER.pack(num_rows, num_classes)
        transitions = self.transitions.astype(_number_type(num_rows))
        return header + self.class_of_byte.tobytes() + self.accepting.tobytes() + transitions.tobytes()

    @classmethod
    def from_bytes(cls, data: bytes) -> Dfa:
        """Reads the result of ``to_bytes``."""
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


MAX_STATES = 50_000
MAX_TRANSITIONS = 2_000_000
"""4 bytes each."""
MAX_STEPS = 1_500_000
_STEPS_PER_RANGE = 15  # the cost of making the byte rows of one range of characters

Numbers: TypeAlias = NDArray[np.int64]


def build_dfa(
    regex: Regex,
    *,
    max_states: int = MAX_STATES,
    max_transitions: int = MAX_TRANSITIONS,
    max_steps: int = MAX_STEPS,
) -> Dfa:
    """Returns the DFA that accepts the UTF-8 of the expression's texts. Raises ``TooLargeForDfa`` if it would
    have more states, more transitions (states times byte classes) or take more steps to build than allowed,
    and ``BadArgument`` if no text matches.

    >>> build_dfa(parse_regex("[0-9]{1,3}")).matches(b"42")
    True
    """
    check_graph_size(regex)
    limit = WorkLimit(max_steps)
    graph = CharGraph(limit)
    start = graph.add(regex, END)
    if start == NOWHERE:
        raise BadArgument(_UNSATISFIABLE)
    classes = char_classes(graph.sets, limit)
    if graph.look_aheads or graph.look_behinds:
        dfa = LookAheadStates(graph, classes, limit).dfa(start, TEXT_START)
        if not any(dfa.accepting):
            raise BadArgument(_UNSATISFIABLE)
    else:
        dfa = _plain_dfa(graph, classes, start, limit)
    return _over_bytes(dfa, classes, limit, max_states, max_transitions)


_UNSATISFIABLE = "constraint: no text matches it"


def _plain_dfa(graph: CharGraph, classes: CharClasses, start: int, limit: WorkLimit) -> CharDfa:
    def arcs(node: int) -> Arcs:
        return ((classes.sets[graph.set_of[node]], graph.closure(graph.after[node])),)

    return determinised(graph.closure(start), arcs, limit, {})


def _over_bytes(
    dfa: CharDfa, classes: CharClasses, limit: WorkLimit, max_states: int, max_transitions: int
) -> Dfa:
    """Converts a DFA over characters to bytes. Each state becomes the state before a character's first byte,
    and gets separate states for the following bytes.

    Args:
        dfa: the DFA over characters.
        classes: its character classes.
        limit: of steps.
        max_states: of the result.
        max_transitions: of the result.
    """
    shape_of: dict[tuple[int, ...], int] = {}
    shape: Numbers = np.array([shape_of.setdefault(masks, len(shape_of)) for masks in dfa.masks])
    rows = [_make_rows(masks, classes, limit) if masks else ((),) for masks in shape_of]
    num_rows: Numbers = np.array([len(of_shape) for of_shape in rows], dtype=np.int64)
    num_states = int(num_rows[shape].sum())
    if num_states > max_states:
        raise TooLargeForDfa(f"its DFA has {num_states} states, more than {max_states}")
    table, class_of_byte = _byte_classes([row for of_shape in rows for row in of_shape])
    if num_states * table.shape[1] > max_transitions:
        raise TooLargeForDfa(f"its DFA has more than {max_transitions} transitions")
    transitions = _transitions(dfa, shape, num_rows, table)
    accepting: Accepting = np.zeros(num_states, dtype=np.bool_)
    accepting[: len(shape)] = dfa.accepting
    return Dfa(class_of_byte, transitions, accepting)


def _transitions(dfa: CharDfa, shape: Numbers, num_rows: Numbers, table: Transitions) -> Transitions:
    """Returns the transitions of all states. States with equal numbers of rows and targets are written
    together.

    Args:
        dfa: the DFA over characters.
        shape: the kind of each state, [states].
        num_rows: the number of rows of each kind in ``table``, [kinds].
        table: the rows of all kinds, one kind after the other.
    """
    num_own = num_rows[shape] - 1
    first_own = len(shape) + np.cumsum(num_own) - num_own
    first_row = np.cumsum(num_rows) - num_rows
    num_targets: Numbers = np.array([len(targets) for targets in dfa.targets], dtype=np.int64)
    transitions: Transitions = np.zeros((len(shape) + int(num_own.sum()), table.shape[1]), dtype=np.int32)
    alike: Numbers = num_own * (1 + int(num_targets.max())) + num_targets
    for kind in sorted(set(alike[num_targets > 0].tolist())):
        states: Numbers = np.flatnonzero(alike == kind)
        # The meaning of a row's numbers in each state: 0 is dead, then its targets, then its inner states.
        targets: Transitions = np.array([dfa.targets[state] for state in states.tolist()], dtype=np.int32)
        own_states = first_own[states][:, None] + np.arange(int(num_own[states[0]]))
        meaning = np.concatenate([np.zeros((len(states), 1), dtype=np.int32), targets, own_states], axis=1)
        for index in range(own_states.shape[1] + 1):
            where = states if index == 0 else own_states[:, index - 1]
            transitions[where] = np.take_along_axis(meaning, table[first_row[shape[states]] + index], axis=1)
    return transitions


def _make_rows(masks: tuple[int, ...], classes: CharClasses, limit: WorkLimit) -> tuple[DfaRow, ...]:
    """Returns the byte rows of a state's character sets; the first set has label 1."""
    labelled: list[tuple[int, int, int]] = []
    for label, mask in enumerate(masks, 1):
        while mask:
            low = mask & -mask
            labelled += [(first, last, label) for first, last in classes.ranges[low.bit_length() - 1]]
            mask ^= low
    joined = _joined(sorted(labelled))
    limit.spend(len(labelled) + _STEPS_PER_RANGE * len(joined))
    return utf8_rows(joined)


def _byte_classes(rows: list[DfaRow]) -> tuple[Transitions, Classes]:
    """Returns the rows as a table with one column for each byte class, and the class of each byte."""
    entries = [(index, *entry) for index, row in enumerate(rows) for entry in row]
    if not entries:
        return np.zeros((len(rows), 1), dtype=np.int32), np.zeros(256, dtype=np.uint8)
    columns: Numbers = np.array(entries, dtype=np.int64).T
    row, first, last, target = columns
    is_edge: Accepting = np.zeros(257, dtype=np.bool_)
    is_edge[0] = True
    is_edge[first] = True
    is_edge[last + 1] = True
    is_edge[256] = False
    interval: Numbers = np.cumsum(is_edge) - 1
    steps: Transitions = np.zeros((len(rows), int(interval[255]) + 2), dtype=np.int32)
    np.add.at(steps, (row, interval[first]), target)
    np.add.at(steps, (row, interval[last] + 1), -target)
    np.cumsum(steps, axis=1, out=steps)
    by_interval: Transitions = np.ascontiguousarray(steps[:, :-1].T)
    classes: dict[bytes, int] = {}
    class_of = [classes.setdefault(column.tobytes(), len(classes)) for column in by_interval]
    shown = [class_of.index(index) for index in range(len(classes))]
    return np.ascontiguousarray(by_interval[shown].T), np.array(class_of, dtype=np.uint8)[interval[:256]]
