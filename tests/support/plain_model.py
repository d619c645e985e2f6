"""A fake model that writes plain text: for the real engine, and for the plain engine, its reference."""

from __future__ import annotations

import zlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from support.fake_engine import TOKENIZER
from support.plain_engine import End, Model, PlainEngine

from agentflow.engine.client import EngineClient, running_engine
from agentflow.engine.scheduling.scheduler import SchedulerConfig
from agentflow.engine.simulator.fake_runner import FakeRunner, NextToken
from agentflow.protocol.sampling import SamplingParams

# Tokens that are whole characters, so that every id of an output has its own text.
PLAIN_IDS = [
    i
    for i in range(2, TOKENIZER.vocab_size)
    if (text := TOKENIZER.decode([i])) and text.isascii() and text.isprintable()
]
END_ID = 1


def plain_token(tokens: Sequence[int]) -> int:
    """The next token of the fake model after ``tokens``: plain text, and now and then its end token."""
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
async def plain_model_engine(
    config: SchedulerConfig | None = None, *, kind: type[FakeRunner] = FakeRunner, **options
) -> AsyncIterator[EngineClient]:
    """A running engine on it. When it ends, no slot may be in use."""
    fake = runner(kind, **options)
    async with running_engine(lambda: (fake, TOKENIZER, config or SchedulerConfig())) as client:
        yield client
        if client.num_calls == 0:
            await client.stats()  # aborts have been read by then
            client.engine.scheduler.check_idle()


@dataclass(frozen=True)
class FakeModel:
    """The fake runner's model, with logits: the chosen token is the likeliest, then its successors by id."""

    next_token: NextToken = plain_token
    vocab_size: int = TOKENIZER.vocab_size
    end_id: int = END_ID

    def logits(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        chosen = self.next_token(np.array(tokens, dtype=np.int64))
        assert chosen is not None
        return np.roll(-np.arange(self.vocab_size, dtype=np.float32), chosen)

    def logprob(self, tokens: Sequence[int], token: int) -> float:
        return fake_logprob(tokens, token)


PLAIN_MODEL = FakeModel()


def alone(prompt: Sequence[int], params: SamplingParams, model: Model = PLAIN_MODEL, **options) -> End:
    """The end of one request by itself on the plain engine. ``options`` as of ``submit``."""
    engine = PlainEngine(model, TOKENIZER, num_slots=10_000, max_context=10_000)
    request = engine.submit(prompt, params, **options)
    engine.run()
    assert request.end is not None
    return request.end
