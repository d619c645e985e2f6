"""The blocks that a scheduler's cache reports, for readers in other processes."""

from __future__ import annotations

import numpy as np
from support.engine.requests import request_of

from agentflow.engine.cache.blocks import (
    BLOCK_TOKENS,
    BlocksRemoved,
    BlocksStored,
    chain_digests,
    root_digest,
)
from agentflow.engine.runner import run_batch
from agentflow.engine.scheduling.scheduler import Scheduler, SchedulerConfig
from agentflow.engine.simulator.fake_runner import FakeRunner
from agentflow.protocol.sampling import SamplingParams


def test_generated_tokens_enter_the_cache_block_by_block_while_their_request_runs() -> None:
    stored: list[bytes] = []

    def on_blocks(report: BlocksStored | BlocksRemoved) -> None:
        assert isinstance(report, BlocksStored)
        stored.extend(report.digests)

    scheduler = Scheduler(
        num_slots=600, max_context=600, config=SchedulerConfig(), model="m", on_blocks=on_blocks
    )
    runner = FakeRunner(num_slots=600, max_context=600)
    prompt = np.arange(BLOCK_TOKENS + 6, dtype=np.int32)
    request = request_of(1, prompt, 400, SamplingParams(), tenant="one", salt="s")
    scheduler.add(request)
    while request.num_generated < 3 * BLOCK_TOKENS:
        batch = scheduler.schedule()
        assert batch is not None
        scheduler.complete(run_batch(runner, batch))
    expected = chain_digests(
        root_digest("m", request.cache_key), request.tokens[: request.num_tokens].astype(np.int32).tobytes()
    )
    assert len(stored) >= 3
    assert stored == expected[: len(stored)]


def test_a_digest_depends_on_the_model_the_tenant_and_all_tokens_before() -> None:
    tokens = np.arange(3 * BLOCK_TOKENS, dtype=np.int32)
    digests = chain_digests(root_digest("m", "one"), tokens.tobytes())
    assert len(digests) == 3
    assert set(digests).isdisjoint(chain_digests(root_digest("m", "two"), tokens.tobytes()))
    assert set(digests).isdisjoint(chain_digests(root_digest("other", "one"), tokens.tobytes()))
    tokens[0] = 7
    assert set(digests).isdisjoint(chain_digests(root_digest("m", "one"), tokens.tobytes()))
