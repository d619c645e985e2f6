"""Memory that tenants have together, and of which each may take its part."""

from __future__ import annotations

from weakref import WeakValueDictionary

from agentflow.runtime.held_memory import HeldMemory
from agentflow.server.tenants.tenant import part_of


class TenantMemory:
    """``most_bytes`` for all. ``who`` begins the error of a limit that is reached, ``advice`` ends it.

    >>> sessions = TenantMemory(1_000, "sessions may hold", "wait")
    >>> sessions.of("alice").hold(600)
    Traceback (most recent call last):
    agentflow.errors.Overloaded: of one tenant, sessions may hold 500 bytes, and this would be 600: wait
    """

    def __init__(self, most_bytes: int, who: str, advice: str) -> None:
        self._most_bytes = most_bytes
        self._who = who
        self._advice = advice
        self._all = HeldMemory(most_bytes, who, advice)
        self._of_tenant: WeakValueDictionary[str, HeldMemory] = WeakValueDictionary()

    @property
    def num_bytes(self) -> int:
        """Of all tenants."""
        return self._all.num_bytes

    def of(self, tenant: str) -> HeldMemory:
        """The tenant's part. Keep it while anything is held there."""
        part = self._of_tenant.get(tenant)
        if part is None:
            most = part_of(self._most_bytes, tenant)
            part = HeldMemory(most, f"of one tenant, {self._who}", self._advice, within=self._all)
            self._of_tenant[tenant] = part
        return part
