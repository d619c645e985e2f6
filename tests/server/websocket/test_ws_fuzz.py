"""The websocket survives fuzzed frames without a crash, leak or stall, and other clients are not affected.

A short run here; ``make fuzz`` sends many more. FUZZ_FRAMES: how many. FUZZ_SEED: which ones. A failure
prints the batches; ``FUZZ_ONLY=BATCH`` runs one of them alone.
"""

from __future__ import annotations

import gc
import logging
import os
import sys

import numpy.ma  # noqa: F401  # np.unique imports its 5,000 blocks when admission first calls it
import psutil
import pytest
from support.server.fuzz_driver import Fuzzer, engine_target

from agentflow.engine.scheduling.policies import fair_policy
from agentflow.engine.watching import snapshot

pytestmark = pytest.mark.anyio

NUM_FRAMES = int(os.environ.get("FUZZ_FRAMES", "500"))
SEED = os.environ.get("FUZZ_SEED", "1")
ONLY = os.environ.get("FUZZ_ONLY", "")

# Caches are warm by then.
WARM_UP_SHARE = 0.7
# The size of caches varies by some hundreds of blocks, for any number of frames. In a long run, a block
# that each conversation left behind would be more than all that is allowed.
MAX_BLOCKS = 1000
MAX_BYTES = 48_000_000


@pytest.mark.timeout(120 + NUM_FRAMES // 10)
async def test_fuzzed_frames_affect_no_other_session(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.ERROR)
    # The engine remembers when its cache was used, ten times a second for a quarter of an hour, and thousands
    # of programs that have ended.
    monkeypatch.setattr(snapshot, "MAX_TIMES", 64)
    monkeypatch.setattr(fair_policy, "MAX_PROGRAMS", 64)
    async with engine_target() as (generator, check_idle, empty_caches):
        fuzzer = Fuzzer(generator, check_idle)
        warm: tuple[int, int] | None = None
        number = 0
        while fuzzer.num_frames < NUM_FRAMES and not (ONLY and number):
            batch = ONLY or f"{SEED}.{number}"
            print(f"batch {batch}")
            await fuzzer.run_batch(batch)
            assert not caplog.records, caplog.text
            number += 1
            if warm is None and fuzzer.num_frames >= WARM_UP_SHARE * NUM_FRAMES:
                await empty_caches()
                warm = _memory()
        if warm is not None and not ONLY:
            await empty_caches()
            blocks, num_bytes = _memory()
            print(
                f"{fuzzer.num_frames} frames, {blocks - warm[0]} blocks and {num_bytes - warm[1]} bytes more"
            )
            assert blocks - warm[0] <= MAX_BLOCKS + NUM_FRAMES // 50
            assert num_bytes - warm[1] <= MAX_BYTES


def _memory() -> tuple[int, int]:
    """Blocks that Python's allocator has handed out, and bytes that the process has of the machine."""
    gc.collect()
    return sys.getallocatedblocks(), psutil.Process().memory_info().rss
