"""Compiling in a separate process: a constraint that harms the process fails only its request."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import anyio
import pytest
from support.compile_loaders import LOADER
from support.holds import Hold, until
from support.processes import signal_child

from agentflow.engine.grammar.compiler import compiler as compiler_module
from agentflow.engine.grammar.compiler import worker
from agentflow.engine.grammar.compiler.compiler import ConstraintCompiler, constraint_compiler
from agentflow.engine.grammar.compiler.messages import CompileLimits, end_decoder
from agentflow.engine.grammar.compiler.worker_handle import CompileWorkerHandle
from agentflow.engine.machine.child_process import to_frame
from agentflow.errors import AgentflowError, BadArgument, EngineFailed, NotSupported, RequestRefused
from agentflow.protocol.constraint import Constraint

pytestmark = [pytest.mark.anyio, pytest.mark.trio_in_full]

TESTS = Path(__file__).parents[3]
END_S = 20.0
# On a busy machine a process of the idle class waits long for its fifth of a second. With all of a processor
# instead of a part, it is not paused besides.
LIMITS = CompileLimits(
    cpu_s=0.2, cpu_share=1.0, wall_s=100.0, memory_bytes=100_000_000, compiled_bytes=6_000_000
)

LITTLE_CPU = CompileLimits(cpu_s=0.1, cpu_share=1.0, wall_s=100.0)


def opened(limits: CompileLimits = LIMITS):
    return constraint_compiler(limits, loader=LOADER)


async def process_of(compiler: ConstraintCompiler, source: str = "pid") -> int:
    """The number of the process that compiles ``source``, as reported by it."""
    compiled = await compiler.compile(Constraint("regex", source), tenant="ann")
    return int(compiled.payload)


async def refusal(compiler: ConstraintCompiler, source: str) -> AgentflowError:
    """The error that a constraint ends with."""
    with pytest.raises(AgentflowError) as caught:
        await compiler.compile(Constraint("regex", source), tenant="mallory")
    return caught.value


def score_of(process: int) -> int:
    """How soon it is killed where memory runs out: 1000 is first."""
    return int(Path(f"/proc/{process}/oom_score_adj").read_text())


# The effects of constraints on the process


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        ("spin", RequestRefused, "regex: it takes more than 0.2 s of processor time, which is the limit"),
        ("recurse 100000", RequestRefused, "regex: it nests deeper than 1000 calls, which is the limit"),
        (
            "payload 6000001",
            RequestRefused,
            "regex: it is larger than 6 MB when compiled, which is the limit",
        ),
        ("refuse back-references", NotSupported, "back-references"),
        ("complain of that", BadArgument, "of that"),
        ("fail", EngineFailed, "regex: compiling it failed: the server's log explains it under incident "),
    ],
)
async def test_the_process_survives_faults_in_python(source, error, message):
    async with opened() as compiler:
        before = await process_of(compiler)
        failure = await refusal(compiler, source)
        assert type(failure) is error
        assert failure.args[0].startswith(message)
        assert await process_of(compiler, "pid again") == before
        assert (compiler.counts.killed, compiler.counts.refused, compiler.counts.compiled) == (0, 1, 2)


@pytest.mark.parametrize("source", ["allocate 200000000", "grow"])
async def test_out_of_memory_fails_the_constraint_and_replaces_the_process(source):
    limits = CompileLimits(cpu_s=10.0, cpu_share=1.0, wall_s=100.0, memory_bytes=100_000_000)
    async with opened(limits) as compiler:
        before = await process_of(compiler)
        failure = await refusal(compiler, source)
        assert type(failure) is RequestRefused
        assert str(failure).startswith("regex: it needs more than 100 MB of memory, which is the limit")
        assert await process_of(compiler, "pid again") != before
        assert (compiler.counts.killed, compiler.counts.compiled) == (0, 2)


@pytest.mark.parametrize(
    ("source", "limits", "message"),
    [
        ("native", LIMITS, "regex: it takes more than 0.2 s of processor time, which is the limit"),
        ("stubborn", LIMITS, "regex: it takes more than 0.2 s of processor time, which is the limit"),
        # It ignores SIGXCPU.
        ("hang", LITTLE_CPU, "regex: it takes more than 0.1 s of processor time, which is the limit"),
        (
            "abort",
            LIMITS,
            "regex: the compiling process was killed by SIGABRT of it: it nests too deeply, or needs",
        ),
    ],
)
async def test_a_fault_in_native_code_ends_the_process_and_is_cached(source, limits, message, monkeypatch):
    monkeypatch.setattr(compiler_module, "KILL_GRACE_S", 0.1)
    async with opened(limits) as compiler:
        before = await process_of(compiler)
        for _ in range(2):
            failure = await refusal(compiler, source)
            assert type(failure) is RequestRefused
            assert str(failure).startswith(message)
        assert (compiler.counts.killed, compiler.counts.cache_hits) == (1, 1)
        assert await process_of(compiler, "pid again") != before


async def test_a_process_that_has_grown_is_replaced():
    async with opened() as compiler:
        first = await process_of(compiler, "leave 30000000")
        assert await process_of(compiler, "leave 30000001") == first
        second = await process_of(compiler, "leave 30000002")
        assert second != first
        assert (compiler.counts.killed, compiler.counts.compiled) == (0, 3)


async def test_large_answers_one_after_the_other():
    """More than a socket buffers, each read while the next is requested."""
    async with opened() as compiler:
        before = await process_of(compiler)
        sizes = [2_000_000 + number for number in range(12)]
        received: list[int] = []

        async def compile_one(size: int) -> None:
            constraint = Constraint("regex", f"payload {size}")
            received.append(len((await compiler.compile(constraint, tenant="ann")).payload))

        async with anyio.create_task_group() as group:
            for size in sizes:
                group.start_soon(compile_one, size)
        assert sorted(received) == sizes
        assert await process_of(compiler, "pid again") == before


# Killed from outside


async def test_killed_while_it_compiles_only_that_constraint_fails(tmp_path):
    hold = Hold(tmp_path / "hold")
    failures: list[AgentflowError] = []
    processes: list[int] = []

    async def fail() -> None:
        failures.append(await refusal(compiler, f"hold {hold.path}"))

    async def succeed(number: int) -> None:
        processes.append(await process_of(compiler, f"pid {number}"))

    async with opened() as compiler:
        async with anyio.create_task_group() as group:
            group.start_soon(fail)
            await hold.reached()
            for number in range(3):
                group.start_soon(succeed, number)
            await anyio.wait_all_tasks_blocked()
            killed = compiler.pid
            signal_child(killed, signal.SIGKILL)
            hold.release()
        assert [type(failure) for failure in failures] == [EngineFailed]
        assert "the compiling process was killed by SIGKILL while it compiled this" in str(failures[0])
        assert processes == [compiler.pid] * 3
        assert compiler.pid != killed
        assert compiler.counts.killed == 1
        # The kill was no fault of the constraint: nothing is cached.
        assert await process_of(compiler, f"hold {hold.path}") == compiler.pid


async def test_killed_while_it_waits_it_is_replaced():
    async with opened() as compiler:
        for number in range(2):
            before = await process_of(compiler, f"pid {number}")
            signal_child(before, signal.SIGKILL)
            await until(lambda: compiler.pid != before)  # noqa: B023
            assert await process_of(compiler, f"pid {number} again") != before
        assert (compiler.counts.killed, compiler.counts.refused) == (0, 0)


async def test_the_process_ignores_sigint_and_sigterm():
    async with opened() as compiler:
        before = await process_of(compiler)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal_child(before, number)
        assert await process_of(compiler, "pid again") == before


@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="the platform has no such class")
async def test_the_process_runs_at_idle_priority(monkeypatch):
    monkeypatch.setattr(CompileWorkerHandle, "module", worker.__name__)  # tests have another one
    async with opened() as compiler:
        process = await process_of(compiler)
        assert os.sched_getscheduler(process) == os.SCHED_IDLE
        assert os.getpriority(os.PRIO_PROCESS, process) == 19
        assert score_of(process) == 1000


@pytest.mark.skipif(resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 2048, reason="too few files")
async def test_a_server_with_many_files_open():
    with contextlib.ExitStack() as stack:
        for _ in range(1100):
            stack.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        async with opened() as compiler:
            assert await process_of(compiler) == compiler.pid


# Loading


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        ("no_such_package:f", "the package 'no_such_package' is not installed: pip install"),
        ("json:no_such_function", "has no attribute 'no_such_function'"),
    ],
)
async def test_a_loader_that_cannot_be_loaded_fails_each_call(loader, message):
    async with constraint_compiler(LIMITS, loader=loader) as compiler:
        for _ in range(2):
            failure = await refusal(compiler, "pid")
            assert type(failure) is EngineFailed
            assert str(failure).startswith("constraints cannot be compiled: ")
            assert message in str(failure)
        assert compiler.counts.cache_hits == 0


async def test_a_process_that_dies_at_each_start_is_retried_on_the_next_call(tmp_path, monkeypatch):
    module = tmp_path / "deadly_import.py"
    module.write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    monkeypatch.syspath_prepend(tmp_path)
    async with constraint_compiler(LIMITS, loader="deadly_import:compile_constraint") as compiler:
        failure = await refusal(compiler, "pid")
        assert type(failure) is EngineFailed
        assert str(failure) == "constraints cannot be compiled: their process was killed by SIGKILL"
        # The size differs: within a second, Python tells a changed source from its bytecode by its size.
        module.write_text("# now it lives\nfrom support.compile_loaders import compile_constraint\n")
        assert await process_of(compiler) == compiler.pid


async def test_a_process_that_cannot_start_is_an_error(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    async with opened() as compiler:
        failure = await refusal(compiler, "pid")
        assert type(failure) is EngineFailed
        assert "their process cannot be started: " in str(failure)


# The end


async def test_the_process_ends_with_its_scope(tmp_path):
    hold = Hold(tmp_path / "hold")
    failures: list[AgentflowError] = []

    async def fail(source: str) -> None:
        failures.append(await refusal(compiler, source))

    async with anyio.create_task_group() as group, opened() as compiler:
        group.start_soon(fail, f"hold {hold.path}")
        await hold.reached()
        group.start_soon(fail, "pid")
        await anyio.wait_all_tasks_blocked()
        process = compiler.pid
    hold.release()
    assert {type(failure) for failure in failures} == {EngineFailed}
    assert [str(failure) for failure in failures] == [str(await refusal(compiler, "pid"))] * 2
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


PARENT = """
import sys
import anyio
from agentflow.protocol.constraint import Constraint
from agentflow.engine.grammar.compiler.messages import end_decoder
from agentflow.engine.grammar.compiler.worker_handle import CompileWorkerHandle
from agentflow.engine.grammar.compiler.compiler import constraint_compiler
from support.compile_loaders import LOADER

async def main():
    async with constraint_compiler(loader=LOADER) as compiler:
        await compiler.compile(Constraint("regex", "pid"), tenant="")
        print("compiled", flush=True)
        await compiler.compile(Constraint("regex", sys.argv[1]), tenant="")
        await anyio.sleep_forever()

anyio.run(main)
"""


async def test_a_frame_that_arrives_during_a_compile_does_not_end_the_process(tmp_path):
    """SIGIO for a frame may arrive when work on it has begun."""
    hold = Hold(tmp_path / "hold")
    worker = CompileWorkerHandle.start(LOADER, LIMITS)
    await worker.ready()
    await worker.send(to_frame(Constraint("regex", f"hold {hold.path}")))
    await hold.reached()
    await worker.send(to_frame(Constraint("regex", "pid")))
    hold.release()
    frames: list[bytes] = []
    while len(frames) < 2:
        frames += await worker.receive()
    for frame in frames:
        assert end_decoder.decode(frame).compiled.payload == str(worker.pid).encode()
    assert await worker.end(END_S) == "ended with exit code 0"


@pytest.mark.parametrize("doing", ["pid", "native", "hold"])
async def test_the_process_ends_with_its_server(tmp_path, doing):
    hold = Hold(tmp_path / "hold")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS.parent), *sys.path])}
    command = [sys.executable, "-c", PARENT, f"{doing} {hold.path}"]
    parent = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE)  # noqa: ASYNC220
    with parent:
        assert parent.stdout.readline() == b"compiled\n"
        if doing != "pid":
            await hold.reached()
        if doing == "native":
            hold.release()
        parent.kill()
        # The compiling process has the same standard output: it ends when both have ended.
        assert await anyio.to_thread.run_sync(parent.stdout.read) == b""
    if doing == "hold":
        hold.release()
