"""Random patterns and grammars over few characters, all short texts of the characters, and the engine's
reading of a grammar as the reference."""

from __future__ import annotations

import itertools

from hypothesis import strategies as st

from agentflow.engine.grammar.compiler.compile import _byte_vocabulary, compile_constraint
from agentflow.engine.grammar.grammar import is_allowed
from agentflow.engine.grammar.llguidance import LlguidanceGrammar
from agentflow.protocol.constraint import Constraint

TEXTS = ["".join(chars) for length in range(5) for chars in itertools.product("ab-\n", repeat=length)]

_atoms = st.sampled_from(
    [
        "a",
        "b",
        "-",
        "ab",
        ".",
        "(?s:.)",
        "[ab]",
        "[^a]",
        "[a-b-]",
        r"[^\w]",
        r"\s",
        r"\W",
        r"\n",
        "^a",
        "(?:)",
        "$",
    ]
)
patterns = st.recursive(
    _atoms,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map("({0[0]}|{0[1]})".format),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,2}", "{2,}", "*?"])).map(
            lambda two: f"(?:{two[0]}){two[1]}"
        ),
        inner.map("^(?:{})$".format),
    ),
    max_leaves=6,
)


def engine_texts(source: str, texts: list[str]) -> set[str]:
    """The reference: the texts that the engine's grammar allows, a byte at a time."""
    compiled = compile_constraint(Constraint("grammar", source))
    grammar = LlguidanceGrammar(compiled.payload.decode(), _byte_vocabulary(), compiled.num_alternatives)
    found: set[str] = set()
    dead: set[str] = set()  # texts with which none begins
    for text in texts:
        if text[:-1] in dead:
            dead.add(text)
            continue
        matcher = grammar.matcher()
        for byte in text.encode():
            if not is_allowed(matcher.mask(), byte):
                dead.add(text)
                break
            matcher.accept(byte)
        else:
            if matcher.may_end():
                found.add(text)
    return found


_symbols = st.sampled_from(
    ['"a"', '"b"', '"ab"', '"-"', '"\\n"', '"a".."b"', "/[ab]/", "/a+/", "/[^a-]+/", "/a|b-/", "A", "B"]
)


def _larger(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.one_of(
        st.tuples(inner, inner).map(" ".join),
        st.tuples(inner, inner).map("({0[0]} | {0[1]})".format),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,2}"])).map("({0[0]}){0[1]}".format),
        inner.map("[{}]".format),
    )


_bodies = st.recursive(_symbols | st.just("r"), _larger, max_leaves=4)
_terminals = st.recursive(
    st.sampled_from(['"a"', '"b"', '"-"', "/[ab]/", "/a*/", "/b?/", "/(ab)*/"]), _larger, max_leaves=3
)
grammars = st.builds(
    'start: {}\nr: {} | "-" r // more\n | {}\nA: {}\nB: "b" A\n'.format,
    _bodies,
    st.recursive(_symbols, _larger, max_leaves=3),
    _symbols,
    _terminals,
)

_recursive_bodies = st.recursive(st.sampled_from(['"a"', '"-"', "start", "r", "q"]), _larger, max_leaves=5)
recursive_grammars = st.builds("start: {}\nr: {}\nq: {}".format, *[_recursive_bodies] * 3)
