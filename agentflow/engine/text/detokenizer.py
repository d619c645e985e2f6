"""Token ids to text as they come, and back from a place in the text to the ids before it."""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from agentflow.engine.text.tokenizer import Tokenizer

_UNFINISHED = -1


class Detokenizer:
    """The text of a growing list of ids. Each ``push`` costs what the new token's bytes cost.

    The text is what ``Tokenizer.decode`` makes of the same ids, less a last character whose bytes are not
    all there yet. ``continues``: the ids stand after other text (see ``Tokenizer.encode``).
    """

    def __init__(self, tokenizer: Tokenizer, *, continues: bool = True) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._chunks: list[str] = []
        self._spaces_to_strip = 0 if continues else tokenizer.max_leading_spaces
        self._continues = continues
        self.ids: list[int] = []
        self.num_chars = 0
        # For each id: the text's length before it, and the length after it where it ends a character.
        self._starts: list[int] = []
        self._ends: list[int] = []

    def push(self, token_id: int) -> str:
        """Takes one more id and gives the text that it makes certain; often a word, sometimes nothing."""
        self._starts.append(_UNFINISHED if self.is_unfinished else self.num_chars)
        self.ids.append(token_id)
        text = self._utf8.decode(self._tokenizer.token_bytes(token_id))
        if self._spaces_to_strip and text:
            text = self._strip(text)
        if text:
            self._chunks.append(text)
            self.num_chars += len(text)
        self._ends.append(_UNFINISHED if self.is_unfinished else self.num_chars)
        return text

    def push_all(self, ids: Iterable[int]) -> str:
        """``push`` for each of ``ids``; gives the text that they made certain together."""
        return "".join([self.push(token_id) for token_id in ids])

    def rewind(self, num_ids: int) -> None:
        """Only the first ``num_ids`` ids were pushed."""
        num_whole = num_ids
        while num_whole and self._ends[num_whole - 1] == _UNFINISHED:
            num_whole -= 1
        parts = self.ids[num_whole:num_ids]
        self.num_chars = self._ends[num_whole - 1] if num_whole else 0
        self._chunks = [self.text[: self.num_chars]]
        self._utf8.reset()
        del self.ids[num_whole:], self._starts[num_whole:], self._ends[num_whole:]
        self.push_all(parts)

    @property
    def text(self) -> str:
        """All the text that is certain."""
        if len(self._chunks) > 1:
            self._chunks = ["".join(self._chunks)]
        return self._chunks[0] if self._chunks else ""

    @property
    def is_unfinished(self) -> bool:
        """Whether the last bytes are the beginning of a character that is not in the text yet."""
        return bool(self._utf8.getstate()[0])

    def num_ids_within(self, end: int) -> int:
        """How many ids at the front make up text that lies wholly before character ``end``."""
        count = len(self.ids)
        while count and not (self._ends[count - 1] != _UNFINISHED and self._ends[count - 1] <= end):
            count -= 1
        return count

    def ids_of(self, start: int, end: int) -> list[int]:
        """Ids whose text is exactly ``text[start:end]``: those that lie wholly inside as they were pushed,
        and new ones for what is left of a token that straddles ``start`` or ``end``."""
        last = self.num_ids_within(end)
        first = next((n for n in range(last) if self._starts[n] >= start), last)
        text = self.text
        if first == last:
            return self._encode(text[start:end], start)
        head = self._encode(text[start : self._starts[first]], start)
        return head + self.ids[first:last] + self._encode(text[self._ends[last - 1] : end], end)

    def _encode(self, text: str, at: int) -> list[int]:
        return self._tokenizer.encode_exact(text, continues=self._continues or at > 0) if text else []

    def _strip(self, text: str) -> str:
        """Takes the spaces that decoding takes from the front of the whole text."""
        bare = text.lstrip(" ")
        num_spaces = min(self._spaces_to_strip, len(text) - len(bare))
        self._spaces_to_strip = 0 if bare else self._spaces_to_strip - num_spaces
        return text[num_spaces:]
