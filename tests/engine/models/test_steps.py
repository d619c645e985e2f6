"""Batches as the ranks of a divided model receive them."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from support.engine.runner_driver import sampled_rows
from support.engine.scheduler_harness import reads_of

from agentflow.engine.batch import Batch, TreeAttention
from agentflow.engine.models.tensor_parallel.steps import StepReader, StepWriter
from agentflow.engine.scheduling.kv_memory import SlotTable

NUM_ROWS, NUM_COLUMNS = 4, 6
FORWARD = ("token_ids", "positions", "write_slots", "req_rows", "query_lens", "kv_lens", "num_decode")


@st.composite
def batches(draw: st.DrawFn) -> list[Batch]:
    """Batches over one table of slots, which changes in between at any place. Some changes are not
    known, and some are lost: then batches read all columns, because the table sends unread columns again
    only after they change."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    has_losses = draw(st.booleans())
    least = NUM_COLUMNS if has_losses else 1
    table = SlotTable(NUM_ROWS, NUM_COLUMNS)
    made = []
    for _ in range(draw(st.integers(1, 6))):
        for row in range(NUM_ROWS):
            first, end = np.sort(rng.integers(0, NUM_COLUMNS + 1, 2)).tolist()
            if draw(st.booleans()):
                table.row_to_write(row, first, end)[first:end] = rng.integers(0, 50, end - first)
        num, num_tokens = int(rng.integers(0, NUM_ROWS)), int(rng.integers(1, 5))
        numbers = rng.integers(0, 2**40, (3, num_tokens))
        trees = None
        if draw(st.booleans()):
            trees = TreeAttention(
                np.array([3]),
                rng.integers(least, NUM_COLUMNS + 1, 1),
                np.array([2]),
                rng.integers(0, 9, (2, 3)),
                np.array([1, 3]),
            )
        rows, columns = rng.integers(0, NUM_ROWS, 3), rng.integers(0, NUM_COLUMNS, 3)
        _, places = np.unique(rows * NUM_COLUMNS + columns, return_index=True)
        rows, columns = rows[places], columns[places]
        changes = table.write_tokens(rows, columns, rng.integers(0, 50, len(rows), dtype=np.int32))
        if has_losses and draw(st.integers(0, 5)) == 5:
            continue
        made.append(
            Batch(
                numbers[0],
                numbers[1],
                numbers[2],
                table.slots.copy(),
                rng.permutation(NUM_ROWS)[:num],
                rng.integers(1, 3, num),
                rng.integers(least, NUM_COLUMNS + 1, num),
                int(rng.integers(0, num + 1)),
                sampled_rows(rng.integers(0, num_tokens, int(rng.integers(0, 3)))),
                trees,
                shared=[(end, rng.permutation(NUM_ROWS)[:end]) for end in range(int(rng.integers(0, 4)))],
                changes=draw(st.sampled_from([changes, changes, None])) if has_losses else changes,
            )
        )
    return made


@given(batches())
def test_a_rank_computes_what_was_scheduled(sent: list[Batch]) -> None:
    writer, reader = StepWriter(), StepReader()
    for batch in sent:
        received = reader.batch(writer.message(batch))
        for name in FORWARD:
            np.testing.assert_array_equal(getattr(received, name), getattr(batch, name))
        np.testing.assert_array_equal(received.sampled.rows, batch.sampled.rows)
        if batch.trees is not None:
            assert received.trees is not None
            for field in fields(TreeAttention):
                np.testing.assert_array_equal(
                    getattr(received.trees, field.name), getattr(batch.trees, field.name)
                )
        assert [(end, rows.tolist()) for end, rows in received.shared] == [
            (end, rows.tolist()) for end, rows in batch.shared
        ]
        for row, length in reads_of(batch):
            np.testing.assert_array_equal(
                received.req_to_token[row, :length], batch.req_to_token[row, :length]
            )


def test_only_changed_slots_are_sent() -> None:
    table, one, writer = SlotTable(4, 100_000), np.array([1]), StepWriter()
    table.row_to_write(1, 0, 90_000)[:90_000] = np.arange(90_000)

    def message(length: int) -> bytes:
        changes = table.write_tokens(one, np.array([length - 1]), one.astype(np.int32))
        lens = np.array([length])
        return writer.message(
            Batch(one, one, one, table.slots, one, one, lens, 1, sampled_rows(one), changes=changes)
        )

    assert len(message(90_001)) > 90_000
    assert len(message(90_002)) < 400
