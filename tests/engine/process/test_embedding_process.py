"""Embeddings of an engine process that dies, and of callers that leave."""

from __future__ import annotations

from pathlib import Path

import anyio
import numpy as np
import pytest
from support.engine_loaders import POISON
from support.holds import Hold
from support.process_engine import kill, process_engine

from agentflow.errors import EngineFailed
from agentflow.runtime.word_embedding import word_embedding

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60)]
SIZE = 8
PROMPTS = [[n + 10] * 300 + [n + 20] for n in range(6)]


def expected(prompt: list[int]) -> np.ndarray:
    return np.array(word_embedding([b"%d" % token for token in prompt], SIZE), dtype=np.float32)


async def test_every_embedding_comes_though_the_process_is_killed(tmp_path: Path) -> None:
    hold = Hold(tmp_path / "hold")
    found: dict[int, np.ndarray] = {}

    async def embed(number: int) -> None:
        end = await client.embed(PROMPTS[number])
        found[number] = np.frombuffer(end.embedding, dtype="<f4")

    async with process_engine(hold_at={"3": hold.path}, embedding_size=SIZE) as client:
        async with anyio.create_task_group() as group:
            for number in range(len(PROMPTS)):
                group.start_soon(embed, number)
            await hold.reached()
            kill(client, hold)
        assert (await client.stats()).restarts == 1
    assert all(np.array_equal(found[n], expected(prompt)) for n, prompt in enumerate(PROMPTS))


async def test_callers_that_leave_free_their_slots(tmp_path: Path) -> None:
    hold = Hold(tmp_path / "hold")
    async with process_engine(hold_at={"2": hold.path}, embedding_size=SIZE) as client:
        async with anyio.create_task_group() as group:
            for prompt in PROMPTS:
                group.start_soon(client.embed, prompt)
            await hold.reached()
            group.cancel_scope.cancel()
        hold.release()
        with anyio.fail_after(20):
            while (await client.stats()).in_use_slots:
                pass
            end = await client.embed(PROMPTS[0])
    assert np.array_equal(np.frombuffer(end.embedding, dtype="<f4"), expected(PROMPTS[0]))


async def test_a_text_that_kills_the_process_fails_alone(tmp_path: Path) -> None:
    failures: list[Exception] = []

    async def poisoned() -> None:
        try:
            await client.embed([POISON, 5])
        except EngineFailed as error:
            failures.append(error)

    async with process_engine(embedding_size=SIZE) as client, anyio.create_task_group() as group:
        group.start_soon(poisoned)
        end = await client.embed(PROMPTS[1])
    assert np.array_equal(np.frombuffer(end.embedding, dtype="<f4"), expected(PROMPTS[1]))
    assert len(failures) == 1
