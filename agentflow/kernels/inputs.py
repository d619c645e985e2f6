"""What the rows of a batch attend to, as every implementation of attention is given it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from agentflow.kernels.branches import Branches

IntArray = NDArray[np.int64]
PageTable = NDArray[np.int32]


@dataclass(slots=True, frozen=True)
class AttentionBatch:
    """R requests: ``page_table[page_rows[r], :kv_lens[r]]`` are the slots of request r, of which the last
    ``query_lens[r]`` belong to its rows in this batch. ``branches``: of the rows after those."""

    page_table: PageTable
    page_rows: IntArray
    query_lens: IntArray
    kv_lens: IntArray
    branches: Branches | None
