"""Reasoning: the text that a model writes before its answer, between marks.

``reasoning_marks`` finds the marks in a chat template. A template may open the reasoning itself at the end of
the prompt, or close it empty so that the model does not reason; ``reasoning_format_after`` decides this from
the rendered prompt. ``ReasoningTokens`` follows an output by its tokens, in the engine, and decides where the
answer begins. ``ReasoningOutput`` separates reasoning and answer there while they are generated.

Models that write in channels (``channels``) have an end of the reasoning and heads of answers instead of one
mark.

Reasoning and answer begin and end without white space: models are trained to write line breaks around marks.
Only the reasoning at the beginning of an answer is separated; later marks are text.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from enum import Enum, auto
from typing import Any, NamedTuple, TypeAlias

import msgspec

from agentflow.engine.text.channel_output import ChannelOutput
from agentflow.engine.text.channels import ANSWER_HEAD, CALL_MARK, NEXT_MESSAGE, REASONING_HEAD, has_channels
from agentflow.engine.text.tool_output import ToolOutput, overlap
from agentflow.protocol.chat import ReasoningPiece, ReplyPiece, TextPiece

WHITE_SPACE = " \t\r\n"
SPACES = WHITE_SPACE.encode()


class ReasoningMarks(NamedTuple):
    """The marks before and after reasoning."""

    begin: str
    end: str
    answer: str = ""  # the head of an answer in text, of a model that writes in channels


KNOWN_MARKS = (
    ReasoningMarks("<think>", "</think>"),
    ReasoningMarks("[THINK]", "[/THINK]"),
    ReasoningMarks("<seed:think>", "</seed:think>"),
    ReasoningMarks("<thinking>", "</thinking>"),
    ReasoningMarks("<thought>", "</thought>"),
    ReasoningMarks("<reasoning>", "</reasoning>"),
)
"""The marks of published models."""
# The variables of templates that turn reasoning on and off.
_SWITCHES = ("enable_thinking", "thinking")
# The member of a message from which some templates read reasoning.
_REASONING_OF_MESSAGE = r"\.thinking\b|\[['\"]thinking['\"]\]"


@functools.lru_cache(maxsize=64)
def reasoning_marks(source: str) -> ReasoningMarks | None:
    """Returns the marks in the chat template ``source``; None if its model does not reason.

    >>> reasoning_marks("{{ message.content.split('</think>')[-1] }}")
    ReasoningMarks(begin='<think>', end='</think>', answer='')
    """
    if has_channels(source):
        return ReasoningMarks(REASONING_HEAD, NEXT_MESSAGE, ANSWER_HEAD)
    return next((marks for marks in KNOWN_MARKS if marks.end in source), None)


def reasoning_values(source: str, reasons: bool | None, effort: str | None = None) -> dict[str, Any]:
    """Returns values for the variables of the chat template ``source`` that turn reasoning on or off and set
    the effort, if it has such variables.

    >>> reasoning_values("{% if enable_thinking is false %}<think></think>{% endif %}", reasons=False)
    {'enable_thinking': False}
    """
    values: dict[str, Any] = {}
    if reasons is not None:
        values |= next(({name: reasons} for name in _SWITCHES if _has_variable(source, name)), {})
    if effort is not None and _has_variable(source, "reasoning_effort"):
        values["reasoning_effort"] = effort
    return values


def _has_variable(source: str, name: str) -> bool:
    return re.search(rf"\b{name}\b", source) is not None


class ReasoningFormat(msgspec.Struct, frozen=True, array_like=True):
    """How one output may begin with reasoning."""

    begin: str  # the mark before reasoning
    end: str  # the mark after reasoning
    is_open: bool  # the prompt began the reasoning; otherwise ``begin`` comes first
    budget: int | None = None  # the most tokens of reasoning; None: no limit
    answer: str = ""  # with channels: the head of an answer in text; empty if none is allowed
    calls: str = ""  # with channels: the beginning of the head of a call; empty if none is allowed
    strips: bool = True  # remove white space before the answer; False under a constraint, which decides

    @property
    def has_channels(self) -> bool:
        """Whether the model writes in channels."""
        return bool(self.answer or self.calls)

    def for_answer(self, *, has_calls: bool, must_call: bool) -> ReasoningFormat:
        """Returns the format for an answer that may, or must, call tools."""
        if not self.has_channels:
            return self
        calls = CALL_MARK if has_calls else ""
        return msgspec.structs.replace(self, answer="" if must_call else self.answer, calls=calls)


def reasoning_format_after(
    marks: ReasoningMarks, opening: str, written: str, *, budget: int | None = None
) -> ReasoningFormat | None:
    """Returns how an answer may begin with reasoning. None if it has none: the prompt ended it, or began the
    answer.

    Args:
        marks: the model's marks.
        opening: the markup before the answer.
        written: the part of the answer that the prompt already has.
        budget: the most tokens of reasoning; None: no limit.
    """
    begin, end, answer = marks
    text = opening + written
    begun, ended = text.rfind(begin), text.rfind(end)
    if begun > ended:
        return ReasoningFormat(begin, end, True, budget, answer)
    if written or (not answer and opening.rstrip(WHITE_SPACE).endswith(end)):
        return None
    return ReasoningFormat(begin, end, False, budget, answer)


class _State(Enum):
    START = auto()
    """The output so far may be the beginning of the mark before reasoning."""
    REASONING = auto()
    GAP = auto()
    """White space between reasoning and answer."""
    ANSWER = auto()


class ReasoningOutput:
    r"""Reads one output: reasoning, then an answer, which ``output`` reads if it may have tool calls.

    ``answer_at`` comes from ``Progress``, together with the text: the character at which the answer begins,
    counted from the first of the output, or -1 if it has not begun.

    >>> output = ReasoningOutput(ReasoningFormat("<think>", "</think>", is_open=False))
    >>> output.push("<think>\nIt is a gre", -1) + output.push("eting.\n</think>\n\nHello", 37)
    [ReasoningPiece(text='It is a gre'), ReasoningPiece(text='eting.'), TextPiece(text='Hello')]

    The division of the text into pushes affects only the division of adjacent pieces of one kind. An output
    that ends within its reasoning has no answer.
    """

    def __init__(self, reasoning_format: ReasoningFormat, output: ToolOutput | None = None) -> None:
        self._marks = reasoning_format
        self._output = output
        self._state = _State.REASONING if reasoning_format.is_open else _State.START
        self._held = ""
        self._num_read = 0
        self._has_reasoning = False  # other than white space

    @property
    def num_calls(self) -> int:
        """The number of tool calls reported so far."""
        return 0 if self._output is None else self._output.num_calls

    @property
    def is_undecided(self) -> bool:
        """Whether the output so far may be the mark before reasoning or a part of the answer."""
        return self._state is _State.START

    @property
    def is_reasoning(self) -> bool:
        """Whether reasoning has begun, and the answer has not."""
        return self._state is _State.REASONING

    def push(self, text: str, answer_at: int) -> list[ReplyPiece]:
        """Reads more text. Returns the pieces that are now certain."""
        return self._read(text, answer_at, is_over=False, is_truncated=False)

    def finish(self, rest: str, answer_at: int, *, is_truncated: bool = False) -> list[ReplyPiece]:
        """Reads ``rest`` and ends the output. Returns all remaining pieces. ``is_truncated``: as for
        ``ToolOutput``."""
        return self._read(rest, answer_at, is_over=True, is_truncated=is_truncated)

    def _read(self, text: str, answer_at: int, *, is_over: bool, is_truncated: bool) -> list[ReplyPiece]:
        self._held += text
        self._num_read += len(text)
        pieces: list[ReplyPiece] = []
        if self._state is not _State.ANSWER:
            self._read_reasoning(answer_at, is_over, pieces)
        if self._state is _State.ANSWER:
            answer, self._held = self._held, ""
            if self._output is None:
                pieces += [TextPiece(answer)] if answer else []
            elif is_over:
                pieces += self._output.finish(answer, is_truncated=is_truncated)
            else:
                pieces += self._output.push(answer)
        return pieces

    def _read_reasoning(self, answer_at: int, is_over: bool, pieces: list[ReplyPiece]) -> None:
        has_answer = answer_at >= 0
        num_before = len(self._held) - (self._num_read - answer_at) if has_answer else len(self._held)
        before, answer = self._held[:num_before], self._held[num_before:]
        bare = before.lstrip(WHITE_SPACE)
        if self._state is _State.START and bare.startswith(self._marks.begin):
            self._state, before = _State.REASONING, bare.removeprefix(self._marks.begin)
        if self._state is _State.REASONING:
            before = self._deliver(before, pieces, is_whole=has_answer or is_over)
        if has_answer or (is_over and self._state is _State.START):
            self._state, before = _State.ANSWER, "" if has_answer else before
        self._held = before + answer

    def _deliver(self, reasoning: str, pieces: list[ReplyPiece], *, is_whole: bool) -> str:
        """Delivers reasoning, and returns the text to hold back: the end of the reasoning that may be white
        space and the mark after it. If the reasoning is complete, this text is dropped."""
        if not self._has_reasoning:
            reasoning = reasoning.lstrip(WHITE_SPACE)
        bare = reasoning.rstrip(WHITE_SPACE)
        end = self._marks.end
        if bare.endswith(end):
            bare = bare.removesuffix(end)
        elif not is_whole:
            bare = reasoning[: len(reasoning) - overlap(reasoning, end)]
        bare = bare.rstrip(WHITE_SPACE)
        if bare:
            self._has_reasoning = True
            pieces.append(ReasoningPiece(bare))
        return reasoning[len(bare) :]


AnswerOutput: TypeAlias = ToolOutput | ReasoningOutput | ChannelOutput
"""The reader of an answer that has more than text."""


def push_output(output: AnswerOutput, text: str, answer_at: int | None) -> list[ReplyPiece]:
    """``output.push``, with ``answer_at`` of the ``Progress`` that had the text."""
    if isinstance(output, ReasoningOutput):
        return output.push(text, -1 if answer_at is None else answer_at)
    return output.push(text)


def finish_output(
    output: AnswerOutput, rest: str, answer_at: int | None, *, is_truncated: bool = False
) -> list[ReplyPiece]:
    """``output.finish``, with ``answer_at`` of ``Finished``."""
    if isinstance(output, ReasoningOutput):
        return output.finish(rest, -1 if answer_at is None else answer_at, is_truncated=is_truncated)
    return output.finish(rest, is_truncated=is_truncated)


class ReasoningText:
    """The reasoning of one output, from the pieces that its reader returns."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._num_taken = 0  # the characters that ``new`` has returned

    def __str__(self) -> str:
        return "".join(self._texts)

    def append(self, pieces: Sequence[ReplyPiece]) -> None:
        """Appends the reasoning among the pieces."""
        self._texts += [piece.text for piece in pieces if isinstance(piece, ReasoningPiece)]

    def new(self) -> str:
        """Returns the reasoning since the last call."""
        start, self._num_taken = self._num_taken, len(self._texts)
        return "".join(self._texts[start:])


class AnswerText:
    """The answer in one output, without the ``reasoning`` before it."""

    def __init__(self, reasoning_format: ReasoningFormat) -> None:
        self._output: ReasoningOutput | ChannelOutput = (
            ChannelOutput((), is_open=reasoning_format.is_open)
            if reasoning_format.has_channels
            else ReasoningOutput(reasoning_format)
        )
        self.reasoning = ReasoningText()
        self._answer: list[str] = []
        self._num_chars = 0

    def push(self, text: str, answer_at: int | None) -> str:
        """Reads more text. ``answer_at``: from ``Progress``. Returns the new text of the answer."""
        self._num_chars += len(text)
        return self._take(push_output(self._output, text, answer_at))

    def finish(self, text: str, answer_at: int | None) -> str:
        """Returns the whole answer. ``text``: the whole output."""
        self._take(finish_output(self._output, text[self._num_chars :], answer_at))
        return "".join(self._answer)

    def _take(self, pieces: Sequence[ReplyPiece]) -> str:
        self.reasoning.append(pieces)
        answer = "".join([piece.text for piece in pieces if isinstance(piece, TextPiece)])
        self._answer.append(answer)
        return answer


class ReasoningTokens:
    """Follows the reasoning of one output by its tokens, and decides where it ends and the answer begins.

    ``has_end_token``: the mark after reasoning is one token of the model. Then only this token ends it; the
    same text in other tokens, for example in a quotation, does not.

    ``data``: the bytes of all tokens before the answer. ``num_tokens``: the number of these tokens, if there
    is reasoning; ``num_inside``: the tokens of reasoning after the first mark."""

    def __init__(self, reasoning_format: ReasoningFormat, *, has_end_token: bool = False) -> None:
        self.end_mark = reasoning_format.end
        self._begin, self._end = reasoning_format.begin.encode(), reasoning_format.end.encode()
        self._has_end_token = has_end_token
        self._state = _State.REASONING if reasoning_format.is_open else _State.START
        self._num_before = 0
        self._tail = b""  # the last bytes, which may be part of a mark
        self.data = bytearray()
        self.num_inside = 0
        self.answer_at = -1
        """The character of the output at which the answer begins; -1 before."""

    @property
    def num_tokens(self) -> int:
        return 0 if self.is_undecided else self._num_before

    @property
    def is_undecided(self) -> bool:
        """Whether reasoning or the answer may begin."""
        return self._state is _State.START

    @property
    def is_reasoning(self) -> bool:
        """Whether reasoning has begun and not ended."""
        return self._state is _State.REASONING

    @property
    def is_gap(self) -> bool:
        """Whether reasoning has ended, and only white space has followed."""
        return self._state is _State.GAP

    @property
    def is_over(self) -> bool:
        """Whether the answer has begun."""
        return self._state is _State.ANSWER

    def begin_answer(self) -> None:
        """Begins the answer with the next token, unconditionally."""
        if self.is_undecided:
            self._num_before = 0
            self.data.clear()
        self._begin_answer(b"")

    def read(self, token: bytes) -> bool:
        """Reads one more token. Returns whether it belongs to the answer, at least in part."""
        match self._state:
            case _State.START:
                self._take_first(token)
            case _State.REASONING:
                self.num_inside += 1
                self._find_end(token, token)
            case _State.GAP if token.strip(SPACES):
                self._begin_answer(token[: len(token) - len(token.lstrip(SPACES))])
        if self.is_over:
            return True
        self.data += token
        self._num_before += 1
        return False

    def rest_of_end(self) -> bytes:
        """Returns the part of the mark after reasoning that is not written yet. Empty if it is one token."""
        return b"" if self._has_end_token else self._end[overlap(self._tail, self._end) :]

    def _begin_answer(self, skipped: bytes) -> None:
        """Begins the answer. ``skipped``: the beginning of its first token, which is not part of it."""
        self._state = _State.ANSWER
        if self.answer_at < 0:
            self.answer_at = len((self.data + skipped).decode(errors="replace"))

    def _take_first(self, token: bytes) -> None:
        self._tail += token
        bare = self._tail.lstrip(SPACES)
        if bare.startswith(self._begin):
            self._state, self._tail = _State.REASONING, b""
            self._find_end(bare.removeprefix(self._begin), token)
        elif not self._begin.startswith(bare):
            self.begin_answer()

    def _find_end(self, text: bytes, token: bytes) -> None:
        """Searches for the mark after reasoning. ``text``: the part of ``token`` that belongs to it."""
        if self._has_end_token:
            if token == self._end:
                self._state = _State.GAP
            return
        read = self._tail + text
        at = read.find(self._end)
        if at < 0:
            self._tail = read[-len(self._end) :]
            return
        self._tail = b""
        answer = read[at + len(self._end) :].lstrip(SPACES)
        if answer:
            self._begin_answer(token[: len(token) - len(answer)])
        else:
            self._state = _State.GAP


def shown_reasoning(reasoning: str | None, content: str, source: str) -> str | None:
    """Returns the reasoning of a past turn for the template. None if the template would not show it, or would
    show it twice because the content has reasoning too."""
    marks = reasoning_marks(source)
    is_written = marks is not None and marks.end in content
    is_shown = "reasoning_content" in source or re.search(_REASONING_OF_MESSAGE, source) is not None
    return None if is_written or not is_shown else reasoning or None
