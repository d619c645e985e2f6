"""A request under its constraint, and under the budget of its reasoning.

A model that reasons writes its reasoning first. Neither the grammar nor stops apply to it. The grammar
begins with the answer, before which the model may write one line break, unless the grammar requires white
space; free text with tools may follow any white space. Reasoning that reaches its budget is ended by a jump,
which appends the end mark. Under a grammar, a jump also ends reasoning within which the model ends the
generation. A model that writes in channels begins each part of its answer with a head
(``engine.text.channels``): under a grammar, ``ChannelRequest`` allows only the known heads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np

from agentflow.engine.constrained.grammar_cache import GrammarCache
from agentflow.engine.constrained.jump_forward import ConstrainedText, EncodeText, Jump
from agentflow.engine.grammar.compiler.messages import CompiledConstraint
from agentflow.engine.grammar.grammar import TokenWords, is_allowed
from agentflow.engine.request import Request, Submit
from agentflow.engine.text.channel_output import ChannelTokens
from agentflow.engine.text.channels import CHANNEL_TOKENS
from agentflow.engine.text.reasoning import SPACES, ReasoningFormat, ReasoningTokens
from agentflow.engine.text.tokenizer import Tokenizer
from agentflow.errors import RequestRefused


def constrained_request(
    request: Request, message: Submit, grammars: GrammarCache, tokenizer: Tokenizer
) -> ConstrainedRequest:
    """Follows the output of a request that has a constraint or may reason first."""
    has_channels = message.reasoning_format is not None and message.reasoning_format.has_channels
    kind = ChannelRequest if has_channels else ConstrainedRequest
    return kind(request, message, grammars, tokenizer)


class ConstrainedRequest:
    """The output of one request. ``begin``, ``update`` and ``end_reasoning`` return the tokens that are
    forced next, which the caller appends. ``request.next_mask`` returns the tokens that may follow: its first
    call after a change computes them, during a forward pass if possible."""

    def __init__(
        self, request: Request, message: Submit, grammars: GrammarCache, tokenizer: Tokenizer
    ) -> None:
        self._request = request
        self._tokenizer = tokenizer
        self._budget = None if message.reasoning_format is None else message.reasoning_format.budget
        reasoning_format = message.reasoning_format
        self._reasoning: ReasoningTokens | None = None
        if reasoning_format is not None and not reasoning_format.has_channels:
            has_end_token = len(tokenizer.encode_written(reasoning_format.end)) == 1
            self._reasoning = ReasoningTokens(reasoning_format, has_end_token=has_end_token)
        self._words: TokenWords | None = None  # the result of ``next_mask``, once computed
        self.is_open = False
        """Whether it is known after ``read`` that nothing is forced next and the text is not complete."""
        self._text: ConstrainedText | None = None
        if message.constraint is None:
            return
        vocabulary = self._vocabulary = grammars.vocabulary
        self._new_text = _token_texts(message.constraint, message, grammars, tokenizer)
        self._text = self._new_text()
        self._end_words = vocabulary.only(request.end_ids)
        request.next_mask = self.next_mask
        if message.reasoning_format is not None:
            self._begin_words = vocabulary.exactly(message.reasoning_format.begin.encode())
            self._break_words = vocabulary.exactly(b"\n") | vocabulary.exactly(b"\n\n")
            self._strips = message.reasoning_format.strips
            self._is_spelled = self._strips and not self._begin_words.any()
            self._has_break = False
            self._reasoning_words: dict[bytes, TokenWords] = {}

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens of reasoning, marks included."""
        return 0 if self._reasoning is None else self._reasoning.num_tokens

    def num_forced(self, num_tokens: int) -> int:
        """Like ``ConstrainedText.num_forced_tokens``, of the first ``num_tokens`` of the whole output."""
        return 0 if self._text is None else self._text.num_forced_tokens(num_tokens - self._num_before)

    @property
    def answer_at(self) -> int | None:
        """See ``Progress``; None if no reasoning can come before the answer, or channels mark it."""
        return None if self._reasoning is None else self._reasoning.answer_at

    @property
    def is_reasoning(self) -> bool:
        """Whether reasoning has begun, and the answer has not."""
        return self._reasoning is not None and (self._reasoning.is_reasoning or self._reasoning.is_gap)

    @property
    def calls_from(self) -> int:
        """The character of the output from which on it may have calls; -1 within reasoning."""
        return -1 if self.is_reasoning else max(0, self.answer_at or 0)

    def forced_spans(self, num_chars: int) -> list[tuple[int, int]]:
        """Like ``ConstrainedText.forced_spans``, of the whole output."""
        if self._text is None:
            return []
        start = len(self._data_before.decode(errors="replace"))
        return [(first + start, length) for first, length in self._text.forced_spans(num_chars - start)]

    def is_complete(self) -> bool:
        """Whether the text is complete, and nothing may follow or no token of the model can write it."""
        text = self._text
        if text is None or not self._is_answer:
            return False
        if text.must_end():
            return True
        return text.may_end() and not self._may_sample_end(text) and not text.mask().any()

    def read(self, token_id: int) -> bool:
        """Appends a token. Returns whether stops apply to it. If the first mark is spelled in several tokens,
        only the last of them is known not to be part of the answer."""
        reasoning, text = self._reasoning, self._text
        if reasoning is None and text is not None:
            self._words = None
            self.is_open = text.accept(token_id)
            return True
        was_reasoning = False
        if reasoning is not None and not reasoning.is_over:
            was_reasoning, was_undecided = reasoning.is_reasoning, reasoning.is_undecided
            if text is not None and self._begins_answer(text, reasoning, token_id):
                reasoning.begin_answer()
            elif not reasoning.read(self._tokenizer.token_bytes(token_id)):
                if was_undecided and text is not None:
                    # A mark that is spelled in several tokens might be the beginning of free text.
                    if reasoning.is_undecided:
                        text.accept(token_id)
                    else:
                        self._text = self._new_text()
                return reasoning.is_undecided
        if text is not None:
            text.accept(token_id)
        return not was_reasoning

    def next_mask(self) -> TokenWords:
        """Returns the tokens that may follow. If this fails, none may follow, and ``request.mask_error`` has
        the error: ``RequestRefused`` if no token of the model can continue the text."""
        if self._words is None:
            assert self._text is not None
            try:
                self._words = self._mask(self._text)
            except Exception as error:
                self._request.mask_error = error
                self._words = self._vocabulary.only([])
        return self._words

    def begin(self, generated_forced: Sequence[tuple[int, int]]) -> Jump | None:
        """Starts after the tokens that were ``read``. Returns the tokens that are forced first."""
        if self._text is not None:
            start = len(self._data_before)
            self._text.forced += [(first - start, end - start) for first, end in generated_forced]
        return self.update()

    @property
    def must_answer(self) -> bool:
        """Whether the output is within its reasoning, and the grammar requires an answer after it."""
        return self._text is not None and self._is_within_reasoning

    def end_reasoning(self) -> Jump | None:
        """The model ended the generation although it ``must_answer``. Returns the end mark, which replaces
        the model's end token; None if the output has no room for it."""
        self._words = None
        return self._append(self._end_mark())

    @property
    def _is_within_reasoning(self) -> bool:
        return self._reasoning is not None and self._reasoning.is_reasoning

    def _end_mark(self) -> str:
        """The text that ends reasoning."""
        assert self._reasoning is not None
        return self._reasoning.end_mark

    @property
    def _num_before(self) -> int:
        """The tokens before the answer."""
        return self.num_reasoning_tokens

    @property
    def _is_answer(self) -> bool:
        return self._reasoning is None or self._reasoning.is_over

    @property
    def _data_before(self) -> bytes | bytearray:
        """The bytes before the answer."""
        return b"" if self._reasoning is None else self._reasoning.data

    def _begins_answer(self, text: ConstrainedText, reasoning: ReasoningTokens, token_id: int) -> bool:
        if reasoning.is_undecided:
            return not (self._is_spelled or is_allowed(self._begin_words, token_id))
        if not reasoning.is_gap:
            return False
        is_space = not self._tokenizer.token_bytes(token_id).strip(SPACES)
        if self._strips:
            return not is_space
        may_be_answer = is_allowed(text.mask(), token_id)
        is_break = is_space and not self._has_break and not (may_be_answer and self._requires_space(text))
        self._has_break |= is_break
        return not is_break

    def _requires_space(self, text: ConstrainedText) -> bool:
        """Whether the grammar's text begins with white space."""
        return not (text.mask() & ~self._space_words).any()

    @cached_property
    def _space_words(self) -> TokenWords:
        words = self._vocabulary.only([])
        for space in SPACES:
            words = words | self._vocabulary.beginning_with(bytes([space]))
        return words

    def update(self) -> Jump | None:
        """Returns the tokens that are forced after the ``read`` ones."""
        reasoning, text, jump = self._reasoning, self._text, None
        is_spent = self._budget is not None and reasoning is not None and reasoning.num_inside >= self._budget
        if is_spent and self._is_within_reasoning:
            jump = self._append(self._end_mark())
        elif text is not None and self._is_answer:
            jump = self._jump(text)
        self._words = None
        return jump

    def _append(self, text: str) -> Jump | None:
        """Appends the tokens that end reasoning, if the output has room for them."""
        num_kept = self._num_before
        token_ids = self._tokenizer.encode_written(text)
        if num_kept + len(token_ids) > self._request.max_new_tokens:
            return None
        for token_id in token_ids:
            self.read(token_id)
        return Jump(num_kept, token_ids, (0, 0), is_free=True)

    def _jump(self, text: ConstrainedText) -> Jump | None:
        jump = text.jump(self._request.max_new_tokens - self._num_before)
        if jump is None or not self._num_before:
            return jump
        start, (first, end) = len(self._data_before), jump.forced
        return Jump(jump.num_kept + self._num_before, jump.token_ids, (first + start, end + start))

    def _mask(self, text: ConstrainedText) -> TokenWords:
        """The allowed tokens; end tokens are among them where the generation may end."""
        reasoning = self._reasoning
        if reasoning is None or reasoning.is_over:
            return self._answer_mask(text)
        if reasoning.is_reasoning:
            return self._reasoning_mask(reasoning.rest_of_end())
        words = self._answer_mask(text)
        if reasoning.is_undecided:
            return words if self._budget == 0 else words | self._begin_words
        return words if self._has_break else words | self._break_words

    def _answer_mask(self, text: ConstrainedText) -> TokenWords:
        words = text.mask()
        if not text.may_end():
            if not words.any():
                raise RequestRefused(
                    "the constraint requires text that the model's tokens cannot write; "
                    f"the text so far is {text.end_of_text()!r}",
                    param="constraint",
                )
            return words
        return words | self._end_words if self._may_sample_end(text) else words

    def _may_sample_end(self, text: ConstrainedText) -> bool:
        """Whether a token that ends a complete text may follow."""
        is_early = self._num_before + len(text.token_ids) < self._request.params.min_tokens
        return not is_early and bool(self._end_words.any())

    def _reasoning_mask(self, rest: bytes) -> TokenWords:
        """All tokens except tokens that have text after the end mark, because this text would escape the
        grammar. ``rest``: the part of the end mark that is still to come. A token that ends the generation
        ends the reasoning, unless ``ignore_eos`` is set."""
        found = self._reasoning_words.get(rest)
        if found is None:
            vocabulary = self._vocabulary
            found = vocabulary.only(np.arange(vocabulary.vocab_size))
            if rest:
                found = found & ~(vocabulary.beginning_with(rest) & ~vocabulary.exactly(rest))
            if self._request.params.ignore_eos:
                found = found & ~self._end_words
            self._reasoning_words[rest] = found
        return found


class ChannelRequest(ConstrainedRequest):
    """A request of a model that writes in channels. Under a constraint, the head of an answer in text is
    followed by text under the grammar. The head of a call is part of the grammar's text, which therefore
    reads the tokens of a head until it is complete."""

    def __init__(
        self, request: Request, message: Submit, grammars: GrammarCache, tokenizer: Tokenizer
    ) -> None:
        super().__init__(request, message, grammars, tokenizer)
        assert message.reasoning_format is not None
        self._reasoning_format: ReasoningFormat = message.reasoning_format
        self._channels = ChannelTokens(
            is_open=self._reasoning_format.is_open,
            has_answer=bool(self._reasoning_format.answer),
            has_calls=bool(self._reasoning_format.calls),
        )
        self._is_read = True  # the grammar has read the tokens of the head so far
        if self._text is not None:
            marks = [i for token in CHANNEL_TOKENS if (i := tokenizer.find_id(token)) is not None]
            self._mark_words = self._vocabulary.only(marks) & ~self._end_words
            self._end_of_reasoning = self._vocabulary.exactly(b"<|end|>")
            self._rest_words: dict[bytes, TokenWords] = {}

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens of reasoning, marks and the head of an answer in text included."""
        return self._channels.num_tokens

    @property
    def is_reasoning(self) -> bool:
        """Whether reasoning has begun and not ended."""
        return self._channels.is_reasoning

    def read(self, token_id: int) -> bool:
        """Appends a token. Returns whether stops apply to it."""
        channels, text = self._channels, self._text
        is_free = channels.is_free(self._tokenizer.token_bytes(token_id))
        if text is not None and not channels.is_reasoning:
            self._is_read = self._is_read and is_allowed(text.mask(), token_id)
            if self._is_read or channels.is_over:
                text.accept(token_id)
        num_before = channels.num_tokens
        channels.read(self._tokenizer.token_bytes(token_id))
        if channels.num_tokens > num_before and text is not None:
            if text.token_ids or text.held:
                self._text = self._new_text()
            self._is_read = True
        return not is_free

    @property
    def _is_within_reasoning(self) -> bool:
        return self._channels.is_reasoning

    def _end_mark(self) -> str:
        # With tools, the model decides whether a call or an answer follows its reasoning.
        answer = "" if self._reasoning_format.calls else self._reasoning_format.answer
        return self._channels.rest_of_end().decode() + answer

    @property
    def _is_answer(self) -> bool:
        return self._channels.is_over

    @property
    def _data_before(self) -> bytes | bytearray:
        return self._channels.data

    @property
    def _is_spent(self) -> bool:
        return self._budget is not None and self._channels.num_inside >= self._budget

    def update(self) -> Jump | None:
        """See ``ConstrainedRequest.update``."""
        channels, text, jump = self._channels, self._text, None
        # With tools, the model decides whether a call or an answer follows its reasoning.
        answer = "" if self._reasoning_format.calls else self._reasoning_format.answer
        if self._is_spent and self._is_within_reasoning:
            jump = self._append(self._end_mark())
        elif self._is_spent and channels.is_undecided and answer and not channels.num_held:
            jump = self._append(answer)
        elif text is not None and self._is_answer:
            jump = self._jump(text)
        self._words = None
        return jump

    def _mask(self, text: ConstrainedText) -> TokenWords:
        channels = self._channels
        if channels.is_ending:
            return self._mask_words(channels.rest_of_end())
        if channels.is_reasoning:
            return self._reasoning_mask(channels.rest_of_end()) & ~self._mark_words | self._end_of_reasoning
        if channels.is_undecided:
            words = self._vocabulary.only([])
            for rest in channels.rests_of_heads(may_reason=not self._is_spent):
                words = words | self._mask_words(rest)
            return words
        words = self._answer_mask(text)
        if channels.has_head and not self._reasoning_format.calls:
            words = words & ~self._mark_words
        return words

    def _mask_words(self, rest: bytes) -> TokenWords:
        """The tokens that write ``rest``, or its beginning, and nothing else."""
        words = self._rest_words.get(rest)
        if words is None:
            words = self._vocabulary.only([])
            for end in range(1, len(rest) + 1):
                words = words | self._vocabulary.exactly(rest[:end])
            self._rest_words[rest] = words
        return words


def _token_texts(
    constraint: CompiledConstraint, message: Submit, grammars: GrammarCache, tokenizer: Tokenizer
) -> Callable[[], ConstrainedText]:
    """Makes new texts under the constraint of a message."""
    encode: EncodeText | None = tokenizer.encode_written if message.jump_forward else None
    matchers, vocabulary = grammars.matchers(constraint), grammars.vocabulary
    return lambda: ConstrainedText(matchers(), vocabulary, encode)
