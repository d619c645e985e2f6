"""The engine's compiled grammars, by the keys of their constraints.

All requests under a constraint share one grammar, and with it the masks computed so far. The cache is bounded
in number and in bytes; the least recently used grammar is dropped first. A dropped grammar lives on in the
requests that use it. Its masks, which grow with the states that texts reach, count towards ``MAX_MASK_BYTES``
as the masks of all others do.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cached_property

from agentflow.engine.grammar.compiler.messages import CompiledConstraint
from agentflow.engine.grammar.dfa import Dfa
from agentflow.engine.grammar.grammar import Grammar, Matcher
from agentflow.engine.grammar.json_lengths import LengthMasks, LengthMatcher
from agentflow.engine.grammar.llguidance import LlguidanceGrammar, LlguidanceVocabulary
from agentflow.engine.grammar.token_dfa import MAX_MASK_BYTES, DfaGrammar, MaskMemory, Vocabulary
from agentflow.engine.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

MAX_GRAMMAR_BYTES = 256 * 1024 * 1024
MAX_GRAMMARS = 256


class _Texts:
    """The tokenizer in the form for llguidance: tokens that content cannot contain have no bytes."""

    def __init__(self, vocabulary: Vocabulary, tokenizer: Tokenizer) -> None:
        self._table = vocabulary.token_bytes
        self._tokenizer = tokenizer

    def token_bytes(self, token_id: int) -> bytes:
        return self._table[token_id] if token_id < len(self._table) else b""

    def encode(self, text: str, *, continues: bool = False) -> list[int]:
        return self._tokenizer.encode_written(text)


class GrammarCache:
    """The grammars of one model. ``vocab_size``: the number of logits of the model."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._grammars: dict[str, Grammar] = {}
        self.mask_memory = MaskMemory(MAX_MASK_BYTES)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The model's tokens. The first access builds the trie, which takes some tens of milliseconds."""
        tokenizer = self._tokenizer
        num_tokens = min(tokenizer.vocab_size, self._vocab_size)
        closed = tokenizer.closed_ids - tokenizer.mark_ids
        data = [b"" if i in closed else tokenizer.token_bytes(i) for i in range(num_tokens)]
        return Vocabulary(data, self._vocab_size)

    @cached_property
    def _llguidance_vocabulary(self) -> LlguidanceVocabulary:
        return LlguidanceVocabulary(_Texts(self.vocabulary, self._tokenizer), self._vocab_size)

    @cached_property
    def _length_masks(self) -> LengthMasks:
        return LengthMasks(self.vocabulary)

    def prepare(self) -> None:
        """Builds the vocabularies now, so that the first constrained request does not wait for them."""
        try:
            _ = self.vocabulary, self._llguidance_vocabulary.ll_tokenizer, self._length_masks
        except Exception:
            logger.exception("this tokenizer cannot be used for constrained decoding")

    def knows(self, constraint: CompiledConstraint) -> bool:
        """Whether the grammar is cached, so that the constraint's payload is not needed."""
        return constraint.key in self._grammars

    def grammar(self, constraint: CompiledConstraint) -> Grammar:
        """Returns the constraint's grammar, and builds it if it is not cached."""
        found = self._grammars.pop(constraint.key, None) or self.make(constraint)
        self.put(constraint.key, found)
        return found

    def put(self, key: str, grammar: Grammar) -> None:
        """Adds a grammar under the key of its constraint, as the most recently used one."""
        self._grammars[key] = grammar
        self._bound()

    def matcher(self, constraint: CompiledConstraint) -> Matcher:
        """Returns a matcher at the start of a new text."""
        return self.matchers(constraint)()

    def matchers(self, constraint: CompiledConstraint) -> Callable[[], Matcher]:
        """Returns a function that makes matchers, even after the grammar has left the cache."""
        grammar, lengths = self.grammar(constraint), constraint.lengths
        if lengths is None:
            return grammar.matcher
        return lambda: LengthMatcher(grammar.matcher(), self._length_masks, lengths)

    def make(self, constraint: CompiledConstraint) -> Grammar:
        """Builds a grammar, in any thread once ``prepare`` has returned. Raises ``RequestRefused`` if the
        library rejects it."""
        if constraint.form == "dfa":
            return DfaGrammar(Dfa.from_bytes(constraint.payload), self.vocabulary, memory=self.mask_memory)
        return LlguidanceGrammar(
            constraint.payload.decode(), self._llguidance_vocabulary, constraint.num_alternatives
        )

    def _bound(self) -> None:
        """Drops grammars beyond the limits."""
        sizes = [grammar.nbytes for grammar in self._grammars.values()]
        total = sum(sizes)
        for key, size in zip([*self._grammars][:-1], sizes, strict=False):
            if total <= MAX_GRAMMAR_BYTES and len(self._grammars) <= MAX_GRAMMARS:
                return
            del self._grammars[key]
            total -= size
