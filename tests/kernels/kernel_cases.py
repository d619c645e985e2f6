"""Random batches for the attention kernels: requests whose slots form a tree, in a poisoned pool."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import math
import os
import random
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from hypothesis import seed, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from agentflow.kernels import native_library, platforms
from agentflow.kernels.attention.backend import AttentionRule
from agentflow.kernels.attention.shared_runs import with_trees as requests_and_trees
from agentflow.kernels.inputs import AttentionBatch, SharedPrefix
from agentflow.kernels.native_library import AVX512_BF16, LEVELS, cpu_flags

FOREIGN = 2**31 - 1
"""The value of req_to_token where no token is: reading a slot of this number fails immediately."""


BEST_LEVEL = next((level for level, need in reversed(LEVELS.items()) if cpu_flags().issuperset(need)), "")


def quick_flags(level: str) -> tuple[str, ...]:
    """The compiler's options for a level in tests. The best one is compiled as users have it; the others,
    which only tests load here, at ``-O1``, which takes less than half of the time. ``make test-full``
    compiles all as users have them."""
    if level == BEST_LEVEL or "FULL_KERNELS" in os.environ:
        return native_library.FLAGS
    return tuple("-O1" if flag == "-O3" else flag for flag in native_library.FLAGS)


IS_TRAPPED = cpu_flags().issuperset(AVX512_BF16) and BEST_LEVEL != "amx"
"""Whether the instructions of AMX are trapped and carried out (``trapped_tiles.cpp``): this processor lacks
them, but no other that the code for AMX needs."""


def compiled(source: Path, *flags: str) -> Path:
    """Compiles a file of tests, once on this machine for each version of it and of the kernels."""
    command = [*native_library.compiler(), "-std=c++20", "-mavx2", "-Wall", "-Wextra", "-Werror", *flags]
    name = native_library._file_name(source.stem, [*command, source.read_text()])
    made = native_library.library_folder() / name
    if not made.exists():
        made.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=made.parent) as folder:
            part = Path(folder) / name
            subprocess.run([*command, f"-I{native_library.SOURCES}", source, "-o", part], check=True)
            part.replace(made)
    return made


@functools.cache
def trapped_tiles() -> ctypes.CDLL:
    """Carries out AMX's instructions. It stays in this process."""
    source = Path(__file__).parent / "native_ops/trapped_tiles.cpp"
    made = compiled(source, "-O3", "-fPIC", "-shared")
    return ctypes.CDLL(str(made), mode=ctypes.RTLD_GLOBAL)  # for ``trapped_syscall``


class AtLevel:
    """An object whose functions run with the native kernels of one level of instructions."""

    def __init__(self, level: str, inner: Any) -> None:
        self.level = level
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if type(found).__module__.startswith("agentflow."):
            return AtLevel(self.level, found)
        if not callable(found):
            return found

        def at_level(*args: Any, **options: Any) -> Any:
            with pytest.MonkeyPatch.context() as patch:
                use_level(patch, self.level)
                return found(*args, **options)

        return at_level


def use_level(patch: pytest.MonkeyPatch, level: str) -> None:
    """Selects the native kernels of a level, where its instructions are present or trapped."""
    patch.setenv("AGENTFLOW_CPU", level)
    flags = quick_flags(level)
    if level == "amx" and IS_TRAPPED:
        trapped_tiles()
        flags = (*flags, "-Dsyscall=trapped_syscall")  # which gives the right to use tiles
        patch.setattr(native_library, "cpu_flags", lambda: frozenset(LEVELS["amx"]))
    patch.setattr(native_library, "FLAGS", flags)


class NativeAt(AtLevel):
    """The native kernels, compiled for a level of instructions that may be lower than the processor's."""

    def __init__(self, level: str) -> None:
        super().__init__(level, platforms.NATIVE)


NATIVE = [
    NativeAt(level)
    for level, needed in LEVELS.items()
    if cpu_flags().issuperset(needed) or (level == "amx" and IS_TRAPPED)
]
"""At every level that can run here."""
# The levels below and above avx512_vnni compile the same code, too.
NATIVE_PARAMS = [
    pytest.param(
        made,
        id=f"native-{made.level}",
        marks=[pytest.mark.full] if made.level == "avx512_vnni" != BEST_LEVEL else [],
    )
    for made in NATIVE
]
NATIVE_KERNELS = pytest.mark.parametrize("kernels", NATIVE_PARAMS)
IN_ORDER = pytest.mark.parametrize("kernels", [made for made in NATIVE_PARAMS if "amx" not in str(made.id)])
"""Those whose sums have the same order whatever a batch has. AMX's tiles have another one for many rows."""
SAME_EXAMPLES = seed(0 if settings.default.derandomize else random.SystemRandom().getrandbits(32))
"""Gives all parameters of a test the same examples, so that they share what is expected of them."""
QUICK_KERNELS = pytest.mark.parametrize(
    "kernels", [pytest.param(platforms.TORCH, id="torch"), *NATIVE_PARAMS]
)


@dataclass(frozen=True)
class Shape:
    """Sizes of a request in a batch: the first ``shared`` of its ``cached`` tokens are shared with request
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
    both_ways: NDArray[np.bool_] | None = None


@st.composite
def shapes(draw: st.DrawFn, max_requests: int = 7) -> list[Shape]:
    """Decoding requests and chunks, in any order, some sharing a prefix with an earlier one."""
    made: list[Shape] = []
    for i in range(draw(st.integers(1, max_requests))):
        parent = draw(st.integers(-1, i - 1))
        # A request shares only tokens that its parent had computed before this batch.
        shared = draw(st.integers(0, made[parent].cached)) if parent >= 0 else 0
        cached = shared + draw(st.integers(0, 40))
        query_len = draw(st.just(1) | st.integers(1, 24))
        made.append(Shape(parent, shared, cached, query_len))
    return made


def make_case(
    shapes: Sequence[Shape],
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
    free = np.arange(num_slots) if consecutive else rng.permutation(num_slots)
    num_columns = max(s.cached + s.query_len for s in shapes) + 5
    req_to_token = np.full((len(shapes) + 3, num_columns), FOREIGN, dtype=np.int32)
    req_rows = rng.permutation(len(shapes) + 3)[: len(shapes)]
    kv_layer = torch.full((num_slots, 2, num_kv_heads, head_dim), poison, dtype=dtype)
    for row, shape in zip(req_rows, shapes, strict=True):
        end = shape.cached + shape.query_len
        if shape.parent >= 0:
            req_to_token[row, : shape.shared] = req_to_token[req_rows[shape.parent], : shape.shared]
        own, free = np.split(free, [end - shape.shared])
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


@dataclass(frozen=True)
class Rows:
    """The rows of trees: ``TreeAttention``."""

    req_rows: NDArray[np.int64]
    prefix_lens: NDArray[np.int64]
    query_lens: NDArray[np.int64]
    paths: NDArray[np.int64]
    path_lens: NDArray[np.int64]


def batch_of(case: Case, rows: Rows | None = None) -> AttentionBatch:
    """The batch with all prefixes that its requests share."""
    batch = AttentionBatch(
        *(case.req_to_token, case.req_rows, case.query_lens, case.kv_lens, rows), both_ways=case.both_ways
    )
    req_rows, _, cached = requests_and_trees(batch)
    return replace(batch, shared=shared_prefixes(case.req_to_token, req_rows, cached))


def shared_prefixes(
    table: NDArray[np.int32], req_rows: NDArray[np.int64], lens: NDArray[np.int64]
) -> list[SharedPrefix]:
    """All prefixes that rows of the table share, of which ``lens`` may be shared, by a comparison of every
    pair."""
    rows = np.array([*dict.fromkeys(req_rows.tolist())], dtype=np.int64)
    sizes = np.array([lens[req_rows == row].max() for row in rows], dtype=np.int64)
    places = np.arange(sizes.max(initial=0))
    slots = table[rows][:, places]
    found = set()
    for size, own in zip(sizes, slots, strict=True):
        differs = (slots != own) | (places >= np.minimum(size, sizes)[:, None])
        common = np.where(differs.any(axis=1), differs.argmax(axis=1), len(places)) if len(places) else sizes
        found |= {(end, tuple(rows[common >= end].tolist())) for end in set(common.tolist()) - {0}}
    return [(end, np.array(sharing)) for end, sharing in sorted(found)]


@dataclass(frozen=True)
class Tree:
    """A tree below all tokens of request ``owner``: node n hangs below node ``parents[n]`` (-1: the prefix).
    The nodes from ``first`` on are rows of the batch. ``is_alone``: the request has no rows itself."""

    owner: int
    parents: tuple[int, ...]
    first: int = 0
    is_alone: bool = False

    def path(self, node: int) -> list[int]:
        return [*self.path(self.parents[node]), node] if node >= 0 else []


@st.composite
def trees_below(draw: st.DrawFn, num_requests: int) -> list[Tree]:
    owners = draw(st.lists(st.integers(0, num_requests - 1), min_size=1, max_size=3, unique=True))
    made = []
    for owner in sorted(owners):
        size = draw(st.integers(1, 12))
        parents = tuple(draw(st.integers(-1, n - 1)) for n in range(size))
        made.append(Tree(owner, parents, draw(st.integers(0, size - 1)), draw(st.booleans())))
    return made


@st.composite
def batches(draw: st.DrawFn, max_requests: int = 7) -> tuple[list[Shape], list[Tree]]:
    made = draw(shapes(max_requests))
    return made, draw(st.just([]) | trees_below(len(made)))


def with_trees(case: Case, trees: list[Tree], seed: int) -> tuple[Case, Rows | None]:
    """The trees' nodes in free slots; requests that are alone leave the batch."""
    if not trees:
        return case, None
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed + 1)
    kv_heads, head_dim = case.kv_layer.shape[2:]
    used = set(case.req_to_token.ravel().tolist())
    free = rng.permutation([slot for slot in range(len(case.kv_layer)) if slot not in used]).tolist()
    paths: list[list[int]] = []
    for tree in trees:
        slots = [free.pop() for _ in tree.parents]
        case.kv_layer[slots] = torch.randn(len(slots), 2, kv_heads, head_dim).to(case.kv_layer.dtype)
        paths += [[slots[n] for n in tree.path(node)] for node in range(tree.first, len(tree.parents))]
    longest = max(map(len, paths)) + 1
    owners = np.array([tree.owner for tree in trees])
    rows = Rows(
        req_rows=case.req_rows[owners],
        prefix_lens=case.kv_lens[owners],
        query_lens=np.array([len(tree.parents) - tree.first for tree in trees]),
        paths=np.array([path + [path[-1]] * (longest - len(path)) for path in paths]),
        path_lens=np.array([len(path) for path in paths]),
    )
    left_out = [tree.owner for tree in trees if tree.is_alone]
    stays = np.array([r not in left_out for r in range(len(case.req_rows))])
    query_lens = case.query_lens[stays]
    num_rows = int(query_lens.sum() + rows.query_lens.sum())
    fused = torch.randn(num_rows, case.q.shape[1] + 2 * kv_heads, head_dim).to(case.q.dtype)
    return (
        replace(
            case,
            req_rows=case.req_rows[stays],
            query_lens=query_lens,
            kv_lens=case.kv_lens[stays],
            both_ways=None if case.both_ways is None else case.both_ways[stays],
            q=fused[:, : case.q.shape[1]],
        ),
        rows,
    )


def seen_by_all(case: Case, rows: Rows | None = None) -> list[list[int]]:
    """The slots that each row of the batch sees."""
    seen = []
    both_ways = [False] * len(case.req_rows) if case.both_ways is None else case.both_ways.tolist()
    for req_row, query_len, kv_len, sees_all in zip(
        case.req_rows, case.query_lens, case.kv_lens, both_ways, strict=True
    ):
        slots = case.req_to_token[req_row, :kv_len].tolist()
        seen += [slots if sees_all else slots[: kv_len - query_len + i + 1] for i in range(query_len)]
    if rows is None:
        return seen
    for tree, count in enumerate(rows.query_lens):
        prefix = case.req_to_token[rows.req_rows[tree], : rows.prefix_lens[tree]].tolist()
        first = int(rows.query_lens[:tree].sum())
        seen += [prefix + rows.paths[b, : rows.path_lens[b]].tolist() for b in range(first, first + count)]
    return seen


def in_both_directions(case: Case, seed: int) -> Case:
    """The case with some requests, at random, whose rows see each other."""
    return replace(case, both_ways=np.random.default_rng(seed).random(len(case.req_rows)) < 0.5)


SCALE = 0.3
"""Of the scores in all cases."""
RULE = AttentionRule(SCALE)
EXP_ERROR = {torch.float32: 2e-7, torch.float16: 2e-7, torch.bfloat16: 5e-5}
"""The relative error of a weight before it is rounded. Polynomials are shorter where bfloat16 follows."""


@dataclass(frozen=True)
class Exact:
    """Attention in float64, and the error that arithmetic in the case's dtype may have, both [T, heads *
    head_dim]."""

    out: torch.Tensor
    bound: torch.Tensor

    def excess(self, result: torch.Tensor) -> float:
        """The largest error, in bounds; infinite if a result is not a number."""
        excess = ((result.double() - self.out).abs() / self.bound).nan_to_num(nan=math.inf)
        return float(excess.max())


ResultT = TypeVar("ResultT")
_EXPECTED: dict[tuple[object, ...], Any] = {}


def once(compute: Callable[[], ResultT], case: Case, rows: Rows | None, *what: object) -> ResultT:
    """The result of ``compute``, which depends on the case and on ``what``. It is computed only once for all
    implementations, which get the same examples."""
    content = hashlib.sha256()
    arrays = [case.req_to_token, case.req_rows, case.query_lens, case.kv_lens, case.both_ways]
    arrays += [] if rows is None else [getattr(rows, field.name) for field in fields(rows)]
    for array in arrays:
        content.update(repr(array is None or (array.shape, array.dtype)).encode())
        content.update(b"" if array is None else array.tobytes())
    for tensor in (case.q, case.kv_layer):
        content.update(f"{tensor.shape} {tensor.dtype}".encode())
        content.update(tensor.contiguous().view(torch.uint8).numpy())
    key = (content.digest(), *what)
    if key not in _EXPECTED:
        if len(_EXPECTED) >= 200:
            _EXPECTED.clear()
        _EXPECTED[key] = compute()
    return _EXPECTED[key]


def exact_attention(case: Case, rows: Rows | None = None) -> Exact:
    """``computed_exactly``, once."""
    return once(lambda: computed_exactly(case, rows), case, rows, "exact")


def computed_exactly(case: Case, rows: Rows | None) -> Exact:
    """Computes attention in float64, and bounds its error from lengths and head size.

    A sum of n products in float32 has an error of at most ``gamma(n)`` times the sum of their absolute
    values, with high probability (Higham and Mary 2019, SIAM J. Sci. Comput. 41(5), theorem 2.4). It moves a
    score, and the weight relatively by as much. Weights and results are rounded to the dtype. To the first
    order; a factor of 1.1 covers the rest.
    """
    unit = torch.finfo(case.q.dtype).eps / 2
    narrow = 0.0 if case.q.dtype == torch.float32 else 2 * unit
    outs, bounds = [], []
    for begin, end, slots, lens in blocks_of(seen_by_all(case, rows)):
        q = case.q[begin:end].double()
        kv = case.kv_layer[slots].double().repeat_interleave(q.shape[1] // case.kv_layer.shape[2], dim=2)
        is_seen = torch.arange(len(slots)) < torch.tensor(lens)[:, None, None]
        scores = SCALE * torch.einsum("rhd,shd->rhs", q, kv[:, 0])
        sizes = SCALE * torch.einsum("rhd,shd->rhs", q.abs(), kv[:, 0].abs())
        # Errors of a score: in its sum, its rounded products, and its distance from the maximum.
        largest = sizes.where(is_seen, 0).amax(-1, keepdim=True)
        score_errors = gamma(q.shape[2]) * sizes + 4 * FLOAT32_UNIT * largest
        errors = score_errors + EXP_ERROR[case.q.dtype] + narrow
        weights = scores.where(is_seen, -math.inf).softmax(-1)
        values, value_sizes = kv[:, 1], kv[:, 1].abs()
        out = torch.einsum("rhs,shd->rhd", weights, values)
        of_weights = torch.einsum("rhs,shd->rhd", weights * errors, value_sizes)
        of_total = (weights * errors).sum(-1, keepdim=True) * out.abs()
        gammas = torch.tensor([gamma(length) for length in lens], dtype=torch.float64)[:, None, None]
        of_sums = 2 * gammas * torch.einsum("rhs,shd->rhd", weights, value_sizes)
        outs.append(out.flatten(1))
        bounds.append((1.1 * (of_weights + of_total + of_sums) + 2 * unit * out.abs()).flatten(1))
    return Exact(torch.cat(outs), torch.cat(bounds) + torch.finfo(torch.float32).tiny)


def blocks_of(seen: list[list[int]]) -> Iterator[tuple[int, int, list[int], list[int]]]:
    """Consecutive rows of which each sees all slots of the row before, and perhaps more: the first of them,
    the end, the slots that the last one sees, and how many of these each sees."""
    begin = 0
    for end in range(1, len(seen) + 1):
        if end == len(seen) or end - begin == 64 or seen[end][: len(seen[end - 1])] != seen[end - 1]:
            yield begin, end, seen[end - 1], [*map(len, seen[begin:end])]
            begin = end


FLOAT32_UNIT = 2.0**-24


def gamma(num: int) -> float:
    """The relative error of a float32 sum of ``num`` products."""
    return 6 * math.sqrt(num + 2) * FLOAT32_UNIT


def assert_exact(result: torch.Tensor, case: Case, rows: Rows | None = None) -> None:
    """The attention of a case is within its error's bound."""
    assert result.dtype == case.q.dtype
    assert exact_attention(case, rows).excess(result) <= 1


if __name__ == "__main__":  # .ci/run compiles the tests' kernels while it installs packages
    for made, param in zip(NATIVE, NATIVE_PARAMS, strict=True):
        if not param.marks:
            with pytest.MonkeyPatch.context() as patch:
                use_level(patch, made.level)
                native_library.load_library(made.level)
    if IS_TRAPPED:  # one test has them where nothing traps tiles
        native_library.FLAGS = quick_flags("amx")
        native_library.load_library("amx")
