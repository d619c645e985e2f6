"""Attention under windows, caps and sinks, against one row at a time in float64."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kernel_cases import (
    NATIVE_PARAMS,
    SAME_EXAMPLES,
    Case,
    Rows,
    Shape,
    Tree,
    batch_of,
    batches,
    in_both_directions,
    make_case,
    once,
    seen_by_all,
    with_trees,
)
from support.examples import examples
from torch.utils._python_dispatch import TorchDispatchMode

from agentflow.kernels.attention.backend import AttentionRule
from agentflow.kernels.attention.groups import MaskedPlans, plan_groups
from agentflow.kernels.attention.masked_attention import masked_attention
from agentflow.kernels.platforms import REFERENCE, TORCH, Kernels, triton_kernels

CPU = torch.device("cpu")
RULES = st.builds(
    AttentionRule,
    scale=st.just(8**-0.5),
    window=st.sampled_from([0, 1, 2, 7, 16, 1000]),
    cap=st.sampled_from([0.0, 1.5]),
)


ON_CPU = [
    pytest.param(REFERENCE, id="reference"),
    pytest.param(TORCH, id="torch"),
    *NATIVE_PARAMS,
]
try:
    from agentflow.kernels.triton_ops.attention import units
except ImportError:  # for x86-64 and Linux
    IMPLEMENTATIONS: list[Any] = ON_CPU
else:
    TRITON = triton_kernels()
    IMPLEMENTATIONS = [*ON_CPU, pytest.param(TRITON, id="triton", marks=pytest.mark.gpu)]


def attended(q: torch.Tensor, kv: torch.Tensor, rule: AttentionRule, sinks: torch.Tensor | None) -> Any:
    """One row, q [heads, head_dim], over the keys and values that it sees."""
    keys, values = kv.double().repeat_interleave(len(q) // kv.shape[2], dim=2).unbind(1)
    scores = torch.einsum("hd,shd->hs", q.double(), keys) * rule.scale
    if rule.cap:
        scores = rule.cap * torch.tanh(scores / rule.cap)
    weights = torch.exp(scores)
    totals = weights.sum(-1) + (0.0 if sinks is None else torch.exp(sinks.double()))
    return (torch.einsum("hs,shd->hd", weights, values) / totals[:, None]).flatten()


def expected(case: Case, rows: Rows | None, rule: AttentionRule, sinks: torch.Tensor | None) -> torch.Tensor:
    """Attention in float64, a row at a time."""
    found = []
    causal = seen_by_all(replace(case, both_ways=None), rows)
    for row, slots in enumerate(seen_by_all(case, rows)):
        first = max(0, len(causal[row]) - rule.window) if rule.window else 0
        found.append(attended(case.q[row], case.kv_layer[slots[first:]], rule, sinks))
    return torch.stack(found)


def all_attended(
    kernels: Kernels, case: Case, rows: Rows | None, rule: AttentionRule, sinks: torch.Tensor | None
) -> torch.Tensor:
    is_on_gpu = kernels is globals().get("TRITON") and torch.cuda.is_available()
    device = torch.device("cuda" if is_on_gpu else "cpu")
    plan = kernels.attention.plan(batch_of(case, rows), case.q.dtype, device)
    q, kv_layer = case.q.to(device), case.kv_layer.to(device)
    sinks = None if sinks is None else sinks.to(device)
    return kernels.attention.attend(q, kv_layer, plan, rule, sinks).cpu()


def assert_windows(
    kernels: Kernels, case: Case, rows: Rows | None, rule: AttentionRule, has_sinks: bool
) -> None:
    sinks = torch.linspace(-2, 2, case.q.shape[1]) if has_sinks else None
    found = all_attended(kernels, case, rows, rule, sinks)
    exact = once(lambda: expected(case, rows, rule, sinks), case, rows, rule, has_sinks)
    torch.testing.assert_close(found.double(), exact, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kernels", ON_CPU)
@SAME_EXAMPLES
@given(batches(), RULES, st.booleans(), st.integers(0, 1000), st.booleans())
def test_each_row_sees_its_window(
    kernels: Kernels,
    made: tuple[list[Shape], list[Tree]],
    rule: AttentionRule,
    has_sinks: bool,
    seed: int,
    both_ways: bool,
) -> None:
    case, rows = with_trees(make_case(made[0], seed=seed), made[1], seed)
    case = in_both_directions(case, seed) if both_ways else case
    assert_windows(kernels, case, rows, rule, has_sinks)


@pytest.mark.parametrize("kernels", [pytest.param(REFERENCE, id="reference"), *NATIVE_PARAMS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@SAME_EXAMPLES
@given(
    num_cached=st.integers(0, 300),
    num_new=st.integers(1, 40),
    window=st.sampled_from([0, 1, 7, 130]),
    cap=st.sampled_from([0.0, 1.5]),
    heads=st.sampled_from([(4, 2, 8), (2, 1, 64)]),
    is_last=st.booleans(),
    has_sinks=st.booleans(),
    data=st.data(),
)
@example(128, 1, 0, 0.0, (4, 2, 8), True, False, None).via("the key is alone in its block")
def test_f37_rows_that_see_a_key_that_is_not_a_number_are_not_numbers(
    kernels: Kernels,
    dtype: torch.dtype,
    num_cached: int,
    num_new: int,
    window: int,
    cap: float,
    heads: tuple[int, int, int],
    is_last: bool,
    has_sinks: bool,
    data: Any,
) -> None:
    """For any key in a block, and if nothing else of the block is seen. Other rows are numbers."""
    num = num_cached + num_new
    place = num - 1 if is_last else data.draw(st.integers(0, num - 1))
    sizes = {"num_heads": heads[0], "num_kv_heads": heads[1], "head_dim": heads[2]}
    case = make_case([Shape(-1, 0, num_cached, num_new)], seed=num, dtype=dtype, **sizes)
    case.kv_layer[case.req_to_token[case.req_rows[0], place], 0] = math.nan  # the keys of all heads
    sinks = torch.linspace(-2, 2, heads[0]).to(dtype) if has_sinks else None
    found = all_attended(kernels, case, None, AttentionRule(heads[2] ** -0.5, window, cap), sinks)
    for row, position in enumerate(range(num_cached, num)):
        is_seen = place <= position and (not window or place > position - window)
        assert found[row].isnan().all() if is_seen else found[row].isfinite().all()


@pytest.mark.gpu
@pytest.mark.skipif("TRITON" not in globals(), reason="triton is for x86-64 and Linux")
@settings(max_examples=8)
@given(batches(4), RULES, st.booleans(), st.integers(0, 1000))
def test_each_row_sees_its_window_on_a_gpu(
    made: tuple[list[Shape], list[Tree]], rule: AttentionRule, has_sinks: bool, seed: int
) -> None:
    case, rows = with_trees(make_case(made[0], seed=seed), made[1], seed)
    assert_windows(TRITON, case, rows, rule, has_sinks)


@pytest.mark.parametrize("kernels", IMPLEMENTATIONS)
@pytest.mark.parametrize(("head_dim", "window"), [(8, 70), (96, 0), (96, 130), (264, 70), (264, 0)])
def test_windows_over_long_contexts(
    kernels: Kernels, head_dim: int, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a shared prefix, a chunk, and segments of keys, some outside of the windows of some rows."""
    if kernels is globals().get("TRITON"):
        monkeypatch.setattr(units, "LEAST_SAVING", 10)
        monkeypatch.setattr(units, "LEAST_SEGMENT", units.KEY_STEP)
    batch = [Shape(-1, 0, 300, 1), Shape(0, 200, 250, 1), Shape(0, 200, 230, 20), Shape(-1, 0, 5, 1)]
    case = make_case(batch, head_dim=head_dim)
    assert_windows(kernels, case, None, AttentionRule(0.1, window, 2.0), has_sinks=True)


class LargestTensor(TorchDispatchMode):
    """Counts the elements of the largest tensor that operations make. Views count as much as they show."""

    num_elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and not func.is_view:
            self.num_elements = max(self.num_elements, made.numel())
        return made


@examples(40)
@given(batches(), st.sampled_from([1, 9]), RULES, st.booleans(), st.integers(0, 1000), st.booleans())
def test_windows_in_parts(
    made: tuple[list[Shape], list[Tree]],
    times: int,
    rule: AttentionRule,
    has_sinks: bool,
    seed: int,
    both_ways: bool,
) -> None:
    """Torch gathers a bounded number of slots at a time, next to the new tokens of the batch, and merges the
    parts."""
    longer = [replace(one, shared=times * one.shared, cached=times * one.cached) for one in made[0]]
    case, rows = with_trees(make_case(longer, seed=seed), made[1], seed)
    case = in_both_directions(case, seed) if both_ways else case
    sinks = torch.linspace(-2, 2, case.q.shape[1]) if has_sinks else None
    most = 20
    plan = plan_groups(batch_of(case, rows), case.q.dtype, CPU, max_gathered=most)
    new = int(case.query_lens.max(initial=0)) + (0 if rows is None else rows.paths.size)
    tails, parts = plan.masked.of(rule.window)
    assert all(len(group.slots) // group.num_chunks <= most + 2 * new for group in tails)
    assert all(len(group.slots) <= most for group in parts)
    found = TORCH.attention.attend(case.q, case.kv_layer, plan, rule, sinks)
    torch.testing.assert_close(found.double(), expected(case, rows, rule, sinks), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("window", [0, 4_000, 1_000_000])
@pytest.mark.parametrize("num_rows", [1, 40])
def test_the_memory_of_windows_does_not_grow_with_the_text(window: int, num_rows: int) -> None:
    largest = {}
    for length in (2_500, 10_000):
        case = make_case([Shape(-1, 0, length, num_rows)])
        with LargestTensor() as counted:
            plans = MaskedPlans(batch_of(case), CPU, max_gathered=300)
            rule = AttentionRule(0.1, window, 2.0)
            masked_attention(case.q, case.kv_layer, plans.of(window), rule)
        largest[length] = counted.num_elements
    assert largest[10_000] == largest[2_500]


def test_a_batch_of_one_decoding_row_gathers_only_its_window() -> None:
    case = make_case([Shape(-1, 0, 40, 1)])
    (group,), _ = MaskedPlans(batch_of(case), CPU).of(5)
    np.testing.assert_array_equal(group.slots.numpy(), case.req_to_token[case.req_rows[0], 36:41])
