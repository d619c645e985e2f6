"""The JSON shapes of OpenAI's Responses API: requests, items, and responses.

Null is the same as leaving a field out. Items are decoded one by one (items.py), since their type may be left
out, and clients send back the items of a response with all of their fields.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

from agentflow.engine.request import MAX_PRIORITY
from agentflow.protocol.ops import MAX_SALT_CHARS
from agentflow.protocol.sampling import MAX_INT, MAX_TOP_LOGPROBS
from agentflow.server.compatible.fields import MAX_TOOLS, Count, ToolName, Unread, Unsupported
from agentflow.server.compatible.functions import FunctionSpec
from agentflow.server.compatible.logprobs import ChatTokenLogprob
from agentflow.server.openai.types import ObjectFormat, StreamOptions, TextFormat

MAX_ITEMS = 2048

ResponseInput: TypeAlias = Annotated[
    Unread,
    Meta(
        description="A text, or a list of items.",
        extra_json_schema={
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "object"}, "minItems": 1, "maxItems": MAX_ITEMS},
                {"type": "null"},
            ]
        },
    ),
]


class FunctionTool(FunctionSpec, tag_field="type", tag="function", kw_only=True, forbid_unknown_fields=True):
    """A tool that the model may call. ``parameters``: the JSON schema of an object; by default the tool has
    no parameters. If it is not ``strict``, keywords that cannot be enforced are relaxed."""


class NamedChoice(msgspec.Struct, tag_field="type", tag="function", forbid_unknown_fields=True):
    """Requires a call of this tool."""

    name: ToolName


class SchemaFormat(
    msgspec.Struct, tag_field="type", tag="json_schema", kw_only=True, forbid_unknown_fields=True
):
    """A JSON value that conforms to this schema. If it is not ``strict``, keywords that cannot be
    enforced are relaxed."""

    name: Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]{1,64}$")]
    schema: Annotated[msgspec.Raw, Meta(extra_json_schema={"type": "object"})]
    description: str | None = None
    strict: bool | None = None


class TextOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The format of the text. ``verbosity`` has no effect."""

    format: TextFormat | ObjectFormat | SchemaFormat | None = None
    verbosity: str | None = None


class ReasoningOptions(msgspec.Struct, kw_only=True):
    """``effort``: ``none`` and ``minimal`` turn reasoning off. Other fields have no effect."""

    effort: str | None = None


class ResponseRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A turn of a conversation. The fields from ``max_tool_calls`` to ``client_metadata`` do not change
    answers. ``seed``, ``cache_salt`` and ``priority`` are extensions."""

    model: str
    input: ResponseInput = None
    instructions: str | None = None
    previous_response_id: str | None = None
    conversation: Annotated[
        Unread,
        Meta(
            description="The id of a conversation, or an object with it.",
            extra_json_schema={"type": ["string", "object", "null"]},
        ),
    ] = None
    max_output_tokens: Count | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    include: Annotated[list[str], Meta(max_length=32)] | None = None
    tools: (
        Annotated[
            list[Annotated[msgspec.Raw, Meta(extra_json_schema={"type": "object"})]],
            Meta(max_length=MAX_TOOLS),
        ]
        | None
    ) = None
    tool_choice: Annotated[
        Unread,
        Meta(
            description="none, auto, required, or a function by its name.",
            extra_json_schema={"type": ["string", "object", "null"]},
        ),
    ] = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    truncation: Literal["auto", "disabled"] | None = None
    store: bool | None = None
    background: bool | None = None
    metadata: dict[str, str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    max_tool_calls: Count | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: Unread = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    user: str | None = None
    client_metadata: Unread = None

    context_management: Annotated[list[None], Meta(max_length=0)] | None = None
    moderation: Unsupported = None
    prompt: Unsupported = None

    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None
    cache_salt: Annotated[str, Meta(max_length=MAX_SALT_CHARS)] | None = None
    priority: Annotated[int, Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None


class InputTokens(msgspec.Struct, kw_only=True):
    """The number of tokens of a prompt."""

    input_tokens: int
    object: Literal["response.input_tokens"] = "response.input_tokens"


ItemStatus: TypeAlias = Literal["in_progress", "completed", "incomplete"]


class OutputText(msgspec.Struct, kw_only=True, tag_field="type", tag="output_text"):
    """The text of a message."""

    text: str
    annotations: list[None] = []
    logprobs: list[ChatTokenLogprob] = []


class OutputMessage(msgspec.Struct, kw_only=True, tag_field="type", tag="message"):
    """A message of the model."""

    id: str
    status: ItemStatus
    content: list[OutputText]
    role: Literal["assistant"] = "assistant"


class ReasoningTextPart(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning_text"):
    """The text of reasoning."""

    text: str


class OutputReasoning(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning"):
    """The model's reasoning before its answer. It has no summary."""

    id: str
    status: ItemStatus
    content: list[ReasoningTextPart]
    summary: list[None] = []


class FunctionCall(msgspec.Struct, kw_only=True, tag_field="type", tag="function_call"):
    """A tool call of the model. ``arguments``: a JSON object, as text."""

    id: str
    call_id: str
    name: str
    arguments: str
    status: ItemStatus


OutputItem: TypeAlias = OutputReasoning | OutputMessage | FunctionCall


class InputDetails(msgspec.Struct, kw_only=True):
    """``cached_tokens``: the input tokens that were not computed for this request."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputDetails(msgspec.Struct, kw_only=True):
    """``reasoning_tokens``: the tokens of the model's reasoning, including its marks."""

    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, kw_only=True):
    """Token counts."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class Incomplete(msgspec.Struct):
    """Why the response is incomplete."""

    reason: Literal["max_output_tokens"]


FailureCode: TypeAlias = Literal["invalid_prompt", "rate_limit_exceeded", "server_error"]


class ResponseFailure(msgspec.Struct, kw_only=True):
    """Why a background response failed. ``code``: the most similar code of OpenAI's API. ``type``: the cause,
    as in the ``code`` of other errors. ``param``: the field of the request that is wrong, if any."""

    code: FailureCode
    message: str
    type: str
    param: str | None


class ConversationId(msgspec.Struct):
    """The id of a conversation."""

    id: str


class ResponseAnswer(msgspec.Struct, kw_only=True):
    """A response. ``created_at``: Unix time. It repeats the fields of the request that have an effect."""

    id: str
    created_at: int
    status: Literal["queued", "in_progress", "completed", "incomplete", "cancelled", "failed"]
    model: str
    output: list[OutputItem]
    usage: ResponseUsage | None
    incomplete_details: Incomplete | None
    completed_at: int | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, str | None]
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[Any]
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"]
    background: bool = False
    conversation: ConversationId | None = None
    error: ResponseFailure | None = None
    service_tier: str = "default"
    object: Literal["response"] = "response"


class DeletedResponse(msgspec.Struct, kw_only=True):
    """The response that was deleted."""

    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class ResponseQuery(msgspec.Struct, kw_only=True):
    """How a stored response is returned. ``stream``: as the events of a background response that was created
    as a stream, from the event after the number ``starting_after`` on."""

    stream: bool = False
    starting_after: Annotated[int, Meta(ge=0, le=MAX_INT)] | None = None


class ItemQuery(msgspec.Struct, kw_only=True):
    """A page of items: at most ``limit`` items that follow the item ``after``."""

    after: str | None = None
    limit: Annotated[int, Meta(ge=1, le=100)] = 20
    order: Literal["asc", "desc"] = "desc"


class ItemList(msgspec.Struct, kw_only=True):
    """A page of items."""

    data: Annotated[list[msgspec.Raw], Meta(extra_json_schema={"items": {"type": "object"}})]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"


MAX_NEW_ITEMS = 20
NewItems: TypeAlias = Annotated[
    list[Annotated[msgspec.Raw, Meta(extra_json_schema={"type": "object"})]], Meta(max_length=MAX_NEW_ITEMS)
]
Metadata: TypeAlias = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)
]


class ConversationRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A new conversation."""

    items: NewItems | None = None
    metadata: Metadata | None = None


class ConversationUpdateRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Replaces the metadata."""

    metadata: Metadata | None = None


class ConversationItemsRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Items to append."""

    items: NewItems


class ConversationAnswer(msgspec.Struct, kw_only=True):
    """A conversation without its items. ``created_at``: Unix time."""

    id: str
    created_at: int
    metadata: dict[str, str]
    object: Literal["conversation"] = "conversation"


class DeletedConversation(msgspec.Struct, kw_only=True):
    """The conversation that was deleted."""

    id: str
    object: Literal["conversation.deleted"] = "conversation.deleted"
    deleted: Literal[True] = True


class ListedItem(msgspec.Struct, kw_only=True):
    """An item, with further fields of its type."""

    id: str
    type: str
