"""Paged attention against float64, on random trees of requests and of tokens below them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from kernel_cases import (
    FOREIGN,
    IN_ORDER,
    QUICK_KERNELS,
    RULE,
    SAME_EXAMPLES,
    SCALE,
    Case,
    Exact,
    Rows,
    Shape,
    Tree,
    assert_exact,
    batch_of,
    batches,
    exact_attention,
    in_both_directions,
    make_case,
    shapes,
    with_trees,
)
from support.examples import examples

from agentflow.kernels.attention import torch_attention
from agentflow.kernels.attention.group_attention import attend_dense
from agentflow.kernels.attention.groups import AttentionPlan, ChunkGroup, plan_groups
from agentflow.kernels.inputs import AttentionBatch
from agentflow.kernels.platforms import REFERENCE, TORCH, Kernels

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
Batch = tuple[list[Shape], list[Tree]]
STRETCHES = st.sampled_from([1, 9])
"""The factor of a batch's lengths: longer ones have keys in pieces, and shared prefixes."""
POISONS = st.sampled_from([math.nan, 1e30])
LIMITS = st.fixed_dictionaries(
    {"least_saving": st.sampled_from([0, 1, 20, 400]), "max_gathered": st.sampled_from([40, 60, 16384])}
)
SHARES_50 = {"least_saving": 50}


def planned(case: Case, rows: Rows | None = None, **limits: int) -> AttentionPlan:
    """The plan of torch's kernels."""
    return plan_groups(batch_of(case, rows), case.q.dtype, case.q.device, **limits)


def assert_attends(kernels: Kernels, case: Case, rows: Rows | None = None, **limits: int) -> None:
    """``limits``: of torch's plan."""
    if kernels is TORCH:
        plan = planned(case, rows, **limits)
    else:
        plan = kernels.attention.plan(batch_of(case, rows), case.q.dtype, case.q.device)
    assert_exact(kernels.attention.attend(case.q, case.kv_layer, plan, RULE), case, rows)


def stretched(batch: list[Shape], times: int) -> list[Shape]:
    """The same tree of requests with ``times`` as many cached tokens."""
    return [replace(s, shared=times * s.shared, cached=times * s.cached) for s in batch]


@DTYPES
@pytest.mark.parametrize("length", [2, 40, 400])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(4, 2, 8), (8, 2, 128)])
def test_f11a_the_bound_rejects_small_faults(
    dtype: torch.dtype, length: int, num_heads: int, num_kv_heads: int, head_dim: int
) -> None:
    """It is not so wide that it hides a key that is left out, or a scale that is slightly off."""
    sizes = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    case = make_case([Shape(-1, 0, length - 1, 1)], dtype=dtype, **sizes)
    exact = exact_attention(case)
    assert exact.excess(torch.full_like(exact.out, torch.nan)) > 1
    wrong = exact_attention(replace(case, q=(1.01 if dtype == torch.float32 else 1.1) * case.q))
    assert exact.excess(wrong.out) > 1
    slots = case.req_to_token[case.req_rows[0], :length]
    heaviest = slots[int((case.kv_layer[slots, 0, 0] @ case.q[0, 0]).argmax())]
    case.kv_layer[heaviest, 0, 0] *= -1  # its weight vanishes
    assert exact.excess(exact_attention(case).out) > 1


@given(batches(max_requests=4), st.integers(0, 1000))
def test_the_reference_equals_float64(batch: Batch, seed: int) -> None:
    assert_attends(REFERENCE, *with_trees(make_case(batch[0], seed=seed), batch[1], seed))


@QUICK_KERNELS
@DTYPES
@SAME_EXAMPLES
@given(batches(), STRETCHES, st.integers(0, 1000), POISONS, st.booleans(), LIMITS)
def test_attention_equals_float64(
    kernels: Kernels,
    dtype: torch.dtype,
    batch: Batch,
    times: int,
    seed: int,
    poison: float,
    consecutive: bool,
    limits: dict[str, int],
) -> None:
    longer = stretched(batch[0], times)
    made = make_case(longer, seed=seed, dtype=dtype, poison=poison, consecutive=consecutive)
    assert_attends(kernels, *with_trees(made, batch[1], seed), **limits)


@pytest.mark.parametrize("kernels", [pytest.param(REFERENCE, id="reference"), *QUICK_KERNELS.args[1]])
@DTYPES
@SAME_EXAMPLES
@examples(60)
@given(batches(), STRETCHES, st.integers(0, 1000))
def test_rows_see_each_other_in_both_directions(
    kernels: Kernels, dtype: torch.dtype, batch: Batch, times: int, seed: int
) -> None:
    case, rows = with_trees(make_case(stretched(batch[0], times), seed=seed, dtype=dtype), batch[1], seed)
    assert_attends(kernels, in_both_directions(case, seed), rows)


@pytest.mark.parametrize("kernels", [pytest.param(REFERENCE, id="reference"), *QUICK_KERNELS.args[1]])
@DTYPES
@SAME_EXAMPLES
@examples(40)
@given(
    st.lists(st.integers(1, 200), min_size=1, max_size=5),
    st.sampled_from([8, 64, 72]),
    st.booleans(),
    st.booleans(),
    st.integers(0, 99),
)
@example([1100, 3], 8, True, True, 1)  # more keys than are laid out together
def test_segments_of_an_encoder(
    kernels: Kernels,
    dtype: torch.dtype,
    lens: list[int],
    head_dim: int,
    is_part: bool,
    is_view: bool,
    seed: int,
) -> None:
    """Each row sees its segment. The queries may be a part of the rows, and all may be views."""
    if len(set(lens)) > 1 and seed % 3 == 0:
        lens = lens[:1] * len(lens)  # equal segments are computed together
    sizes = {"head_dim": head_dim, "num_heads": 2, "num_kv_heads": 2}
    case = make_case([Shape(-1, 0, 0, n) for n in lens], seed=seed, dtype=dtype, consecutive=True, **sizes)
    case = replace(case, both_ways=np.ones(len(lens), dtype=np.bool_))
    starts = np.concatenate(([0], np.cumsum(lens)))
    rng, num_rows = np.random.default_rng(seed), sum(lens)
    first = int(rng.integers(num_rows)) if is_part else 0
    end = int(rng.integers(first, num_rows)) + 1 if is_part else num_rows
    queries, kv = case.q[first:end].contiguous(), case.kv_layer[:num_rows].clone()
    if is_view:
        qkv = torch.cat((case.q[:, None], kv), dim=1)
        queries, kv = qkv[first:end, 0], qkv[:, 1:]
    exact = exact_attention(case)
    found = kernels.attention.attend_segments(queries, kv, starts, first, SCALE)
    assert Exact(exact.out[first:end], exact.bound[first:end]).excess(found) <= 1


@pytest.mark.parametrize("kernels", [pytest.param(REFERENCE, id="reference"), *QUICK_KERNELS.args[1]])
@DTYPES
@pytest.mark.parametrize(("num_keys", "place"), [(20, 3), (40, 39), (1025, 1024), (1030, 0), (2048, 1500)])
def test_f37_a_segment_with_a_key_that_is_not_a_number(
    kernels: Kernels, dtype: torch.dtype, num_keys: int, place: int
) -> None:
    """Also if the key is alone in the last group of keys that are laid out together."""
    sizes = {"head_dim": 64, "num_heads": 2, "num_kv_heads": 2}
    case = make_case([Shape(-1, 0, 0, num_keys)], dtype=dtype, consecutive=True, **sizes)
    kv = case.kv_layer[:num_keys].clone()
    kv[place, 0] = math.nan
    queries = case.q[:40].contiguous()  # as many as more than one tile has
    found = kernels.attention.attend_segments(queries, kv, np.array([0, num_keys]), 0, SCALE)
    assert found.isnan().all()


@given(batches(), st.integers(0, 1000))
def test_dense_attention_of_gpus_equals_float64(batch: Batch, seed: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_attention, "attend", attend_dense)
        made = make_case(batch[0], seed=seed)
        assert_attends(TORCH, *with_trees(made, batch[1], seed), least_saving=10)


@QUICK_KERNELS
@DTYPES
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"),
    [(9, 3, 64), (4, 4, 16), (12, 1, 32), (6, 2, 80), (2, 1, 128), (8, 2, 128), (3, 3, 6), (2, 2, 7)],
)
def test_all_shapes_of_heads(
    kernels: Kernels, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    batch = [Shape(-1, 0, 420, 1), Shape(0, 400, 410, 1), Shape(0, 400, 400, 30), Shape(-1, 0, 0, 117)]
    sizes = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    assert_attends(kernels, make_case(batch, dtype=dtype, **sizes), **SHARES_50)


@QUICK_KERNELS
@pytest.mark.parametrize(
    "batch",
    [
        [Shape(-1, 0, 3000, 1)],
        [Shape(-1, 0, 600, 1), *[Shape(0, 600, 600, 1)] * 39],
        [Shape(-1, 0, 300, 300)],
    ],
    ids=["one long request", "40 over one prefix", "a chunk in several blocks"],
)
def test_long_keys_in_bfloat16(kernels: Kernels, batch: list[Shape]) -> None:
    sizes = {"num_heads": 9, "num_kv_heads": 3, "head_dim": 64}
    assert_attends(kernels, make_case(batch, dtype=torch.bfloat16, **sizes))


@QUICK_KERNELS
def test_scores_of_any_size_give_weights(kernels: Kernels) -> None:
    """Scores in the thousands, of either sign: the largest decides, and nothing is infinite."""
    case = make_case([Shape(-1, 0, 300, 1), Shape(-1, 0, 200, 40)])
    case.q.mul_(1000)
    assert_attends(kernels, case)


@QUICK_KERNELS
def test_a_row_of_infinite_keys_is_lost_alone(kernels: Kernels) -> None:
    case = make_case([Shape(-1, 0, 30, 1), Shape(-1, 0, 40, 1)])
    case.kv_layer[case.req_to_token[case.req_rows[0], 7]] = math.nan
    plan = kernels.attention.plan(batch_of(case), case.q.dtype, case.q.device)
    out = kernels.attention.attend(case.q, case.kv_layer, plan, RULE)
    assert out[0].isnan().all()
    exact = exact_attention(case)
    assert ((out[1].double() - exact.out[1]).abs() <= exact.bound[1]).all()


@QUICK_KERNELS
@DTYPES
@pytest.mark.parametrize("num_keys", [1, 7, 15, 16, 40])
def test_f37_a_row_without_a_score_that_is_a_number(
    kernels: Kernels, dtype: torch.dtype, num_keys: int
) -> None:
    """All keys are NaN, but no value, as with damaged weights: zeros would look like a result."""
    sizes = {"head_dim": 16, "num_heads": 2, "num_kv_heads": 2}
    case = make_case([Shape(-1, 0, num_keys - 1, 1)], dtype=dtype, consecutive=True, **sizes)
    case.kv_layer[:, 0] = math.nan
    plan = kernels.attention.plan(batch_of(case), dtype, case.q.device)
    assert kernels.attention.attend(case.q, case.kv_layer, plan, RULE).isnan().all()
    kv, starts = case.kv_layer[:num_keys], np.array([0, num_keys])
    assert kernels.attention.attend_segments(case.q.contiguous(), kv, starts, 0, SCALE).isnan().all()


@QUICK_KERNELS
def test_many_rows_over_one_prefix(kernels: Kernels) -> None:
    """More rows than one task or group has share a run, next to requests down to one token."""
    shared = [Shape(-1, 0, 300, 1), *[Shape(0, 290, 290 + i % 7, 1 + i % 3) for i in range(150)]]
    case = make_case([*shared, Shape(-1, 0, 0, 1), Shape(-1, 0, 1, 1)])
    assert_attends(kernels, case)


@QUICK_KERNELS
def test_arrays_of_any_stride(kernels: Kernels) -> None:
    """A page table that is a part of a wider one, and queries in another order of memory."""
    case = make_case([Shape(-1, 0, 90, 1), Shape(0, 80, 85, 3)])
    wide = np.full((case.req_to_token.shape[0], case.req_to_token.shape[1] + 7), 2**31 - 1, dtype=np.int32)
    wide[:, : case.req_to_token.shape[1]] = case.req_to_token
    queries = case.q.transpose(1, 2).contiguous().transpose(1, 2)
    part = replace(case, req_to_token=wide[:, : case.req_to_token.shape[1]], q=queries)
    assert_attends(kernels, part)
    case, rows = with_trees(case, [Tree(0, (-1, 0, 0, 1)), Tree(1, (-1, 0))], 0)
    assert rows is not None
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
    plan = kernels.attention.plan(batch_of(case), dtype, case.q.device)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "get_num_threads", lambda: data.draw(st.integers(1, 3)))
        expected = kernels.attention.attend(case.q, case.kv_layer, plan, RULE)
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
    plan = kernels.attention.plan(part, dtype, case.q.device)
    assert torch.equal(kernels.attention.attend(case.q[rows], case.kv_layer, plan, RULE), expected[rows])


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
    plan = kernels.attention.plan(batch_of(case), torch.bfloat16, case.q.device)
    together = kernels.attention.attend(case.q, case.kv_layer, plan, RULE)
    for r in (0, num_requests // 2, num_requests):
        one = slice(r, r + 1)
        alone = AttentionBatch(
            case.req_to_token, case.req_rows[one], case.query_lens[one], case.kv_lens[one], None
        )
        plan = kernels.attention.plan(alone, torch.bfloat16, case.q.device)
        assert torch.equal(kernels.attention.attend(case.q[one], case.kv_layer, plan, RULE), together[one])


def sizes(groups: Sequence[ChunkGroup]) -> list[tuple[int, int, int]]:
    """The chunks of each group, and the rows and slots of each chunk."""
    return [(n := g.num_chunks, len(g.rows) // n, len(g.slots) // n) for g in groups]


@pytest.mark.parametrize(
    ("batch", "trees", "shared", "tails"),
    [
        pytest.param(
            [Shape(-1, 0, 1001, 1), *[Shape(0, 1000, 1001, 1)] * 3, *[Shape(0, 1000, 1000, 6)] * 2],
            [],
            [(1, 16, 1000)],
            [(2, 6, 6), (4, 1, 2)],
            id="a shared prefix is read once for decode rows and chunks",
        ),
        pytest.param(
            [Shape(-1, 0, 40 + i, 1) for i in range(8)], [], [], [(8, 1, 48)], id="requests of similar length"
        ),
        pytest.param(
            [Shape(-1, 0, 30, 1), Shape(-1, 0, 900, 1), Shape(-1, 0, 33, 1)],
            [],
            [],
            [(1, 1, 901), (2, 1, 34)],
            id="no padding to a long request",
        ),
        pytest.param(
            [Shape(-1, 0, 60, 3), Shape(-1, 0, 80, 1), Shape(-1, 0, 70, 2)],
            [],
            [],
            [(2, 3, 72), (1, 1, 81)],
            id="chunks of a few rows share one group",
        ),
        pytest.param(
            [Shape(-1, 0, 100, 600)],
            [],
            [],
            [(1, 256, 612), (1, 256, 356), (1, 88, 700)],
            id="a long chunk is cut, and each block reads the keys before it",
        ),
        pytest.param(
            [Shape(-1, 0, 2999, 1)],
            [Tree(0, (-1, -1, 0, 1, 2))],
            [(1, 6, 2999)],
            [(1, 5, 6), (1, 1, 1)],
            id="a tree and the last token of its prefix read the prefix once",
        ),
        pytest.param(
            [Shape(-1, 0, 501, 1), *[Shape(0, 500, 500, 1)] * 3],
            [Tree(1, (-1, 0)), Tree(2, (-1, -1, 1)), Tree(3, (-1,), is_alone=True)],
            [(1, 9, 500)],
            [(2, 3, 4), (4, 1, 2)],
            id="trees and decode rows read one prefix once",
        ),
        pytest.param(
            [Shape(-1, 0, 30, 1)],
            [Tree(0, (-1, -1, 0))],
            [],
            [(1, 3, 34), (1, 1, 31)],
            id="a tree reads a short prefix itself",
        ),
    ],
)
def test_groups_of_torch(
    batch: list[Shape],
    trees: list[Tree],
    shared: list[tuple[int, int, int]],
    tails: list[tuple[int, int, int]],
) -> None:
    case, rows = with_trees(make_case(batch), trees, 0)
    plan = planned(case, rows)
    assert (sizes(plan.shared_groups), sizes(plan.tails)) == (shared, tails)
    assert_attends(TORCH, case, rows)


@given(batches(max_requests=4), STRETCHES, st.integers(0, 1000))
@examples(20)
def test_a_group_of_torch_gathers_a_bounded_number_of_slots(batch: Batch, times: int, seed: int) -> None:
    """Besides the rows of the batch, for any length of the texts before them."""
    most = 100
    case, rows = with_trees(make_case(stretched(batch[0], times), seed=seed), batch[1], seed)
    plan = planned(case, rows, max_gathered=most)
    new = int(case.query_lens.max(initial=0)) + (0 if rows is None else rows.paths.size)
    assert all(len(group.slots) // group.num_chunks <= most + new for group in plan.tails)
    assert all(len(group.slots) <= most for group in plan.shared_groups)
    assert_attends(TORCH, case, rows, max_gathered=most)


@QUICK_KERNELS
def test_large_trees(kernels: Kernels) -> None:
    """Also longer than one pass of a kernel."""
    batch = [Shape(-1, 0, 300 + r, 1) for r in range(4)]
    nodes = [3, 600, 70, 4]
    trees = [Tree(r, tuple(n // 2 - 1 for n in range(size))) for r, size in enumerate(nodes)]
    case = make_case([*batch, Shape(-1, 0, 1000, 1)])  # a pool with room for the nodes
    case.req_to_token[case.req_rows[4], :1001] = FOREIGN
    left = replace(case, req_rows=case.req_rows[:4], query_lens=case.query_lens[:4], kv_lens=case.kv_lens[:4])
    assert_attends(kernels, *with_trees(left, trees, 0))
