"""Random patterns of Python's ``re``, and texts that may or may not match them."""

import random

import numpy as np
from hypothesis import strategies as st

from agentflow.engine.grammar.dfa import DEAD, START, Dfa

ALPHABET = 'abAB1 -\n"éÉſKßİıΣς€퟿😀𐐀٣'
"""Few characters, so that patterns and texts meet often: of every length in UTF-8, with odd cases."""

chars = st.sampled_from(ALPHABET)
texts = st.text(chars, max_size=8)

_ESCAPES = [
    ".",
    r"\d",
    r"\w",
    r"\s",
    r"\D",
    r"\W",
    r"\S",
    r"[^\W\d]",
    r"[\x00-\x7f]",
    r"[^\s\S]",
    "[^a]",
    "[^é€]",
]


def _escaped(char: str) -> str:
    return "\\-" if char == "-" else char


def _set(members: list[str], negated: bool) -> str:
    return f"[{'^' if negated else ''}{''.join(members)}]"


def _atoms(chars: st.SearchStrategy[str], ranged: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    """Characters, sets of them, and sets with ranges between the characters of ``ranged``."""
    members = st.one_of(
        chars.map(_escaped),
        st.tuples(ranged, ranged).map(lambda pair: "-".join(_escaped(char) for char in sorted(pair))),
        st.sampled_from([r"\d", r"\w", r"\S"]),
    )
    return st.one_of(
        chars.map(_escaped),
        st.sampled_from(_ESCAPES),
        st.builds(_set, st.lists(members, min_size=1, max_size=3), st.booleans()),
    )


atoms = _atoms(chars, chars)
PLAIN = 'abAB1 -\n"\t€😀'
"""Characters that belong to the same classes (``\\w``, ``\\s``, ``\\d``) in ASCII as in Unicode."""
plain_atoms = _atoms(st.sampled_from(PLAIN), st.sampled_from('abAB1 -\n"'))
places = st.one_of(
    st.sampled_from(
        [r"\b", r"\B", "^", "$", r"\A", r"\Z", r"(?a:\b)", r"(?a:\B)", "(?:^|-)", r"(?:\b)*", ""]
    ),
    st.builds("{}{})".format, st.sampled_from(["(?<=", "(?<!"]), atoms),
)
"""They read nothing: anchors, word boundaries, look-behinds."""
_counts = st.tuples(st.integers(0, 2), st.integers(0, 2)).map(lambda pair: f"{{{pair[0]},{sum(pair)}}}")
_repeats = st.one_of(st.sampled_from(["?", "*", "+", "*?", "+?", "??", "{2}", "{1,}"]), _counts)


def _grown(inner: st.SearchStrategy[str], flags: list[str], look_arounds: bool) -> st.SearchStrategy[str]:
    groups = ["(?:", "(", *flags]
    ways = [
        st.lists(inner, min_size=1, max_size=3).map("".join),
        st.builds("{}{})".format, st.sampled_from(groups), inner),
        st.builds("(?:{}){}".format, inner, _repeats),
        st.lists(inner, min_size=2, max_size=3).map(lambda options: f"(?:{'|'.join(options)})"),
    ]
    if look_arounds:
        kinds = st.sampled_from(["(?=", "(?!"])
        ways.append(st.builds("{}{}{})".format, kinds, inner, st.sampled_from(["", "", "$", r"\Z", "|a$"])))
        ways.append(st.builds("{}{}{}".format, places, inner, places))
        ways.append(st.builds("(?m:{}{}{})".format, st.sampled_from(["^", "$", ""]), inner, places))
    return st.one_of(ways)


def patterns(
    *,
    atoms: st.SearchStrategy[str] = atoms,
    flags: tuple[str, ...] = ("(?i:", "(?s:", "(?a:", "(?ai:"),
    look_arounds: bool = False,
):
    """Strategy of patterns. ``atoms``: their characters and sets. ``flags``: the openings of groups that
    change the meaning of characters. ``look_arounds``: with look-aheads, look-behinds and anchors."""
    return st.recursive(atoms, lambda inner: _grown(inner, list(flags), look_arounds), max_leaves=6)


def walked(dfa: Dfa, dice: random.Random, max_bytes: int) -> bytes:
    """A random text that the DFA accepts; after this many bytes it ends as soon as it can."""
    to_end = bytes_to_end(dfa)
    text = bytearray()
    state = START
    while not (dfa.accepting[state] and (len(text) >= max_bytes or dice.random() < 0.3)):
        row = dfa.transitions[state][dfa.class_of_byte]
        allowed = np.flatnonzero(row != DEAD)
        if not len(allowed):
            break
        if len(text) >= max_bytes:
            nearest = to_end[row[allowed]].min()
            allowed = allowed[to_end[row[allowed]] == nearest]
        byte = int(dice.choice(allowed.tolist()))
        text.append(byte)
        state = int(row[byte])
    return bytes(text)


def bytes_to_end(dfa: Dfa) -> np.ndarray:
    """For each state, how many more bytes the shortest text has; a large number where there is none."""
    far = len(dfa.transitions) + 1
    distances = np.where(dfa.accepting, 0, far)
    while True:
        nearer = np.minimum(distances, distances[dfa.transitions].min(axis=1) + 1)
        if (nearer == distances).all():
            return distances
        distances = nearer


def mutated(text: str, dice: random.Random) -> str:
    """One character more, less or another one."""
    at = dice.randint(0, len(text))
    inserted = dice.choice(["", dice.choice(ALPHABET)])
    return text[:at] + inserted + text[at + dice.randint(0, 1) :]
