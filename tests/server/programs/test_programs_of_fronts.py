"""Programs at two servers that share a store."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import httpx2
import msgspec
import pytest
from support.api_server import MODEL, ApiServer, api_server
from support.fake_engine import FakeEngine
from support.redis_server import RedisServer

from agentflow.protocol.events import ErrorInfo
from agentflow.runtime.limits import MemoryBudget
from agentflow.server.programs import shared_values
from agentflow.server.programs.program import ServedProgram
from agentflow.server.programs.shared_values import KeptUsage, KeptValue, SharedValues
from agentflow.server.stores import fronts
from agentflow.server.stores.entries import SharedEntries
from agentflow.server.stores.shared import SharedStore
from agentflow.server.tenants.keys import Tenants, hashed_key


@pytest.fixture(scope="module")
def two(redis: RedisServer) -> Iterator[tuple[ApiServer, ApiServer]]:
    prefix = f"{secrets.token_hex(8)}:"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fronts, "BEAT_S", 0.05)
        first, second = (SharedStore(redis.url, prefix=prefix, front=name) for name in "ab")
        with (
            api_server(FakeEngine(), constraints=False, shared=first) as here,
            api_server(FakeEngine(), constraints=False, shared=second) as there,
        ):
            yield here, there


def program_of(server: ApiServer) -> str:
    return str(httpx2.post(f"{server.url}/v1/programs", json={}).json()["id"])


def submit(
    server: ApiServer, program: str, output: str, prompt: str = "Say ", **sampling: Any
) -> httpx2.Response:
    placeholder: dict[str, Any] = {"name": "o", "in_out": "out", "semantic_var_id": output}
    placeholder |= {"sampling_params": {"max_tokens": 4, "temperature": 0, **sampling}}
    body = {"prompt": f"{prompt}{{{{o}}}}", "placeholders": [placeholder]}
    return httpx2.post(f"{server.url}/v1/programs/{program}/submit", json=body)


def get(server: ApiServer, program: str, variable: str, **query: Any) -> httpx2.Response:
    return httpx2.get(f"{server.url}/v1/programs/{program}/variables/{variable}", params=query, timeout=30)


def values_of(server: ApiServer) -> SharedValues:
    values: SharedValues | None = server.service.programs.values
    assert values is not None
    return values


def test_another_server_lets_the_one_that_runs_a_program_answer(two: tuple[ApiServer, ApiServer]) -> None:
    here, there = two
    program = program_of(here)
    assert program.startswith("prog_a-")
    assert submit(there, program, "x").status_code == 200
    value = get(there, program, "x")
    assert value.json() == get(here, program, "x").json()
    assert value.json()["status"] == "ready"
    streamed = get(there, program, "x", stream="true")
    events = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: {")]
    assert [event["object"] for event in events] == ["program.variable.delta", "program.variable"]
    assert events[1] == value.json()
    assert get(there, program, "no").json()["error"]["code"] == "variable_not_found"
    assert submit(there, program, "x").status_code == 400
    path = f"/v1/programs/{program}/variables/given"
    assert httpx2.put(there.url + path, json={"value": "v"}).status_code == 200
    assert get(here, program, "given").json()["value"] == "v"
    assert httpx2.delete(f"{there.url}/v1/programs/{program}").status_code == 200
    for server in two:
        assert get(server, program, "x").status_code == 404
        assert submit(server, program, "y").status_code == 404


@pytest.mark.parametrize("query", [{"stream": "true"}, {"stream": "true", "wait_s": 1}, {"wait_s": -1}, {}])
@pytest.mark.parametrize("variable", ["x", "no", "failed"])
def test_f37_a_server_that_forwards_has_the_same_errors(
    two: tuple[ApiServer, ApiServer], variable: str, query: dict[str, Any]
) -> None:
    here, _ = two
    program = program_of(here)
    assert submit(here, program, "x").status_code == 200
    assert submit(here, program, "failed", prompt="far too long " * 1_000).status_code == 200
    for one in ("x", "failed"):
        get(here, program, one)
    found = []
    for server in two:
        got = get(server, program, variable, **query)
        lines = [line for line in got.text.splitlines() if line.startswith("data: {")]
        shown = json.loads(lines[-1].removeprefix("data: ") if lines else got.text)
        found.append((got.status_code, got.headers["content-type"], shown))
    assert found[0] == found[1]


def test_a_wait_elsewhere_ends_with_its_client(two: tuple[ApiServer, ApiServer]) -> None:
    here, there = two
    here.call(here.engine.gate.allow, 1)
    program = program_of(here)
    assert submit(there, program, "x", max_tokens=50).status_code == 200
    assert get(there, program, "x", wait_s=0).json()["status"] == "pending"
    with pytest.raises(httpx2.ReadTimeout):
        httpx2.get(f"{there.url}/v1/programs/{program}/variables/x", timeout=0.3)
    here.wait_until(lambda: not here.service.fronts._running)
    here.call(here.engine.gate.open)
    assert get(there, program, "x").json()["status"] == "ready"


def test_finished_values_survive_their_server(two: tuple[ApiServer, ApiServer]) -> None:
    here, there = two
    program = program_of(here)
    submit(here, program, "x")
    value = get(here, program, "x").json()
    values = values_of(there)

    async def is_kept() -> bool:
        return await values.find("", program, "x") is not None

    while not there.call(is_kept):  # it is written after it is shown
        pass
    lost = program.replace("prog_a", "prog_gone")
    entries, encode = values._entries, msgspec.msgpack.encode
    failed = KeptValue(error=ErrorInfo("overloaded", "too much"), path=("f", "g"))
    for variable, kept in {
        "": {"front": "gone"},
        "x": KeptValue(value["value"], "length", KeptUsage(1, 0, 4)),
        "g": failed,
    }.items():
        there.call(partial(entries.add, "", f"{lost}/{variable}", encode(kept)))
    for server in two:
        shown = get(server, lost, "x").json()
        assert (shown["value"], shown["status"], shown["usage"]["completion_tokens"]) == (
            value["value"],
            "ready",
            4,
        )
        error = get(server, lost, "g")
        assert (error.status_code, error.json()["error"]["path"]) == (424, ["f", "g"])
        for retried in (get(server, lost, "pending"), submit(server, lost, "y")):
            assert (retried.status_code, retried.json()["error"]["code"]) == (503, "engine_down")
            assert retried.headers["retry-after"]
        assert get(server, lost, "pending", stream="true").status_code == 503
    assert httpx2.delete(f"{there.url}/v1/programs/{lost}").status_code == 200
    assert get(here, lost, "x").status_code == 404


def test_a_program_is_found_before_it_is_in_the_store(two: tuple[ApiServer, ApiServer]) -> None:
    here, there = two
    program = program_of(here)
    values = values_of(there)

    async def is_kept() -> bool:
        return await values.find_front("", program) is not None

    while not there.call(is_kept):
        pass
    there.call(values.close, "", program)
    assert submit(there, program, "x").status_code == 200
    assert get(there, program, "x").json()["status"] == "ready"
    assert here.service.fronts is not None
    front = here.service.fronts.own
    for unknown in (f"prog_{front}_00", "prog_gone-00_00", "prog_A_00"):
        assert submit(there, unknown, "x").json()["error"]["code"] == "program_not_found"


def test_a_program_that_was_closed_waits_briefly_for_the_store(
    two: tuple[ApiServer, ApiServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    here, _ = two
    program = ServedProgram("prog_x", "", MemoryBudget())
    monkeypatch.setattr(shared_values, "FORGET_S", 0.01)
    monkeypatch.setattr(SharedEntries, "delete", lambda *arguments: anyio.sleep_forever())
    here.call(values_of(here).forget, program)  # the test would end at its time-out


def test_a_foreign_value_is_no_program(two: tuple[ApiServer, ApiServer]) -> None:
    here, _ = two
    entries = values_of(here)._entries
    here.call(partial(entries.add, "", "prog_x/", b"\xc1"))
    assert get(here, "prog_x", "y").status_code == 404


@pytest.mark.timeout(60)
def test_f37_waits_of_one_tenant_leave_room_for_other_tenants(
    redis: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fronts, "MAX_ASKED", 4)
    file, prefix = tmp_path / "keys.toml", f"{secrets.token_hex(8)}:"
    file.write_text("\n".join(f'[tenants.{name}]\nkeys = ["{hashed_key(name)}"]' for name in ("ann", "bob")))
    first, second = (SharedStore(redis.url, prefix=prefix, front=name) for name in "ab")
    with (
        api_server(FakeEngine(), constraints=False, shared=first, tenants=Tenants(file=file)) as here,
        api_server(FakeEngine(), constraints=False, shared=second, tenants=Tenants(file=file)) as there,
        httpx2.Client(headers={"x-api-key": "ann"}, timeout=30) as ann,
        httpx2.Client(headers={"x-api-key": "bob"}, timeout=30) as bob,
        ThreadPoolExecutor() as threads,
    ):
        here.call(here.engine.gate.allow, 0)
        program = f"/v1/programs/{ann.post(f'{here.url}/v1/programs', json={}).json()['id']}"
        placeholder = {"name": "o", "in_out": "out", "semantic_var_id": "x"}
        body = {"prompt": "Say {{o}}", "placeholders": [placeholder]}
        assert ann.post(f"{here.url}{program}/submit", json=body).status_code == 200
        waits = [threads.submit(ann.get, f"{there.url}{program}/variables/x") for _ in range(6)]
        running = here.service.fronts._running
        try:
            here.wait_until(lambda: len(running) + sum(wait.done() for wait in waits) == len(waits))
            assert len(running) == 2
            asked = {"model": MODEL, "input": "Say", "background": True}
            response = bob.post(f"{here.url}/v1/responses", json=asked).json()["id"]
            polled = bob.get(f"{there.url}/v1/responses/{response}")
            assert (polled.status_code, polled.json()["id"]) == (200, response)
        finally:
            here.call(here.engine.gate.open)
        assert sorted(wait.result().status_code for wait in waits) == [200] * 2 + [503] * 4
