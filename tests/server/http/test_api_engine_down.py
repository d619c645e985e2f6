"""A server whose engine is down: both APIs and the readiness check answer 503, with a time to try again."""

from __future__ import annotations

import httpx2
import pytest
from support.api_errors import ANTHROPIC, OPENAI, Api, request_fields, response_to
from support.api_server import api_server
from support.faulty_servers import failing_engine


@pytest.mark.parametrize(("api", "status"), [(OPENAI, 503), (ANTHROPIC, 529)])
def test_requests_and_readiness_while_the_engine_is_down(api: Api, status: int) -> None:
    with api_server(failing_engine(SystemExit(3)), constraints=False) as server:
        assert httpx2.get(f"{server.url}/health/ready").status_code == 200
        response_to(server, api, request_fields())  # the engine stops here
        for stream in (False, True):
            answer = httpx2.post(f"{server.url}{api.path}", json=request_fields(stream=stream))
            error = answer.json()["error"]
            code = error["code"] if api is OPENAI else error["details"]["error_code"]
            assert (answer.status_code, code) == (status, "engine_down")
            assert int(answer.headers["retry-after"]) >= 1
        ready = httpx2.get(f"{server.url}/health/ready")
        assert (ready.status_code, ready.json()["status"]) == (503, "unready")
        assert int(ready.headers["retry-after"]) >= 1
        assert httpx2.get(f"{server.url}/health/live").status_code == 200
