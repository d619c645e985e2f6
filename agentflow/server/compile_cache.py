"""What constraints were compiled to, or why not: the most recently used ones, bounded in bytes."""

from __future__ import annotations

import sys

from agentflow.constraint import Constraint
from agentflow.server.compile_frames import Refusal
from agentflow.server.compiled_constraint import CompiledConstraint

Outcome = CompiledConstraint | Refusal

# Of an entry, beyond its texts and its payload.
ENTRY_BYTES = 1_000


class CompileCache:
    """Looking one up takes microseconds: as long as hashing the constraint's text once."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._entries: dict[Constraint, tuple[Outcome, int]] = {}  # the least recently used first
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, constraint: Constraint) -> Outcome | None:
        """What is kept of it, if anything is; it is the most recently used one then."""
        entry = self._entries.pop(constraint, None)
        if entry is None:
            return None
        self._entries[constraint] = entry
        return entry[0]

    def put(self, constraint: Constraint, outcome: Outcome) -> None:
        """Keeps it, and drops what does not fit beside it; one too large for the cache is not kept."""
        num_bytes = _size(constraint, outcome)
        if num_bytes > self._max_bytes:
            return
        _, replaced_bytes = self._entries.pop(constraint, (None, 0))
        self._entries[constraint] = outcome, num_bytes
        self.num_bytes += num_bytes - replaced_bytes
        while self.num_bytes > self._max_bytes:
            _, dropped_bytes = self._entries.pop(next(iter(self._entries)))
            self.num_bytes -= dropped_bytes


def _size(constraint: Constraint, outcome: Outcome) -> int:
    texts = sum(map(sys.getsizeof, constraint.texts()))
    if isinstance(outcome, Refusal):
        return ENTRY_BYTES + texts + sys.getsizeof(outcome.message)
    return ENTRY_BYTES + texts + len(outcome.payload) + sys.getsizeof(outcome.key)
