"""Grammars that no DFA can represent (recursive ones, large schemas, tags in free text), run by the
llguidance library behind the seam of ``grammar``.

The library's parser runs in the engine's loop, so each step has limits: a hostile grammar fails its own
request, and delays the others by some ten milliseconds at most.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Final, Protocol, TypeVar

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from agentflow.engine.grammar.grammar import TokenWords, is_allowed, make_mask
from agentflow.errors import RequestRefused

# Limits for one step (the library spends about 14,000 units of fuel, or 20,000 items, in a millisecond; an
# ambiguous grammar costs the square of the items at one position) and for one lexer. Most need a few
# hundred states, so each grammar begins with a small lexer.
ITEMS_IN_ROW: Final = 500
STEP_ITEMS: Final = 50_000
STEP_FUEL: Final = 200_000
FIRST_LEXER_STATES: Final = 1_500
LEXER_STATES: Final = 20_000
START_FUEL: Final = 5_000_000
GRAMMAR_SYMBOLS: Final = 200_000

ALL_TOKENS_ALLOWED: Final = '%llguidance {"no_forcing": true}'
"""The last line of each grammar. Without it, a mask contains only one of the tokens that begin a forced text.
"""

CAN_BE_ENDLESS: Final = "// Forced text may have no end."
"""A line of grammars under which nothing is forced. The library does not return from a forced text that has
no end."""

_ITEMS_PER_ALTERNATIVE: Final = 4
"""An optional member of an object takes this many items wherever it may come next."""

_LEXER_ERROR: Final = "lexer error: too many "
_TOKENS_FOR_A_LEXER: Final = 32
_TOKENS_PER_TAKEN: Final = 1 / 8
_TOKENS_PER_CHAR: Final = 1 / 100
"""A text gets a new lexer only after this many more tokens, for each token that must be read again and each
character of the grammar. So renewing costs a step a few milliseconds at most, on average."""

_LEAST_GRAMMAR_BYTES: Final = 200_000
_BYTES_PER_CHAR: Final = 200
_BYTES_PER_STATE: Final = 600
"""Measured: 220 to 530."""
NOWHERE_TO_GO: Final = "the grammar reaches a position where no token can follow"


AnswerT = TypeVar("AnswerT")


def parser_limits(num_alternatives: int, lexer_states: int) -> LLParserLimits:
    """The limits of one text under one grammar (see ``CompiledConstraint.num_alternatives``)."""
    return LLParserLimits(
        max_items_in_row=ITEMS_IN_ROW + _ITEMS_PER_ALTERNATIVE * num_alternatives,
        initial_lexer_fuel=START_FUEL,
        step_lexer_fuel=STEP_FUEL,
        step_max_items=STEP_ITEMS,
        max_lexer_states=lexer_states,
        max_grammar_size=GRAMMAR_SYMBOLS,
        verbose_errors=False,
    )


class TokenTexts(Protocol):
    """The part of ``Tokenizer`` that is used here."""

    def token_bytes(self, token_id: int) -> bytes: ...

    def encode(self, text: str, *, continues: bool = False) -> list[int]: ...


class LlguidanceVocabulary:
    """One model's tokens for llguidance. Built at first use, in about 0.1 s for 50,000 tokens.

    ``vocab_size``: the length of the model's logits, which may exceed the tokenizer's vocabulary. The library
    gets one token more, its end of text, so that it need not know which of the model's tokens end a text.
    Special tokens have no bytes here, so no grammar can require one.
    """

    def __init__(self, tokenizer: TokenTexts, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self.vocab_size = vocab_size

    @cached_property
    def text_tokens(self) -> TokenWords:
        """The mask of all tokens that have bytes."""
        written = [i for i in range(self.vocab_size) if self._tokenizer.token_bytes(i)]
        return make_mask(written, self.vocab_size)

    @cached_property
    def ll_tokenizer(self) -> LLTokenizer:
        """The library's own object."""
        return LLTokenizer(TokenizerWrapper(_TokenTable(self._tokenizer, self.vocab_size)))


class _TokenTable:
    """The tokenizer interface that the library expects."""

    def __init__(self, tokenizer: TokenTexts, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = vocab_size
        self.bos_token_id = None
        self.tokens = [*(tokenizer.token_bytes(i) for i in range(vocab_size)), b"</end of text>"]
        self.special_token_ids = [vocab_size]

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, continues=True)


class LlguidanceGrammar:
    """A grammar in the library's notation (as ``compile_constraint`` writes it) for one vocabulary.
    ``RequestRefused`` if the library rejects it. ``num_alternatives``: as in ``CompiledConstraint``.

    >>> grammar = LlguidanceGrammar(compiled.payload.decode(), LlguidanceVocabulary(tokenizer, 49152))
    >>> matcher = grammar.matcher()
    """

    def __init__(self, payload: str, vocabulary: LlguidanceVocabulary, num_alternatives: int = 0) -> None:
        self._vocabulary = vocabulary
        self._num_alternatives = num_alternatives
        self._payload = payload
        self.forces = CAN_BE_ENDLESS not in payload
        self._lexer_states = FIRST_LEXER_STATES
        self.fresh = self._small = self.made()
        """The parser of the empty text. Its copies share the lexer, and with it the lexer's limits."""

    @property
    def nbytes(self) -> int:
        """An estimate, on the large side: the library does not report it. ``fresh`` may reach all states."""
        at_first = _LEAST_GRAMMAR_BYTES + _BYTES_PER_CHAR * self.num_chars
        return at_first + _BYTES_PER_STATE * self._lexer_states

    @property
    def num_chars(self) -> int:
        """The length of the grammar's text."""
        return len(self._payload)

    def matcher(self) -> LlguidanceMatcher:
        """A matcher at the start of a new text."""
        return LlguidanceMatcher(self, self._vocabulary.text_tokens)

    def enlarged(self, spent: LLMatcher) -> LLMatcher | None:
        """Returns ``fresh`` with a larger lexer if ``spent`` has the small one, else None."""
        if spent is not self._small:
            return None
        if self.fresh is spent:
            self._lexer_states = LEXER_STATES
            self.fresh = self.made()
        return self.fresh

    def renew(self, spent: LLMatcher) -> None:
        """Replaces ``fresh`` if it still is the parser whose lexer is ``spent``."""
        if self.fresh is spent:
            self.fresh = self.made()

    def made(self) -> LLMatcher:
        """Makes a parser of the empty text with a separate lexer."""
        tokenizer = self._vocabulary.ll_tokenizer
        limits = parser_limits(self._num_alternatives, self._lexer_states)
        made = LLMatcher(tokenizer, self._payload, log_level=0, limits=limits)
        if made.is_error():
            message = f"the grammar cannot be used: {_first_line(made.get_error())}"
            raise RequestRefused(message, param="constraint")
        return made


class LlguidanceMatcher:
    """The position of one text in its grammar (see ``grammar.Matcher``).

    All texts under a grammar share a lexer, which keeps the states that it has reached, up to a limit. At the
    limit, the text is read again with a larger lexer, which is shared, too, and then with a separate one. A
    text is rejected only if it alone needs too many states, so a long text does not affect others.
    """

    def __init__(self, grammar: LlguidanceGrammar, text_tokens: TokenWords) -> None:
        self._grammar = grammar
        self._origin = grammar.fresh
        self._matcher = self._origin.deep_copy()
        self._taken: list[int] = []
        self._may_renew_at = 0
        self._text_tokens = text_tokens
        self._mask: TokenWords | None = None
        """The mask at the current position, once computed."""

    def mask(self) -> TokenWords:
        """See ``Matcher.mask``."""
        self._refuse_errors()
        if self._mask is None:
            data = self._asked(LLMatcher.compute_bitmask)
            words = np.frombuffer(data, dtype=np.uint32, count=len(self._text_tokens))
            self._mask = words & self._text_tokens
            if not self._mask.any() and not self._matcher.is_accepting():
                raise RequestRefused(NOWHERE_TO_GO, param="constraint")
        return self._mask

    def may_end(self) -> bool:
        """See ``Matcher.may_end``."""
        return self._asked(LLMatcher.is_accepting)

    def must_end(self) -> bool:
        """See ``Matcher.must_end``."""
        return self.may_end() and not self.mask().any()

    def accept(self, token_id: int) -> bool:
        """See ``Matcher.accept``."""
        is_text = 0 <= token_id < 32 * len(self._text_tokens) and is_allowed(self._text_tokens, token_id)
        # The library reports an error for a token after a text that must end.
        may_take = is_text and not self._matcher.is_stopped()
        if not may_take or not self._asked(lambda matcher: matcher.try_consume_tokens([token_id])):
            self._refuse_errors()
            raise ValueError(f"the grammar does not allow token {token_id} here")
        self._taken.append(token_id)
        self._mask = None
        return False

    def roll_back(self, num_tokens: int) -> None:
        """See ``Matcher.roll_back``."""
        if num_tokens and not self._matcher.rollback(num_tokens):
            raise ValueError(
                f"{num_tokens} tokens cannot be rolled back: {_first_line(self._matcher.get_error())}"
            )
        del self._taken[len(self._taken) - num_tokens :]
        self._mask = None

    def forced(self) -> bytes:
        """See ``Matcher.forced``."""
        if not self._grammar.forces:
            return b""
        return self._asked(lambda matcher: b"" if matcher.is_stopped() else matcher.compute_ff_bytes())

    def _asked(self, ask: Callable[[LLMatcher], AnswerT]) -> AnswerT:
        """Calls the library, and calls it again with a new lexer if the old one has reached its limits."""
        answer = ask(self._matcher)
        if self._matcher.is_error() and self._renewed():
            answer = ask(self._matcher)
        self._refuse_errors()
        return answer

    def _renewed(self) -> bool:
        """Moves the text to a new lexer. Returns False if that is impossible, or was done too few tokens
        ago."""
        num_taken = len(self._taken)
        if not self._matcher.get_error().startswith(_LEXER_ERROR):
            return False
        if (larger := self._grammar.enlarged(self._origin)) is not None:
            self._origin = larger
            again = larger.deep_copy()
        elif num_taken < self._may_renew_at:
            return False
        else:
            pause = num_taken * _TOKENS_PER_TAKEN + self._grammar.num_chars * _TOKENS_PER_CHAR
            self._may_renew_at = num_taken + max(_TOKENS_FOR_A_LEXER, int(pause))
            self._grammar.renew(self._origin)
            again = self._grammar.made()
        if again.try_consume_tokens(self._taken) != num_taken or again.is_error():
            return False
        self._matcher = again
        return True

    def _refuse_errors(self) -> None:
        if self._matcher.is_error():
            reason = _first_line(self._matcher.get_error())
            if reason == "NoExtensionBias":
                raise RequestRefused(NOWHERE_TO_GO, param="constraint")
            raise RequestRefused(
                f"the grammar exceeds the limits of one step ({reason}): remove repeats and rules that let "
                "the same text be parsed in many ways",
                param="constraint",
            )


def _first_line(message: str) -> str:
    return message.strip().split("\n", 1)[0]
