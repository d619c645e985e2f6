"""From the parts of a state to spans of text, and from spans to token ids."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from agentflow.engine.text.chat_layout import Layout
from agentflow.engine.text.chat_template import ChatTemplate, MediumMarkup
from agentflow.engine.text.state.laid_out import between_turns, laid_out
from agentflow.engine.text.state.parts import Part
from agentflow.engine.text.state.rendered_prefixes import Attached
from agentflow.engine.text.state.text_spans import Segment, Span
from agentflow.engine.text.tokenizer import Tokenizer
from agentflow.protocol.images import Medium, MediumKind, medium_kind


@dataclass(frozen=True, slots=True)
class ShowMedium:
    """Shows images and videos as spans: ``span`` has the ids, and ``markup`` the template's text around
    one of a kind."""

    span: Callable[[Medium], Span]
    markup: Mapping[MediumKind, MediumMarkup]

    def part(self, part: Part) -> list[Span]:
        """Returns the runs of an open turn, or outside turns."""
        spans: list[Span] = []
        for run in part.runs:
            if run.medium is None:
                spans.append(Span(run.text, is_markup=False, ids=run.ids))
            elif (markup := self.markup.get(medium_kind(run.medium))) is None:
                spans.append(self.span(run.medium))
            else:
                before, after = Span(markup.before, is_markup=True), Span(markup.after, is_markup=True)
                spans += [span for span in (before, self.span(run.medium), after) if span.text]
        return spans


def make_spans(
    parts: Sequence[Part],
    layout: Layout | None,
    tokenizer: Tokenizer,
    template: ChatTemplate,
    now: datetime,
    show: ShowMedium,
) -> list[Span]:
    """Returns the whole state, in the order of its text.

    Args:
        parts: the turns, and the text between them.
        layout: the layout of the closed turns and of the opening of the open turn; None if there are no
            turns.
        tokenizer: the model's tokenizer.
        template: the chat template.
        now: the time for the template.
        show: returns the span of an image or a video.

    Raises:
        NotSupported: the template leaves no place for text between turns.
    """
    begins_plain = not parts or parts[0].role is None
    spans = [Span("", is_markup=True, ids=tokenizer.prefix_ids)] if begins_plain else []
    if layout is None:
        return spans + [span for part in parts for span in show.part(part)]
    at = 0
    bos = tokenizer.bos
    if begins_plain and bos and tokenizer.bos_id in tokenizer.prefix_ids and layout.text.startswith(bos):
        at = len(bos)  # the state already begins with bos
    turns = [part for part in parts if part.role is not None and not part.is_open]
    for part, end in between_turns(parts, layout, template, now):
        spans += laid_out(layout, turns, tokenizer, at, end, show.span)
        spans += show.part(part)
        at = max(at, end)
    spans += laid_out(layout, turns, tokenizer, at, len(layout.text), show.span)
    return spans + [span for part in parts if part.is_open for span in show.part(part)]


def encode_spans(spans: Sequence[Span], tokenizer: Tokenizer, old: Sequence[Segment]) -> list[Segment]:
    """Encodes ``spans``. Spans that are also in ``old``, an earlier state of the same text, are not encoded
    again."""
    known: dict[tuple[Span, bool], Segment] = {}
    segments: list[Segment] = []
    num_chars = 0
    last_id: int | None = None
    is_same = True  # so far
    for number, span in enumerate(spans):
        segment = old[number] if is_same and number < len(old) else None
        if segment is None or segment.span != span:
            is_same = False
            # The ids of generated text and media do not depend on the text before them.
            continues = span.ids is not None or tokenizer.continues_after(num_chars, last_id)
            known = known or {(one.span, one.continues): one for one in old}
            segment = known.get((span, continues)) or _encode(span, tokenizer, continues)
        segments.append(segment)
        num_chars += len(span.text)
        last_id = segment.ids[-1] if segment.ids else last_id
    return segments


def _encode(span: Span, tokenizer: Tokenizer, continues: bool) -> Segment:
    if span.ids is not None:
        return Segment(span, continues, span.ids)
    encode = tokenizer.encode_markup if span.is_markup else tokenizer.encode
    return Segment(span, continues, tuple(encode(span.text, continues=continues)))


def with_edges(spans: Sequence[Span], edges: Mapping[str, tuple[str, str]]) -> list[Span]:
    """Returns the spans with plain text at the edges of media, which is encoded together with the markup
    next to it. ``edges``: the texts before and after a medium, by its identity."""
    found: list[Span] = []
    tail = ""
    for span in spans:
        if tail:
            joins = span.is_markup and span.ids is None
            span, rest = (replace(span, text=tail + span.text), "") if joins else (span, tail)
            found += [Span(rest, is_markup=True)] if rest else []
        lead, tail = edges.get(span.medium, ("", ""))
        if lead:
            joins = bool(found) and found[-1].is_markup and found[-1].ids is None
            before = found.pop().text if joins else ""
            found.append(Span(before + lead, is_markup=True))
        found.append(span)
    return [*found, Span(tail, is_markup=True)] if tail else found


def with_known(spans: Sequence[Span], attached: Attached) -> list[Span]:
    """Returns the spans with their known beginning as one span."""
    point = attached.cut_point
    cut = spans[point.span]
    before = "".join([span.text for span in spans[: point.span]])
    known = Span(before + cut.text[: point.offset], is_markup=False, ids=attached.token_ids)
    rest = spans[point.span + 1 :]
    if point.edge is None:
        return [known, *rest]
    ids = None if cut.ids is None else cut.ids[point.num_ids :]
    return [known, Span(cut.text[point.offset :], cut.is_markup, ids), *rest]


def known_spans(spans: Sequence[Span], attached: Attached) -> list[Span]:
    """Returns the spans of the known beginning."""
    point = attached.cut_point
    cut = spans[point.span]
    if point.edge is None:
        return [*spans[: point.span + 1]]
    ids = None if cut.ids is None else cut.ids[: point.num_ids]
    return [*spans[: point.span], Span(cut.text[: point.offset], cut.is_markup, ids)]
