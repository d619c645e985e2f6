"""Readers of answers in channels (``channels``).

``ChannelOutput`` separates reasoning, text and calls while they are generated, and ``ChannelTokens`` follows
the same output by its tokens, in the engine. ``read_channels`` reads a whole answer.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import Enum, auto

import msgspec
import regex

from agentflow.engine.text.channels import ANSWER_HEAD, CALL_MARK, NEXT_MESSAGE, REASONING_HEAD, call_head
from agentflow.engine.text.tool_output import JsonExtent, PieceReader, overlap
from agentflow.protocol.chat import (
    Arguments,
    CallBegun,
    CalledTool,
    Message,
    ReasoningPiece,
    ReplyPiece,
    TextPiece,
)
from agentflow.protocol.unreadable import UNREADABLE

_NEXT = NEXT_MESSAGE.encode()
_BETWEEN = "\n\n"
"""The separator of the texts of two messages: clients get them as one text."""
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
_MOST_HEAD_CHARS = 400
_TO = r"(?:\ ?to=(?P<to>[^\s<]+))?"
_HEAD = regex.compile(
    rf"(?:<\|start\|>assistant)?{_TO}(?:<\|channel\|>(?P<channel>[a-z]+))?{_TO}"
    r"\ ?(?:(?:<\|constrain\|>)?[a-z]+)?\ ?<\|message\|>"
)


class _State(Enum):
    HEAD = auto()
    REASONING = auto()
    TEXT = auto()
    ARGUMENTS = auto()
    """The arguments of a call that a constraint keeps valid. They are reported as they grow."""
    WHOLE_CALL = auto()
    """Arguments that are reported only when they are complete."""
    AFTER_CALL = auto()


class ChannelOutput(PieceReader):
    r"""Reads one answer. ``names``: the tools that may be called; None: any. ``is_open``: the prompt began
    the reasoning. ``is_constrained``: a constraint guarantees valid arguments after ``call_head``.

    >>> output = ChannelOutput(())
    >>> output.push("<|channel|>analysis<|message|>Easy.<|end|><|start|>assistant<|channel|>fin")
    [ReasoningPiece(text='Easy.')]
    >>> output.push("al<|message|>Hello")
    [TextPiece(text='Hello')]

    The division of the text into pushes affects only the division of adjacent pieces of one kind. A text
    without a head is the answer. Texts of several messages are separated by an empty line.
    """

    def __init__(
        self, names: Collection[str] | None, *, is_open: bool = False, is_constrained: bool = False
    ) -> None:
        super().__init__()
        self._names = None if names is None else frozenset(names)
        self._is_constrained = is_constrained
        self._state = _State.REASONING if is_open else _State.HEAD
        self._name = ""
        self._head = ""
        self._begun: set[type[ReplyPiece]] = set()
        self._is_new = False  # no text of this message was reported yet
        self._num_plain = 0  # the first characters of the held text, which are certainly text

    @property
    def is_undecided(self) -> bool:
        """Whether the output is within a head, so that the next text may be reasoning or the answer."""
        return self._state is _State.HEAD

    @property
    def is_reasoning(self) -> bool:
        """Whether reasoning has begun and not ended."""
        return self._state is _State.REASONING

    @property
    def is_text(self) -> bool:
        """Whether the output is within the text of the answer."""
        return self._state is _State.TEXT

    def _step(self, is_over: bool) -> bool:
        match self._state:
            case _State.HEAD:
                return self._read_head(is_over)
            case _State.REASONING:
                return self._read_text(ReasoningPiece, is_over)
            case _State.TEXT:
                return self._read_text(TextPiece, is_over)
            case _State.ARGUMENTS:
                return self._read_arguments()
            case _State.WHOLE_CALL:
                return self._read_whole_call(is_over)
            case _State.AFTER_CALL:
                return self._read_after_call(is_over)

    def _read_head(self, is_over: bool) -> bool:
        if not self._held:
            return False
        found = _HEAD.match(self._held, partial=True)
        if found is not None and found.partial and len(self._held) <= _MOST_HEAD_CHARS:
            if is_over and (self._held.startswith("<|") or self._is_truncated):
                self._held = ""  # truncated within a head
            elif is_over:
                self._begin(_State.TEXT)
            return is_over and bool(self._held)
        if found is None or found.partial or found.end() > _MOST_HEAD_CHARS:
            self._begin(_State.TEXT)
            self._num_plain = 1  # it may begin like a head, which ends a text
            return True
        self._head, self._held = found[0], self._held[found.end() :]
        recipient = found["to"] or ""
        self._name = recipient.removeprefix("functions.")
        if recipient != self._name and (self._names is None or self._name in self._names):
            is_valid = self._is_constrained and self._head.endswith(call_head(self._name))
            if is_valid:
                self._emit_call(self._name)
            self._begin(_State.ARGUMENTS if is_valid else _State.WHOLE_CALL)
        elif found["channel"] == "analysis" and not recipient:
            self._begin(_State.REASONING)
        else:
            self._begin(_State.TEXT)
        return True

    def _begin(self, state: _State) -> None:
        self._state = state
        self._is_new = True
        self._extent, self._num_read = JsonExtent(), 0

    def _read_text(self, kind: type[TextPiece] | type[ReasoningPiece], is_over: bool) -> bool:
        start = self._num_plain
        at = min([place for end in _ENDS if (place := self._held.find(end, start)) >= 0], default=-1)
        is_ended = at >= 0
        if not is_ended:
            unsure = 0 if is_over else max(overlap(self._held, end) for end in _ENDS)
            at = len(self._held) - unsure
        text, self._held = self._held[:at], self._held[at:]
        if text:
            if self._is_new and kind in self._begun:
                text = _BETWEEN + text
            self._begun.add(kind)
            self._is_new = False
            self._num_plain = 0
            self._pieces.append(kind(text))
        if is_ended:
            self._end_message()
        return is_ended

    def _end_message(self) -> None:
        """Handles held text that begins with the end of a message, which includes the beginning of the next
        one."""
        end = next(end for end in _ENDS if self._held.startswith(end))
        if end != "<|start|>":
            self._held = self._held[len(end) :]
        self._state = _State.HEAD

    def _read_arguments(self) -> bool:
        is_whole = self._emit_arguments()
        if is_whole:
            self._state = _State.AFTER_CALL
        return is_whole

    def _read_whole_call(self, is_over: bool) -> bool:
        bare = self._held.lstrip()
        if not bare:
            if is_over:
                self._held = ""
            return False
        end = None
        if bare[0] == "{":
            at = max(len(self._held) - len(bare), self._num_read)
            end = self._extent.read(self._held[at:])
            self._num_read = len(self._held)
            if end is None and not is_over:
                return False
            length = len(self._held) if end is None else at + end
            arguments = self._held[len(self._held) - len(bare) : length]
            if _is_object(arguments) or (end is None and self._is_truncated):
                self._emit_call(self._name)
                self._pieces.append(Arguments(arguments))
                self._held = self._held[length:]
                self._state = _State.AFTER_CALL
                return True
        self._begin(_State.TEXT)  # not a call of a known tool: it becomes text, so that no output is lost
        return True

    def _read_after_call(self, is_over: bool) -> bool:
        """Drops white space and the end of the message."""
        self._held = self._held.lstrip()
        if self._held.startswith(_ENDS):
            self._end_message()
            return True
        if not self._held or (not is_over and any(end.startswith(self._held) for end in _ENDS)):
            return False
        if is_over and any(end.startswith(self._held) for end in _ENDS):
            self._held = ""  # truncated within the end of the message
            return False
        self._state = _State.HEAD
        return True


class ChannelTokens:
    """Follows the reasoning of one output by its tokens, like ``ReasoningTokens``. ``has_answer``,
    ``has_calls``: whether an answer in text, or calls, may follow it; both if the model decides.

    ``data``: the bytes of the tokens before the answer: reasoning, its marks, and the head of an answer in
    text. The head of a call belongs to the answer. ``num_tokens``: the number of these tokens;
    ``num_inside``: the tokens of reasoning, without heads. ``num_held``: the tokens of an incomplete head.
    """

    def __init__(self, *, is_open: bool, has_answer: bool, has_calls: bool) -> None:
        heads = [REASONING_HEAD] + [ANSWER_HEAD] * has_answer + [CALL_MARK] * has_calls
        self._heads = [head.encode() for head in heads]
        self._state = _State.REASONING if is_open else _State.HEAD
        self._tail = b""  # the last bytes of reasoning, which may be part of the mark at its end
        self._head = b""
        self.data = bytearray()
        self.num_tokens = self.num_inside = self.num_held = 0
        self.has_head = False
        """Whether the answer is text, after its head."""

    @property
    def is_undecided(self) -> bool:
        """Whether the next token belongs to a head, so that reasoning or the answer may follow."""
        return self._state is _State.HEAD

    @property
    def is_reasoning(self) -> bool:
        """Whether reasoning has begun and not ended."""
        return self._state is _State.REASONING

    @property
    def is_over(self) -> bool:
        """Whether the answer has begun."""
        return self._state is _State.TEXT

    @property
    def is_ending(self) -> bool:
        """Whether the end of the reasoning is partly written, so that only its rest may follow."""
        return self.is_reasoning and len(_NEXT) - len(self.rest_of_end()) >= len(_ENDS[0])

    def is_free(self, token: bytes) -> bool:
        """Whether the next token, ``token``, is not part of the answer."""
        head = self._head + token
        return self.is_reasoning or (self.is_undecided and any(one.startswith(head) for one in self._heads))

    def rests_of_heads(self, *, may_reason: bool) -> list[bytes]:
        """Returns the texts that may complete the head. ``may_reason``: it may be the head of reasoning."""
        heads = self._heads if may_reason else self._heads[1:]
        return [head[len(self._head) :] for head in heads if head.startswith(self._head)]

    def read(self, token: bytes) -> None:
        """Reads one more token."""
        if self.is_reasoning:
            self.num_tokens += 1
            self.num_inside += 1
            self.data += token
            self._find_end(token)
        elif self.is_undecided:
            self._take_of_head(token)

    def rest_of_end(self) -> bytes:
        """Returns the part of the end of the reasoning that is not written yet."""
        return _NEXT[overlap(self._tail, _NEXT) :]

    def _take_of_head(self, token: bytes) -> None:
        self._head += token
        self.num_held += 1
        head = next((head for head in self._heads if self._head.startswith(head)), None)
        if head is None and any(one.startswith(self._head) for one in self._heads):
            return
        is_reasoning = head == self._heads[0]
        self.has_head = head == ANSWER_HEAD.encode()
        if is_reasoning or self.has_head:
            self.data += self._head
            self.num_tokens += self.num_held
        self._state = _State.REASONING if is_reasoning else _State.TEXT
        self._head, self.num_held = b"", 0

    def _find_end(self, token: bytes) -> None:
        read = self._tail + token
        if _NEXT in read:
            self._tail, self._state = b"", _State.HEAD
        else:
            self._tail = read[-len(_NEXT) :]


def _is_object(text: str) -> bool:
    try:
        msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    except UNREADABLE:
        return False
    return True


def read_channels(text: str, known: Message | None = None) -> Message:
    """Returns a whole answer as a message. ``known``: the same answer, whose calls have ids."""
    output = ChannelOutput(None)
    pieces = [*output.push(text), *output.finish(is_truncated=True)]
    calls: list[CalledTool] = []
    for piece in pieces:
        if isinstance(piece, CallBegun):
            calls.append(CalledTool(f"call_{len(calls)}", piece.name, ""))
        elif isinstance(piece, Arguments):
            last = calls[-1]
            calls[-1] = msgspec.structs.replace(last, arguments=last.arguments + piece.text)
    if known is not None and len(known.tool_calls) == len(calls):
        calls = [*known.tool_calls]
    return Message(
        "assistant",
        "".join([piece.text for piece in pieces if isinstance(piece, TextPiece)]),
        generated=True,
        tool_calls=tuple(calls),
        reasoning="".join([piece.text for piece in pieces if isinstance(piece, ReasoningPiece)]) or None,
    )
