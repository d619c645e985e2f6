"""Where the text of a generation ends: stops, half characters, and the ids that are left.

The stop that is complete first ends the text; of several that are complete at the same character, the
one that begins first. Read character by character, that does not depend on how the text came in tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from agentflow.engine.text.detokenizer import Detokenizer
from agentflow.engine.text.stop_pattern import StopPattern
from agentflow.engine.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Ending:
    """What is left of a generation. ``ids`` stand for exactly ``text``; the first ``kept`` of them are as
    sampled, the others were encoded anew. ``rest``: what of ``text`` no ``push`` has delivered."""

    ids: list[int]
    text: str
    kept: int
    rest: str


class TextEnd:
    """Follows the text of one generation and delivers what can no longer be part of a stop: a string of
    ``stop`` or a match of ``stop_regex``. No stop begins in the text of the first ``min_tokens`` tokens.

    ``continues``: the generation stands after other text, as in all but an empty state. Each ``push``
    costs what the new text costs, times the number of stop strings; ``stop_regex`` costs a search for
    each character, and ``StopPattern`` says what it raises.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Iterable[str] = (),
        *,
        stop_regex: str | None = None,
        min_tokens: int = 0,
        continues: bool = True,
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, continues=continues)
        self._stops = [_Stop(string) for string in stop]
        self._pattern = None if stop_regex is None else StopPattern(stop_regex)
        self._beginnings = frozenset(one.string[0] for one in self._stops)
        self._min_tokens = min_tokens
        self._held = ""
        self._num_read = 0
        self._num_delivered = 0
        self._stopped_at: int | None = None
        self.stop: str | None = None
        """Of ``stop`` the string that ended the text; None where none has, or a match of ``stop_regex``."""

    @property
    def stopped(self) -> bool:
        """Whether a stop is complete; ids that come later change nothing."""
        return self._stopped_at is not None

    def push(self, token_id: int) -> str:
        """Takes one more sampled id and gives the text that may be delivered now.

        The model's own end token, or another token that ends the generation, is not pushed.
        """
        if self.stopped:
            return ""
        is_free = len(self._detokenizer.ids) < self._min_tokens
        new = self._detokenizer.push(token_id)
        before = self._num_read
        if self._detokenizer.num_chars - len(new) < before:  # text that was read already, in other tokens
            new = new[before - self._detokenizer.num_chars + len(new) :]
        self._num_read += len(new)
        if is_free and self._pattern is not None:
            self._pattern.skip(new)
        if is_free or (self._pattern is None and not self._held and self._beginnings.isdisjoint(new)):
            self._num_delivered += len(new)
            return new
        self._held += new
        delta_length = self._search(new, before) - self._num_delivered
        delta, self._held = self._held[:delta_length], self._held[delta_length:]
        self._num_delivered += delta_length
        return delta

    def replace(self, num_kept: int, token_ids: Iterable[int]) -> str:
        """Of the ids that were pushed the first ``num_kept`` stay, and ``token_ids`` come after them: the
        same text in other tokens, and then more of it, or its end is still to be pushed again. Gives the
        text that may be delivered now."""
        if self.stopped:
            return ""
        self._detokenizer.rewind(num_kept)
        return "".join([self.push(token_id) for token_id in token_ids])

    def finish(self) -> Ending:
        """Ids and text of the generation, which ends here. What was held back is delivered with ``rest``;
        the bytes of a last character that is not all there are dropped."""
        detokenizer = self._detokenizer
        end = detokenizer.num_chars if self._stopped_at is None else self._stopped_at
        text = detokenizer.text[:end]
        ids = detokenizer.ids_of(0, end)
        return Ending(ids, text, kept=detokenizer.num_ids_within(end), rest=text[self._num_delivered :])

    def _search(self, new: str, at: int) -> int:
        """Reads ``new``, whose first character is number ``at``; gives the end of what may be delivered."""
        stops, pattern = self._stops, self._pattern
        if pattern is not None:
            pattern.add(new)
        for end, char in enumerate(new, start=at + 1):
            begin = None if pattern is None else pattern.step()
            for stop in stops:
                stop.step(char)
                if stop.num_matched == len(stop.string) and (begin is None or end - stop.num_matched < begin):
                    begin, self.stop = end - stop.num_matched, stop.string
            if begin is not None:
                self._stopped_at = begin
                return begin
        end = at + len(new)
        safe = end - max([stop.num_matched for stop in stops], default=0)
        return safe if pattern is None else min(safe, pattern.num_safe)


class _Stop:
    """Finds one string in a text that is read character by character, without looking back (Knuth, Morris
    and Pratt, 1977, "Fast pattern matching in strings").

    ``num_matched``: length of the longest end of the text so far that the string begins with.
    """

    __slots__ = ("_fallback", "num_matched", "string")

    def __init__(self, string: str) -> None:
        self.string = string
        self.num_matched = 0
        # For each length that was matched, the next shorter one that the same text also matches. Made as
        # far as it is needed, so that a request with long stops costs nothing until they nearly occur.
        self._fallback = [0, 0]

    def step(self, char: str) -> None:
        """Reads one more character; not called once the string is complete."""
        matched = self._longer(self.num_matched, char)
        if matched == len(self._fallback):
            self._fallback.append(self._longer(self._fallback[-1], char))
        self.num_matched = matched

    def _longer(self, matched: int, char: str) -> int:
        string = self.string
        while matched and string[matched] != char:
            matched = self._fallback[matched]
        return matched + 1 if string[matched] == char else 0
