"""What the requests of Anthropic's API have besides their messages, and its answers.

Every bound stands in the type, so that the OpenAPI document says it too. Null is the same as leaving a field
out, and all that a field takes that is not supported.

The messages of Anthropic's API and the content blocks in them, as requests bring them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

from agentflow.engine.request import MAX_PRIORITY
from agentflow.protocol.ops import MAX_SALT_CHARS
from agentflow.protocol.sampling import MAX_INT, MAX_STOP_CHARS, MAX_STOPS

MAX_BLOCKS = 2048

# An object that is read by itself, after its bounds were checked (given_object.py).
GivenObject: TypeAlias = Annotated[msgspec.Raw, Meta(extra_json_schema={"type": "object"})]


class CacheControl(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """No effect: what was computed is kept for whoever begins alike, as long as there is room."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class DirectCaller(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The model itself called the tool."""

    type: Literal["direct"]


class TextBlock(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="text"):
    """Text."""

    text: str
    cache_control: CacheControl | None = None
    citations: Annotated[list[None], Meta(max_length=0)] | None = None


class OnlyTextBlock(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Text, where no other blocks can be."""

    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None
    citations: Annotated[list[None], Meta(max_length=0)] | None = None


Text: TypeAlias = str | Annotated[list[OnlyTextBlock], Meta(max_length=MAX_BLOCKS)]


class ToolUseBlock(
    msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="tool_use"
):
    """The assistant asked for a call."""

    id: Annotated[str, Meta(min_length=1)]
    name: Annotated[str, Meta(min_length=1)]
    input: GivenObject
    cache_control: CacheControl | None = None
    caller: DirectCaller | None = None
    toolset_name: None = None


class ToolResultBlock(
    msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="tool_result"
):
    """What came of the call. ``is_error``: the model is told so, in words before the content."""

    tool_use_id: str
    content: Text | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None
    toolset_name: None = None


ContentBlock: TypeAlias = TextBlock | ToolUseBlock | ToolResultBlock


class InputMessage(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One message. Tool calls are the assistant's, their results the user's, and a system message in the
    middle of a conversation is text."""

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[ContentBlock], Meta(max_length=MAX_BLOCKS)]


MAX_MESSAGES = 2048
MAX_TOOLS = 2048

ToolName: TypeAlias = Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]{1,128}$")]
StopString: TypeAlias = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARS)]


class Tool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A tool of the client's own. ``strict``, ``eager_input_streaming``: calls are valid, and arguments
    streamed, in any case. ``input_examples`` are refused: templates have no place for them."""

    name: ToolName
    input_schema: GivenObject
    type: Literal["custom"] | None = None
    description: str | None = None
    cache_control: CacheControl | None = None
    strict: bool | None = None
    eager_input_streaming: bool | None = None
    allowed_callers: list[Literal["direct"]] | None = None
    defer_loading: Literal[False] | None = None
    input_examples: None = None


class AutoChoice(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="auto"):
    """The model decides."""

    disable_parallel_tool_use: bool | None = None


class AnyChoice(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="any"):
    """It calls a tool."""

    disable_parallel_tool_use: bool | None = None


class OneToolChoice(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="tool"):
    """It calls this tool."""

    name: str
    disable_parallel_tool_use: bool | None = None


class NoChoice(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="none"):
    """It calls none."""


class JsonFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The text is a JSON value of this schema."""

    type: Literal["json_schema"]
    schema: GivenObject


class OutputConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``effort`` is for models that think: not supported."""

    format: JsonFormat | None = None
    effort: None = None


class Thinking(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """No model here thinks apart from its text."""

    type: Literal["disabled"]


class Metadata(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """No effect."""

    user_id: str | None = None


class CountRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A prompt: ``POST /v1/messages/count_tokens``."""

    model: str
    messages: Annotated[list[InputMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]
    system: Text | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: AutoChoice | AnyChoice | OneToolChoice | NoChoice | None = None
    output_config: OutputConfig | None = None
    output_format: JsonFormat | None = None
    thinking: Thinking | None = None
    cache_control: CacheControl | None = None
    speed: Literal["standard"] | None = None
    container: None = None
    context_management: None = None
    mcp_servers: None = None
    thread: None = None


class MessagesRequest(CountRequest, kw_only=True, forbid_unknown_fields=True):
    """``POST /v1/messages``. ``seed``, ``cache_salt`` (who sends another one shares no cache) and
    ``priority`` (higher goes first, among the same key's requests) are ours."""

    max_tokens: Annotated[int, Meta(ge=1, le=MAX_INT)]
    stop_sequences: Annotated[list[StopString], Meta(max_length=MAX_STOPS)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0, le=MAX_INT)] | None = None
    stream: bool | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    diagnostics: None = None
    inference_geo: None = None
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None
    cache_salt: Annotated[str, Meta(max_length=MAX_SALT_CHARS)] | None = None
    priority: Annotated[int, Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None


class AnswerText(msgspec.Struct, kw_only=True, tag_field="type", tag="text"):
    """Text that the model wrote."""

    text: str
    citations: None = None


class AnswerToolUse(msgspec.Struct, kw_only=True, tag_field="type", tag="tool_use"):
    """A call that the model asks for."""

    id: str
    name: str
    input: dict[str, Any]
    caller: DirectCaller = msgspec.field(default_factory=lambda: DirectCaller(type="direct"))


class MessageUsage(msgspec.Struct, kw_only=True):
    """``input_tokens``: those of the prompt that were computed; those that were cached are counted apart."""

    input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int = 0


StopReason: TypeAlias = Literal[
    "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"
]


class MessageAnswer(msgspec.Struct, kw_only=True):
    """A whole answer."""

    id: str
    model: str
    content: list[AnswerText | AnswerToolUse]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"


class CountAnswer(msgspec.Struct):
    """Tokens of the prompt."""

    input_tokens: int
