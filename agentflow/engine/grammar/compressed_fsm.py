"""What a machine forces: where only one byte may follow, and the text cannot end, it need not be sampled.

``ForcedRuns`` is what decoding asks, and knows bytes. ``CompressedFsm`` is the same machine over characters,
with each such run made one edge, to be printed and drawn.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from agentflow.engine.grammar.char_reader import CharReader
from agentflow.engine.grammar.dfa import DEAD, START, Fsm
from agentflow.engine.grammar.regex_tree import MAX_CODE_POINT, Ranges, all_but
from agentflow.language.mermaid_text import escaped

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

    def draw(self) -> str:
        """A Mermaid flowchart. States where the text may end have a double circle."""
        states = dict.fromkeys(
            [START, *[state for edge in self.edges for state in (edge.source, edge.target)]]
        )
        lines = ["flowchart LR"]
        lines += [
            f"    s{state}((({state})))" if state in self.accepting else f"    s{state}(({state}))"
            for state in states
        ]
        lines += [f'    s{edge.source} -->|"{escaped(edge.label)}"| s{edge.target}' for edge in self.edges]
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
