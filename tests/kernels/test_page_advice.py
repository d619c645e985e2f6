"""Packed weights and the KV pool lie on large pages, which the system grants if it has them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from kernel_cases import NATIVE
from torch import Tensor

from agentflow.engine.models.kv_pool import KvPool
from agentflow.kernels.inputs import BlockMatrix

pytestmark = pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").is_dir(), reason="the system has no large pages"
)
CPU = torch.device("cpu")


def has_advice(memory: Tensor) -> bool:
    """Whether large pages are requested for the middle of the memory."""
    middle, is_inside = memory.data_ptr() + memory.nbytes // 2, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, _, rest = line.partition(" ")
        if "-" in first:
            begin, end = (int(part, 16) for part in first.split("-"))
            is_inside = begin <= middle < end
        elif is_inside and first == "VmFlags:":
            return "hg" in rest.split()
    raise AssertionError("no mapping has the memory")


@pytest.mark.skipif(not NATIVE, reason="no native kernels")
def test_packed_weights() -> None:
    kernels = NATIVE[-1]
    dense = kernels.linear.pack(torch.randn(2048, 2048).bfloat16(), None)
    assert dense.packed is not None
    assert has_advice(dense.packed)
    codes = torch.zeros(4096, 2048 // 32 * 20, dtype=torch.uint8)
    packed = kernels.linear.pack_blocks([BlockMatrix("Q4_1", codes.numpy(), (4096, 2048))], None)
    assert packed is not None
    assert has_advice(packed.quantised[0].panels)


def test_the_pool() -> None:
    pool = KvPool(num_layers=2, num_slots=4096, num_kv_heads=4, head_dim=64, dtype=torch.bfloat16, device=CPU)
    assert all(has_advice(layer) for layer in pool.layers)
