"""The JSON shapes of OpenAI's API: requests, messages, tools, and chat answers.

All bounds are part of the types, so the OpenAPI document has them. Null is the same as leaving a field out.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

from agentflow.engine.request import MAX_PRIORITY
from agentflow.protocol.constraint import MAX_CONSTRAINT_CHOICES
from agentflow.protocol.ops import MAX_SALT_CHARS
from agentflow.protocol.sampling import MAX_BIASES, MAX_INT, MAX_STOPS, MAX_TOP_LOGPROBS
from agentflow.server.compatible.fields import (
    MAX_MESSAGES,
    MAX_TOOLS,
    Biases,
    Count,
    GivenObject,
    GivenSchema,
    OnlyFalse,
    OnlyTrue,
    Repetition,
    SharedSampling,
    Source,
    StopString,
    TokenId,
    ToolName,
    Unread,
    Unsupported,
    UnsupportedText,
)
from agentflow.server.compatible.functions import FunctionSpec
from agentflow.server.compatible.logprobs import ChatTokenLogprob

_INT64 = 2**63

ReasoningBudget: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_INT)]
Choices: TypeAlias = Annotated[
    list[Annotated[str, Meta(min_length=1)]], Meta(min_length=1, max_length=MAX_CONSTRAINT_CHOICES)
]


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``include_usage``: a last chunk without choices has the usage of the whole request.
    ``continuous_usage_stats``: with it, each chunk has the usage so far."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: OnlyFalse | None = None


class StructuredOutputs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The constraint of the answer, in vLLM's fields: one of ``json`` (a schema, or its text), ``regex``,
    ``choice``, ``grammar`` (Lark or EBNF) and ``json_object``."""

    json: GivenSchema = None
    regex: Source | None = None
    choice: Choices | None = None
    grammar: Source | None = None
    json_object: bool | None = None
    structural_tag: Unsupported = None


class SharedFields(SharedSampling, kw_only=True, forbid_unknown_fields=True):
    """The fields of chat completions and completions."""

    model: str
    n: Count | None = None
    seed: Annotated[int, Meta(ge=-_INT64, le=_INT64 - 1)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_BIASES)] | None = None
    ignore_eos: bool | None = None
    max_tokens: Count | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=MAX_INT)] | None = None
    repetition_penalty: Repetition | None = None
    logit_bias: Biases | None = None
    regex: Source | None = None
    grammar: Source | None = None
    ebnf: Source | None = None
    guided_json: GivenSchema = None
    guided_regex: Source | None = None
    guided_choice: Choices | None = None
    guided_grammar: Source | None = None
    guided_decoding_backend: str | None = None
    structured_outputs: StructuredOutputs | None = None
    bad_words: Annotated[list[StopString], Meta(max_length=MAX_STOPS)] | None = None
    return_token_ids: bool | None = None
    skip_special_tokens: OnlyTrue | None = None
    spaces_between_special_tokens: bool | None = None
    include_stop_str_in_output: OnlyFalse | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Annotated[int, Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None
    cache_salt: Annotated[str, Meta(max_length=MAX_SALT_CHARS)] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: Unread = None
    prompt_cache_retention: str | None = None
    metadata: dict[str, str] | None = None
    store: OnlyFalse | None = None
    service_tier: str | None = None
    best_of: Count | None = None
    echo: OnlyFalse | None = None
    suffix: UnsupportedText = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    nvext: Unread = None


class TextPart(msgspec.Struct, tag_field="type", tag="text", forbid_unknown_fields=True):
    """A part of a message's text. ``prompt_cache_breakpoint`` and ``cache_control`` keep the prompt up to the
    end of the message in the cache."""

    text: str
    prompt_cache_breakpoint: Unread = None
    cache_control: Unread = None


class RefusalPart(msgspec.Struct, tag_field="type", tag="refusal", forbid_unknown_fields=True):
    """The assistant's refusal to answer, which is treated as text."""

    refusal: str


class ImageUrl(msgspec.Struct):
    """The URL of an image: ``data:``, or ``https:`` at a host that the operator allows. A model behind an API
    gets the URL itself."""

    url: str
    detail: Unread = None


class ImagePart(msgspec.Struct, tag_field="type", tag="image_url"):
    """An image (``ImageUrl``), for models that accept images. For other models it is not read."""

    image_url: msgspec.Raw
    cache_control: Unread = None


class VideoUrl(msgspec.Struct):
    """The URL of a video, as for ``ImageUrl``. ``num_frames``: the number of frames that the model sees;
    null: the model's default."""

    url: str
    num_frames: int | None = None


class VideoPart(msgspec.Struct, tag_field="type", tag="video_url"):
    """A video (``VideoUrl``), as in vLLM, for models that accept videos. For other models it is not read."""

    video_url: msgspec.Raw
    cache_control: Unread = None


class AudioPart(msgspec.Struct, tag_field="type", tag="input_audio"):
    """Not supported: the models accept no audio."""

    input_audio: msgspec.Raw


class FilePart(msgspec.Struct, tag_field="type", tag="file"):
    """Not supported."""

    file: msgspec.Raw


MessagePart: TypeAlias = TextPart | RefusalPart | ImagePart | VideoPart | AudioPart | FilePart
MessageContent: TypeAlias = str | Annotated[list[MessagePart], Meta(min_length=1)]


class _Message(msgspec.Struct, tag_field="role", kw_only=True, forbid_unknown_fields=True):
    """``name`` has no effect, because chat templates do not show it. ``cache_control`` keeps the prompt up to
    the end of the message in the cache."""

    name: str | None = None
    cache_control: Unread = None


class SystemMessage(_Message, tag="system", kw_only=True):
    """The application's instructions."""

    content: MessageContent


class DeveloperMessage(_Message, tag="developer", kw_only=True):
    """OpenAI's newer name for a system message."""

    content: MessageContent


class UserMessage(_Message, tag="user", kw_only=True):
    """A message of the user."""

    content: MessageContent


class CalledFunction(msgspec.Struct, forbid_unknown_fields=True):
    """``arguments``: a JSON object, as text; for a truncated call, the beginning of one. ``parsed_arguments``
    is not read: typed client helpers send it back along with the arguments."""

    name: ToolName
    arguments: str
    parsed_arguments: Unread = None


class MessageToolCall(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A tool call of the assistant."""

    id: Annotated[str, Meta(min_length=1)]
    function: CalledFunction
    type: Literal["function"] = "function"
    index: int | None = None


class AssistantMessage(_Message, tag="assistant", kw_only=True):
    """The model's text, its tool calls, or both. ``content`` may be null only with tool calls.
    ``reasoning_content``, or ``reasoning``, if it is a text: the reasoning before them. ``parsed`` and the
    ``provider_specific_fields`` that LiteLLM adds are not read, like ``parsed_arguments``."""

    content: MessageContent | None = None
    tool_calls: list[MessageToolCall] | None = None
    refusal: str | None = None
    audio: Unread = None
    annotations: Unread = None
    parsed: Unread = None
    reasoning_content: Unread = None
    reasoning: Unread = None
    function_call: Unread = None
    provider_specific_fields: Unread = None


class ToolMessage(_Message, tag="tool", kw_only=True):
    """The result of the call with the id ``tool_call_id``, which an earlier message has."""

    content: MessageContent
    tool_call_id: str


class FunctionMessage(msgspec.Struct, tag_field="role", tag="function"):
    """Not supported: the deprecated predecessor of tool messages."""

    name: Unread = None
    content: Unread = None


ChatMessage: TypeAlias = (
    SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage | FunctionMessage
)


class FunctionTool(msgspec.Struct, tag_field="type", tag="function", forbid_unknown_fields=True):
    """A tool that the model may call. ``cache_control`` keeps the tools and the system messages in the
    cache."""

    function: FunctionSpec
    cache_control: Unread = None


class CustomTool(msgspec.Struct, tag_field="type", tag="custom"):
    """Not supported: a tool whose input is free text."""

    custom: msgspec.Raw


Tool: TypeAlias = FunctionTool | CustomTool


class FunctionName(msgspec.Struct, forbid_unknown_fields=True):
    """The name of a tool."""

    name: ToolName


class NamedChoice(msgspec.Struct, tag_field="type", tag="function", forbid_unknown_fields=True):
    """Requires a call of this tool."""

    function: FunctionName


class AllowedTools(msgspec.Struct, tag_field="type", tag="allowed_tools"):
    """Not supported."""

    allowed_tools: msgspec.Raw


class CustomChoice(msgspec.Struct, tag_field="type", tag="custom"):
    """Not supported."""

    custom: msgspec.Raw


ToolChoiceField: TypeAlias = Literal["none", "auto", "required"] | NamedChoice | AllowedTools | CustomChoice


class TextFormat(msgspec.Struct, tag_field="type", tag="text", forbid_unknown_fields=True):
    """Any text."""


class ObjectFormat(msgspec.Struct, tag_field="type", tag="json_object", forbid_unknown_fields=True):
    """Any JSON object."""


class SchemaSpec(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A JSON schema; by default any object. If it is not ``strict``, keywords that cannot be enforced are
    relaxed."""

    name: Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    schema: GivenObject = None
    strict: bool | None = None


class SchemaFormat(msgspec.Struct, tag_field="type", tag="json_schema", forbid_unknown_fields=True):
    """A JSON value that conforms to this schema."""

    json_schema: SchemaSpec


ResponseFormat: TypeAlias = TextFormat | ObjectFormat | SchemaFormat


class ChatRequest(SharedFields, kw_only=True):
    """A conversation to continue."""

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
    verbosity: str | None = None
    reasoning_effort: str | None = None
    thinking_token_budget: ReasoningBudget | None = None
    thinking_budget: ReasoningBudget | None = None
    enable_thinking: bool | None = None
    chat_template_kwargs: GivenObject = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    audio: Unsupported = None
    functions: Unsupported = None
    function_call: Unsupported = None
    web_search_options: Unsupported = None
    moderation: Unsupported = None


class CompletionDetails(msgspec.Struct):
    """``reasoning_tokens``: the tokens of the model's reasoning, including its marks."""

    reasoning_tokens: int


class PromptDetails(msgspec.Struct):
    """``cached_tokens``: the prompt tokens that were not computed for this request."""

    cached_tokens: int


class UsageBody(msgspec.Struct, kw_only=True):
    """Token counts. A prompt counts once, however many answers it has."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class ChoiceLogprobs(msgspec.Struct, kw_only=True):
    """The tokens of an answer, or of a chunk."""

    content: list[ChatTokenLogprob]
    refusal: None = None


class AnsweredFunction(msgspec.Struct):
    """``arguments``: a JSON object, as text."""

    name: str
    arguments: str


class AnsweredToolCall(msgspec.Struct, kw_only=True):
    """A tool call of the model."""

    id: str
    function: AnsweredFunction
    type: Literal["function"] = "function"


class AnswerMessage(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The model's text, its tool calls, or both. ``reasoning_content``: the reasoning before them."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[AnsweredToolCall] = []
    reasoning_content: str | None = None


class ChatChoice(msgspec.Struct, kw_only=True):
    """One of the ``n`` answers. ``token_ids``: its tokens, if they were requested."""

    index: int
    message: AnswerMessage
    logprobs: ChoiceLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class PromptLogprob(msgspec.Struct, kw_only=True):
    """A token of the prompt, or one of the likeliest at its position. ``rank``: 1 for the likeliest."""

    logprob: float | None
    rank: int
    decoded_token: str


PromptLogprobs: TypeAlias = list[dict[str, PromptLogprob] | None]
"""For each token of the prompt, the token and the likeliest at its position, by their ids; null for the first
token."""


class ChatAnswer(msgspec.Struct, kw_only=True):
    """The whole answer. ``created``: Unix time. ``prompt_logprobs``, ``prompt_token_ids``: only if they were
    requested."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: UsageBody
    object: Literal["chat.completion"] = "chat.completion"
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
