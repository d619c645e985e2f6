"""The runs that are worth sharing, against a search that compares the slots of all requests."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import Shape, Tree, batch_of, batches, make_case, shapes, with_trees
from numpy.typing import NDArray

from agentflow.kernels.attention.shared_runs import SharedRun, shared_runs
from agentflow.kernels.attention.shared_runs import with_trees as requests_and_trees
from agentflow.kernels.inputs import AttentionBatch

IntArray = NDArray[np.int64]


def find_shared_runs(
    table: NDArray[np.int32], req_rows: IntArray, limits: IntArray, least_saving: int
) -> tuple[list[SharedRun], IntArray]:
    """The reference: walks the tree of requests with equal slots from its root."""
    runs: list[SharedRun] = []
    tails = np.zeros(len(req_rows), dtype=np.int64)
    pending = [(np.arange(len(req_rows)), 0)]
    while pending:
        members, depth = pending.pop()
        members = members[limits[members] > depth]
        keys = table[req_rows[members], depth]
        for key in np.unique(keys):
            siblings = members[keys == key]
            if len(siblings) == 1:
                continue
            common = table[req_rows[siblings], depth : int(limits[siblings].min())]
            differs = (common != common[0]).any(axis=0)
            end = depth + (int(differs.argmax()) if differs.any() else len(differs))
            start = int(tails[siblings[0]])
            if end > start and (len(siblings) - 1) * (end - start) >= least_saving:
                runs.append(SharedRun(siblings, start, end))
                tails[siblings] = end
            pending.append((siblings, end))
    return runs, tails


def plain(runs: list[SharedRun]) -> list[tuple[list[int], int, int]]:
    return sorted((run.members.tolist(), run.start, run.end) for run in runs)


def runs_of(batch: list[Shape], least_saving: int) -> tuple[list[SharedRun], list[int], AttentionBatch]:
    """The runs, and the starts of the tails."""
    made = batch_of(make_case(batch))
    runs, tails = shared_runs(made, made.req_rows, made.kv_lens - made.query_lens, least_saving)
    return runs, tails.tolist(), made


@given(batches(), st.integers(0, 100), st.integers(0, 2**7 - 1), st.booleans())
def test_runs_are_those_of_a_search(
    batch: tuple[list[Shape], list[Tree]], least_saving: int, left_out: int, divides: bool
) -> None:
    """Some requests share nothing (``left_out``, as bits), because they have many rows; one is divided."""
    case, rows = with_trees(make_case(batch[0]), batch[1], 0)
    made = batch_of(case, rows)
    req_rows, _, limits = requests_and_trees(made)
    if divides and len(case.req_rows):  # the second part sees the first one, which was cached before it
        req_rows, limits = np.append(req_rows, req_rows[0]), np.append(limits, case.kv_lens[0])
    limits = np.where((left_out >> np.arange(len(limits))) & 1, 0, limits)
    runs, tails = shared_runs(made, req_rows, limits, least_saving)
    expected_runs, expected_tails = find_shared_runs(case.req_to_token, req_rows, limits, least_saving)
    assert plain(runs) == plain(expected_runs)
    assert tails.tolist() == expected_tails.tolist()


@given(shapes(), st.integers(0, 100))
def test_runs_are_equal_slots_worth_their_cost_and_tile_each_request(
    batch: list[Shape], least_saving: int
) -> None:
    runs, tails, made = runs_of(batch, least_saving)
    reached = [0] * len(batch)
    for run in runs:
        assert (len(run.members) - 1) * (run.end - run.start) >= least_saving
        slots = made.req_to_token[made.req_rows[run.members], run.start : run.end]
        assert (slots == slots[0]).all()
        for member in run.members:
            assert reached[member] == run.start < run.end
            reached[member] = run.end
    assert reached == tails


def test_only_known_prefixes_are_shared() -> None:
    """Rows of requests that are not in the batch do not count."""
    case = make_case([Shape(-1, 0, 110, 1), Shape(0, 100, 110, 1), Shape(0, 100, 110, 1)])
    rows, limits = case.req_rows, case.kv_lens - 1
    none = AttentionBatch(case.req_to_token, rows, case.query_lens, case.kv_lens, None)
    assert shared_runs(none, rows, limits, 1)[0] == []
    known = batch_of(case)
    assert plain(shared_runs(known, rows[:2], limits[:2], 1)[0]) == [([0, 1], 0, 100)]
    assert shared_runs(known, rows[:1], limits[:1], 1)[0] == []


def test_a_short_trunk_joins_the_longer_runs_above_it() -> None:
    pairs = [Shape(-1, 0, 110, 1), Shape(0, 100, 110, 1), Shape(0, 5, 110, 1), Shape(2, 100, 110, 1)]
    runs, tails, _ = runs_of(pairs, 50)
    assert plain(runs) == [([0, 1], 0, 100), ([2, 3], 0, 100)]
    assert tails == [100] * 4


def test_a_long_trunk_is_a_separate_run() -> None:
    pairs = [Shape(-1, 0, 310, 1), Shape(0, 300, 310, 1), Shape(0, 200, 310, 1), Shape(2, 300, 310, 1)]
    runs, tails, _ = runs_of(pairs, 50)
    assert plain(runs) == [([0, 1], 200, 300), ([0, 1, 2, 3], 0, 200), ([2, 3], 200, 300)]
    assert tails == [300] * 4
