"""The JSON shapes of SGLang's native API: requests, sampling parameters, answers, and descriptions.

All bounds are part of the types, so the OpenAPI document has them. Null is the same as leaving a field out.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import UNSET, Meta, UnsetType

from agentflow.engine.request import MAX_PRIORITY
from agentflow.protocol.ops import MAX_SALT_CHARS
from agentflow.protocol.sampling import MAX_BIASES, MAX_INT, MAX_STOP_REGEX_CHARS, MAX_TOP_LOGPROBS
from agentflow.server.compatible.fields import (
    Biases,
    Count,
    GivenSchema,
    OnlyFalse,
    OnlyTrue,
    Repetition,
    SharedSampling,
    Source,
    TokenId,
    Unread,
    Unsupported,
)
from agentflow.server.compatible.prompts import IdList

_MAX_ID_CHARS = 128

Texts: TypeAlias = str | Annotated[list[str], Meta(min_length=1)]
Ids: TypeAlias = Annotated[
    list[TokenId | IdList],
    Meta(min_length=1, description="Token ids, or a list of lists of them."),
]

Pattern: TypeAlias = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_REGEX_CHARS)]


class SamplingFields(SharedSampling, kw_only=True, forbid_unknown_fields=True):
    """Sampling parameters, and the constraint: one of ``regex``, ``json_schema`` (a schema, or its text) and
    ``ebnf``."""

    max_new_tokens: Annotated[int, Meta(ge=0, le=MAX_INT)] | None = None
    min_new_tokens: Annotated[int, Meta(ge=0, le=MAX_INT)] | None = None
    repetition_penalty: Repetition | None = None
    logit_bias: Biases | None = None
    sampling_seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_BIASES)] | None = None
    stop_regex: Pattern | Annotated[list[Pattern], Meta(max_length=1)] | None = None
    ignore_eos: bool | None = None
    n: Count | None = None
    regex: Source | None = None
    json_schema: GivenSchema = None
    ebnf: Source | None = None
    skip_special_tokens: OnlyTrue | None = None
    spaces_between_special_tokens: OnlyTrue | None = None
    no_stop_trim: OnlyFalse | None = None
    structural_tag: Unsupported = None
    custom_params: Unsupported = None


class KvHintAction(msgspec.Struct, kw_only=True):
    """One action of ``KvHints``, whose ``payload`` is not read."""

    action_id: str
    action_type: str
    action_version: str
    payload: Unread = None


class KvHints(msgspec.Struct, kw_only=True):
    """An orchestrator's advice about the KV cache, in the format of SGLang and vLLM. Both leave actions to
    their connectors, which ignore unknown actions. Dynamo's action ``kv.fetch`` makes a worker fetch blocks
    from another worker at an address in the request. No engine here supports that: all actions are ignored.
    """

    protocol_version: str
    message_id: str
    actions: list[KvHintAction] | None = None


class SglangRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Texts or token ids to continue. ``model``: by default the first. ``rid``: the id of the answer.
    ``logprob_start_len``: where in the prompt its log-probabilities begin; -1: it has none.
    ``extra_key``: requests with different keys share no cached prompts."""

    text: Texts | None = None
    input_ids: Ids | None = None
    model: str | None = None
    sampling_params: SamplingFields | None = None
    stream: bool | None = None
    return_logprob: bool | None = None
    logprob_start_len: Annotated[int, Meta(ge=-1, le=MAX_INT)] | None = None
    top_logprobs_num: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    return_text_in_logprobs: bool | None = None
    rid: Annotated[str, Meta(min_length=1, max_length=_MAX_ID_CHARS)] | None = None
    priority: Annotated[int, Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None
    extra_key: Annotated[str, Meta(max_length=MAX_SALT_CHARS)] | None = None
    kv_hints: KvHints | list[KvHints | None] | None = None
    return_hidden_states: OnlyFalse | None = None
    return_routed_experts: OnlyFalse | None = None
    return_indexer_topk: OnlyFalse | None = None
    lora_path: Unsupported = None
    session_params: Unsupported = None
    token_ids_logprob: Unsupported = None
    custom_logit_processor: Unsupported = None
    input_embeds: Unsupported = None
    image_data: Unsupported = None
    video_data: Unsupported = None
    audio_data: Unsupported = None


class SglangFinish(msgspec.Struct, kw_only=True):
    """Why an answer ended. ``matched``: the stop string or the id of ``stop_token_ids`` that ended it; null:
    the model's end token or ``stop_regex`` did. ``length``: the number of tokens, if it reached the limit."""

    type: Literal["stop", "length"]
    matched: str | int | UnsetType | None = UNSET
    length: int | UnsetType = UNSET


LoggedToken: TypeAlias = tuple[float | None, int, str | None]
"""A log-probability, a token id, and the token's text if it was requested."""
LoggedTops: TypeAlias = list[list[LoggedToken] | None]
"""The likeliest tokens of each position; null for the first token of a prompt."""


class SglangMeta(msgspec.Struct, kw_only=True):
    """``cached_tokens`` is 0 until the answer has ended. ``e2e_latency``: seconds since the request was
    received. Until the answer has ended, ``finish_reason`` is null, and the fields below it are left out."""

    id: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    finish_reason: SglangFinish | None
    e2e_latency: float | UnsetType = UNSET
    input_token_logprobs: list[LoggedToken] | UnsetType = UNSET
    output_token_logprobs: list[LoggedToken] | UnsetType = UNSET
    input_top_logprobs: LoggedTops | UnsetType = UNSET
    output_top_logprobs: LoggedTops | UnsetType = UNSET


class SglangAnswer(msgspec.Struct, kw_only=True):
    """An answer, or, in an event of a stream, its text so far, without ``output_ids``. ``index``: in a stream
    of several answers, which are numbered prompt by prompt."""

    text: str
    output_ids: list[int]
    meta_info: SglangMeta
    index: int | UnsetType = UNSET


class SglangModelQuery(msgspec.Struct, kw_only=True):
    """The name of a model; by default the first."""

    model: str | None = None


class SglangModelInfo(msgspec.Struct, kw_only=True):
    """A model. Both paths are its name on this server. ``is_generation``: it generates text; false: it makes
    embeddings."""

    model_path: str
    tokenizer_path: str
    is_generation: bool


class SglangServerInfo(msgspec.Struct, kw_only=True):
    """The server and its first model. ``version``: agentflow's version. ``context_length``: the limit of
    prompt and answer tokens together."""

    version: str
    model_path: str
    tokenizer_path: str
    served_model_name: str
    context_length: int
