"""The tree of shared prefixes against a comparison of every pair of requests."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import Shape, make_case, shapes

from agentflow.kernels.shared_runs import SharedRun, find_shared_runs


def runs_of(batch: list[Shape], least_saving: int) -> tuple[list[SharedRun], list[int], list[list[int]]]:
    """The runs, the starts of the tails, and each request's slots that can be shared."""
    case = make_case(batch)
    limits = case.kv_lens - case.query_lens
    runs, tails = find_shared_runs(case.req_to_token, case.req_rows, limits, least_saving)
    slots = [case.req_to_token[row, :n].tolist() for row, n in zip(case.req_rows, limits, strict=True)]
    return runs, tails.tolist(), slots


@given(shapes(), st.integers(0, 100))
def test_runs_are_equal_slots_worth_their_cost_and_tile_each_request(
    batch: list[Shape], least_saving: int
) -> None:
    runs, tails, slots = runs_of(batch, least_saving)
    reached = [0] * len(batch)
    for run in runs:
        assert (len(run.members) - 1) * (run.end - run.start) >= least_saving
        assert run.end > run.start
        for member in run.members:
            assert slots[member][run.start : run.end] == slots[run.members[0]][run.start : run.end]
            assert len(slots[member]) >= run.end
            assert reached[member] == run.start
            reached[member] = run.end
    assert reached == tails


@given(shapes())
def test_with_a_saving_of_one_every_shared_token_is_in_a_run(batch: list[Shape]) -> None:
    _, tails, slots = runs_of(batch, 1)
    for i, own in enumerate(slots):
        longest = 0
        for j, other in enumerate(slots):
            equal = np.array(own[: len(other)]) == np.array(other[: len(own)])
            common = len(equal) if equal.all() else int(equal.argmin())
            longest = max(longest, common if i != j else 0)
        assert tails[i] == longest


def test_a_short_trunk_joins_the_longer_runs_above_it() -> None:
    pairs = [Shape(-1, 0, 110, 1), Shape(0, 100, 110, 1), Shape(0, 5, 110, 1), Shape(2, 100, 110, 1)]
    runs, tails, _ = runs_of(pairs, 50)
    assert sorted((run.members.tolist(), run.start, run.end) for run in runs) == [
        ([0, 1], 0, 100),
        ([2, 3], 0, 100),
    ]
    assert tails == [100] * 4


def test_a_long_trunk_is_a_run_of_its_own() -> None:
    pairs = [Shape(-1, 0, 310, 1), Shape(0, 300, 310, 1), Shape(0, 200, 310, 1), Shape(2, 300, 310, 1)]
    runs, tails, _ = runs_of(pairs, 50)
    assert sorted((run.members.tolist(), run.start, run.end) for run in runs) == [
        ([0, 1], 200, 300),
        ([0, 1, 2, 3], 0, 200),
        ([2, 3], 200, 300),
    ]
    assert tails == [300] * 4
