"""The OpenAPI document is made of the routes and types that the server has."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import httpx2
import msgspec
from support.api_server import api_server

from agentflow.protocol.sampling import MAX_STOPS
from agentflow.server.config.limits import ServerLimits
from agentflow.server.errors import ApiError
from agentflow.server.http.call import ApiCall
from agentflow.server.http.route import ApiRoute
from agentflow.server.openapi import openapi_document
from agentflow.server.routes import ROUTES
from agentflow.server.tenants.rate_limit import LimitState


class Question(msgspec.Struct):
    """A request."""

    text: str


class Reply(msgspec.Struct):
    """An answer."""

    text: str


class Fault(msgspec.Struct):
    """An error."""

    reason: str


class OtherErrors:
    """Errors as another API writes them, with another status of an overloaded server."""

    request_id_header = b"request-id"
    processing_header = b""
    stream_type = "text/event-stream; charset=utf-8"
    body_type = Fault

    def status(self, refusal: ApiError) -> int:
        return 529 if refusal.status == 503 else refusal.status

    def body(self, refusal: ApiError, request_id: str) -> bytes:
        return msgspec.json.encode(Fault(refusal.message))

    def limit_headers(self, limits: LimitState) -> dict[bytes, bytes]:
        return {}

    def in_stream(self, body: bytes) -> bytes:
        return body


async def ask(call: ApiCall) -> None:
    """Answers a question.

    At length.
    """


OTHER = ApiRoute("POST", "/v2/ask", ask, OtherErrors(), response=Reply, request=Question, streams=True)


def references(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        if "$ref" in node:
            yield node["$ref"]
        for value in node.values():
            yield from references(value)
    elif isinstance(node, list):
        for value in node:
            yield from references(value)


def test_each_route_is_there_and_all_that_it_refers_to() -> None:
    document = openapi_document(ROUTES)
    reported = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    served = {(route.method, re.sub(r":\w+}", "}", route.path)) for route in ROUTES}
    checks = ("/health", "/health/live", "/health/ready", "/health_generate", "/ping")
    probes = (*checks, "/metrics", "/openapi.json", "/version")
    extra = {("GET", path) for path in probes} | {("POST", "/health_generate"), ("POST", "/ping")}
    assert reported == served | extra
    names = [operation["operationId"] for path in document["paths"].values() for operation in path.values()]
    assert len(set(names)) == len(names)
    open_to_all = {
        path for path, methods in document["paths"].items() if "security" in methods.get("get", {})
    }
    assert open_to_all == set(probes) - {"/metrics"}
    schemas = document["components"]["schemas"]
    found = set(references(document))
    assert found == {f"#/components/schemas/{name}" for name in schemas}


def test_bounds_are_those_that_requests_are_held_to() -> None:
    fields = openapi_document(ROUTES)["components"]["schemas"]["ChatRequest"]
    assert fields["additionalProperties"] == {"type": "null"}
    assert fields["required"] == ["model", "messages"]
    stop = fields["properties"]["stop"]["anyOf"]
    assert [one.get("maxItems") for one in stop] == [None, MAX_STOPS, None]
    assert fields["properties"]["audio"] == {
        "type": "null",
        "description": "Not supported.",
        "default": None,
    }


def test_a_route_has_its_own_errors() -> None:
    document = openapi_document([*ROUTES, OTHER])
    operation = document["paths"]["/v2/ask"]["post"]
    assert operation["summary"] == "Answers a question."
    answers = operation["responses"]
    assert list(answers) == sorted(answers)
    assert {"200", "400", "401", "404", "408", "413", "415", "429", "500", "529"} <= set(answers)
    # Errors before the request is read are the same in all APIs.
    for status in ("414", "431", "503"):
        assert set(answers.pop(status)["content"]) == {"text/plain"}
    for status in ("408", "429"):
        assert answers[status]["content"].pop("text/plain")
        assert not answers[status]["headers"]["request-id"]["required"]
    assert set(answers["200"]["content"]) == {"application/json", "text/event-stream"}
    own = {"$ref": "#/components/schemas/Fault"}
    # Middleware before the API answers in the format of OpenAI's.
    reported = {status: answer["content"]["application/json"]["schema"] for status, answer in answers.items()}
    assert {status for status, schema in reported.items() if schema == own} == set(answers) - {"200", "403"}
    assert all("request-id" in answers[status]["headers"] for status in ("200", "400", "529"))


def test_answers_of_the_web_server_are_listed_on_each_path() -> None:
    document = openapi_document(ROUTES)
    limits = ServerLimits(max_connections=1, idle_timeout_s=60.0)
    with (
        api_server(server_limits=limits, constraints=False) as server,
        httpx2.Client(base_url=server.url) as other,
    ):
        assert other.get("/health/live").status_code == 200  # and keeps its connection
        for path, methods in document["paths"].items():
            for method, operation in methods.items():
                answer = httpx2.request(method, server.url + path)
                assert answer.status_code == 503
                reported = operation["responses"]["503"]
                assert answer.headers["content-type"].partition(";")[0] in reported["content"], path
                needed = {name for name, one in reported.get("headers", {}).items() if one.get("required")}
                assert needed <= set(answer.headers)


def test_the_document_is_served() -> None:
    with api_server(constraints=False) as server:
        answer = httpx2.get(f"{server.url}/openapi.json")
    assert answer.headers["content-type"] == "application/json"
    assert answer.json() == msgspec.json.decode(msgspec.json.encode(openapi_document(ROUTES)))
