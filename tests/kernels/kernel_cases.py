"""Random batches for the attention kernels: requests whose slots form a tree, in a poisoned pool."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from numpy.typing import NDArray

from agentflow.kernels import native_library, native_ops, torch_ops
from agentflow.kernels.native_library import LEVELS, cpu_flags

FOREIGN = 2**31 - 1
"""The value of req_to_token where no token is: reading a slot of this number fails at once."""


BEST_LEVEL = next((level for level, need in reversed(LEVELS.items()) if cpu_flags().issuperset(need)), "")


def quick_flags(level: str) -> tuple[str, ...]:
    """The compiler's options for a level in tests. The best one is compiled as users have it; the others,
    which only tests load here, at ``-O1``, which takes less than half of the time. ``make test-full``
    compiles all as users have them."""
    if level == BEST_LEVEL or "FULL_KERNELS" in os.environ:
        return native_library.FLAGS
    return tuple("-O1" if flag == "-O3" else flag for flag in native_library.FLAGS)


class NativeAt:
    """The native kernels, compiled for a level of instructions that may be lower than the processor's."""

    def __init__(self, level: str) -> None:
        self.level = level
        self._flags = quick_flags(level)

    def __getattr__(self, name: str) -> Any:
        function = getattr(native_ops, name)

        def at_level(*args: Any, **options: Any) -> Any:
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("AGENTFLOW_CPU", self.level)
                patch.setattr(native_library, "FLAGS", self._flags)
                return function(*args, **options)

        return at_level


PRESENT_FLAGS = cpu_flags()
if hasattr(ctypes.CDLL(None), "trapped_products"):  # a process of test_trapped_tiles
    PRESENT_FLAGS |= frozenset(LEVELS["amx"])
    native_library.cpu_flags = lambda: PRESENT_FLAGS  # type: ignore[assignment]

NATIVE = [NativeAt(level) for level, needed in LEVELS.items() if PRESENT_FLAGS.issuperset(needed)]
"""At every level that can run here."""
# What avx512_vnni compiles, the levels below and above it compile too.
NATIVE_PARAMS = [
    pytest.param(
        made,
        id=f"native-{made.level}",
        marks=[pytest.mark.full] if made.level == "avx512_vnni" != BEST_LEVEL else [],
    )
    for made in NATIVE
]
NATIVE_KERNELS = pytest.mark.parametrize("kernels", NATIVE_PARAMS)
QUICK_KERNELS = pytest.mark.parametrize("kernels", [pytest.param(torch_ops, id="torch"), *NATIVE_PARAMS])


@dataclass(frozen=True)
class Shape:
    """Sizes of a request in a batch: the first ``shared`` of its ``cached`` tokens are those of request
    ``parent``, an earlier one (-1: none)."""

    parent: int
    shared: int
    cached: int
    query_len: int


@dataclass
class Case:
    """A batch for the attention kernels, with a pool and queries."""

    req_to_token: NDArray[np.int32]
    req_rows: NDArray[np.int64]
    query_lens: NDArray[np.int64]
    kv_lens: NDArray[np.int64]
    q: torch.Tensor
    kv_layer: torch.Tensor


@st.composite
def shapes(draw: st.DrawFn, max_requests: int = 7) -> list[Shape]:
    """Decoding requests and chunks, in any order, some sharing a prefix with an earlier one."""
    made: list[Shape] = []
    for i in range(draw(st.integers(1, max_requests))):
        parent = draw(st.integers(-1, i - 1))
        # A request shares only what its parent had computed before this batch.
        shared = draw(st.integers(0, made[parent].cached)) if parent >= 0 else 0
        cached = shared + draw(st.integers(0, 40))
        query_len = draw(st.just(1) | st.integers(1, 24))
        made.append(Shape(parent, shared, cached, query_len))
    return made


def make_case(
    shapes: list[Shape],
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 8,
    poison: float = float("nan"),
    consecutive: bool = False,
) -> Case:
    """Slots at random places of a pool (or ``consecutive``); every free slot is ``poison``."""
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    num_slots = sum(s.cached + s.query_len for s in shapes) + 50
    free = list(range(num_slots) if consecutive else rng.permutation(num_slots))
    num_columns = max(s.cached + s.query_len for s in shapes) + 5
    req_to_token = np.full((len(shapes) + 3, num_columns), FOREIGN, dtype=np.int32)
    req_rows = rng.permutation(len(shapes) + 3)[: len(shapes)]
    kv_layer = torch.full((num_slots, 2, num_kv_heads, head_dim), poison, dtype=dtype)
    for row, shape in zip(req_rows, shapes, strict=True):
        end = shape.cached + shape.query_len
        if shape.parent >= 0:
            req_to_token[row, : shape.shared] = req_to_token[req_rows[shape.parent], : shape.shared]
        own = [free.pop(0) for _ in range(end - shape.shared)]
        req_to_token[row, shape.shared : end] = own
        kv_layer[own] = torch.randn(len(own), 2, num_kv_heads, head_dim).to(dtype)
    query_lens = np.array([s.query_len for s in shapes])
    # Queries come as a strided view of the fused product, as in the model.
    fused = torch.randn(int(query_lens.sum()), num_heads + 2 * num_kv_heads, head_dim).to(dtype)
    return Case(
        req_to_token=req_to_token,
        req_rows=req_rows,
        query_lens=query_lens,
        kv_lens=np.array([s.cached + s.query_len for s in shapes]),
        q=fused[:, :num_heads],
        kv_layer=kv_layer,
    )
