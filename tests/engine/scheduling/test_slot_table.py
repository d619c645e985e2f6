"""The table of slots and its copies, and the prefixes that requests share.

``Harness`` compares a copy with the table, and the shared prefixes with the slots, at every batch: so do all
tests that use it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from support.engine.scheduler_harness import Harness, expected_output

from agentflow.engine.batch import Batch
from agentflow.engine.models.table_copy import TableCopy
from agentflow.engine.request import Status
from agentflow.engine.scheduling.in_flight import COMMIT_RUN
from agentflow.engine.scheduling.kv_memory import SlotTable


class LossyHarness(Harness):
    """Loses the changes of some batches, by number."""

    def __init__(self, num_slots: int, lost: frozenset[int], **config: object) -> None:
        super().__init__(num_slots, **config)
        self._lost = lost

    def check_copy(self, batch: Batch) -> None:
        if len(self.batches) not in self._lost:
            super().check_copy(batch)


@dataclass
class Job:
    """A request that continues the tokens of an earlier job (``parent``), as a fork or the next turn."""

    parent: int
    kept: int  # of its parent's tokens
    own: list[int]
    count: int
    arrives: int
    aborts_at: int | None
    forced_at: frozenset[int]  # when a grammar replaces a part of its output, cached tokens too


jobs = st.lists(
    st.builds(
        Job,
        parent=st.integers(-1, 10),
        kept=st.integers(0, 60),
        own=st.lists(st.integers(0, 1), min_size=1, max_size=20),
        count=st.integers(0, 25),
        arrives=st.integers(0, 12),
        aborts_at=st.one_of(st.none(), st.none(), st.integers(0, 20)),
        forced_at=st.frozensets(st.integers(3, 30), max_size=5),
    ),
    min_size=2,
    max_size=12,
)


@given(
    jobs=jobs,
    num_slots=st.integers(128, 300),
    token_budget=st.integers(4, 48),
    max_running=st.integers(2, 8),
    use_cache=st.sampled_from([True, True, True, False]),
    fails_at=st.none() | st.integers(0, 12),
    ahead=st.booleans(),
    lost=st.frozensets(st.integers(1, 40), max_size=4),
)
def test_copies_and_shared_prefixes_follow_the_table(
    jobs: list[Job],
    num_slots: int,
    token_budget: int,
    max_running: int,
    use_cache: bool,
    fails_at: int | None,
    ahead: bool,
    lost: frozenset[int],
) -> None:
    """Under admission, forks, eviction, preemption, aborts, replaced outputs and failures. The changes of
    some batches never arrive."""
    harness = LossyHarness(
        num_slots,
        lost,
        ahead=ahead,
        token_budget=token_budget,
        max_running=max_running,
        use_cache=use_cache,
    )
    scheduler = harness.scheduler
    prompts: dict[int, list[int]] = {}
    for now in range(1000):
        for index, job in enumerate(jobs):
            if job.arrives == now:
                parent = harness.requests.get(job.parent)
                before = [] if parent is None else parent.tokens[: parent.num_tokens].tolist()
                prompts[index] = (before[: job.kept] + job.own)[-100:]
                harness.add(index, prompts[index], job.count)
            request = harness.requests.get(index)
            if request is None or request.status is not Status.RUNNING:
                continue
            if job.aborts_at == now:
                scheduler.release(request)
            elif now in job.forced_at and request.num_generated and not request.num_pending:
                kept = request.num_generated // 4
                if kept + 2 < request.max_new_tokens:
                    scheduler.replace_output(request, kept, [7, 8])
        if now == fails_at:
            for request in harness.fail():
                scheduler.release(request)
        if not harness.step() and now > 20:
            break
    scheduler.check_idle()


def test_requests_that_compute_the_same_tokens_at_the_same_time_share_them_when_they_are_cached() -> None:
    """Until then each has them in other slots. Generated tokens enter the cache in runs of ``COMMIT_RUN``."""
    harness = Harness(600)
    prompt = [5] * 40
    for number in (1, 2):
        harness.add(number, prompt, 75)
    harness.run()
    ends = [max((end for end, _ in batch.shared), default=0) for batch in harness.batches]
    assert sorted(set(ends)) == [0, 39, 40, 40 + COMMIT_RUN]
    assert harness.output(1) == harness.output(2) == expected_output(prompt, 75)


def test_a_copy_does_not_take_changes_of_another_table() -> None:
    """The second scheduler's first batch is lost: its next one is not the second batch of the first."""
    first, second = Harness(200), Harness(200)
    for harness in (first, second):
        harness.add(1, [1, 2, 3], 4)
        harness.launch()
    copy = TableCopy()
    copy.changes(first.batches[0])
    second.runner.collect(second.in_flight.popleft())
    second.scheduler.discard()
    second.add(2, [4], 2)
    batch = second.scheduler.schedule()
    assert batch is not None
    changes = copy.changes(batch)
    places = set(zip(changes.rows.tolist(), changes.columns.tolist(), strict=True))
    expected = {
        (row, column)
        for row, length in zip(batch.req_rows.tolist(), batch.kv_lens.tolist(), strict=True)
        for column in range(length)
    }
    assert expected <= places
    np.testing.assert_array_equal(batch.req_to_token[changes.rows, changes.columns], changes.slots)


def test_changes_have_all_writes_since_the_last_ones() -> None:
    """Also several writes to one row, in any order."""
    table, copied = SlotTable(3, 20), np.zeros((3, 20), dtype=np.int32)
    for step in range(3):
        for first, end in ((8, 10), (2, 3), (15, 17)):
            table.row_to_write(1, first, end)[first:end] = 10 * step + first
        table.row_to_write(2, 4, 4)
        rows, columns = np.array([0, 1]), np.array([step, 18])
        changes = table.write_tokens(rows, columns, np.array([step + 1, step + 2], dtype=np.int32))
        copied[changes.rows, changes.columns] = changes.slots
        np.testing.assert_array_equal(copied, table.slots)
        assert 2 not in changes.rows
    changes = table.write_tokens(np.array([0]), np.array([19]), np.array([7], dtype=np.int32))
    assert (changes.rows.tolist(), changes.columns.tolist(), changes.slots.tolist()) == ([0], [19], [7])
