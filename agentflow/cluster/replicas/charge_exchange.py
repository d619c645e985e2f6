"""Reports each replica's charges of tenants to the other replicas, in batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from agentflow.engine.messages import Charges


class ChargeExchange:
    """Collects the reports of all replicas, and returns to each one the charges of the others."""

    def __init__(self) -> None:
        self._tenants: dict[int, Counter[str]] = {}
        self._programs: dict[int, Counter[tuple[str, int]]] = {}

    def __bool__(self) -> bool:
        """Whether there is something to exchange."""
        return bool(self._tenants)

    def received(self, replica: int, charges: Charges) -> None:
        """A replica charged its tenants."""
        tenants = self._tenants.setdefault(replica, Counter())
        for tenant, used in charges.tenants:
            tenants[tenant] += used  # type: ignore[assignment]
        programs = self._programs.setdefault(replica, Counter())
        for tenant, program, num_tokens in charges.programs:
            programs[tenant, program] += num_tokens

    def take(self, replicas: Iterable[int]) -> dict[int, Charges]:
        """Returns the messages for these replicas, and resets the counts."""
        messages: dict[int, Charges] = {}
        for replica in replicas:
            tenants: Counter[str] = Counter()
            programs: Counter[tuple[str, int]] = Counter()
            for other in self._tenants.keys() - {replica}:
                tenants.update(self._tenants[other])
                programs.update(self._programs[other])
            if tenants:
                rows = [(tenant, program, count) for (tenant, program), count in programs.items()]
                messages[replica] = Charges([*tenants.items()], rows)
        self._tenants.clear()
        self._programs.clear()
        return messages
