"""A server whose engine is killed in mid-stream: it answers all along, and the texts are the same."""

import http.client
import json
import sys

import anyio
import anyio.to_thread
import psutil
import pytest
from support.commands import engine_of, served
from support.processes import has_ended

import agentflow as af
from agentflow.engine.machine.child_process import NICENESS

NUM_STORIES = 3
NUM_TOKENS = 150


def engine_pid(server) -> int | None:
    engine = engine_of(server)
    return None if engine is None else engine.pid


def assert_priorities(server) -> None:
    """An engine has the priority that its server was started with; the server has a lower one."""
    if sys.platform == "linux":
        assert psutil.Process(engine_pid(server)).nice() == psutil.Process().nice()
        assert psutil.Process(server.pid).nice() == min(19, psutil.Process().nice() + NICENESS)


def health(url: str, name: str) -> tuple[int, dict]:
    """Status and body of a health check."""
    connection = http.client.HTTPConnection(url.removeprefix("ws://"), timeout=10)
    try:
        connection.request("GET", f"/health/{name}")
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


@af.program
async def tell(s: af.State, number: int, heard: list[str], has_begun: anyio.Event) -> tuple[str, list[float]]:
    s += af.user(f"Tell me a long story about {number + 2} trees.")
    sampling = {"temperature": 0.8, "logprobs": True} if number == 1 else {}
    s += af.assistant(af.gen("story", max_tokens=NUM_TOKENS, ignore_eos=True, **sampling))
    async for delta in s["story"]:
        heard.append(delta)
        has_begun.set()
    text = await s["story"]
    assert "".join(heard) == text
    return text, [*(s["story"].logprobs or ())]


async def tell_all(url: str, beside=None) -> tuple[list[str], list[float]]:
    """All stories, generated concurrently, and the log-probabilities of one of them. ``beside()`` runs as
    soon as one of them streams."""
    stories: dict[int, tuple[str, list[float]]] = {}
    has_begun = anyio.Event()

    async def tell_one(number: int) -> None:
        stories[number] = await flow.run(tell, number, [], has_begun)

    async with af.session(url, seed=7) as flow, anyio.create_task_group() as group:
        for number in range(NUM_STORIES):
            group.start_soon(tell_one, number)
        await has_begun.wait()
        if beside is not None:
            await beside()
    return [stories[number][0] for number in range(NUM_STORIES)], stories[1][1]


@pytest.mark.parametrize(
    "max_running",
    [pytest.param(4, id="all stream"), pytest.param(1, id="two wait", marks=pytest.mark.full)],
)
def test_killed_in_mid_stream_the_engine_goes_on_where_it_was(tiny, max_running):
    statuses: list[int] = []

    async def kill_and_watch() -> None:
        killed = engine_pid(server)
        psutil.Process(killed).kill()
        with anyio.fail_after(60):
            while True:
                status, body = await anyio.to_thread.run_sync(health, url, "live")
                assert (status, body) == (200, {"status": "live"})
                status, body = await anyio.to_thread.run_sync(health, url, "ready")
                statuses.append(status)
                if status == 503:
                    assert "the engine is restarting" in body["reason"]
                elif engine_pid(server) not in (killed, None):
                    return
                await anyio.sleep(0.01)  # noqa: TID251 - the engine needs the processor to load

    options = ("--model", str(tiny), "--dtype", "float32", "--kv-tokens", "3000")
    options += ("--max-running", str(max_running))
    with served(*options, "--threads", "2") as (url, server):
        assert_priorities(server)
        expected_texts, expected_logprobs = anyio.run(tell_all, url)
        texts, logprobs = anyio.run(tell_all, url, kill_and_watch)
        assert texts == expected_texts
        assert len(logprobs) == NUM_TOKENS
        assert logprobs == pytest.approx(expected_logprobs, abs=1e-3)  # other batches, other rounding
        assert set(statuses) <= {200, 503}  # a restart may be faster than the next look
        engine = psutil.Process(engine_pid(server))
        assert_priorities(server)
    assert server.returncode == 0
    assert has_ended(engine)


@pytest.mark.full
def test_a_server_exits_with_status_1_after_repeated_engine_deaths_if_configured(tiny):
    options = ("--model", str(tiny), "--kv-tokens", "3000", "--exit-on-engine-failure")
    with served(*options) as (_, server):
        killed: set[int] = set()
        while server.poll() is None:
            pid = engine_pid_if_served(server)
            if pid is not None and pid not in killed:
                killed.add(pid)
                psutil.Process(pid).kill()
        assert server.returncode == 1
        assert len(killed) == 3


def engine_pid_if_served(server) -> int | None:
    try:
        return engine_pid(server)
    except psutil.Error:  # the server has just ended
        return None
