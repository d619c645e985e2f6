"""Mixtures of experts and adapters whose matrices are multiplied in one launch: on a GPU compiled, elsewhere
under Triton's interpreter."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from block_cases import random_blocks, relative_error
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples
from torch import Tensor

from agentflow.kernels.activations import Activation, activated
from agentflow.kernels.decoder_weights import Experts, Mlp, Routing
from agentflow.kernels.inputs import (
    Adapter,
    AdapterRows,
    BlockMatrix,
    LayerAdapter,
    LinearWeight,
    LowRank,
    LowRankPart,
)
from agentflow.kernels.linear.method import LinearMethod
from agentflow.kernels.linear.routing import routed
from agentflow.kernels.platforms import REFERENCE, triton_kernels

pytest.importorskip("triton", reason="triton is for x86-64 and Linux")

from agentflow.kernels.triton_ops.linear import grouped_products, low_rank, mixture
from agentflow.kernels.triton_ops.linear.low_rank import AdapterTable
from agentflow.kernels.triton_ops.linear.quantised import dequantised_rows
from agentflow.kernels.triton_ops.linear.row_blocks import most_blocks, sorted_rows

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TRITON = triton_kernels().linear
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
RELATIVE_ERROR = {torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Of a whole result, by Euclid's norm."""
SEEDS = st.integers(0, 1000)


@given(st.integers(1, 9), st.sampled_from([16, 32]), st.integers(1, 150), SEEDS, st.booleans())
def test_f42r_sorted_rows_are_each_in_one_block_of_their_matrix(
    num_matrices: int, size: int, num: int, seed: int, is_alike: bool
) -> None:
    """Blocks follow the order of the rows; rows without a matrix are in no block. All blocks have room."""
    rng = np.random.default_rng(seed)
    matrices = (
        np.full(num, rng.integers(0, num_matrices)) if is_alike else rng.integers(-1, num_matrices, num)
    )
    different = len(set(matrices[matrices >= 0].tolist()))
    found = sorted_rows(torch.from_numpy(matrices).int().to(DEVICE), num_matrices, size, different)
    assert found.num_blocks == most_blocks(num, different, size)
    order = found.order.tolist()
    rows: dict[int, list[int]] = {}
    for matrix, first, end in found.blocks.t().tolist():
        if matrix >= 0:
            assert 0 < end - first <= size
            rows.setdefault(matrix, []).extend(order[first:end])
    assert rows == {
        matrix: np.flatnonzero(matrices == matrix).tolist() for matrix in set(matrices.tolist()) - {-1}
    }


@dataclass(frozen=True)
class MixtureCase:
    """Rows of a mixture. Experts that no row chose have NaN for weights."""

    x: Tensor
    scores: Tensor
    slots: Tensor | None
    added: Tensor | None
    matrices: Sequence[tuple[Tensor, Tensor | None]]  # gate and up, then down, of each expert
    routing: Routing
    activation: Activation

    @property
    def exact(self) -> Tensor:
        """The mixture in float64: every expert for every row, most with a weight of 0."""
        weights, chosen = routed(self.scores, self.routing)
        chosen = torch.where(self.is_row.unsqueeze(1), chosen, -1)
        x = self.x.double()
        out = torch.zeros_like(x) if self.added is None else self.added.double()
        for number in set(chosen.flatten().tolist()) - {-1}:
            (gate_up, first_bias), (down, second_bias) = self.matrices[2 * number : 2 * number + 2]
            inner = x @ gate_up.double().t() + (0 if first_bias is None else first_bias.double())
            inner = activated(inner, self.activation, is_gated=True)
            part = inner @ down.double().t() + (0 if second_bias is None else second_bias.double())
            out = out + part * torch.where(chosen == number, weights, 0).double().sum(1, keepdim=True)
        return out

    @property
    def is_row(self) -> Tensor:
        return torch.ones(len(self.x), dtype=torch.bool) if self.slots is None else self.slots >= 0

    def computed(self, linear: LinearMethod, device: torch.device) -> Tensor:
        packed = [
            linear.pack(weight.to(device), None if bias is None else bias.to(device), gated=number % 2 == 0)
            for number, (weight, bias) in enumerate(self.matrices)
        ]
        experts = [Mlp(*pair) for pair in zip(packed[::2], packed[1::2], strict=True)]
        grouped = linear.group_experts(Experts(packed[0], self.routing, experts), self.activation)
        assert grouped is not None
        rest = [None if each is None else each.to(device) for each in (self.added, self.slots)]
        return grouped(self.x.to(device), self.scores.to(device), *rest).cpu()


def mixture_case(
    dtype: torch.dtype,
    num_rows: int,
    routing: Routing,
    num_experts: int,
    sizes: tuple[int, int],
    seed: int,
    *,
    activation: Activation = "silu",
    has_bias: bool = False,
    is_alike: bool = False,
    has_padding: bool = False,
) -> MixtureCase:
    """``is_alike``: all rows choose the same experts. Scores are never equal."""
    torch.manual_seed(seed)
    hidden, inner = sizes
    scores = torch.rand(num_rows, num_experts).argsort(-1).to(dtype) / 4
    if is_alike:
        scores = scores[:1].repeat(num_rows, 1)
    slots = torch.arange(num_rows) * torch.where(torch.rand(num_rows) < 0.3, -1, 1) if has_padding else None
    chosen = routed(scores, routing)[1]
    used = set(chosen[slice(None) if slots is None else slots >= 0].flatten().tolist())
    matrices: list[tuple[Tensor, Tensor | None]] = []
    for number in range(num_experts):
        for out, num_in in ((2 * inner, hidden), (hidden, inner)):
            weight = torch.randn(out, num_in) * num_in**-0.5
            bias = torch.randn(out).to(dtype) if has_bias else None
            matrices.append(((weight if number in used else weight * math.nan).to(dtype), bias))
    return MixtureCase(
        x=torch.randn(num_rows, hidden).to(dtype),
        scores=scores,
        slots=slots,
        added=torch.randn(num_rows, hidden).to(dtype) if seed % 2 else None,
        matrices=matrices,
        routing=routing,
        activation=activation,
    )


@st.composite
def mixture_cases(draw: st.DrawFn) -> MixtureCase:
    num_used = draw(st.integers(1, 4))
    num_groups = draw(st.sampled_from([1, 1, 1, 4]))
    num_experts = num_groups * draw(st.integers(num_used, 9))
    routing = Routing(num_used, draw(st.booleans()))
    if num_groups > 1:
        routing = Routing(num_used, False, 2.0, num_groups, 2)
    activation: Activation = draw(st.sampled_from(["silu", "clamped_swiglu"]))
    return mixture_case(
        draw(st.sampled_from(DTYPES)),
        draw(st.just(1) | st.integers(2, 40)),
        routing,
        num_experts,
        draw(st.sampled_from([(48, 24), (64, 40), (130, 8), (16, 67)])),
        draw(SEEDS),
        activation=activation,
        has_bias=activation == "clamped_swiglu",
        is_alike=draw(st.booleans()),
        has_padding=draw(st.booleans()),
    )


@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")  # padding rows have any values
@examples(60)
@given(mixture_cases())
def test_f42r_mixtures_equal_float64(case: MixtureCase) -> None:
    """The reference and the grouped kernel; rows of padding have any result, and read no expert."""
    rows = case.is_row
    if not rows.any():
        return
    for linear, device in ((REFERENCE.linear, torch.device("cpu")), (TRITON, DEVICE)):
        result = case.computed(linear, device)
        assert result.dtype == case.x.dtype
        assert relative_error(result[rows], case.exact[rows]) < RELATIVE_ERROR[case.x.dtype]


@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")  # padding rows have any values
@pytest.mark.parametrize(
    ("dtype", "size"), [(torch.float32, 32), *((torch.bfloat16, size) for size in (32, 64, 128))], ids=str
)
def test_f42r_mixtures_of_many_rows(dtype: torch.dtype, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In blocks of each size, with and without rows to fill them."""
    monkeypatch.setattr(mixture, "block_size", lambda *args: size)
    if size == 64:
        monkeypatch.setattr(mixture, "_MOST_VALUES", 2 * (48 + 24) * 40)  # of 40 rows: there are three parts
    case = mixture_case(dtype, 90, Routing(2), 2, (48, 24), size, has_padding=True)
    result, rows = case.computed(TRITON, DEVICE), case.is_row
    assert relative_error(result[rows], case.exact[rows]) < RELATIVE_ERROR[dtype]


@pytest.mark.parametrize(
    ("block_type", "num_rows", "num_in"),
    [
        ("Q4_1", 1, 96),
        ("Q4_1", 30, 96),
        ("Q8_0", 30, 64),
        ("Q6_K", 9, 256),
        ("F8_E4M3", 1, 96),
        ("F8_E4M3", 9, 160),
    ],
)
def test_f42r_mixtures_with_quantised_weights(block_type: str, num_rows: int, num_in: int) -> None:
    """The values of the blocks, multiplied without rounding rows to them."""
    case = mixture_case(torch.bfloat16, num_rows, Routing(2), 3, (num_in, num_in), 2)
    rng = np.random.default_rng(0)
    packed, values = [], []
    for weight, _ in case.matrices:
        matrix = random_matrix(rng, block_type, *weight.shape)
        made = TRITON.pack_blocks([matrix], None, gated=len(packed) % 2 == 0, device=DEVICE)
        assert made is not None
        packed.append(made)
        rows = dequantised_rows(made.quantised[0], weight.shape[1], range(weight.shape[0]), torch.float32)
        values.append((rows.cpu(), None))
    experts = [Mlp(*pair) for pair in zip(packed[::2], packed[1::2], strict=True)]
    grouped = TRITON.group_experts(Experts(packed[0], case.routing, experts), "silu")
    assert grouped is not None
    result = grouped(case.x.to(DEVICE), case.scores.to(DEVICE)).cpu()
    exact = replace(case, matrices=values).exact
    assert relative_error(result, exact) < 1e-2


def random_matrix(rng: np.random.Generator, block_type: str, num_out: int, num_in: int) -> BlockMatrix:
    """Any codes, with numbers of a sensible size."""
    if block_type != "F8_E4M3":
        return random_blocks(rng, block_type, num_out, num_in, 1e-5 if block_type == "Q6_K" else 1e-3)
    rows = rng.integers(0, 0x60, (num_out, 4 + num_in), dtype=np.uint8)
    rows[:, 4:] |= rng.integers(0, 2, (num_out, num_in), dtype=np.uint8) << 7
    rows[:, :4] = np.array([0.02], dtype=np.float32).view(np.uint8)
    return BlockMatrix(block_type, rows, (num_out, num_in))


def test_blocks_fit_the_rows_of_most_experts() -> None:
    bfloat16 = torch.bfloat16
    sizes = [grouped_products.block_size(num, 8, bfloat16) for num in (2, 32, 128, 1_024, 100_000)]
    assert sizes == [16, 16, 32, 128, 128]
    for size in sizes:
        tile = grouped_products.tile_for(size, bfloat16, "dense")
        assert grouped_products.num_stages(tile, bfloat16, torch.device("cpu")) >= 1


@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")
def test_f42r_a_row_that_is_not_a_number_spoils_no_other() -> None:
    case = mixture_case(torch.float32, 5, Routing(2), 4, (48, 24), 0)
    expected = case.computed(TRITON, DEVICE)
    case.x[3] = math.nan
    case.scores[3] = math.nan
    result = case.computed(TRITON, DEVICE)
    others = torch.tensor([0, 1, 2, 4])
    assert result[3].isnan().all()
    assert torch.equal(result[others], expected[others])


def test_f42r_experts_that_cannot_be_grouped_are_left_to_the_caller(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Experts of several formats, and with another activation. A warning says so once for all layers."""
    mixture._warn.cache_clear()
    gate_up, down = (TRITON.pack(torch.randn(*shape, device=DEVICE), None) for shape in ((96, 64), (64, 48)))
    matrix = random_matrix(np.random.default_rng(0), "Q8_0", 96, 64)
    quantised = TRITON.pack_blocks([matrix], None, gated=True, device=DEVICE)
    assert quantised is not None
    alike, mixed = [Mlp(gate_up, down)] * 2, [Mlp(gate_up, down), Mlp(quantised, down)]
    for _ in range(2):
        assert TRITON.group_experts(Experts(gate_up, Routing(1), alike), "gelu") is None
        assert TRITON.group_experts(Experts(gate_up, Routing(1), mixed), "silu") is None
    assert len(caplog.records) == 2
    assert TRITON.group_experts(Experts(gate_up, Routing(1), alike), "silu") is not None


@dataclass(frozen=True)
class AdaptedCase:
    """Rows with adapters, and a product in two layers. Adapters that no row has are NaN."""

    x: Tensor
    product: Tensor
    adapters: Sequence[Adapter]
    owners: np.ndarray[tuple[int], np.dtype[np.int64]]

    def on(self, device: torch.device) -> AdaptedCase:
        adapters = [
            Adapter(tuple(LayerAdapter(qkv=_moved(layer.qkv, device)) for layer in adapter.layers))
            for adapter in self.adapters
        ]
        return AdaptedCase(self.x.to(device), self.product.to(device), adapters, self.owners)

    @property
    def rows(self) -> list[AdapterRows]:
        return [
            AdapterRows(adapter, rows, rows)
            for number, adapter in enumerate(self.adapters)
            if len(rows := np.flatnonzero(self.owners == number))
        ]

    def expected(self, layer: int) -> Tensor:
        changes = [
            (change, torch.from_numpy(one.rows))
            for one in self.rows
            if (change := one.adapter.layers[layer].qkv) is not None
        ]
        return self.product + REFERENCE.linear.low_rank(self.x, self.product.shape[1], changes)

    def computed(self, table: AdapterTable, layer: int) -> Tensor:
        grouped = table.grouped(self.rows, len(self.x))
        assert grouped is not None
        out = self.product.clone()
        grouped.add(out, self.x, layer, "qkv")
        return out.cpu()


def _moved(change: LowRank | None, device: torch.device) -> LowRank | None:
    if change is None:
        return None

    def moved(weight: LinearWeight) -> LinearWeight:
        assert weight.transposed is not None
        return TRITON.pack(weight.transposed.t().to(device), None)

    parts = tuple(LowRankPart(moved(part.up), part.first_output) for part in change.parts)
    return LowRank(moved(change.down), parts)


SIZES = (40, 24, 33)
"""Outputs of the parts of a change, whose first outputs are multiples of 50."""


def adapted_case(
    dtype: torch.dtype,
    ranks: Sequence[Sequence[int]],
    num_rows: int,
    num_in: int,
    seed: int,
    *,
    has_poison: bool = True,
) -> AdaptedCase:
    """``ranks``: of the parts of each adapter. Each changes any of two layers."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    owners = rng.integers(-1, len(ranks), num_rows)
    if seed % 5 == 0:
        owners[:] = owners[0]

    def change(own: Sequence[int], is_used: bool) -> LowRank:
        factor = 1.0 if is_used else math.nan
        down = torch.randn(sum(own), num_in) * num_in**-0.5 * factor
        ups = [torch.randn(size, rank) * rank**-0.5 * factor for size, rank in zip(SIZES, own, strict=False)]
        parts = [LowRankPart(REFERENCE.linear.pack(up.to(dtype), None), 50 * i) for i, up in enumerate(ups)]
        return LowRank(REFERENCE.linear.pack(down.to(dtype), None), tuple(parts))

    adapters = []
    for number, own in enumerate(ranks):
        changed = rng.random(2) < 0.7
        is_used = number in owners or not has_poison
        layers = [LayerAdapter(qkv=change(own, is_used) if each else None) for each in changed]
        adapters.append(Adapter(tuple(layers)))
    x, product = torch.randn(num_rows, num_in).to(dtype), torch.randn(num_rows, 150).to(dtype)
    return AdaptedCase(x, product, adapters, owners)


@examples(24)
@given(
    st.sampled_from(DTYPES),
    st.lists(st.lists(st.integers(1, 70), min_size=1, max_size=3), min_size=1, max_size=4),
    st.integers(1, 40),
    st.sampled_from([48, 72, 300]),
    SEEDS,
)
def test_f42r_changes_by_adapters_equal_the_references(
    dtype: torch.dtype, ranks: list[list[int]], num_rows: int, num_in: int, seed: int
) -> None:
    """Rows of any adapters and of none, in one launch; parts of any ranks, and outputs that none changes."""
    case = adapted_case(dtype, ranks, num_rows, num_in, seed)
    on_device = case.on(DEVICE)
    table = AdapterTable(2, dtype, DEVICE)
    for layer in range(2):
        expected = case.expected(layer)
        result = on_device.computed(table, layer) if on_device.rows else case.product
        assert result.dtype == dtype
        assert relative_error(result, expected) < RELATIVE_ERROR[dtype]
        assert torch.equal(result[case.owners < 0], case.product[case.owners < 0])


def test_f42r_adapters_make_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches use other adapters, more than the table holds, one of them larger; one was deleted."""
    monkeypatch.setattr(low_rank, "NUM_SLOTS", 3)
    table = AdapterTable(2, torch.float32, DEVICE)
    cases = [
        adapted_case(torch.float32, [[4], [9, 3]], 9, 48, 1),
        adapted_case(torch.float32, [[30]], 9, 48, 2),
    ]
    cases.append(adapted_case(torch.float32, [[2], [5], [7]], 20, 48, 3))
    moved = [case.on(DEVICE) for case in cases]
    for number in (0, 1, 0, 2, 1, 2):
        for layer in range(2):
            result = moved[number].computed(table, layer)
            assert relative_error(result, cases[number].expected(layer)) < RELATIVE_ERROR[torch.float32]
    too_many = adapted_case(torch.float32, [[2]] * 4, 40, 48, 4)
    assert table.grouped(too_many.on(DEVICE).rows, 40) is None


@pytest.mark.only_gpu
@pytest.mark.parametrize("num_rows", [1, 8, 64])
def test_f42r_a_graph_has_the_experts_and_adapters_of_each_step(num_rows: int) -> None:
    """Rows, scores and adapters are read from the graph's buffers; their values differ from the capture's."""
    bfloat16, routing = torch.bfloat16, Routing(2)
    cases = [mixture_case(bfloat16, num_rows, routing, 8, (512, 256), seed) for seed in (0, 2, 4)]
    weights = [TRITON.pack(weight.nan_to_num(nan=0.1).to(DEVICE), None) for weight, _ in cases[0].matrices]
    experts = [Mlp(*pair) for pair in zip(weights[::2], weights[1::2], strict=True)]
    grouped = TRITON.group_experts(Experts(weights[0], routing, experts), "silu")
    assert grouped is not None
    table = AdapterTable(2, bfloat16, DEVICE)
    adapted = adapted_case(bfloat16, [[16], [8], [4]], num_rows, 512, 1, has_poison=False).on(DEVICE)
    rows = []
    for shift in range(3):
        owners = (np.arange(num_rows) + shift) % 3
        rows.append(table.grouped(replace(adapted, owners=owners).rows, num_rows))
    assert len({each.form for each in rows[1:] if each is not None}) == 1
    x, scores = cases[0].x.to(DEVICE), cases[0].scores.to(DEVICE)
    first = rows[-1]
    assert first is not None
    slots = first.slots.clone()

    def step(changes: low_rank.GroupedAdapters) -> list[Tensor]:
        changed = adapted.product.clone()
        changes.add(changed, x, 0, "qkv")
        return [grouped(x, scores), changed]

    step(first)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step(first.at(slots))
    for case, own in zip(cases, rows, strict=True):
        assert own is not None
        x.copy_(case.x)
        scores.copy_(case.scores)
        slots.copy_(own.slots)
        expected = step(own)
        graph.replay()
        for result, other in zip(results, expected, strict=True):
            assert torch.equal(result, other)
