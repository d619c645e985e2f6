"""Random texts under a compiled constraint, byte by byte, to test which texts it allows."""

from __future__ import annotations

import functools
import random
from typing import Protocol

import numpy as np

from agentflow.engine.grammar.compiler.messages import CompiledConstraint
from agentflow.engine.grammar.dfa import DEAD, START, Dfa
from agentflow.engine.grammar.grammar import Matcher
from agentflow.engine.grammar.llguidance import LlguidanceGrammar, LlguidanceVocabulary

WISH_TO_END = 40
"""After this many bytes, a walk prefers to end."""
MOST_BYTES = 3_000

_CLOSING = b'"}],:0123456789nultrefas \\-'
_OPENING = b'{}[]",:-0123456789tfn'
_NOT_OPENING = bytes(set(range(256)).difference(_OPENING))
_NOT_ASCII = bytes(range(0x80, 256))


class GrowingText(Protocol):
    """A text under a constraint, and its possible continuations."""

    def allowed(self) -> bytes: ...

    def may_end(self) -> bool: ...

    def accept(self, byte: int, /) -> object: ...


class DfaText:
    """A walk under a DFA. ``known``: the bytes that each state allows, where a walk has come."""

    def __init__(self, dfa: Dfa, known: dict[int, bytes]) -> None:
        self._dfa = dfa
        self._known = known
        self._state = START

    def allowed(self) -> bytes:
        """The bytes that may come next, in order."""
        found = self._known.get(self._state)
        if found is None:
            row = self._dfa.transitions[self._state][self._dfa.class_of_byte]
            found = self._known[self._state] = np.flatnonzero(row != DEAD).astype(np.uint8).tobytes()
        return found

    def may_end(self) -> bool:
        """Whether the text is complete."""
        return bool(self._dfa.accepting[self._state])

    def accept(self, byte: int) -> None:
        """Appends a byte."""
        self._state = self._dfa.read(self._state, bytes([byte]))


class MatcherText:
    """A walk under a grammar whose first tokens are the 256 bytes."""

    def __init__(self, matcher: Matcher) -> None:
        self._matcher = matcher
        self.may_end = matcher.may_end
        self.accept = matcher.accept

    def allowed(self) -> bytes:
        """The bytes that may come next, in order."""
        bits = np.unpackbits(self._matcher.mask().view(np.uint8), count=256, bitorder="little")
        return np.flatnonzero(bits).astype(np.uint8).tobytes()


class SingleBytes:
    """A vocabulary whose tokens are the 256 bytes."""

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the byte of that number."""
        return bytes([token_id])

    def encode(self, text: str, *, continues: bool = False) -> list[int]:
        """Returns the bytes of UTF-8."""
        return list(text.encode())


BYTE_VOCABULARY = LlguidanceVocabulary(SingleBytes(), 256)


def text_under(compiled: CompiledConstraint) -> GrowingText:
    """Returns a new text under the constraint."""
    if compiled.form == "dfa":
        return DfaText(*_dfa(compiled.payload))
    return MatcherText(_grammar(compiled.payload, compiled.num_alternatives).matcher())


# Most callers read many texts under one constraint, or with its other policies of whitespace in turn.
@functools.lru_cache(maxsize=4)
def _dfa(payload: bytes) -> tuple[Dfa, dict[int, bytes]]:
    return Dfa.from_bytes(payload), {}


@functools.lru_cache(maxsize=4)
def _grammar(payload: bytes, num_alternatives: int) -> LlguidanceGrammar:
    return LlguidanceGrammar(payload.decode(), BYTE_VOCABULARY, num_alternatives)


def walk(text: GrowingText, chance: random.Random, prefix: bytes = b"") -> bytes | None:
    """Returns a random complete text that begins with as much of ``prefix`` as the constraint allows, or None
    if the walk did not end. Prefers JSON's structure: uniform choices would write one long string."""
    written = bytearray()
    while len(written) < MOST_BYTES:
        allowed = text.allowed()
        wants_to_end = len(written) > WISH_TO_END or chance.random() < 0.3
        if not allowed or (wants_to_end and text.may_end() and len(written) >= len(prefix)):
            return bytes(written) if text.may_end() else None
        byte = _next_byte(allowed, len(written), chance, prefix)
        text.accept(byte)
        written.append(byte)
    return None


def _next_byte(allowed: bytes, place: int, chance: random.Random, prefix: bytes) -> int:
    if place < len(prefix) and prefix[place] in allowed:
        return prefix[place]
    if place > WISH_TO_END:
        return next((byte for byte in _CLOSING if byte in allowed), allowed[0])
    if 0x22 in allowed and chance.random() < 0.25:
        return 0x22
    structure = allowed.translate(None, _NOT_OPENING)
    if structure and chance.random() < 0.5:
        return chance.choice(structure)
    ascii_bytes = allowed.translate(None, _NOT_ASCII)
    return chance.choice(ascii_bytes if ascii_bytes and chance.random() < 0.8 else allowed)


def takes(constraint: CompiledConstraint, text: str) -> bool:
    """Whether the constraint accepts the whole text."""
    growing = text_under(constraint)
    for byte in text.encode():
        if byte not in growing.allowed():
            return False
        growing.accept(byte)
    return growing.may_end()
