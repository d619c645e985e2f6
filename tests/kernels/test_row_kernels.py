"""The kernels that work row by row, against the reference; and the reference against float64."""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import NATIVE_KERNELS, QUICK_KERNELS
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from agentflow.kernels import platforms
from agentflow.kernels.activations import ACTIVATIONS, Activation, PlainActivation, activated
from agentflow.kernels.inputs import LinearWeight, LowRank, LowRankPart
from agentflow.kernels.linear import torch_linear
from agentflow.kernels.platforms import NATIVE, REFERENCE, TORCH, Kernels

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-7}
ROWS = st.integers(1, 40)
SEEDS = st.integers(0, 1000)


def random(*shape: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(result: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert result.dtype == expected.dtype
    torch.testing.assert_close(result, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@QUICK_KERNELS
@DTYPES
@given(ROWS, SEEDS)
def test_rms_norm(kernels: Kernels, dtype: torch.dtype, num_rows: int, seed: int) -> None:
    x, weight = random(num_rows, 48, seed=seed, dtype=dtype), random(48, seed=seed + 1, dtype=dtype)
    expected = REFERENCE.rows.rms_norm(x, weight, 1e-5)
    before = x.clone()
    assert_close(kernels.rows.rms_norm(x, weight, 1e-5), expected, dtype)
    assert torch.equal(x, before)
    wide = x.double()
    exact = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    torch.testing.assert_close(expected.double(), exact, rtol=2 * TOLERANCE[dtype], atol=TOLERANCE[dtype])


@QUICK_KERNELS
@DTYPES
def test_rms_norm_of_heads_in_a_strided_view(kernels: Kernels, dtype: torch.dtype) -> None:
    heads, weight = random(5, 6, 16, seed=0, dtype=dtype)[:, 1:4], random(16, seed=1, dtype=dtype)
    assert_close(
        kernels.rows.rms_norm(heads, weight, 1e-6), REFERENCE.rows.rms_norm(heads, weight, 1e-6), dtype
    )


@QUICK_KERNELS
@DTYPES
@given(ROWS, st.sampled_from([1, 16, 48, 75]), SEEDS)
def test_layer_norm(kernels: Kernels, dtype: torch.dtype, num_rows: int, size: int, seed: int) -> None:
    x, weight, bias = (
        random(*shape, seed=seed, dtype=dtype) for shape in ((num_rows, size), (size,), (size,))
    )
    expected = REFERENCE.rows.layer_norm(x, weight, bias, 1e-5)
    assert_close(kernels.rows.layer_norm(x, weight, bias, 1e-5), expected, dtype)
    wide = x.double()
    from_mean = wide - wide.mean(-1, keepdim=True)
    scale = (from_mean.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    exact = from_mean / scale * weight.double() + bias.double()
    torch.testing.assert_close(expected.double(), exact, rtol=2 * TOLERANCE[dtype], atol=TOLERANCE[dtype])


@QUICK_KERNELS
@DTYPES
@given(ROWS, SEEDS)
def test_add_rms_norm(kernels: Kernels, dtype: torch.dtype, num_rows: int, seed: int) -> None:
    x, residual = (random(num_rows, 48, seed=seed + i, dtype=dtype) for i in range(2))
    weight = random(48, seed=seed + 2, dtype=dtype)
    expected, expected_total = REFERENCE.rows.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(expected_total, residual + x)
    normed, total = kernels.rows.add_rms_norm(x, residual.clone(), weight, 1e-5)
    assert torch.equal(total, expected_total)
    assert_close(normed, expected, dtype)


@QUICK_KERNELS
@DTYPES
@given(
    st.booleans(),
    st.integers(1, 40),
    st.sampled_from([1, 16, 17, 40, 64]),
    st.sampled_from(ACTIVATIONS),
    SEEDS,
)
def test_products_with_gates(
    kernels: Kernels,
    dtype: torch.dtype,
    has_bias: bool,
    num_rows: int,
    inner: int,
    activation: Activation,
    seed: int,
) -> None:
    x, weight = (
        random(num_rows, 24, seed=seed, dtype=dtype),
        random(2 * inner, 24, seed=seed + 1, dtype=dtype),
    )
    bias = random(2 * inner, seed=seed + 2, dtype=dtype) if has_bias else None
    expected = REFERENCE.linear.multiply(
        x, REFERENCE.linear.pack(weight, bias, gated=True), activation=activation
    )
    result = kernels.linear.multiply(x, kernels.linear.pack(weight, bias, gated=True), activation=activation)
    # A gate that rounds to its neighbour in bfloat16 moves the result by more than its own rounding.
    tolerance = {"rtol": 6 * TOLERANCE[dtype], "atol": 12 * TOLERANCE[dtype]}
    assert result.dtype == expected.dtype
    torch.testing.assert_close(result, expected, **tolerance)
    wide_bias = None if bias is None else bias.double()
    wide = torch.nn.functional.linear(x.double(), weight.double(), wide_bias)
    if activation == "silu":
        gate, up = wide.chunk(2, dim=-1)
        torch.testing.assert_close(expected.double(), gate * gate.sigmoid() * up, **tolerance)
    else:
        torch.testing.assert_close(expected.double(), activated(wide, activation, is_gated=True), **tolerance)


@QUICK_KERNELS
@DTYPES
@given(st.integers(1, 40), st.integers(1, 70), st.sampled_from(get_args(PlainActivation)), SEEDS)
def test_activated_products(
    kernels: Kernels, dtype: torch.dtype, num_rows: int, num_out: int, activation: PlainActivation, seed: int
) -> None:
    x, weight = random(num_rows, 24, seed=seed, dtype=dtype), random(num_out, 24, seed=seed + 1, dtype=dtype)
    bias = random(num_out, seed=seed + 2, dtype=dtype)
    result = kernels.linear.multiply(x, kernels.linear.pack(weight, bias), activation=activation)
    wide = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    tolerance = {"rtol": 3 * TOLERANCE[dtype], "atol": 6 * TOLERANCE[dtype]}
    torch.testing.assert_close(result.double(), activated(wide, activation, is_gated=False), **tolerance)


@DTYPES
@given(ROWS, SEEDS)
def test_rope_and_write(dtype: torch.dtype, num_rows: int, seed: int) -> None:
    num_heads, num_kv_heads, head_dim, num_slots = 4, 2, 16, 64
    qkv = random(num_rows, num_heads + 2 * num_kv_heads, head_dim, seed=seed, dtype=dtype)
    angles = torch.rand(num_rows, 1, head_dim // 2, generator=torch.Generator().manual_seed(seed)) * 7
    cos = torch.cat((angles.cos(), angles.cos()), -1).to(dtype)
    sin = torch.cat((-angles.sin(), angles.sin()), -1).to(dtype)
    slots = torch.randperm(num_slots, generator=torch.Generator().manual_seed(seed))[:num_rows]
    pools = [torch.full((num_slots, 2, num_kv_heads, head_dim), 7.0).to(dtype) for _ in range(2)]
    expected = REFERENCE.rows.rope_and_write(qkv.clone(), cos, sin, pools[0], slots)
    result = TORCH.rows.rope_and_write(qkv.clone(), cos, sin, pools[1], slots)
    assert_close(result, expected, dtype)
    assert_close(pools[1], pools[0], dtype)
    # A rotation of each pair (i, i + half) as a complex number; values are written unchanged.
    half = head_dim // 2
    pairs = torch.complex(qkv[..., :half].double(), qkv[..., half:].double())
    turned = pairs * torch.polar(torch.ones_like(angles).double(), angles.double())
    exact = torch.cat((turned.real, turned.imag), -1)
    torch.testing.assert_close(
        expected.double(), exact[:, :num_heads], rtol=3 * TOLERANCE[dtype], atol=3 * TOLERANCE[dtype]
    )
    assert torch.equal(pools[0][slots, 1], qkv[:, num_heads + num_kv_heads :])
    untouched = torch.ones(num_slots, dtype=torch.bool).index_fill_(0, slots, False)
    assert (pools[1][untouched] == 7).all()


@QUICK_KERNELS
@DTYPES
@given(st.booleans(), st.integers(1, 40), st.sampled_from([(40, 24), (1, 1), (31, 33), (96, 64)]), SEEDS)
def test_linear(
    kernels: Kernels, dtype: torch.dtype, has_bias: bool, num_rows: int, sizes: tuple[int, int], seed: int
) -> None:
    num_in, num_out = sizes
    x, weight = (
        random(num_rows, num_in, seed=seed, dtype=dtype),
        random(num_out, num_in, seed=seed + 1, dtype=dtype),
    )
    bias = random(num_out, seed=seed + 2, dtype=dtype) if has_bias else None
    plain = REFERENCE.linear.pack(weight, bias)
    expected = REFERENCE.linear.multiply(x, plain)
    tolerance = {"rtol": 5 * TOLERANCE[dtype], "atol": 5 * TOLERANCE[dtype]}
    torch.testing.assert_close(
        kernels.linear.multiply(x, kernels.linear.pack(weight, bias)), expected, **tolerance
    )
    exact = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    torch.testing.assert_close(expected.double(), exact, **tolerance)
    logits = kernels.linear.multiply_exactly(x, kernels.linear.pack(weight, bias, exact_output=True))
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, REFERENCE.linear.multiply_exactly(x, plain), **tolerance)


@NATIVE_KERNELS
@DTYPES
def test_many_rows_of_a_deep_product_have_the_same_sums(kernels: Kernels, dtype: torch.dtype) -> None:
    """The kernel divides the depth into slices for 156 rows, but not for 26."""
    x, weight = random(156, 4900, seed=0, dtype=dtype), random(40, 4900, seed=1, dtype=dtype)
    packed = kernels.linear.pack(weight, None)
    together = kernels.linear.multiply_exactly(x, packed)
    assert torch.equal(
        together, torch.cat([kernels.linear.multiply_exactly(rows, packed) for rows in x.split(26)])
    )
    exact = (x.double() @ weight.double().t()).float()
    torch.testing.assert_close(together, exact, rtol=1e-4, atol=1e-3)


@DTYPES
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("is_bfloat16_fast", [False, True])
@pytest.mark.parametrize("num_rows", [1, 5, 20])
def test_linear_of_torch(
    dtype: torch.dtype,
    has_bias: bool,
    is_bfloat16_fast: bool,
    num_rows: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The weight is neither copied nor packed."""
    monkeypatch.setattr(torch_linear, "_multiplies_bfloat16", lambda: is_bfloat16_fast)
    x, weight = random(num_rows, 40, seed=0, dtype=dtype), random(24, 40, seed=1, dtype=dtype)
    packed = TORCH.linear.pack(weight, random(24, seed=2, dtype=dtype) if has_bias else None)
    assert packed.transposed is not None
    assert packed.transposed.data_ptr() == weight.data_ptr()
    assert packed.packed is None
    assert_close(TORCH.linear.multiply(x, packed), REFERENCE.linear.multiply(x, packed), dtype)
    assert TORCH.linear.multiply_exactly(x, packed).dtype == torch.float32


def test_nbytes_counts_every_layout_that_is_held() -> None:
    weight = torch.zeros(6, 4, dtype=torch.bfloat16)
    assert LinearWeight(weight, None, None, (4, 6)).nbytes == 48
    assert LinearWeight(weight, torch.zeros(6, 4), torch.zeros(6, dtype=torch.bfloat16), (4, 6)).nbytes == 156


@pytest.mark.parametrize(
    ("name", "kernels"), [("reference", REFERENCE), ("torch", TORCH), ("native", NATIVE)]
)
def test_the_environment_forces_an_implementation(
    name: str, kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENTFLOW_KERNELS", name)
    assert platforms.kernels_for(torch.device("cpu")) is kernels


def test_an_unknown_implementation_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTFLOW_KERNELS", "fastest")
    with pytest.raises(ValueError, match=r"AGENTFLOW_KERNELS.*'fastest'"):
        platforms.kernels_for(torch.device("cpu"))


def test_torch_keeps_one_copy_of_a_weight() -> None:
    """The head's is in float32 on a CPU, whose products have the type of their operands."""
    weight = torch.zeros(6, 4, dtype=torch.bfloat16)
    assert TORCH.linear.pack(weight, None).nbytes == 48
    assert TORCH.linear.pack(weight, None, exact_output=True).nbytes == 96


@QUICK_KERNELS
@pytest.mark.parametrize("has_bias", [False, True])
@given(st.sampled_from([1, 2, 16]), SEEDS)
def test_an_exact_result_is_not_rounded_to_bfloat16(
    kernels: Kernels, has_bias: bool, num_rows: int, seed: int
) -> None:
    x = random(num_rows, 40, seed=seed, dtype=torch.bfloat16)
    weight = random(24, 40, seed=seed + 1, dtype=torch.bfloat16)
    bias = random(24, seed=seed + 2, dtype=torch.bfloat16) if has_bias else None
    packed = kernels.linear.pack(weight, bias, exact_output=True)
    exact = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    scale = x.double().abs() @ weight.double().abs().t() + 1
    assert ((kernels.linear.multiply_exactly(x, packed).double() - exact).abs() <= scale * 2.0**-14).all()


HAS_GPU = torch.cuda.is_available()


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="there is no GPU here")]
        ),
    ],
)
@pytest.mark.parametrize("has_bias", [False, True])
def test_logits_of_torch_are_exact(device: str, has_bias: bool) -> None:
    """Near-equal logits stay apart, in the order of the exact ones."""
    x = random(3, 40, seed=0, dtype=torch.bfloat16).to(device)
    weight = random(500, 40, seed=1, dtype=torch.bfloat16).to(device)
    bias = random(500, seed=2, dtype=torch.bfloat16).to(device) if has_bias else None
    logits = TORCH.linear.multiply_exactly(x, TORCH.linear.pack(weight, bias, exact_output=True))
    exact = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits.double(), exact, rtol=1e-5, atol=1e-4)
    assert (logits.bfloat16().float() != logits).float().mean() > 0.9


class _Narrowed(TorchDispatchMode):
    """Collects the operations that give bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        if isinstance(result, torch.Tensor) and result.dtype == torch.bfloat16:
            self.found.append(str(func))
        return result


@pytest.mark.parametrize("has_bias", [False, True])
def test_on_a_gpu_no_step_towards_logits_is_rounded(has_bias: bool) -> None:
    """Checked without a GPU, on tensors that have a device and no numbers."""
    with FakeTensorMode():
        x, weight = (torch.empty(n, 40, dtype=torch.bfloat16, device="cuda") for n in (3, 500))
        bias = torch.empty(500, dtype=torch.bfloat16, device="cuda") if has_bias else None
        packed = TORCH.linear.pack(weight, bias, exact_output=True)
        with _Narrowed() as narrowed:
            logits = TORCH.linear.multiply_exactly(x, packed)
    assert (logits.dtype, logits.shape, logits.device.type) == (torch.float32, (3, 500), "cuda")
    assert narrowed.found == []


@QUICK_KERNELS
@DTYPES
@given(st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=3), min_size=1, max_size=3), ROWS, SEEDS)
def test_low_rank_changes_of_some_rows(
    kernels: Kernels, dtype: torch.dtype, ranks: list[list[int]], num_rows: int, seed: int
) -> None:
    """Each change has parts of other ranks, in outputs that need not be adjacent, for separate rows."""
    x = random(num_rows, 72, seed=seed, dtype=dtype)
    owners = np.random.default_rng(seed).integers(-1, len(ranks), num_rows)
    sizes = (40, 24, 33)

    def changes(packed_by: Kernels) -> list[tuple[LowRank, torch.Tensor]]:
        made = []
        for number, own in enumerate(ranks):
            down = random(sum(own), 72, seed=seed + number, dtype=dtype) * 0.2
            ups = [random(size, rank, seed=rank, dtype=dtype) for size, rank in zip(sizes, own, strict=False)]
            parts = [LowRankPart(packed_by.linear.pack(up, None), 50 * i) for i, up in enumerate(ups)]
            change = LowRank(packed_by.linear.pack(down, None), tuple(parts))
            made.append((change, torch.from_numpy(np.flatnonzero(owners == number))))
        return made

    result = kernels.linear.low_rank(x, 150, changes(kernels))
    expected = REFERENCE.linear.low_rank(x, 150, changes(REFERENCE))
    torch.testing.assert_close(result, expected, rtol=4 * TOLERANCE[dtype], atol=16 * TOLERANCE[dtype])
    assert not result[owners < 0].any()


@QUICK_KERNELS
@DTYPES
@pytest.mark.parametrize(("num_rows", "num_in"), [(7, 48), (16, 64), (33, 64), (150, 1024)])
def test_products_are_added_in_place(
    kernels: Kernels, dtype: torch.dtype, num_rows: int, num_in: int
) -> None:
    """The rows are in a larger tensor, with and without the width that the native products read directly."""
    x, weight = random(num_rows + 2, num_in, seed=0, dtype=dtype), random(72, num_in, seed=1, dtype=dtype)
    before, bias = random(num_rows + 2, 72, seed=2, dtype=dtype), random(72, seed=3, dtype=dtype)
    expected, hidden = before.clone(), before.clone()
    REFERENCE.linear.add_product(expected[1:-1], x[1:-1], REFERENCE.linear.pack(weight, bias))
    kernels.linear.add_product(hidden[1:-1], x[1:-1], kernels.linear.pack(weight, bias))
    tolerance = TOLERANCE[dtype] * num_in**0.5
    torch.testing.assert_close(hidden, expected, rtol=4 * TOLERANCE[dtype], atol=8 * tolerance)
    assert torch.equal(hidden[[0, -1]], before[[0, -1]])


@QUICK_KERNELS
@DTYPES
def test_products_with_an_added_term(kernels: Kernels, dtype: torch.dtype) -> None:
    x, weight, bias = (random(*shape, seed=0, dtype=dtype) for shape in ((7, 48), (72, 48), (72,)))
    added = random(7, 72, seed=1, dtype=dtype)
    cases: list[tuple[bool, Activation | None]] = [(False, None), (False, "gelu"), (True, "silu")]
    for is_gated, activation in cases:
        expected, result = (
            linear.multiply(
                x, linear.pack(weight, bias, gated=is_gated), added.clone(), activation=activation
            )
            for linear in (REFERENCE.linear, kernels.linear)
        )
        torch.testing.assert_close(result, expected, rtol=4 * TOLERANCE[dtype], atol=64 * TOLERANCE[dtype])
