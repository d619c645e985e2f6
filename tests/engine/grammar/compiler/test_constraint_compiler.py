"""The event loop's side of compiling: the cache, the queues, and the order of tenants."""

from __future__ import annotations

from contextlib import suppress

import anyio
import pytest
from anyio import wait_all_tasks_blocked
from support.compile_loaders import LOADER
from support.faults import has_param
from support.holds import Hold

from agentflow.engine.grammar.compiler import compiler as compiler_module
from agentflow.engine.grammar.compiler.compiler import MAX_LATENESS, ConstraintCompiler, constraint_compiler
from agentflow.engine.grammar.compiler.messages import CompileLimits
from agentflow.engine.grammar.compiler.worker_handle import CompileWorkerHandle
from agentflow.errors import AgentflowError, BadArgument, NotSupported, Overloaded, RequestRefused
from agentflow.protocol.constraint import Constraint

pytestmark = [pytest.mark.anyio, pytest.mark.trio_in_full]

PID = Constraint("regex", "pid")


def opened(**limits):
    """A held constraint is not ended for another tenant, unless the test sets ``contended_s``."""
    return constraint_compiler(CompileLimits(**({"contended_s": 600.0} | limits)), loader=LOADER)


def held(hold: Hold) -> Constraint:
    """A constraint at which the compiling process waits."""
    return Constraint("regex", f"hold {hold.path}")


class Caller:
    """Compiles in separate tasks, and notes in which order they are done."""

    def __init__(self, compiler: ConstraintCompiler, group: anyio.abc.TaskGroup) -> None:
        self.compiler = compiler
        self.done: list[str] = []
        self.refused: list[AgentflowError] = []
        self._group = group

    async def call(self, constraint: Constraint, tenant: str = "") -> anyio.CancelScope:
        """Begins, and waits until it waits."""
        scope = anyio.CancelScope()

        async def compile_one() -> None:
            with scope:
                try:
                    await self.compiler.compile(constraint, tenant=tenant)
                except AgentflowError as error:
                    self.refused.append(error)
                else:
                    self.done.append(constraint.source)

        self._group.start_soon(compile_one)
        await wait_all_tasks_blocked()
        return scope


# The cache


async def test_equal_constraints_of_a_tenant_are_compiled_once():
    async with opened() as compiler:
        compiled = await compiler.compile(PID, tenant="")
        assert await compiler.compile(Constraint("regex", "p" + "id"), tenant="") is compiled
        assert (compiled.key, compiled.form) == ("regex pid", "dfa")
        other = await compiler.compile(Constraint("grammar", "pid"), tenant="")
        assert other.key == "grammar pid"
        assert (compiler.counts.compiled, compiler.counts.cache_hits, compiler.counts.refused) == (2, 1, 0)


async def test_tenants_share_no_compiled_constraint():
    async with opened() as compiler:
        keys = set()
        for tenant in ("ann", "bob", "ann", "bob"):
            keys.add((tenant, (await compiler.compile(PID, tenant=tenant)).key))
            with pytest.raises(NotSupported):
                await compiler.compile(Constraint("regex", "refuse it"), tenant=tenant)
        assert len(keys) == len({key for _, key in keys}) == 2  # nor do engines share it
        assert (compiler.counts.compiled, compiler.counts.cache_hits) == (2, 4)


async def test_concurrent_equal_constraints_are_compiled_for_each_tenant(tmp_path):
    hold = Hold(tmp_path / "hold")
    async with opened() as compiler, anyio.create_task_group() as group:
        caller = Caller(compiler, group)
        await caller.call(held(hold), "ann")
        await hold.reached()
        await caller.call(held(hold), "bob")
        hold.release()
    assert len(caller.done) == 2
    assert (compiler.counts.compiled, compiler.counts.cache_hits) == (2, 0)


async def test_a_refused_constraint_is_refused_again_at_once():
    async with opened() as compiler:
        errors = []
        for _ in range(2):
            with pytest.raises(NotSupported, match="look-behind") as caught:
                await compiler.compile(Constraint("regex", "refuse look-behind"), tenant="ann")
            errors.append(caught.value)
        assert errors[0] is not errors[1]
        assert (compiler.counts.refused, compiler.counts.cache_hits) == (2, 1)


async def test_constraints_beyond_the_cache_are_compiled_again():
    async with opened(cache_bytes=10_000) as compiler:
        for number in (1, 2, 3, 1):
            await compiler.compile(Constraint("regex", f"payload {4000 + number}"), tenant="ann")
        assert (compiler.counts.compiled, compiler.counts.cache_hits) == (4, 0)


async def test_calls_for_a_running_constraint_wait_for_it(tmp_path):
    hold = Hold(tmp_path / "hold")
    async with opened() as compiler, anyio.create_task_group() as group:
        caller = Caller(compiler, group)
        await caller.call(held(hold), "ann")
        await hold.reached()
        for _ in range(2):
            await caller.call(held(hold), "ann")
        hold.release()
    assert len(caller.done) == 3
    assert (compiler.counts.compiled, compiler.counts.cache_hits) == (1, 0)


# Constraints that are refused before they are sent


@pytest.mark.parametrize(
    ("constraint", "error"),
    [
        (Constraint("choices", choices=("a" * 150_000, "b" * 50_001)), RequestRefused),
        (Constraint("regex", "a\ud800"), BadArgument),
        (Constraint("choices", choices=("a", "\udfff")), BadArgument),
    ],
    ids=["large choices", "surrogate", "surrogate in choices"],
)
async def test_constraints_that_cannot_be_sent_are_rejected(constraint, error):
    async with opened() as compiler:
        with pytest.raises(error, match=f"^{constraint.kind}: "):
            await compiler.compile(constraint, tenant="mallory")
        assert compiler.counts.refused == 1
        assert not compiler._jobs
        assert len(compiler._cache) == 0


# Whose turn it is


async def test_a_tenant_with_one_constraint_does_not_wait_for_anothers_many(tmp_path):
    hold = Hold(tmp_path / "hold")
    async with opened() as compiler, anyio.create_task_group() as group:
        caller = Caller(compiler, group)
        await caller.call(held(hold), "mallory")
        await hold.reached()
        for number in range(4):
            await caller.call(Constraint("regex", f"pid {number}"), "mallory")
        for name in ("ann", "bob"):
            await caller.call(Constraint("regex", name), name)
        hold.release()
    assert caller.done == [held(hold).source, "ann", "bob", "pid 0", "pid 1", "pid 2", "pid 3"]


async def test_a_long_compile_is_ended_for_another_tenant_only(tmp_path):
    hold = Hold(tmp_path / "hold")
    async with opened(contended_s=0.01) as compiler:
        async with anyio.create_task_group() as group:
            caller = Caller(compiler, group)
            await caller.call(Constraint("regex", f"native {hold.path}"), "greedy")
            await hold.reached()
            await caller.call(Constraint("regex", "its own"), "greedy")
            hold.release()
            assert (caller.done, caller.refused) == ([], [])
            await compiler.compile(Constraint("regex", "modest"), tenant="other")
        (error,) = caller.refused
        assert isinstance(error, Overloaded)
        assert error.retry_after_s == CompileLimits().wall_s
        assert caller.done == ["its own"]
        assert compiler.counts.killed == 1


async def test_a_constraint_without_processor_time_is_not_ended_for_another_tenant(tmp_path, monkeypatch):
    """Busy processors cause this: the wall time is long, the processor time is not."""
    hold, turns = Hold(tmp_path / "hold"), anyio.Event()
    count = iter(range(20))
    had_s = CompileWorkerHandle.cpu_s

    def cpu_s(worker: CompileWorkerHandle) -> float:
        if next(count, None) is None:
            turns.set()
        return had_s(worker)

    monkeypatch.setattr(CompileWorkerHandle, "cpu_s", cpu_s)
    async with opened(contended_s=0.05) as compiler, anyio.create_task_group() as group:
        caller = Caller(compiler, group)
        await caller.call(held(hold), "ann")
        await hold.reached()
        await caller.call(PID, "bob")
        await turns.wait()
        hold.release()
    assert caller.done == [held(hold).source, "pid"]
    assert compiler.counts.killed == 0


async def until_done(compiler: ConstraintCompiler, constraint: Constraint, tenant: str = "") -> None:
    """Retries while the compiler is too busy."""
    while True:
        with suppress(Overloaded):
            await compiler.compile(constraint, tenant=tenant)
            return


async def until_late(compiler: ConstraintCompiler, hold: Hold) -> Overloaded:
    """Returns once a process compiles for ``ann`` and has reached the hold, and ann's call has timed out."""
    has_reached = anyio.Event()
    errors: list[Overloaded] = []

    async def call() -> None:
        while True:
            is_last = has_reached.is_set()
            with pytest.raises(Overloaded) as caught:
                await compiler.compile(held(hold), tenant="ann")
            if is_last:
                return errors.append(caught.value)

    async with anyio.create_task_group() as group:
        group.start_soon(call)
        await hold.reached()
        has_reached.set()
    return errors[0]


@pytest.fixture
def endless_retries(monkeypatch) -> None:
    """A late constraint is compiled for as long as it takes."""
    monkeypatch.setattr(compiler_module, "MAX_LATENESS", 1e9)


@pytest.mark.usefixtures("endless_retries")
async def test_a_late_constraint_is_overloaded_and_a_retry_finds_it_compiled(tmp_path):
    hold = Hold(tmp_path / "hold")
    async with opened(wall_s=0.01) as compiler:
        error = await until_late(compiler, hold)
        assert error.retry_after_s == 0.01
        pid = compiler.pid
        hold.release()
        await until_done(compiler, held(hold), "ann")
        assert compiler.pid == pid
        assert (compiler.counts.killed, compiler.counts.compiled) == (0, 1)


@pytest.mark.usefixtures("endless_retries")
async def test_a_late_constraint_is_ended_for_another_tenant(tmp_path):
    hold = Hold(tmp_path / "hold")
    async with opened(wall_s=0.01) as compiler:
        await until_late(compiler, hold)
        pid = compiler.pid
        await until_done(compiler, PID, "bob")
        hold.release()
        assert compiler.pid != pid
        assert (compiler.counts.killed, compiler.counts.compiled) == (1, 1)


async def test_full_queues_refuse(tmp_path):
    hold = Hold(tmp_path / "hold")
    async with opened(max_waiting=3, max_waiting_per_tenant=2) as compiler:
        async with anyio.create_task_group() as group:
            caller = Caller(compiler, group)
            await caller.call(held(hold), "ann")
            await hold.reached()  # it waits no more
            for number in (1, 2, 1, 2):
                await caller.call(Constraint("regex", f"a{number}"), "ann")
            for name, tenant, message in (
                ("a3", "ann", "2 constraints of this tenant wait to be compiled, which is the limit: try"),
                ("b1", "bob", ""),
                ("b2", "bob", "3 constraints of all tenants wait to be compiled, which is the limit: try"),
                ("b1", "bob", ""),  # which waits already
                ("pid", "carl", "3 constraints of all tenants"),
            ):
                before = len(caller.refused)
                await caller.call(Constraint("regex", name), tenant)
                refused = caller.refused[before:]
                assert [type(error) for error in refused] == ([Overloaded] if message else [])
                assert all(str(error).startswith(message) for error in refused)
            hold.release()
        assert sorted(caller.done) == ["a1", "a1", "a2", "a2", "b1", "b1", held(hold).source]
        assert compiler.counts.refused == 3
        await compiler.compile(PID, tenant="ann")


# Cancelled calls


async def test_a_cancelled_call_does_not_affect_others(tmp_path):
    hold = Hold(tmp_path / "hold")
    async with opened() as compiler, anyio.create_task_group() as group:
        caller = Caller(compiler, group)
        scopes = [await caller.call(held(hold)) for _ in range(3)]
        await hold.reached()
        waiting = [await caller.call(PID) for _ in range(3)]
        for scope in (*scopes[:2], *waiting[1:]):
            scope.cancel()
        await wait_all_tasks_blocked()
        hold.release()
    assert caller.done == [held(hold).source, "pid"]
    assert (compiler.counts.compiled, compiler.counts.killed) == (2, 0)


async def test_an_abandoned_waiting_constraint_is_not_compiled(tmp_path):
    hold = Hold(tmp_path / "hold")
    async with opened(max_waiting=1) as compiler, anyio.create_task_group() as group:
        caller = Caller(compiler, group)
        await caller.call(held(hold))
        await hold.reached()
        for number in range(5):
            (await caller.call(Constraint("regex", f"pid {number}"))).cancel()
            await wait_all_tasks_blocked()
        await caller.call(PID)
        hold.release()
    assert caller.done == [held(hold).source, "pid"]
    assert compiler.counts.compiled == 2
    assert not caller.refused


async def test_an_abandoned_running_constraint_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(compiler_module, "ABANDONED_S", 0.0)
    hold = Hold(tmp_path / "hold")
    async with opened() as compiler, anyio.create_task_group() as group:
        caller = Caller(compiler, group)
        scopes = [await caller.call(held(hold)) for _ in range(2)]
        await hold.reached()
        before = compiler.pid
        for scope in scopes:
            assert compiler.counts.killed == 0
            scope.cancel()
            await wait_all_tasks_blocked()
        # Asked for again, it is compiled again, by another process.
        compiled = await compiler.compile(held(hold), tenant="")
        hold.release()
        assert int(compiled.payload) == compiler.pid != before
    assert caller.done == []
    assert (compiler.counts.killed, compiler.counts.compiled, compiler.counts.refused) == (1, 1, 0)
    assert not compiler._jobs


async def test_a_constraint_abandoned_for_a_moment_continues(tmp_path, monkeypatch):
    monkeypatch.setattr(compiler_module, "ABANDONED_S", 1e6)  # the moment
    hold = Hold(tmp_path / "hold")
    async with opened(wall_s=1e7) as compiler, anyio.create_task_group() as group:
        caller = Caller(compiler, group)
        scope = await caller.call(held(hold))
        await hold.reached()
        scope.cancel()
        await wait_all_tasks_blocked()
        job = compiler._jobs["", held(hold)]
        assert (job.num_waiting, job.scope.deadline) == (0, job.began_at + 1e6)
        await caller.call(held(hold))
        assert (job.num_waiting, job.scope.deadline) == (1, job.began_at + 1e7 * MAX_LATENESS)
        hold.release()
    assert caller.done == [held(hold).source]
    assert (compiler.counts.killed, compiler.counts.compiled) == (0, 1)


# Limits


@pytest.mark.parametrize("field", CompileLimits.__struct_fields__)
def test_limits_make_sense(field):
    with pytest.raises(BadArgument, check=has_param(field)):
        CompileLimits(**{field: -1})
