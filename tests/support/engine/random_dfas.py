"""DFAs and vocabularies: random ones, and one that accepts a few given texts."""

from collections.abc import Iterable

import numpy as np
from hypothesis import strategies as st

from agentflow.engine.grammar.dfa import DEAD, START, Dfa

BYTES = b"ab\xc3\xa9\xff"
"""The bytes that random tokens are made of: letters, a character of two bytes, one that is no UTF-8."""


def tokens() -> st.SearchStrategy[list[bytes]]:
    """A vocabulary: tokens of a few bytes, some of them equal, some empty (as special ones are)."""
    return st.lists(st.lists(st.sampled_from(list(BYTES)), max_size=4).map(bytes), min_size=1, max_size=80)


@st.composite
def dfas(draw: st.DrawFn, max_states: int = 6) -> Dfa:
    """Any DFA over classes of bytes, trimmed or not."""
    num_states = draw(st.integers(1, max_states)) + 1
    num_classes = draw(st.integers(1, 4))
    classes = np.zeros(256, dtype=np.uint8)
    for byte in BYTES:
        classes[byte] = draw(st.integers(0, num_classes - 1))
    cells = st.integers(0, num_states - 1)
    rows = draw(
        st.lists(
            st.lists(cells, min_size=num_classes, max_size=num_classes),
            min_size=num_states,
            max_size=num_states,
        )
    )
    transitions = np.array(rows, dtype=np.int32)
    transitions[DEAD] = DEAD
    accepting = np.array(draw(st.lists(st.booleans(), min_size=num_states, max_size=num_states)))
    accepting[DEAD] = False
    return Dfa(classes, transitions, accepting)


def dfa_of(texts: Iterable[bytes]) -> Dfa:
    """Accepts exactly these texts: their trie."""
    rows: list[dict[int, int]] = [{}, {}]
    ends = {START} if b"" in (all_texts := list(texts)) else set()
    for text in all_texts:
        state = START
        for byte in text:
            if byte not in rows[state]:
                rows.append({})
                rows[state][byte] = len(rows) - 1
            state = rows[state][byte]
        ends.add(state)
    transitions = np.zeros((len(rows), 256), dtype=np.int32)
    for state, row in enumerate(rows):
        for byte, target in row.items():
            transitions[state, byte] = target
    accepting = np.zeros(len(rows), dtype=np.bool_)
    accepting[list(ends)] = True
    return Dfa(np.arange(256, dtype=np.uint8), transitions, accepting)
