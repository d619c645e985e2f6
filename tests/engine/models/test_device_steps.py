"""The order in which a batch with token masks enters a device's queue."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.engine.random_model import VOCAB, write_random_model
from support.engine.runner_driver import Driver

from agentflow.engine.batch import MaskWords, TokenMasks
from agentflow.engine.grammar.grammar import make_mask
from agentflow.engine.models import device_steps, sampler
from agentflow.engine.models.forward.decoder import Decoder
from agentflow.engine.models.torch_runner import TorchRunner
from agentflow.engine.runner import OutOfMemory
from agentflow.kernels.device_stream import DeviceStream

pytestmark = pytest.mark.timeout(60)
ALLOWED = (7, 90)


class Recorded:
    """Names calls in their order."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def named(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(*args: Any, **options: Any) -> Any:
            self.calls.append(name)
            return call(*args, **options)

        return recorded


@pytest.fixture
def runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TorchRunner:
    """A runner with a queue that does its work immediately."""
    monkeypatch.setenv("AGENTFLOW_KERNELS", "torch")
    stream = DeviceStream(torch.device("cpu"))
    return TorchRunner(
        write_random_model(tmp_path, max_position_embeddings=512),
        num_slots=600,
        device="cpu",
        dtype="float32",
        stream=stream,
    )


@pytest.mark.parametrize("num_rows", [1, 300], ids=["one part", "two parts of logits"])
def test_masks_are_computed_behind_the_forward_pass(
    runner: TorchRunner, monkeypatch: pytest.MonkeyPatch, num_rows: int
) -> None:
    """And once for all parts of the logits. The tokens obey them."""
    recorded, masked = Recorded(), np.arange(0, num_rows, 2)
    monkeypatch.setattr(Decoder, "launch", recorded.named("forward", Decoder.launch))
    choose = recorded.named("choice", sampler.choose_tensors)
    monkeypatch.setattr(device_steps, "choose_tensors", choose)

    def words() -> MaskWords:
        return np.stack([make_mask(ALLOWED, VOCAB)] * len(masked))

    driver = Driver(runner)
    walker = driver.add([5 + i % 40 for i in range(num_rows)])
    rows = np.arange(num_rows)
    output = driver.step(
        [(walker, num_rows)],
        rows=rows,
        masks=TokenMasks(masked, recorded.named("masks", words)),
    )
    assert recorded.calls == ["forward", "masks", *["choice"] * (1 if num_rows == 1 else 2)]
    assert set(output.token_ids[masked].tolist()) <= set(ALLOWED)
    free = np.setdiff1d(rows, masked)
    assert not len(free) or not set(output.token_ids[free].tolist()) <= set(ALLOWED)


def test_a_launch_that_fails_behind_the_forward_pass_leaves_the_queue_usable(runner: TorchRunner) -> None:
    """The forward pass of that batch runs; the next batch has the tokens that it would have had."""
    prompts = ([5, 6, 7], [8, 9])
    expected = Driver(runner)
    walkers = [expected.add(prompt) for prompt in prompts]
    expected.generate(walkers, 4)

    def fail() -> MaskWords:
        raise MemoryError

    driver = Driver(runner, seed=1)
    again = [driver.add(prompt) for prompt in prompts]
    failing = driver.add([11, 12])
    with pytest.raises(OutOfMemory):
        driver.step([(failing, 2)], masks=TokenMasks(np.array([0]), fail))
    driver.generate(again, 4)
    assert [walker.generated for walker in again] == [walker.generated for walker in walkers]
