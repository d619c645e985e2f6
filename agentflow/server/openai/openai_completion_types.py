"""The request and the answer of ``POST /v1/completions``."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

from agentflow.server.openai.openai_fields import SharedFields, TokenId
from agentflow.server.openai.usage import UsageBody

# That many of the likeliest tokens this endpoint has always told.
MAX_LOGPROBS = 5

IdList: TypeAlias = Annotated[list[TokenId], Meta(min_length=1)]
Prompt: TypeAlias = Annotated[
    str | Annotated[list[str | TokenId | IdList], Meta(min_length=1)],
    Meta(description="A text, a list of texts, token ids, or a list of lists of token ids."),
]


class TextRequest(SharedFields, kw_only=True):
    """A text to go on with, or several. In a text, special tokens that are written out count."""

    prompt: Prompt
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None


class TextLogprobs(msgspec.Struct, kw_only=True):
    """One member of each list for each token. ``text_offset``: where in the answer its text begins, in
    characters. A token that is no UTF-8 of its own is written as ``bytes:\\x..``. ``token_logprobs`` is null
    where the text was encoded anew, which happens under a constraint."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float | None]]
    text_offset: list[int]


class TextChoice(msgspec.Struct, kw_only=True):
    """One answer, or in a stream a piece of it. Answers are counted prompt by prompt."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Literal["stop", "length"] | None


class TextAnswer(msgspec.Struct, kw_only=True):
    """The whole answer. ``created``: Unix time."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[TextChoice]
    usage: UsageBody
    object: Literal["text_completion"] = "text_completion"
