"""Packed weights and the KV pool lie on large pages, which the system grants if it has them."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from kernel_cases import NATIVE
from torch import Tensor

from agentflow.engine.models.kv_pool import KvPool
from agentflow.kernels.inputs import BlockMatrix
from agentflow.kernels.page_advice import BLOCK_BYTES, LINE_BYTES, blocks_of_large_pages, empty_memory

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


def is_mapped(place: int) -> bool:
    """Whether the process has memory at an address."""
    ranges = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()]
    return any(int(begin, 16) <= place < int(end, 16) for begin, end in ranges)


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


@pytest.fixture
def one_node(tmp_path: Path) -> Path:
    """A folder as Linux makes for a machine with one NUMA node."""
    (tmp_path / "node0").mkdir()
    return tmp_path


@pytest.mark.skipif(not NATIVE, reason="no native kernels")
def test_small_weights_in_blocks(one_node: Path) -> None:
    linear = NATIVE[-1].linear
    matrices = [torch.randn(num, 64).bfloat16() for num in (64, 96, 32)]
    with blocks_of_large_pages(one_node):
        weights = [linear.pack(matrix, None) for matrix in matrices]
    x = torch.randn(3, 64).bfloat16()
    for matrix, weight in zip(matrices, weights, strict=True):
        assert weight.packed is not None
        assert has_advice(weight.packed)
        assert torch.equal(linear.multiply(x, weight), linear.multiply(x, linear.pack(matrix, None)))


def test_pieces_do_not_overlap(one_node: Path) -> None:
    sizes = [1, LINE_BYTES + 1, BLOCK_BYTES // 2, BLOCK_BYTES // 2, BLOCK_BYTES + 1, 5]
    with blocks_of_large_pages(one_node):
        pieces = [empty_memory(size, torch.uint8) for size in sizes]
        with blocks_of_large_pages(one_node):
            pieces.append(empty_memory(3, torch.bfloat16))
        pieces.append(empty_memory(7, torch.float32))
    assert [piece.nbytes for piece in pieces] == [*sizes, 6, 28]
    places = sorted((piece.data_ptr(), piece.data_ptr() + piece.nbytes) for piece in pieces)
    assert all(end <= begin for (_, end), (begin, _) in pairwise(places))
    for number, piece in enumerate(pieces):
        assert piece.data_ptr() % LINE_BYTES == 0
        piece.view(torch.uint8).fill_(number)
    assert all((piece.view(torch.uint8) == number).all() for number, piece in enumerate(pieces))


def test_a_block_is_freed_with_its_last_piece(one_node: Path) -> None:
    with blocks_of_large_pages(one_node):
        first, second = (empty_memory(1000, torch.uint8) for _ in range(2))
    first.fill_(1)
    place = second.data_ptr()
    assert is_mapped(place)
    del first
    assert is_mapped(place)
    del second
    assert not is_mapped(place)


def test_several_nodes_have_small_pages(one_node: Path) -> None:
    (one_node / "node1").mkdir()
    with blocks_of_large_pages(one_node):
        assert empty_memory(1000, torch.uint8).untyped_storage().nbytes() == 1000
