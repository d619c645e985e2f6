"""The JSON shapes of Ollama's API: requests, options, messages, and answers.

All bounds are part of the types, so the OpenAPI document has them. Null is the same as leaving a field out,
and so is an empty string in the fields ``format``, ``template`` and ``suffix``.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

from agentflow.protocol.sampling import MAX_INT, MAX_TOP_LOGPROBS
from agentflow.server.compatible.fields import (
    MAX_MESSAGES,
    MAX_TOOLS,
    Count,
    OnlyFalse,
    Repetition,
    SharedSampling,
    TokenId,
    ToolName,
    Unread,
)
from agentflow.server.compatible.functions import FunctionSpec
from agentflow.server.compatible.logprobs import TopLogprob

_INT64 = 2**63
_MAX_DURATION_CHARS = 32

ModelName: TypeAlias = Annotated[str, Meta(description="With or without `:latest`.")]
KeepAlive: TypeAlias = Annotated[
    float | Annotated[str, Meta(max_length=_MAX_DURATION_CHARS)],
    Meta(description="No effect: the models of the server stay loaded."),
]
Images: TypeAlias = Annotated[
    Unread,
    Meta(
        extra_json_schema={"type": ["array", "null"], "items": {"type": "string"}},
        description="In base64, for models that accept images.",
    ),
]
FormatField: TypeAlias = Annotated[
    Unread,
    Meta(
        extra_json_schema={"anyOf": [{"type": ["object", "null"]}, {"enum": ["json", ""]}]},
        description='"json" for any object, or a JSON schema.',
    ),
]
ArgumentsField: TypeAlias = Annotated[Unread, Meta(extra_json_schema={"type": ["object", "null"]})]
Whole: TypeAlias = Annotated[int, Meta(ge=-MAX_INT, le=MAX_INT)]


class OllamaOptions(SharedSampling, kw_only=True):
    """Sampling options. The options from ``penalize_newline`` on have no effect: the server's settings decide
    how models run. Unknown options have no effect either, as in Ollama. ``mirostat``, ``tfs_z`` and
    ``typical_p`` must be off."""

    seed: Annotated[int, Meta(ge=-_INT64, le=_INT64 - 1)] | None = None
    num_predict: Annotated[int, Meta(ge=-2, le=MAX_INT)] | None = None
    repeat_penalty: Repetition | None = None
    repeat_last_n: Annotated[int, Meta(ge=-1, le=MAX_INT)] | None = None
    mirostat: Literal[0] | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    tfs_z: Annotated[float, Meta(ge=1, le=1)] | None = None
    typical_p: Annotated[float, Meta(ge=1, le=1)] | None = None
    penalize_newline: bool | None = None
    num_ctx: Whole | None = None
    num_keep: Whole | None = None
    num_batch: Whole | None = None
    num_gpu: Whole | None = None
    main_gpu: Whole | None = None
    num_thread: Whole | None = None
    numa: bool | None = None
    low_vram: bool | None = None
    f16_kv: bool | None = None
    logits_all: bool | None = None
    vocab_only: bool | None = None
    use_mmap: bool | None = None
    use_mlock: bool | None = None
    embedding_only: bool | None = None
    rope_frequency_base: float | None = None
    rope_frequency_scale: float | None = None


class GivenFunction(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``arguments``: an object. The other fields have no effect."""

    name: ToolName
    arguments: ArgumentsField = None
    description: str | None = None
    index: Whole | None = None


class GivenToolCall(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A tool call of the assistant."""

    function: GivenFunction
    id: str | None = None
    type: Literal["function"] | None = None


class OllamaMessage(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A message. Only the assistant's messages may have ``tool_calls``. ``tool_name``, ``tool_call_id``: the
    call that a message of the role ``tool`` answers; by default the first open call. ``thinking``: the
    assistant's reasoning, which chat templates show where the model needs it. ``name`` has no effect."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    images: Images = None
    tool_calls: Annotated[list[GivenToolCall], Meta(max_length=MAX_TOOLS)] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None
    thinking: str | None = None
    name: str | None = None


class OllamaTool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A tool that the model may call."""

    function: FunctionSpec
    type: Literal["function"] | None = None


class _Generation(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The fields that chat and generate have in common. ``stream`` is true by default. ``truncate`` and
    ``shift`` have no effect: a prompt that is too long is rejected, and an answer ends where the context
    does."""

    model: ModelName
    stream: bool | None = None
    format: FormatField = None
    options: OllamaOptions | None = None
    keep_alive: KeepAlive | None = None
    think: bool | Literal["low", "medium", "high"] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    truncate: bool | None = None
    shift: bool | None = None
    debug_render_only: OnlyFalse | None = msgspec.field(default=None, name="_debug_render_only")


class OllamaChatRequest(_Generation, kw_only=True):
    """A conversation to continue. Without messages, the request loads the model, which is always loaded."""

    messages: Annotated[list[OllamaMessage], Meta(max_length=MAX_MESSAGES)] | None = None
    tools: Annotated[list[OllamaTool], Meta(max_length=MAX_TOOLS)] | None = None


class OllamaGenerateRequest(_Generation, kw_only=True):
    """A message to answer, or, with ``raw``, a text to continue, in which special tokens are recognised.
    ``context``: the ``context`` of an earlier answer, which the message follows."""

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None
    context: list[TokenId] | None = None
    images: Images = None
    suffix: str | None = None
    template: str | None = None


class OllamaLogprob(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A token of the answer. ``bytes``: its text in UTF-8."""

    token: str
    bytes: list[int]
    logprob: float
    top_logprobs: list[TopLogprob] = []


class CalledFunction(msgspec.Struct, kw_only=True):
    """``index`` numbers the calls of an answer."""

    index: int
    name: str
    arguments: Annotated[msgspec.Raw, Meta(extra_json_schema={"type": "object"})]


class OllamaToolCall(msgspec.Struct, kw_only=True):
    """A tool call of the model."""

    id: str
    function: CalledFunction


class OllamaAnswerMessage(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The model's text, its tool calls, or both, and its reasoning before them."""

    content: str
    role: str
    thinking: str = ""
    tool_calls: list[OllamaToolCall] = []


DoneReason: TypeAlias = Literal["stop", "length", "load"]


class _Line(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The fields that answers and their parts have in common. Only the last part has ``done_reason``, counts
    and durations. Durations are in nanoseconds. ``load_duration``: until the request is in the engine's
    queue; ``prompt_eval_duration``: from then to the first token; ``eval_duration``: from there to the last.
    ``x-agentflow-violated``: the value of this header, in the last line of a stream."""

    model: str
    created_at: datetime
    done: bool
    done_reason: DoneReason | None = None
    total_duration: int | None = None
    load_duration: int | None = None
    prompt_eval_count: int | None = None
    prompt_eval_duration: int | None = None
    eval_count: int | None = None
    eval_duration: int | None = None
    logprobs: list[OllamaLogprob] | None = None
    violated: str | None = msgspec.field(default=None, name="x-agentflow-violated")


class OllamaChatAnswer(_Line, kw_only=True, omit_defaults=True):
    """An answer, or a line of one."""

    message: OllamaAnswerMessage


class OllamaGenerateAnswer(_Line, kw_only=True, omit_defaults=True):
    """An answer, or a line of one, and the reasoning before it. ``context``: the token ids of the prompt and
    the answer."""

    response: str
    thinking: str = ""
    context: list[int] | None = None


class OllamaEmbedRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Texts to embed. ``dimensions``: the number of first dimensions to keep, for models trained for it.
    ``truncate`` has no effect: a text that is too long is rejected."""

    model: ModelName
    input: str | list[str]
    dimensions: Count | None = None
    truncate: bool | None = None
    options: OllamaOptions | None = None
    keep_alive: KeepAlive | None = None


class OllamaEmbedAnswer(msgspec.Struct, kw_only=True):
    """The embeddings in the order of the texts. Durations are in nanoseconds."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaEmbeddingsRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One text to embed, for the older endpoint."""

    model: ModelName
    prompt: str | None = None
    options: OllamaOptions | None = None
    keep_alive: KeepAlive | None = None


class OllamaEmbeddingsAnswer(msgspec.Struct, kw_only=True):
    """The embedding of the text."""

    embedding: list[float]


class ModelDetails(msgspec.Struct, kw_only=True):
    """``family``: the architecture; empty if it is unknown. ``quantization_level``: a description of the
    weights. The other fields are empty."""

    family: str
    families: list[str]
    quantization_level: str
    parent_model: str = ""
    format: str = ""
    parameter_size: str = ""


class OllamaModel(msgspec.Struct, kw_only=True):
    """A model. ``modified_at``: when the server loaded it. ``size``: the bytes of its weights in memory.
    ``digest`` identifies the model on this server."""

    name: str
    model: str
    modified_at: datetime
    size: int
    digest: str
    details: ModelDetails


class OllamaModelList(msgspec.Struct, kw_only=True):
    """The models that the tenant may use."""

    models: list[OllamaModel]


class RunningModel(msgspec.Struct, kw_only=True):
    """A loaded model. ``expires_at``: a time in the far future, because it stays loaded."""

    name: str
    model: str
    size: int
    digest: str
    details: ModelDetails
    expires_at: datetime
    context_length: int


class RunningModelList(msgspec.Struct, kw_only=True):
    """The models that the tenant may use; all are loaded."""

    models: list[RunningModel]


class OllamaShowRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The name of a model, in ``model`` or, from older clients, in ``name``. Other fields have no effect."""

    model: ModelName | None = None
    name: ModelName | None = None
    verbose: bool | None = None
    system: str | None = None
    template: str | None = None
    options: OllamaOptions | None = None


Capability: TypeAlias = Literal["completion", "tools", "thinking", "embedding"]


class OllamaShowAnswer(msgspec.Struct, kw_only=True):
    """A description of a model. ``template``: its chat template, in Jinja. ``model_info``: the architecture,
    and, under its name, the sizes of context, vocabulary and embeddings."""

    modelfile: str
    parameters: str
    template: str
    details: ModelDetails
    model_info: dict[str, Any]
    capabilities: list[Capability]
    modified_at: datetime


class OllamaVersion(msgspec.Struct):
    """The version of Ollama whose API this is."""

    version: str
