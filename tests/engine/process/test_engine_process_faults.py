"""An engine process that cannot load, that a request kills, that is overloaded, or whose server dies."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import anyio
import anyio.lowlevel
import psutil
import pytest
from support.commands import engines_of
from support.engine_loaders import POISON, SLOW_POISON, start
from support.holds import Hold
from support.process_engine import PLAIN, Ticks, generate, process_engine, text_after

from agentflow.engine.machine import child_process as child_module
from agentflow.engine.machine.child_process import ChildProcess, to_frame
from agentflow.engine.messages import Finished, from_engine_decoder
from agentflow.engine.process.child import EngineChild
from agentflow.engine.request import Origin, Submit
from agentflow.errors import AgentflowError, BadModelFolder, EngineFailed, Overloaded
from agentflow.protocol.sampling import SamplingParams

pytestmark = [pytest.mark.anyio, pytest.mark.trio_in_full]

TESTS = Path(__file__).parents[2]

# Loading


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"missing": "/no/such"}, BadModelFolder, "/no/such"),
        ({"error": "odd"}, EngineFailed, r"ValueError\('odd'\)"),
        ({"error": "package"}, ModuleNotFoundError, "no_such_package"),
    ],
)
async def test_an_error_while_loading_is_raised(options, error, message):
    with pytest.raises(error, match=message):
        async with process_engine(**options):
            pytest.fail("it opened")


async def test_killed_while_it_loads_it_is_started_again(tmp_path):
    hold = Hold(tmp_path / "hold")
    ends = []

    async def run() -> None:
        async with process_engine(hold_load=hold.path) as client:
            ends.append(await generate(client))
            assert client.engine.restarts == 1

    async with anyio.create_task_group() as group:
        group.start_soon(run)
        await hold.reached()
        [child] = engines_of()
        child.kill()
        hold.release()
    assert [end.text for end, _ in ends] == [PLAIN.text]


async def test_killed_at_each_load_the_server_does_not_start():
    with pytest.raises(EngineFailed, match=r"SIGKILL.*\b3\b"):
        async with process_engine(ticks=Ticks(), kill_load=True):
            pytest.fail("it opened")


# Deadly requests


async def test_a_request_that_no_message_can_have_is_left_nowhere():
    async with process_engine() as client:  # checks at its end that the engine owes nothing
        with pytest.raises(UnicodeEncodeError):
            await client.generate([5], SamplingParams(), seed=0, origin=Origin(label="\ud800"))
        assert (await generate(client))[0].text == PLAIN.text


@pytest.mark.parametrize(
    ("poison", "options"),
    [(POISON, {}), (SLOW_POISON, {}), (POISON, {"poison": "faults"})],
    ids=["at once", "later", "by a fault of the accelerator"],
)
async def test_a_request_that_kills_the_engine_each_time_fails_alone(poison, options):
    texts: dict[int, str] = {}
    failures: list[AgentflowError] = []

    async def run(number: int) -> None:
        try:
            end, deltas = await generate(client, [number])
        except EngineFailed as error:
            failures.append(error)
        else:
            assert "".join(deltas) == end.text
            texts[number] = end.text

    async with process_engine(ticks=Ticks(), config={"max_running": 4}, **options) as client:
        async with anyio.create_task_group() as group:
            for number in (20, poison, 21, 22, 23, 24):
                group.start_soon(run, number)
        assert texts == {number: text_after([number]) for number in (20, 21, 22, 23, 24)}
        end, _ = await generate(client)
        assert end.text == PLAIN.text
        [failure] = failures
        assert f"died {client.engine.restarts} times" in str(failure)
        assert client.engine.restarts <= 3


# Queues


async def test_requests_beyond_the_limit_are_overloaded(tmp_path):
    hold = Hold(tmp_path / "hold")
    async with process_engine(2, hold_at={"2": hold.path}) as client, anyio.create_task_group() as group:
        first = anyio.CancelScope()

        async def run_first() -> None:
            with first:
                await generate(client, [20])

        group.start_soon(run_first)
        group.start_soon(generate, client, [21])
        await hold.reached()
        first.cancel()  # the engine has not read that yet: it still counts
        await anyio.wait_all_tasks_blocked()
        for _ in range(2):
            with pytest.raises(Overloaded, match=r"\b2\b"):
                await generate(client)
        hold.release()
        await client.stats()  # the abort has been read by now
        end, _ = await generate(client)
        assert end.text == PLAIN.text


async def test_full_sockets_block_neither_end():
    """More is sent than the socket holds while nothing is received, and then the other way round."""
    child = EngineChild.start(start(config={"max_running": 64, "token_budget": 2000}))
    try:
        assert await child.receive()
        params = SamplingParams(max_tokens=40, ignore_eos=True)
        frames = [to_frame(Submit(number, [200] * 900, params)) for number in range(400)]
        for frame in frames:
            await child.send(frame)
        ended: set[int] = set()
        while len(ended) < len(frames):
            for frame in await child.receive():
                ended |= {m.request_id for m in from_engine_decoder.decode(frame) if isinstance(m, Finished)}
    finally:
        assert await child.end(10) == "ended with exit code 0"


# The end

PARENT = """
import sys
import anyio
from support.fake_engine import TOKENIZER
from support.engine_loaders import start
from agentflow.engine.process.supervisor import supervised_engine
from agentflow.protocol.sampling import SamplingParams

async def main():
    async with supervised_engine(start(**eval(sys.argv[1])), lambda: TOKENIZER) as client:
        params = SamplingParams(max_tokens=1000, ignore_eos=True)
        has_streamed = False
        def on_text(text):
            nonlocal has_streamed
            if not has_streamed:
                has_streamed = True
                print("streaming", flush=True)
        while True:
            await client.generate([5], params, seed=0, on_text=on_text)

anyio.run(main)
"""


@pytest.mark.parametrize("where", ["streaming", "loading"])
async def test_an_engine_ends_with_its_server(tmp_path, where):
    hold = Hold(tmp_path / "hold")
    options = {"hold_load": hold.path} if where == "loading" else {}
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS.parent), *sys.path])}
    command = [sys.executable, "-c", PARENT, repr(options)]
    parent = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE)  # noqa: ASYNC220
    with parent:
        if where == "loading":
            await hold.reached()
        else:
            assert parent.stdout.readline() == b"streaming\n"
        parent.kill()
        # The engine has the same standard output: it ends when both have ended.
        assert await anyio.to_thread.run_sync(parent.stdout.read) == b""
    if where == "loading":
        hold.release()


async def test_a_killed_process_is_reaped_also_when_it_ends_late(monkeypatch):
    monkeypatch.setattr(child_module, "KILL_S", 0)
    connection, other_end = socket.socketpair()
    with other_end:
        process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)  # noqa: ASYNC220
        assert process.stdin is not None
        child = ChildProcess(process, connection, process.stdin)
        await child.end()
    with anyio.fail_after(20):
        while psutil.pid_exists(process.pid):  # a zombie exists
            await anyio.lowlevel.checkpoint()
