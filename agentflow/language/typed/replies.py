"""Messages of a conversation, and replies to it, as programs see them. ``protocol/chat`` has the forms that
are sent."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec

from agentflow.errors import BadArgument
from agentflow.language.typed.json_form import JsonRecord
from agentflow.language.typed.tools import DescribedTool, ToolCall, plain_call
from agentflow.protocol import chat
from agentflow.protocol.images import Medium, PlacedImage, Video, image_at, placed_in, split_at_media


@dataclass(frozen=True, slots=True)
class Message(JsonRecord):
    """One turn of a conversation. ``tool_calls``: of an assistant's message. ``tool_call_id``: the call that
    a ``tool`` message answers, of the tool ``name``. ``images``: images and videos with their places in the
    content, as in messages that ``s.messages()`` gives and ``af.conversation`` reads.

    >>> question = af.Message("user", "What do plants do?")
    >>> async with flow.state() as s:
    ...     s += af.conversation([question]) + af.gen("answer")
    """

    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    images: tuple[PlacedImage, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """The message in the format of OpenAI's API, which ``af.conversation`` accepts too.

        >>> af.Message("tool", "12 degrees", tool_call_id="call_1").as_dict()
        {'role': 'tool', 'content': '12 degrees', 'tool_call_id': 'call_1'}
        """
        shown: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.images:
            shown["content"] = [chat.content_part(part) for part in split_at_media(self.content, self.images)]
        if self.tool_calls:
            shown["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.text}}
                for call in self.tool_calls
            ]
        named = {"tool_call_id": self.tool_call_id, "name": self.name}
        return shown | {key: value for key, value in named.items() if value is not None}

    def to_dict(self) -> dict[str, Any]:
        return self.as_dict()

    @classmethod
    def _shown_fields(cls) -> tuple[str, ...]:
        return "role", "content", "tool_calls", "tool_call_id", "name"

    @classmethod
    def _from_json(cls, value: Any) -> Message:
        return make_message(read_message(value))


@dataclass(frozen=True, slots=True)
class Reply(JsonRecord):
    """A reply of the assistant: its prose, and its tool calls.

    >>> async with flow.state() as s:
    ...     s += af.conversation([{"role": "user", "content": "What do plants do?"}])
    ...     s += af.reply("answer")
    ...     answer = await s["answer"]
    >>> answer.text, answer.tool_calls
    ('Plants turn light into sugar.', ())
    """

    text: str
    tool_calls: tuple[ToolCall, ...] = ()

    def message(self) -> Message:
        """The reply as a message, to continue the conversation.

        >>> af.Reply("It is cold.").message().role
        'assistant'
        """
        return Message("assistant", self.text, self.tool_calls)


def read_reply(notation: str) -> Reply:
    """Reads a reply from its notation. ``ProtocolError`` if the notation is malformed or incomplete."""
    return make_reply(chat.read_reply(notation))


def reader_of_replies(tools: Iterable[DescribedTool]) -> Callable[[str], Reply]:
    """``read_reply`` for these tools: their calls have the functions, and arguments of the parameters' types.
    A call with arguments that are truncated or invalid has a fault."""
    known = {tool.name: tool for tool in tools if tool.function is not None}
    if not known:
        return read_reply
    return partial(_read_typed_reply, known)


def _read_typed_reply(known: Mapping[str, DescribedTool], notation: str) -> Reply:
    reply = read_reply(notation)
    calls = [
        known[call.name].call(call.text, call.id) if call.name in known else call for call in reply.tool_calls
    ]
    return replace(reply, tool_calls=tuple(calls))


def make_reply(received: chat.Reply) -> Reply:
    """The reply as programs see it."""
    return Reply(received.text, make_calls(received.tool_calls))


def make_calls(received: tuple[chat.CalledTool, ...]) -> tuple[ToolCall, ...]:
    """The calls as programs see them. Truncated ones have a fault."""
    return tuple([plain_call(call.name, call.arguments, call.id) for call in received])


def make_message(sent: chat.Message) -> Message:
    """The message as programs see it."""
    calls = make_calls(sent.tool_calls)
    return Message(sent.role, sent.content, calls, sent.tool_call_id, sent.name, sent.images)


def sent_message(message: Message) -> chat.Message:
    """The message in the form that is sent. ``BadArgument`` for invalid tool calls."""
    for call in message.tool_calls:
        if not isinstance(call, ToolCall):
            raise BadArgument(
                f"conversation: {call!r:.200} is not a tool call: give an af.ToolCall", param="messages"
            )
    calls = tuple([chat.CalledTool(call.id, call.name, call.text) for call in message.tool_calls])
    return chat.Message(
        message.role,
        message.content,
        False,
        calls,
        message.tool_call_id,
        message.name,
        images=message.images,
    )


class _Function(msgspec.Struct):
    name: str
    arguments: str


class _Call(msgspec.Struct):
    id: str
    function: _Function


class _Url(msgspec.Struct):
    url: str
    num_frames: int | None = None  # of a video


class _Part(msgspec.Struct):
    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: _Url | str | None = None  # a string: as OpenAI's responses have it
    video_url: _Url | None = None


class _OpenAIMessage(msgspec.Struct, forbid_unknown_fields=True):
    """A message in the format of OpenAI's API. ``reasoning_content``: as DeepSeek's API has it."""

    role: str
    content: str | list[_Part] | None = None
    refusal: str | None = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    reasoning_content: str | None = None

    @property
    def parts(self) -> list[str | Medium]:
        """The parts of the content. ``ValueError`` for a part that is no text, image or video."""
        if isinstance(self.content, str):
            return [self.content]
        parts: list[str | Medium] = []
        for part in self.content or ():
            if part.type in ("image_url", "input_image") and part.image_url is not None:
                url = part.image_url
                parts.append(image_at(url if isinstance(url, str) else url.url))
                continue
            if part.type == "video_url" and part.video_url is not None:
                parts.append(Video(image_at(part.video_url.url, "video"), part.video_url.num_frames))
                continue
            text = part.refusal if part.type == "refusal" else part.text
            if text is None:
                raise ValueError(
                    f"a part of the content is {part.type!r}: texts, images and videos are taken"
                )
            parts.append(text)
        return parts if any(parts) else [self.refusal or ""]


def read_message(message: Message | Mapping[str, Any]) -> chat.Message:
    """A ``Message``, or a dict as in OpenAI's API, in the form that is sent. ``BadArgument``."""
    if isinstance(message, Message):
        return sent_message(message)
    # Clients dump all fields of an answer; fields that are null or empty have no meaning.
    said: Any = message
    if isinstance(message, Mapping):
        said = {key: value for key, value in message.items() if value is not None and value != []}
    try:
        given = msgspec.convert(said, _OpenAIMessage)
        text, images = placed_in(given.parts)
    except ValueError as error:  # also for a lone surrogate in a name
        raise BadArgument(
            f"conversation: {message!r:.200} is not a message: {error}", param="messages"
        ) from None
    calls = [chat.CalledTool(c.id, c.function.name, c.function.arguments) for c in given.tool_calls or ()]
    return chat.Message(
        "system" if given.role == "developer" else given.role,
        text,
        False,
        tuple(calls),
        given.tool_call_id,
        given.name,
        given.reasoning_content,
        images,
    )
