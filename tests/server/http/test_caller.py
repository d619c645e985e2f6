"""The headers and fields that say to which program a request belongs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import httpx2
import pytest
from support.api_server import MODEL, ApiServer, api_server
from support.fake_engine import FakeEngine
from support.reasoning_models import QWEN_MODEL
from support.server.apis import APIS, CHAT, RESPONSES, TEXT, Api
from support.server.module_servers import module_server

from agentflow.engine.request import Origin
from agentflow.engine.tenant import ANONYMOUS
from agentflow.server.http.caller import Caller

server = module_server()


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
        {"x-dynamo-session-id": "c", "x-dynamo-parent-session-id": "a"},
    ):
        assert ask(server, api, headers).status_code == 200
    plain, mapped, again, other, session, both, child = origins
    assert (plain.program, plain.task_group, plain.objective) == (0, 0, "latency")
    assert mapped.objective == "throughput"
    assert again.objective == "latency"
    assert mapped.program == again.program == session.program != 0
    assert mapped.task_group == again.task_group != other.task_group != 0
    assert both.program == other.program != mapped.program
    assert child.program == session.program
    assert child.state != session.state


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
    expected = {
        '{"priority": 50, "osl": 120, "latency_sensitivity": 1.5}': (10, 120),
        '{"priority": -3, "strict_priority": 0, "osl": 4294967295}': (-3, 0),
        '{"priority": 2, "strict_priority": 7}': (7, 0),
        '{"priority": 2, "strict_priority": -1}': (2, 0),
        '{"latency_sensitivity": 2.6}': (3, 0),
        '{"latency_sensitivity": -1e300}': (-10, 0),
        '{"latency_sensitivity": 1e999}': (0, 0),
        '{"priority": 1e2}': (0, 0),
        '{"priority": 2147483648, "osl": 4294967296}': (0, 0),
        '{"priority": "high", "osl": -3}': (0, 0),
        '{"priority": true, "osl": 0}': (0, 0),
        "7": (0, 0),
        "null": (0, 0),
    }
    for hints in expected:
        body = json.dumps({**api.body("Hi", max_tokens=1), "nvext": {"agent_hints": 0, "annotations": ["x"]}})
        body = body.replace('"agent_hints": 0', f'"agent_hints": {hints}')
        headers = {"content-type": "application/json"}
        response = httpx2.post(f"{server.url}{api.path}", content=body, headers=headers, timeout=60)
        assert response.status_code == 200
    assert [(origin.priority, origin.output_tokens) for origin in origins] == [*expected.values()]
    assert ask(server, api, nvext={}).status_code == 200
    assert ask(server, api, nvext={"agent_hints": {"priority": 5}}, priority=-2).status_code == 200
    assert [origin.priority for origin in origins[-2:]] == [0, -2]


@pytest.mark.parametrize("is_asked", [True, False, "yes"])
def test_the_next_turn_is_prefilled_if_dynamos_hint_asks_for_it(is_asked: bool | str) -> None:
    engine = FakeEngine(runner=QWEN_MODEL.runner(), tokenizer=QWEN_MODEL.tokenizer)
    answer = "Hello! " * 30
    asked = {"role": "user", "content": f"<think>\nIt is a greeting.\n</think>\n\n{answer}"}
    turns = [asked, {"role": "assistant", "content": answer}, {"role": "user", "content": "Again."}]
    with api_server(engine, template=QWEN_MODEL.template) as server:
        requests = server.observe_requests()
        hints = {"agent_hints": {"speculative_prefill": is_asked}}
        body = {"model": MODEL, "messages": [asked], "max_tokens": 400, "nvext": hints}
        first = httpx2.post(f"{server.url}{CHAT.path}", json=body, timeout=60).json()
        assert first["choices"][0]["message"]["content"] == answer
        server.wait_until(lambda: not engine.client._unfinished)  # no call waits for tokens computed ahead
        server.assert_idle()
        ahead = [submit for submit in requests.submits if submit.origin.is_ahead]
        assert len(ahead) == (is_asked is True)
        body |= {"messages": turns, "max_tokens": 1}
        usage = httpx2.post(f"{server.url}{CHAT.path}", json=body, timeout=60).json()["usage"]
        # The template drops the reasoning, so without the hint the answer is not cached.
        num_asked = first["usage"]["prompt_tokens"]
        num_cached = usage["prompt_tokens_details"]["cached_tokens"]
        assert (num_cached > num_asked + 30) == (is_asked is True)


@pytest.mark.parametrize("api", [CHAT, TEXT], ids=["chat", "text"])
def test_a_salt_of_dynamo_is_the_salt_of_the_request(
    server: ApiServer, origins: list[Origin], api: Api
) -> None:
    for extension, own in (
        ({"cache_salt": "a"}, None),
        ({"cache_salt": "a"}, "b"),
        ({"cache_salt": None}, None),
    ):
        assert ask(server, api, nvext=extension, cache_salt=own).status_code == 200
    assert [origin.cache_salt for origin in origins] == ["a", "b", ""]
    for salt in (7, ["a"], "x" * 300):
        assert ask(server, api, nvext={"cache_salt": salt}).status_code == 400
