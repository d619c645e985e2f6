"""The next step of a batch that only decodes, built while that batch runs.

In most steps each running request decodes one token, none begins, and none ends. The next batch is then known
except for its token ids and its new slots, so it is built during the forward pass instead of between two. It
changes no decision: it is used only if the scheduler would plan and build the same batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from agentflow.engine.batch import Batch
from agentflow.engine.cache.nodes import SlotArray
from agentflow.engine.request import SAMPLED_ONCE, Row
from agentflow.engine.scheduling.kv_memory import KVMemory
from agentflow.engine.scheduling.rows.batch_builder import SamplingTable, build_batch


@dataclass(frozen=True, slots=True)
class BuiltDecode:
    """A batch that may be the next one, with any token ids and slots."""

    rows: list[Row]
    batch: Batch
    version: int  # of the sampling parameters when it was built


class NextDecode:
    """The batch that may be the next one, of one scheduler.

    Args:
        memory: Has the slots.
        sampling: The parameters of the running requests.
    """

    def __init__(self, memory: KVMemory, sampling: SamplingTable) -> None:
        self._memory = memory
        self._sampling = sampling
        self._built: BuiltDecode | None = None

    def build(self, running: Sequence[Row], num_running: int) -> Batch | None:
        """Builds the batch after the one in flight, if all running requests decode in both. Takes no slots.

        Args:
            running: The rows of the batch in flight.
            num_running: The number of running requests.

        Returns:
            The batch, whose token ids and slots ``fill`` sets; None if another batch must follow.
        """
        self._built = None
        memory, sampling = self._memory, self._sampling
        if len(running) != num_running or sampling.has_special_rows:
            return None
        rows: list[Row] = []
        for row in running:
            request = row.request
            if row.withdrawn_slots is not None:  # it left, and another running request is not in the batch
                return None
            if row.targets is not SAMPLED_ONCE or request.num_generated + 1 >= request.max_new_tokens:
                return None
            rows.append(Row(request, row.end, 1, SAMPLED_ONCE))
        shared = memory.readers.prefixes() if num_running > 1 else ()
        batch = build_batch(rows, np.zeros(num_running, dtype=np.int32), memory.table, shared, sampling)
        self._built = BuiltDecode(rows, batch, sampling.version)
        return batch

    def find(self, num_running: int) -> BuiltDecode | None:
        """Returns the batch that ``build`` made, if the running requests would have the same one now. Forgets
        it in any case."""
        built, self._built = self._built, None
        if built is None or len(built.rows) != num_running or self._sampling.version != built.version:
            return None
        # Shared prefixes change only when a request starts or ends, or with a write to the table.
        memory, changes = self._memory, built.batch.changes
        if memory.num_available < num_running or changes is None or not memory.table.ends_with(changes):
            return None
        return built if all(row.request.num_tokens == row.end for row in built.rows) else None

    def fill(self, built: BuiltDecode, slots: SlotArray) -> None:
        """Sets the token ids of a batch that was found, and the slots of their KV."""
        batch = built.batch
        assert batch.changes is not None
        batch.token_ids[:] = [row.request.tokens[row.start] for row in built.rows]
        batch.write_slots[:] = slots
        self._memory.table.replace_slots(batch.changes, slots)
