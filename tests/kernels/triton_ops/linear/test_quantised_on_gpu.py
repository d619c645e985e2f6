"""Products with quantised weights on a GPU, with sizes of models: split over the inputs, and in graphs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from agentflow.kernels.inputs import BlockMatrix, LinearWeight
from agentflow.kernels.platforms import triton_kernels

pytest.importorskip("triton", reason="triton is for x86-64 and Linux")

from agentflow.kernels.triton_ops.linear.quantised import BLOCK_TYPES, MAX_ROWS, dequantised_rows

TRITON = triton_kernels()
pytestmark = pytest.mark.only_gpu

GPU = torch.device("cuda")
BYTES = {"Q4_0": 18, "Q4_1": 20, "Q5_0": 22, "Q5_1": 24, "Q8_0": 34, "IQ4_NL": 18}
BYTES |= {"Q4_K": 144, "Q5_K": 176, "Q6_K": 210}
HALVES = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}


def random_matrix(block_type: str, num_out: int, num_in: int) -> BlockMatrix:
    """Any bytes are valid blocks; only their float16 numbers must have a sensible size."""
    rng = np.random.default_rng(0)
    per_block = 256 if block_type.endswith("_K") else 32
    blocks = rng.integers(0, 256, (num_out, num_in // per_block, BYTES[block_type]), dtype=np.uint8)
    for at in HALVES.get(block_type, (0,)):
        numbers = rng.uniform(-1e-2, 1e-2, blocks.shape[:2]).astype(np.float16)
        blocks[..., at : at + 2] = numbers.view(np.uint8).reshape(*blocks.shape[:2], 2)
    return BlockMatrix(block_type, blocks.reshape(num_out, -1), (num_out, num_in))


def packed(block_type: str, num_out: int, num_in: int, bias: torch.Tensor | None = None) -> LinearWeight:
    weight = TRITON.linear.pack_blocks([random_matrix(block_type, num_out, num_in)], bias, device=GPU)
    assert weight is not None
    return weight


def relative_error(result: torch.Tensor, expected: torch.Tensor) -> float:
    return float((result.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("block_type", BLOCK_TYPES)
def test_a_product_is_that_of_the_dequantised_weight(block_type: str) -> None:
    """With a bias and another summand, for one row, two tiles and slices of dequantised weights; the weights
    themselves are compared with the interpreter's in ``test_quantised_weights``."""
    torch.manual_seed(0)
    num_out, num_in = 1_000, 3_072
    bias = torch.randn(num_out, device=GPU).bfloat16()
    weight = packed(block_type, num_out, num_in, bias)
    rows = dequantised_rows(weight.quantised[0], num_in, range(num_out), torch.float32)
    ids = torch.tensor([0, 999, 5, 5], device=GPU)
    assert torch.equal(TRITON.linear.embed(ids, weight, torch.float32), rows[ids])
    for num_rows in (1, 3, 64, MAX_ROWS + 9):
        x = torch.randn(num_rows, num_in, device=GPU).bfloat16()
        added = torch.randn(num_rows, num_out, device=GPU).bfloat16()
        exact = x.double() @ rows.double().t() + bias.double()
        assert relative_error(TRITON.linear.multiply_exactly(x, weight), exact) < 5e-3
        assert relative_error(TRITON.linear.multiply(x, weight, added), exact + added.double()) < 1e-2


@pytest.mark.parametrize("num_rows", [1, 16, 64])
def test_products_repeat_in_a_graph(num_rows: int) -> None:
    """Each replay finds the counters of its parts as the one before left them."""
    weight = packed("Q4_1", 512, 14_336)
    x = torch.randn(num_rows, 14_336, device=GPU).bfloat16()
    expected = TRITON.linear.multiply(x, weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = TRITON.linear.multiply(x, weight)
    for _ in range(200):
        result.zero_()
        graph.replay()
        assert torch.equal(result, expected)
