"""Decode steps as CUDA graphs: one call launches all kernels of a forward pass.

A graph is captured for each form of a decode batch: its number of rows, rounded up, and the launches of its
attention and of its adapters. Before a replay, the batch's arrays are written into the tensors that the graph
reads. Padding rows have no slot, and their results are dropped.
"""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentflow.kernels.attention.backend import AttentionBackend
from agentflow.kernels.inputs import MAX_HEAD_DIM, AdapterRows, AttentionBatch, ForwardInput
from agentflow.kernels.linear.grouped import GroupedAdapters

logger = logging.getLogger(__name__)

NUM_ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Numbers of rows for which graphs are captured."""
CAPTURE_S = 20.0
_capturing = threading.Lock()
"""torch can capture only one graph at a time in a process, which may have an engine in each of several
threads."""


@dataclass(frozen=True, slots=True)
class DeviceRows:
    """``GivenRows`` with its arrays on the device."""

    rows: Tensor
    values: Tensor
    deep: Tensor | None
    axis_positions: Tensor | None

    def is_deep(self, layer: int) -> bool:
        """Whether vectors are added to the rows after this layer."""
        return self.deep is not None and layer < len(self.deep)

    def add_deep(self, hidden: Tensor, layer: int) -> Tensor:
        """Returns the hidden states after a layer, with its vectors added to the rows."""
        if self.deep is None or layer >= len(self.deep):
            return hidden
        return hidden.index_add(0, self.rows, self.deep[layer])


@dataclass(frozen=True, slots=True)
class DeviceInput:
    """A ``ForwardInput`` with its arrays on the device."""

    arrays: Tensor  # [3, T]: token ids, positions and slots to write
    rows: Tensor
    has_all_rows: bool  # ``rows`` are all rows, in order
    kv_layers: tuple[Tensor, ...]
    plan: Any
    adapters: Sequence[AdapterRows]
    given_rows: DeviceRows | None = None
    grouped: GroupedAdapters | None = None  # the adapter of each row, if the kernels group adapters

    @property
    def token_ids(self) -> Tensor:
        return self.arrays[0]


def list_arrays(given: ForwardInput) -> dict[str, NDArray[Any]]:
    """Returns the arrays that must be on the device for ``on_device``."""
    arrays = {
        "arrays": np.stack((given.token_ids, given.positions, given.write_slots)),
        "rows": given.rows,
    }
    if given.given_rows is not None:
        arrays["given_rows"] = given.given_rows.rows
        if given.given_rows.axis_positions is not None:
            arrays["axis_positions"] = given.given_rows.axis_positions
    return arrays


def on_device(given: ForwardInput, arrived: Mapping[str, Tensor]) -> DeviceInput:
    """Returns the input with its arrays on the device. ``arrived``: the uploaded ``list_arrays(given)``."""
    num_rows = len(given.rows)
    has_all_rows = num_rows == len(given.token_ids) and bool((given.rows == np.arange(num_rows)).all())
    given_rows = None
    if given.given_rows is not None:
        values, deep = given.given_rows.values, given.given_rows.deep
        given_rows = DeviceRows(arrived["given_rows"], values, deep, arrived.get("axis_positions"))
    return DeviceInput(
        *(arrived["arrays"], arrived["rows"], has_all_rows, given.kv_layers, given.plan, given.adapters),
        given_rows,
    )


class DecodeGraphs:
    """The graphs of a model on a GPU.

    Args:
        forward: the forward pass; launches kernels and never waits for the device.
        attention: the implementation that ``forward`` uses.
        num_heads, num_kv_heads: the numbers of heads in each layer.
        windows: the windows that layers use; 0: none.
    """

    def __init__(
        self,
        forward: Callable[[DeviceInput], Tensor],
        attention: AttentionBackend,
        num_heads: int,
        num_kv_heads: int,
        windows: Sequence[int],
    ) -> None:
        self._forward = forward
        self._attention = attention
        self._heads = num_heads, num_kv_heads
        self._windows = windows
        self._plans: Any = None
        self._kv_layers: tuple[Tensor, ...] = ()
        self._table: Tensor | None = None
        # By the form of the batch and of its adapters; None: the GPU has no memory for the graph.
        self._captured: dict[Any, tuple[torch.cuda.CUDAGraph, Tensor] | None] = {}
        self._num_rows = 0  # the columns of ``_arrays`` from here on are padding

    def prepare(self, kv_layers: tuple[Tensor, ...], table: Tensor) -> None:
        """Captures graphs for at most ``CAPTURE_S`` seconds, before requests wait for them. Graphs of other
        forms are captured when they are first needed. ``table``: the ``device_table`` of the batches."""
        self._use_memory(kv_layers, table)
        if self._plans is None:
            return
        one = np.ones(1, dtype=np.int64)
        batch = AttentionBatch(np.zeros((1, 1), dtype=np.int32), 0 * one, one, one, None, device_table=table)
        plan = self._attention.plan(batch, kv_layers[0].dtype, kv_layers[0].device)
        began = time.perf_counter()
        for form in self._plans.forms():
            if time.perf_counter() - began > CAPTURE_S or not self._keep(form, None, kv_layers, plan):
                break
        num = sum(captured is not None for captured in self._captured.values())
        logger.info("captured %d graphs in %.1f s", num, time.perf_counter() - began)

    def run(self, given: DeviceInput) -> Tensor | None:
        """Computes a decode batch: [S, hidden_size], like ``forward``. Returns None if the batch has no
        graph; then the caller launches the kernels. The next call overwrites the result."""
        num, grouped = given.arrays.shape[1], given.grouped
        table = given.plan.device_table
        if (
            (given.adapters and grouped is None)
            or given.given_rows is not None
            or table is None
            or not num
            or num > NUM_ROWS[-1]
            or num != len(given.plan.query_lens)
        ):
            return None
        self._use_memory(given.kv_layers, table)
        form = None if self._plans is None else self._plans.update(given.plan)
        if form is None:
            return None
        self._arrays[:, :num].copy_(given.arrays)
        if num < self._num_rows:
            self._arrays[:, num : self._num_rows].copy_(self._padding[:, num : self._num_rows])
        self._num_rows = num
        if grouped is not None:
            self._adapter_slots[:num].copy_(grouped.slots)
            self._adapter_slots[num:].fill_(-1)
        key = form, None if grouped is None else grouped.form
        if key not in self._captured:
            self._keep(form, grouped, given.kv_layers, given.plan)
        captured = self._captured[key]
        if captured is None:
            return None
        graph, hidden = captured
        graph.replay()
        return hidden[:num] if given.has_all_rows else hidden.index_select(0, given.rows)

    def _use_memory(self, kv_layers: tuple[Tensor, ...], table: Tensor) -> None:
        """Allocates the tensors that the graphs read, unless they exist for this KV pool and table."""
        if kv_layers is self._kv_layers and table is self._table:
            return
        device, head_dim = kv_layers[0].device, kv_layers[0].shape[-1]
        self._captured.clear()
        self._kv_layers, self._table, self._plans = kv_layers, table, None
        if head_dim > MAX_HEAD_DIM:
            return
        plans = self._attention.graph_plans(NUM_ROWS, *self._heads, device, self._windows)
        padding = torch.from_numpy(_PADDING).expand(3, NUM_ROWS[-1])
        self._padding = padding.contiguous().to(device)
        self._arrays = self._padding.clone()
        self._num_rows = 0
        self._adapter_slots = torch.full((NUM_ROWS[-1],), -1, dtype=torch.int32, device=device)
        self._all_rows = torch.arange(NUM_ROWS[-1], device=device)
        self._pool = torch.cuda.graph_pool_handle()
        # One stream for all captures: libraries such as cuBLAS keep memory for each stream.
        self._stream: Any = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._plans = plans

    def _keep(
        self, form: Any, grouped: GroupedAdapters | None, kv_layers: tuple[Tensor, ...], plan: Any
    ) -> bool:
        """Captures and stores the graph of a form. Returns whether there was enough memory."""
        key = form, None if grouped is None else grouped.form
        self._captured[key] = None
        if grouped is not None:
            grouped = grouped.at(self._adapter_slots[: form.num_rows])
        try:
            self._captured[key] = self._capture(form, grouped, kv_layers, plan)
        except torch.OutOfMemoryError as error:
            logger.warning(
                "no memory for the graph of %d rows, so batches of this size are slower: %s",
                form.num_rows,
                error,
            )
        return self._captured[key] is not None

    def _capture(
        self, form: Any, grouped: GroupedAdapters | None, kv_layers: tuple[Tensor, ...], plan: Any
    ) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        num = form.num_rows
        plan = self._plans.capture_with(form, plan)
        inputs = DeviceInput(
            *(self._arrays[:, :num], self._all_rows[:num], True, kv_layers, plan, ()), grouped=grouped
        )
        # Compiles kernels and creates handles. This computes the batch; the replay computes it again.
        stream = self._stream
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._forward(inputs)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads of the process may allocate memory meanwhile.
        with (
            _capturing,
            _without_collection(),
            torch.cuda.graph(graph, self._pool, stream, capture_error_mode="thread_local"),
        ):
            hidden = self._forward(inputs)
        return graph, hidden


@contextmanager
def _without_collection() -> Iterator[None]:
    """Suspends Python's garbage collection. It could destroy the graphs of a closed model, and a capture
    fails if its thread destroys a graph meanwhile."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


_PADDING = np.array([[0], [0], [-1]])
"""The token, the position and the slot of a padding row."""
