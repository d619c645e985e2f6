"""Prompts without a chat template: texts or token ids, one or several."""

from __future__ import annotations

from typing import Annotated, TypeAlias, cast

from msgspec import Meta

from agentflow.server.compatible.fields import TokenId
from agentflow.server.completion.request import TokenIds
from agentflow.server.errors import invalid_field

IdList: TypeAlias = Annotated[list[TokenId], Meta(min_length=1)]
Prompt: TypeAlias = Annotated[
    str | Annotated[list[str | TokenId | IdList], Meta(min_length=1)],
    Meta(description="A text, a list of texts, token ids, or a list of lists of token ids."),
]


def read_prompts(prompt: Prompt, param: str = "prompt") -> list[str | TokenIds]:
    """The prompts of the field ``param``. ``ApiError`` for a list of mixed types."""
    if isinstance(prompt, str):
        return [prompt]
    kinds = {type(member) for member in prompt}
    if len(kinds) > 1:
        raise invalid_field(
            param, "it must be a text, a list of texts, token ids, or a list of lists of token ids"
        )
    if kinds == {int}:
        return [TokenIds(tuple(cast("list[int]", prompt)))]
    return [TokenIds(tuple(member)) if isinstance(member, list) else cast(str, member) for member in prompt]
