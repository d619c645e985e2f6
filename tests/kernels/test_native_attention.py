"""The native kernels' attention, which plans for itself, on random trees of requests, against float64."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import (
    IN_ORDER,
    NATIVE_KERNELS,
    SCALE,
    Case,
    Rows,
    Shape,
    assert_exact,
    exact_attention,
    make_case,
    shapes,
)
from test_tree_attention import Tree, batches, with_trees

from agentflow.kernels.inputs import AttentionBatch
from agentflow.kernels.ops import Kernels

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
STRETCHES = st.sampled_from([1, 9])
"""How many times longer than small a batch is: so long that keys are cut into pieces and prefixes shared."""


def batch_of(case: Case, rows: Rows | None = None) -> AttentionBatch:
    return AttentionBatch(case.req_to_token, case.req_rows, case.query_lens, case.kv_lens, rows)


def assert_attends(kernels: Kernels, case: Case, rows: Rows | None = None) -> None:
    plan = kernels.plan_attention(batch_of(case, rows), case.q.dtype, case.q.device)
    assert_exact(kernels.attention(case.q, case.kv_layer, plan, SCALE), case, rows)


def stretched(batch: list[Shape], times: int) -> list[Shape]:
    """The same tree of requests with all that is cached so many times as long."""
    return [replace(s, shared=times * s.shared, cached=times * s.cached) for s in batch]


@NATIVE_KERNELS
@DTYPES
@given(shapes(), STRETCHES, st.integers(0, 1000), st.sampled_from([math.nan, 1e30]), st.booleans())
def test_attention_equals_float64(
    kernels: Kernels,
    dtype: torch.dtype,
    batch: list[Shape],
    times: int,
    seed: int,
    poison: float,
    consecutive: bool,
) -> None:
    longer = stretched(batch, times)
    case = make_case(longer, seed=seed, dtype=dtype, poison=poison, consecutive=consecutive)
    assert_attends(kernels, case)


@NATIVE_KERNELS
@DTYPES
@given(batches(), STRETCHES, st.integers(0, 1000), st.sampled_from([math.nan, 1e30]))
def test_attention_of_trees_equals_float64(
    kernels: Kernels,
    dtype: torch.dtype,
    batch: tuple[list[Shape], list[Tree]],
    times: int,
    seed: int,
    poison: float,
) -> None:
    made = make_case(stretched(batch[0], times), seed=seed, dtype=dtype, poison=poison)
    case, rows = with_trees(made, batch[1], seed)
    assert_attends(kernels, case, rows)


@NATIVE_KERNELS
@DTYPES
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"),
    [(9, 3, 64), (4, 4, 16), (12, 1, 32), (6, 2, 80), (2, 1, 128), (8, 2, 128), (3, 3, 6)],
)
def test_all_shapes_of_heads(
    kernels: Kernels, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    batch = [Shape(-1, 0, 420, 1), Shape(0, 400, 410, 1), Shape(0, 400, 400, 30), Shape(-1, 0, 0, 117)]
    sizes = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    assert_attends(kernels, make_case(batch, dtype=dtype, **sizes))


@NATIVE_KERNELS
@pytest.mark.parametrize(
    "batch",
    [[Shape(-1, 0, 3000, 1)], [Shape(-1, 0, 600, 1), *[Shape(0, 600, 600, 1)] * 39]],
    ids=["one long request", "40 over one prefix"],
)
def test_long_keys_in_bfloat16(kernels: Kernels, batch: list[Shape]) -> None:
    sizes = {"num_heads": 9, "num_kv_heads": 3, "head_dim": 64}
    assert_attends(kernels, make_case(batch, dtype=torch.bfloat16, **sizes))


@NATIVE_KERNELS
def test_scores_of_any_size_give_weights(kernels: Kernels) -> None:
    """Scores in the thousands, of either sign: the largest decides, and nothing is infinite."""
    case = make_case([Shape(-1, 0, 300, 1), Shape(-1, 0, 200, 40)])
    case.q.mul_(1000)
    assert_attends(kernels, case)


@NATIVE_KERNELS
def test_a_row_of_infinite_keys_is_lost_alone(kernels: Kernels) -> None:
    case = make_case([Shape(-1, 0, 30, 1), Shape(-1, 0, 40, 1)])
    case.kv_layer[case.req_to_token[case.req_rows[0], 7]] = math.nan
    out = kernels.attention(case.q, case.kv_layer, batch_of(case), 0.3)
    assert out[0].isnan().all()
    exact = exact_attention(case)
    assert ((out[1].double() - exact.out[1]).abs() <= exact.bound[1]).all()


@NATIVE_KERNELS
def test_many_rows_over_one_prefix_and_none_over_it(kernels: Kernels) -> None:
    """More rows than one task processes share a run, beside requests of other lengths down to one token."""
    shared = [Shape(-1, 0, 300, 1), *[Shape(0, 290, 290 + i % 7, 1 + i % 3) for i in range(150)]]
    case = make_case([*shared, Shape(-1, 0, 0, 1), Shape(-1, 0, 1, 1)])
    assert_attends(kernels, case)


@NATIVE_KERNELS
def test_arrays_of_any_stride_are_read_right(kernels: Kernels) -> None:
    """A page table that is a part of a wider one, and queries in another order of memory."""
    case = make_case([Shape(-1, 0, 90, 1), Shape(0, 80, 85, 3)])
    wide = np.full((case.req_to_token.shape[0], case.req_to_token.shape[1] + 7), 2**31 - 1, dtype=np.int32)
    wide[:, : case.req_to_token.shape[1]] = case.req_to_token
    queries = case.q.transpose(1, 2).contiguous().transpose(1, 2)
    part = replace(case, req_to_token=wide[:, : case.req_to_token.shape[1]], q=queries)
    assert_attends(kernels, part)
    case, rows = with_trees(case, [Tree(0, (-1, 0, 0, 1)), Tree(1, (-1, 0))], 0)
    assert_attends(kernels, case, replace(rows, paths=np.asfortranarray(rows.paths)))


HEADS = st.sampled_from([(4, 2, 8), (9, 3, 64), (4, 4, 64), (6, 2, 128)])


@IN_ORDER
@DTYPES
@given(st.data(), shapes(), st.sampled_from([1, 5, 12]), HEADS, st.integers(0, 1000))
def test_f36a_a_row_is_the_same_in_any_company_and_chunk(
    kernels: Kernels,
    dtype: torch.dtype,
    data: st.DataObject,
    batch: list[Shape],
    times: int,
    heads: tuple[int, int, int],
    seed: int,
) -> None:
    """To the last bit: prefixes that are shared or not, chunks, and the number of threads change nothing."""
    num_heads, num_kv_heads, head_dim = heads
    case = make_case(
        stretched(batch, times),
        seed=seed,
        dtype=dtype,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
    )
    plan = kernels.plan_attention(batch_of(case), dtype, case.q.device)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "get_num_threads", lambda: data.draw(st.integers(1, 3)))
        expected = kernels.attention(case.q, case.kv_layer, plan, SCALE)
    first_rows = np.cumsum(case.query_lens) - case.query_lens
    members = data.draw(st.lists(st.sampled_from(range(len(batch))), min_size=1, unique=True))
    begins = [data.draw(st.integers(0, case.query_lens[m] - 1)) for m in members]
    ends = [data.draw(st.integers(b + 1, case.query_lens[m])) for m, b in zip(members, begins, strict=True)]
    rows = np.concatenate(
        [first_rows[m] + np.arange(b, e) for m, b, e in zip(members, begins, ends, strict=True)]
    )
    part = AttentionBatch(
        case.req_to_token,
        case.req_rows[members],
        np.subtract(ends, begins),
        case.kv_lens[members] - case.query_lens[members] + ends,
        None,
    )
    plan = kernels.plan_attention(part, dtype, case.q.device)
    assert torch.equal(kernels.attention(case.q[rows], case.kv_layer, plan, SCALE), expected[rows])


@IN_ORDER
@given(st.integers(2, 40), st.integers(16, 400), st.integers(1, 150), st.integers(0, 1000))
def test_f36b_a_short_prefix_that_many_share_changes_no_bit(
    kernels: Kernels, num_requests: int, shared: int, own: int, seed: int
) -> None:
    """Also where it ends within a block of keys, of which its rows share the layout only."""
    made = [
        Shape(-1, 0, shared + own, 1),
        *[Shape(0, shared, shared + own + i % 3, 1) for i in range(num_requests)],
    ]
    case = make_case(made, seed=seed, dtype=torch.bfloat16, num_heads=6, num_kv_heads=2, head_dim=64)
    plan = kernels.plan_attention(batch_of(case), torch.bfloat16, case.q.device)
    together = kernels.attention(case.q, case.kv_layer, plan, SCALE)
    for r in (0, num_requests // 2, num_requests):
        one = slice(r, r + 1)
        alone = AttentionBatch(
            case.req_to_token, case.req_rows[one], case.query_lens[one], case.kv_lens[one], None
        )
        plan = kernels.plan_attention(alone, torch.bfloat16, case.q.device)
        assert torch.equal(kernels.attention(case.q[one], case.kv_layer, plan, SCALE), together[one])
