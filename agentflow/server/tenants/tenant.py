"""A tenant: whom an API key names, and what it may use."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tenant:
    """``name`` separates caches, queues and constraints of tenants from each other; a server without keys
    has one, whose name is empty. ``share``: of the engine's work, against that of others, while both wait.
    ``requests_per_minute`` and ``tokens_per_minute`` (prompt and output): more are refused until there is
    room again. ``max_unfinished``: requests at once, those that wait included. ``models``: those it may use;
    None: all. ``sees_metrics``: may read ``/metrics``, which tells of all tenants."""

    name: str = ""
    share: float = 1.0
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_unfinished: int | None = None
    models: tuple[str, ...] | None = None
    sees_metrics: bool = False

    def may_use(self, model: str) -> bool:
        """Whether the model exists for this tenant."""
        return self.models is None or model in self.models


NOBODY_ELSE = Tenant(sees_metrics=True)
"""The tenant of a server without keys."""

MAX_PART = 0.5


def part_of(limit: int, tenant_name: str) -> int:
    """How much one tenant may take of what all share, ``limit`` of it, so that others are left some: half of
    it (but at least 1), and all on a server without keys.

    >>> part_of(1000, "alice"), part_of(1000, "")
    (500, 1000)
    """
    return max(1, int(limit * MAX_PART)) if tenant_name else limit
