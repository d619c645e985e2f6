"""The grammars that an engine has in use or had lately, by the keys of their constraints.

A grammar's masks are made once for all requests that use it, in parallel or later. How much memory all of
them may take is bounded: the one that was used least recently goes first.
"""

from __future__ import annotations

from functools import cached_property

from agentflow.server.compiled_constraint import CompiledConstraint
from agentflow.server.core.fsm import Fsm
from agentflow.server.core.fsm_grammar import FsmGrammar
from agentflow.server.core.grammar import Grammar
from agentflow.server.core.vocabulary import Vocabulary
from agentflow.server.tokenizer import Tokenizer

MAX_GRAMMAR_BYTES = 256 * 1024 * 1024
MAX_GRAMMARS = 256


class GrammarCache:
    """``vocab_size``: tokens that the model has logits for."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._grammars: dict[str, Grammar] = {}

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The model's. Laying it out takes some tens of milliseconds."""
        tokenizer = self._tokenizer
        num_tokens = min(tokenizer.vocab_size, self._vocab_size)
        closed = tokenizer.closed_ids
        data = [b"" if i in closed else tokenizer.token_bytes(i) for i in range(num_tokens)]
        return Vocabulary(data, self._vocab_size)

    def grammar(self, constraint: CompiledConstraint) -> Grammar:
        """The constraint's grammar, made now if it is not there."""
        found = self._grammars.pop(constraint.key, None) or self._made(constraint)
        self._grammars[constraint.key] = found  # the latest stands at the end
        self._bound()
        return found

    def _made(self, constraint: CompiledConstraint) -> Grammar:
        if constraint.form == "fsm":
            return FsmGrammar(Fsm.from_bytes(constraint.payload), self.vocabulary)
        raise NotImplementedError

    def _bound(self) -> None:
        """Those that requests still use live on with them."""
        sizes = [grammar.nbytes for grammar in self._grammars.values()]
        total = sum(sizes)
        for key, size in zip([*self._grammars][:-1], sizes, strict=False):
            if total <= MAX_GRAMMAR_BYTES and len(self._grammars) <= MAX_GRAMMARS:
                return
            del self._grammars[key]
            total -= size
