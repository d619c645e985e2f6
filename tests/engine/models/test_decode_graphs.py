"""Decode steps as graphs, replayed kernel by kernel under Triton's interpreter. ``test_device_engine`` runs
captured ones on a GPU."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.engine.family_models import save_model
from torch import Tensor

from agentflow.engine.models.config import DecoderConfig
from agentflow.engine.models.families.registry import read_config
from agentflow.engine.models.forward import decoder
from agentflow.engine.models.forward.decode_graphs import DecodeGraphs, DeviceInput, _without_collection
from agentflow.engine.models.weights.loader import WeightFormat, load_model
from agentflow.kernels.inputs import (
    Adapter,
    AdapterRows,
    AttentionBatch,
    ForwardInput,
    LayerAdapter,
    LowRank,
    LowRankPart,
)
from agentflow.kernels.platforms import TORCH, Kernels, triton_kernels
from benchmarks.step.random_llama import llama_config, random_llama

pytest.importorskip("triton", reason="triton is for x86-64 and Linux")

from agentflow.kernels.triton_ops.interpreted import IS_INTERPRETED

TRITON = triton_kernels()
pytestmark = pytest.mark.skipif(not IS_INTERPRETED.value, reason="graphs are captured on a GPU")
CPU = torch.device("cpu")
CONFIG = llama_config(32, 48, 2, 4, 2, 100)
WIDE_HEADS = llama_config(1056, 48, 2, 4, 2, 100)
NUM_SLOTS = 200
TABLE = torch.arange(NUM_SLOTS, dtype=torch.int32).view(10, 20)


@dataclass
class Replayed:
    """A graph: runs the forward pass that was captured again, into the same result."""

    forward: Any
    inputs: DeviceInput
    hidden: Tensor

    def replay(self) -> None:
        found = self.forward(self.inputs)
        self.hidden.resize_(found.shape).copy_(found)


class ReplayedGraphs(DecodeGraphs):
    """Graphs without a GPU."""

    num_captured = 0
    has_memory = True
    computes_twice = False
    """Whether a batch is computed when its graph is captured, too, as on a GPU."""

    def _capture(
        self, form: Any, grouped: Any, kv_layers: tuple[Tensor, ...], plan: Any
    ) -> tuple[Any, Tensor]:
        if not self.has_memory:
            raise torch.OutOfMemoryError("CUDA out of memory")
        self.num_captured += 1
        num = form.num_rows
        plan = self._plans.capture_with(form, plan)
        inputs = DeviceInput(
            *(self._arrays[:, :num], self._all_rows[:num], True, kv_layers, plan, ()), grouped=grouped
        )
        hidden = torch.empty(0)
        if self.computes_twice:
            self._forward(inputs)
        return Replayed(self._forward, inputs, hidden), hidden


@dataclass
class Requests:
    """Some requests on one model. Request r has the slots from ``20 * r``."""

    model: Any
    kernels: Kernels
    pool: tuple[Tensor, ...]
    cached: np.ndarray[Any, np.dtype[np.int64]]

    @classmethod
    def on(cls, kernels: Kernels, config: DecoderConfig = CONFIG) -> Requests:
        model = random_llama(config, kernels, torch.float32, CPU)
        pool = torch.full((2, NUM_SLOTS, 2, 2, config.head_dim), torch.nan).unbind(0)
        return cls(model, kernels, pool, np.zeros(10, dtype=np.int64))

    @torch.inference_mode()
    def step(
        self,
        requests: Sequence[int],
        counts: Sequence[int],
        tokens: Any,
        sampled: Any = None,
        adapters: Sequence[AdapterRows] = (),
    ) -> Tensor:
        table = TABLE.numpy()
        rows, lens = np.array(requests), np.array(counts)
        positions = np.concatenate([self.cached[r] + np.arange(n) for r, n in zip(rows, lens, strict=True)])
        slots = table[np.repeat(rows, lens), positions].astype(np.int64)
        self.cached[rows] += lens
        batch = AttentionBatch(table, rows, lens, self.cached[rows], None, device_table=TABLE)
        plan = self.kernels.attention.plan(batch, torch.float32, CPU)
        ends = np.cumsum(lens) - 1 if sampled is None else np.array(sampled)
        given = ForwardInput(tokens, positions, slots, self.pool, plan, ends, adapters)
        return self.model.forward(given).clone()


@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")  # padding rows have any values
def test_f42d_graphs_compute_any_decode_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches that grow and shrink, of which some rows are not wanted: padding rows write no slot."""
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    alone, graphed = Requests.on(TORCH), Requests.on(TRITON)
    monkeypatch.setattr(decoder, "DecodeGraphs", ReplayedGraphs)
    graphs = graphed.model._graphs = graphed.model.graphs()
    graphs.computes_twice = True
    rng = np.random.default_rng(0)
    steps: list[tuple[list[int], list[int], list[int] | None]] = [
        ([0, 1, 2, 3, 4, 5], [3, 1, 6, 2, 1, 4], None),
        ([0, 1, 2, 3, 4], [1] * 5, None),
        ([3, 1], [1] * 2, None),
        ([5, 0, 2], [1] * 3, [0, 2]),
        ([4], [1], None),
        ([0, 1, 2, 3, 4, 5], [1] * 6, None),
        ([2, 3], [1, 3], None),
        ([0, 2, 3, 5], [1] * 4, [3]),
    ]
    for requests, counts, sampled in steps:
        tokens = rng.integers(0, 100, sum(counts))
        expected = alone.step(requests, counts, tokens, sampled)
        torch.testing.assert_close(
            graphed.step(requests, counts, tokens, sampled), expected, rtol=2e-4, atol=2e-4
        )
    torch.testing.assert_close(
        torch.stack(graphed.pool), torch.stack(alone.pool), rtol=2e-4, atol=2e-4, equal_nan=True
    )
    assert graphs.num_captured == 4  # for 8, 2, 4 and 1 rows


@pytest.mark.parametrize(("config", "has_memory"), [(WIDE_HEADS, True), (CONFIG, False)])
def test_steps_run_without_graphs(
    config: DecoderConfig, has_memory: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plans of wide heads are not at fixed addresses, and a GPU may have no memory for graphs."""
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    alone, graphed = Requests.on(TORCH, config), Requests.on(TRITON, config)
    monkeypatch.setattr(decoder, "DecodeGraphs", ReplayedGraphs)
    graphs = graphed.model._graphs = graphed.model.graphs()
    graphs.has_memory = has_memory
    graphs.prepare(graphed.pool, TABLE)
    rng = np.random.default_rng(0)
    for requests, counts in [([0, 1, 2], [3, 1, 6]), ([0, 1], [1, 1]), ([2, 0], [1, 1])]:
        tokens = rng.integers(0, 100, sum(counts))
        expected = alone.step(requests, counts, tokens)
        torch.testing.assert_close(graphed.step(requests, counts, tokens), expected, rtol=2e-4, atol=2e-4)
    assert graphs.num_captured == 0


@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")  # padding rows have any values
@pytest.mark.parametrize(
    ("name", "two_layers"),
    [
        ("gemma3", {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}),
        ("phi3_partial", {"num_hidden_layers": 2}),
        ("gpt2", {"n_layer": 2}),
        pytest.param("mixtral", {"num_hidden_layers": 2}, marks=pytest.mark.full),
        ("gpt_oss", {"num_hidden_layers": 2}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_graphs_of_other_families(
    name: str, two_layers: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With windows that texts outgrow between replays, parts of heads that rotate, learned positions, and
    experts of which each step chooses others."""
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    save_model(name, tmp_path, **two_layers)
    config = read_config(tmp_path)
    weights = WeightFormat(torch.float32)
    models = [
        load_model(tmp_path, config, weights=weights, device=CPU, kernels=kernels).model
        for kernels in (TORCH, TRITON)
    ]
    pools = [
        torch.full((config.num_layers, NUM_SLOTS, 2, config.num_kv_heads, config.head_dim), torch.nan).unbind(
            0
        )
        for _ in models
    ]
    alone, graphed = (
        Requests(model, kernels, pool, np.zeros(10, dtype=np.int64))
        for model, kernels, pool in zip(models, (TORCH, TRITON), pools, strict=True)
    )
    monkeypatch.setattr(decoder, "DecodeGraphs", ReplayedGraphs)
    graphed.model._graphs = graphed.model.graphs()
    rng = np.random.default_rng(0)
    steps = [([0, 1, 2], [3, 15, 6]), ([0, 1, 2], [1] * 3), ([2, 1], [1] * 2), ([1, 2, 0], [1] * 3)]
    for requests, counts in steps:
        tokens = rng.integers(10, 300, sum(counts))
        expected = alone.step(requests, counts, tokens)
        torch.testing.assert_close(graphed.step(requests, counts, tokens), expected, rtol=2e-4, atol=2e-4)
    torch.testing.assert_close(
        torch.stack(graphed.pool), torch.stack(alone.pool), rtol=2e-4, atol=2e-4, equal_nan=True
    )
    assert graphed.model._graphs.num_captured == 2  # for 4 and 2 rows


def random_adapter(rank: int) -> Adapter:
    """An adapter of a model of ``CONFIG``, which changes queries and values, and the MLP."""

    def change(num_in: int, *parts: tuple[int, int]) -> LowRank:
        down = TORCH.linear.pack(torch.randn(rank * len(parts), num_in) * 0.3, None)
        ups = [
            LowRankPart(TORCH.linear.pack(torch.randn(num, rank) * 0.3, None), first) for first, num in parts
        ]
        return LowRank(down, tuple(ups))

    changed = LayerAdapter(
        qkv=change(32, (0, 32), (48, 16)), gate_up=change(32, (0, 48)), down=change(48, (0, 32))
    )
    return Adapter((changed, LayerAdapter(output=change(32, (0, 32)))))


@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")  # padding rows have any values
def test_f42r_graphs_of_steps_with_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps have other rows, and more adapters, than the captured graph; steps without adapters are between
    them."""
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    torch.manual_seed(0)
    adapters = [random_adapter(rank) for rank in (4, 9, 40)]
    alone, graphed = Requests.on(TORCH), Requests.on(TRITON)
    monkeypatch.setattr(decoder, "DecodeGraphs", ReplayedGraphs)
    graphs = graphed.model._graphs = graphed.model.graphs()
    rng = np.random.default_rng(0)
    # The adapter of each row, -1: none.
    steps = [
        ([0, 1, 2], [3, 1, 6], [0, 0, 0, 1, -1, -1, -1, -1, -1, -1], None),
        ([0, 1, 2], [1] * 3, [0, 1, -1], None),
        ([2, 1, 0], [1] * 3, [-1, 1, 0], [0, 2]),
        ([0, 1, 2], [1] * 3, [-1, -1, -1], None),
        ([0, 1], [1] * 2, [0, 2], None),
        ([0, 1, 2], [1] * 3, [0, 2, 1], None),
        ([0, 1, 2, 3], [1] * 4, [1, 0, 2, 2], None),
        ([0, 1, 2], [2, 1, 1], [0, 0, 2, 1], [1, 3]),
    ]
    for requests, counts, owners, sampled in steps:
        tokens, owner_of = rng.integers(0, 100, sum(counts)), np.array(owners)
        ends = np.cumsum(counts) - 1 if sampled is None else np.array(sampled)
        rows = [
            AdapterRows(adapter, found, np.flatnonzero(owner_of[ends] == number))
            for number, adapter in enumerate(adapters)
            if len(found := np.flatnonzero(owner_of == number))
        ]
        expected = alone.step(requests, counts, tokens, ends, rows)
        result = graphed.step(requests, counts, tokens, ends, rows)
        torch.testing.assert_close(result, expected, rtol=2e-4, atol=2e-4)
    # For 4 rows with two adapters, and with none; for 2 rows; and for 4 rows with more and larger adapters.
    assert graphs.num_captured == 4


@pytest.mark.parametrize("is_enabled", [True, False])
def test_garbage_is_collected_after_a_capture_only(is_enabled: bool) -> None:
    """It may have the graphs of another model, which must not be destroyed in between."""

    class Model:
        def __init__(self) -> None:
            self.graphs = self

    before = gc.isenabled()
    (gc.enable if is_enabled else gc.disable)()
    try:
        with _without_collection():
            closed = weakref.ref(Model())
            kept = [[number] for number in range(100_000)]  # more than start a collection
            assert closed() is not None
        assert gc.isenabled() == is_enabled
        gc.collect()
        assert closed() is None
        assert len(kept) == 100_000
    finally:
        (gc.enable if before else gc.disable)()
