"""Finds grammars in Lark's notation under which forced text may have no end.

The lexer of llguidance takes the longest text for a terminal. In ``/ +/ " b"``, the first terminal can
continue with a space only, and the second one begins with a space, so that spaces are forced without end:
the library never returns from computing them. This module is on the safe side: it finds all terminals that
can always continue with one byte only, whatever follows them. ``CAN_BE_ENDLESS`` marks such a grammar, and
nothing is forced under it. All tokens are masked as usual.
"""

from __future__ import annotations

import re
from typing import Final

import numpy as np

from agentflow.engine.grammar.dfa import DEAD, build_dfa
from agentflow.engine.grammar.llguidance import CAN_BE_ENDLESS
from agentflow.engine.grammar.regex import TooLargeForDfa, parse_regex
from agentflow.errors import BadArgument

_LITERAL: Final = re.compile(
    r'(?P<comment>//[^\n]*|#[^\n]*)|"(?:\\.|[^"\\\n])*"|/(?P<pattern>(?:\\.|[^/\\\n])+)/(?P<flags>[a-z]*)'
)
_DEFINITION: Final = re.compile(r"^[ \t]*[?!]?(\w+)[^:\n]*:", re.MULTILINE)
_UNBOUNDED: Final = re.compile(r"[+*]|\{[ ]*[0-9]+[ ]*,[ ]*\}")
_OTHER_IN_RUST: Final = re.compile(r"&&|--|~~|\[[^\]]*\[|\(\?(?!:)")
"""Parts of patterns that Rust reads differently from Python."""


def marked(grammar: str) -> str:
    """Returns the grammar, with ``CAN_BE_ENDLESS`` if forced text under it may have no end.

    >>> marked('start: WS? "b"\\nWS: / +/') == marked('start: WS? "b"\\nWS: /[ \\t]+/')
    False
    """
    return f"{grammar}\n{CAN_BE_ENDLESS}" if _may_be_endless(grammar) else grammar


def _may_be_endless(grammar: str) -> bool:
    patterns = [found for found in _LITERAL.finditer(grammar) if found["pattern"] is not None]
    if any(_continues_with_one_byte(found["pattern"], found["flags"]) for found in patterns):
        return True
    plain = _LITERAL.sub(" ", grammar)
    if re.search("[&~/\"']", plain):  # sets of texts, or a literal that is not read here
        return True
    _, *definitions = _DEFINITION.split(plain)
    parts = zip(definitions[::2], definitions[1::2], strict=True)
    return any(name.lstrip("_")[:1].isupper() and _UNBOUNDED.search(part) for name, part in parts)


def _continues_with_one_byte(pattern: str, flags: str) -> bool:
    """Whether a text of the pattern may continue endlessly with the only possible byte, as far as known."""
    if not {*flags} <= {"i", "s"} or _OTHER_IN_RUST.search(pattern):
        return True
    try:
        dfa = build_dfa(parse_regex(f"(?s){pattern}" if "s" in flags else pattern))
    except (BadArgument, TooLargeForDfa):
        return True
    num_bytes = np.bincount(dfa.class_of_byte, minlength=dfa.transitions.shape[1])
    may_read = dfa.transitions != DEAD
    reads_one = (may_read @ num_bytes == 1) & (np.arange(len(may_read)) != DEAD)
    after = np.where(reads_one, dfa.transitions[np.arange(len(may_read)), may_read.argmax(axis=1)], DEAD)
    # Each round doubles the bytes between a state and the one in ``after``, up to more bytes than states.
    for _ in range(len(after).bit_length()):
        after = after[after]
    return bool((after != DEAD).any())
