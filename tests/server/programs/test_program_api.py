"""Programs over HTTP on a scripted generator: values, waits, errors, ends and limits."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import anyio
import httpx2
import msgspec
import pytest
from starlette.applications import Starlette
from support.clocks import ClockS
from support.holds import until
from support.server.http_clients import only_asyncio

from agentflow.backends.scripted_generator import ScriptedContext, ScriptedGenerator
from agentflow.errors import RunFailed
from agentflow.protocol.sampling import GenParams
from agentflow.runtime.generator import Generated, OnText, StateHint
from agentflow.server import app as app_module
from agentflow.server.app import Access, create_app
from agentflow.server.config.limits import HttpLimits
from agentflow.server.event_stream import ServerSentEvents
from agentflow.server.models.models import one_model
from agentflow.server.programs.programs import open_programs
from agentflow.server.service import Service
from agentflow.server.tenants.keys import Tenants, hashed_key

pytestmark = pytest.mark.anyio


anyio_backend = pytest.fixture(only_asyncio)


SLOW, FAIL = "(slow)", "(fail)"


class GatedGenerator(ScriptedGenerator):
    """Writes its prompt in angle brackets. After ``SLOW``, it writes one word and waits for ``released``;
    after ``FAIL`` it fails."""

    def __init__(self) -> None:
        super().__init__(lambda prompt: f"<{prompt}>")
        self.released = anyio.Event()
        self.num_waiting = 0
        self.hints: list[StateHint] = []
        self.params: list[GenParams] = []

    def hint(self, context: ScriptedContext, hint: StateHint) -> None:
        self.hints.append(hint)

    async def generate(
        self, context: ScriptedContext, params: GenParams, on_text: OnText, *rest: Any, **options: Any
    ) -> Generated:
        self.params.append(params)
        if context.text.endswith(FAIL):
            raise RunFailed("the model is out of order")
        if context.text.endswith(SLOW):
            on_text("<")
            self.num_waiting += 1
            try:
                await self.released.wait()
            finally:
                self.num_waiting -= 1
            return await super().generate(context, params, lambda _: None, *rest, **options)
        return await super().generate(context, params, on_text, *rest, **options)


@dataclass
class Peer:
    """A client of one program."""

    http: httpx2.AsyncClient
    id: str

    def path(self, variable: str) -> str:
        return f"/v1/programs/{self.id}/variables/{variable}"

    async def submit(self, prompt: str, **variables: Any) -> httpx2.Response:
        """``NAME="ID"``: an input or, with the prefix ``out_``, an output. A dictionary has more fields."""
        placeholders = []
        for name, given in variables.items():
            fields = given if isinstance(given, dict) else {"semantic_var_id": given}
            in_out = "out" if name.startswith("out") else "in"
            placeholders.append({"name": name, "in_out": in_out, **fields})
        return await self.send(prompt=prompt, placeholders=placeholders)

    async def send(self, **body: Any) -> httpx2.Response:
        return await self.http.post(f"/v1/programs/{self.id}/submit", json=body)

    async def get(self, variable: str, **query: Any) -> httpx2.Response:
        return await self.http.get(self.path(variable), params=query)

    async def value(self, variable: str) -> str:
        response = await self.get(variable)
        assert response.status_code == 200, response.text
        return response.json()["value"]

    async def put(self, variable: str, value: str) -> httpx2.Response:
        return await self.http.put(self.path(variable), json={"value": value})

    async def close(self) -> httpx2.Response:
        return await self.http.delete(f"/v1/programs/{self.id}")


@dataclass
class Served:
    """A server in this event loop."""

    app: Starlette
    generator: GatedGenerator
    http: httpx2.AsyncClient

    @property
    def service(self) -> Service:
        found = self.app.state.service
        assert isinstance(found, Service)
        return found

    async def open(self, key: str | None = None) -> Peer:
        """A new program, of the tenant with this key."""
        http = self.http
        if key is not None:
            transport = httpx2.ASGITransport(app=self.app)
            headers = {"authorization": f"Bearer {key}"}
            http = httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1", headers=headers)
        response = await http.post("/v1/programs", json={})
        assert response.status_code == 200, response.text
        return Peer(http, response.json()["id"])


@asynccontextmanager
async def served(tenants: Tenants | None = None, **limits: Any) -> AsyncIterator[Served]:
    """At its end, nothing runs and no context is held."""
    generator = GatedGenerator()

    @asynccontextmanager
    async def open_generator() -> AsyncIterator[GatedGenerator]:
        yield generator

    app = create_app(
        one_model(open_generator), http_limits=HttpLimits(**limits), access=Access(tenants or Tenants())
    )
    with anyio.fail_after(30):
        async with app.router.lifespan_context(app):
            transport = httpx2.ASGITransport(app=app)
            async with httpx2.AsyncClient(
                transport=transport, base_url="http://127.0.0.1", timeout=None
            ) as http:
                yield Served(app, generator, http)
    assert (generator.num_open, generator.num_running, generator.num_waiting) == (0, 0, 0)


def error_of(response: httpx2.Response) -> tuple[int, str, str | None]:
    error = response.json()["error"]
    return response.status_code, error["code"], error["param"]


async def test_a_chain_of_requests_and_a_value_that_is_set_before_or_after() -> None:
    async with served() as at:
        program = await at.open()
        assert (await program.put("task", "sums")).json()["value"] == "sums"
        answer = await program.submit("Plan {{ task }}: {{out}}", task="task", out="plan")
        assert answer.json()["placeholders"] == [
            {"name": "task", "semantic_var_id": "task"},
            {"name": "out", "semantic_var_id": "plan"},
        ]
        await program.submit(
            "Do {{plan}} for {{who}} and {{who}}: {{out}}", plan="plan", who="who", out="code"
        )
        pending = (await program.get("code", wait_s=0)).json()
        assert (pending["status"], pending["value"]) == ("pending", None)
        assert (await program.put("who", "{{plan}}")).status_code == 200
        assert await program.value("plan") == "<Plan sums: >"
        assert await program.value("code") == "<Do <Plan sums: > for {{plan}} and {{plan}}: >"
        ready = (await program.get("code")).json()
        assert (ready["status"], ready["finish_reason"]) == ("ready", "eos")
        assert ready["usage"]["completion_tokens"] > 0


async def test_a_parameter_that_the_model_does_not_support_starts_nothing() -> None:
    async with served() as at:
        able = at.generator.capabilities
        at.generator.capabilities = msgspec.structs.replace(able, sampling=("max_tokens",))
        program = await at.open()
        sampling = {"sampling_params": {"max_tokens": 2, "top_k": 3}}
        response = await program.submit("{{out}}", out={"semantic_var_id": "x", **sampling})
        assert error_of(response) == (400, "unsupported", "top_k")
        assert error_of(await program.get("x")) == (404, "variable_not_found", None)
        assert at.generator.params == []


async def test_a_map_and_its_reduce() -> None:
    async with served() as at:
        program = await at.open()
        for number in range(5):
            await program.submit(f"map {number} {{{{out}}}}", out=f"part{number}")
        places = "".join(f"{{{{in{number}}}}}" for number in range(5))
        parts = {f"in{number}": f"part{number}" for number in range(5)}
        await program.submit(f"reduce {places}{{{{out}}}}", **parts, out="all")
        assert await program.value("all") == f"<reduce {''.join(f'<map {number} >' for number in range(5))}>"


async def test_several_outputs_transforms_parameters_and_new_ids() -> None:
    async with served() as at:
        program = await at.open()
        answer = await program.submit(
            "a {{out1}} b {{out2}} the end",
            out1={"transforms": [["regex", "<(.)"], ["upper"]]},
            out2={"semantic_var_id": "second", "sampling_params": {"max_tokens": 2, "stop": "b"}},
        )
        first = answer.json()["placeholders"][0]["semantic_var_id"]
        assert await program.value(first) == "A"
        assert await program.value("second") == "<a <a"
        assert at.generator.params[1] == GenParams(max_tokens=2, stop=("b",))
        await program.submit(
            "{{x}}{{out}}", x={"semantic_var_id": "second", "transforms": [["strip"]]}, out="y"
        )
        assert await program.value("y") == "<<a <a>"


async def test_two_readers_of_one_variable_and_one_that_streams() -> None:
    async with served() as at:
        program = await at.open()
        await program.submit(f"one {SLOW}{{{{out}}}}", out="v")
        await until(lambda: at.generator.num_waiting == 1)
        found: list[str] = []
        streamed: list[Any] = []

        async def read() -> None:
            found.append(await program.value("v"))

        async def stream() -> None:
            response = await program.get("v", stream=True)
            streamed.extend(json.loads(part[6:]) for part in response.text.split("\n\n")[:-1])

        async with anyio.create_task_group() as group:
            for task in (read, read, stream):
                group.start_soon(task)
            await until(lambda: len(next(iter(at.service.programs.store))._readers) == 3)
            at.generator.released.set()
        assert found == [f"<one {SLOW}>"] * 2
        *deltas, end = streamed
        assert "".join(delta["delta"] for delta in deltas) == end["value"] == f"<one {SLOW}>"
        late = await program.get("v", stream=True)
        assert [json.loads(part[6:])["object"] for part in late.text.split("\n\n")[:-1]] == [
            "program.variable.delta",
            "program.variable",
        ]


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_failure_has_the_path_from_its_producer(is_streamed: bool) -> None:
    async with served() as at:
        program = await at.open()
        await program.submit("good {{out}}", out="good")
        await program.submit(f"bad {FAIL}{{{{out}}}}", out="bad")
        await program.submit("{{x}}{{y}}{{out1}} then {{out2}}", x="good", y="bad", out1="c", out2="d")
        await program.submit("{{x}}{{out}}", x="d", out="e")
        await program.submit("{{x}}{{out}}", x={"semantic_var_id": "good", "transforms": [["json"]]}, out="f")
        await program.submit(f"{FAIL}{{{{out1}}}} then {{{{out2}}}}", out1="g", out2="h")
        paths = (["bad", "d", "e"], ["bad", "c"], ["bad"], ["f"], ["g", "h"])
        for path in paths:
            variable = path[-1]
            if is_streamed:
                response = await program.get(variable, stream=True)
                error = json.loads(response.text.rpartition("data: ")[2])["error"]
            else:
                response = await program.get(variable)
                assert response.status_code == 424
                error = response.json()["error"]
            assert error["path"] == path
            assert error["code"] == "run_failed"
        assert await program.value("good") == "<good >"


def on_send(monkeypatch: pytest.MonkeyPatch, meanwhile: Callable[[], Awaitable[None]]) -> None:
    """Runs ``meanwhile`` during each send of a stream."""
    send = ServerSentEvents.send

    async def slow_send(stream: ServerSentEvents, events: bytes) -> None:
        await send(stream, events)
        await meanwhile()

    monkeypatch.setattr(ServerSentEvents, "send", slow_send)


async def test_text_and_end_that_arrive_during_a_send_are_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    async with served() as at:
        program = await at.open()
        await program.submit(f"one {SLOW}{{{{out}}}}", out="v")
        await until(lambda: at.generator.num_waiting == 1)
        [stored] = at.service.programs.store
        variable = stored.find("v")
        assert variable is not None

        async def finish() -> None:
            at.generator.released.set()
            await stored.wait(variable)

        on_send(monkeypatch, finish)
        response = await program.get("v", stream=True)
        *deltas, end = [json.loads(part[6:]) for part in response.text.split("\n\n")[:-1]]
        assert [(delta["at"], delta["delta"]) for delta in deltas] == [(0, "<"), (1, f"one {SLOW}>")]
        assert end["value"] == f"<one {SLOW}>"


async def test_a_failure_whose_program_is_closed_during_the_send(monkeypatch: pytest.MonkeyPatch) -> None:
    async with served() as at:
        program = await at.open()
        await program.submit(f"{FAIL}{{{{out}}}}", out="v")
        assert (await program.get("v")).status_code == 424
        [stored] = at.service.programs.store

        async def close() -> None:
            at.service.programs.close(stored)
            await until(lambda: stored.find("v") is None)

        on_send(monkeypatch, close)
        response = await program.get("v", stream=True)
        assert json.loads(response.text.rpartition("data: ")[2])["error"]["code"] == "program_not_found"


async def test_closing_in_mid_run_cancels_all_and_tells_the_readers() -> None:
    async with served() as at:
        program = await at.open()
        await program.submit(f"{SLOW}{{{{out}}}}", out="v")
        await until(lambda: at.generator.num_waiting == 1)
        found: list[tuple[int, str, str | None]] = []

        async def read() -> None:
            found.append(error_of(await program.get("v")))

        async with anyio.create_task_group() as group:
            group.start_soon(read)
            await until(lambda: len(next(iter(at.service.programs.store))._readers) == 1)
            assert (await program.close()).json() == {
                "id": program.id,
                "object": "program.deleted",
                "deleted": True,
            }
        gone = (404, "program_not_found", None)
        assert found == [gone]
        await until(lambda: (at.generator.num_waiting, at.generator.num_open) == (0, 0))
        assert error_of(await program.close()) == gone
        assert error_of(await program.get("v")) == gone
        assert at.service.programs.store.num_bytes == 0


async def test_a_reader_that_leaves_costs_nothing_and_ends_nothing() -> None:
    async with served() as at:
        program = await at.open()
        await program.submit(f"{SLOW}{{{{out}}}}", out="v")
        await until(lambda: at.generator.num_waiting == 1)
        store = at.service.programs.store
        num_bytes = store.num_bytes
        for _ in range(20):
            assert (await program.get("v", wait_s=0)).json()["status"] == "pending"
            with anyio.CancelScope() as scope:

                async def leave(scope: anyio.CancelScope = scope) -> None:
                    await until(lambda: bool(next(iter(store))._readers))
                    scope.cancel()

                async with anyio.create_task_group() as group:
                    group.start_soon(leave)
                    await program.get("v")
        assert store.num_bytes == num_bytes
        at.generator.released.set()
        assert await program.value("v") == f"<{SLOW}>"


async def test_the_end_of_the_server_ends_its_programs() -> None:
    async with served() as at:
        program = await at.open()
        await program.submit(f"{SLOW}{{{{out}}}}", out="v")
        await program.submit("{{x}}{{out}}", x="never", out="w")
        await until(lambda: at.generator.num_waiting == 1)


async def test_a_program_expires_unless_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ClockS()
    monkeypatch.setattr(
        app_module, "open_programs", lambda limits, values: open_programs(limits, clock, values)
    )
    async with served(program_idle_s=100) as at:
        used, idle = await at.open(), await at.open()
        await used.submit(f"{SLOW}{{{{out}}}}", out="v")
        async with anyio.create_task_group() as group:
            group.start_soon(used.get, "v")
            await until(lambda: any(program._readers for program in at.service.programs.store))
            clock.now_s += 100
            assert error_of(await idle.put("x", "1")) == (404, "program_not_found", None)
            assert [program.id for program in at.service.programs.store.take_expired()] == [idle.id]
            assert (await used.get("v", wait_s=0)).status_code == 200
            at.generator.released.set()
        clock.now_s += 99
        assert (await used.get("v")).status_code == 200
    assert at.generator.num_open == 0


def keyed(tmp_path: Any, **keys: str) -> Tenants:
    file = tmp_path / "keys.toml"
    file.write_text(keys_text(**keys))
    return Tenants(file=file)


def keys_text(**keys: str) -> str:
    return "\n".join(f'[tenants.{name}]\nkeys = ["{hashed_key(key)}"]' for name, key in keys.items())


async def test_tenants_see_their_own_programs_until_their_keys_are_revoked(tmp_path: Any) -> None:
    async with served(keyed(tmp_path, ann="ann-1", ben="ben-1")) as at:
        ann, ben = await at.open("ann-1"), await at.open("ben-1")
        await ann.put("x", "hers")
        stranger = Peer(ben.http, ann.id)
        for response in (
            await stranger.get("x"),
            await stranger.put("y", "1"),
            await stranger.close(),
            await stranger.submit("{{out}}", out="z"),
        ):
            assert error_of(response) == (404, "program_not_found", None)
        assert await ann.value("x") == "hers"
        (tmp_path / "keys.toml").write_text(keys_text(ann="ann-2", ben="ben-1"))
        await at.service.reload_tenants()
        assert [program.tenant for program in at.service.programs.store] == ["ben"]


async def test_the_limits_of_a_tenant_are_its_own(tmp_path: Any) -> None:
    limits = {"max_programs": 2, "program_bytes": 100_000, "programs_bytes": 1_000_000}
    async with served(keyed(tmp_path, ann="ann-1", ben="ben-1"), **limits) as at:
        first, second = await at.open("ann-1"), await at.open("ann-1")
        full = await first.http.post("/v1/programs", json={})
        assert error_of(full) == (429, "program_limit_exceeded", None)
        assert int(full.headers["retry-after"]) > 0
        for response in (
            await first.put("x", "a" * 100_000),
            await first.submit("a" * 20_000 + "{{out}}", out="y"),
        ):
            assert error_of(response) == (429, "program_limit_exceeded", None)
        for variable in ("x", "y"):
            assert error_of(await first.get(variable)) == (404, "variable_not_found", None)
        other = await at.open("ben-1")
        await other.submit("a{{out}}", out="y")
        assert await other.value("y") == "<a>"
        await second.close()
        third = await at.open("ann-1")
        await third.submit("a{{out}}", out="y")
        assert await third.value("y") == "<a>"


async def test_a_flood_of_requests_is_refused_and_the_program_goes_on() -> None:
    async with served(program_bytes=100_000) as at:
        program = await at.open()
        await program.put("x", "1")
        statuses = [(await program.submit("{{x}}{{out}}", x="x", out={})).status_code for _ in range(100)]
        assert set(statuses) == {200, 429}
        assert await program.value("x") == "1"


async def test_a_program_without_memory_is_refused_and_leaves_nothing() -> None:
    async with served(programs_bytes=100) as at:
        refused = await at.http.post("/v1/programs", json={})
        assert error_of(refused) == (429, "program_limit_exceeded", None)
        assert (len(at.service.programs.store), at.service.programs.store.num_bytes) == (0, 0)


async def test_concurrent_requests_with_one_output_are_accepted_once() -> None:
    async with served() as at:
        program = await at.open()
        responses: list[httpx2.Response] = []

        async def submit(number: int) -> None:
            responses.append(await program.submit(f"{number}{'a' * 50_000}{{{{out}}}}", out="v"))

        async with anyio.create_task_group() as group:
            for number in range(4):
                group.start_soon(submit, number)
        assert sorted(response.status_code for response in responses) == [200, 400, 400, 400]
        for response in responses:
            if response.status_code == 400:
                assert error_of(response) == (400, "invalid_value", "placeholders[0].semantic_var_id")
        assert (await program.value("v")).startswith("<")


async def test_a_value_is_read_though_the_memory_is_full() -> None:
    async with served(program_bytes=100_000) as at:
        program = await at.open()
        await program.put("x", "1")
        [stored] = at.service.programs.store
        memory = stored._memory
        memory.reserve(100_000 - memory.num_bytes)
        assert await program.value("x") == "1"
        assert error_of(await program.put("y", "2")) == (429, "program_limit_exceeded", None)


async def test_a_request_is_refused_when_its_program_ends_meanwhile() -> None:
    async with served() as at:
        program = await at.open()
        [stored] = at.service.programs.store
        responses: list[httpx2.Response] = []

        async def submit() -> None:
            prompt = "{{x}}" * 10_000 + "{{out}}"
            responses.append(await program.submit(prompt, x="x", out="v"))

        async with anyio.create_task_group() as group:
            group.start_soon(submit)
            await until(lambda: stored.find("x") is not None)
            at.service.programs.close(stored)
        [response] = responses
        assert response.status_code in (200, 404)
        await until(lambda: at.service.programs.store.num_bytes == 0)


async def test_criteria_reach_the_requests_that_the_value_depends_on() -> None:
    async with served() as at:
        program = await at.open()
        await program.submit(f"{SLOW}{{{{out}}}}", out="a")
        await program.submit("{{x}}{{out}}", x="a", out={"semantic_var_id": "b", "transforms": [["upper"]]})
        await program.submit("other {{out}}", out="c")
        await program.value("c")
        await until(lambda: at.generator.num_waiting == 1)
        await anyio.wait_all_tasks_blocked()
        for criteria, num_hints in (("throughput", 2), ("throughput", 0), ("latency", 2), ("throughput", 0)):
            at.generator.hints.clear()
            await program.get("b", wait_s=0, criteria=criteria)
            await anyio.wait_all_tasks_blocked()
            scheduling = [hint.scheduling for hint in at.generator.hints]
            assert [one and one.objective for one in scheduling] == [criteria] * num_hints
        at.generator.released.set()
        assert await program.value("b") == f"<<{SLOW}>>".upper()


async def test_criteria_hold_for_later_hints() -> None:
    async with served() as at:
        program = await at.open()
        await program.submit(f"{SLOW}{{{{out}}}}", out="a")
        await program.submit("{{x}}{{out1}}{{out2}}", x="a", out1="b", out2="c")
        await until(lambda: at.generator.num_waiting == 1)
        await program.get("c", wait_s=0, criteria="throughput")
        await anyio.wait_all_tasks_blocked()
        at.generator.hints.clear()
        at.generator.released.set()
        await program.value("c")
        scheduling = [hint.scheduling for hint in at.generator.hints if hint.scheduling is not None]
        assert {one.objective for one in scheduling if one.steps is not None} == {"throughput"}


async def test_the_requests_of_a_program_are_one_program_for_the_scheduler() -> None:
    async with served() as at:
        numbers: list[set[int]] = []
        for _ in range(2):
            at.generator.hints.clear()
            program = await at.open()
            await program.submit("{{out}}", out="a")
            await program.submit("other {{out}}", out="b")
            await program.submit("{{x}}{{out}}", x="a", out="c")
            for variable in ("b", "c"):
                await program.value(variable)
            await anyio.wait_all_tasks_blocked()
            scheduling = [hint.scheduling for hint in at.generator.hints if hint.scheduling is not None]
            assert {one.group for one in scheduling} == {0}
            numbers.append({one.program for one in scheduling})
        assert [len(found) for found in numbers] == [1, 1]
        assert numbers[0] != numbers[1]


async def test_the_reader_of_a_stream_is_in_the_hint() -> None:
    async with served() as at:
        program = await at.open()
        await program.submit(f"{SLOW}{{{{out}}}}", out="a")
        await until(lambda: at.generator.num_waiting == 1)
        async with anyio.create_task_group() as group:
            group.start_soon(lambda: program.get("a", stream=True, criteria="latency"))
            await until(
                lambda: any(hint.scheduling and hint.scheduling.is_streamed for hint in at.generator.hints)
            )
            at.generator.released.set()


async def test_a_wrong_request_is_refused_by_field_and_changes_nothing() -> None:
    def place(in_out: str = "out", **fields: Any) -> dict[str, Any]:
        return {"name": "v", "in_out": in_out, **fields}

    text, x = "{{v}}", place("in", name="x", semantic_var_id="x")
    async with served() as at:
        program = await at.open()
        await program.put("x", "1")
        for body, param in (
            ({"placeholders": [place()]}, "prompt"),
            ({"prompt": text}, "placeholders"),
            ({"prompt": text, "placeholders": []}, "placeholders"),
            ({"prompt": text, "placeholders": [place(in_out="both")]}, "placeholders[0].in_out"),
            ({"prompt": text, "placeholders": [place(name="1 2")]}, "placeholders[0].name"),
            ({"prompt": text, "placeholders": [place(other=1)]}, "placeholders[0].other"),
            ({"prompt": "{{w}}{{v}}", "placeholders": [place()]}, "prompt"),
            ({"prompt": "{{v}}{{v}}", "placeholders": [place()]}, "prompt"),
            ({"prompt": text, "placeholders": [place(), place()]}, "placeholders[1].name"),
            ({"prompt": text, "placeholders": [place(), x]}, "placeholders[1].name"),
            ({"prompt": "{{x}}", "placeholders": [x]}, "placeholders"),
            ({"prompt": text, "placeholders": [place("in")]}, "placeholders[0].semantic_var_id"),
            (
                {"prompt": text, "placeholders": [place(semantic_var_id="x")]},
                "placeholders[0].semantic_var_id",
            ),
            (
                {"prompt": "{{x}}{{v}}", "placeholders": [x, place(semantic_var_id="x")]},
                "placeholders[1].semantic_var_id",
            ),
            (
                {"prompt": "{{x}}{{v}}", "placeholders": [x | {"sampling_params": {}}, place()]},
                "placeholders[0].sampling_params",
            ),
            (
                {"prompt": text, "placeholders": [place(sampling_params={"max_tokens": 0})]},
                "placeholders[0].sampling_params.max_tokens",
            ),
            (
                {"prompt": text, "placeholders": [place(sampling_params={"max_tokens": 1, "min_tokens": 2})]},
                "placeholders[0].sampling_params.min_tokens",
            ),
            (
                {"prompt": text, "placeholders": [place(transforms=[["strip"], ["xml", "<"]])]},
                "placeholders[0].transforms[1]",
            ),
            (
                {"prompt": "{{x}}{{v}}", "placeholders": [place(), x | {"transforms": [["items", "x.y"]]}]},
                "placeholders[1].transforms[0]",
            ),
        ):
            response = await program.send(**body)
            assert response.status_code == 400, (body, response.text)
            assert response.json()["error"]["param"] == param, (body, response.text)
        for sent in (b"", b"[]", b"{", b"\xff"):
            assert (await program.http.put(program.path("y"), content=sent)).status_code == 400
        assert error_of(await program.send(prompt=text, placeholders=[place()], model="none")) == (
            404,
            "model_not_found",
            "model",
        )
        assert error_of(await program.get("x", criteria="both")) == (400, "invalid_request", "criteria")
        assert error_of(await program.get("x", wait_s=-1)) == (400, "invalid_request", "wait_s")
        assert error_of(await program.get("x", wait_s=1, stream=True)) == (400, "invalid_value", "wait_s")
        await program.submit("{{out}}", out="made")
        for variable in ("x", "made", "a b"):
            assert error_of(await program.put(variable, "2")) == (400, "invalid_value", "var")
        assert error_of(await program.get("y")) == (404, "variable_not_found", None)
        assert await program.value("x") == "1"
