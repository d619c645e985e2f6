"""Finds the token ids that produced the beginning of a rendered conversation.

An HTTP client sends its whole conversation with each request. Encoded again, an earlier answer may become
other tokens than the generated ones, and the cache would match nothing after it. ``RenderedPrefixes`` maps
the hash of a rendered text, up to a *cut point* of its encoding, to the ids of that text: the prompt as it
was computed, and the answer as it was generated. Equal texts get these ids.

Texts are compared byte for byte, and special tokens count as such: a user's ``<|im_end|>`` is not equal to
the markup ``<|im_end|>``. An image or a video counts by its identity. The cut points are the ends of spans,
and both sides of each special token in markup and in generated text.
"""

from __future__ import annotations

import hashlib
import itertools
import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from agentflow.engine.text.state.text_spans import Segment, Span
from agentflow.engine.text.tokenizer import Tokenizer

MAX_TOKENS = 1_000_000
"""Default capacity of ``RenderedPrefixes``, at four bytes a token."""
TOKENS_PER_ENTRY = 64
"""The memory of one entry without its tokens, counted in tokens."""
# Entries of a prompt are at least this many tokens apart.
MIN_APART = 16
DIGEST_BYTES = 16
# Precedes a special token that is spelled out in content. UTF-8 does not contain this byte.
_SPELLED = b"\xff"
# Precedes and ends the identity of an image or a video.
_MEDIUM = b"\xfe"

Hasher: TypeAlias = "hashlib.blake2b"


@dataclass(frozen=True, slots=True)
class CutPoint:
    """A place in spans of text where the encoding may be cut."""

    hasher: Hasher  # of the text before it
    span: int  # the number of the span in which it is
    offset: int  # in characters of the span
    edge: int | None  # the number of the edge of a special token in the span; None: the end of the span
    num_edges: int = 0  # of the span
    num_ids: int | None = None  # the ids of the span before it, of generated text


@dataclass(frozen=True, slots=True)
class Attached:
    """The known beginning of a text."""

    cut_point: CutPoint
    key: bytes
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Entry:
    parent: bytes  # the key of the entry before it; empty: none
    token_ids: array[int]  # since the parent


class RenderedPrefixes:
    """The ids of one tenant's recent prompts and answers, by the hash of their text.

    Holds at most ``max_tokens`` tokens. Each entry costs ``TOKENS_PER_ENTRY`` in addition to its tokens. The
    least recently used entry is dropped first. Thread-safe.

    Args:
        tokenizer: the model's tokenizer.
        max_tokens: the capacity.
    """

    def __init__(self, tokenizer: Tokenizer, max_tokens: int = MAX_TOKENS) -> None:
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens
        self._lock = threading.Lock()
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()
        self.num_tokens = 0
        """The memory in use, counted in tokens of four bytes."""

    def __len__(self) -> int:
        return len(self._entries)

    def cut_points(self, spans: Sequence[Span], start: bytes) -> list[tuple[CutPoint, bytes]]:
        """Returns the cut points in the text of ``spans``, with the key of the text before each. ``start``:
        separates texts that must not share tokens."""
        if not self._tokenizer.finds_spelled:
            return []
        found = _find_cut_points(spans, self._tokenizer, _hasher(start))
        return [(point, point.hasher.digest()) for point in found]

    def attached(self, cut_points: Sequence[tuple[CutPoint, bytes]]) -> Attached | None:
        """Returns the longest known beginning of a text, given its ``cut_points``."""
        with self._lock:
            for point, key in reversed(cut_points):
                if key in self._entries and (token_ids := self._find_ids(key)) is not None:
                    return Attached(point, key, token_ids)
        return None

    def put(
        self, segments: Sequence[Segment], answer: Span, start: bytes, attached: Attached | None = None
    ) -> None:
        """Stores a prompt and the answer generated after it. Ignores an answer whose ids do not decode to its
        text.

        Args:
            segments: the prompt. If ``attached`` is given, the first one is that beginning.
            answer: the generated text and its ids.
            start: as in ``cut_points``.
            attached: the known beginning of the prompt.
        """
        assert answer.ids is not None
        if not self._tokenizer.finds_spelled:
            return
        if self._tokenizer.decode(answer.ids, continues=True) != answer.text:
            return
        hasher, parent = _hasher(start), b""
        if attached is not None:
            hasher, parent, segments = attached.cut_point.hasher.copy(), attached.key, segments[1:]
        spans = [*[segment.span for segment in segments], answer]
        runs = [*[segment.ids for segment in segments], answer.ids]
        starts = [0, *itertools.accumulate(map(len, runs))]
        token_ids = array("i", itertools.chain.from_iterable(runs))
        edges_of: dict[int, list[int]] = {}
        at, last = 0, len(spans) - 1
        with self._lock:
            if attached is not None and attached.key not in self._entries:
                return  # dropped in the meantime
            for point in _find_cut_points(spans, self._tokenizer, hasher):
                end = starts[point.span + 1]
                if point.edge is not None:
                    if point.span not in edges_of:
                        edges_of[point.span] = _edges(runs[point.span], self._tokenizer)
                    edges = edges_of[point.span]
                    if len(edges) != point.num_edges:
                        continue
                    end = starts[point.span] + edges[point.edge]
                is_needed = point.span == last or (point.span == last - 1 and point.edge is None)
                if end - at < (1 if is_needed else MIN_APART):
                    continue
                key = point.hasher.digest()
                if key not in self._entries:
                    self._put(key, _Entry(parent, token_ids[at:end]))
                parent, at = key, end
            self._use(parent)
            self._shrink()

    def _find_ids(self, key: bytes) -> tuple[int, ...] | None:
        """Returns the ids of an entry, and marks it as used. None if a part of them was dropped."""
        entries = self._use(key)
        if entries is None:
            return None
        return tuple(itertools.chain.from_iterable([entry.token_ids for entry in reversed(entries)]))

    def _use(self, key: bytes) -> list[_Entry] | None:
        """Marks an entry and its ancestors as used, and returns them, the entry first. None if one of them
        was dropped."""
        entries: list[_Entry] = []
        while key:
            entry = self._entries.get(key)
            if entry is None:
                return None
            # An entry is dropped after the entries that continue it.
            self._entries.move_to_end(key)
            entries.append(entry)
            key = entry.parent
        return entries

    def _put(self, key: bytes, entry: _Entry) -> None:
        self._entries[key] = entry
        self.num_tokens += len(entry.token_ids) + TOKENS_PER_ENTRY

    def _shrink(self) -> None:
        while self.num_tokens > self._max_tokens:
            _, entry = self._entries.popitem(last=False)
            self.num_tokens -= len(entry.token_ids) + TOKENS_PER_ENTRY


def _hasher(start: bytes) -> Hasher:
    return hashlib.blake2b(start, digest_size=DIGEST_BYTES)


def _find_cut_points(spans: Sequence[Span], tokenizer: Tokenizer, hasher: Hasher) -> Iterator[CutPoint]:
    """Yields the cut points in the text of ``spans``, in order. Ends early at generated text whose special
    tokens cannot be distinguished from spelled ones, and at a special token that two spans spell together.
    ``hasher``: of the text before ``spans``; it is updated."""
    reach = max(0, tokenizer.longest_spelled - 1)
    before = ""
    for number, span in enumerate(spans):
        text, at = span.text, 0
        if span.medium:
            hasher.update(_MEDIUM + span.medium.encode() + _MEDIUM)
            yield CutPoint(hasher.copy(), number, len(text), None)
            before = ""
            continue
        if reach and any(low < len(before) < high for low, high in tokenizer.spelled(before + text[:reach])):
            return
        before = (before + text[-reach:])[-reach:] if reach else ""
        spelled = tokenizer.spelled(text)
        id_edges: list[int] = []
        if span.ids is not None:
            id_edges = _edges(span.ids, tokenizer)
            if [tokenizer.find_id(text[low:high]) for low, high in spelled] != [
                span.ids[edge] for edge in id_edges[::2]
            ]:
                return
        if span.ids is None and not span.is_markup:
            for low, _ in spelled:
                hasher.update(_bytes(text[at:low]) + _SPELLED)
                at = low
        elif tokenizer.cuts_at_closed:
            edges = [edge for span in spelled for edge in span]
            for edge, offset in enumerate(edges):
                hasher.update(_bytes(text[at:offset]))
                at = offset
                num_ids = id_edges[edge] if id_edges else None
                yield CutPoint(hasher.copy(), number, offset, edge, len(edges), num_ids)
        hasher.update(_bytes(text[at:]))
        yield CutPoint(hasher.copy(), number, len(text), None)


def _edges(token_ids: Sequence[int], tokenizer: Tokenizer) -> list[int]:
    """Returns the indices in ``token_ids`` before and after each special token."""
    closed = tokenizer.closed_ids
    if closed.isdisjoint(token_ids):
        return []
    return [edge for at, i in enumerate(token_ids) if i in closed for edge in (at, at + 1)]


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
