"""A request whose text a grammar constrains: keeps its mask up to date, and jumps forward for it."""

from __future__ import annotations

from collections.abc import Sequence

from agentflow.engine.grammar.grammar import TokenWords
from agentflow.engine.grammar.grammar_cache import GrammarCache
from agentflow.engine.grammar.jump_forward import ConstrainedText, Encode, Jump
from agentflow.engine.process.ipc import Submit
from agentflow.engine.request import Request
from agentflow.engine.text.tokenizer import Tokenizer
from agentflow.errors import RequestRefused


class ConstrainedRequest:
    """``request.token_mask`` is right after each call."""

    def __init__(self, request: Request, text: ConstrainedText, end_words: TokenWords) -> None:
        self._request = request
        self._text = text
        self._end_words = end_words
        self._cannot_go_on = False

    def is_complete(self) -> bool:
        """Whether the text is complete, and nothing may follow or none of the model's tokens can write it."""
        return self._cannot_go_on or self._text.must_end()

    def begin(self, generated_ids: Sequence[int]) -> Jump | None:
        """What an engine that died had generated is there already; what is forced then is appended."""
        for token_id in generated_ids:
            self._text.take(token_id)
        return self._go_on()

    def take(self, token_id: int) -> Jump | None:
        """One more token was sampled; what is forced after it is appended."""
        self._text.take(token_id)
        return self._go_on()

    def _go_on(self) -> Jump | None:
        jump = self._text.jump(self._request.max_new_tokens)
        self._request.token_mask = self._mask()
        return jump

    def _mask(self) -> TokenWords:
        """With the tokens that end the generation, where it may end. ``RequestRefused`` for an empty one."""
        text, request = self._text, self._request
        words = text.mask()
        if not text.may_end():
            if not words.any():
                raise RequestRefused(
                    "the constraint wants a text next that the model's tokens cannot write: "
                    f"the text so far is {text.shown()!r}"
                )
            return words
        if not words.any():
            self._cannot_go_on = not self._end_words.any()
            return self._end_words
        is_early = len(text.token_ids) < request.params.min_tokens
        return words if is_early else words | self._end_words


def constrained_request(
    request: Request, message: Submit, grammars: GrammarCache, tokenizer: Tokenizer
) -> ConstrainedRequest:
    """The request of a ``Submit`` with a constraint."""
    assert message.constraint is not None

    matcher = grammars.grammar(message.constraint).matcher()
    jumping: Encode | None = tokenizer.encode_written if message.jump_forward else None
    text = ConstrainedText(matcher, grammars.vocabulary, jumping)
    return ConstrainedRequest(request, text, grammars.vocabulary.only(request.end_ids))
