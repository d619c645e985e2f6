"""What one forward pass runs, and what comes out: the seam between the scheduler and the model.

Everything is a numpy array over *rows*. A row is one token that is computed in this step. Requests
stand one after the other; those that decode (one row each) come before those that prefill.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float32]


@dataclass(slots=True, frozen=True)
class SampledRows:
    """The rows whose logits are needed, and how a token is chosen from each. All arrays have length S.

    ``rows``: index into the batch's rows. ``target_ids``: -1 to sample, otherwise the token whose
    log-probability is asked for (nothing is sampled). ``positions``: the position the chosen token
    will have in its sequence; with ``seeds`` it is the counter of the random number.
    ``needs_logprobs``: whether any row wants the log-probability of its token.
    """

    rows: IntArray
    target_ids: IntArray
    temperatures: FloatArray
    top_ps: FloatArray
    top_ks: IntArray
    min_ps: FloatArray
    seeds: NDArray[np.uint64]
    positions: IntArray
    needs_logprobs: bool


@dataclass(slots=True, frozen=True)
class Batch:
    """One forward pass over T rows of R requests.

    ``token_ids``, ``positions``, ``write_slots`` [T]: what each row is, where it stands in its
    sequence, and the slot its key and value go to. ``page_table`` [any, max_context] int32 is the
    scheduler's own table, shared and not copied; ``page_rows`` [R] says which of its rows belongs
    to which request: ``page_table[page_rows[r], :kv_lens[r]]`` are the slots of request r in order
    of position, those written in this step included. ``query_lens`` [R]: rows of each request.
    ``num_decode``: so many requests at the front have one row each.
    """

    token_ids: IntArray
    positions: IntArray
    write_slots: IntArray
    page_table: NDArray[np.int32]
    page_rows: IntArray
    query_lens: IntArray
    kv_lens: IntArray
    num_decode: int
    sampled: SampledRows


@dataclass(slots=True, frozen=True)
class BatchOutput:
    """One token per sampled row: ``token_ids`` [S] (the target where one was asked for), and
    ``logprobs`` [S], its log-probability under the unmodified logits (None where nobody asked)."""

    token_ids: IntArray
    logprobs: FloatArray | None
