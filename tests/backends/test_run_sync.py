"""``af.run`` and ``af.map``: their results, where they are rejected, and how a script is interrupted."""

from __future__ import annotations

import asyncio
import contextvars
import os
import signal
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import anyio.to_thread
import pytest
from support.faults import has_param
from support.observed_backends import assert_idle
from support.process_template import start_python
from support.programs import ask, echo

import agentflow as af

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def backend():
    backend = af.Scripted(echo)
    yield backend
    assert_idle(backend)


def test_run_gives_what_the_program_returns(backend):
    assert af.run(ask, "a", session=af.session(backend=backend)) == "<a>"
    assert af.run(ask, "a", mark="?", session=af.session(backend=backend)) == "<a?>"


def test_run_raises_what_the_program_raises(backend):
    with pytest.raises(af.errors.EngineFailed, match="cannot answer a!"):
        af.run(ask, "a", mark="!", session=af.session(backend=backend))
    with pytest.raises(TypeError, match="unexpected keyword argument 'backend'"):
        af.run(ask, "a", backend=1, session=af.session(backend=backend))


def test_map_gives_the_results_in_order(backend):
    async def letters() -> AsyncIterator[str]:
        for letter in "abc":
            yield letter

    for inputs in (["a", "b", "c"], (letter for letter in "abc"), letters()):
        found = af.map(ask, inputs, concurrency=2, session=af.session(backend=backend))
        assert found == ["<a>", "<b>", "<c>"]
    assert af.map(ask, [], session=af.session(backend=backend)) == []


def test_map_passes_its_options_on(backend, capsys):
    def session():
        return af.session(backend=backend)

    ok, failed = af.map(ask, ["a", "b!"], on_error="return", progress=True, session=session())
    assert ok == "<a>"
    assert isinstance(failed, af.errors.EngineFailed)
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("map: 2/2, ")
    with pytest.raises(af.errors.EngineFailed) as failure:
        af.map(ask, ["a", "b!"], session=session())
    line, item = failure.value.__notes__
    assert line.endswith(", in ask")
    assert item == "in map: input 1 was 'b!'"
    with pytest.raises(af.errors.BadArgument, check=has_param("concurrency")):
        af.map(ask, ["a"], concurrency=0, session=session())


def test_the_default_session_connects_to_the_url_of_the_environment(monkeypatch):
    monkeypatch.setenv("AGENTFLOW_URL", "ws://127.0.0.1:9")  # no server listens on this port
    with pytest.raises(af.errors.ServerUnreachable, match=r"127\.0\.0\.1:9"):
        af.run(ask, "a")
    with pytest.raises(af.errors.ServerUnreachable, match=r"127\.0\.0\.1:9"):
        af.map(ask, ["a"])


def test_a_session_is_used_once(backend):
    flow = af.session(backend=backend)
    assert af.run(ask, "a", session=flow) == "<a>"
    with pytest.raises(af.errors.BadArgument, match="entered once"):
        af.run(ask, "a", session=flow)


@pytest.mark.anyio
async def test_run_and_map_are_rejected_inside_an_event_loop(backend):
    with pytest.raises(af.errors.ProgramError, match=r"use `await flow\.run\(\.\.\.\)` inside `async with"):
        af.run(ask, "a", session=af.session(backend=backend))
    with pytest.raises(af.errors.ProgramError, match=r"use `await flow\.map\(\.\.\.\)` inside `async with"):
        af.map(ask, ["a"], session=af.session(backend=backend))


SCRIPT = """
import anyio
import agentflow as af

async def wait(s: af.State, name: str) -> None:
    s += "a" + af.gen("x")
    await s["x"]
    print("ready", flush=True)
    try:
        await anyio.sleep_forever()
    finally:
        print("cleaned up", flush=True)

session = af.session(backend=af.Scripted(lambda _: "word"))
try:
    af.CALL
finally:
    print(session.is_alive, flush=True)
"""


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGINT for another process")
@pytest.mark.parametrize("call", ['run(wait, "a", session=session)', 'map(wait, ["a"], session=session)'])
def test_an_interrupted_script_ends_cleanly(call):
    with start_python(
        "-c",
        SCRIPT.replace("CALL", call),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdout.readline() == "ready\n"
        child.send_signal(signal.SIGINT)
        out, err = child.communicate(timeout=60)
    assert out == "cleaned up\nFalse\n"
    assert err.count("Traceback") == 1
    assert "During handling" not in err
    assert "direct cause" not in err
    assert err.splitlines()[-1] == "KeyboardInterrupt"
    assert len(err.splitlines()) < 12
    assert child.returncode in (-signal.SIGINT, 130)


@pytest.mark.parametrize("backend_name", ["asyncio", "trio"])
@pytest.mark.parametrize("starts", ["anyio", "own context", "asyncio"])
def test_f21a_a_worker_thread_of_an_event_loop_may_run_programs(backend, backend_name, starts):
    def work() -> str:
        assert af.map(ask, ["b"], session=af.session(backend=backend)) == ["<b>"]
        return af.run(ask, "a", session=af.session(backend=backend))

    async def main() -> str:
        if starts == "anyio":
            return await anyio.to_thread.run_sync(work)
        if starts == "own context":  # which says that the loop of its task is the thread's
            return await anyio.to_thread.run_sync(contextvars.copy_context().run, work)
        return await asyncio.to_thread(work)

    if starts != "asyncio" or backend_name == "asyncio":
        assert anyio.run(main, backend=backend_name) == "<a>"


def test_f21b_a_thread_that_runs_an_event_loop_may_not(backend):
    async def main() -> None:
        with pytest.raises(af.errors.ProgramError, match="would block"):
            af.run(ask, "a", session=af.session(backend=backend))

    for name in ("asyncio", "trio"):
        anyio.run(main, backend=name)
