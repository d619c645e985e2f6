"""The request and the answer of ``POST /v1/chat/completions``."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

from agentflow.protocol.sampling import MAX_TOP_LOGPROBS
from agentflow.server.openai.openai_fields import Count, GivenObject, Refused, SharedFields, Unread
from agentflow.server.openai.openai_message_types import ChatMessage, Tool, ToolChoiceField
from agentflow.server.openai.usage import UsageBody

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


class TokenLogprob(msgspec.Struct, kw_only=True):
    """A token of the answer. ``logprob`` is null where the text was encoded anew, which happens under a
    constraint."""

    token: str
    bytes: list[int]
    logprob: float | None
    top_logprobs: list[TopLogprob]


class ChoiceLogprobs(msgspec.Struct, kw_only=True):
    """Of all tokens of an answer, or of those that a chunk brings."""

    content: list[TokenLogprob]
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
