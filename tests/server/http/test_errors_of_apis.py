"""Errors that each API that generates reports: unknown models and keys, engines that fail or are down."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import httpx2
import pytest
from support.api_server import ApiServer, api_server
from support.fake_engine import FakeEngine
from support.faulty_servers import KEY, failing_engine, tenants
from support.server.apis import APIS, CHAT, MESSAGES, Api, post, refused
from support.server.module_servers import module_server

from agentflow.server.compatible.error_format import OPENAI, read_error
from agentflow.server.errors import ApiError
from agentflow.server.stores.fronts import ForwardedAnswer

EACH_API = pytest.mark.parametrize("api", APIS.values(), ids=APIS)


server = module_server(tenants=tenants(), constraints=False)


def body(api: Api, **fields: Any) -> dict[str, Any]:
    return {**api.body("Hi", max_tokens=4), **fields}


@EACH_API
def test_a_key_is_needed_where_there_are_keys(server: ApiServer, api: Api) -> None:
    assert refused(server, api, body(api), key="af-other") == (401, "invalid_api_key", None)
    assert post(server, api, body(api), key=KEY).status_code == 200


@EACH_API
@pytest.mark.parametrize("stream", [False, True])
def test_an_unknown_model_is_not_found(server: ApiServer, api: Api, stream: bool) -> None:
    asked = body(api, model="nowhere", stream=stream)
    assert refused(server, api, asked, key=KEY) == (404, "model_not_found", None)


@EACH_API
def test_a_failed_step_is_the_answer_or_the_end_of_the_stream(api: Api) -> None:
    with api_server(failing_engine(ArithmeticError("no memory")), constraints=False) as server:
        assert refused(server, api, body(api, stream=False)) == (500, "engine_failed", None)
        stream = post(server, api, body(api, stream=True))
    assert stream.status_code == 200
    last = json.loads(stream.text.strip().splitlines()[-1].removeprefix("data: "))
    assert api.error(last)[0] == "engine_failed"
    assert "done" not in last


@pytest.mark.parametrize(("api", "status"), [(CHAT, 503), (MESSAGES, 529)])
def test_an_engine_that_is_down(api: Api, status: int) -> None:
    with api_server(failing_engine(SystemExit(3)), constraints=False) as server:
        assert httpx2.get(f"{server.url}/health/ready").status_code == 200
        post(server, api, body(api))  # the engine stops here
        for stream in (False, True):
            answer = post(server, api, body(api, stream=stream))
            assert (answer.status_code, api.error(answer.json())[0]) == (status, "engine_down")
            assert int(answer.headers["retry-after"]) >= 1
        ready = httpx2.get(f"{server.url}/health/ready")
        assert (ready.status_code, ready.json()["status"]) == (503, "unready")
        assert int(ready.headers["retry-after"]) >= 1
        assert httpx2.get(f"{server.url}/health/live").status_code == 200


@EACH_API
def test_a_stream_that_finds_the_queue_full(api: Api) -> None:
    with api_server(FakeEngine(max_unfinished=1), constraints=False) as server:
        requests = server.observe_requests()
        server.engine.gate.allow(0)
        try:
            with (
                httpx2.Client(base_url=server.url) as client,
                client.stream("POST", CHAT.path, json=body(CHAT, stream=True)) as first,
            ):
                assert first.status_code == 200
                server.call(requests.wait_for, 1)
                full = refused(server, api, body(api, stream=True))
                assert full == (529 if api is MESSAGES else 503, "overloaded", None)
        finally:
            server.engine.gate.open()


@pytest.mark.parametrize("retry_after_s", [None, 3.0])
@pytest.mark.parametrize("param", [None, "model"])
def test_f37_an_error_of_another_server_is_passed_on_unchanged(
    param: str | None, retry_after_s: float | None
) -> None:
    error = ApiError(503, "overloaded", "try again", param, retry_after_s)
    headers = tuple([(name.encode(), value.encode()) for name, value in error.headers.items()])
    found = read_error(ForwardedAnswer(status=503, headers=headers, body=OPENAI.body(error, "")))
    assert asdict(found) == asdict(error)
