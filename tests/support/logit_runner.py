"""A fake model with logits: the real sampler on numbers that follow from the last token."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager

import numpy as np
import torch
from numpy.typing import NDArray
from support.fake_engine import TOKENIZER
from support.plain_engine import End
from support.plain_model import END_ID, PLAIN_IDS, alone, plain_model_engine, runner

from agentflow.engine.batch import BatchOutput, SampledRows
from agentflow.engine.client import EngineClient
from agentflow.engine.models.sampler import choose_tokens
from agentflow.engine.scheduling.scheduler import SchedulerConfig
from agentflow.engine.simulator.fake_runner import FakeRunner
from agentflow.kernels.platforms import TORCH
from agentflow.protocol.sampling import SamplingParams

FAVOURITES = np.random.default_rng(7).normal(0.0, 1.5, len(PLAIN_IDS))
"""How likely each plain token is, whatever came before."""


def logits_after(tokens: Sequence[int] | NDArray[np.int64]) -> NDArray[np.float32]:
    """Plain text is likely, and a few characters are much more so than others, after any text; their exact
    scores depend on the last token. The end comes up now and then."""
    return _logits_after(int(tokens[-1]))


@functools.cache
def _logits_after(token: int) -> NDArray[np.float32]:
    chance = np.random.default_rng(token)
    logits = np.full(TOKENIZER.vocab_size, -20.0, dtype=np.float32)
    logits[PLAIN_IDS] = FAVOURITES + chance.normal(0.0, 0.5, len(PLAIN_IDS))
    # In most places the end is no choice, in some it is the first.
    logits[END_ID] = 9.0 if zlib.crc32(b"%d" % token) % 5 == 0 else -20.0
    logits.setflags(write=False)
    return logits


class LogitRunner(FakeRunner):
    """Chooses as a real runner does."""

    def choose(self, seen: list[NDArray[np.int64]], sampled: SampledRows) -> BatchOutput:
        if not seen:
            return BatchOutput(sampled.target_ids.copy(), None)
        logits = torch.from_numpy(np.stack([logits_after(tokens) for tokens in seen]))
        return choose_tokens(logits, sampled, TORCH.sampler)


def logit_runner(**options) -> LogitRunner:
    """``options`` as of ``FakeRunner``."""
    return runner(LogitRunner, **options)


def logit_engine(
    config: SchedulerConfig | None = None, **options
) -> AbstractAsyncContextManager[EngineClient]:
    """A running engine on it. When it ends, no slot may be in use."""
    return plain_model_engine(config, kind=LogitRunner, **options)


class LogitModel:
    """The runner's model, for the plain engine."""

    vocab_size = TOKENIZER.vocab_size
    end_id = END_ID

    def logits(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        return logits_after(tokens)

    def logprob(self, tokens: Sequence[int], token: int) -> float:
        logits = logits_after(tokens).astype(float)
        return float(logits[token] - np.log(np.exp(logits).sum()))


LOGIT_MODEL = LogitModel()


def alone_by_logits(prompt: Sequence[int], params: SamplingParams, seed: int = 0, **options) -> End:
    """The end of one request by itself on the plain engine. ``options`` as of ``submit``."""
    return alone(prompt, params, LOGIT_MODEL, seed=seed, **options)
