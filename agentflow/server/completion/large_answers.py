"""Writes answers with many log-probabilities in a thread, so that the event loop continues.

Each alternative of each token becomes an object of the answer, and then part of its body: the most that a
request may have take seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar, TypeVarTuple, Unpack

import anyio.to_thread
import msgspec

from agentflow.server.completion.request import (
    Answer,
    AnswerToken,
    CompletionDelta,
    PromptDelta,
    ReasoningDelta,
    TextDelta,
)
from agentflow.server.http.call import ApiCall

T = TypeVar("T")
ArgTs = TypeVarTuple("ArgTs")

# A part of an answer with more log-probabilities is written in a thread.
MAX_INLINE_LOGPROBS = 2_048


def count_logprobs(parts: Sequence[CompletionDelta] | Sequence[Answer]) -> int:
    """The log-probabilities in answers, or in parts of them, with the alternatives and the prompt's."""
    num_logprobs = 0
    for part in parts:
        if isinstance(part, TextDelta | ReasoningDelta | PromptDelta | Answer) and part.tokens:
            num_logprobs += _count(part.tokens)
        if isinstance(part, Answer) and part.prompt is not None:
            num_logprobs += _count(part.prompt.tokens)
    return num_logprobs


def _count(tokens: Sequence[AnswerToken]) -> int:
    return len(tokens) + sum([len(token.top) for token in tokens])


async def write_beside(
    call: ApiCall, num_logprobs: int, write: Callable[[Unpack[ArgTs]], T], *arguments: *ArgTs
) -> T:
    """Calls a function that writes ``num_logprobs`` log-probabilities; in a thread of the tenant if they are
    many. The function must not start or wake tasks."""
    if num_logprobs <= MAX_INLINE_LOGPROBS:
        return write(*arguments)
    limiter = call.service.body_threads(call.tenant)
    return await anyio.to_thread.run_sync(write, *arguments, limiter=limiter)


async def reply_beside(
    call: ApiCall, num_logprobs: int, make: Callable[[], msgspec.Struct | Sequence[msgspec.Struct]]
) -> None:
    """Replies with the result of ``make``, which is made and encoded as in ``write_beside``."""

    def written() -> bytes:
        return msgspec.json.encode(make())

    await call.reply(await write_beside(call, num_logprobs, written))
