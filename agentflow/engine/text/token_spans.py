"""From the parts of a state to the stretches of text that are encoded, and from these to ids."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache

from agentflow.engine.text.chat_layout import Layout, lay_out
from agentflow.engine.text.chat_template import ChatTemplate
from agentflow.engine.text.detokenizer import Detokenizer
from agentflow.engine.text.outside_text import cut_out
from agentflow.engine.text.tokenizer import Tokenizer
from agentflow.errors import NotSupported
from agentflow.protocol.chat import Message

# Characters and ids of a generated run of which slices are remembered; they are held long after its state.
MAX_REMEMBERED = 8_000


@dataclass(frozen=True, slots=True)
class Run:
    """Text that is encoded in one go (``ids`` is None), or what a model generated and the ids of it."""

    text: str
    ids: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """One turn, or (``role`` is None) text outside all turns. ``given``: the message that a whole turn was
    given as; what it says beside its content holds."""

    role: str | None
    runs: tuple[Run, ...] = ()
    is_open: bool = False
    given: Message | None = None

    @property
    def text(self) -> str:
        return "".join([run.text for run in self.runs])

    @property
    def is_generated(self) -> bool:
        return any(run.ids is not None for run in self.runs)

    def message(self) -> Message:
        """The turn as the template is given it."""
        return self.given or Message(self.role or "", self.text, self.is_generated)


@dataclass(frozen=True, slots=True)
class Span:
    """Text that becomes ids without regard to what stands around it. ``ids``: those it has already."""

    text: str
    is_markup: bool
    ids: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Segment:
    """A span with its ids; ``continues`` as the tokenizer has it."""

    span: Span
    continues: bool
    ids: tuple[int, ...]


def spans_of(
    parts: Sequence[Part],
    layout: Layout | None,
    tokenizer: Tokenizer,
    template: ChatTemplate,
    now: datetime,
) -> list[Span]:
    """The whole state in the order of its text. ``layout``: that of its closed turns, and of the opening of
    the one that is open. Raises ``NotSupported`` where the template leaves no place for text between turns.
    """
    begins_plain = not parts or parts[0].role is None
    spans = [Span("", is_markup=True, ids=tokenizer.prefix_ids)] if begins_plain else []
    if layout is None:
        return spans + [span for part in parts for span in _as_it_is(part)]
    at = 0
    bos = tokenizer.bos
    if begins_plain and bos and tokenizer.bos_id in tokenizer.prefix_ids and layout.text.startswith(bos):
        at = len(bos)  # the state has one already
    turns = [part for part in parts if part.role is not None and not part.is_open]
    for part, end in _between_turns(parts, layout, template, now):
        spans += _laid_out(layout, turns, tokenizer, at, end)
        spans += _as_it_is(part)
        at = max(at, end)
    spans += _laid_out(layout, turns, tokenizer, at, len(layout.text))
    return spans + [span for part in parts if part.is_open for span in _as_it_is(part)]


def encode_spans(spans: Sequence[Span], tokenizer: Tokenizer, old: Sequence[Segment]) -> list[Segment]:
    """The ids of ``spans``. Those that are also in ``old``, an earlier state of the same, are not encoded
    again."""
    known: dict[tuple[Span, bool], Segment] = {}
    segments: list[Segment] = []
    num_chars = 0
    last_id: int | None = None
    for number, span in enumerate(spans):
        continues = tokenizer.continues_after(num_chars, last_id)
        segment = old[number] if number < len(old) else None
        if segment is None or segment.span != span or segment.continues != continues:
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


def _as_it_is(part: Part) -> list[Span]:
    return [Span(run.text, is_markup=False, ids=run.ids) for run in part.runs]


def _laid_out(
    layout: Layout, turns: Sequence[Part], tokenizer: Tokenizer, start: int, end: int
) -> Iterator[Span]:
    """Characters ``start`` to ``end`` of the layout, in which whole turns stand."""
    at = start
    for shown in layout.shown:
        if shown.start < start or shown.end > end:
            continue
        yield from _markup(layout, tokenizer, at, shown.start)
        for run in _rewritten(turns[shown.turn].runs, layout.text[shown.start : shown.end], tokenizer):
            yield Span(run.text, is_markup=False, ids=run.ids)
        at = shown.end
    yield from _markup(layout, tokenizer, at, end)


def _markup(layout: Layout, tokenizer: Tokenizer, start: int, end: int) -> Iterator[Span]:
    """Markup, in which special tokens from tools and tool calls are content."""
    at = start
    cuts = cut_out(layout.text, start, end, layout.outside, tokenizer.closed_places) if layout.outside else ()
    for low, high in cuts:
        if at < low:
            yield Span(layout.text[at:low], is_markup=True)
        yield Span(layout.text[low:high], is_markup=False)
        at = high
    if at < end:
        yield Span(layout.text[at:end], is_markup=True)


def _rewritten(runs: Sequence[Run], text: str, tokenizer: Tokenizer) -> list[Run]:
    """The runs of a turn of which the template shows ``text``: whole, in part, or replaced."""
    whole = "".join([run.text for run in runs])
    if text == whole:
        return list(runs)
    start = 0 if whole.startswith(text) else whole.rfind(text)
    if start < 0:
        return [Run(text)]
    kept: list[Run] = []
    at = 0
    for run in runs:
        low, high = max(start - at, 0), min(start + len(text) - at, len(run.text))
        if low < high:
            kept.append(_slice(tokenizer, run, low, high))
        at += len(run.text)
    return kept


def _slice(tokenizer: Tokenizer, run: Run, low: int, high: int) -> Run:
    """Characters ``low`` to ``high`` of a run. Generated tokens that lie wholly inside stay as they are."""
    if run.ids is None or (low, high) == (0, len(run.text)):
        return Run(run.text[low:high], run.ids)
    if len(run.text) + len(run.ids) > MAX_REMEMBERED:
        return _decoded_slice(tokenizer, run, low, high)
    return _remembered_slice(tokenizer, run, low, high)


def _decoded_slice(tokenizer: Tokenizer, run: Run, low: int, high: int) -> Run:
    assert run.ids is not None
    detokenizer = Detokenizer(tokenizer)
    if detokenizer.push_all(run.ids) != run.text:
        return Run(run.text[low:high])
    return Run(run.text[low:high], tuple(detokenizer.ids_of(low, high)))


# Each turn of a conversation asks for the slices of all before it.
_remembered_slice = lru_cache(maxsize=1024)(_decoded_slice)


def _between_turns(
    parts: Sequence[Part], layout: Layout, template: ChatTemplate, now: datetime
) -> list[tuple[Part, int]]:
    """Each part that is no turn, and the place in the layout where it stands."""
    found: list[tuple[Part, int]] = []
    num_turns = 0
    for part in parts:
        if part.role is not None:
            num_turns += 1
        elif part.runs:
            found.append((part, _end_of_turns(num_turns, layout, template, now)))
    return found


def _end_of_turns(num_turns: int, layout: Layout, template: ChatTemplate, now: datetime) -> int:
    """Where in the layout the first ``num_turns`` turns and the markup that closes them end."""
    if num_turns == 0:
        return 0
    if num_turns == len(layout.messages) and layout.open_role is None:
        return len(layout.text)
    alone = lay_out(template, layout.messages[:num_turns], tools=layout.tools, now=now)
    places = [part.end for part in layout.shown if part.turn == num_turns - 1]
    if places and alone.shown and alone.shown[-1].turn == num_turns - 1:
        closing = alone.text[alone.shown[-1].end :]
        end = places[-1] + len(closing)
        in_order = all(p.end <= end if p.turn < num_turns else p.start >= end for p in layout.shown)
        if in_order and layout.text.startswith(closing, places[-1]):
            return end
    role = layout.messages[num_turns - 1].role
    raise NotSupported(
        f"the model's chat template leaves no place for the text after the {role} turn (turn {num_turns}): "
        "put that text into a turn"
    )
