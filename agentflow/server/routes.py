"""All routes of the HTTP APIs, and the format of errors of each path."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from agentflow.server.anthropic.models import (
    AnthropicModel,
    AnthropicModelList,
    get_anthropic_model,
    list_anthropic_models,
)
from agentflow.server.anthropic.routes import ANTHROPIC
from agentflow.server.anthropic.routes import ROUTES as ANTHROPIC_ROUTES
from agentflow.server.compatible.error_format import OPENAI
from agentflow.server.errors import ApiError
from agentflow.server.http.call import ApiCall, ApiEndpoint, ErrorFormat, read_request_id
from agentflow.server.http.route import ApiRoute
from agentflow.server.ollama.routes import OLLAMA
from agentflow.server.ollama.routes import ROUTES as OLLAMA_ROUTES
from agentflow.server.openai.models import ModelCard, ModelList, get_model, list_models
from agentflow.server.openai.routes import ROUTES as OPENAI_ROUTES
from agentflow.server.programs_api.routes import ROUTES as PROGRAM_ROUTES
from agentflow.server.replicas import ROUTES as REPLICA_ROUTES
from agentflow.server.sglang.routes import ROUTES as SGLANG_ROUTES
from agentflow.server.tenants.keys import hashed_key, key_of_headers
from agentflow.server.tenants.tickets import SessionTicket

_OLLAMA_PATHS = "/api/"


async def create_session_ticket(call: ApiCall) -> None:
    """Creates a ticket with which a page can open one session."""
    hashed = hashed_key(key_of_headers(call.headers) or "")
    await call.reply(await call.service.tenants.tickets.issue(call.tenant, hashed))


def _has_anthropic_version(headers: Headers) -> bool:
    """Whether a client of Anthropic's API sent these headers."""
    return "anthropic-version" in headers


class _ClientEndpoint:
    """The endpoint of a route that two APIs have."""

    def __init__(self, usual: ApiEndpoint, anthropic: ApiEndpoint) -> None:
        self._usual, self._anthropic = usual, anthropic

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = self._anthropic if _has_anthropic_version(Headers(scope=scope)) else self._usual
        await endpoint(scope, receive, send)


ROUTES = (
    ApiRoute("POST", "/v1/session-ticket", create_session_ticket, OPENAI, response=SessionTicket),
    ApiRoute(
        "GET",
        "/v1/models",
        list_models,
        OPENAI,
        response=(ModelList, AnthropicModelList),
        anthropic=list_anthropic_models,
    ),
    ApiRoute(
        "GET",
        "/v1/models/{name:path}",
        get_model,
        OPENAI,
        response=(ModelCard, AnthropicModel),
        anthropic=get_anthropic_model,
    ),
    *OPENAI_ROUTES,
    *ANTHROPIC_ROUTES,
    *OLLAMA_ROUTES,
    *SGLANG_ROUTES,
    *PROGRAM_ROUTES,
    *REPLICA_ROUTES,
)


def api_routes() -> Sequence[BaseRoute]:
    """The routes for starlette."""
    return [Route(route.path, _endpoint(route), methods=[route.method]) for route in ROUTES]


def _endpoint(route: ApiRoute) -> ASGIApp:
    path = route.path.partition("{")[0]
    usual = ApiEndpoint(route.handler, route.error_format, route=path)
    if route.anthropic is None:
        return usual
    return _ClientEndpoint(usual, ApiEndpoint(route.anthropic, ANTHROPIC, route=path))


def find_error_format(path: str, request_headers: Headers) -> ErrorFormat:
    """The format of errors of ``path``, which need not exist."""
    if path.startswith(_OLLAMA_PATHS):
        return OLLAMA
    for route in ROUTES:
        if path == route.path or path.startswith(f"{route.path}/"):
            if route.anthropic is None:
                return route.error_format
            break
    return ANTHROPIC if _has_anthropic_version(request_headers) else OPENAI


def error_response(
    path: str, request_headers: Headers, error: ApiError, headers: Mapping[str, str] | None = None
) -> Response:
    """The response for an error that occurs before a handler has the request, with additional ``headers``."""
    error_format = find_error_format(path, request_headers)
    request_id = read_request_id(request_headers)
    own = {error_format.request_id_header.decode(): request_id}
    return Response(
        error_format.body(error, request_id),
        status_code=error_format.status(error),
        media_type="application/json",
        headers={**(headers or {}), **own},
    )
