"""An engine whose fake model writes plain text, and its twin: each request alone, token by token."""

from __future__ import annotations

import zlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import numpy as np
from fake_engine import TOKENIZER

from agentflow.sampling import SamplingParams
from agentflow.server.core.scheduler import SchedulerConfig
from agentflow.server.engine_client import EngineClient, running_engine
from agentflow.server.fake_runner import FakeRunner

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


def runner(**options) -> FakeRunner:
    """The fake model. ``options`` as of ``FakeRunner``."""
    defaults = {"num_slots": 4096, "max_context": 512, "vocab_size": TOKENIZER.vocab_size}
    return FakeRunner(**(defaults | {"next_token": plain_token, "end_token_ids": (END_ID,)} | options))


@asynccontextmanager
async def plain_engine(config: SchedulerConfig | None = None, **options) -> AsyncIterator[EngineClient]:
    """A running engine on it. When it ends, nothing may be held."""
    fake = runner(**options)
    async with running_engine(lambda: (fake, TOKENIZER), config or SchedulerConfig()) as client:
        yield client
        if client.num_calls == 0:
            await client.stats()  # whatever was aborted has been read by then
            client.engine.scheduler.check_idle()


@dataclass(frozen=True)
class Expected:
    """The twin's result. ``sampled``: with the token that ended it, if one did."""

    text: str
    ids: list[int]
    reason: str
    sampled: list[int]


def alone(prompt: Sequence[int], params: SamplingParams) -> Expected:
    """One greedy request by itself."""
    ids: list[int] = []
    text = ""
    while True:
        token = plain_token([*prompt, *ids])
        sampled = [*ids, token]
        if token == END_ID and not params.ignore_eos:
            return Expected(text, ids, "eos", sampled)
        if token in params.stop_token_ids:
            return Expected(text, ids, "stop", sampled)
        for char in TOKENIZER.decode([token]):
            text += char
            complete = [stop for stop in params.stop if text.endswith(stop)]
            if complete:
                kept = text[: -max(map(len, complete))]
                return Expected(kept, ids_within(ids, kept), "stop", sampled)
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
