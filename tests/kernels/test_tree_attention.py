"""Tree attention: trees of tokens below the prefixes of a random batch, against float64."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import FOREIGN, SCALE, Case, Rows, Shape, assert_exact, make_case, shapes

from agentflow.kernels import reference_ops, torch_ops
from agentflow.kernels.attention_plan import AttentionPlan, plan_attention


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
def batches(draw: st.DrawFn) -> tuple[list[Shape], list[Tree]]:
    made = draw(shapes(max_requests=5))
    return made, draw(trees_below(len(made)))


def with_trees(case: Case, trees: list[Tree], seed: int) -> tuple[Case, Rows]:
    """The trees' nodes in free slots; requests that are alone leave the batch."""
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
            q=fused[:, : case.q.shape[1]],
        ),
        rows,
    )


def planned(case: Case, rows: Rows, **limits: int) -> AttentionPlan:
    return plan_attention(
        case.req_to_token,
        case.req_rows,
        case.query_lens,
        case.kv_lens,
        dtype=case.q.dtype,
        device=case.q.device,
        trees=rows,
        **limits,
    )


@given(batches(), st.integers(0, 1000))
def test_the_reference_equals_float64(batch: tuple[list[Shape], list[Tree]], seed: int) -> None:
    case, rows = with_trees(make_case(batch[0], seed=seed), batch[1], seed)
    assert_exact(reference_ops.attention(case.q, case.kv_layer, planned(case, rows), SCALE), case, rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@given(
    batches(),
    st.integers(0, 1000),
    st.sampled_from([math.nan, 1e30]),
    st.sampled_from([0, 1, 20, 400]),
    st.sampled_from([1, 60, 16384]),
    st.sampled_from([1, 16, 64]),
    st.booleans(),
)
def test_attention_equals_float64(
    dtype: torch.dtype,
    batch: tuple[list[Shape], list[Tree]],
    seed: int,
    poison: float,
    part_overhead: int,
    max_gathered: int,
    run_step: int,
    consecutive: bool,
) -> None:
    made = make_case(batch[0], seed=seed, dtype=dtype, poison=poison, consecutive=consecutive)
    case, rows = with_trees(made, batch[1], seed)
    limits = {"part_overhead": part_overhead, "max_gathered": max_gathered, "run_step": run_step}
    plan = planned(case, rows, **limits)
    assert_exact(torch_ops.attention(case.q, case.kv_layer, plan, SCALE), case, rows)


@given(batches(), st.integers(0, 1000))
def test_the_dense_way_of_a_gpu_equals_float64(batch: tuple[list[Shape], list[Tree]], seed: int) -> None:
    case, rows = with_trees(make_case(batch[0], seed=seed), batch[1], seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_ops, "attend", torch_ops.attend_dense)
        plan = planned(case, rows, part_overhead=10)
        assert_exact(torch_ops.attention(case.q, case.kv_layer, plan, SCALE), case, rows)


def test_a_select_on_a_long_prefix_is_one_part_and_one_group() -> None:
    """Its last token's row reads the prefix together with all nodes."""
    case, rows = with_trees(
        make_case([Shape(-1, 0, 2999, 1)], consecutive=True), [Tree(0, (-1, -1, 0, 1, 2))], 0
    )
    plan = planned(case, rows)
    assert [(part.num_rows, part.num_slots) for part in plan.contexts] == [(6, 2944)]
    assert [(group.num_rows, group.num_slots) for group in plan.shorts] == [(16, 64)]
    assert (list(plan.singles), list(plan.causals)) == ([], [])
    assert plan.contexts[0].rows == slice(0, 6)
    assert_exact(torch_ops.attention(case.q, case.kv_layer, plan, SCALE), case, rows)


def test_selects_and_decode_rows_on_one_prefix_read_it_together() -> None:
    batch = [Shape(-1, 0, 501, 1), *[Shape(0, 500, 500, 1)] * 3]
    trees = [Tree(1, (-1, 0)), Tree(2, (-1, -1, 1)), Tree(3, (-1,), is_alone=True)]
    case, rows = with_trees(make_case(batch), trees, 0)
    plan = planned(case, rows)
    assert [(part.num_rows, part.num_slots) for part in plan.contexts] == [(9, 448)]
    assert [group.num_rows for group in plan.singles] == [1]
    assert [group.num_rows for group in plan.shorts] == [16]
    assert_exact(torch_ops.attention(case.q, case.kv_layer, plan, SCALE), case, rows)


def test_the_nodes_below_a_short_prefix_read_it_with_their_tree() -> None:
    case, rows = with_trees(make_case([Shape(-1, 0, 30, 1)]), [Tree(0, (-1, -1, 0))], 0)
    plan = planned(case, rows)
    assert not plan.contexts
    assert [(group.num_rows, group.num_slots) for group in plan.shorts] == [(16, 48)]
    assert_exact(torch_ops.attention(case.q, case.kv_layer, plan, SCALE), case, rows)


def test_large_trees_have_groups_of_their_own() -> None:
    """Also longer than one pass of a kernel."""
    batch = [Shape(-1, 0, 300 + r, 1) for r in range(4)]
    sizes = [3, 600, 70, 4]
    trees = [Tree(r, tuple(n // 2 - 1 for n in range(size))) for r, size in enumerate(sizes)]
    case = make_case([*batch, Shape(-1, 0, 1000, 1)])  # a pool with room for the nodes
    case.req_to_token[case.req_rows[4], :1001] = FOREIGN
    left = replace(case, req_rows=case.req_rows[:4], query_lens=case.query_lens[:4], kv_lens=case.kv_lens[:4])
    case, rows = with_trees(left, trees, 0)
    plan = planned(case, rows)
    assert [group.num_rows for group in plan.shorts] == [16, 608, 80, 16]
    assert_exact(torch_ops.attention(case.q, case.kv_layer, plan, SCALE), case, rows)
