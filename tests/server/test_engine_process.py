"""The engine in a process of its own: killed at any moment, nobody loses or repeats a token."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest
from anyio.lowlevel import checkpoint
from fake_engine import TEMPLATE, TOKENIZER
from plain_engine import alone, plain_engine
from server.engine_loaders import POISON, SLOW_POISON, Hold, start

from agentflow.errors import AgentflowError, BadModelFolder, EngineFailed, Overloaded
from agentflow.sampling import SamplingParams
from agentflow.server.app import create_app
from agentflow.server.engine_child import EngineChild
from agentflow.server.engine_client import EngineClient
from agentflow.server.engine_frames import from_engine_decoder, to_frame
from agentflow.server.engine_generator import EngineGenerator
from agentflow.server.engine_messages import Finished, Submit
from agentflow.server.engine_supervisor import supervised_engine

pytestmark = pytest.mark.anyio

TESTS = Path(__file__).parent.parent
PROMPT = [5, 6, 7]
LENGTH = 20
PLAIN = alone(PROMPT, SamplingParams(max_tokens=LENGTH, ignore_eos=True))


@asynccontextmanager
async def process_engine(max_unfinished: int | None = None, **options) -> AsyncIterator[EngineClient]:
    """An engine process on the fake model. ``options`` as of ``engine_loaders.load``. When it ends,
    nothing may be held."""
    opening = supervised_engine(start(**options), lambda: TOKENIZER, max_unfinished=max_unfinished)
    async with opening as client:
        yield client
        if client.num_calls == 0:
            stats = await client.stats()
            assert (stats.running, stats.waiting, stats.held_slots) == (0, 0, 0)
            assert len(client.engine._ledger) == len(client._unfinished) == 0


async def generate(
    client: EngineClient, prompt: list[int] = PROMPT, *, seed: int = 0, **params
) -> tuple[Finished, list[str]]:
    """The end of a generation, and the deltas before it."""
    deltas: list[str] = []
    params = {"max_tokens": LENGTH, "ignore_eos": True} | params
    end = await client.generate(
        prompt, SamplingParams(**params), seed=seed, cache_key="", on_text=deltas.append
    )
    return end, deltas


def text_after(prompt: list[int]) -> str:
    return alone(prompt, SamplingParams(max_tokens=LENGTH, ignore_eos=True)).text


def kill(client: EngineClient, held_at: Hold) -> None:
    os.kill(client.engine.pid, signal.SIGKILL)
    held_at.release()


# What streams goes on

SHOWN = TOKENIZER.decode(PLAIN.ids[:6])


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 1.0},
        {"logprobs": True},
        {"stop": (PLAIN.text[len(SHOWN) - 1 : len(SHOWN) + 1],), "logprobs": True},
        {"stop": (SHOWN[-3:] + "no",)},
    ],
    ids=["greedy", "sampled", "logprobs", "stop across the kill", "held back across the kill"],
)
async def test_a_stream_goes_on_after_a_kill_as_if_nothing_had_been(tmp_path, params):
    is_random = "temperature" in params
    async with plain_engine(**({"next_token": None} if is_random else {})) as client:
        expected = await generate(client, seed=3, **params)
    results = []

    async def run() -> None:
        results.append(await generate(client, seed=3, **params))

    hold = Hold(tmp_path / "hold")  # six tokens are there before the seventh step
    async with process_engine(hold_at={"7": hold.path}, is_random=is_random) as client:
        async with anyio.create_task_group() as group:
            group.start_soon(run)
            await hold.reached()
            kill(client, hold)
        assert (await client.stats()).restarts == 1
    assert results == [expected]


async def test_a_stream_survives_any_number_of_kills_while_it_gets_on(tmp_path):
    results = []

    async def run() -> None:
        results.append(await generate(client))

    hold = Hold(tmp_path / "hold")
    async with process_engine(hold_at={"2": hold.path}) as client, anyio.create_task_group() as group:
        group.start_soon(run)
        for is_last in (False, False, False, True):
            await hold.reached()
            before, hold = hold, hold if is_last else Hold(tmp_path / "hold")
            kill(client, before)
    [(end, deltas)] = results
    assert (end.text, "".join(deltas)) == (PLAIN.text, PLAIN.text)
    assert len(deltas) == len([i for i in PLAIN.ids if TOKENIZER.decode([i])])


async def test_whoever_waits_is_run_in_order(tmp_path):
    hold = Hold(tmp_path / "hold")
    submitted: list[int] = []
    begun: list[int] = []
    texts: dict[int, str] = {}

    async def run(number: int) -> None:
        def on_text(text: str) -> None:
            if number not in begun:
                begun.append(number)

        submitted.append(number)
        params = SamplingParams(max_tokens=LENGTH, ignore_eos=True)
        end = await client.generate([number], params, seed=0, cache_key="", on_text=on_text)
        texts[number] = end.text

    options = {"hold_at": {"4": hold.path}, "config": {"max_running": 1}}
    async with process_engine(**options) as client, anyio.create_task_group() as group:
        for number in range(20, 25):
            group.start_soon(run, number)
        await hold.reached()
        kill(client, hold)
    assert begun == submitted
    assert texts == {number: text_after([number]) for number in range(20, 25)}


async def test_what_generates_nothing_is_run_again(tmp_path):
    hold = Hold(tmp_path / "hold")
    async with plain_engine() as client:
        expected = await client.score([*range(10, 30)], 12, cache_key="")
    ends: list[Finished] = []

    async def score() -> None:
        ends.append(await client.score([*range(10, 30)], 12, cache_key=""))

    async def compute() -> None:
        ends.append(await client.compute([9, 9, 9], cache_key=""))

    async with process_engine(hold_at={"1": hold.path}) as client, anyio.create_task_group() as group:
        group.start_soon(score)
        group.start_soon(compute)
        await hold.reached()
        kill(client, hold)
    assert sorted((end.prompt_tokens, end.logprobs) for end in ends) == [(3, []), (20, expected.logprobs)]


# Between two processes


async def answer_of(app, path: str) -> tuple[int, dict]:
    """Status and body of a GET."""
    sent = []

    async def send(message) -> None:
        sent.append(message)

    async def receive():
        return {"type": "http.request"}

    scope = {"type": "http", "method": "GET", "path": path, "headers": [], "query_string": b""}
    await app(scope, receive, send)
    return sent[0]["status"], json.loads(sent[1]["body"])


async def test_while_it_restarts_the_server_is_live_and_says_why_it_is_not_ready(tmp_path):
    in_step, in_load = Hold(tmp_path / "step"), tmp_path / "load"
    options = {"hold_at": {"3": in_step.path}, "hold_load": str(in_load)}
    results = []

    @asynccontextmanager
    async def open_generator():
        async with process_engine(**options) as client:
            clients.append(client)
            yield EngineGenerator(client, TEMPLATE)

    async def run() -> None:
        results.append(await generate(clients[0]))

    clients: list[EngineClient] = []
    app = create_app(open_generator)
    async with app.router.lifespan_context(app):
        async with anyio.create_task_group() as group:
            group.start_soon(run)
            await in_step.reached()
            second_load = Hold(in_load)
            asked = []

            async def ask() -> None:
                asked.append(await answer_of(app, "/health/ready"))

            group.start_soon(ask)  # asked of an engine that dies before it answers
            await checkpoint()
            await checkpoint()
            kill(clients[0], in_step)
            await second_load.reached()
            ready = await answer_of(app, "/health/ready")
            live = await answer_of(app, "/health/live")
            second_load.release()
        for status, body in (*asked, ready):
            assert (status, body["status"]) == (503, "unready")
            assert "the engine is restarting" in body["reason"]
        assert len(asked) == 1
        assert live == (200, {"status": "live"})
        assert (await answer_of(app, "/health/ready"))[0] == 200
        assert [end.text for end, _ in results] == [PLAIN.text]


async def test_cancelled_between_two_processes_a_request_is_forgotten(tmp_path):
    in_step, in_load = Hold(tmp_path / "step"), tmp_path / "load"
    texts: list[str] = []

    async def run(prompt: list[int], scope: anyio.CancelScope) -> None:
        with scope:
            end, _ = await generate(client, prompt)
            texts.append(end.text)

    options = {"hold_at": {"3": in_step.path}, "hold_load": str(in_load)}
    async with process_engine(**options) as client, anyio.create_task_group() as group:
        scopes = [anyio.CancelScope() for _ in range(3)]
        for number in range(2):
            group.start_soon(run, [20 + number], scopes[number])
        await in_step.reached()
        second_load = Hold(in_load)
        scopes[1].cancel()  # the engine is told, and dies before it reads it
        await checkpoint()
        kill(client, in_step)
        await second_load.reached()
        group.start_soon(run, [22], scopes[2])
        await checkpoint()
        scopes[0].cancel()
        await checkpoint()
        second_load.release()
    assert texts == [text_after([22])]


async def test_an_idle_engine_may_be_killed_as_often_as_one_likes():
    async with process_engine() as client:
        for number in range(1, 6):
            os.kill(client.engine.pid, signal.SIGKILL)
            while client.engine.restarts < number or client.engine._outgoing is None:
                await checkpoint()
        end, _ = await generate(client)
        assert end.text == PLAIN.text


async def test_signals_to_end_are_the_servers_business():
    async with process_engine() as client:
        pid = client.engine.pid
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(pid, number)
        end, _ = await generate(client)
        assert end.text == PLAIN.text
        assert (client.engine.pid, client.engine.restarts) == (pid, 0)


# Loading


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"missing": "/no/such"}, BadModelFolder, "/no/such is not there"),
        ({"error": "odd"}, EngineFailed, r"the engine cannot be loaded: ValueError\('odd'\)"),
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
        [child] = children(os.getpid())
        os.kill(child, signal.SIGKILL)
        hold.release()
    assert [end.text for end, _ in ends] == [PLAIN.text]


def children(pid: int) -> list[int]:
    """Engine processes below a process."""
    import psutil

    return [p.pid for p in psutil.Process(pid).children() if "agentflow.server.engine_process" in p.cmdline()]


async def test_killed_at_each_load_it_is_given_up():
    with pytest.raises(EngineFailed, match="the engine was killed by SIGKILL; it died again and again"):
        async with process_engine(kill_load=True):
            pytest.fail("it opened")


async def test_that_it_cannot_be_loaded_again_is_told_to_everybody(tmp_path):
    model = tmp_path / "model"
    model.touch()
    hold = Hold(tmp_path / "hold")
    told = []

    async def run() -> None:
        with pytest.raises(EngineFailed) as failure:
            await generate(client)
        told.append(str(failure.value))

    async with process_engine(missing=str(model), hold_at={"2": hold.path}) as client:
        async with anyio.create_task_group() as group:
            group.start_soon(run)
            group.start_soon(run)
            await hold.reached()
            model.unlink()
            kill(client, hold)
        for use in (lambda: generate(client), client.stats):
            with pytest.raises(EngineFailed) as failure:
                await use()
            told.append(str(failure.value))
        client._calls[0] = None  # nothing can be asked of it at the end
    assert len(told) == 4
    assert len(set(told)) == 1
    assert f"cannot be loaded again ({model} is not there)" in told[0]


# Deadly requests


@pytest.mark.parametrize("poison", [POISON, SLOW_POISON])
async def test_a_request_that_kills_the_engine_each_time_fails_alone(poison):
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

    async with process_engine(config={"max_running": 4}) as client:
        async with anyio.create_task_group() as group:
            for number in (20, poison, 21, 22, 23, 24):
                group.start_soon(run, number)
        assert texts == {number: text_after([number]) for number in (20, 21, 22, 23, 24)}
        end, _ = await generate(client)
        assert end.text == PLAIN.text
        assert [str(failure) for failure in failures] == [
            f"the engine died {client.engine.restarts} times while it ran this request, "
            "which is not run again"
        ]
        assert client.engine.restarts <= 3


# Queues


async def test_beyond_the_limit_requests_are_refused(tmp_path):
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
        await checkpoint()
        for _ in range(2):
            with pytest.raises(Overloaded, match="2 unfinished requests, which is the limit"):
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
        frames = [to_frame(Submit(number, [5000] * 900, params)) for number in range(400)]
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
from fake_engine import TOKENIZER
from server.engine_loaders import start
from agentflow.server.engine_supervisor import supervised_engine
from agentflow.sampling import SamplingParams

async def main():
    async with supervised_engine(start(**eval(sys.argv[1])), lambda: TOKENIZER) as client:
        params = SamplingParams(max_tokens=1000, ignore_eos=True)
        told = False
        def on_text(text):
            nonlocal told
            if not told:
                told = True
                print("streaming", flush=True)
        while True:
            await client.generate([5], params, seed=0, cache_key="", on_text=on_text)

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
