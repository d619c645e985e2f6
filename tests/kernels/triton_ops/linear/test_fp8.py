"""8-bit floats in the Triton kernels, against float64: on a GPU that has them compiled, elsewhere under the
interpreter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import RULE, SCALE, Shape, Tree, assert_exact, batch_of, batches, make_case, with_trees
from support.examples import examples

from agentflow.engine.models.weights.quantising import quantised
from agentflow.kernels.attention.backend import AttentionRule
from agentflow.kernels.inputs import LinearWeight
from agentflow.kernels.platforms import TORCH, triton_kernels

pytest.importorskip("triton", reason="triton is for x86-64 and Linux")

import triton
import triton.language as tl

from agentflow.kernels.triton_ops.attention import units
from agentflow.kernels.triton_ops.interpreted import from_fp8, to_fp8
from agentflow.kernels.triton_ops.linear import fp8, split_products

TRITON = triton_kernels()
DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not TRITON.linear.has_fp8(DEVICE), reason="the GPU has no 8-bit floats"),
]
E4M3 = torch.float8_e4m3fn
UNIT = 2.0**-4
"""The largest relative error of a rounded number: half of the distance of mantissas with 3 bits."""
LEAST = 2.0**-10
"""The largest error of a number below 2^-6: half of the distance of the smallest ones."""
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
OF_DTYPE = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


@triton.jit
def _convert(values, codes, out, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    tl.store(codes + place, to_fp8(tl.load(values + place)))
    tl.store(out + place, from_fp8(tl.load(codes + place), out.dtype.element_ty))


def converted(values: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The codes of numbers, and the values of these codes."""
    size = triton.next_power_of_2(len(values))
    padded = torch.zeros(size, device=DEVICE)
    padded[: len(values)] = values.to(DEVICE)
    codes = torch.empty(size, dtype=torch.uint8, device=DEVICE)
    out = torch.empty(size, dtype=dtype, device=DEVICE)
    _convert[(1,)](padded, codes, out, BLOCK=size)
    return codes[: len(values)].cpu(), out[: len(values)].cpu()


ALL_CODES = torch.arange(256, dtype=torch.uint8).view(E4M3)


@DTYPES
def test_every_code_has_its_value(dtype: torch.dtype) -> None:
    """And is the code of its value; not a number is one of two codes."""
    values = ALL_CODES.float()
    codes, out = converted(values, dtype)
    is_number = ~values.isnan()
    assert torch.equal(codes[is_number], ALL_CODES.view(torch.uint8)[is_number])
    assert torch.equal(out[is_number].float(), values[is_number])
    assert ((codes[~is_number] & 0x7F) == 0x7F).all()
    assert out[~is_number].isnan().all()


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=64))
def test_numbers_become_the_nearest_code(numbers: list[float]) -> None:
    """The even one of two; larger numbers than the largest code become that one."""
    values = torch.tensor([*numbers, 1.0625, 1.1875, 2.0**-10, 3 * 2.0**-10, 464.0, 1e9, -500.0])
    codes, _ = converted(values, torch.float32)
    finite = ALL_CODES.float()[~ALL_CODES.float().isnan()].double()
    distances = (codes.view(E4M3).double() - values.double()).abs()
    assert torch.equal(distances, (values.double()[:, None] - finite).abs().amin(1))
    clamped = values.clamp(-fp8.LARGEST, fp8.LARGEST)
    assert torch.equal(codes.view(E4M3).float(), clamped.to(E4M3).float())


def weight_of(num_out: int, num_in: int, seed: int, bias: torch.Tensor | None = None) -> LinearWeight:
    """A weight of three matrices of different sizes of numbers."""
    rng = torch.Generator().manual_seed(seed)
    sizes = [num_out - 2 * (num_out // 3), num_out // 3, num_out // 3]
    parts = [
        torch.randn(size, num_in, generator=rng) * scale
        for size, scale in zip(sizes, (0.1, 2.0, 0.01), strict=True)
    ]
    blocks = [quantised(part, "F8_E4M3") for part in parts if len(part)]
    packed = TRITON.linear.pack_blocks(blocks, bias, device=DEVICE)
    assert packed is not None
    return packed


def dequantised(weight: LinearWeight) -> torch.Tensor:
    """W, on the CPU."""
    [part] = weight.quantised
    assert part.scales is not None
    rows = part.panels.view(torch.uint8).cpu().view(E4M3).double() * part.scales.cpu().double()[:, None]
    return rows[: weight.shape[0]]


def sum_error(x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The bound of the error of products with float32 sums, then rounded: 6 sqrt(n) units of float32 with
    high probability (Higham and Mary 2019), relative to the sum of absolute values."""
    sizes = x.double().abs() @ weight.abs().t()
    return (6 * (x.shape[1] + 2) ** 0.5 * 2.0**-24 + 3 * OF_DTYPE[dtype]) * sizes + 1e-30


@given(
    num_out=st.integers(3, 150),
    num_in=st.sampled_from([32, 96, 128, 320]),
    scale=st.floats(1e-6, 1e4),
    seed=st.integers(0, 99),
)
def test_weights_are_rounded_within_the_bound(num_out: int, num_in: int, scale: float, seed: int) -> None:
    dense = torch.randn(num_out, num_in, generator=torch.Generator().manual_seed(seed)) * scale
    dense[num_out // 2] = 0
    weight = TRITON.linear.pack_blocks([quantised(dense, "F8_E4M3")], None, device=DEVICE)
    assert weight is not None
    assert weight.nbytes < (num_in + 8) * (num_out + 128)
    [part] = weight.quantised
    assert part.scales is not None
    scales = part.scales.cpu().double()[:num_out, None]
    bound = UNIT * dense.double().abs() + LEAST * scales
    assert ((dequantised(weight) - dense.double()).abs() <= bound * (1 + 1e-6)).all()
    ids = torch.tensor([0, num_out - 1, num_out // 2, 0])
    rows = TRITON.linear.embed(ids.to(DEVICE), weight, torch.float32).cpu()
    assert torch.equal(rows, dequantised(weight)[ids].float())


@examples(60)
@given(
    num_rows=st.sampled_from([1, 2, 16, 17, 64]),
    num_out=st.integers(3, 300),
    num_in=st.sampled_from([32, 96, 256, 416, 1_056, 1_536]),
    dtype=st.sampled_from([*OF_DTYPE]),
    num_processors=st.sampled_from([1, 3]),
    options=st.tuples(st.booleans(), st.booleans()),
    seed=st.integers(0, 99),
)
def test_f42q_a_fused_product_is_that_of_the_dequantised_weight(
    num_rows: int,
    num_out: int,
    num_in: int,
    dtype: torch.dtype,
    num_processors: int,
    options: tuple[bool, bool],
    seed: int,
) -> None:
    """Its rows are not rounded. With several processors, it is split over its inputs."""
    rng = torch.Generator().manual_seed(seed)
    bias = torch.randn(num_out, generator=rng).to(dtype) if options[0] else None
    added = torch.randn(num_rows, num_out, generator=rng).to(dtype) if options[1] else None
    x = torch.randn(num_rows, 2 * num_in, generator=rng).to(dtype)[:, ::2]
    weight = weight_of(num_out, num_in, seed, None if bias is None else bias.to(DEVICE))
    moved = x.to(DEVICE), None if added is None else added.to(DEVICE)
    exact = x.double() @ dequantised(weight).t()
    bound = sum_error(x, dequantised(weight), dtype)
    for term in (bias, added):
        if term is not None:
            exact = exact + term.double()
            bound = bound + 3 * OF_DTYPE[dtype] * (term.double().abs() + exact.abs())
    with pytest.MonkeyPatch.context() as patch:
        if DEVICE.type == "cpu":
            patch.setattr(split_products, "num_processors", lambda device: num_processors)
        results = [TRITON.linear.multiply(moved[0], weight, moved[1]) for _ in range(2)]
    assert results[0].dtype == dtype
    assert torch.equal(results[0], results[1])  # the counters are as before
    assert ((results[0].cpu().double() - exact).abs() <= bound).all()


def test_f42q_logits_are_as_exact_as_their_rows() -> None:
    """For any number of rows."""
    x = torch.randn(270, 96, generator=torch.Generator().manual_seed(0)).bfloat16()
    weight = weight_of(40, 96, 1)
    logits = TRITON.linear.multiply_exactly(x.to(DEVICE), weight).cpu()
    assert logits.dtype == torch.float32
    exact = x.double() @ dequantised(weight).t()
    assert ((logits.double() - exact).abs() <= sum_error(x, dequantised(weight), torch.float32)).all()


def scaled_mm(
    rows: torch.Tensor,
    columns: torch.Tensor,
    *,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """``torch._scaled_mm`` with scales for rows and columns, and its conditions: a CPU has none."""
    (num_rows, num_in), (_, num_out) = rows.shape, columns.shape
    assert rows.dtype == columns.dtype == E4M3
    assert rows.is_contiguous()
    assert columns.t().is_contiguous()  # column by column
    assert num_in % 16 == num_out % 16 == 0
    assert (scale_a.dtype, scale_a.shape, scale_a.is_contiguous()) == (torch.float32, (num_rows, 1), True)
    assert (scale_b.dtype, scale_b.shape, scale_b.is_contiguous()) == (torch.float32, (1, num_out), True)
    product = (rows.double() * scale_a) @ (columns.double() * scale_b)
    return product.to(out_dtype)


@pytest.fixture
def rounds_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many rows are multiplied as on a GPU."""
    if DEVICE.type == "cpu":
        monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
        monkeypatch.setattr(fp8, "_has_scaled_products", lambda device: True)


@pytest.mark.usefixtures("rounds_rows")
@DTYPES
@pytest.mark.parametrize(
    ("num_out", "num_in", "has_bias"),
    [
        (48, 96, False),
        (37, 256, True),
        pytest.param(48, 96, True, marks=pytest.mark.full),
        pytest.param(37, 256, False, marks=pytest.mark.full),
    ],
)
def test_f42q_many_rows_are_rounded_within_the_bound(
    dtype: torch.dtype, num_out: int, num_in: int, has_bias: bool
) -> None:
    """Each with its own scale. Each factor of a product has an error of e4m3, and the result one of
    bfloat16."""
    rng = torch.Generator().manual_seed(0)
    num_rows = fp8.MAX_ROWS + 3  # fewer are not rounded
    scales = torch.logspace(-3, 1, num_rows)[:, None]
    x = (torch.randn(num_rows, num_in, generator=rng) * scales).to(dtype)
    x[3] = 0
    bias = torch.randn(num_out, generator=rng).to(dtype)
    weight = weight_of(num_out, num_in, 2, bias.to(DEVICE) if has_bias else None)
    result = TRITON.linear.multiply(x.to(DEVICE), weight).cpu()
    assert result.dtype == dtype
    known = dequantised(weight)
    exact = x.double() @ known.t() + (bias.double() if has_bias else 0)
    row_scales = x.double().abs().amax(1, keepdim=True) / fp8.LARGEST
    errors = UNIT * x.double().abs() + LEAST * row_scales
    bound = errors @ known.abs().t() + sum_error(x, known, torch.bfloat16)
    bound += 2.0**-7 * (exact.abs() + (bias.double().abs() if has_bias else 0))
    assert ((result.double() - exact).abs() <= bound).all()
    rounded, found = fp8.round_rows(x.to(DEVICE))
    product = rounded.view(torch.uint8).cpu().view(E4M3).double() * found.cpu().double() @ known.t()
    difference = (result.double() - product - (bias.double() if has_bias else 0)).norm()
    assert float(difference / product.norm()) < 1e-2


def test_rows_that_are_not_finite_stay_so() -> None:
    """The engine then fails their requests. Other rows are not affected."""
    x = torch.ones(3, 64)
    x[0, 5], x[1, 7] = torch.nan, torch.inf
    with np.errstate(invalid="ignore"):  # the interpreter computes with numpy
        codes, scales = fp8.round_rows(x.to(DEVICE))
    values = codes.view(torch.uint8).cpu().view(E4M3).float() * scales.cpu()
    assert [bool(row.isfinite().all()) for row in values] == [False, False, True]
    assert torch.equal(values[2], x[2])


def fp8_pool(pool: torch.Tensor) -> torch.Tensor:
    return pool.float().clamp(-fp8.LARGEST, fp8.LARGEST).to(E4M3)


@pytest.fixture(autouse=True)
def _short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs and segments short enough for small batches to have several."""
    monkeypatch.setattr(units, "LEAST_SAVING", 10)
    monkeypatch.setattr(units, "LEAST_SEGMENT", units.KEY_STEP)


HEADS = [(4, 2, 8), (9, 3, 64), (3, 3, 48)]


@examples(32)
@given(st.sampled_from([*OF_DTYPE]), batches(), st.integers(0, 1000), st.sampled_from(HEADS))
def test_f42q_attention_over_8_bit_floats_equals_float64(
    dtype: torch.dtype, batch: tuple[list[Shape], list[Tree]], seed: int, heads: tuple[int, int, int]
) -> None:
    """Over the same keys and values, in a pool whose other slots are NaN."""
    sizes = dict(zip(("num_heads", "num_kv_heads", "head_dim"), heads, strict=True))
    case, rows = with_trees(make_case(batch[0], seed=seed, dtype=dtype, **sizes), batch[1], seed)
    pool = fp8_pool(case.kv_layer)
    known = replace(case, kv_layer=pool.to(dtype))
    plan = TRITON.attention.plan(batch_of(case, rows), dtype, DEVICE)
    assert_exact(TRITON.attention.attend(case.q.to(DEVICE), pool.to(DEVICE), plan, RULE).cpu(), known, rows)


@pytest.mark.parametrize("window", [0, 30])
@pytest.mark.parametrize("head_dim", [64, 272], ids=["kernel", "torch's operations"])
def test_f42q_rules_of_attention_apply_to_8_bit_floats(window: int, head_dim: int) -> None:
    """The results are close to attention over the same keys and values in bfloat16."""
    shapes = [Shape(-1, 0, 150, 1), Shape(0, 100, 130, 3), Shape(-1, 0, 5, 20)]
    case = make_case(shapes, dtype=torch.bfloat16, num_heads=4, num_kv_heads=2, head_dim=head_dim)
    pool, rule = fp8_pool(case.kv_layer), AttentionRule(SCALE, window, 5.0)
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0]).to(DEVICE)
    results = []
    for kv_layer in (pool, pool.bfloat16()):
        plan = TRITON.attention.plan(batch_of(case, None), torch.bfloat16, DEVICE)
        q = case.q.to(DEVICE)
        results.append(TRITON.attention.attend(q, kv_layer.to(DEVICE), plan, rule, sinks).cpu().float())
    torch.testing.assert_close(*results, rtol=1e-2, atol=1e-2)


@DTYPES
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(4, 2, 16), (9, 3, 64), (3, 3, 24)])
def test_f42q_keys_and_values_are_stored_as_the_nearest_8_bit_floats(
    dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int
) -> None:
    """Some are too large. A row without a slot writes nothing."""
    rng = torch.Generator().manual_seed(0)
    qkv = torch.randn(5, num_heads + 2 * num_kv_heads, head_dim, generator=rng)
    qkv[1] *= 300
    angles = torch.rand(5, 1, head_dim // 2, generator=rng) * 7
    cos, sin = (
        torch.cat(parts, -1).to(dtype) for parts in ((angles.cos(),) * 2, (-angles.sin(), angles.sin()))
    )
    slots = torch.tensor([3, 0, -1, 6, 2])
    queries, pools = [], []
    for pool_dtype in (dtype, E4M3):
        pool = torch.full((8, 2, num_kv_heads, head_dim), 7.0).to(pool_dtype).to(DEVICE)
        moved = [each.to(DEVICE) for each in (qkv.to(dtype), cos, sin)]
        queries.append(TRITON.rows.rope_and_write(*moved, pool, slots.to(DEVICE)).cpu())
        pools.append(pool)
    assert torch.equal(queries[1], queries[0])
    expected = fp8_pool(pools[0].cpu())
    assert torch.equal(pools[1].view(torch.uint8).cpu(), expected.view(torch.uint8))
    assert (expected.float().abs() == fp8.LARGEST).any()


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (7, 5)])
def test_older_gpus_have_none(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert not fp8.has_fp8.__wrapped__(torch.device("cuda", 7))
    assert not TORCH.linear.has_fp8(DEVICE)


def test_a_gpu_whose_kernels_fail_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(device: Any) -> bool:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(fp8, "_multiplies_ones", fail)
    assert not fp8.has_fp8.__wrapped__(torch.device("cuda", 7))


def test_the_check_of_a_device_passes_here() -> None:
    assert fp8._multiplies_ones(DEVICE)


def test_weights_of_several_formats_are_one_product() -> None:
    """Such weights come from a file in which only some matrices are quantised."""
    rng = torch.Generator().manual_seed(0)
    dense = [torch.randn(size, 64, generator=rng) for size in (20, 30)]
    blocks = [quantised(dense[0], "F8_E4M3"), quantised(dense[1], "Q8_0")]
    weight = TRITON.linear.pack_blocks(blocks, None, device=DEVICE)
    assert weight is not None
    for num_rows in (2, 70):
        x = torch.randn(num_rows, 64, generator=rng)
        result = TRITON.linear.multiply(x.to(DEVICE), weight).cpu()
        exact = x @ torch.cat(dense).t()
        assert float((result - exact).norm() / exact.norm()) < 0.05


@pytest.mark.only_gpu
@pytest.mark.parametrize("num_rows", [1, 16, 64, 300])
def test_products_of_a_models_size_repeat_in_a_graph(num_rows: int) -> None:
    """Each replay finds the counters of its parts as the one before left them."""
    weight = weight_of(999, 14_336, 3)
    x = torch.randn(num_rows, 14_336, device=DEVICE).bfloat16()
    rows = x.double()
    if num_rows > fp8.MAX_ROWS:
        codes, scales = fp8.round_rows(x)
        rows = codes.double() * scales
    exact = rows @ dequantised(weight).to(DEVICE).t()
    expected = TRITON.linear.multiply(x, weight)
    assert float((expected.double() - exact).norm() / exact.norm()) < 1e-2
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = TRITON.linear.multiply(x, weight)
    for _ in range(50):
        result.zero_()
        graph.replay()
        assert torch.equal(result, expected)
