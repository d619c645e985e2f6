"""The headers and fields that say to which program a request belongs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import httpx2
import pytest
from support.api_server import MODEL, ApiServer, api_server
from support.server.apis import APIS, CHAT, RESPONSES, TEXT, Api

from agentflow.engine.submit import Origin
from agentflow.engine.tenant import ANONYMOUS
from agentflow.server.http.caller import Caller


@pytest.fixture(scope="module")
def server() -> Iterator[ApiServer]:
    with api_server() as server:
        yield server


@pytest.fixture
def origins(server: ApiServer) -> list[Origin]:
    """The origins of the requests that the engine gets, in their order."""
    found: list[Origin] = []

    class Watching:
        def sent(self, submit: Any) -> None:
            found.append(submit.origin)

        def received(self, messages: Any) -> None:
            pass

    server.call(server.generator.observe, Watching())
    return found


def ask(server: ApiServer, api: Api, headers: Mapping[str, str] = {}, **fields: Any) -> httpx2.Response:
    body = {**api.body("Say hello", max_tokens=2), **fields, "stream": False}
    return httpx2.post(f"{server.url}{api.path}", json=body, headers=dict(headers), timeout=60)


@pytest.mark.parametrize("api", APIS.values(), ids=APIS)
def test_every_api_tells_the_scheduler_the_program_of_a_request(
    server: ApiServer, origins: list[Origin], api: Api
) -> None:
    for headers in (
        {},
        {"x-agentflow-program": "a", "x-agentflow-group": "map", "x-agentflow-objective": "throughput"},
        {"x-agentflow-program": "a", "x-agentflow-group": "map"},
        {"x-agentflow-program": "b", "x-agentflow-group": "map"},
        {"x-dynamo-session-id": "a"},
        {"x-agentflow-program": "b", "x-dynamo-session-id": "a"},
    ):
        assert ask(server, api, headers).status_code == 200
    plain, mapped, again, other, session, both = origins
    assert (plain.program, plain.task_group, plain.objective) == (0, 0, "latency")
    assert mapped.objective == "throughput"
    assert again.objective == "latency"
    assert mapped.program == again.program == session.program != 0
    assert mapped.task_group == again.task_group != other.task_group != 0
    assert both.program == other.program != mapped.program


@pytest.mark.parametrize("api", [CHAT, TEXT, RESPONSES], ids=["chat", "text", "responses"])
def test_a_cache_key_is_a_program_that_no_header_names(
    server: ApiServer, origins: list[Origin], api: Api
) -> None:
    for headers, key in (({}, "a"), ({"x-agentflow-program": "a"}, "b"), ({"x-dynamo-session-id": "a"}, "b")):
        assert ask(server, api, headers, prompt_cache_key=key).status_code == 200
    assert ask(server, api, prompt_cache_key="").status_code == 200
    assert len({origin.program for origin in origins[:3]} - {0}) == 1
    assert origins[3].program == 0


@pytest.mark.parametrize("api", APIS.values(), ids=APIS)
def test_an_unknown_objective_is_refused(server: ApiServer, api: Api) -> None:
    assert ask(server, api, {"x-agentflow-objective": "fast"}).status_code == 400
    assert ask(server, api, {"x-agentflow-program": "x" * 3000}).status_code == 200


@pytest.mark.parametrize("api", APIS.values(), ids=APIS)
def test_a_session_of_dynamo_is_one_state_until_its_final_request(api: Api) -> None:
    session, program = {"x-dynamo-session-id": "a"}, {"x-agentflow-program": "a"}

    def num_open(server: ApiServer) -> int:
        """The states whose tokens the cache keeps."""
        assert server.engine.client is not None
        snapshot = server.call(server.engine.client.watches.snapshot, None, 100, 0)
        return sum([num_keeps for *_, num_keeps, _, _ in snapshot.nodes])

    with api_server() as server:
        for headers, after in (
            (program, 0),
            (session, 1),
            ({**session, "x-dynamo-session-final": "false"}, 1),
            ({"x-dynamo-session-id": "b"}, 2),
            ({**session, "x-dynamo-session-final": "true"}, 1),
            ({"x-dynamo-session-id": "b", "x-dynamo-session-final": "true"}, 0),
        ):
            assert ask(server, api, headers).status_code == 200
            while num_open(server) != after:  # the last state is closed after its answer was sent
                pass


def test_sessions_of_tenants_are_their_own(server: ApiServer) -> None:
    ann, bob = [dataclasses.replace(ANONYMOUS, name=name) for name in ("ann", "bob")]
    states = set()
    for tenant in (ann, bob, ann):
        generator = server.service.models.find(MODEL, tenant).generator(tenant)
        context = server.call(generator.open, "")
        server.call(Caller(session="a").advise, generator, context)
        states.add(context.origin.state)
        server.call(generator.free, context)
    assert len(states) == 2


@pytest.mark.parametrize("api", [CHAT, TEXT], ids=["chat", "text"])
def test_agent_hints_of_dynamo_set_priority_and_length(
    server: ApiServer, origins: list[Origin], api: Api
) -> None:
    for extension in (
        {"agent_hints": {"priority": 50, "osl": 120, "latency_sensitivity": 1.5}},
        {"agent_hints": {"priority": "high", "osl": -3}, "annotations": ["x"]},
        {"agent_hints": 7},
        {},
    ):
        assert ask(server, api, nvext=extension).status_code == 200
    assert ask(server, api, nvext={"agent_hints": {"priority": 5}}, priority=-2).status_code == 200
    assert [(origin.priority, origin.output_tokens) for origin in origins] == [
        (10, 120),
        (0, 0),
        (0, 0),
        (0, 0),
        (-2, 0),
    ]
