"""Products with quantised weights on a GPU, with sizes of models: split over the inputs, and in graphs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from block_cases import random_blocks, relative_error

from agentflow.kernels.inputs import LinearWeight
from agentflow.kernels.platforms import triton_kernels

pytest.importorskip("triton", reason="triton is for x86-64 and Linux")

from agentflow.kernels.triton_ops.linear.quantised import BLOCK_TYPES, MAX_ROWS, dequantised_rows

TRITON = triton_kernels()
pytestmark = pytest.mark.only_gpu

GPU = torch.device("cuda")


def packed(block_type: str, num_out: int, num_in: int, bias: torch.Tensor | None = None) -> LinearWeight:
    matrix = random_blocks(np.random.default_rng(0), block_type, num_out, num_in)
    weight = TRITON.linear.pack_blocks([matrix], bias, device=GPU)
    assert weight is not None
    return weight


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
