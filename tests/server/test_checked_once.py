"""How often each check of a generation runs on its path: once in the program, and once where a server
receives it. Nothing behind that checks it again."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import anyio.to_thread
import httpx2
import pytest
from support.api_server import VENDOR, ApiServer, api_server
from support.apis import openai_answers
from support.apis.fake_server import fake_server
from support.direct_compiler import direct_compiler
from support.fake_engine import FakeEngine
from support.server.apis import APIS, CHAT, Api, post

import agentflow as af
from agentflow.backends.local import interpreted
from agentflow.engine.generator.generator import EngineGenerator
from agentflow.protocol import op_table, ops
from agentflow.protocol.backend import Connection, Deliver, Lost
from agentflow.protocol.chat import Conversation
from agentflow.protocol.constraint import Constraint
from agentflow.protocol.events import Capabilities
from agentflow.protocol.op_table import OPS, check_types
from agentflow.protocol.ops import check_branches
from agentflow.protocol.sampling import SamplingParams, check_stop_regex
from agentflow.protocol.text.transform import check_written

pytestmark = pytest.mark.anyio

Counts = dict[str, tuple[int, int]]
"""For each check the number of its calls in the thread of the program, and in those of a server or engine."""

CHECKS: dict[str, Any] = {
    "params": (SamplingParams, "check"),
    "constraint": (Constraint, "check"),
    "conversation": (Conversation, "check"),
    "task": (Capabilities, "require_generation"),
    "kind": (Capabilities, "require"),
    "accepted": (Capabilities, "require_params"),
    "stop": check_stop_regex,
    "transforms": check_written,
    "branches": check_branches,
}
"""Methods, and functions of modules."""

OF_A_GEN = ("params", "stop", "constraint", "task", "kind", "accepted", "transforms")


@pytest.fixture
def anyio_backend() -> str:
    """The web server needs asyncio."""
    return "asyncio"


@pytest.fixture(scope="module")
def server() -> Iterator[ApiServer]:
    with api_server() as running:
        yield running


class Tally:
    """Counts the calls of the checks, wherever they were imported."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._calls: Counter[tuple[str, bool]] = Counter()
        self._here = threading.get_ident()
        modules = [module for name, module in sys.modules.items() if name.startswith("agentflow.")]
        for name, check in CHECKS.items():
            if isinstance(check, tuple):
                kind, method = check
                patch.setattr(kind, method, self._counted(name, getattr(kind, method)))
                continue
            counted = self._counted(name, check)
            for module in modules:
                for imported in [key for key, value in vars(module).items() if value is check]:
                    patch.setattr(module, imported, counted)

    def _counted(self, name: str, check: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self._calls[name, threading.get_ident() == self._here] += 1
            return check(*args, **kwargs)

        return counted

    @property
    def counts(self) -> Counts:
        return {name: (self._calls[name, True], self._calls[name, False]) for name, _ in self._calls}


@pytest.fixture
def tally(monkeypatch: pytest.MonkeyPatch, server: ApiServer) -> Tally:
    return Tally(monkeypatch)


class Constrained(FakeEngine):
    """The embedded engine, with a compiler of constraints."""

    @asynccontextmanager
    async def connect(self, deliver: Deliver, lost: Lost) -> AsyncIterator[Connection]:
        async with self.open_client() as client, direct_compiler() as compiler:
            generator = EngineGenerator(client, self.template, compiler=compiler)
            async with interpreted(generator, deliver) as connection:
                yield connection


def open_session(server: ApiServer | None = None) -> af.Session:
    """A session on a server, or (None) on an embedded engine."""
    return (
        af.session(backend=Constrained()) if server is None else af.session(server.url.replace("http", "ws"))
    )


@asynccontextmanager
async def behind_an_api() -> AsyncIterator[af.OpenAICompatible]:
    async with fake_server(lambda request: openai_answers.text_stream("1984")) as vendor:
        yield af.OpenAICompatible(f"{vendor.url}/v1", "m", flavour="vllm", max_retries=0)


def weather(city: str) -> str:
    """Says how the weather is."""
    return f"fine in {city}"


async def generate(flow: af.Session) -> None:
    async with flow.state() as s:
        s += af.user("Which year?") + af.gen("year", regex="[0-9]{4}", max_tokens=4, stop_regex="x")
        s += af.user(s["year"].strip())
        await s


@af.program
async def traced(s: af.State) -> str:
    s += af.user("Which year?") + af.gen("year", regex="[0-9]{4}", max_tokens=4, stop_regex="x")
    s += af.user(s["year"].strip())
    return await s["year"]


IN_THE_PROGRAM: Counts = dict.fromkeys(OF_A_GEN, (1, 0))
ON_BOTH_SIDES: Counts = dict.fromkeys(OF_A_GEN, (1, 1))


async def test_an_embedded_session(tally: Tally) -> None:
    async with open_session() as flow:
        await generate(flow)
    assert tally.counts == IN_THE_PROGRAM


async def test_a_session_on_a_server(tally: Tally, server: ApiServer) -> None:
    async with open_session(server) as flow:
        await generate(flow)
    assert tally.counts == ON_BOTH_SIDES


async def test_several_models(tally: Tally) -> None:
    models = {"a": af.Scripted("x"), "b": Constrained()}
    async with af.session(models=models) as flow, flow.state(model="b") as s:
        s += af.user("Which year?") + af.gen("year", regex="[0-9]{4}", max_tokens=4, stop_regex="x")
        other = s.copy(model="a")
        other += af.user(s["year"].strip())
        await other
    assert tally.counts == IN_THE_PROGRAM | {"branches": (1, 0)}  # the copy is a fork


async def test_a_session_with_an_api(tally: Tally) -> None:
    async with behind_an_api() as backend, af.session(backend=backend) as flow:
        await generate(flow)
    assert tally.counts == IN_THE_PROGRAM


@pytest.mark.parametrize("is_served", [False, True])
async def test_a_graph(tally: Tally, server: ApiServer, is_served: bool) -> None:
    """Tracing checks a graph's values; submitting it checks only whether the model can run it."""
    graph = traced.trace()
    abilities = ("task", "kind", "accepted")
    assert tally.counts == {name: (1, 0) for name in OF_A_GEN if name not in abilities}
    async with open_session(server if is_served else None) as flow:
        await flow.submit(graph)
    assert tally.counts == (ON_BOTH_SIDES if is_served else IN_THE_PROGRAM)


@af.program
async def forked(s: af.State) -> str:
    s += af.user("Which year?")
    for branch in s.fork(2):
        branch += af.gen("year", max_tokens=4)
    return await branch["year"]


@pytest.mark.parametrize("is_served", [False, True])
async def test_the_rows_of_the_table_of_ops(monkeypatch, server: ApiServer, is_served: bool) -> None:
    """Tracing checks an op of a graph, and the server checks it on arrival. A run changes the first
    op, whose types are checked again."""
    here, calls, typed = threading.get_ident(), Counter[tuple[str, bool]](), list[Any]()

    def counted(kind: str, check: Callable[..., Any]) -> Callable[..., Any]:
        def count(*args: Any) -> Any:
            calls[kind, threading.get_ident() == here] += 1
            return check(*args)

        return count

    def recorded(value: Any) -> None:
        typed.append(value)
        check_types(value)

    for kind, row in OPS.items():
        monkeypatch.setitem(OPS, kind, replace(row, check=counted(kind.__name__, row.check)))
    monkeypatch.setattr(op_table, "check_types", recorded)
    graph = forked.trace()
    of_graph = Counter([type(op).__name__ for op in graph.ops])
    assert {name: calls[name, True] for name in of_graph} == of_graph
    typed.clear()
    async with open_session(server if is_served else None) as flow:
        await flow.submit(graph)
    assert {name: calls[name, True] for name in of_graph} == of_graph
    assert {name: calls[name, False] for name in of_graph} == {
        name: number * is_served for name, number in of_graph.items()
    }
    [submitted] = [op for op in typed if isinstance(op, ops.SubmitGraph)]
    assert [type(op) for op in submitted.ops] == [ops.Open]


@pytest.mark.parametrize("is_served", [False, True])
async def test_a_fork(tally: Tally, server: ApiServer, is_served: bool) -> None:
    async with open_session(server if is_served else None) as flow, flow.state() as s:
        s.fork(2)
        await s
    assert tally.counts == {"branches": (1, int(is_served))}


@pytest.mark.parametrize("is_served", [False, True])
async def test_a_conversation_with_tools(tally: Tally, server: ApiServer, is_served: bool) -> None:
    """The messages and the tools are two records of the program, and one op."""
    async with open_session(server if is_served else None) as flow, flow.state() as s:
        asked = af.conversation([af.Message("user", "How is it?")])
        s += asked + af.reply("x", tools=[weather], max_tokens=4)
        await s["x"]
    side = int(is_served)
    of_ops: Counts = dict.fromkeys(("params", "task", "accepted"), (1, side)) | {"conversation": (2, side)}
    of_calls = dict.fromkeys(("constraint", "kind"), (1 - side, side))  # made of the tools
    assert tally.counts == of_ops | of_calls


FORMS: dict[str, Callable[[str], Any]] = {
    "chat": lambda kind: {"guided_regex": kind},
    "completions": lambda kind: {"guided_regex": kind},
    "responses": lambda kind: {
        "text": {"format": {"type": "json_schema", "name": "x", "schema": {"const": kind}}}
    },
    "messages": lambda kind: {
        "output_config": {"format": {"type": "json_schema", "schema": {"const": kind}}}
    },
    "ollama chat": lambda kind: {"format": {"const": kind}},
    "ollama generate": lambda kind: {"format": {"const": kind}},
    "sglang": lambda kind: {"sampling_params": {"regex": kind}},
}
"""The fields of each API that ask for a form, which is new to the compiler."""


@pytest.mark.parametrize("api", APIS.values(), ids=lambda api: api.name)
async def test_an_http_api(tally: Tally, server: ApiServer, api: Api) -> None:
    body = api.body("Which year?", max_tokens=4, extra=FORMS[api.name](api.name))
    response = await anyio.to_thread.run_sync(partial(post, server, api, body))
    assert response.status_code == 200, response.text
    once = ["params", "constraint", "task", "kind"]
    if api.prompt_field != "text" and api.name != "completions":
        once.append("conversation")
    assert tally.counts == dict.fromkeys(once, (0, 1))


async def test_an_http_api_before_another(tally: Tally) -> None:
    body = CHAT.body("Which year?", max_tokens=4, extra={"guided_regex": "[0-9]{4}"}) | {"model": VENDOR}
    async with behind_an_api() as vendor:
        with api_server(vendor=vendor) as running:
            response = await anyio.to_thread.run_sync(partial(post, running, CHAT, body))
            assert response.status_code == 200, response.text
    once = ("params", "constraint", "task", "kind", "accepted", "conversation")
    assert tally.counts == dict.fromkeys(once, (0, 1))


async def test_the_api_of_programs(tally: Tally, server: ApiServer) -> None:
    output = {"name": "y", "in_out": "out", "sampling_params": {"max_tokens": 4}, "transforms": [["strip"]]}

    def run() -> None:
        with httpx2.Client(base_url=server.url, timeout=60) as client:
            program = f"/v1/programs/{client.post('/v1/programs', json={}).json()['id']}"
            body = {"prompt": "Which year? {{y}}", "placeholders": [output]}
            sent = client.post(f"{program}/submit", json=body)
            assert sent.status_code == 200, sent.text
            [placed] = sent.json()["placeholders"]
            value = client.get(f"{program}/variables/{placed['semantic_var_id']}")
            assert value.status_code == 200, value.text

    await anyio.to_thread.run_sync(run)
    assert tally.counts == dict.fromkeys(("params", "accepted", "transforms", "task"), (0, 1))
