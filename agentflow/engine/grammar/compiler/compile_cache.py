"""What constraints were compiled to, or why not: the most recently used ones, bounded in bytes.

Each tenant has its own: how long a constraint takes tells nothing of what others have asked. A tenant that
fills the cache drops what it has itself.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict

from agentflow.engine.grammar.compiler.compile_frames import Refusal
from agentflow.engine.grammar.compiler.compiled import CompiledConstraint
from agentflow.protocol.constraint import Constraint
from agentflow.server.tenants.tenant import part_of

Outcome = CompiledConstraint | Refusal

# Of an entry, beyond its texts and its payload.
ENTRY_BYTES = 1_000


class CompileCache:
    """``max_bytes``: of all tenants together; one has at most its part (``part_of``). Looking one up takes
    microseconds: as long as hashing the constraint's text once."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        # Of each tenant, the least recently used first.
        self._entries: defaultdict[str, dict[Constraint, tuple[Outcome, int]]] = defaultdict(dict)
        self._num_bytes_of: Counter[str] = Counter()

    def __len__(self) -> int:
        return sum(map(len, self._entries.values()))

    @property
    def num_bytes(self) -> int:
        """Of all tenants."""
        return self._num_bytes_of.total()

    def get(self, tenant: str, constraint: Constraint) -> Outcome | None:
        """What is kept of it for the tenant, if anything is; it is the most recently used one then."""
        entries = self._entries.get(tenant, {})
        entry = entries.pop(constraint, None)
        if entry is None:
            return None
        entries[constraint] = entry
        return entry[0]

    def put(self, tenant: str, constraint: Constraint, outcome: Outcome) -> None:
        """Keeps it, and drops what does not fit beside it: of the tenant's own first, then of the one that
        has most. One too large for the tenant's part is not kept."""
        num_bytes, most_bytes = _size(constraint, outcome), part_of(self._max_bytes, tenant)
        if num_bytes > most_bytes:
            return
        entries = self._entries[tenant]
        _, replaced_bytes = entries.pop(constraint, (None, 0))
        entries[constraint] = outcome, num_bytes
        self._num_bytes_of[tenant] += num_bytes - replaced_bytes
        while self._num_bytes_of[tenant] > most_bytes:
            self._drop_oldest(tenant)
        while self.num_bytes > self._max_bytes:
            self._drop_oldest(max(self._num_bytes_of, key=self._num_bytes_of.__getitem__))

    def _drop_oldest(self, tenant: str) -> None:
        entries = self._entries[tenant]
        _, dropped_bytes = entries.pop(next(iter(entries)))
        self._num_bytes_of[tenant] -= dropped_bytes
        if not entries:
            del self._entries[tenant], self._num_bytes_of[tenant]


def _size(constraint: Constraint, outcome: Outcome) -> int:
    texts = sum(map(sys.getsizeof, constraint.texts()))
    if isinstance(outcome, Refusal):
        return ENTRY_BYTES + texts + sys.getsizeof(outcome.message)
    return ENTRY_BYTES + texts + len(outcome.payload) + sys.getsizeof(outcome.key)
