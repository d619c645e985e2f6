"""What waits to be compiled: a queue for each tenant, served so that each gets the same time."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

from agentflow.errors import Overloaded

ItemT = TypeVar("ItemT", bound=Hashable)


class CompileQueue(Generic[ItemT]):
    """The tenant that has used the least is served next, and of tenants that have used the same the one
    whose turn was longest ago: with equal costs that is round robin. Each item is one tenant's.

    >>> queue = CompileQueue[str](max_waiting=10, max_waiting_per_tenant=5)
    >>> for tenant, item in (("ann", "a1"), ("ann", "a2"), ("bob", "b1")):
    ...     queue.push(tenant, item)
    >>> [queue.pop(), queue.charge("ann", 2.0), queue.pop(), queue.pop()]
    [('ann', 'a1'), None, ('bob', 'b1'), ('ann', 'a2')]
    """

    def __init__(self, *, max_waiting: int, max_waiting_per_tenant: int) -> None:
        self._max_waiting = max_waiting
        self._max_per_tenant = max_waiting_per_tenant
        self._items: dict[str, dict[ItemT, None]] = {}  # no empty ones; in the order of their turns
        self._tenants: dict[ItemT, str] = {}
        # Seconds, of tenants that wait or are ahead of ``_served``. Who comes anew begins there: having
        # asked for nothing so far is no credit.
        self._used: dict[str, float] = {}
        self._served = 0.0

    def __len__(self) -> int:
        """Items that wait."""
        return len(self._tenants)

    def push(self, tenant: str, item: ItemT) -> None:
        """Queues the item, unless it waits already. ``Overloaded`` where a queue is full."""
        waiting = self._items.get(tenant, {})
        if item in waiting:
            return
        if len(waiting) >= self._max_per_tenant:
            most, whose = self._max_per_tenant, "of this tenant"
        elif len(self) >= self._max_waiting:
            most, whose = self._max_waiting, "of all tenants"
        else:
            self._items.setdefault(tenant, waiting)[item] = None
            self._tenants[item] = tenant
            self._used[tenant] = max(self._used.get(tenant, 0.0), self._served)
            return
        raise Overloaded(f"{most} constraints {whose} wait to be compiled, which is the limit: try later")

    def waits_besides(self, tenant: str) -> bool:
        """Whether another tenant waits."""
        return any(name != tenant for name in self._items)

    def pop(self) -> tuple[str, ItemT]:
        """The next item, and the tenant whose turn it was. KeyError when nothing waits."""
        tenant = min(self._items, key=self._used.__getitem__) if self._items else ""
        items = self._items[tenant]
        item = next(iter(items))
        self._served = self._used[tenant]
        self.discard(item)
        if items:
            self._items[tenant] = self._items.pop(tenant)  # behind those that have used the same
        return tenant, item

    def charge(self, tenant: str, seconds: float) -> None:
        """The tenant's item took so long."""
        self._used[tenant] = max(self._used.get(tenant, 0.0), self._served) + seconds
        if not self._items:
            self._used.clear()  # nobody waits who could be behind
        elif len(self._used) > 2 * self._max_waiting + len(self._items):
            self._used = {name: self._used[name] for name in self._items}

    def discard(self, item: ItemT) -> None:
        """The item waits no more."""
        tenant = self._tenants.pop(item)
        del self._items[tenant][item]
        if not self._items[tenant]:
            del self._items[tenant]
