"""``GET /openapi.json``: the HTTP APIs as an OpenAPI 3.1 document.

It is derived from the table of routes and from the types of the bodies, so that it matches the server. Tests
send requests that the document allows, and check the answers against it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import cache
from http import HTTPStatus
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from agentflow.server import event_stream
from agentflow.server.compatible.error_format import OPENAI
from agentflow.server.errors import ApiError
from agentflow.server.http.call import ErrorFormat
from agentflow.server.http.route import ApiRoute
from agentflow.server.routes import ROUTES
from agentflow.server.tenants.limit_headers import ANY_LIMITS
from agentflow.version import __version__

JSON = "application/json"
Schema = dict[str, Any]

# Errors of every call: a missing or wrong key; a body that does not arrive, is too large or is compressed;
# too many requests; a fault of the server; a server that is overloaded or shuts down.
_ANY_CALL = (401, 408, 413, 415, 429, 500, 503)
# Errors before the request reaches the API: a page of another site, a method that the path does not support.
_BEFORE_API = (403, 405)  # in OpenAI's format, and in the format of the path
_NAME = {"type": "string"}
# Errors while the headers are read: they are too slow or too large, or there are too many connections.
_IN_HEADERS = (408, 414, 429, 431, 503)
_TEXT = {"text/plain": {"schema": _NAME}}
_EVENTS = event_stream.CONTENT_TYPE.partition(";")[0]
_EVENT = {
    "type": "object",
    "description": 'Each event, if the request has `"stream": true`.',
    "properties": {"event": _NAME, "data": _NAME},
    "required": ["data"],
}
_LIVE = {"type": "object", "properties": {"status": {"const": "live"}}, "required": ["status"]}
_VERSION = {"type": "object", "properties": {"version": _NAME}, "required": ["version"]}
_READY = {
    "type": "object",
    "properties": {
        "status": {"const": "ready"},
        "models": {"type": "array", "items": _NAME},
        "sessions": {"type": "integer", "minimum": 0},
    },
    "required": ["status"],  # the others need a key that may see the metrics
}
_REASON = {"type": "object", "properties": {"reason": _NAME}, "required": ["reason"]}


async def openapi(request: Request) -> Response:
    """Returns the document."""
    return Response(_encoded(), media_type=JSON)


@cache
def _encoded() -> bytes:
    return msgspec.json.encode(openapi_document(ROUTES))


def openapi_document(routes: Sequence[ApiRoute]) -> Schema:
    """The document of these routes, and of the health checks and metrics."""
    kinds: dict[type[Any], None] = {}  # an ordered set
    for route in routes:
        for kind in (route.request, *_responses(route), route.error_format.body_type):
            if kind is not None:
                kinds[kind] = None
    kinds[OPENAI.body_type] = None
    refs, components = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    for component in components.values():
        if component.get("additionalProperties") is False:  # unknown fields that ask for nothing are accepted
            component["additionalProperties"] = {"type": "null"}
    schemas = dict(zip(kinds, refs, strict=True))
    paths: dict[str, dict[str, Schema]] = {}
    for route in routes:
        paths.setdefault(_path(route), {})[route.method.lower()] = _operation(route, schemas)
    return {
        "openapi": "3.1.0",
        "info": {"title": "agentflow", "version": __version__},
        "paths": paths | _operations_paths(schemas),
        "components": {
            "schemas": components,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        # Only a server with API keys requires one.
        "security": [{}, {"bearer": []}, {"key": []}],
    }


def _responses(route: ApiRoute) -> tuple[type[Any], ...]:
    return route.response if isinstance(route.response, tuple) else (route.response,)


def _path(route: ApiRoute) -> str:
    return re.sub(r":path}", "}", route.path)


def _operation(route: ApiRoute, schemas: dict[type[Any], Schema]) -> Schema:
    names = re.findall(r"{(\w+)", route.path)
    operation: Schema = {
        "operationId": re.sub(r"\W+", "_", f"{route.method.lower()}{_path(route)}").strip("_"),
        "summary": (route.handler.__doc__ or "").strip().split("\n")[0],
        "responses": _answers(route, schemas),
    }
    parameters: list[Schema] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in names
    ]
    if route.query is not None:
        _, shapes = msgspec.json.schema_components([route.query])
        fields = shapes[route.query.__name__]["properties"]
        parameters += [{"name": name, "in": "query", "schema": schema} for name, schema in fields.items()]
    if parameters:
        operation["parameters"] = parameters
    if route.request is not None:
        content = {JSON: {"schema": schemas[route.request]}}
        operation["requestBody"] = {"required": True, "content": content}
    return operation


def _answers(route: ApiRoute, schemas: dict[type[Any], Schema]) -> Schema:
    error_format = route.error_format
    kinds = _responses(route)
    shape = schemas[kinds[0]] if len(kinds) == 1 else {"anyOf": [schemas[kind] for kind in kinds]}
    content: Schema = {JSON: {"schema": shape}}
    if route.streams:
        body = schemas[error_format.body_type]
        media_type = error_format.stream_type.partition(";")[0]
        content[media_type] = {"schema": _EVENT if media_type == _EVENTS else _lines(shape, body)}
    takes_fields = route.request is not None or route.method == "POST" or route.query is not None
    own = [400, *_ANY_CALL] if takes_fields else [*_ANY_CALL]
    own += route.statuses
    if route.request is not None or route.query is not None or "{" in route.path:
        own.append(404)
    answers: dict[int, Schema] = {200: _answer(200, content, _headers(error_format))}
    for status in own:
        shown = error_format.status(ApiError(status, "", ""))
        body = {JSON: {"schema": schemas[error_format.body_type]}}
        answers[shown] = _answer(shown, body, _headers(error_format, status))
    for status, one in zip(_BEFORE_API, (OPENAI, error_format), strict=True):
        answers[status] = _answer(status, {JSON: {"schema": schemas[one.body_type]}})
    for status in _IN_HEADERS:
        answers.setdefault(status, _answer(status, {}))["content"] |= _TEXT
    return _in_order(answers)


def _lines(shape: Schema, error: Schema) -> Schema:
    """A stream whose lines are JSON, unless the request has ``"stream": false``."""
    return {"type": "array", "description": "The lines.", "items": {"anyOf": [shape, error]}}


def _headers(error_format: ErrorFormat, status: int = 200) -> Schema:
    has_id = error_format.status(ApiError(status, "", "")) not in _IN_HEADERS
    headers: Schema = {error_format.request_id_header.decode(): {"required": has_id, "schema": _NAME}}
    if error_format.processing_header:
        milliseconds = {"description": "Milliseconds.", "schema": {"type": "integer", "minimum": 0}}
        headers[error_format.processing_header.decode()] = milliseconds
    for name in error_format.limit_headers(ANY_LIMITS):
        headers[name.decode()] = {"description": "If the key has this limit.", "schema": _NAME}
    if status in (429, 503):
        headers["retry-after"] = {"description": "Seconds.", "schema": {"type": "integer", "minimum": 0}}
    if status == 401:
        headers["www-authenticate"] = {"schema": _NAME}
    return headers


def _operations_paths(schemas: dict[type[Any], Schema]) -> dict[str, dict[str, Schema]]:
    """The operations outside of the APIs: health checks, metrics, this document."""
    with_reason = {JSON: {"schema": _REASON}}
    outside = {JSON: {"schema": schemas[OPENAI.body_type]}}
    either = {JSON: {"schema": {"anyOf": [_REASON, schemas[OPENAI.body_type]]}}}

    def get(name: str, summary: str, answers: Iterable[tuple[int, Schema]]) -> dict[str, Schema]:
        found = {405: _answer(405, outside), 403: _answer(403, outside)}
        found |= {status: _answer(status, _TEXT) for status in _IN_HEADERS}
        found |= {status: _answer(status, content) for status, content in answers}
        operation = {"operationId": name, "summary": summary, "responses": _in_order(found)}
        # An operation without 401 needs no key, even on a server with keys.
        return {"get": operation if 401 in found else operation | {"security": []}}

    by_status: tuple[str, list[tuple[int, Schema]]] = (
        "The status of /health/ready, without a body.",
        [(200, {}), (503, _TEXT)],
    )
    return {
        "/health/live": get("live", "Whether the process answers.", [(200, {JSON: {"schema": _LIVE}})]),
        "/health/ready": get(
            "ready",
            "Whether the server accepts requests and all engines answer.",
            [(200, {JSON: {"schema": _READY}}), (503, with_reason | _TEXT)],
        ),
        "/health": get("health", *by_status),
        **{
            path: get(path[1:], *by_status) | {"post": get(f"post_{path[1:]}", *by_status)["get"]}
            for path in ("/health_generate", "/ping")
        },
        "/version": get("version", "The version of the server.", [(200, {JSON: {"schema": _VERSION}})]),
        "/metrics": get(
            "metrics",
            "Metrics in the format of Prometheus.",
            [(200, _TEXT), (401, with_reason), (403, either), (429, with_reason | _TEXT)],
        ),
        "/openapi.json": get("openapi", "This document.", [(200, {JSON: {"schema": {"type": "object"}}})]),
    }


def _answer(status: int, content: Schema, headers: Schema | None = None) -> Schema:
    answer = {"description": HTTPStatus(status).phrase if status in set(HTTPStatus) else "Error"}
    return answer | {"content": content} | ({"headers": headers} if headers else {})


def _in_order(answers: dict[int, Schema]) -> Schema:
    return {str(status): answers[status] for status in sorted(answers)}
