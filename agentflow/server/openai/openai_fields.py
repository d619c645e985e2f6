"""The fields that OpenAI's two generating endpoints share: what is taken, within which bounds, what has no
effect here, and what is refused by name.

Every bound stands in the type, so that the OpenAPI document says it too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

from agentflow.engine.request import MAX_PRIORITY
from agentflow.protocol.constraint import MAX_SOURCE_CHARS
from agentflow.protocol.ops import MAX_SALT_CHARS
from agentflow.protocol.sampling import MAX_BIASES, MAX_INT, MAX_STOP_CHARS, MAX_STOPS

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
if TYPE_CHECKING:
    Unread: TypeAlias = msgspec.Raw | None
else:
    Unread = msgspec.Raw  # which is null, too; of a union with it msgspec would know only null
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
