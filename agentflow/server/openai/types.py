"""The request and the answer of ``POST /v1/chat/completions``.

The messages and tools of OpenAI's chat requests, as they come.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

from agentflow.protocol.sampling import MAX_TOP_LOGPROBS
from agentflow.server.openai.sampling import Count, GivenObject, Refused, SharedFields, Unread
from agentflow.server.openai.usage import UsageBody

MAX_NAME_CHARS = 64

ToolName: TypeAlias = Annotated[str, Meta(pattern=f"^[a-zA-Z0-9_-]{{1,{MAX_NAME_CHARS}}}$")]


class TextPart(msgspec.Struct, tag_field="type", tag="text", forbid_unknown_fields=True):
    """A part of a message's text. ``prompt_cache_breakpoint``: what was computed is cached in any case."""

    text: str
    prompt_cache_breakpoint: Unread = None


class RefusalPart(msgspec.Struct, tag_field="type", tag="refusal", forbid_unknown_fields=True):
    """What an assistant said in place of an answer; it is text like any other."""

    refusal: str


class ImagePart(msgspec.Struct, tag_field="type", tag="image_url"):
    """Refused: no model here sees images."""

    image_url: msgspec.Raw


class AudioPart(msgspec.Struct, tag_field="type", tag="input_audio"):
    """Refused: no model here hears."""

    input_audio: msgspec.Raw


class FilePart(msgspec.Struct, tag_field="type", tag="file"):
    """Refused."""

    file: msgspec.Raw


Part: TypeAlias = TextPart | RefusalPart | ImagePart | AudioPart | FilePart
Content: TypeAlias = str | Annotated[list[Part], Meta(min_length=1)]


class _Message(msgspec.Struct, tag_field="role", kw_only=True, forbid_unknown_fields=True):
    """``name``: of the one who speaks; chat templates do not show it."""

    name: str | None = None


class SystemMessage(_Message, tag="system", kw_only=True):
    """What the application wants of the model."""

    content: Content


class DeveloperMessage(_Message, tag="developer", kw_only=True):
    """The same as ``system``."""

    content: Content


class UserMessage(_Message, tag="user", kw_only=True):
    """What the user says."""

    content: Content


class CalledFunction(msgspec.Struct, forbid_unknown_fields=True):
    """``arguments``: a JSON object, as text. ``parsed_arguments``: the same once more, by which clients'
    typed helpers send back what they were given."""

    name: ToolName
    arguments: str
    parsed_arguments: Unread = None


class MessageToolCall(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A call that the assistant asked for."""

    id: Annotated[str, Meta(min_length=1)]
    function: CalledFunction
    type: Literal["function"] = "function"
    index: int | None = None


class AssistantMessage(_Message, tag="assistant", kw_only=True):
    """What the model said, or asked to have called. ``content`` may be null with tool calls only.
    ``parsed``: the content once more, as of ``parsed_arguments``."""

    content: Content | None = None
    tool_calls: list[MessageToolCall] | None = None
    refusal: str | None = None
    audio: Unread = None
    annotations: Unread = None
    parsed: Unread = None
    function_call: Unread = None


class ToolMessage(_Message, tag="tool", kw_only=True):
    """What came of the call ``tool_call_id`` of a message before."""

    content: Content
    tool_call_id: str


class FunctionMessage(msgspec.Struct, tag_field="role", tag="function"):
    """Refused: what came before tools."""

    name: Unread = None
    content: Unread = None


ChatMessage: TypeAlias = (
    SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage | FunctionMessage
)


class FunctionSpec(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``parameters``: the JSON schema of an object; without it the tool takes none. ``strict``: arguments
    are always valid where the tool is called because it had to be."""

    name: ToolName
    description: str | None = None
    parameters: GivenObject = None
    strict: bool | None = None


class FunctionTool(msgspec.Struct, tag_field="type", tag="function", forbid_unknown_fields=True):
    """A tool that the model may ask to have called."""

    function: FunctionSpec


class CustomTool(msgspec.Struct, tag_field="type", tag="custom"):
    """Refused: a tool that takes free text."""

    custom: msgspec.Raw


Tool: TypeAlias = FunctionTool | CustomTool


class FunctionName(msgspec.Struct, forbid_unknown_fields=True):
    """Which tool."""

    name: ToolName


class NamedChoice(msgspec.Struct, tag_field="type", tag="function", forbid_unknown_fields=True):
    """This tool is called."""

    function: FunctionName


class AllowedTools(msgspec.Struct, tag_field="type", tag="allowed_tools"):
    """Refused."""

    allowed_tools: msgspec.Raw


class CustomChoice(msgspec.Struct, tag_field="type", tag="custom"):
    """Refused."""

    custom: msgspec.Raw


ToolChoiceField: TypeAlias = Literal["none", "auto", "required"] | NamedChoice | AllowedTools | CustomChoice


MAX_MESSAGES = 2048
MAX_TOOLS = 128


class TextFormat(msgspec.Struct, tag_field="type", tag="text", forbid_unknown_fields=True):
    """Any text."""


class ObjectFormat(msgspec.Struct, tag_field="type", tag="json_object", forbid_unknown_fields=True):
    """Any JSON object."""


class SchemaSpec(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A JSON schema (without one: any object). The text is always valid, ``strict`` or not."""

    name: Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    schema: GivenObject = None
    strict: bool | None = None


class SchemaFormat(msgspec.Struct, tag_field="type", tag="json_schema", forbid_unknown_fields=True):
    """A JSON value with this schema."""

    json_schema: SchemaSpec


ResponseFormat: TypeAlias = TextFormat | ObjectFormat | SchemaFormat


class ChatRequest(SharedFields, kw_only=True):
    """A conversation to go on with."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoiceField | None = None
    parallel_tool_calls: bool | None = None
    prediction: Unread = None
    modalities: list[Literal["text"]] | None = None
    verbosity: Literal["medium"] | None = None
    reasoning_effort: Literal["none"] | None = None
    audio: Refused = None
    functions: Refused = None
    function_call: Refused = None
    web_search_options: Refused = None
    moderation: Refused = None


class TopLogprob(msgspec.Struct, kw_only=True):
    """A token that could have stood there. ``bytes``: of its text, in UTF-8."""

    token: str
    bytes: list[int]
    logprob: float | None


class ChatTokenLogprob(msgspec.Struct, kw_only=True):
    """A token of the answer. ``logprob`` is null where the text was encoded anew, which happens under a
    constraint."""

    token: str
    bytes: list[int]
    logprob: float | None
    top_logprobs: list[TopLogprob]


class ChoiceLogprobs(msgspec.Struct, kw_only=True):
    """Of all tokens of an answer, or of those that a chunk brings."""

    content: list[ChatTokenLogprob]
    refusal: None = None


class AnsweredFunction(msgspec.Struct):
    """``arguments``: a JSON object, as text."""

    name: str
    arguments: str


class AnsweredToolCall(msgspec.Struct, kw_only=True):
    """A call that the model asks for."""

    id: str
    function: AnsweredFunction
    type: Literal["function"] = "function"


class AnswerMessage(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What the model said: text, or tool calls, or both."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[AnsweredToolCall] = []


class ChatChoice(msgspec.Struct, kw_only=True):
    """One of the ``n`` answers."""

    index: int
    message: AnswerMessage
    logprobs: ChoiceLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]


class ChatAnswer(msgspec.Struct, kw_only=True):
    """The whole answer. ``created``: Unix time."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: UsageBody
    object: Literal["chat.completion"] = "chat.completion"
