"""Decode steps as CUDA graphs: all kernels of a forward pass are launched by one call.

A graph is captured for each form of a decode batch (its number of rows rounded up, and the launches of its
attention). Before a replay, the batch's arrays are written into the tensors that the graph reads. Padding
rows have no slot, and their results are dropped.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agentflow.kernels.inputs import AdapterRows, AttentionBatch, ForwardInput
from agentflow.kernels.ops import Kernels

logger = logging.getLogger(__name__)

NUM_ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Numbers of rows for which graphs are captured."""
CAPTURE_S = 20.0


@dataclass(frozen=True, slots=True)
class DeviceInput:
    """A ``ForwardInput`` with its arrays on the device."""

    token_ids: Tensor
    positions: Tensor
    write_slots: Tensor
    rows: Tensor
    kv_layers: tuple[Tensor, ...]
    plan: Any
    adapters: Sequence[AdapterRows]


def on_device(given: ForwardInput, device: torch.device) -> DeviceInput:
    """Copies the arrays of a forward pass to the device."""
    token_ids, positions, write_slots, rows = (
        torch.from_numpy(array).to(device)
        for array in (given.token_ids, given.positions, given.write_slots, given.rows)
    )
    return DeviceInput(token_ids, positions, write_slots, rows, given.kv_layers, given.plan, given.adapters)


class DecodeGraphs:
    """The graphs of a model on a GPU.

    Args:
        forward: the forward pass; launches kernels and never waits for the device.
        kernels: the implementation that ``forward`` uses.
        num_heads, num_kv_heads: of all layers.
    """

    def __init__(
        self, forward: Callable[[DeviceInput], Tensor], kernels: Kernels, num_heads: int, num_kv_heads: int
    ) -> None:
        self._forward = forward
        self._kernels = kernels
        self._heads = num_heads, num_kv_heads
        self._plans: Any = None
        self._kv_layers: tuple[Tensor, ...] = ()
        self._captured: dict[Any, tuple[torch.cuda.CUDAGraph, Tensor]] = {}

    def prepare(self, kv_layers: tuple[Tensor, ...]) -> None:
        """Captures graphs for at most ``CAPTURE_S`` seconds, before requests wait for them. Graphs of other
        forms are captured when they are first needed."""
        self._use_pool(kv_layers)
        if self._plans is None:
            return
        self._arrays.copy_(torch.from_numpy(_PADDING).expand(self._arrays.shape))
        one = np.ones(1, dtype=np.int64)
        batch = AttentionBatch(np.zeros((1, 1), dtype=np.int32), 0 * one, one, one, None)
        plan = self._kernels.plan_attention(batch, kv_layers[0].dtype, kv_layers[0].device)
        began = time.perf_counter()
        for form in self._plans.forms():
            if time.perf_counter() - began > CAPTURE_S:
                break
            self._captured[form] = self._capture(form, kv_layers, plan)
        logger.info("captured %d graphs in %.1f s", len(self._captured), time.perf_counter() - began)

    def run(self, given: ForwardInput) -> Tensor | None:
        """Computes a decode batch: [S, hidden_size], like ``forward``. Returns None if the batch has no
        graph; then the caller launches the kernels."""
        num = len(given.token_ids)
        if given.adapters or not num or num > NUM_ROWS[-1] or num != len(given.plan.query_lens):
            return None
        self._use_pool(given.kv_layers)
        form = None if self._plans is None else self._plans.update(given.plan)
        if form is None:
            return None
        self._host[:, num : form.num_rows] = _PADDING
        self._host[0, :num], self._host[1, :num] = given.token_ids, given.positions
        self._host[2, :num] = given.write_slots
        self._arrays[:, : form.num_rows].copy_(self._staged[:, : form.num_rows], non_blocking=True)
        if form not in self._captured:
            self._captured[form] = self._capture(form, given.kv_layers, given.plan)
        graph, hidden = self._captured[form]
        graph.replay()
        if len(given.rows) == num and given.rows[0] == 0 and (np.diff(given.rows) == 1).all():
            return hidden[:num]
        return hidden.index_select(0, torch.from_numpy(given.rows).to(hidden.device))

    def _use_pool(self, kv_layers: tuple[Tensor, ...]) -> None:
        """Makes the tensors that the graphs read, unless they exist for this KV pool already."""
        if kv_layers is self._kv_layers:
            return
        device, num_slots = kv_layers[0].device, kv_layers[0].shape[0]
        self._captured.clear()
        self._plans = self._kernels.static_plans(NUM_ROWS, num_slots, *self._heads, device)
        self._kv_layers = kv_layers
        shape = 3, NUM_ROWS[-1]
        self._staged = torch.zeros(shape, dtype=torch.int64, pin_memory=True)
        self._host = self._staged.numpy()
        self._arrays = torch.zeros(shape, dtype=torch.int64, device=device)
        self._all_rows = torch.arange(NUM_ROWS[-1], device=device)
        self._pool = torch.cuda.graph_pool_handle()

    def _capture(
        self, form: Any, kv_layers: tuple[Tensor, ...], plan: Any
    ) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        num = form.num_rows
        plan = self._plans.capture_with(form, plan)
        token_ids, positions, write_slots = self._arrays[:, :num]
        rows = self._all_rows[:num]
        inputs = DeviceInput(token_ids, positions, write_slots, rows, kv_layers, plan, ())
        # Compiles kernels and creates handles. This computes the batch, which the replay then computes again.
        stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._forward(inputs)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            hidden = self._forward(inputs)
        return graph, hidden


_PADDING = np.array([[0], [0], [-1]])
"""The token, the position and the slot of a padding row."""
