"""The batch after the one that runs, written while that one does.

Where requests decode, the next batch is known before this one has run, but for its tokens: the same
requests, each one position on. It is right unless one of them ends or gives way, or another one begins;
then it is thrown away, and nothing but the time was lost.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from agentflow.server.core.batch import Batch, IntArray
from agentflow.server.core.batch_builder import Work
from agentflow.server.core.request import Request
from agentflow.server.core.sampling_table import SamplingTable


def requests_to_foresee(in_flight: list[Work]) -> list[Request]:
    """Of a batch that runs those that decode in the next one if no text ends before its limit. None where
    some do not decode in this one: what follows them is not one row of each."""
    going_on: list[Request] = []
    for request, _ in in_flight:
        if request.num_computed + 1 < request.num_tokens:
            return []
        if request.num_generated + 1 < request.max_new_tokens:
            going_on.append(request)
    return going_on


class ForeseenBatch:
    """What ``requests`` (at least one, all of them in the batch that runs, none with a say of its own about
    which tokens it may be given) are to compute next, in this order. ``slots`` [T]: of their rows; they are
    written to the page table, behind all that is read there now. ``batch.token_ids`` are 0 until
    ``with_tokens``."""

    def __init__(
        self,
        requests: list[Request],
        slots: NDArray[np.int32],
        page_table: NDArray[np.int32],
        sampling: SamplingTable,
    ) -> None:
        self._work: list[Work] = [(request, 1) for request in requests]
        positions: IntArray = np.array([request.num_computed + 1 for request in requests], dtype=np.int64)
        page_rows: IntArray = np.array([request.page_row for request in requests], dtype=np.int64)
        page_table[page_rows, positions] = slots
        kv_lens = positions + 1
        num_rows = len(requests)
        self.batch = Batch(
            token_ids=np.zeros(num_rows, dtype=np.int64),
            positions=positions,
            write_slots=slots.astype(np.int64),
            page_table=page_table,
            page_rows=page_rows,
            query_lens=np.ones(num_rows, dtype=np.int64),
            kv_lens=kv_lens,
            num_decode=num_rows,
            sampled=sampling.sampled_rows(np.arange(num_rows), page_rows, kv_lens),
        )

    def is_of(self, work: list[Work]) -> bool:
        """Whether these rows are the ones that were foreseen."""
        return work == self._work

    def with_tokens(self) -> Batch:
        """The batch, complete: the one before it has run, and each of its requests has its token."""
        self.batch.token_ids[:] = [request.tokens[request.num_computed] for request, _ in self._work]
        return self.batch
