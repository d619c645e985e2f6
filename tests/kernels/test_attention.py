"""Paged attention of torch's kernels and of the reference against float64, on random trees of requests."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import SCALE, Case, Shape, assert_exact, exact_attention, make_case, shapes

from agentflow.kernels import reference_ops, torch_ops
from agentflow.kernels.attention_plan import AttentionPlan, plan_attention, rounded_up
from agentflow.kernels.ops import Kernels

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def planned(case: Case, **limits: int) -> AttentionPlan:
    return plan_attention(
        case.req_to_token,
        case.req_rows,
        case.query_lens,
        case.kv_lens,
        dtype=case.q.dtype,
        device=case.q.device,
        **limits,
    )


def assert_attends(kernels: Kernels, case: Case, plan: AttentionPlan) -> None:
    assert_exact(kernels.attention(case.q, case.kv_layer, plan, SCALE), case)


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


@given(shapes(max_requests=4), st.integers(0, 1000))
def test_the_reference_equals_float64(batch: list[Shape], seed: int) -> None:
    case = make_case(batch, seed=seed)
    assert_attends(reference_ops, case, planned(case))


@DTYPES
@given(
    shapes(),
    st.integers(0, 1000),
    st.sampled_from([math.nan, 1e30]),
    st.sampled_from([0, 1, 20, 400]),
    st.sampled_from([1, 60, 16384]),
    st.sampled_from([1, 16, 64]),
    st.booleans(),
)
def test_attention_equals_float64(
    dtype: torch.dtype,
    batch: list[Shape],
    seed: int,
    poison: float,
    part_overhead: int,
    max_gathered: int,
    run_step: int,
    consecutive: bool,
) -> None:
    case = make_case(batch, seed=seed, dtype=dtype, poison=poison, consecutive=consecutive)
    limits = {"part_overhead": part_overhead, "max_gathered": max_gathered, "run_step": run_step}
    assert_attends(torch_ops, case, planned(case, **limits))


@given(shapes(), st.sampled_from([0, 1, 20]))
def test_groups_of_many_queries_have_few_sizes(batch: list[Shape], part_overhead: int) -> None:
    plan = planned(make_case(batch), part_overhead=part_overhead)
    for num_slots in [part.num_slots for part in plan.contexts] + [group.num_slots for group in plan.shorts]:
        assert num_slots == rounded_up(num_slots)
    assert all(group.num_rows % 4 == 0 for group in plan.shorts if group.num_rows > 4)
    assert all(group.num_rows % 16 == 0 for group in plan.causals)


def test_products_of_attention_are_of_few_sizes() -> None:
    """As flash attention is called, whatever the lengths."""
    sizes: set[tuple[int, int]] = set()
    with pytest.MonkeyPatch.context() as patch:
        attend = torch_ops.attend

        def noted(q: torch.Tensor, k: torch.Tensor, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
            if q.shape[2] >= 64:
                sizes.add((q.shape[2] % 64, k.shape[2] % 512))
            return attend(q, k, *args)

        patch.setattr(torch_ops, "attend", noted)
        for cached in range(0, 700, 13):
            batch = [Shape(-1, 0, cached, 40 + cached // 5), *[Shape(0, cached, cached, 1)] * 37]
            case = make_case(batch)
            torch_ops.attention(case.q, case.kv_layer, planned(case), SCALE)
    assert len(sizes) <= 48


def test_sizes_are_few_and_not_much_larger() -> None:
    assert all(size <= rounded_up(size) < max(size * 1.25, size + 16) for size in range(1, 5000))
    assert len({rounded_up(size) for size in range(1, 1025)}) == 8 + 4 + 12
    assert all(rounded_up(rounded_up(size)) == rounded_up(size) for size in range(1, 5000))


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(9, 3, 64), (4, 4, 16), (12, 1, 32)])
@DTYPES
def test_all_shapes_of_heads(num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    batch = [Shape(-1, 0, 120, 1), Shape(0, 100, 110, 1), Shape(0, 100, 100, 30), Shape(-1, 0, 0, 17)]
    sizes = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    case = make_case(batch, dtype=dtype, **sizes)
    assert_attends(torch_ops, case, planned(case, part_overhead=50))


@given(shapes(), st.integers(0, 1000))
def test_the_dense_way_of_a_gpu_equals_flash_attention(batch: list[Shape], seed: int) -> None:
    case = make_case(batch, seed=seed)
    plan = planned(case, part_overhead=10)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_ops, "attend", torch_ops.attend_dense)
        assert_attends(torch_ops, case, plan)


def test_a_shared_prefix_is_read_once_for_decode_rows_and_chunks() -> None:
    first = Shape(-1, 0, 501, 1)
    case = make_case([first, *[Shape(0, 500, 501, 1)] * 3, *[Shape(0, 500, 500, 6)] * 2])
    plan = planned(case)
    assert [(part.num_rows, part.num_slots) for part in plan.contexts] == [(16, 448)]
    assert [(group.num_rows, group.num_slots) for group in plan.singles] == [(4, 54)]
    assert [(group.num_chunks, group.num_rows, group.num_slots) for group in plan.shorts] == [(2, 8, 64)]
    assert not plan.causals
    assert_attends(torch_ops, case, plan)


def test_unshared_requests_make_one_group_and_no_part() -> None:
    plan = planned(make_case([Shape(-1, 0, 40 + i, 1) for i in range(8)]))
    assert (len(plan.singles), list(plan.causals), list(plan.contexts), plan.order) == (1, [], [], None)


def test_a_long_request_is_not_padded_to() -> None:
    case = make_case([Shape(-1, 0, 30, 1), Shape(-1, 0, 900, 1), Shape(-1, 0, 33, 1)])
    plan = planned(case)
    assert [(group.num_rows, group.num_slots) for group in plan.singles] == [(1, 901), (2, 34)]
    assert_attends(torch_ops, case, plan)


def test_a_chunk_after_a_cached_prefix_reads_it_apart_from_its_own_rows() -> None:
    case = make_case([Shape(-1, 0, 300, 40)])
    plan = planned(case)
    assert [(part.num_rows, part.num_slots) for part in plan.contexts] == [(40, 256), (40, 48)]
    assert [(group.num_chunks, group.num_rows) for group in plan.causals] == [(1, 48)]


def test_chunks_of_a_few_rows_share_one_pass_over_their_keys() -> None:
    case = make_case([Shape(-1, 0, 60, 3), Shape(-1, 0, 80, 1), Shape(-1, 0, 70, 5)])
    plan = planned(case)
    assert [(group.num_rows, group.num_slots) for group in plan.singles] == [(1, 81)]
    assert [(group.num_chunks, group.num_rows, group.num_slots) for group in plan.shorts] == [(2, 8, 80)]
    assert not plan.causals
    assert not plan.contexts
    assert_attends(torch_ops, case, plan)
