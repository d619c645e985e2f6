"""Token ids to text as they come, and back from a place in the text to the ids before it.

Where the text of a generation ends: stops, half characters, and the ids that are left.

The stop that is complete first ends the text; of several that are complete at the same character, the
one that begins first. Read character by character, that does not depend on how the text came in tokens.

Searches a text that still grows for a regular expression, and bounds what that may cost.

The package ``regex`` can say of a text whether its end may be the beginning of a match, and gives up
when a search takes too long; Python's own ``re`` can do neither.
"""

from __future__ import annotations

import codecs
import functools
import time
from collections.abc import Iterable
from dataclasses import dataclass

import regex

from agentflow.engine.text.tokenizer import Tokenizer
from agentflow.errors import RequestRefused
from agentflow.protocol.sampling import MATCHES_NOTHING, refused

# Processor time that one request may take the engine for its searches: so much at once, and so much more
# with each token. A search is a microsecond where the pattern is sound.
BURST_S = 0.05
PER_TOKEN_S = 0.0005


class StopPattern:
    """Reads a text character by character: the text ends where the pattern first has a match in what was
    read so far, before the leftmost one. ``num_safe``: characters at the front that no match can begin in,
    now or later.

    ``BadArgument`` for what is no pattern, or matches the empty text; ``RequestRefused``, then or from any
    ``step``, when it takes too long.
    """

    def __init__(self, source: str) -> None:
        try:
            self._pattern = _compiled(source)
            matches_nothing = self._pattern.search("", timeout=BURST_S) is not None
        except TimeoutError:
            raise _too_slow() from None
        except (regex.error, OverflowError, RecursionError, MemoryError) as error:
            raise refused(f"must be a regular expression that the engine takes ({error})", source) from None
        if matches_nothing:
            raise refused(MATCHES_NOTHING, source)
        self._text = ""
        self._num_read = 0
        self._left_s = BURST_S
        self.num_safe = 0

    def skip(self, new: str) -> None:
        """More text, in which no match may begin; look-behinds see it."""
        self._text += new
        self._num_read = self.num_safe = len(self._text)

    def add(self, new: str) -> None:
        """More text, the next token's: to be read by one ``step`` for each character."""
        self._text += new
        self._left_s = min(BURST_S, self._left_s + PER_TOKEN_S)

    def step(self) -> int | None:
        """Reads one character; where the match begins, if there is one now. Not called after that."""
        self._num_read += 1
        found = self._search()
        if found is not None and not found.partial:
            return int(found.start())
        self.num_safe = self._num_read if found is None else found.start()
        return None

    def _search(self) -> regex.Match[str] | None:
        """A match in what was read, a partial one, or None. ``regex`` looks at the clock on the wall, which
        also runs while others have the processor: only what this thread has used counts."""
        while True:
            began = time.thread_time()
            try:
                found = self._pattern.search(
                    self._text, self.num_safe, self._num_read, partial=True, timeout=self._left_s
                )
                is_done = True
            except TimeoutError:
                is_done = False
            except MemoryError:
                raise _too_slow() from None
            self._left_s -= time.thread_time() - began
            if self._left_s <= 0:
                raise _too_slow()
            if is_done:
                return found


@functools.lru_cache(maxsize=32)  # its own: that of ``regex`` is large, and a pattern may be too
def _compiled(source: str) -> regex.Pattern[str]:
    return regex.compile(source, cache_pattern=False)


def _too_slow() -> RequestRefused:
    return RequestRefused(
        f"stop_regex takes too long to search for: more than {BURST_S * 1000:g} ms of processor time "
        "beyond its share of each token; write it without repeats within repeats, or use stop strings"
    )


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
