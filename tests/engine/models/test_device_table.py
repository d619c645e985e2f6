"""Batches that are launched ahead of a device which runs later, on kernels that read its table of slots."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.engine.device import QueuedStream
from support.engine.requests import request_of
from support.engine.scheduler_harness import reads_of

from agentflow.engine.batch import Batch
from agentflow.engine.models.device_steps import DeviceStep, DeviceSteps
from agentflow.engine.models.device_table import DeviceTable, write_slots
from agentflow.engine.models.torch_runner import make_forward_input
from agentflow.engine.scheduling.kv_memory import SlotTable
from agentflow.engine.scheduling.scheduler import Scheduler, SchedulerConfig
from agentflow.kernels.platforms import TORCH, Kernels, triton_kernels
from benchmarks.step.random_llama import llama_config, random_llama
from benchmarks.step.work import Shape, batch_of

CPU = torch.device("cpu")
CONFIG = llama_config(32, 48, 2, 4, 2, 100)
NUM_SLOTS = 200


@torch.inference_mode()
def greedy(
    kernels: Kernels, prompts: Sequence[Sequence[int]], num_tokens: int, *, use_cache: bool
) -> tuple[list[list[int]], list[Batch]]:
    """The tokens of all requests, of which each arrives one step after the one before it, and the batches.
    A batch is launched before the one before it is collected."""
    model = random_llama(CONFIG, kernels, torch.float32, CPU)
    pool = torch.full((2, NUM_SLOTS, 2, 2, 8), torch.nan).unbind(0)
    # The table of the scheduler is larger: the one on the device becomes new memory.
    steps = DeviceSteps(model, kernels.sampler, QueuedStream(), (2, 10))
    config = SchedulerConfig(max_running=4, token_budget=40, use_cache=use_cache)
    scheduler = Scheduler(num_slots=NUM_SLOTS, max_context=150, config=config)
    requests = [request_of(number, prompt, num_tokens) for number, prompt in enumerate(prompts)]
    waiting, in_flight, batches = deque(requests), deque[DeviceStep](), []
    while waiting or scheduler.running or len(scheduler.waiting):
        if waiting:
            scheduler.add(waiting.popleft())
        batch = scheduler.schedule()
        if batch is not None:
            batches.append(batch)
            table = steps.table.sized_for(batch)
            in_flight.append(steps.launch(batch, make_forward_input(batch, kernels, pool, table=table)))
        if len(in_flight) < 2 and batch is not None:
            continue
        for row in scheduler.complete(in_flight.popleft().output()):
            if row.request.num_generated == num_tokens:
                scheduler.release(row.request)
    return [request.tokens[request.num_prompt : request.num_tokens].tolist() for request in requests], batches


@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")  # numpy's, in Triton's interpreter
def test_requests_over_shared_prefixes_have_the_tokens_that_they_have_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a pool that is too small for all of them: rows of the table and slots are used again."""
    pytest.importorskip("triton", reason="triton is for x86-64 and Linux")
    from agentflow.kernels.triton_ops.attention import units
    from agentflow.kernels.triton_ops.interpreted import IS_INTERPRETED

    if not IS_INTERPRETED.value:
        pytest.skip("test_device_engine runs on a GPU")
    monkeypatch.setattr(units, "LEAST_SAVING", 10)
    rng = np.random.default_rng(0)
    first, second = rng.integers(0, 100, 30).tolist(), rng.integers(0, 100, 40).tolist()
    prompts = [[*first, 1], [*first, 2, 3], second, [*first, 2, 4], [*second, 5], [*first, 1, 6]]
    expected = [tokens for prompt in prompts for tokens in greedy(TORCH, [prompt], 5, use_cache=False)[0]]
    found, batches = greedy(triton_kernels(), prompts, 5, use_cache=True)
    assert found == expected
    assert max(len(rows) for batch in batches for _, rows in batch.shared) > 2
    assert any(batch.pending is not None for batch in batches)


def test_batches_in_flight_read_the_table_as_it_was() -> None:
    table, stream, one = SlotTable(3, 20), QueuedStream(), np.array([1])
    on_device = DeviceTable((3, 20), CPU)
    assert on_device.slots.stride(0) % 16 == 0
    form = batch_of(Shape(1, 5), 100, 20)
    seen: list[torch.Tensor] = []
    expected = []
    for slot in range(6):
        table.row_to_write(1, 0, 10)[:10] = 100 + slot
        changes = table.write_tokens(one, 10 * one, np.array([slot], dtype=np.int32))
        batch = replace(form, req_to_token=table.slots, req_rows=one, kv_lens=np.array([11]), changes=changes)
        arrived = stream.upload(on_device.changes(batch))
        slots = on_device.sized_for(batch)
        stream.run(lambda slots=slots, arrived=arrived: write_slots(slots, arrived))
        stream.run(lambda slots=slots: seen.append(slots[1, :11].clone()))
        [(row, length)] = reads_of(batch)
        expected.append(table.slots[row, :length].tolist())
    stream.mark().synchronize()
    assert [slots.tolist() for slots in seen] == expected


def test_a_launch_that_fails_loses_no_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next batches bring the rows that they read whole."""
    model = random_llama(CONFIG, TORCH, torch.float32, CPU)
    pool = torch.zeros(2, NUM_SLOTS, 2, 2, 8).unbind(0)
    steps = DeviceSteps(model, TORCH.sampler, QueuedStream(), (4, 50))
    table = SlotTable(4, 50)
    form = replace(batch_of(Shape(1, 20), NUM_SLOTS, 50), token_ids=np.array([7]))

    def launch(row: int, first_slot: int, context: int, *, is_new: bool = True) -> Batch:
        if is_new:
            table.row_to_write(row, 0, context)[:context] = first_slot + np.arange(context)
        rows, slots = np.array([row]), np.array([first_slot + context])
        changes = table.write_tokens(rows, np.array([context]), slots.astype(np.int32))
        batch = replace(
            form,
            req_to_token=table.slots,
            req_rows=rows,
            write_slots=slots,
            positions=np.array([context]),
            kv_lens=np.array([context + 1]),
            changes=changes,
        )
        with torch.inference_mode():
            given = make_forward_input(batch, TORCH, pool, table=steps.table.sized_for(batch))
            steps.launch(batch, given).output()
        return batch

    def check(batch: Batch) -> None:
        for row, length in reads_of(batch):
            assert steps.table.slots[row, :length].tolist() == table.slots[row, :length].tolist()

    first = launch(0, 0, 20)
    check(first)
    with monkeypatch.context() as patch:
        patch.setattr(steps._stream, "upload", lambda arrays: {}["no memory"])
        with pytest.raises(KeyError):
            launch(1, 50, 20)
    check(launch(2, 100, 10))
    check(launch(1, 50, 21, is_new=False))
    check(launch(0, 0, 21, is_new=False))
