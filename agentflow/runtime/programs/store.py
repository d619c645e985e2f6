"""The programs that outlive the requests of their clients.

A store limits, for each tenant, the number of programs, their memory, and the time for which an unused
program is kept. It is synchronous, and its clock is a parameter.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from agentflow.errors import RateLimited
from agentflow.runtime.limits import MemoryBudget, TenantMemory


@dataclass(frozen=True, slots=True)
class ProgramLimits:
    """The limits of a ``ProgramStore``."""

    max_programs: int  # of one tenant
    program_bytes: int  # of one program
    total_bytes: int  # of all programs; of one tenant, its part (``limits.tenant_part``)
    idle_s: float  # the time after its last use until a program expires


class StoredProgram(Protocol):
    """A program in a store. Programs of different tenants may have the same id."""

    @property
    def id(self) -> str: ...

    @property
    def tenant(self) -> str: ...


ProgramT = TypeVar("ProgramT", bound=StoredProgram)
_Key = tuple[str, str]


class ProgramStore(Generic[ProgramT]):
    """The programs of all tenants. A tenant finds only its own.

    Args:
        limits: The limits.
        clock: The time in seconds.
    """

    def __init__(self, limits: ProgramLimits, clock: Callable[[], float]) -> None:
        self._limits = limits
        self._clock = clock
        self._memory = TenantMemory(
            limits.total_bytes, "all programs together may hold", "close some, or try again later"
        )
        self._of_tenant: dict[str, dict[str, ProgramT]] = {}
        self._num_uses: dict[_Key, int] = {}
        self._idle: OrderedDict[_Key, float] = OrderedDict()  # since when, the longest first

    def __len__(self) -> int:
        return sum(map(len, self._of_tenant.values()))

    def __iter__(self) -> Iterator[ProgramT]:
        return iter([program for own in self._of_tenant.values() for program in own.values()])

    @property
    def num_bytes(self) -> int:
        """The estimated memory of all programs."""
        return self._memory.num_bytes

    def tenant_memory(self, tenant: str) -> MemoryBudget:
        """The memory budget of one more program of the tenant. Close it with the program."""
        return MemoryBudget(
            self._limits.program_bytes,
            "this program may hold",
            "close it, and continue in another one",
            within=self._memory.of(tenant),
        )

    def add(self, program: ProgramT) -> None:
        """Adds a program, which is idle. ``RateLimited`` if its tenant has too many."""
        own = self._of_tenant.get(program.tenant, {})
        if len(own) >= self._limits.max_programs:
            raise RateLimited(
                f"this tenant has {self._limits.max_programs} open programs, which is the limit: close some"
            )
        self._of_tenant.setdefault(program.tenant, own)[program.id] = program
        self._idle[program.tenant, program.id] = self._clock()

    @contextmanager
    def using(self, tenant: str, program_id: str) -> Iterator[ProgramT | None]:
        """The scope of one use of a program, which does not expire in it; None if there is none. The program
        may be removed meanwhile."""
        key = (tenant, program_id)
        program = self._of_tenant.get(tenant, {}).get(program_id)
        if program is None or self._has_expired(key):
            yield None
            return
        self._num_uses[key] = self._num_uses.get(key, 0) + 1
        self._idle.pop(key, None)
        try:
            yield program
        finally:
            self._end_use(key, program)

    def _end_use(self, key: _Key, program: ProgramT) -> None:
        if self._of_tenant.get(key[0], {}).get(key[1]) is not program:
            return  # removed, with its uses
        self._num_uses[key] -= 1
        if not self._num_uses[key]:
            del self._num_uses[key]
            self._idle[key] = self._clock()

    def remove(self, program: ProgramT) -> bool:
        """Removes a program. False if it has been removed already."""
        own = self._of_tenant.get(program.tenant, {})
        if own.get(program.id) is not program:
            return False
        del own[program.id]
        if not own:
            del self._of_tenant[program.tenant]
        key = (program.tenant, program.id)
        self._num_uses.pop(key, None)
        self._idle.pop(key, None)
        return True

    def take_expired(self) -> list[ProgramT]:
        """Removes the programs that have expired."""
        expired: list[ProgramT] = []
        while self._idle and self._has_expired(key := next(iter(self._idle))):
            program = self._of_tenant[key[0]][key[1]]
            self.remove(program)
            expired.append(program)
        return expired

    def next_expiry_s(self) -> float:
        """The seconds until a program may expire, if none is used meanwhile."""
        if not self._idle:
            return self._limits.idle_s
        return max(0.0, next(iter(self._idle.values())) + self._limits.idle_s - self._clock())

    def _has_expired(self, key: _Key) -> bool:
        since_s = self._idle.get(key)
        return since_s is not None and since_s + self._limits.idle_s <= self._clock()
