"""Writes answers with many log-probabilities in a thread, so that the event loop continues.

Each alternative of each token becomes an object of the answer, and then part of its body: the most that a
request may have take seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar, TypeVarTuple, Unpack

import anyio.to_thread
import msgspec

from agentflow.runtime.limits import MemoryBudget, tenant_part
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
# The memory of one at the peak: as a number, a token, an object of the answer, and in the body.
LOGPROB_BYTES = 420


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


class AnswerMemory:
    """The memory of one request's answers. Answers that are written without a thread do not count.

    Args:
        memory: the tenant's memory.
        part_bytes: the size of that memory. The largest answers count as half of it, so that they are
            possible at all.
    """

    def __init__(self, memory: MemoryBudget, part_bytes: int) -> None:
        self._held = MemoryBudget(within=memory, free_bytes=MAX_INLINE_LOGPROBS * LOGPROB_BYTES)
        self._most_bytes = part_bytes // 2

    def reserve(self, num_logprobs: int) -> None:
        """Counts log-probabilities that are about to be read. ``Overloaded`` if there is no room."""
        left = max(0, self._most_bytes - self._held.num_bytes)
        self._held.reserve(min(num_logprobs * LOGPROB_BYTES, left))

    def close(self) -> None:
        """Releases the memory, once the answers are written."""
        self._held.close()


@contextmanager
def answer_memory(call: ApiCall) -> Iterator[AnswerMemory]:
    """The scope in which the answers of a request are in memory, which count with the tenant's bodies."""
    tenant, service = call.tenant.name, call.service
    part_bytes = tenant_part(service.http_limits.bodies_bytes, tenant)
    memory = AnswerMemory(service.bodies.of(tenant), part_bytes)
    try:
        yield memory
    finally:
        memory.close()
