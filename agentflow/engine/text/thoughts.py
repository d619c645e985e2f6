"""Thoughts: the text that a reasoning model writes before its answer, between marks of its own.

``thought_marks`` finds the marks in a chat template. A template may open the thoughts itself at the end of
the prompt, or close them empty so that the model does not think; ``thinking_after`` tells from the rendered
prompt. ``ThoughtOutput`` separates thoughts and answer while they are generated, and ``ThoughtTokens``
follows the same text by its tokens, in the engine.

Models that write in channels (``channels``) have an end of thoughts and heads of answers instead of one mark.

The text of both begins and ends without white space: models are trained to write line breaks around marks.
Only the thoughts at the beginning of an answer are separated; marks after them are text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import Enum, auto
from typing import Any, NamedTuple

import msgspec

from agentflow.engine.text.channel_output import ChannelOutput
from agentflow.engine.text.channels import (
    ANSWER_HEAD,
    CALL_MARK,
    NEXT_MESSAGE,
    THOUGHTS_HEAD,
    has_channels,
)
from agentflow.engine.text.tool_output import ToolOutput, overlap
from agentflow.protocol.chat import Piece, TextPiece, ThoughtPiece

WHITE_SPACE = " \t\r\n"
_SPACES = WHITE_SPACE.encode()


class ThoughtMarks(NamedTuple):
    """The marks before and after thoughts. ``answer``: the head of an answer in text, of a model that writes
    in channels."""

    begin: str
    end: str
    answer: str = ""


KNOWN_MARKS = (
    ThoughtMarks("<think>", "</think>"),
    ThoughtMarks("[THINK]", "[/THINK]"),
    ThoughtMarks("<seed:think>", "</seed:think>"),
    ThoughtMarks("<thinking>", "</thinking>"),
    ThoughtMarks("<thought>", "</thought>"),
    ThoughtMarks("<reasoning>", "</reasoning>"),
)
"""The marks of published models."""
# Variables of templates that turn thinking on and off.
_SWITCHES = ("enable_thinking", "thinking")
# The member of a message that some templates read thoughts from.
_THOUGHTS_OF_MESSAGE = r"\.thinking\b|\[['\"]thinking['\"]\]"


def thought_marks(source: str) -> ThoughtMarks | None:
    """The marks that the chat template ``source`` has; None if its model does not think.

    >>> thought_marks("{{ message.content.split('</think>')[-1] }}")
    ThoughtMarks(begin='<think>', end='</think>', answer='')
    """
    if has_channels(source):
        return ThoughtMarks(THOUGHTS_HEAD, NEXT_MESSAGE, ANSWER_HEAD)
    return next((marks for marks in KNOWN_MARKS if marks.end in source), None)


def thinking_values(source: str, thinks: bool | None, effort: str | None = None) -> dict[str, Any]:
    """The variables of the chat template ``source`` that turn thinking on or off and set the effort, as far
    as it has any.

    >>> thinking_values("{% if enable_thinking is false %}<think></think>{% endif %}", thinks=False)
    {'enable_thinking': False}
    """
    values: dict[str, Any] = {}
    if thinks is not None:
        values |= next(({name: thinks} for name in _SWITCHES if _has_variable(source, name)), {})
    if effort is not None and _has_variable(source, "reasoning_effort"):
        values["reasoning_effort"] = effort
    return values


def _has_variable(source: str, name: str) -> bool:
    return re.search(rf"\b{name}\b", source) is not None


class Thinking(msgspec.Struct, frozen=True, array_like=True):
    """How one output may begin with thoughts. ``is_open``: the prompt began them, so the output begins
    inside. Otherwise the output begins with thoughts if it begins with the mark. ``budget``: the most tokens
    of thoughts; None is no limit. ``answer``, ``calls``: of a model that writes in channels, the head of an
    answer in text, and the beginning of the head of a call; empty if there may be none."""

    begin: str
    end: str
    is_open: bool
    budget: int | None = None
    answer: str = ""
    calls: str = ""

    @property
    def has_channels(self) -> bool:
        """Whether the model writes in channels."""
        return bool(self.answer or self.calls)

    def for_answer(self, *, has_calls: bool, must_call: bool) -> Thinking:
        """The same before an answer that may, or must, call tools."""
        if not self.has_channels:
            return self
        calls = CALL_MARK if has_calls else ""
        return msgspec.structs.replace(self, answer="" if must_call else self.answer, calls=calls)


def thinking_after(
    marks: ThoughtMarks, opening: str, written: str, *, budget: int | None = None
) -> Thinking | None:
    """How an answer may begin. ``opening``: the markup before it; ``written``: the part of it that the prompt
    already has. None if it has no thoughts: the prompt ended them, or began the answer."""
    begin, end, answer = marks
    text = opening + written
    begun, ended = text.rfind(begin), text.rfind(end)
    if begun > ended:
        return Thinking(begin, end, True, budget, answer)
    if written or (not answer and opening.rstrip(WHITE_SPACE).endswith(end)):
        return None
    return Thinking(begin, end, False, budget, answer)


class _State(Enum):
    START = auto()
    """The output so far may be the beginning of the mark before thoughts."""
    THOUGHTS = auto()
    GAP = auto()
    """White space between thoughts and answer."""
    ANSWER = auto()


class ThoughtOutput:
    r"""Reads one output: thoughts, then an answer, which ``output`` reads if it may have tool calls.

    >>> output = ThoughtOutput(Thinking("<think>", "</think>", is_open=False))
    >>> output.push("<think>\nIt is a gre") + output.push("eting.\n</think>\n\nHello")
    [ThoughtPiece(text='It is a gre'), ThoughtPiece(text='eting.'), TextPiece(text='Hello')]

    How the text is split into pushes affects only where adjacent pieces of one kind are split. An output that
    ends within its thoughts has no answer.
    """

    def __init__(self, thinking: Thinking, output: ToolOutput | None = None) -> None:
        self._marks = thinking
        self._output = output
        self._state = _State.THOUGHTS if thinking.is_open else _State.START
        self._held = ""
        self._has_thoughts = False  # not only white space

    @property
    def num_calls(self) -> int:
        """Tool calls reported so far."""
        return 0 if self._output is None else self._output.num_calls

    @property
    def may_begin(self) -> bool:
        """Whether all of the output so far may belong to the mark before thoughts."""
        return self._state is _State.START

    @property
    def is_thinking(self) -> bool:
        """Whether thoughts have begun and not ended."""
        return self._state is _State.THOUGHTS

    def push(self, text: str) -> list[Piece]:
        """Reads more text. Returns the pieces that are now certain."""
        return self._read(text, is_over=False, is_truncated=False)

    def finish(self, rest: str = "", *, is_truncated: bool = False) -> list[Piece]:
        """Reads ``rest`` and ends the output. Returns all remaining pieces. ``is_truncated``: as for
        ``ToolOutput``."""
        return self._read(rest, is_over=True, is_truncated=is_truncated)

    def _read(self, text: str, *, is_over: bool, is_truncated: bool) -> list[Piece]:
        self._held += text
        pieces: list[Piece] = []
        if self._state is _State.START:
            self._read_start(is_over)
        if self._state is _State.THOUGHTS:
            self._read_thoughts(pieces, is_over)
        if self._state is _State.GAP:
            self._held = self._held.lstrip(WHITE_SPACE)
            if self._held:
                self._state = _State.ANSWER
        if self._state is _State.ANSWER or (is_over and self._state is not _State.THOUGHTS):
            answer, self._held = self._held, ""
            if self._output is None:
                pieces += [TextPiece(answer)] if answer else []
            elif is_over:
                pieces += self._output.finish(answer, is_truncated=is_truncated)
            else:
                pieces += self._output.push(answer)
        return pieces

    def _read_start(self, is_over: bool) -> None:
        bare = self._held.lstrip(WHITE_SPACE)
        if bare.startswith(self._marks.begin):
            self._held = bare.removeprefix(self._marks.begin)
            self._state = _State.THOUGHTS
        elif is_over or not self._marks.begin.startswith(bare):
            self._state = _State.ANSWER

    def _read_thoughts(self, pieces: list[Piece], is_over: bool) -> None:
        if not self._has_thoughts:
            self._held = self._held.lstrip(WHITE_SPACE)
        end = self._marks.end
        at = self._held.find(end)
        is_ended = at >= 0
        if not is_ended:
            at = len(self._held) if is_over else len(self._held) - overlap(self._held, end)
        # White space is held back while it may be the last.
        thoughts = self._held[:at].rstrip(WHITE_SPACE)
        if thoughts:
            self._has_thoughts = True
            pieces.append(ThoughtPiece(thoughts))
        self._held = self._held[at + len(end) :] if is_ended else self._held[len(thoughts) :]
        if is_ended:
            self._state = _State.GAP


class ThoughtText:
    """The thoughts of one output, from the pieces that its reader returns."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._num_taken = 0  # of these

    def __str__(self) -> str:
        return "".join(self._texts)

    def take(self, pieces: Sequence[Piece]) -> None:
        """Appends what of the pieces is thoughts."""
        self._texts += [piece.text for piece in pieces if isinstance(piece, ThoughtPiece)]

    def new(self) -> str:
        """The thoughts since the last call."""
        start, self._num_taken = self._num_taken, len(self._texts)
        return "".join(self._texts[start:])


class AnswerText:
    """The answer in one output, without the ``thoughts`` before it. ``thinking``: None if it has none."""

    def __init__(self, thinking: Thinking | None) -> None:
        self._output: ThoughtOutput | ChannelOutput | None = None
        if thinking is not None and thinking.has_channels:
            self._output = ChannelOutput((), is_open=thinking.is_open)
        elif thinking is not None:
            self._output = ThoughtOutput(thinking)
        self.thoughts = ThoughtText()
        self._answer: list[str] = []
        self._num_chars = 0

    def push(self, text: str) -> str:
        """Reads more text. Returns what of it belongs to the answer."""
        self._num_chars += len(text)
        return text if self._output is None else self._take(self._output.push(text))

    def finish(self, text: str) -> str:
        """The whole answer, given the whole output."""
        if self._output is None:
            return text
        self._take(self._output.finish(text[self._num_chars :]))
        return "".join(self._answer)

    def _take(self, pieces: Sequence[Piece]) -> str:
        self.thoughts.take(pieces)
        answer = "".join([piece.text for piece in pieces if isinstance(piece, TextPiece)])
        self._answer.append(answer)
        return answer


class ThoughtTokens:
    """Follows the thoughts of one output by its tokens. ``data``: the bytes of all tokens before the answer.
    ``num_tokens``: the tokens of the thoughts, marks included; ``num_inside``: those after the first mark."""

    def __init__(self, thinking: Thinking) -> None:
        self.end_mark = thinking.end
        self._begin, self._end = thinking.begin.encode(), thinking.end.encode()
        self._state = _State.THOUGHTS if thinking.is_open else _State.START
        self._num_first = 0  # tokens up to the first mark
        self._tail = b""  # what may be part of a mark
        self.data = bytearray()
        self.num_inside = 0

    @property
    def num_tokens(self) -> int:
        return 0 if self.may_begin else self._num_first + self.num_inside

    @property
    def may_begin(self) -> bool:
        """Whether thoughts may still begin."""
        return self._state is _State.START

    @property
    def is_thinking(self) -> bool:
        """Whether thoughts have begun and not ended."""
        return self._state is _State.THOUGHTS

    @property
    def is_gap(self) -> bool:
        """Whether thoughts have ended, and only white space came after them."""
        return self._state is _State.GAP

    @property
    def is_over(self) -> bool:
        """Whether the answer has begun."""
        return self._state is _State.ANSWER

    def is_free(self, token: bytes) -> bool:
        """Whether this token, which comes next, is none of the answer's. Of a first mark that is spelled in
        several tokens, only the last is known to be none."""
        if self.may_begin:
            return (self._tail + token).lstrip(_SPACES).startswith(self._begin)
        return self.is_thinking or (self.is_gap and not token.strip(_SPACES))

    def begin_answer(self) -> None:
        """The next token belongs to the answer, whatever it is."""
        if self.may_begin:
            self._num_first = 0
        self._state = _State.ANSWER

    def take(self, token: bytes) -> bool:
        """Reads one more token. Returns whether it belongs to the answer."""
        match self._state:
            case _State.START:
                self._take_first(token)
            case _State.THOUGHTS:
                self.num_inside += 1
                self._find_end(token)
            case _State.GAP if token.strip(_SPACES):
                self._state = _State.ANSWER
        if self.is_over:
            return True
        self.data += token
        return False

    def rest_of_end(self) -> bytes:
        """The part of the mark after thoughts that is not written yet."""
        longest = min(len(self._tail), len(self._end) - 1)
        written = next((n for n in range(longest, 0, -1) if self._tail.endswith(self._end[:n])), 0)
        return self._end[written:]

    def _take_first(self, token: bytes) -> None:
        self._num_first += 1
        self._tail += token
        bare = self._tail.lstrip(_SPACES)
        if bare.startswith(self._begin):
            self._state, self._tail = _State.THOUGHTS, b""
            self._find_end(bare.removeprefix(self._begin))
        elif not self._begin.startswith(bare):
            self.begin_answer()

    def _find_end(self, token: bytes) -> None:
        read = self._tail + token
        at = read.find(self._end)
        if at < 0:
            self._tail = read[-len(self._end) :]
            return
        self._tail = b""
        self._state = _State.ANSWER if read[at + len(self._end) :].strip(_SPACES) else _State.GAP


def shown_thoughts(reasoning: str | None, content: str, source: str) -> str | None:
    """The thoughts of a past turn as the template is given them. None if it would not show them, or would
    show them twice because it finds others in the content."""
    marks = thought_marks(source)
    is_written = marks is not None and marks.end in content
    is_shown = "reasoning_content" in source or re.search(_THOUGHTS_OF_MESSAGE, source) is not None
    return None if is_written or not is_shown else reasoning or None
