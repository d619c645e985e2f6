"""The messages of Anthropic's API and the content blocks in them, as requests bring them."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

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
