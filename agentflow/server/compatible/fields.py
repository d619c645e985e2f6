"""The types of fields that OpenAI's API shares with SGLang's and Ollama's.

All bounds are part of the types, so the OpenAPI document has them. Null is the same as leaving a field out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, TypeAlias

import msgspec
from msgspec import Meta

from agentflow.protocol.constraint import MAX_SOURCE_CHARS
from agentflow.protocol.sampling import MAX_BIASES, MAX_INT, MAX_STOP_CHARS, MAX_STOPS

if TYPE_CHECKING:
    Unread: TypeAlias = msgspec.Raw | None
else:
    Unread = msgspec.Raw


def is_given(value: object) -> bool:
    """Whether a field has a value other than null.

    >>> is_given(None), is_given(msgspec.Raw(b"null")), is_given(msgspec.Raw(b"[]"))
    (False, False, True)
    """
    return value is not None and not (
        isinstance(value, msgspec.Raw) and bytes(memoryview(value)[:5]) == b"null"
    )


MAX_MESSAGES = 2048
MAX_TOOLS = 128

Count: TypeAlias = Annotated[int, Meta(ge=1, le=MAX_INT)]
TokenId: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_INT)]
_Penalty: TypeAlias = Annotated[float, Meta(ge=-2, le=2)]
_Temperature: TypeAlias = Annotated[float, Meta(ge=0, le=100)]
_Probability: TypeAlias = Annotated[float, Meta(ge=0, le=1)]
_TopK: TypeAlias = Annotated[int, Meta(ge=-1, le=MAX_INT)]
Repetition: TypeAlias = Annotated[float, Meta(ge=0.01, le=100)]
Source: TypeAlias = Annotated[str, Meta(min_length=1, max_length=MAX_SOURCE_CHARS)]
StopString: TypeAlias = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARS)]
StopField: TypeAlias = StopString | Annotated[list[StopString], Meta(max_length=MAX_STOPS)]
Bias: TypeAlias = Annotated[float, Meta(ge=-100, le=100)]
Biases: TypeAlias = Annotated[
    dict[TokenId, Bias],
    Meta(
        max_length=MAX_BIASES,
        description="Token ids, as strings, with the values that are added to their logits.",
        extra_json_schema={"propertyNames": {"pattern": "^(0|[1-9][0-9]{0,9})$"}},
    ),
]
# A value that is not used is not decoded: a body can have millions of objects.
Unsupported: TypeAlias = Annotated[
    Unread, Meta(extra_json_schema={"type": "null"}, description="Not supported.")
]
UnsupportedText: TypeAlias = Annotated[
    Unread,
    Meta(
        extra_json_schema={"type": ["string", "null"], "maxLength": 0},
        description="Not supported, unless it is empty.",
    ),
]
# An object that is decoded later, after its bounds are checked (protocol/bounds/json_bounds.py).
GivenObject: TypeAlias = Annotated[Unread, Meta(extra_json_schema={"type": ["object", "null"]})]
GivenSchema: TypeAlias = Annotated[Unread, Meta(extra_json_schema={"type": ["object", "string", "null"]})]
OnlyTrue: TypeAlias = Annotated[bool, Meta(extra_json_schema={"const": True})]
OnlyFalse: TypeAlias = Annotated[bool, Meta(extra_json_schema={"const": False})]
ToolName: TypeAlias = Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]{1,64}$")]


class SharedSampling(msgspec.Struct, kw_only=True):
    """The sampling parameters that have one meaning in all of these APIs."""

    temperature: _Temperature | None = None
    top_p: _Probability | None = None
    top_k: _TopK | None = None
    min_p: _Probability | None = None
    frequency_penalty: _Penalty | None = None
    presence_penalty: _Penalty | None = None
    stop: StopField | None = None
