"""Matchers with lengths, over a vocabulary of all bytes and of tokens that join parts of JSON."""

from __future__ import annotations

from agentflow.engine.grammar.compiler.messages import CompiledConstraint, Lengths
from agentflow.engine.grammar.dfa import Dfa
from agentflow.engine.grammar.grammar import Matcher
from agentflow.engine.grammar.json_lengths import LengthMasks, LengthMatcher
from agentflow.engine.grammar.llguidance import LlguidanceGrammar, LlguidanceVocabulary
from agentflow.engine.grammar.token_dfa import DfaGrammar, Vocabulary

BYTES = [bytes([byte]) for byte in range(256)]
PAIRS = [
    b'", "',
    b'"]',
    b'": "',
    b'"}',
    b"}, {",
    b'"}, {"',
    b"]}",
    b", ",
    b"12",
    b"345",
    b".5",
    b'", ',
    b'"], ["',
]
TOKENS = [*BYTES, *PAIRS]
VOCABULARY = Vocabulary(TOKENS)
MASKS = LengthMasks(VOCABULARY)


class _Texts:
    def token_bytes(self, token_id: int) -> bytes:
        return TOKENS[token_id]

    def encode(self, text: str, *, continues: bool = False) -> list[int]:
        return list(text.encode())


LL_VOCABULARY = LlguidanceVocabulary(_Texts(), len(TOKENS))


def bounded_matcher(compiled: CompiledConstraint, lengths: Lengths) -> Matcher:
    """A matcher of the constraint whose tokens are ``TOKENS``."""
    grammar: DfaGrammar | LlguidanceGrammar
    if compiled.form == "dfa":
        grammar = DfaGrammar(Dfa.from_bytes(compiled.payload), VOCABULARY)
    else:
        grammar = LlguidanceGrammar(compiled.payload.decode(), LL_VOCABULARY)
    return LengthMatcher(grammar.matcher(), MASKS, lengths)
