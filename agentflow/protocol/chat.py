"""Conversations as in chat APIs, and replies to them: prose and tool calls in the order of generation.

A ``Conversation`` has messages with their tool calls, the tools, and the choice among them. A ``Reply`` is
sent as text, so it is streamed, resumed and recorded like any other value. Its *notation* is a JSON list of
parts, ``{"text": …}`` and ``{"id": …, "name": …, "arguments": …}``, the same for all models. The arguments of
a call are a JSON object as text; a truncated reply may end within it.

``ReplyWriter`` writes the notation piece by piece, ``ReplyReader`` reads it, and ``ReplySoFar`` collects the
result. References, transforms and messages use only the prose of a reply."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final, Literal, Self, TypeAlias

import msgspec

from agentflow.errors import BadArgument, ProtocolError
from agentflow.protocol.growing_text import GrowingText
from agentflow.protocol.images import (
    Image,
    Medium,
    PlacedImage,
    Video,
    check_frames,
    check_source,
    split_at_media,
)
from agentflow.protocol.unreadable import UNREADABLE

ROLES: Final = ("system", "user", "assistant", "tool")
IMAGE_ROLES: Final = ("user", "tool")
"""The roles whose turns may have images."""


class ToolSpec(msgspec.Struct, frozen=True, omit_defaults=True):
    """A tool that the model may call. ``parameters``: the JSON schema of an object. If it is not ``strict``,
    parts that cannot be enforced are relaxed, and the application must check the arguments."""

    name: str
    description: str
    parameters: dict[str, Any]
    strict: bool = True


class CalledTool(msgspec.Struct, frozen=True):
    """A tool call in an assistant message. ``arguments``: a JSON object, as text. In a truncated call, and in
    a message of a client, they may be any text."""

    id: str
    name: str
    arguments: str

    @property
    def is_whole(self) -> bool:
        """Whether the arguments are a JSON object. A truncated call must not run."""
        try:
            msgspec.json.decode(self.arguments, type=dict[str, msgspec.Raw])
        except UNREADABLE:
            return False
        return True


class Message(msgspec.Struct, frozen=True, omit_defaults=True):
    """One turn of a conversation. ``generated``: a model wrote some of it. ``tool_calls``: only in an
    assistant message. ``tool_call_id``: the call that a ``tool`` message answers, of the tool ``name``.
    ``reasoning``: the assistant's reasoning before the content; chat templates show it where the model needs
    it. ``images``: the images and videos of a ``user`` or ``tool`` message, in the order of their places in
    the content."""

    role: str
    content: str
    generated: bool = False
    tool_calls: tuple[CalledTool, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    reasoning: str | None = None
    images: tuple[PlacedImage, ...] = ()

    @property
    def parts(self) -> list[str | Medium]:
        """The content cut at its images and videos."""
        return split_at_media(self.content, self.images)


def content_part(
    part: str | Medium, url_of: Callable[[Image], str] = lambda image: image.url
) -> dict[str, Any]:
    """A part of a message in the format of OpenAI's chat API; videos are in the format of vLLM and SGLang.
    ``url_of``: returns the URL of a file.

    >>> content_part("What is this?")
    {'type': 'text', 'text': 'What is this?'}
    """
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if isinstance(part, Video):
        chosen = {} if part.num_frames is None else {"num_frames": part.num_frames}
        return {"type": "video_url", "video_url": {"url": url_of(part.file), **chosen}}
    return {"type": "image_url", "image_url": {"url": url_of(part)}}


class ToolChoice(msgspec.Struct, frozen=True, omit_defaults=True):
    """``auto``: the model may call tools and write prose. ``required``: it calls at least one tool, and
    writes nothing else. ``none``: it sees the tools, but calls none. ``name``: with ``required``, the tool
    that it calls. ``parallel``: it may call several."""

    mode: Literal["auto", "required", "none"] = "auto"
    name: str | None = None
    parallel: bool = True


FREE_CHOICE = ToolChoice()
"""The default choice."""


class Conversation(msgspec.Struct, frozen=True, omit_defaults=True):
    """A conversation that the assistant continues. ``messages``: if the last one is the assistant's, it is
    continued; otherwise the assistant's turn follows. ``tools``: the tools that the model sees. ``choice``:
    the tools that it may call."""

    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...] = ()
    choice: ToolChoice = FREE_CHOICE

    @property
    def media(self) -> list[Medium]:
        """The images and videos of all messages, in order."""
        return [placed.medium for message in self.messages for placed in message.images]

    def with_files(self, files: Iterable[Image]) -> Self:
        """The conversation with its images and videos replaced by ``files``, in order."""
        given = iter(files)
        messages = [
            msgspec.structs.replace(
                message,
                images=tuple([msgspec.structs.replace(one, image=next(given)) for one in message.images]),
            )
            if message.images
            else message
            for message in self.messages
        ]
        return msgspec.structs.replace(self, messages=tuple(messages))

    def check(self) -> Self:
        """Returns itself. Raises ``BadArgument``, whose ``param`` is ``messages``, ``tools`` or ``choice``,
        for an unknown role or tool, tool calls outside of an assistant's message, or two tools of one
        name."""
        for message in self.messages:
            if message.role not in ROLES:
                known = ", ".join(ROLES)
                raise BadArgument(
                    f"conversation: unknown role {message.role!r} (known: {known})", param="messages"
                )
            if message.tool_calls and message.role != "assistant":
                raise BadArgument(
                    f"conversation: a {message.role} message cannot have tool calls, only an assistant's can",
                    param="messages",
                )
            if message.images and message.role not in IMAGE_ROLES:
                raise BadArgument(
                    f"conversation: a {message.role} message cannot have images", param="messages"
                )
            places = [0, *[placed.at for placed in message.images], len(message.content)]
            if places != sorted(places):
                raise BadArgument("conversation: an image is outside its text", param="messages")
            for placed in message.images:
                check_source(placed.image.source, "messages")
                check_frames(placed.num_frames, "messages")
        names = [tool.name for tool in self.tools]
        if len(set(names)) < len(names):
            twice = next(name for name, count in Counter(names).items() if count > 1)
            raise BadArgument(f"conversation: two tools are named {twice!r}", param="tools")
        if self.choice.mode == "required" and not names:
            raise BadArgument("conversation: a call is required, but there are no tools", param="choice")
        if self.choice.name is not None and self.choice.name not in names:
            known = ", ".join(map(repr, names))
            text = f"conversation: unknown tool {self.choice.name!r} (known: {known})"
            raise BadArgument(text, param="choice")
        return self


@dataclass(frozen=True, slots=True)
class TextPiece:
    """More prose."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningPiece:
    """More of the reasoning that precedes an answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """A tool call begins; the ``Arguments`` that follow belong to it."""

    id: str
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """More of the arguments of the latest call: part of the text of a JSON object."""

    text: str


ReplyPiece: TypeAlias = TextPiece | ReasoningPiece | CallBegun | Arguments


class Reply(msgspec.Struct, frozen=True):
    """A reply of the assistant: its prose, and its tool calls."""

    text: str
    tool_calls: tuple[CalledTool, ...] = ()

    def message(self) -> Message:
        """The reply as a message, to continue the conversation."""
        return Message("assistant", self.text, generated=True, tool_calls=self.tool_calls)


class ReplyWriter:
    """Writes pieces in the notation of a reply, incrementally.

    >>> writer = ReplyWriter()
    >>> writer.push([TextPiece("I look."), CallBegun("c1", "weather"), Arguments("{")]) + writer.finish()
    '[{"text":"I look."},{"id":"c1","name":"weather","arguments":"{"}]'
    """

    def __init__(self) -> None:
        self._before = "["
        self._is_text = False  # whether a part with prose is open

    def push(self, pieces: Iterable[ReplyPiece]) -> str:
        """Returns the notation of the pieces, to be appended to the text."""
        return "".join([self._write(piece) for piece in pieces])

    def finish(self) -> str:
        """The end of the notation."""
        return "[]" if self._before == "[" else '"}]'

    def _write(self, piece: ReplyPiece) -> str:
        match piece:
            case CallBegun():
                self._is_text = False
                return self._part(f'{{"id":{_quoted(piece.id)},"name":{_quoted(piece.name)},"arguments":"')
            case TextPiece() if not self._is_text:
                self._is_text = True
                return self._part('{"text":"') + _quoted(piece.text)[1:-1]
            case _:
                return _quoted(piece.text)[1:-1]

    def _part(self, begin: str) -> str:
        before, self._before = self._before, '"},'
        return before + begin


class ReplyReader:
    """Reads pieces from the notation of a reply, incrementally.

    >>> reader = ReplyReader()
    >>> reader.push('[{"text":"I lo') + reader.push('ok."},{"id":"c1","name":"weather","argum')
    [TextPiece(text='I lo'), TextPiece(text='ok.')]
    """

    def __init__(self) -> None:
        self._rest = ""  # not read yet
        self._piece: type[TextPiece | Arguments] | None = None  # the kind of piece that is open
        self._has_begun = False
        self.is_over = False

    def push(self, text: str) -> list[ReplyPiece]:
        """The pieces in ``text``, which continues the notation. ``ProtocolError`` if it is malformed."""
        self._rest += text
        pieces: list[ReplyPiece] = []
        while self._read(pieces):
            continue
        return pieces

    def _read(self, pieces: list[ReplyPiece]) -> bool:
        """Reads one step. Returns whether there may be more to read."""
        return self._read_head(pieces) if self._piece is None else self._read_text(self._piece, pieces)

    def _read_head(self, pieces: list[ReplyPiece]) -> bool:
        """Reads up to the text of the next part, or to the end."""
        if self._rest == ("]" if self._has_begun else "[]"):
            self._rest, self.is_over = "", True
            return False
        end = self._rest.find(_ARGUMENTS)
        text = self._rest.find(_TEXT)
        if text in (0, 1):
            self._rest = self._rest[text + len(_TEXT) :]
            self._piece, self._has_begun = TextPiece, True
        elif end > 0:
            pieces.append(_call(self._rest[1:end] + "}"))
            self._rest = self._rest[end + len(_ARGUMENTS) :]
            self._piece, self._has_begun = Arguments, True
        else:
            return False
        return True

    def _read_text(self, piece: type[TextPiece | Arguments], pieces: list[ReplyPiece]) -> bool:
        """Reads up to the quote that ends the text; waits for the rest of an incomplete escape."""
        end = _WHOLE_CHARS.match(self._rest).end()  # type: ignore[union-attr]  # it matches nothing, too
        is_over = self._rest.startswith('"}', end)
        if end:
            pieces.append(piece(_unquoted(self._rest[:end])))
        self._rest = self._rest[end + 2 if is_over else end :]
        if is_over:
            self._piece = None
        return is_over


_WHOLE_CHARS = re.compile(r'(?:[^"\\]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*')
_TEXT = '{"text":"'
_ARGUMENTS = ',"arguments":"'


def _call(head: str) -> CallBegun:
    try:
        return msgspec.json.decode(head, type=CallBegun)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"malformed reply: {error}") from None


class ReplySoFar:
    """Collects a reply while its notation grows.

    >>> ReplySoFar().push('[{"text":"I look."},{"id":"c1","name":"weather","arguments":"{').now()
    Reply(text='I look.', tool_calls=(CalledTool(id='c1', name='weather', arguments='{'),))
    """

    def __init__(self) -> None:
        self._reader = ReplyReader()
        self._calls: list[tuple[CallBegun, list[str]]] = []
        self._text = GrowingText()
        self._num_read = 0  # characters of the notation

    @property
    def is_over(self) -> bool:
        """Whether the reply is complete."""
        return self._reader.is_over

    @property
    def text(self) -> str:
        """The prose so far."""
        return str(self._text)

    def text_from(self, at: int) -> str:
        """The prose so far from character ``at`` on."""
        return self._text.part(at)

    def follow(self, notation: GrowingText) -> Self:
        """Reads the rest of ``notation``, whose beginning was read before. ``ProtocolError`` if it is
        malformed."""
        return self.push(notation.part(self._num_read))

    def push(self, part: str) -> Self:
        """Reads the next part of the notation. ``ProtocolError`` if it is malformed."""
        self._num_read += len(part)
        for piece in self._reader.push(part) if part else ():
            match piece:
                case TextPiece():
                    self._text.put(len(self._text), piece.text)
                case CallBegun():
                    self._calls.append((piece, []))
                case Arguments():
                    self._calls[-1][1].append(piece.text)
        if self.is_over:
            self._text.end()
        return self

    def now(self) -> Reply:
        """The reply so far."""
        calls = [CalledTool(call.id, call.name, "".join(parts)) for call, parts in self._calls]
        return Reply(self.text, tuple(calls))


def read_reply(notation: str) -> Reply:
    """The reply. ``ProtocolError`` if the notation is malformed or incomplete."""
    found = ReplySoFar().push(notation)
    if not found.is_over:
        raise ProtocolError(f"malformed or incomplete reply: {notation[:100]!r}")
    return found.now()


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _unquoted(escaped: str) -> str:
    try:
        return str(json.loads(f'"{escaped}"'))
    except ValueError as error:
        raise ProtocolError(f"malformed reply: {error}") from None
