"""Batches as the ranks of a divided model receive them."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from support.engine.runner_driver import sampled_rows

from agentflow.engine.batch import Batch, TreeAttention
from agentflow.engine.models.tensor_parallel.steps import StepReader, StepWriter

NUM_ROWS, NUM_COLUMNS = 4, 6
FORWARD = ("token_ids", "positions", "write_slots", "req_rows", "query_lens", "kv_lens", "num_decode")


@st.composite
def batches(draw: st.DrawFn) -> list[Batch]:
    """Batches over one table of slots, which changes in between at any place."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    table = np.zeros((NUM_ROWS, NUM_COLUMNS), dtype=np.int32)
    made = []
    for _ in range(draw(st.integers(1, 6))):
        changed = rng.random(table.shape) < draw(st.sampled_from([0.0, 0.1, 0.9]))
        table = np.where(changed, rng.integers(0, 50, table.shape, dtype=np.int32), table)
        num, num_tokens = int(rng.integers(0, NUM_ROWS)), int(rng.integers(1, 5))
        numbers = rng.integers(0, 2**40, (3, num_tokens))
        trees = None
        if draw(st.booleans()):
            trees = TreeAttention(
                np.array([3]),
                rng.integers(0, NUM_COLUMNS, 1),
                np.array([2]),
                rng.integers(0, 9, (2, 3)),
                np.array([1, 3]),
            )
        made.append(
            Batch(
                numbers[0],
                numbers[1],
                numbers[2],
                table.copy(),
                rng.permutation(NUM_ROWS)[:num],
                rng.integers(1, 3, num),
                rng.integers(1, NUM_COLUMNS + 1, num),
                int(rng.integers(0, num + 1)),
                sampled_rows(rng.integers(0, num_tokens, int(rng.integers(0, 3)))),
                trees,
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
        rows = list(zip(batch.req_rows, batch.kv_lens, strict=True))
        if batch.trees is not None:
            assert received.trees is not None
            for field in fields(TreeAttention):
                np.testing.assert_array_equal(
                    getattr(received.trees, field.name), getattr(batch.trees, field.name)
                )
            rows += list(zip(batch.trees.req_rows, batch.trees.prefix_lens, strict=True))
        for row, length in rows:
            np.testing.assert_array_equal(
                received.req_to_token[row, :length], batch.req_to_token[row, :length]
            )


def test_only_changed_slots_are_sent() -> None:
    table = np.arange(400_000, dtype=np.int32).reshape(4, -1)
    one, writer = np.array([1]), StepWriter()

    def message(length: int) -> bytes:
        batch = Batch(one, one, one, table, one, one, np.array([length]), 1, sampled_rows(one))
        return writer.message(batch)

    assert len(message(90_000)) > 90_000
    assert len(message(90_001)) < 400
