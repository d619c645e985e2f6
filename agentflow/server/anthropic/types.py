"""The JSON shapes of Anthropic's API: messages, tools, requests, and answers.

All bounds are part of the types, so the OpenAPI document has them. Null is the same as leaving a field out. A
field whose only value is null is not supported.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

from agentflow.engine.request import MAX_PRIORITY
from agentflow.protocol.ops import MAX_SALT_CHARS
from agentflow.protocol.sampling import MAX_INT, MAX_STOP_CHARS, MAX_STOPS

MAX_BLOCKS = 2048

# An object that is decoded later, after its bounds are checked (protocol/bounds/json_bounds.py).
GivenObject: TypeAlias = Annotated[msgspec.Raw, Meta(extra_json_schema={"type": "object"})]


class CacheControl(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Keeps the prompt up to the end of its message in the cache for ``ttl`` (5m) after each use; see
    ``engine.cache.prefix_marks``. ``scope`` has no effect: tenants share no cache."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None
    scope: str | None = None


class DirectCaller(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The model itself called the tool, not code that it wrote."""

    type: Literal["direct"]


class TextBlock(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="text"):
    """Text."""

    text: str
    cache_control: CacheControl | None = None
    citations: Annotated[list[None], Meta(max_length=0)] | None = None


class Base64Source(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="base64"):
    """The bytes of an image."""

    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"]
    data: str


class UrlSource(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="url"):
    """The URL of an image."""

    url: str


class ImageBlock(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="image"):
    """An image, for models that accept images."""

    source: Base64Source | UrlSource
    cache_control: CacheControl | None = None


class OnlyTextBlock(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Text, where no other blocks are allowed."""

    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None
    citations: Annotated[list[None], Meta(max_length=0)] | None = None


GivenText: TypeAlias = str | Annotated[list[OnlyTextBlock], Meta(max_length=MAX_BLOCKS)]


class ToolUseBlock(
    msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="tool_use"
):
    """A tool call of the assistant."""

    id: Annotated[str, Meta(min_length=1)]
    name: Annotated[str, Meta(min_length=1)]
    input: GivenObject
    cache_control: CacheControl | None = None
    caller: DirectCaller | None = None
    toolset_name: None = None


class ToolResultBlock(
    msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="tool_result"
):
    """The result of a call. ``is_error`` puts "Error" before the content."""

    tool_use_id: str
    content: str | Annotated[list[TextBlock | ImageBlock], Meta(max_length=MAX_BLOCKS)] | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None
    toolset_name: None = None


class ThinkingBlock(
    msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="thinking"
):
    """The assistant's reasoning. The chat template decides whether the model sees it again. The signature is
    not checked: a client may write the assistant's turns anyway."""

    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(
    msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="redacted_thinking"
):
    """Reasoning that only another server can decrypt. It is dropped."""

    data: str


ContentBlock: TypeAlias = (
    TextBlock | ImageBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock | RedactedThinkingBlock
)


class InputMessage(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A message. Only the assistant has tool calls, and only the user has their results. A system message,
    which may follow other messages, has only text."""

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[ContentBlock], Meta(max_length=MAX_BLOCKS)]


MAX_MESSAGES = 2048
MAX_TOOLS = 2048
MAX_EXAMPLES = 64
MAX_EDITS = 16

ToolName: TypeAlias = Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]{1,128}$")]
StopString: TypeAlias = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARS)]


class Tool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A tool that the client runs. If it is not ``strict``, keywords that cannot be enforced are relaxed.
    ``eager_input_streaming`` has no effect: arguments are streamed. The model sees ``input_examples`` as the
    examples of the schema."""

    name: ToolName
    input_schema: GivenObject
    type: Literal["custom"] | None = None
    description: str | None = None
    cache_control: CacheControl | None = None
    strict: bool | None = None
    eager_input_streaming: bool | None = None
    allowed_callers: list[Literal["direct"]] | None = None
    defer_loading: Literal[False] | None = None
    input_examples: Annotated[list[GivenObject], Meta(max_length=MAX_EXAMPLES)] | None = None


class AutoChoice(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="auto"):
    """The model decides whether to call tools."""

    disable_parallel_tool_use: bool | None = None


class AnyChoice(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="any"):
    """The model must call a tool."""

    disable_parallel_tool_use: bool | None = None


class OneToolChoice(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="tool"):
    """The model must call this tool."""

    name: str
    disable_parallel_tool_use: bool | None = None


class NoChoice(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="none"):
    """The model must not call tools."""


class JsonFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The text is a JSON value that conforms to this schema."""

    type: Literal["json_schema"]
    schema: GivenObject


class OutputConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The format of the text. ``effort``: for chat templates that have a variable ``reasoning_effort``."""

    format: JsonFormat | None = None
    effort: str | None = None


class Thinking(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Whether a reasoning model reasons before its text; ``adaptive``: its chat template decides.
    ``budget_tokens``: the limit of reasoning tokens; required if ``enabled``. ``display`` ``omitted``: the
    answer has reasoning blocks without text."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Meta(ge=1, le=MAX_INT)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class KeepAllThinking(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """An edit without effect: all thinking blocks are kept."""

    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"]


class ContextManagement(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Edits that change the conversation are not supported."""

    edits: Annotated[list[KeepAllThinking], Meta(max_length=MAX_EDITS)] | None = None


class Metadata(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """No effect."""

    user_id: str | None = None


class CountRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A prompt whose tokens are counted: ``POST /v1/messages/count_tokens``."""

    model: str
    messages: Annotated[list[InputMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]
    system: GivenText | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: AutoChoice | AnyChoice | OneToolChoice | NoChoice | None = None
    output_config: OutputConfig | None = None
    output_format: JsonFormat | None = None
    thinking: Thinking | None = None
    cache_control: CacheControl | None = None
    speed: Literal["standard"] | None = None
    container: None = None
    context_management: ContextManagement | None = None
    mcp_servers: Annotated[list[None], Meta(max_length=0)] | None = None
    thread: None = None


class MessagesRequest(CountRequest, kw_only=True, forbid_unknown_fields=True):
    """``POST /v1/messages``. Extensions: ``seed``; ``cache_salt`` (requests with different salts share no
    cached prompts); ``priority`` (the tenant's requests with a higher one run first)."""

    max_tokens: Annotated[int, Meta(ge=1, le=MAX_INT)]
    stop_sequences: Annotated[list[StopString], Meta(max_length=MAX_STOPS)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0, le=MAX_INT)] | None = None
    stream: bool | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    diagnostics: None = None
    inference_geo: None = None
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None
    cache_salt: Annotated[str, Meta(max_length=MAX_SALT_CHARS)] | None = None
    priority: Annotated[int, Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None


class AnswerTextBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="text"):
    """Text of the model. It has no field ``citations``: clients reject null."""

    text: str


class AnswerThinkingBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="thinking"):
    """The model's reasoning. ``signature``: its digest."""

    thinking: str
    signature: str


class AnswerToolUseBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="tool_use"):
    """A tool call of the model."""

    id: str
    name: str
    input: Annotated[msgspec.Raw, Meta(extra_json_schema={"type": "object"})]
    caller: DirectCaller = msgspec.field(default_factory=lambda: DirectCaller(type="direct"))


class MessageUsage(msgspec.Struct, kw_only=True):
    """Token counts. ``input_tokens``: the prompt tokens that were computed, without cached ones."""

    input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int = 0


StopReason: TypeAlias = Literal[
    "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"
]


class MessageAnswer(msgspec.Struct, kw_only=True):
    """An answer."""

    id: str
    model: str
    content: list[AnswerThinkingBlock | AnswerTextBlock | AnswerToolUseBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"


class CountAnswer(msgspec.Struct):
    """The number of prompt tokens."""

    input_tokens: int
