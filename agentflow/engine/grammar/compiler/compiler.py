"""The server's side of compiling constraints. Runs in the event loop.

``ConstraintCompiler`` returns cached constraints and sends the others to a compiling process, one at a time.
Hostile requests could cause the highest costs in compiling, so it is isolated: each constraint has limits,
each tenant has a queue (``CompileQueue``), the process runs on idle processors with an allowance
(``CpuAllowance``), and each tenant has a separate cache (``CompileCache``), so that the time of a call
reveals nothing about other tenants.
"""

from __future__ import annotations

import hashlib
import logging
import math
import sys
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

import anyio
import msgspec

from agentflow.engine.grammar.compiler.messages import (
    CompiledConstraint,
    CompileEnd,
    CompileFailure,
    CompileLimits,
    over_cpu_time,
)
from agentflow.engine.grammar.compiler.worker_handle import LAST_WORDS_S, CannotCompile, CompileWorkerHandle
from agentflow.errors import AgentflowError, BadArgument, EngineFailed, Overloaded, RequestRefused
from agentflow.protocol.bounds.cpu_allowance import CpuAllowance
from agentflow.protocol.constraint import MAX_SOURCE_CHARS, Constraint
from agentflow.runtime.limits import tenant_part
from agentflow.runtime.task_group import open_task_group

ItemT = TypeVar("ItemT", bound=Hashable)


class CompileQueue(Generic[ItemT]):
    """A queue for each tenant. The tenant that has used the least time is served next; among equals, the one
    served longest ago. With equal costs this is round robin. Each item belongs to one tenant.

    >>> queue = CompileQueue[str](max_waiting=10, max_waiting_per_tenant=5)
    >>> for tenant, item in (("ann", "a1"), ("ann", "a2"), ("bob", "b1")):
    ...     queue.push(tenant, item)
    >>> [queue.pop(), queue.charge("ann", 2.0), queue.pop(), queue.pop()]
    [('ann', 'a1'), None, ('bob', 'b1'), ('ann', 'a2')]
    """

    def __init__(self, *, max_waiting: int, max_waiting_per_tenant: int) -> None:
        self._max_waiting = max_waiting
        self._max_per_tenant = max_waiting_per_tenant
        self._items: dict[str, dict[ItemT, None]] = {}  # never empty; in the order of their turns
        self._tenants: dict[ItemT, str] = {}
        # Seconds used by tenants that wait or are ahead of ``_served``. A new tenant begins at ``_served``:
        # past idleness gives no credit.
        self._used: dict[str, float] = {}
        self._served = 0.0

    def __len__(self) -> int:
        """The number of waiting items."""
        return len(self._tenants)

    def push(self, tenant: str, item: ItemT) -> None:
        """Queues the item unless it is queued already. Raises ``Overloaded`` if a queue is full."""
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
        raise Overloaded(
            f"{most} constraints {whose} wait to be compiled, which is the limit: try again later"
        )

    def waits_besides(self, tenant: str) -> bool:
        """Whether any other tenant waits."""
        return any(name != tenant for name in self._items)

    def pop(self) -> tuple[str, ItemT]:
        """Returns the next item and its tenant. Raises ``KeyError`` if the queue is empty."""
        tenant = min(self._items, key=self._used.__getitem__) if self._items else ""
        items = self._items[tenant]
        item = next(iter(items))
        self._served = self._used[tenant]
        self.discard(item)
        if items:
            self._items[tenant] = self._items.pop(tenant)  # after tenants that have used as much
        return tenant, item

    def charge(self, tenant: str, seconds: float) -> None:
        """Adds the time that an item took to its tenant's use."""
        self._used[tenant] = max(self._used.get(tenant, 0.0), self._served) + seconds
        if not self._items:
            self._used.clear()  # no waiting tenant has used less
        elif len(self._used) > 2 * self._max_waiting + len(self._items):
            self._used = {name: self._used[name] for name in self._items}

    def discard(self, item: ItemT) -> None:
        """Removes a waiting item."""
        tenant = self._tenants.pop(item)
        del self._items[tenant][item]
        if not self._items[tenant]:
            del self._items[tenant]


Outcome = CompiledConstraint | CompileFailure

# The size of an entry without its texts and payload.
ENTRY_BYTES = 1_000


class CompileCache:
    """Compiled constraints and failures; the least recently used ones are dropped first. ``max_bytes``: for
    all tenants together; one tenant has at most its part (``tenant_part``). A tenant that fills the cache
    drops its own entries. A lookup costs one hash of the constraint's text."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        # For each tenant, the least recently used first.
        self._entries: defaultdict[str, dict[Constraint, tuple[Outcome, int]]] = defaultdict(dict)
        self._num_bytes_of: Counter[str] = Counter()

    def __len__(self) -> int:
        return sum(map(len, self._entries.values()))

    @property
    def num_bytes(self) -> int:
        """The size of all entries."""
        return self._num_bytes_of.total()

    def get(self, tenant: str, constraint: Constraint) -> Outcome | None:
        """Returns the tenant's entry, or None, and makes it the most recently used one."""
        entries = self._entries.get(tenant, {})
        entry = entries.pop(constraint, None)
        if entry is None:
            return None
        entries[constraint] = entry
        return entry[0]

    def put(self, tenant: str, constraint: Constraint, outcome: Outcome) -> None:
        """Adds an entry and drops others to make room: first entries of this tenant, then entries of the
        tenant that uses most. An entry larger than the tenant's part is not kept."""
        num_bytes, most_bytes = _size(constraint, outcome), tenant_part(self._max_bytes, tenant)
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
    if isinstance(outcome, CompileFailure):
        return ENTRY_BYTES + texts + sys.getsizeof(outcome.message)
    return ENTRY_BYTES + texts + len(outcome.payload) + sys.getsizeof(outcome.key)


logger = logging.getLogger(__name__)

# The ``CompileConstraint`` that the process calls.
LOADER = "agentflow.engine.grammar.compiler.compile:compile_constraint"
# A constraint for which no request waits may still run this long: most are done by then, and a new process
# takes longer to start.
ABANDONED_S = 0.2
# The processor time that the process may use in a burst; most constraints take a few milliseconds.
BURST_S = 0.1
# After that it gets its share of a processor in slices of this length.
SLICE_S = 0.01
# A constraint is compiled for at most this many times ``wall_s``, so that a retry may find it done.
MAX_LATENESS = 10
# A process that runs this long past its limit of processor time is killed.
KILL_GRACE_S = 2.5
# After this many processes in a row that died without compiling anything, wait for new work.
MAX_FAILURES = 3


@dataclass(frozen=True, slots=True)
class CompileCounts:
    """Counters since the start of the compiler."""

    compiled: int = 0  # constraints
    refused: int = 0  # calls that raised an error
    cache_hits: int = 0  # calls answered from the cache, with a result or an error
    killed: int = 0  # processes that died or were killed while compiling

    def __add__(self, other: CompileCounts) -> CompileCounts:
        return CompileCounts(
            self.compiled + other.compiled,
            self.refused + other.refused,
            self.cache_hits + other.cache_hits,
            self.killed + other.killed,
        )


@asynccontextmanager
async def constraint_compiler(
    limits: CompileLimits | None = None, *, loader: str = LOADER
) -> AsyncIterator[ConstraintCompiler]:
    """Runs a compiler and its process for the duration of the context. The process loads in the background;
    the first call waits for it. ``loader``: the function that compiles, as ``package.module:function``.

    >>> async with constraint_compiler() as compiler:
    ...     compiled = await compiler.compile(Constraint("regex", "[0-9]{4}"), tenant="ann")
    """
    compiler = ConstraintCompiler(limits or CompileLimits(), loader)
    async with open_task_group() as group:
        group.start_soon(compiler.run)
        try:
            yield compiler
        finally:
            group.cancel_scope.cancel()


class _Job:
    """One tenant's constraint while it waits or is compiled, and the number of calls that wait for it."""

    def __init__(self, tenant: str, constraint: Constraint) -> None:
        self.tenant = tenant
        self.constraint = constraint
        self.num_waiting = 0
        self.ended = anyio.Event()
        self.outcome: Outcome | None = None
        self.began_at: float | None = None
        self.used_too_much = False  # processor time
        self.scope = anyio.CancelScope()  # cancelled to end its time in the process


class ConstraintCompiler:
    """Created by ``constraint_compiler``. Belongs to the event loop's thread."""

    def __init__(self, limits: CompileLimits, loader: str) -> None:
        self._limits = limits
        self._loader = loader
        self._cache = CompileCache(limits.cache_bytes)
        self._queue = CompileQueue[_Job](
            max_waiting=limits.max_waiting, max_waiting_per_tenant=limits.max_waiting_per_tenant
        )
        self._jobs: dict[tuple[str, Constraint], _Job] = {}  # waiting and running
        self._has_work = anyio.Event()
        self._has_ended = False
        self._worker: CompileWorkerHandle | None = None
        self._allowance = CpuAllowance(BURST_S, limits.cpu_share, time.monotonic)
        self._num_compiled = 0
        self._num_refused = 0
        self._num_cache_hits = 0
        self._num_killed = 0

    @property
    def counts(self) -> CompileCounts:
        """Counts since the start."""
        return CompileCounts(self._num_compiled, self._num_refused, self._num_cache_hits, self._num_killed)

    @property
    def pid(self) -> int | None:
        """The current process, loading or loaded; None between two."""
        return None if self._worker is None else self._worker.pid

    async def compile(self, constraint: Constraint, *, tenant: str) -> CompiledConstraint:
        """Returns the compiled constraint. Equal constraints of a tenant are compiled once.

        Raises:
            BadArgument: it is invalid, or not supported.
            RequestRefused: it reached a limit, which the message states.
            Overloaded: too many constraints wait, or the machine is too busy.
            EngineFailed: the compiling process failed.
        """
        # These are settings for the engine, which do not change the compiled form.
        constraint = msgspec.structs.replace(
            constraint, jump_forward=True, string_chars=None, list_items=None
        )
        try:
            outcome = self._cache.get(tenant, constraint)
            if outcome is None:
                outcome = await self._wait_for(constraint, tenant)
            else:
                self._num_cache_hits += 1
            if isinstance(outcome, CompileFailure):
                raise outcome.to_exception()
        except AgentflowError:
            self._num_refused += 1
            raise
        return outcome

    async def _wait_for(self, constraint: Constraint, tenant: str) -> Outcome:
        job = self._jobs.get((tenant, constraint))
        if job is None or job.scope.cancel_called:  # cancelled: its process is about to end
            _check_sendable(constraint)
            job = _Job(tenant, constraint)
        self._check_alive()
        if job.began_at is None:
            self._queue.push(tenant, job)
            self._jobs[tenant, constraint] = job
            self._has_work.set()
        else:
            job.scope.deadline = self._last_deadline(job)  # restores the deadline of an abandoned job
        job.num_waiting += 1
        is_late = False
        try:
            with anyio.move_on_after(self._limits.wall_s) as patience:
                await job.ended.wait()
            is_late = patience.cancelled_caught
        finally:
            job.num_waiting -= 1
            goes_on = is_late and job.began_at is not None
            if not job.num_waiting and not job.ended.is_set() and not goes_on:
                self._abandon(job)
        if job.outcome is None:
            self._check_alive()
            return self._too_busy(job)
        return job.outcome

    def _is_late(self, job: _Job) -> bool:
        return job.began_at is not None and anyio.current_time() >= job.began_at + self._limits.wall_s

    def _last_deadline(self, job: _Job) -> float:
        assert job.began_at is not None
        return job.began_at + MAX_LATENESS * self._limits.wall_s

    def _too_busy(self, job: _Job) -> CompileFailure:
        """Returns the failure of a constraint that did not get enough processor time in time."""
        message = f"{job.constraint.kind}: not compiled yet, because the processors are busy: try again"
        return CompileFailure(Overloaded.code, message, is_final=False, retry_after_s=self._limits.wall_s)

    def _abandon(self, job: _Job) -> None:
        if job.began_at is None:
            self._queue.discard(job)
            del self._jobs[job.tenant, job.constraint]
        else:
            job.scope.deadline = min(job.scope.deadline, job.began_at + ABANDONED_S)

    def _check_alive(self) -> None:
        if self._has_ended:
            raise EngineFailed("the engine has stopped and compiles no more constraints")

    async def run(self) -> None:
        """Runs one process after the other, until cancelled."""
        num_failures = 0  # in a row
        try:
            while True:
                try:
                    problem = await self._live()
                except CannotCompile as error:
                    problem, num_failures = str(error), MAX_FAILURES
                num_failures += 1
                if problem is None:
                    num_failures = 0
                elif num_failures >= MAX_FAILURES:
                    logger.error("constraints cannot be compiled: %s", problem)
                    self._end_all(problem)
                    await self._work()
                    num_failures = 0
        finally:
            self._has_ended = True
            for job in self._jobs.values():
                job.ended.set()

    async def _live(self) -> str | None:
        """Runs one process until it ends. If it has compiled nothing, returns how it died. Raises
        ``CannotCompile`` if another process would fail in the same way."""
        try:
            worker = self._worker = CompileWorkerHandle.start(self._loader, self._limits)
        except OSError as error:
            raise CannotCompile(f"their process cannot be started: {error}") from error
        has_compiled = False
        grace_s = 0.0
        try:
            await worker.ready()
            while worker.is_usable:
                await self._next_work(worker)
                has_compiled = True
                await anyio.sleep(self._allowance.wait_s(SLICE_S))  # noqa: TID251  it took its share
                if not self._queue:
                    continue
                _, job = self._queue.pop()
                await self._run(worker, job)
        except EOFError:
            grace_s = LAST_WORDS_S
        finally:
            how = await worker.end(grace_s)
            self._worker = None
        return None if has_compiled else f"their process {how}"

    async def _next_work(self, worker: CompileWorkerHandle) -> None:
        """Waits until the queue has an item. Raises ``EOFError`` if the process dies meanwhile."""
        if self._queue:
            return
        async with open_task_group() as group:
            group.start_soon(worker.watch)
            await self._work()
            group.cancel_scope.cancel()

    async def _work(self) -> None:
        while not self._queue:
            self._has_work = anyio.Event()
            await self._has_work.wait()

    async def _run(self, worker: CompileWorkerHandle, job: _Job) -> None:
        end: CompileEnd | None = None
        job.began_at = anyio.current_time()
        with anyio.CancelScope(deadline=self._last_deadline(job)) as job.scope:
            async with open_task_group() as group:
                group.start_soon(self._slow_down, worker, job)
                end = await worker.compile(job.constraint)
                group.cancel_scope.cancel()
        if end is None or worker.has_died:
            self._num_killed += 1
            await worker.end()  # before the next job, and charged to this tenant
        self._queue.charge(job.tenant, anyio.current_time() - job.began_at)
        if end is None and job.used_too_much:
            end = CompileEnd(failure=over_cpu_time(job.constraint, self._limits.cpu_s))
        if end is None:
            end = CompileEnd(failure=self._too_busy(job))
        if end.compiled is not None:
            self._num_compiled += 1
            end = CompileEnd(_of_tenant(end.compiled, job.tenant))
        outcome = end.compiled or end.failure
        assert outcome is not None
        self._end(job, outcome)

    async def _slow_down(self, worker: CompileWorkerHandle, job: _Job) -> None:
        """Runs the process while its allowance lasts and pauses it afterwards, until cancelled. Even work at
        idle priority delays other threads: on two cores, a concurrent forward pass takes a third longer. A
        constraint that takes long is ended if another tenant waits."""
        allowance, began_s = self._allowance, worker.cpu_s()
        before_s = began_s
        while True:
            try:
                await anyio.sleep(max(allowance.left_s, SLICE_S))  # noqa: TID251  its turn
            finally:
                used_s = worker.cpu_s()
                if used_s < math.inf:
                    allowance.spend(used_s - before_s)
                    before_s = used_s
            if before_s - began_s > self._limits.cpu_s + KILL_GRACE_S:
                job.used_too_much = True
                job.scope.cancel()
            is_long = before_s - began_s >= self._limits.contended_s or self._is_late(job)
            if is_long and self._queue.waits_besides(job.tenant):
                job.scope.cancel()
            worker.pause()
            try:
                await anyio.sleep(allowance.wait_s(SLICE_S))  # noqa: TID251  the others' turn
            finally:
                worker.go_on()

    def _end(self, job: _Job, outcome: Outcome) -> None:
        if isinstance(outcome, CompiledConstraint) or outcome.is_final:
            self._cache.put(job.tenant, job.constraint, outcome)
        key = job.tenant, job.constraint
        if self._jobs.get(key) is job:  # not if it was abandoned and requested again
            del self._jobs[key]
        job.outcome = outcome
        job.ended.set()

    def _end_all(self, problem: str) -> None:
        message = f"constraints cannot be compiled: {problem}"
        while self._queue:
            self._end(self._queue.pop()[1], CompileFailure(EngineFailed.code, message, is_final=False))


def _of_tenant(compiled: CompiledConstraint, tenant: str) -> CompiledConstraint:
    """Replaces the key by one that only this tenant uses. Engines cache grammars by key, and the time of a
    call reveals a cache hit."""
    if not tenant:
        return compiled
    key = hashlib.sha256(f"{tenant}\0{compiled.key}".encode()).hexdigest()
    return msgspec.structs.replace(compiled, key=key)


def _check_sendable(constraint: Constraint) -> None:
    """Checks the size and the text of the constraint before it is sent."""
    if sum(map(len, constraint.choices)) > MAX_SOURCE_CHARS:
        raise RequestRefused(
            f"choices: longer than {MAX_SOURCE_CHARS} characters together, which is the limit"
        )
    try:
        "".join((constraint.source, *constraint.choices)).encode()
    except UnicodeEncodeError as error:
        raise BadArgument(f"{constraint.kind}: contains a lone surrogate, which is not valid text") from error
