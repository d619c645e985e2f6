"""Products with quantised weights, against the values to which the ``gguf`` package dequantises them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from block_cases import random_blocks, relative_error
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import NATIVE_KERNELS, NATIVE_PARAMS, NativeAt
from support.examples import examples

from agentflow.engine.models.weights.quantising import quantised
from agentflow.kernels.inputs import BlockMatrix
from agentflow.kernels.platforms import NATIVE, REFERENCE, triton_kernels

try:
    from agentflow.kernels.triton_ops.interpreted import IS_INTERPRETED
except ImportError:  # for x86-64 and Linux
    KERNELS, TRITON = NATIVE_KERNELS, None
else:
    # On a GPU, each of these cases would be compiled; ``test_quantised_on_gpu`` has a few.
    compiled = pytest.mark.skipif(not IS_INTERPRETED.value, reason="takes minutes to compile")
    TRITON = pytest.param(triton_kernels(), id="triton", marks=compiled)
    KERNELS = pytest.mark.parametrize("kernels", [*NATIVE_PARAMS, TRITON])

BLOCK_TYPES = NATIVE.linear.block_types
TYPES = pytest.mark.parametrize("block_type", BLOCK_TYPES)
ONE_OF_EACH_FORMAT = ("Q8_0", "Q4_1", "Q6_K", "Q4_K")  # in which Triton has the weights
IN = 512  # two blocks of the largest types
# Scales of K blocks are products of two numbers, which the panels round to float16.
TOLERANCE = dict.fromkeys(BLOCK_TYPES, 1e-6) | dict.fromkeys(("Q4_K", "Q5_K", "Q6_K"), 1e-3)


def random_matrix(block_type: str, num_out: int, seed: int, num_in: int = IN) -> BlockMatrix:
    return random_blocks(np.random.default_rng(seed), block_type, num_out, num_in)


def dequantised(matrix: BlockMatrix) -> torch.Tensor:
    return torch.from_numpy(gguf.dequantize(matrix.rows, gguf.GGMLQuantizationType[matrix.type]))


@KERNELS
@TYPES
def test_rows_have_the_dequantised_values(kernels: NativeAt, block_type: str) -> None:
    matrix = random_matrix(block_type, 70, seed=1)
    ids = torch.tensor([0, 69, 31, 32, 5, 5])
    weight = kernels.linear.pack_blocks([matrix], None)
    expected = dequantised(matrix)[ids]
    assert relative_error(kernels.linear.embed(ids, weight, torch.float32), expected) < TOLERANCE[block_type]
    assert relative_error(kernels.linear.embed(ids, weight, torch.bfloat16), expected) < 3e-3
    if isinstance(kernels, NativeAt):
        with pytest.raises(IndexError):
            kernels.linear.embed(torch.tensor([70]), weight, torch.float32)


PRODUCTS = given(
    num_rows=st.integers(1, 40), num_out=st.integers(1, 100), seed=st.integers(0, 99), has_bias=st.booleans()
)


@NATIVE_KERNELS
@TYPES
@PRODUCTS
def test_a_product_is_that_of_the_dequantised_weight(
    kernels: NativeAt, block_type: str, num_rows: int, num_out: int, seed: int, has_bias: bool
) -> None:
    assert_product(kernels, block_type, num_rows, num_out, seed, has_bias)


def triton_cases() -> Iterator[Any]:
    """Types of blocks; ``make test`` has one of each format."""
    if TRITON is not None:
        for block_type in BLOCK_TYPES:
            marks = TRITON.marks if block_type in ONE_OF_EACH_FORMAT else (*TRITON.marks, pytest.mark.full)
            yield pytest.param(*TRITON.values, block_type, id=block_type, marks=marks)


@pytest.mark.parametrize(("kernels", "block_type"), [*triton_cases()])
@examples(24)  # an example takes Triton's interpreter a sixth of a second
@PRODUCTS
def test_a_product_of_triton_is_that_of_the_dequantised_weight(
    kernels: NativeAt, block_type: str, num_rows: int, num_out: int, seed: int, has_bias: bool
) -> None:
    assert_product(kernels, block_type, num_rows, num_out, seed, has_bias)


def assert_product(
    kernels: NativeAt, block_type: str, num_rows: int, num_out: int, seed: int, has_bias: bool
) -> None:
    matrix = random_matrix(block_type, num_out, seed)
    x = torch.randn(num_rows, IN, generator=torch.Generator().manual_seed(seed))
    bias = torch.randn(num_out, generator=torch.Generator().manual_seed(seed)) if has_bias else None
    exact = x.double() @ dequantised(matrix).double().t() + (0 if bias is None else bias.double())
    result = kernels.linear.multiply(x, kernels.linear.pack_blocks([matrix], bias))
    # Sums that cancel keep the absolute error of their parts.
    size = x.double().abs() @ dequantised(matrix).double().abs().t() + 1
    assert ((result.double() - exact).abs() / size).max() < 2 * TOLERANCE[block_type]

    weight = kernels.linear.pack_blocks([matrix], None if bias is None else bias.bfloat16())
    rough = kernels.linear.multiply_exactly(x.bfloat16(), weight)
    assert rough.dtype == torch.float32
    assert ((rough.double() - exact).abs() / size).max() < 2e-2


@KERNELS
@TYPES
def test_errors_of_bfloat16_products_stay_below_one_percent(kernels: NativeAt, block_type: str) -> None:
    matrix = random_matrix(block_type, 200, seed=7)
    x = torch.randn(30, IN, generator=torch.Generator().manual_seed(7)).bfloat16()
    expected = x.double() @ dequantised(matrix).double().t()
    assert (
        relative_error(
            kernels.linear.multiply_exactly(x, kernels.linear.pack_blocks([matrix], None)), expected
        )
        < 1e-2
    )


@NATIVE_KERNELS
@TYPES
def test_a_row_does_not_depend_on_other_rows(kernels: NativeAt, block_type: str) -> None:
    weight = kernels.linear.pack_blocks([random_matrix(block_type, 40, seed=2)], None)
    x = torch.randn(29, IN, generator=torch.Generator().manual_seed(2)).bfloat16()
    together = kernels.linear.multiply_exactly(x, weight)
    alone = torch.cat([kernels.linear.multiply_exactly(row[None], weight) for row in x])
    assert torch.equal(together, alone)


VALUES = (math.nan, math.inf, -math.inf)


@NATIVE_KERNELS
@pytest.mark.parametrize(  # each two of the three together
    ("block_type", "num_rows", "value"),
    [
        (block_type, num_rows, VALUES[(i + j) % 3])
        for i, block_type in enumerate(BLOCK_TYPES)
        for j, num_rows in enumerate((3, 14, 40))
    ],
)
def test_f37_a_row_that_is_not_finite_has_no_finite_products(
    kernels: NativeAt, block_type: str, value: float, num_rows: int
) -> None:
    """For any value in a group, next to zeros or numbers. Other rows are the same to the bit."""
    weight = kernels.linear.pack_blocks([random_matrix(block_type, 40, seed=3)], None)
    x = torch.randn(num_rows, IN, generator=torch.Generator().manual_seed(3)).bfloat16()
    x[0] = 0
    intact = kernels.linear.multiply_exactly(x, weight)
    assert intact.isfinite().all()
    for place in [*range(32), IN - 32, IN - 1]:
        for row in (0, 1):
            damaged = x.clone()
            damaged[row, place] = value
            found = kernels.linear.multiply_exactly(damaged, weight)
            assert not found[row].isfinite().any(), (row, place)
            found[row] = intact[row]
            assert torch.equal(found, intact)


@NATIVE_KERNELS
@pytest.mark.parametrize("block_type", ["Q4_1", "Q6_K"])
def test_many_rows_of_a_deep_product_have_the_same_sums(kernels: NativeAt, block_type: str) -> None:
    """The kernel divides the depth into slices for 156 rows, but not for 39."""
    weight = kernels.linear.pack_blocks([random_matrix(block_type, 40, seed=4, num_in=9728)], None)
    x = torch.randn(156, 9728, generator=torch.Generator().manual_seed(4)).bfloat16()
    together = kernels.linear.multiply_exactly(x, weight)
    assert torch.equal(
        together, torch.cat([kernels.linear.multiply_exactly(rows, weight) for rows in x.split(39)])
    )


GATED = given(half=st.integers(1, 50), num_rows=st.integers(1, 20), seed=st.integers(0, 99))


@NATIVE_KERNELS
@GATED
def test_a_gated_product(kernels: NativeAt, half: int, num_rows: int, seed: int) -> None:
    assert_gated_product(kernels, half, num_rows, seed)


@pytest.mark.parametrize("kernels", [] if TRITON is None else [TRITON])
@examples(24)
@GATED
def test_a_gated_product_of_triton(kernels: NativeAt, half: int, num_rows: int, seed: int) -> None:
    assert_gated_product(kernels, half, num_rows, seed)


def assert_gated_product(kernels: NativeAt, half: int, num_rows: int, seed: int) -> None:
    parts = [random_matrix("Q4_1", half, seed + i) for i in range(2)]
    x = torch.randn(num_rows, IN, generator=torch.Generator().manual_seed(seed))
    dense = REFERENCE.linear.pack(torch.cat([dequantised(part) for part in parts]), None, gated=True)
    expected = REFERENCE.linear.multiply(x, dense, activation="silu")
    result = kernels.linear.multiply(
        x, kernels.linear.pack_blocks(parts, None, gated=True), activation="silu"
    )
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)


@KERNELS
def test_stacked_matrices_may_differ_in_type(kernels: NativeAt) -> None:
    parts = [random_matrix(name, size, seed=3) for name, size in (("Q4_K", 64), ("Q8_0", 32), ("Q6_K", 33))]
    x = torch.randn(5, IN, generator=torch.Generator().manual_seed(3))
    expected = torch.cat([x @ dequantised(part).t() for part in parts], dim=1)
    assert (
        relative_error(kernels.linear.multiply(x, kernels.linear.pack_blocks(parts, None)), expected) < 1e-3
    )


def test_incompatible_blocks_are_not_packed() -> None:
    q4, q8 = random_matrix("Q4_1", 32, seed=0), random_matrix("Q8_0", 33, seed=0)
    assert NATIVE.linear.pack_blocks([q4, q8], None, gated=True) is None
    assert NATIVE.linear.pack_blocks([q8, q4], None) is None  # the first does not fill its last panel
    assert NATIVE.linear.pack_blocks([BlockMatrix("TQ1_0", q4.rows, q4.shape)], None) is None


@given(
    seed=st.integers(0, 99),
    size=st.sampled_from([1e-2, 1.0, 1e3]),
    block_type=st.sampled_from(["Q8_0", "Q4_1"]),
)
def test_quantised_values_are_the_nearest_ones(seed: int, size: float, block_type: str) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = size * torch.randn(5, 96, generator=generator)
    weight[1, 32:64] = 0
    made = dequantised(quantised(weight, block_type))
    blocks = weight.view(-1, 32)
    low, high = blocks.aminmax(dim=1, keepdim=True)
    step = (high - low) / 15 if block_type == "Q4_1" else blocks.abs().amax(dim=1, keepdim=True) / 127
    # Half a step, and the rounding of the scale and the minimum to float16.
    bound = 0.5 * step + 2e-3 * blocks.abs().amax(dim=1, keepdim=True)
    assert bool(((made.view(-1, 32) - blocks).abs() <= bound).all())
