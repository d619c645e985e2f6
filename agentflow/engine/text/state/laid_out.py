"""The spans of a state with turns, from its rendering (``Layout``): markup and, in their places, the contents
of the turns. Generated text in them keeps its ids."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from functools import lru_cache
from typing import TypeAlias

from agentflow.engine.text.chat_layout import Layout, closed_untrusted_spans, lay_out
from agentflow.engine.text.chat_template import ChatTemplate
from agentflow.engine.text.detokenizer import Detokenizer
from agentflow.engine.text.state.parts import Part, TextRun
from agentflow.engine.text.state.text_spans import Span
from agentflow.engine.text.tokenizer import Tokenizer
from agentflow.errors import NotSupported
from agentflow.protocol.images import Medium

MakeMediumSpan: TypeAlias = Callable[[Medium], Span]
"""Returns the span of an image or a video."""

# The largest generated run (characters plus ids) whose slices are cached, because the cache outlives the
# state.
MAX_REMEMBERED = 8_000


def laid_out(
    layout: Layout, turns: Sequence[Part], tokenizer: Tokenizer, start: int, end: int, show: MakeMediumSpan
) -> Iterator[Span]:
    """Yields the spans of a part of a layout, which contains only complete turns.

    Args:
        layout: The rendered turns.
        turns: The turns.
        tokenizer: The model's tokenizer.
        start, end: The characters of the part.
        show: Returns the span of an image or a video.
    """
    at = start
    for shown in layout.shown:
        if shown.start < start or shown.end > end:
            continue
        yield from _markup(layout, tokenizer, at, shown.start, show)
        runs = turns[shown.turn].texts()[shown.part]
        for run in _rewritten(runs, layout.text[shown.start : shown.end], tokenizer):
            yield Span(run.text, is_markup=False, ids=run.ids)
        at = shown.end
    yield from _markup(layout, tokenizer, at, end, show)


def _markup(
    layout: Layout, tokenizer: Tokenizer, start: int, end: int, show: MakeMediumSpan
) -> Iterator[Span]:
    """Yields the spans of markup, with the media in the place of their placeholders."""
    at = start
    for (low, high), medium in layout.media:
        if start <= low and high <= end:
            yield from _written(layout, tokenizer, at, low)
            yield show(medium)
            at = high
    yield from _written(layout, tokenizer, at, end)


def _written(layout: Layout, tokenizer: Tokenizer, start: int, end: int) -> Iterator[Span]:
    """Yields the spans of markup without media. Special tokens in its untrusted spans become content."""
    at = start
    cuts = (
        closed_untrusted_spans(layout.text, start, end, layout.untrusted_spans, tokenizer.closed_spans)
        if layout.untrusted_spans
        else ()
    )
    for low, high in cuts:
        if at < low:
            yield Span(layout.text[at:low], is_markup=True)
        yield Span(layout.text[low:high], is_markup=False)
        at = high
    if at < end:
        yield Span(layout.text[at:end], is_markup=True)


def _rewritten(runs: Sequence[TextRun], text: str, tokenizer: Tokenizer) -> list[TextRun]:
    """Returns the runs of a turn that the template shows as ``text``: completely, in part, or replaced."""
    whole = "".join([run.text for run in runs])
    if text == whole:
        return list(runs)
    start = 0 if whole.startswith(text) else whole.rfind(text)
    if start < 0:
        return [TextRun(text)]
    kept: list[TextRun] = []
    at = 0
    for run in runs:
        low, high = max(start - at, 0), min(start + len(text) - at, len(run.text))
        if low < high:
            kept.append(_slice(tokenizer, run, low, high))
        at += len(run.text)
    return kept


def _slice(tokenizer: Tokenizer, run: TextRun, low: int, high: int) -> TextRun:
    """Returns characters ``low`` to ``high`` of a run. Generated tokens that are completely inside are
    kept."""
    if run.ids is None or (low, high) == (0, len(run.text)):
        return TextRun(run.text[low:high], run.ids)
    if len(run.text) + len(run.ids) > MAX_REMEMBERED:
        return _decoded_slice(tokenizer, run, low, high)
    return _remembered_slice(tokenizer, run, low, high)


def _decoded_slice(tokenizer: Tokenizer, run: TextRun, low: int, high: int) -> TextRun:
    assert run.ids is not None
    detokenizer = Detokenizer(tokenizer)
    if detokenizer.push_all(run.ids) != run.text:
        return TextRun(run.text[low:high])
    return TextRun(run.text[low:high], tuple(detokenizer.list_ids(low, high)))


# Each turn of a conversation slices all turns before it.
_remembered_slice = lru_cache(maxsize=1024)(_decoded_slice)


def between_turns(
    parts: Sequence[Part], layout: Layout, template: ChatTemplate, now: datetime
) -> list[tuple[Part, int]]:
    """Returns each part outside turns, with its place in the layout."""
    found: list[tuple[Part, int]] = []
    num_turns = 0
    for part in parts:
        if part.role is not None:
            num_turns += 1
        elif part.runs:
            found.append((part, _end_of_turns(num_turns, layout, template, now)))
    return found


def _end_of_turns(num_turns: int, layout: Layout, template: ChatTemplate, now: datetime) -> int:
    """Returns the place in the layout where the first ``num_turns`` turns end, closing markup included."""
    if num_turns == 0:
        return 0
    if num_turns == len(layout.messages) and layout.open_role is None:
        return len(layout.text)
    alone = lay_out(
        template, layout.messages[:num_turns], tools=layout.tools, now=now, placeholders=layout.placeholders
    )
    contents, alone_contents = layout.contents(), alone.contents()
    places = [part.end for part in contents if part.turn == num_turns - 1]
    if places and alone_contents and alone_contents[-1].turn == num_turns - 1:
        closing = alone.text[alone_contents[-1].end :]
        end = places[-1] + len(closing)
        in_order = all(p.end <= end if p.turn < num_turns else p.start >= end for p in contents)
        if in_order and layout.text.startswith(closing, places[-1]):
            return end
    role = layout.messages[num_turns - 1].role
    raise NotSupported(
        f"the model's chat template has no place for the text after the {role} turn (turn {num_turns}): "
        "put that text into a turn"
    )
