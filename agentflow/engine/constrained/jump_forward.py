"""Jump-forward decoding: text that a grammar forces is appended without sampling (Zheng et al., "SGLang",
2024, section 4).

The forced text is encoded together with the generation's earlier text, so the ids are exactly the tokenizer's
ids for the whole text. Sampled tokens may get other ids by this, but never other text. The last token of the
forced text is *held back* if another allowed token begins with the same bytes and is longer: the model
chooses between them, and the next token must begin with the held-back bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from agentflow.engine.grammar.grammar import Matcher, TokenWords, is_allowed
from agentflow.engine.grammar.token_dfa import Vocabulary
from agentflow.engine.text.common_prefix import common_prefix

# The last WINDOW_TOKENS tokens of the earlier text are encoded again together with the new text; the first
# OVERLAP_TOKENS of them must come out unchanged.
WINDOW_TOKENS = 64
OVERLAP_TOKENS = 32

CONTINUATION_BYTES = range(0x80, 0xC0)

EncodeText = Callable[[str], list[int]]
"""Encodes text that follows other text."""


ByteRange = tuple[int, int]
"""Part of a text: the bytes from its start to its end."""


class Jump(NamedTuple):
    """A change of a generation's ids by forced text."""

    num_kept: int  # the first ids, which do not change
    token_ids: list[int]  # replace the rest
    forced: ByteRange  # the argument of ``mark_forced``
    is_free: bool = False  # the tokens are not part of the answer, so no stop begins in them


def mark_forced(spans: list[ByteRange], added: ByteRange) -> None:
    """Updates the forced parts of a text, in order, after a jump. The bytes of ``added`` are forced. The text
    ends after them, or earlier if the last token is held back: a held-back token is not part of the text
    until it is sampled."""
    start, end = added
    while spans and spans[-1][1] > end:
        first, _ = spans.pop()
        if first < end:
            spans.append((first, end))
    if start < end and spans and spans[-1][1] == start:
        spans[-1] = spans[-1][0], end
    elif start < end:
        spans.append(added)


class ConstrainedText:
    """The text of one generation under its grammar. ``encode``: None disables jump-forward.

    ``token_ids``: the tokens of the text. ``held``: forced bytes with which the next token must begin.

    ``forced``: the parts of the text whose bytes no sampled token added: jumps appended them and did not hold
    them back. They are spans of bytes, because a jump may put both kinds into one token.
    """

    def __init__(self, matcher: Matcher, vocabulary: Vocabulary, encode: EncodeText | None) -> None:
        self.forced: list[ByteRange] = []
        self.token_ids: list[int] = []
        self.held = b""
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._encode = encode
        self._data = bytearray()
        self._starts: list[int] = []  # the offset of each token in _data
        self._num_encoded = 0  # the number of ids that equal the tokenizer's ids for the text
        # Before the text has this many bytes, a jump would append nothing. It would only encode the same
        # forced text, which may be long, after each of its tokens.
        self._samples_until = 0

    def may_end(self) -> bool:
        """Whether the text is complete."""
        return not self.held and self._matcher.may_end()

    def must_end(self) -> bool:
        """Whether the text is complete and nothing may follow."""
        return not self.held and self._matcher.must_end()

    def end_of_text(self) -> str:
        """Returns the end of the text, for messages."""
        return bytes(self._data[-80:]).decode(errors="replace")

    def mask(self) -> TokenWords:
        """Returns the tokens that may come next. The array must not be modified."""
        words = self._matcher.mask()
        return words & self._vocabulary.beginning_with(self.held) if self.held else words

    def accept(self, token_id: int) -> bool:
        """Appends a sampled token, like ``Matcher.accept``. Raises ``ValueError`` if it is not allowed."""
        is_open = self._matcher.accept(token_id)
        self._append(token_id)
        self.held = b""
        return is_open

    def jump(self, max_tokens: int) -> Jump | None:
        """Appends the bytes that are forced now. None if no id changes, or if there would be more than
        ``max_tokens`` ids in all; the forced text is then sampled as far as it fits."""
        num_bytes = len(self._data)
        forced = b"" if self._encode is None or num_bytes < self._samples_until else self._matcher.forced()
        if not forced:
            return None
        first, new_ids = self._encoded(forced)
        if first + len(new_ids) > max_tokens or not new_ids:
            self._samples_until = num_bytes + len(forced)
            return None
        old_ids = self.token_ids[first:]
        num_same = common_prefix(old_ids, new_ids)
        self._replace(first + num_same, new_ids[num_same:])
        if max(len(old_ids), len(new_ids)) > num_same:
            self._hold_back()
        added = num_bytes, len(self._data)
        mark_forced(self.forced, added)
        num_kept = min(first + num_same, len(self.token_ids))
        if num_kept == first + len(old_ids) == len(self.token_ids):
            return None
        return Jump(num_kept, self.token_ids[num_kept:], added)

    def forced_spans(self, num_chars: int) -> list[tuple[int, int]]:
        """The forced parts of the first ``num_chars`` characters, as pairs of the first character and the
        number of characters, in order. A character counts if all its bytes were forced."""
        spans: list[tuple[int, int]] = []
        done, num_before = 0, 0  # bytes, and the characters in them
        for start, end in self.forced:
            while start < end and self._data[start] in CONTINUATION_BYTES:
                start += 1
            while start < end < len(self._data) and self._data[end] in CONTINUATION_BYTES:
                end -= 1
            first = num_before + _num_chars(self._data[done:start])
            done, num_before = end, first + _num_chars(self._data[start:end])
            if (length := min(num_before, num_chars) - first) > 0:
                spans.append((first, length))
        return spans

    def num_forced_tokens(self, num_tokens: int) -> int:
        """Counts the tokens among the first ``num_tokens`` whose bytes are all forced."""
        ends = [*self._starts[1:], len(self._data)][:num_tokens]
        spans, count = iter(self.forced), 0
        begin, end = next(spans, (0, 0))
        for token_start, token_end in zip(self._starts, ends, strict=False):
            while end <= token_start and (span := next(spans, None)) is not None:
                begin, end = span
            count += begin <= token_start < token_end <= end
        return count

    def _encoded(self, forced: bytes) -> tuple[int, list[int]]:
        """The ids of the text followed by ``forced``, from the returned index on; no ids if the tokenizer
        cannot encode it exactly. Of a long text only the end is encoded, from a position encoded before. If
        the overlap gets the same ids again, the text may be split there."""
        first = self._num_encoded - WINDOW_TOKENS
        while first > 0 and self._data[self._starts[first]] in CONTINUATION_BYTES:
            first -= 1
        if first > 0:
            new_ids = self._encoded_from(first, forced)
            if new_ids[:OVERLAP_TOKENS] == self.token_ids[first : first + OVERLAP_TOKENS]:
                return first, new_ids
        return 0, self._encoded_from(0, forced)

    def _encoded_from(self, first: int, forced: bytes) -> list[int]:
        start = self._starts[first] if first else 0
        data = bytes(self._data[start:]) + forced
        try:
            text = data.decode()
        except UnicodeDecodeError as error:
            is_half = error.end == len(data) and error.reason == "unexpected end of data"
            if not is_half or start + error.start < len(self._data):
                return []
            data = data[: error.start]  # without the incomplete character at its end
            text = data.decode()
        assert self._encode is not None
        new_ids = self._encode(text)
        table = self._vocabulary.token_bytes
        if max(new_ids, default=0) >= len(table):  # the model has no logits for this token
            return []
        return new_ids if b"".join([table[token] for token in new_ids]) == data else []

    def _replace(self, num_kept: int, new_ids: list[int]) -> None:
        """Keeps the first ``num_kept`` ids and appends ``new_ids``."""
        self._drop(len(self.token_ids) - num_kept)
        for token in new_ids:
            self._matcher.accept(token)
            self._append(token)
        self._num_encoded = len(self.token_ids)
        self.held = b""

    def _append(self, token_id: int) -> None:
        self.token_ids.append(token_id)
        self._starts.append(len(self._data))
        self._data += self._vocabulary.token_bytes[token_id]

    def _drop(self, num_tokens: int) -> None:
        if not num_tokens:
            return
        self._matcher.roll_back(num_tokens)
        del self.token_ids[-num_tokens:]
        del self._data[self._starts[-num_tokens] :]
        del self._starts[-num_tokens:]

    def _hold_back(self) -> None:
        """Removes the last token if the grammar also allows a longer one that begins with the same bytes."""
        if self._matcher.must_end():
            return
        last = self.token_ids[-1]
        data = self._vocabulary.token_bytes[last]
        longer = self._vocabulary.beginning_with(data)
        if not is_allowed(longer, last) or _num_bits(longer) == 1:
            return
        self._drop(1)
        if _num_bits(self._matcher.mask() & longer) > 1:
            self.held = data
        else:
            self._matcher.accept(last)
            self._append(last)
        self._num_encoded = len(self.token_ids)


def _num_chars(data: bytes | bytearray) -> int:
    """The number of whole characters."""
    return len(data.decode(errors="ignore"))


def _num_bits(words: TokenWords) -> int:
    return int(np.bitwise_count(words).sum())
