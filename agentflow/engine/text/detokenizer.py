"""Converts generated token ids to text, as they arrive, and finds the end of the text.

``TextEnd`` reads a generation: it delivers text that can no longer be part of a stop, and finds the remaining
ids. It uses ``Detokenizer`` (ids to text, holding back incomplete characters), ``_Stop`` (one stop string)
and ``StopPattern`` (a regular expression).

The stop that is completed first ends the text; of several completed at the same character, the one that
begins first. Text is searched character by character, so the result does not depend on its tokens.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from dataclasses import dataclass

from agentflow.engine.text.tokenizer import Tokenizer
from agentflow.engine.text.tool_output import CallMarks, overlap
from agentflow.protocol.bounds.cpu_allowance import CpuAllowance
from agentflow.protocol.text.stop_pattern import StopPattern

_UNFINISHED = -1


class Detokenizer:
    """The text of a growing list of ids. The cost of a ``push`` is proportional to the length of its token.

    The text equals ``Tokenizer.decode`` of the same ids, without a last character that is incomplete.
    ``continues``: the ids follow other text (see ``Tokenizer.encode``).
    """

    def __init__(self, tokenizer: Tokenizer, *, continues: bool = True) -> None:
        self._tokenizer = tokenizer
        self._byte_table = tokenizer.byte_table
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._chunks: list[str] = []
        self._spaces_to_strip = 0 if continues else tokenizer.max_leading_spaces
        self._continues = continues
        self.ids: list[int] = []
        self.num_chars = 0
        # For each id, the length of the text before it, and after it if it ends a character.
        self._starts: list[int] = []
        self._ends: list[int] = []

    def push(self, token_id: int) -> str:
        """Appends an id. Returns the text that is now complete; often a word, sometimes nothing."""
        self._starts.append(_UNFINISHED if self.is_unfinished else self.num_chars)
        self.ids.append(token_id)
        known = self._byte_table  # a model may have ids that its tokenizer does not know
        text = self._utf8.decode(known[token_id] if 0 <= token_id < len(known) else b"")
        if self._spaces_to_strip and text:
            text = self._strip(text)
        if text:
            self._chunks.append(text)
            self.num_chars += len(text)
        self._ends.append(_UNFINISHED if self.is_unfinished else self.num_chars)
        return text

    def push_all(self, ids: Iterable[int]) -> str:
        """``push`` for each of ``ids``. Returns their text together."""
        return "".join([self.push(token_id) for token_id in ids])

    def rewind(self, num_ids: int) -> None:
        """Removes all but the first ``num_ids`` ids."""
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
        """The text so far, without an incomplete character."""
        if len(self._chunks) > 1:
            self._chunks = ["".join(self._chunks)]
        return self._chunks[0] if self._chunks else ""

    @property
    def is_unfinished(self) -> bool:
        """Whether the last bytes are the beginning of a character."""
        return bool(self._utf8.getstate()[0])

    def num_ids_within(self, end: int) -> int:
        """Returns the number of leading ids whose text is completely before character ``end``."""
        count = len(self.ids)
        while count and not (self._ends[count - 1] != _UNFINISHED and self._ends[count - 1] <= end):
            count -= 1
        return count

    def list_ids(self, start: int, end: int) -> list[int]:
        """Returns ids whose text is exactly ``text[start:end]``: ids that are completely inside are kept, and
        the part of a token that crosses ``start`` or ``end`` is encoded again."""
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
        """Removes the spaces that decoding removes from the front of the whole text."""
        bare = text.lstrip(" ")
        num_spaces = min(self._spaces_to_strip, len(text) - len(bare))
        self._spaces_to_strip = 0 if bare else self._spaces_to_strip - num_spaces
        return text[num_spaces:]


@dataclass(frozen=True, slots=True)
class Ending:
    """The result of a generation."""

    ids: list[int]  # of exactly ``text``
    text: str
    kept: int  # the number of leading ids that were sampled; the others were encoded again
    rest: str  # the part of ``text`` that no ``push`` returned


class _CallScan:
    """Follows a text, and finds whether its end is inside a tool call."""

    def __init__(self, marks: CallMarks) -> None:
        self._marks = marks
        self.restart()

    def restart(self) -> None:
        """The text begins with the next one: the text so far was reasoning, where a mark is a quotation."""
        self._held = ""  # the end of the text, which may be the beginning of a mark
        self._is_decided = bool(self._marks.begin)
        self.is_inside = False

    def read(self, text: str) -> None:
        """Reads the next text."""
        self._held += text
        if not self._is_decided:
            self._held = self._held.lstrip()
            if self._held:
                self._is_decided = True
                self.is_inside = self._held[0] in "{["
        while mark := self._marks.end if self.is_inside else self._marks.begin:
            before, found, after = self._held.partition(mark)
            if not found:
                self._held = before[-len(mark) + 1 :] if len(mark) > 1 else ""
                return
            self._held, self.is_inside = after, not self.is_inside
        self._held = ""

    @property
    def num_undecided(self) -> int:
        """The length of the end of the text that may be the beginning of a call's mark."""
        return 0 if self.is_inside else overlap(self._held, self._marks.begin)


class TextEnd:
    """Follows the text of one generation and delivers text that can no longer be part of a stop. The cost of
    a ``push`` is the length of its text times the number of stop strings; ``stop_regex`` costs a search for
    each character and raises the errors of ``StopPattern``.

    Args:
        tokenizer: the model's tokenizer.
        stop: the strings that end the text.
        stop_regex: a pattern whose match ends the text.
        min_tokens: no stop begins in the text of the first ``min_tokens`` tokens.
        calls: the marks of tool calls. No stop applies to a part of a call, including its marks: if it ended
            early, it would be another call.
        searches: the time that remains to the tenant for searches for its ``stop_regex``.
        continues: the generation follows other text; False only in an empty state.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Iterable[str] = (),
        *,
        stop_regex: str | None = None,
        min_tokens: int = 0,
        calls: CallMarks | None = None,
        continues: bool = True,
        searches: CpuAllowance | None = None,
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, continues=continues)
        self._calls = None if calls is None else _CallScan(calls)
        self._stops = [_Stop(string) for string in stop]
        self._pattern = None if stop_regex is None else StopPattern(stop_regex, searches)
        self.may_stop = bool(self._stops) or self._pattern is not None
        """Whether the text can end the generation."""
        self._beginnings = frozenset(one.string[0] for one in self._stops)
        self._min_tokens = min_tokens
        self._held = ""
        self._num_read = 0
        self._num_delivered = 0
        self._stopped_at: int | None = None
        self._pending: tuple[int, int] | None = None  # a stop, from its first character to behind its last
        """A stop that does not count if its end turns out to be the mark of a call."""
        self.stop: str | None = None
        """The string of ``stop`` that ended the text; None if none did, or a match of ``stop_regex``."""

    @property
    def stopped(self) -> bool:
        """Whether a stop is complete. Later ids are ignored."""
        return self._stopped_at is not None

    @property
    def num_ids(self) -> int:
        """The number of ids so far, up to the one that completed a stop."""
        return len(self._detokenizer.ids)

    @property
    def is_in_call(self) -> bool:
        """Whether the text so far ends inside a tool call."""
        return self._calls is not None and self._calls.is_inside

    def push(self, token_id: int, *, is_free: bool = False, calls_from: int = 0) -> str:
        """Appends a sampled id. Returns the text that may be delivered now. Tokens that end the generation
        are not pushed.

        Args:
            token_id: the id.
            is_free: no stop begins in its text, as for the first ``min_tokens``.
            calls_from: the character of the whole text from which on it may have calls; -1: the text so far
                has none.
        """
        if self.stopped:
            return ""
        is_free = is_free or self.is_in_call or len(self._detokenizer.ids) < self._min_tokens
        new = self._detokenizer.push(token_id)
        before = self._num_read
        if self._detokenizer.num_chars - len(new) < before:  # text already read, in other tokens
            new = new[before - self._detokenizer.num_chars + len(new) :]
        self._num_read += len(new)
        if self._calls is not None and calls_from < 0:
            self._calls.restart()
        if is_free or (self._pattern is None and not self._held and self._beginnings.isdisjoint(new)):
            if self._calls is not None and calls_from >= 0:
                self._calls.read(new[max(0, calls_from - before) :])
            if is_free and self._pattern is not None:
                self._pattern.skip(new)
            if self._held:  # a stop that began before does not end in it
                new, self._held = self._held + new, ""
                self._forget_stops()
            self._num_delivered += len(new)
            return new
        self._held += new
        delta_length = self._search(new, before, calls_from) - self._num_delivered
        delta, self._held = self._held[:delta_length], self._held[delta_length:]
        self._num_delivered += delta_length
        return delta

    def replace(
        self, num_kept: int, token_ids: Iterable[int], *, is_free: bool = False, calls_from: int = 0
    ) -> str:
        """Keeps the first ``num_kept`` ids and appends ``token_ids``, which continue with the same text in
        other tokens; its end may still have to be pushed. ``is_free`` and ``calls_from`` are as for ``push``.
        Returns the text that may be delivered now."""
        if self.stopped:
            return ""
        self._detokenizer.rewind(num_kept)
        pushed = [self.push(one, is_free=is_free, calls_from=calls_from) for one in token_ids]
        return "".join(pushed)

    def resume(self, text: str) -> None:
        """Continues a generation that had delivered ``text``. Its ids must have been pushed; ``text`` may be
        longer than theirs if the last ids were replaced. It is not delivered again and contains no stop."""
        if len(text) <= self._num_read:
            return
        if self._calls is not None:
            self._calls.read(text[self._num_read :])
        if self._pattern is not None:
            self._pattern.skip(text[self._num_read :])
        self._forget_stops()
        self._held, self._num_read, self._num_delivered = "", len(text), len(text)

    def finish(self) -> Ending:
        """Ends the generation. Text held back is in ``rest``; bytes of an incomplete last character are
        dropped."""
        detokenizer = self._detokenizer
        if self._pending is not None:  # no call follows
            self._stopped_at = self._pending[0]
        end = detokenizer.num_chars if self._stopped_at is None else self._stopped_at
        text = detokenizer.text[:end]
        ids = detokenizer.list_ids(0, end)
        return Ending(ids, text, kept=detokenizer.num_ids_within(end), rest=text[self._num_delivered :])

    def _forget_stops(self) -> None:
        """Forgets the stops that have begun, or that a call may still contain."""
        self._pending = self.stop = None
        for stop in self._stops:
            stop.num_matched = 0

    def _search(self, new: str, at: int, calls_from: int) -> int:
        """Reads ``new``, whose first character has index ``at``. Returns the end of the text that may be
        delivered."""
        stops, pattern, calls = self._stops, self._pattern, self._calls
        if pattern is not None:
            pattern.add(new)
        for end, char in enumerate(new, start=at + 1):
            if calls is not None and 0 <= calls_from < end:
                calls.read(char)
                if calls.is_inside:
                    self._forget_stops()
            if self._pending is not None or (calls is not None and calls.is_inside):
                if pattern is not None:
                    pattern.pass_over()
            else:
                begin = None if pattern is None else pattern.step()
                for stop in stops:
                    stop.step(char)
                    num = stop.num_matched
                    if num == len(stop.string) and (begin is None or end - num < begin):
                        begin, self.stop = end - num, stop.string
                if begin is not None:
                    self._pending = begin, end
            if self._pending is not None:
                begin, stop_end = self._pending
                if calls is None or end - calls.num_undecided >= stop_end:
                    self._stopped_at, self._pending = begin, None
                    return begin
        if self._pending is not None:
            return self._pending[0]
        safe = at + len(new) - max([stop.num_matched for stop in stops], default=0)
        return safe if pattern is None else min(safe, pattern.num_safe)


class _Stop:
    """Searches for one string character by character without looking back (Knuth, Morris and Pratt, 1977,
    "Fast pattern matching in strings").

    ``num_matched``: the length of the longest suffix of the text that is a prefix of the string.
    """

    __slots__ = ("_fallback", "num_matched", "string")

    def __init__(self, string: str) -> None:
        self.string = string
        self.num_matched = 0
        # For each matched length, the next shorter one that also matches. Computed only as far as needed, so
        # that long stops cost nothing until a long part of them occurs.
        self._fallback = [0, 0]

    def step(self, char: str) -> None:
        """Reads one more character. Must not be called after the string is complete."""
        matched = self._longer(self.num_matched, char)
        if matched == len(self._fallback):
            self._fallback.append(self._longer(self._fallback[-1], char))
        self.num_matched = matched

    def _longer(self, matched: int, char: str) -> int:
        string = self.string
        while matched and string[matched] != char:
            matched = self._fallback[matched]
        return matched + 1 if string[matched] == char else 0
