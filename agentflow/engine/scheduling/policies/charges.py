"""Charges of tenants that use several engines of one model.

Each engine reports its charges (``Charged``), and charges its own tenants for the reports of the others, so
that a tenant has its weight once, however many engines it uses. A tenant without requests on an engine may
have some on others. ``Absent`` keeps its charge there, and forgets it once nothing was charged for
``AWAY_S``: the tenant is then idle everywhere, and idle time leaves neither credit nor debt.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, OrderedDict
from collections.abc import Callable

AWAY_S = 2.0


class Charged:
    """The tokens that a policy charged since they were last taken."""

    def __init__(self) -> None:
        self._tenants: Counter[str] = Counter()  # tokens, by tenant
        self._weights: dict[str, float] = {}
        self._programs: Counter[tuple[str, int]] = Counter()

    def __bool__(self) -> bool:
        return bool(self._tenants)

    def add(self, tenant: str, weight: float, program: int, num_tokens: int) -> None:
        """Tokens were charged to a tenant, and to its program (0: none)."""
        self._tenants[tenant] += num_tokens
        self._weights[tenant] = weight
        if program:
            self._programs[tenant, program] += num_tokens

    def take(self) -> tuple[list[tuple[str, float]], list[tuple[str, int, int]]]:
        """Returns the fields of ``Charges``, and resets them."""
        tenants = [(name, count / self._weights[name]) for name, count in self._tenants.items()]
        programs = [(*key, count) for key, count in self._programs.items()]
        self._tenants.clear()
        self._weights.clear()
        self._programs.clear()
        return tenants, programs


class Absent:
    """The charges of tenants without requests here. ``clock``: seconds. A report of charges has thousands of
    tenants, so none of these methods reads all of them."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        # The charge, and when it last changed, earliest first.
        self._used: OrderedDict[str, tuple[float, float]] = OrderedDict()
        self._by_charge: list[tuple[float, str]] = []  # a heap, also with charges of earlier times

    def least(self) -> float:
        """Returns the lowest charge; infinite if there is none."""
        self._forget()
        while self._by_charge:
            used, tenant = self._by_charge[0]
            if tenant in self._used and self._used[tenant][0] == used:
                return used
            heapq.heappop(self._by_charge)
        return math.inf

    def set(self, tenant: str, used: float) -> None:
        """The charge of a tenant that has no more requests here, or that is charged elsewhere."""
        self._used[tenant] = used, self._clock()
        self._used.move_to_end(tenant)
        heapq.heappush(self._by_charge, (used, tenant))
        if len(self._by_charge) > 2 * len(self._used) + 8:
            self._by_charge = [(one[0], name) for name, one in self._used.items()]
            heapq.heapify(self._by_charge)

    def pop(self, tenant: str) -> float:
        """Returns the charge of a tenant that has requests here again; 0 if none is known."""
        self._forget()
        return self._used.pop(tenant, (0.0, 0.0))[0]

    def _forget(self) -> None:
        since_s = self._clock() - AWAY_S
        while self._used:
            tenant, (_, changed_s) = next(iter(self._used.items()))
            if changed_s >= since_s:
                return
            del self._used[tenant]
