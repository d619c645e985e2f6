"""Attention under windows, caps and sinks, against one row and one head at a time in float64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import Shape, Tree, batch_of, batches, make_case, seen_by_all, with_trees

from agentflow.kernels.masked_attention import AttentionRule, MaskedPlans, masked_attention

CPU = torch.device("cpu")
RULES = st.builds(
    AttentionRule,
    scale=st.just(8**-0.5),
    window=st.sampled_from([0, 1, 2, 7, 16, 1000]),
    cap=st.sampled_from([0.0, 1.5]),
)


def attended(q: torch.Tensor, kv: torch.Tensor, rule: AttentionRule, sinks: torch.Tensor | None) -> Any:
    """One row, q [heads, head_dim], over the keys and values that it sees."""
    out = []
    for head in range(len(q)):
        kv_head = head * kv.shape[2] // len(q)
        scores = (kv[:, 0, kv_head].double() @ q[head].double()) * rule.scale
        if rule.cap:
            scores = rule.cap * torch.tanh(scores / rule.cap)
        weights = torch.exp(scores)
        total = weights.sum() + (0.0 if sinks is None else math.exp(float(sinks[head])))
        out.append(weights @ kv[:, 1, kv_head].double() / total)
    return torch.cat(out)


@given(batches(), RULES, st.booleans(), st.integers(0, 1000))
def test_each_row_sees_its_window(
    made: tuple[list[Shape], list[Tree]], rule: AttentionRule, has_sinks: bool, seed: int
) -> None:
    case, rows = with_trees(make_case(made[0], seed=seed), made[1], seed)
    plan = MaskedPlans(batch_of(case, rows), CPU).of(rule.window)
    sinks = torch.linspace(-2, 2, case.q.shape[1]) if has_sinks else None
    found = masked_attention(case.q, case.kv_layer, plan, rule, sinks)
    for row, slots in enumerate(seen_by_all(case, rows)):
        kv = case.kv_layer[slots[-rule.window :] if rule.window else slots]
        expected = attended(case.q[row], kv, rule, sinks)
        torch.testing.assert_close(found[row].double(), expected, atol=1e-5, rtol=1e-5)


def test_a_batch_of_one_decoding_row_gathers_only_its_window() -> None:
    case = make_case([Shape(-1, 0, 40, 1)])
    (group,) = MaskedPlans(batch_of(case), CPU).of(5)
    np.testing.assert_array_equal(group.slots.numpy(), case.req_to_token[case.req_rows[0], 36:41])
