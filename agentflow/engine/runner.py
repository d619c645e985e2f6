"""The seam between the engine and a model: anything that runs a batch and gives one token per row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from agentflow.engine.batch import Batch, BatchOutput


@dataclass(frozen=True, slots=True)
class RunnerInfo:
    """What the engine must know of a model. ``num_slots``: tokens that the KV pool holds.
    ``max_context``: longest sequence. ``end_token_ids``: the model's own end tokens."""

    model: str
    vocab_size: int
    max_context: int
    num_slots: int
    end_token_ids: tuple[int, ...]
    kv_bytes_per_token: int
    weight_bytes: int


class AcceleratorFault(Exception):
    """The device failed and this process cannot use it any more: every later forward pass fails too."""


class OutOfMemory(Exception):
    """There is no memory for this batch. A smaller one may fit."""


def nothing() -> None:
    """What is to be done meanwhile, where it is nothing."""


class ModelRunner(Protocol):
    """Runs batches. Used from one thread only. ``run`` writes the KV of every row into its slot, and returns
    when the output is on the host. It calls ``meanwhile`` once: while the batch runs, if it runs elsewhere
    than in this thread, or else before. ``AcceleratorFault`` and ``OutOfMemory`` say what the engine can do
    about a failure; any other exception is the batch's fault, as far as the runner knows."""

    info: RunnerInfo

    def run(self, batch: Batch, meanwhile: Callable[[], None] = nothing) -> BatchOutput: ...

    def close(self) -> None: ...
