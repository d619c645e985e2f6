"""The engine in a separate process: killed at any moment, no request loses or repeats a token."""

from __future__ import annotations

import json
import logging
import re
import signal
from contextlib import asynccontextmanager

import anyio
import pytest
from anyio.lowlevel import checkpoint
from support.fake_engine import TEMPLATE, TOKENIZER
from support.holds import Hold
from support.plain_model import plain_model_engine
from support.process_engine import LENGTH, PLAIN, generate, kill, process_engine, text_after
from support.processes import signal_child

from agentflow.engine.client import EngineClient
from agentflow.engine.generator.generator import EngineGenerator
from agentflow.engine.messages import Finished
from agentflow.protocol.sampling import SamplingParams
from agentflow.server.app import create_app
from agentflow.server.models.models import one_model

pytestmark = [pytest.mark.anyio, pytest.mark.trio_in_full]

# Streams continue

SHOWN = TOKENIZER.decode(PLAIN.ids[:6])


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.0},
        {"stop": (PLAIN.text[len(SHOWN) - 1 : len(SHOWN) + 1],), "logprobs": True},
        {"top_logprobs": 3},
        {"stop_regex": re.escape(SHOWN[-3:]) + "(no|never)"},
        {"stop_token_ids": (PLAIN.ids[8],), "min_tokens": 12, "ignore_eos": False},
    ],
    ids=[
        "sampled",
        "stop across the kill",
        "top logprobs",
        "regex held back across the kill",
        "min_tokens",
    ],
)
async def test_a_stream_continues_unchanged_after_a_kill(tmp_path, params):
    is_random = "temperature" in params
    async with plain_model_engine(**({"next_token": None} if is_random else {})) as client:
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


async def test_a_stream_survives_many_kills_while_it_makes_progress(tmp_path):
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


async def test_concurrent_stats_calls_in_a_long_step_send_one_request(tmp_path):
    hold = Hold(tmp_path / "hold")
    answers: list[int] = []

    async def ask() -> None:
        answers.append((await client.stats()).generated_tokens)

    async with process_engine(hold_at={"7": hold.path}) as client, anyio.create_task_group() as group:
        group.start_soon(generate, client)
        await hold.reached()
        for is_patient in (False, True):  # the first ones do not wait for the answer
            async with anyio.create_task_group() as askers:
                for _ in range(100):
                    askers.start_soon(ask)
                await anyio.wait_all_tasks_blocked()
                assert len(client.engine._queries) == 1
                if is_patient:
                    hold.release()
                else:
                    askers.cancel_scope.cancel()
        assert len(answers) == 100
        assert len(set(answers)) == 1
    assert client.engine._queries == set()


async def test_waiting_requests_run_in_order(tmp_path):
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
        end = await client.generate([number], params, seed=0, on_text=on_text)
        texts[number] = end.text

    options = {"hold_at": {"4": hold.path}, "config": {"max_running": 1}}
    async with process_engine(**options) as client, anyio.create_task_group() as group:
        for number in range(20, 25):
            group.start_soon(run, number)
        await hold.reached()
        kill(client, hold)
    assert begun == submitted
    assert texts == {number: text_after([number]) for number in range(20, 25)}


async def test_requests_without_generation_are_rerun(tmp_path):
    hold = Hold(tmp_path / "hold")
    async with plain_model_engine() as client:
        expected = await client.score([*range(10, 30)], 12)
    ends: list[Finished] = []

    async def score() -> None:
        ends.append(await client.score([*range(10, 30)], 12))

    async def compute() -> None:
        ends.append(await client.compute([9, 9, 9]))

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


async def test_during_a_restart_the_server_is_live_and_not_ready_with_a_reason(tmp_path):
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
    app = create_app(one_model(open_generator))
    async with app.router.lifespan_context(app):
        async with anyio.create_task_group() as group:
            group.start_soon(run)
            await in_step.reached()
            second_load = Hold(in_load)
            asked = []

            async def ask() -> None:
                asked.append(await answer_of(app, "/health/ready"))

            group.start_soon(ask)  # the engine dies before it answers
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
        scopes[1].cancel()  # the abort is sent, and the engine dies before it reads it
        await checkpoint()
        kill(client, in_step)
        await second_load.reached()
        group.start_soon(run, [22], scopes[2])
        await checkpoint()
        scopes[0].cancel()
        await checkpoint()
        second_load.release()
    assert texts == [text_after([22])]


async def test_the_engine_ignores_sigint_and_sigterm():
    async with process_engine() as client:
        pid = client.engine.pid
        for number in (signal.SIGINT, signal.SIGTERM):
            signal_child(pid, number)
        end, _ = await generate(client)
        assert end.text == PLAIN.text
        assert (client.engine.pid, client.engine.restarts) == (pid, 0)


async def test_f41a_the_engine_logs_into_the_log_of_the_server(caplog: pytest.LogCaptureFixture) -> None:
    """While it loads, and while it runs, from the level on that the server logs."""
    with caplog.at_level(logging.INFO, logger="agentflow"):
        async with process_engine(says="café") as client:
            await generate(client)
    lines = [(record.levelno, record.getMessage()) for record in caplog.records if "of_tests" in record.name]
    assert lines[0][0] == logging.WARNING
    assert lines[0][1].startswith("loading: café")
    assert lines[1][0] == logging.INFO
    assert lines[1][1].startswith("step 1: café")
    assert not any("detailed" in line for _, line in lines)
    assert lines[0][1].endswith("\\ud800")  # a lone surrogate is sent escaped
