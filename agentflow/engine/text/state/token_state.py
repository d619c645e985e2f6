"""A program's state in the engine: token ids, with their text and turns.

The ids depend only on the appended text. Consecutive text is encoded as one run, split only at generated
tokens, at role markup and at calls of ``cut``. Generated text keeps its generated ids. The parts of a state
become spans of text (``_make_spans``), and these become ids (``encode_spans``).

An image or a video is a run of a turn, or of text outside turns. It is a part of the message that the
template gets, and replaces the placeholder that the template writes for it; in an open turn and outside turns
it gets the same markup. Its ids are markup and pseudo-tokens (``media_run``), which its prepared form
determines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from agentflow.engine.media_run import MediaPiece, PreparedMedium, pseudo_tokens
from agentflow.engine.text.channels import ANSWER_HEAD
from agentflow.engine.text.chat_layout import Layout, lay_out
from agentflow.engine.text.chat_template import ChatTemplate, MediumMarkup
from agentflow.engine.text.common_prefix import common_prefix
from agentflow.engine.text.reasoning import reasoning_format_after, reasoning_marks
from agentflow.engine.text.state.choices import EncodedChoices, encode_choices
from agentflow.engine.text.state.laid_out import between_turns, laid_out
from agentflow.engine.text.state.parts import Part, PlainTools, TextRun
from agentflow.engine.text.state.rendered_prefixes import Attached, RenderedPrefixes
from agentflow.engine.text.state.text_spans import Segment, Span
from agentflow.engine.text.tokenizer import Tokenizer
from agentflow.errors import BadArgument, EngineFailed, NotSupported, no_chat_template
from agentflow.protocol.chat import Message, ToolSpec
from agentflow.protocol.images import (
    DIGEST,
    FILE,
    Medium,
    MediumKind,
    Video,
    file_source,
    medium_key,
    medium_kind,
)


class TokenState:
    """The tokens of an append-only state. The template is rendered when ids are needed, not at every op: some
    templates reject an incomplete conversation (a system turn alone) and accept it with its next turn.

    ``num_rerendered_tokens``: the settled and generated ids that were discarded later because the template
    rewrote earlier turns; all ids from the first discarded one on are computed again. ``text_keys``: after
    ``attach_to``, the keys of the encoded text at its cut points (``RenderedPrefixes.cut_points``).
    ``placeholder_tokens``: the text that the template writes for an image, or a video; if missing or empty,
    it is searched for.

    Args:
        tokenizer: The model's tokenizer.
        template: Its chat template.
        check: Raises ``PromptTooLong`` for new text, markup included, that is too long to be encoded.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        check: Callable[[Sequence[str]], None] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self.template = template
        self._check = check
        # Fixed, so that a template that shows the time does not rewrite the conversation later.
        self._now = datetime.now()
        self._tools: tuple[ToolSpec, ...] = ()
        self._plain: PlainTools | None = None
        # Set when the template rejects a reply whose calls are text.
        self._writes_calls = False
        self._taken_parts: list[Part] = []
        self._runs_to_take: list[TextRun] = []  # joined once, so that n images take linear time
        self._pending: list[str] = []
        self._media: dict[Medium, _MediumIds] = {}  # by the medium without its bytes
        self._edges: dict[str, tuple[str, str]] = {}  # of ``_with_edges``
        self._markup: dict[MediumKind, MediumMarkup | None] = {}
        self.unread: dict[Medium, Medium] = {}
        """The images and videos whose prepared form ``prepared`` must set before ids are needed, by the
        medium without its bytes."""
        self._layout: Layout | None = None
        self._segments: list[Segment] = []
        self._ids: list[int] = []
        self._generated: Sequence[int] = ()  # after the settled ids, and not settled yet
        self._is_settled = False
        # The last result of ``ids``, until ids are settled again.
        self._ids_read: list[int] | None = None
        self._has_prefix = True
        self._known: RenderedPrefixes | None = None
        self._known_start = b""
        self._attached: Attached | None = None
        self._attached_spans: list[Span] = []  # of which the beginning is known
        self.text_keys: list[bytes] = []
        self.num_rerendered_tokens = 0
        self.num_computed = 0
        """The leading ids that requests have computed, which the generator sets."""
        self.placeholder_tokens: Mapping[MediumKind, str] = {}

    def attach_to(self, known: RenderedPrefixes, start: bytes) -> None:
        """Gives the beginning of the text the ids that ``known`` has for it. Call it on an empty state that
        is encoded once, when it is complete. ``start``: as in ``RenderedPrefixes.cut_points``."""
        self._known, self._known_start = known, start

    def keep_answer(self, ids: Sequence[int], text: str) -> None:
        """Puts the settled text and the answer generated after it into the ``RenderedPrefixes`` of
        ``attach_to``, if any."""
        if self._known is not None and self._is_settled and ids:
            answer = Span(text, is_markup=False, ids=tuple(ids))
            self._known.put(self._segments, answer, self._known_start, self._attached)

    def num_ids_through(self, num_turns: int) -> int:
        """Returns the number of settled ids before the text of the turn that follows the first ``num_turns``;
        of all ids if none does, and 0 if nothing is settled. Within a known beginning (``attach_to``), whose
        parts were encoded in another request, it is counted by the lengths of the tokens' texts."""
        layout = self._layout
        if not self._is_settled or layout is None:
            return 0
        following = [part.start for part in layout.contents() if part.turn >= num_turns]
        if not following:
            return len(self._ids)
        placeholders = iter([high - low for (low, high), _ in layout.media])
        num_chars = num_ids = 0
        for span, count in self._counted_spans():
            if num_chars >= following[0]:
                break
            lead, tail = self._edges.get(span.medium, ("", ""))
            num_own = next(placeholders, 0) - len(lead) - len(tail) if span.medium else len(span.text)
            num_chars, num_ids = num_chars + num_own, num_ids + count
        return num_ids

    def _counted_spans(self) -> Iterator[tuple[Span, int]]:
        """Yields the settled spans with the numbers of their ids."""
        segments = self._segments
        if self._attached is not None:
            ids, segments, at = self._attached.token_ids, segments[1:], 0
            for span in self._attached_spans:
                end = at + len(span.ids or ())
                if span.ids is None:
                    end = at + self._tokenizer.num_spelling(ids, at, len(span.text.encode(errors="replace")))
                yield span, end - at
                at = end
        for segment in segments:
            yield segment.span, len(segment.ids)

    def tools(self, specs: Sequence[ToolSpec]) -> None:
        """Sets the tools that the template describes, replacing earlier ones. The ids of earlier turns may
        change."""
        if self._tools != (specs := tuple(specs)):
            self._tools, self._layout = specs, None
            self._has_changed()

    def plain_tools(self, description: str, *, has_system: bool) -> None:
        """Sets the tools of a template without tools: from now on, ``description`` is part of the system turn
        (or of the first turn, unless ``has_system``), and results of tools are turns of the user."""
        self._plain = PlainTools(description, has_system)
        self._has_changed()

    def turn(self, message: Message) -> None:
        """Appends a whole turn, with its tool calls. Without calls, the ids are the same as with
        ``begin_role``, ``text`` and ``end_role``, and so are the errors."""
        self.begin_role(message.role)
        for part in message.parts:
            if isinstance(part, str):
                self.text(part)
            else:
                self.medium(part)
        self.end_role()
        self._parts[-1] = replace(self._parts[-1], given=message)

    def text(self, s: str) -> None:
        """Appends content to the open turn or, if none is open, outside all turns."""
        if s:
            self._pending.append(s)
            self._has_changed()

    def medium(self, medium: Medium) -> None:
        """Appends an image or a video to the open turn or outside all turns. Ids need its prepared form
        (``unread``)."""
        reference = medium.reference()
        if self._pending:
            self._runs_to_take.append(TextRun("".join(self._pending)))
            self._pending = []
        self._runs_to_take.append(TextRun("", medium=reference))
        if reference not in self._media:
            self.unread[reference] = medium
        self._has_changed()

    def prepared(self, medium: Medium, prepared: PreparedMedium) -> int:
        """Sets the prepared form of an image or a video. Returns how many tokens it has."""
        pieces, lead, tail = self._without_edges(prepared)
        ids: list[int] = []
        for piece in pieces:
            if isinstance(piece, str):
                ids += self._tokenizer.encode_markup(piece, continues=True)
            else:
                ids += pseudo_tokens(piece.at(prepared.identity, 0)).tolist()
        self._media[medium.reference()] = _MediumIds(prepared, tuple(ids))
        if lead or tail:
            self._edges[prepared.identity] = lead, tail
        self.unread.pop(medium.reference(), None)
        self._has_changed()
        return len(ids)

    def _without_edges(self, medium: PreparedMedium) -> tuple[list[str | MediaPiece], str, str]:
        """Returns the pieces of a medium without the text before its first special token and after its last
        one, and these two texts."""
        pieces, lead, tail = list(medium.pieces), "", ""
        first = pieces[0] if pieces else None
        if isinstance(first, str):
            start = next(iter(self._tokenizer.closed_spans(first)), (len(first), 0))[0]
            lead, pieces[0] = first[:start], first[start:]
        last = pieces[-1] if len(pieces) > 1 else None
        if isinstance(last, str):
            end = max([end for _, end in self._tokenizer.closed_spans(last)], default=0)
            tail, pieces[-1] = last[end:], last[:end]
        return [piece for piece in pieces if piece != ""], lead, tail

    def begin_role(self, role: str, tool_call_id: str | None = None, name: str | None = None) -> None:
        """Opens a turn. ``tool_call_id``, ``name``: the call that it answers, and the tool. Raises
        ``BadArgument`` inside another turn, ``NotSupported`` without a chat template."""
        if not role:
            raise BadArgument("a role needs a name, such as user")
        if self._open_role is not None:
            raise BadArgument(f"role {role} begins inside role {self._open_role}: end that one first")
        if not self.template.has_template:
            raise no_chat_template()
        self._take_pending()
        is_answer = tool_call_id is not None or name is not None
        given = Message(role, "", tool_call_id=tool_call_id, name=name) if is_answer else None
        self._parts.append(Part(role, is_open=True, given=given))
        self._has_changed()

    def end_role(self) -> None:
        """Closes the open turn. Raises ``BadArgument`` if none is open."""
        if self._open_role is None:
            raise BadArgument("no role is open")
        self._take_pending()
        self._parts[-1] = replace(self._parts[-1], is_open=False)
        self._has_changed()

    def reopen(self) -> None:
        """Opens the last turn again, so that its text continues."""
        self._take_pending()
        self._parts[-1] = replace(self._parts[-1], is_open=True)
        self._has_changed()

    def generated(self, ids: Sequence[int], text: str) -> None:
        """Appends generated text: ``ids`` without the end token, and their text."""
        self._take_pending()
        if ids:
            _append(self._parts, [TextRun(text, tuple(ids))])
            self._generated = ids if self._is_settled else ()
            self._has_changed()

    def markup(self, text: str) -> None:
        """Appends text that may have special tokens, as if the model had written it."""
        if text:
            self.generated(self._tokenizer.encode_markup(text, continues=True), text)

    def called(self, reply: Message) -> None:
        """Declares that the last generated text, if it is the whole open turn, is ``reply``, which calls
        tools. A template that requires calls before their results gets them as calls."""
        if self._parts and self._parts[-1].is_open and len(self._parts[-1].runs) == 1:
            self._parts[-1] = replace(self._parts[-1], called=reply)

    def only(self, ids: Sequence[int]) -> None:
        """Starts an empty state with exactly these ids: no prefix is added."""
        self._has_prefix = False
        self.generated(ids, self._tokenizer.decode(ids, skip_special=False))

    def cut(self) -> None:
        """Ends the pending run of text and settles its ids. Called before a generation, a select, a fork and
        media. If the template rejects the conversation so far, ids stay unsettled until it accepts it."""
        self._take_pending()
        try:
            self._settle()
        except NotSupported:
            return

    def ids(self) -> list[int]:
        """Returns the current prompt's ids. Raises ``NotSupported`` if the template rejects the conversation
        or has no place for text between turns."""
        if self._is_settled:
            return list(self._ids)
        if self._ids_read is None:
            self._ids_read = _joined(self._segments_now())
        return list(self._ids_read)

    def ids_ahead(self) -> list[int]:
        """Returns the ids with which the next prompt probably begins: the current ``ids`` or, after an answer
        of the assistant, the ids of the conversation once another turn follows it (the result of its calls,
        or the user's). Raises the errors of ``ids``."""
        last = self._all_parts()[-1:]
        if not last or last[0].is_open or last[0].role != "assistant" or not last[0].is_generated:
            return self.ids()
        following = self.copied()
        following.begin_role("user" if last[0].called is None else "tool")
        return following.ids()

    def num_kept(self, ids: list[int]) -> int:
        """Returns the length of the common prefix of ``ids`` and the settled and generated ids."""
        return common_prefix(self._known_ids(), ids)

    def encode_choices(self, choices: Sequence[str]) -> EncodedChoices:
        """Returns the ids of the state with each of ``choices`` as its next text; the pending run is encoded
        again with each. ``choose`` then appends one. Reasoning that the prompt begins ends first, because a
        choice belongs to the answer. Raises the errors of ``ids``."""
        closing = self._end_of_reasoning()
        pending, self._pending = self._pending, []
        if closing and self._end_of_reasoning():  # the pending text did not begin it
            self.markup(closing)
        if self.template.has_channels and self._open_role == "assistant" and not self._parts[-1].runs:
            self.generated(self._tokenizer.encode_markup(ANSWER_HEAD, continues=True), ANSWER_HEAD)
        try:
            self._settle()
            if self._check is not None:
                self._check(pending)
        finally:
            self._pending, self._is_settled = pending, self._is_settled and not pending
        num_chars = sum([len(segment.span.text) for segment in self._segments])
        continues = self._tokenizer.continues_after(num_chars, self._ids[-1] if self._ids else None)
        return encode_choices(self._tokenizer, self._ids, "".join(pending), choices, continues=continues)

    def choose(self, encoded: EncodedChoices, index: int) -> None:
        """Appends one of the choices with exactly its encoded ids. The state must not have changed since
        ``encode_choices``."""
        text, ids = encoded.run(index)
        self._pending = []
        self.generated(ids, text)

    def fork(self) -> TokenState:
        """Returns an independent copy. This copies the ids; nothing is rendered or encoded."""
        self.cut()
        return self.copied()

    def copied(self) -> TokenState:
        """Returns an independent copy without ``cut``: this state does not change."""
        child = TokenState(self._tokenizer, self.template, self._check)
        child._pending = list(self._pending)
        child._media = dict(self._media)
        child._edges = dict(self._edges)
        child.unread = dict(self.unread)
        child._markup = self._markup
        child.placeholder_tokens = self.placeholder_tokens
        child._now = self._now
        child._tools = self._tools
        child._plain = self._plain
        child._writes_calls = self._writes_calls
        child._taken_parts = list(self._parts)
        child._layout = self._layout
        child._segments = list(self._segments)
        child._ids = list(self._ids)
        child._is_settled = self._is_settled
        child._has_prefix = self._has_prefix
        child._known, child._known_start = self._known, self._known_start
        child._attached = self._attached
        child._attached_spans = self._attached_spans
        child.num_computed = self.num_computed
        return child

    def text_view(self) -> str:
        """Returns the whole text, including markup. Raises the errors of ``ids``."""
        return "".join([span.text for span in self._spans(self._lay_out())])

    def opening(self) -> tuple[str, str] | None:
        """Returns the markup before the text of the open turn, and this text so far; None if no turn is open.
        The markup begins after the last content; strings of tools and tool calls in it are blanked. Raises
        the errors of ``ids``."""
        layout, parts = self._lay_out(), self._all_parts()
        if layout is None or not parts[-1].is_open:
            return None
        start = max([part.end for part in layout.shown], default=0)
        markup = layout.text[start:]
        for low, high in layout.untrusted_spans:
            low, high = max(low - start, 0), max(high - start, 0)
            markup = markup[:low] + " " * (high - low) + markup[high:]
        return markup, parts[-1].text

    def _end_of_reasoning(self) -> str:
        """Returns the markup that ends the reasoning in which the state is; empty if it is in none."""
        marks = reasoning_marks(self.template.source)
        opening = None if marks is None else self.opening()
        given = None if marks is None or opening is None else reasoning_format_after(marks, *opening)
        is_open = given is not None and given.is_open and not given.has_channels
        return f"\n{given.end}\n\n" if given is not None and is_open else ""

    def messages(self) -> list[dict[str, str]]:
        """Returns the turns so far, including the open one, as ``{"role": …, "content": …}``. A short mark
        stands for an image or a video."""
        return [
            {"role": part.role, "content": _marked(part.message(in_channels=self.template.has_channels))}
            for part in self._all_parts()
            if part.role is not None
        ]

    def token_texts(self, ids: Sequence[int]) -> list[str]:
        """Returns the texts of ids of the state, including special tokens. The first pseudo-token of an image
        or a video has its mark, the others nothing."""
        texts = self._tokenizer.list_texts(ids)
        marks = {
            next(one for one in known.ids if one < 0): medium_mark(medium)
            for medium, known in self._media.items()
        }
        return [marks.get(one, "") if one < 0 else text for one, text in zip(ids, texts, strict=True)]

    @property
    def num_settled(self) -> int:
        """The number of settled ids."""
        return len(self._ids)

    @property
    def is_settled(self) -> bool:
        """Whether all text has settled ids."""
        return self._is_settled

    @property
    def continues(self) -> bool:
        """Whether a generation that begins now follows other text (see ``Tokenizer.encode``)."""
        return bool(self._parts or self._pending)

    @property
    def last_turn(self) -> tuple[str | None, bool]:
        """The role of the last turn, None for text outside turns or an empty state; and whether it is
        open."""
        last = self._all_parts()[-1:]
        return (last[0].role, last[0].is_open) if last else (None, False)

    @property
    def _open_role(self) -> str | None:
        return self._parts[-1].role if self._parts and self._parts[-1].is_open else None

    def _known_ids(self) -> list[int]:
        """Returns the settled ids, and the generated ids after them."""
        return [*self._ids, *self._generated]

    def _has_changed(self) -> None:
        self._is_settled = False
        self._ids_read = None

    def _take_pending(self) -> None:
        _append(self._parts, self._pending_runs())
        self._pending = []

    def _pending_runs(self) -> list[TextRun]:
        return [TextRun("".join(self._pending))] if self._pending else []

    def _all_parts(self) -> list[Part]:
        """Returns the parts, with the pending text as a separate run."""
        if not self._pending:
            return self._parts
        parts = list(self._parts)
        _append(parts, self._pending_runs())
        return parts

    @property
    def _parts(self) -> list[Part]:
        """The parts without the pending text."""
        if self._runs_to_take:
            _append(self._taken_parts, self._runs_to_take)
            self._runs_to_take = []
        return self._taken_parts

    def _shown(self, parts: list[Part]) -> list[Part]:
        """Returns the parts for the template."""
        return parts if self._plain is None else self._plain.rewritten(parts)

    def _lay_out(self) -> Layout | None:
        turns = [part for part in self._shown(self._parts) if part.role is not None]
        if not turns:
            return None
        if not self._writes_calls:
            try:
                return self._laid_out(turns)
            except NotSupported:
                if not any(part.called for part in turns):
                    raise
        layout = self._laid_out(turns, writes_calls=True)
        self._writes_calls = True
        return layout

    def _laid_out(self, turns: Sequence[Part], *, writes_calls: bool = False) -> Layout:
        return lay_out(
            self.template,
            [
                part.message(writes_calls=writes_calls, in_channels=self.template.has_channels)
                for part in turns
                if not part.is_open
            ],
            turns[-1].role if turns[-1].is_open else None,
            tools=self._tools,
            now=self._now,
            previous=self._layout,
            closed_spans=self._tokenizer.closed_spans,
            placeholders={kind: markup.placeholder for kind, markup in self._markup_now().items()},
        )

    def _markup_now(self) -> dict[MediumKind, MediumMarkup]:
        """Returns the template's text for each kind of medium that the state has."""
        kinds = {medium_kind(medium) for medium in (*self._media, *self.unread)} - self._markup.keys()
        if kinds and self.template.has_template:
            for kind in kinds:
                token = self.placeholder_tokens.get(kind, "")
                self._markup[kind] = self.template.medium_markup(kind, self._tokenizer.closed_spans, token)
        return {kind: markup for kind, markup in self._markup.items() if markup is not None}

    def _make_span(self, medium: Medium) -> Span:
        known = self._media.get(medium)
        mark = medium_mark(medium)
        if known is None:
            return Span(mark, is_markup=False, ids=(), medium=medium_key(medium))
        return Span(mark, is_markup=False, ids=known.ids, medium=known.prepared.identity)

    def _spans(self, layout: Layout | None) -> list[Span]:
        parts = self._shown(self._all_parts())
        show = _ShowMedium(self._make_span, self._markup_now())
        spans = _make_spans(parts, layout, self._tokenizer, self.template, self._now, show)
        runs = parts[-1].runs if parts and parts[-1].is_open and parts[-1].role == "assistant" else ()
        if self.template.has_channels and runs and runs[0].ids is None:  # the prompt begins the answer
            spans.insert(len(spans) - len(runs), Span(ANSWER_HEAD, is_markup=True))
        spans = _with_edges(spans, self._edges) if self._edges else spans
        return spans if self._has_prefix else spans[1:]

    def _segments_now(self) -> list[Segment]:
        return self._encoded(self._lay_out())

    def _encoded(self, layout: Layout | None) -> list[Segment]:
        if self.unread:
            raise EngineFailed("an image or a video of this state is not prepared")
        if self._check is not None and any(texts := self._new_texts(layout)):
            self._check(texts)
        spans = self._spans(layout)
        if self._known is not None:
            cut_points = self._known.cut_points(spans, self._known_start)
            self.text_keys = [key for _, key in cut_points]
            self._attached = self._known.attached(cut_points)
            if self._attached is not None:
                self._attached_spans = _known_spans(spans, self._attached)
                spans = _with_known(spans, self._attached)
        return encode_spans(spans, self._tokenizer, self._segments)

    def _new_texts(self, layout: Layout | None) -> list[str]:
        """Returns the texts after the settled number of characters."""
        parts = [part for part in self._shown(self._all_parts()) if part.role is None or part.is_open]
        texts = [run.text for part in parts for run in part.runs if run.ids is None]
        if layout is not None:
            texts.insert(0, layout.text)
        num_settled = sum([len(segment.span.text) for segment in self._segments])
        new: list[str] = []
        for text in texts:
            new.append(text[num_settled:])
            num_settled = max(0, num_settled - len(text))
        return new

    def _settle(self) -> None:
        if self._is_settled:
            return
        layout = self._lay_out()
        segments = self._encoded(layout)
        ids = _joined(segments)
        known = self._known_ids()
        if ids[: len(known)] != known:  # not a continuation
            num_kept = common_prefix(known, ids)
            self.num_rerendered_tokens += len(known) - num_kept
            self.num_computed = min(self.num_computed, num_kept)
        self._layout, self._segments, self._ids, self._generated = layout, segments, ids, ()
        self._is_settled = True
        self._ids_read = None


@dataclass(frozen=True, slots=True)
class _MediumIds:
    """An image or a video in its prepared form, and its ids."""

    prepared: PreparedMedium
    ids: tuple[int, ...]


def medium_mark(medium: Medium) -> str:
    """Returns the mark that stands for an image or a video in texts.

    >>> from agentflow.protocol.images import Image
    >>> medium_mark(Image("sha256:4c4b6a3be1314ab86138bef4314dde022e600960d8689a2c8f8631802d20dab6"))
    '<image 4c4b6a3b>'
    """
    source = medium.file.source if isinstance(medium, Video) else medium.source
    is_file = FILE.fullmatch(source) is not None
    digest = source.removeprefix(DIGEST) if is_file else file_source(source.encode()).removeprefix(DIGEST)
    return f"<{medium_kind(medium)} {digest[:8]}>"


def _marked(message: Message) -> str:
    """Returns the content with a mark for each image and video."""
    parts = message.parts
    return "".join([part if isinstance(part, str) else medium_mark(part) for part in parts])


def _append(parts: list[Part], runs: Sequence[TextRun]) -> None:
    """Appends ``runs`` to the open turn or outside all turns."""
    last = parts[-1] if parts else None
    if runs and last is not None and (last.is_open or last.role is None):
        parts[-1] = replace(last, runs=(*last.runs, *runs))
    elif runs:
        parts.append(Part(None, tuple(runs)))


def _joined(segments: list[Segment]) -> list[int]:
    ids: list[int] = []
    for segment in segments:
        ids += segment.ids
    return ids


@dataclass(frozen=True, slots=True)
class _ShowMedium:
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


def _make_spans(
    parts: Sequence[Part],
    layout: Layout | None,
    tokenizer: Tokenizer,
    template: ChatTemplate,
    now: datetime,
    show: _ShowMedium,
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


def _with_edges(spans: Sequence[Span], edges: Mapping[str, tuple[str, str]]) -> list[Span]:
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


def _with_known(spans: Sequence[Span], attached: Attached) -> list[Span]:
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


def _known_spans(spans: Sequence[Span], attached: Attached) -> list[Span]:
    """Returns the spans of the known beginning."""
    point = attached.cut_point
    cut = spans[point.span]
    if point.edge is None:
        return [*spans[: point.span + 1]]
    ids = None if cut.ids is None else cut.ids[: point.num_ids]
    return [*spans[: point.span], Span(cut.text[: point.offset], cut.is_markup, ids)]
