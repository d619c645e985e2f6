"""The settings of the ablation on an engine without a model."""

from __future__ import annotations

from typing import Any

import pytest
from support.server.http_clients import only_asyncio

from agentflow.engine.simulator.fake_runner import FakeRunner
from agentflow.engine.store.model_store import resolve_model
from agentflow.engine.text.tokenizer import Tokenizer
from benchmarks.engine import ablation
from benchmarks.engine.program_shapes import SHAPES, Shape

anyio_backend = pytest.fixture(only_asyncio)
pytestmark = [pytest.mark.anyio, pytest.mark.model]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(resolve_model(ablation.MODEL))


@pytest.mark.parametrize("setting", ablation.SETTINGS, ids=lambda setting: setting.name)
async def test_every_program_runs_under_each_setting(setting: ablation.Setting, tokenizer: Tokenizer) -> None:
    runner: Any = FakeRunner(num_slots=4_000, vocab_size=49_152, max_context=4_000)
    few_shot = Shape(SHAPES[0].name, 8, SHAPES[0].program)
    run = await ablation.run_once(runner, tokenizer, setting, few_shot, 1_600)
    assert len(run.engine.recorded.requests) == 8
    assert 0 <= run.engine.recorded.optimum()[0] <= 1


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
async def test_f37_the_optimum_counts_the_prompts_that_the_engine_counts(
    shape: Shape, tokenizer: Tokenizer
) -> None:
    runner: Any = FakeRunner(num_slots=20_000, vocab_size=49_152, max_context=8_000)
    few = Shape(shape.name, 2, shape.program)
    run = await ablation.run_once(runner, tokenizer, ablation.SETTINGS[0], few, 16_000)
    num_tokens = [
        len(prompt) // 4 + 1 for _, prompt, _, is_extra in run.engine.recorded.requests if not is_extra
    ]
    assert sum(num_tokens) == run.stats.prompt_tokens
