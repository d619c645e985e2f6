"""An engine whose fake model writes plain text, and the reference: each request alone, token by token."""

from __future__ import annotations

import re
import zlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from support.fake_engine import TOKENIZER

from agentflow.engine.client import EngineClient, running_engine
from agentflow.engine.fake_runner import FakeRunner
from agentflow.engine.scheduling.scheduler import SchedulerConfig
from agentflow.protocol.sampling import SamplingParams

# Tokens that are whole characters, so that every id of an output has its own text.
PLAIN_IDS = [
    i
    for i in range(2, TOKENIZER.vocab_size)
    if (text := TOKENIZER.decode([i])) and text.isascii() and text.isprintable()
]
END_ID = 1


def plain_token(tokens: Sequence[int]) -> int:
    """What the fake model writes after ``tokens``: plain text, and now and then its end token."""
    number = zlib.crc32(np.array(tokens, dtype=np.int64).tobytes())
    return END_ID if number % 17 == 0 else PLAIN_IDS[number % len(PLAIN_IDS)]


def fake_logprob(before: Sequence[int], token: int) -> float:
    """The log-probability that the fake runner gives ``token`` after ``before``."""
    seen = np.array(before, dtype=np.int64).tobytes()
    return float(np.float32(-(zlib.crc32(seen + b"%d" % token) % 5000) / 1000))


RunnerT = TypeVar("RunnerT", bound=FakeRunner)


def runner(kind: type[RunnerT] = FakeRunner, **options) -> RunnerT:  # type: ignore[assignment]
    """The fake model. ``options`` as of ``FakeRunner``."""
    defaults = {"num_slots": 4096, "max_context": 512, "vocab_size": TOKENIZER.vocab_size}
    return kind(**(defaults | {"next_token": plain_token, "end_token_ids": (END_ID,)} | options))


@asynccontextmanager
async def plain_engine(
    config: SchedulerConfig | None = None, *, kind: type[FakeRunner] = FakeRunner, **options
) -> AsyncIterator[EngineClient]:
    """A running engine on it. When it ends, no slot may be in use."""
    fake = runner(kind, **options)
    async with running_engine(lambda: (fake, TOKENIZER, config or SchedulerConfig())) as client:
        yield client
        if client.num_calls == 0:
            await client.stats()  # whatever was aborted has been read by then
            client.engine.scheduler.check_idle()


@dataclass(frozen=True)
class Expected:
    """The reference model's result. ``sampled``: with the token that ended it, if one did."""

    text: str
    ids: list[int]
    reason: str
    sampled: list[int]


Choose = Callable[[list[int], list[int], set[int]], int]
"""The token after a prompt and an output, none of those that are forbidden."""


def plain_choose(prompt: list[int], ids: list[int], forbidden: set[int]) -> int:
    """The choice of the fake model that writes plain text."""
    token = plain_token([*prompt, *ids])
    while token in forbidden:
        token = (token + 1) % TOKENIZER.vocab_size
    return token


def alone(prompt: Sequence[int], params: SamplingParams, choose: Choose = plain_choose) -> Expected:
    """One request by itself, token by token and character by character."""
    ids: list[int] = []
    text = ""
    stoppable_from = 0
    ends = {*params.stop_token_ids} | (set() if params.ignore_eos else {END_ID})
    while True:
        is_free = len(ids) < params.min_tokens
        token = choose([*prompt], ids, ends if is_free else set())
        sampled = [*ids, token]
        if token == END_ID and not params.ignore_eos:
            return Expected(text, ids, "eos", sampled)
        if token in params.stop_token_ids:
            return Expected(text, ids, "stop", sampled)
        for char in TOKENIZER.decode([token]):
            text += char
            begins = [len(text) - len(s) for s in params.stop if text.endswith(s, stoppable_from)]
            if params.stop_regex is not None:
                found = re.compile(params.stop_regex).search(text, stoppable_from)
                begins += [] if found is None else [found.start()]
            if begins and not is_free:
                kept = text[: min(begins)]
                return Expected(kept, ids_within(ids, kept), "stop", sampled)
        stoppable_from = len(text) if is_free else stoppable_from
        ids = sampled
        if len(ids) == params.max_tokens:
            return Expected(text, ids, "length", sampled)


def ids_within(ids: list[int], text: str) -> list[int]:
    """The ids at the front that lie wholly in ``text``; what is left of it is encoded anew."""
    kept: list[int] = []
    for token in ids:
        if len(TOKENIZER.decode([*kept, token])) > len(text):
            break
        kept.append(token)
    return kept + TOKENIZER.encode_exact(text[len(TOKENIZER.decode(kept)) :], continues=True)
