"""From the fields that OpenAI's endpoints share to ``SamplingParams``; and what is refused by name.

The fields that OpenAI's two generating endpoints share: what is taken, within which bounds, what has no
effect here, and what is refused by name.

Every bound stands in the type, so that the OpenAPI document says it too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

from agentflow.engine.generator import EngineGenerator
from agentflow.engine.request import MAX_PRIORITY
from agentflow.errors import BadArgument, PromptTooLong, RequestRefused
from agentflow.protocol.constraint import MAX_SOURCE_CHARS, Constraint
from agentflow.protocol.ops import MAX_SALT_CHARS
from agentflow.protocol.sampling import MAX_BIASES, MAX_INT, MAX_STOP_CHARS, MAX_STOPS, SamplingParams
from agentflow.server.http.errors import ApiError

if TYPE_CHECKING:
    Unread: TypeAlias = msgspec.Raw | None
else:
    Unread = msgspec.Raw


_INT64 = 2**63

Count: TypeAlias = Annotated[int, Meta(ge=1, le=MAX_INT)]
TokenId: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_INT)]
Penalty: TypeAlias = Annotated[float, Meta(ge=-2, le=2)]
Source: TypeAlias = Annotated[str, Meta(min_length=1, max_length=MAX_SOURCE_CHARS)]
StopString: TypeAlias = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARS)]
Stop: TypeAlias = StopString | Annotated[list[StopString], Meta(max_length=MAX_STOPS)]
Bias: TypeAlias = Annotated[float, Meta(ge=-100, le=100)]
Biases: TypeAlias = Annotated[
    dict[TokenId, Bias],
    Meta(
        max_length=MAX_BIASES,
        description="Token ids, written as strings, and what is added to their logits.",
        extra_json_schema={"propertyNames": {"pattern": "^(0|[1-9][0-9]{0,9})$"}},
    ),
]
# Of a value that nobody reads no objects are built: a body is large enough for millions of them.
Refused: TypeAlias = Annotated[Unread, Meta(extra_json_schema={"type": "null"}, description="Not supported.")]
# An object that is read by itself, after its bounds were checked (given_object.py).
GivenObject: TypeAlias = Annotated[Unread, Meta(extra_json_schema={"type": ["object", "null"]})]
OnlyFalse: TypeAlias = Annotated[bool, Meta(extra_json_schema={"const": False})]


def is_given(value: object) -> bool:
    """Whether a field has a value other than null.

    >>> is_given(None), is_given(msgspec.Raw(b"null")), is_given(msgspec.Raw(b"[]"))
    (False, False, True)
    """
    return value is not None and not (
        isinstance(value, msgspec.Raw) and bytes(memoryview(value)[:5]) == b"null"
    )


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``include_usage``: one more chunk, with no choices, tells the tokens of the whole request."""

    include_usage: bool | None = None
    include_obfuscation: OnlyFalse | None = None


class SharedFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Null is the same as leaving a field out. The last ones have no effect on the answer."""

    model: str
    n: Count | None = None
    seed: Annotated[int, Meta(ge=-_INT64, le=_INT64 - 1)] | None = None
    stop: Stop | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_BIASES)] | None = None
    ignore_eos: bool | None = None
    max_tokens: Count | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=MAX_INT)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=MAX_INT)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    logit_bias: Biases | None = None
    regex: Source | None = None
    grammar: Source | None = None
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
    service_tier: Literal["auto", "default"] | None = None
    best_of: Count | None = None
    echo: OnlyFalse | None = None
    suffix: Refused = None


# Answers are drawn, where nothing else is said, as they are in OpenAI's API.
TEMPERATURE = 1.0
# Each token that is told, with its text and bytes, takes some 200 bytes until its answer is sent.
MAX_LOGPROB_TOKENS = 2_000_000

_WHY_NOT = {
    "suffix": "the models here go on from a text, and do not fill a gap in one",
    "store": "nothing is stored",
    "echo": "the prompt is not part of the answer; /tokenize tells its tokens",
    "audio": "the models here do not speak",
    "functions": "use tools",
    "function_call": "use tool_choice",
    "web_search_options": "the server does not search the web",
    "moderation": "the server does not moderate",
}
_FIELD_OF_CONSTRAINT = {"regex": "regex", "grammar": "grammar", "schema": "response_format"}
# False asks for nothing.
_FLAGS = ("store", "echo")


def refused(param: str, why: str) -> ApiError:
    """An error that names the field."""
    return ApiError(400, "unsupported", f"{param!r} is not supported: {why}", param=param)


def wrong(param: str, message: str) -> ApiError:
    """An error that names the field, whose value is wrong."""
    return ApiError(400, "invalid_value", message, param=param)


def check_fields(request: SharedFields, max_n: int) -> None:
    """``ApiError`` for what would change the answer in a way that is not there."""
    for name, why in _WHY_NOT.items():
        value = getattr(request, name, None)
        if is_given(value) and not (value is False and name in _FLAGS):
            raise refused(name, why)
    n = request.n or 1
    if request.best_of is not None and request.best_of != n:
        raise refused("best_of", "all answers are given, and none is left out (n says how many)")
    if n > max_n:
        raise wrong("n", f"'n' is {n}, and this server gives at most {max_n} answers to a request")
    if request.stream_options is not None:
        _check_stream_options(request, request.stream_options)


def _check_stream_options(request: SharedFields, options: StreamOptions) -> None:
    if not request.stream:
        raise wrong("stream_options", "'stream_options' is for streams: set 'stream' to true")
    if options.include_obfuscation:
        raise refused("stream_options.include_obfuscation", "chunks are as long as their text")


def sampling_of(
    request: SharedFields, generator: EngineGenerator, max_tokens: int | None, top_logprobs: int | None
) -> SamplingParams:
    """``max_tokens`` None: what the context has left. ``top_logprobs`` None: no log-probabilities."""
    room = generator.capabilities.max_context or SamplingParams().max_tokens
    stop = [request.stop] if isinstance(request.stop, str) else request.stop
    biases = request.logit_bias or {}
    params = SamplingParams(
        max_tokens=room if max_tokens is None else max_tokens,
        min_tokens=request.min_tokens or 0,
        temperature=_or(request.temperature, TEMPERATURE),
        top_p=_or(request.top_p, 1.0),
        top_k=max(0, request.top_k or 0),  # -1 is off, too
        min_p=request.min_p or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        presence_penalty=request.presence_penalty or 0.0,
        repetition_penalty=_or(request.repetition_penalty, 1.0),
        logit_bias=tuple(biases.items()),
        seed=None if request.seed is None else request.seed % 2**63,
        stop=tuple(stop or ()),
        stop_token_ids=tuple(request.stop_token_ids or ()),
        ignore_eos=bool(request.ignore_eos),
        logprobs=top_logprobs is not None,
        top_logprobs=top_logprobs or 0,
    )
    with naming_param():
        params.check()
    for name, token_ids in (("logit_bias", biases), ("stop_token_ids", params.stop_token_ids)):
        with naming_param(name):
            generator.check_ids(tuple(token_ids))
    return params


def check_num_logprobs(
    params: SamplingParams, generator: EngineGenerator, num_answers: int, param: str
) -> None:
    """``ApiError`` where more log-probabilities are asked for than are kept of one request. An answer has
    at most as many tokens as the context."""
    if not params.wants_logprobs:
        return
    room = generator.capabilities.max_context or params.max_tokens
    num_tokens = min(params.max_tokens, room)
    num_told = num_answers * num_tokens * (1 + params.top_logprobs)
    if num_told > MAX_LOGPROB_TOKENS:
        asked = f"{num_answers} answers of up to {num_tokens:,} tokens with {params.top_logprobs} others each"
        raise wrong(
            param,
            f"{param!r}: log-probabilities for {asked} are {num_told:,}, and a request has at most "
            f"{MAX_LOGPROB_TOKENS:,}: ask for fewer of them, for shorter answers, or for fewer answers",
        )


def constraint_of(request: SharedFields) -> Constraint | None:
    """What ``regex`` or ``grammar`` asks for."""
    if request.regex is not None and request.grammar is not None:
        raise wrong("grammar", "'regex' and 'grammar' exclude each other: give one of them")
    if request.regex is not None:
        return Constraint("regex", request.regex)
    return None if request.grammar is None else Constraint("grammar", request.grammar)


@contextmanager
def naming_param(param: str | None = None) -> Iterator[None]:
    """Errors of arguments become refusals that name the field: ``param``, or the one that they name."""
    try:
        yield
    except BadArgument as error:
        field = param or error.param
        if field is None:
            raise
        raise wrong(field, str(error).removeprefix("gen: ")) from error


@contextmanager
def naming_field(prompt: str, constraint: Constraint | None) -> Iterator[None]:
    """What the engine refuses names a field of the request: a prompt that is too long, empty, or of unknown
    ids ``prompt``, and a constraint that cannot be kept the field that asks for it."""
    try:
        yield
    except (BadArgument, RequestRefused) as error:
        if isinstance(error, PromptTooLong) or error.param == "prompt":
            error.param = prompt
        elif error.param == "constraint" and constraint is not None:
            error.param = _FIELD_OF_CONSTRAINT[constraint.kind]
        raise


def _or(value: float | None, default: float) -> float:
    return default if value is None else value
