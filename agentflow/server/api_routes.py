"""The routes of the HTTP APIs: which handler answers which path, and in whose dialect errors are written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from starlette.routing import BaseRoute, Route

from agentflow.server.api_call import ApiEndpoint, ErrorDialect, Handler
from agentflow.server.openai_errors import OpenAIErrors
from agentflow.server.openai_models import get_model, list_models

OPENAI = OpenAIErrors()


@dataclass(frozen=True, slots=True)
class ApiRoute:
    """One method on one path."""

    method: str
    path: str
    handler: Handler
    dialect: ErrorDialect


ROUTES = (
    ApiRoute("GET", "/v1/models", list_models, OPENAI),
    ApiRoute("GET", "/v1/models/{name:path}", get_model, OPENAI),
)


def api_routes() -> Sequence[BaseRoute]:
    """As starlette wants them."""
    return [
        Route(route.path, ApiEndpoint(route.handler, route.dialect), methods=[route.method])
        for route in ROUTES
    ]


def dialect_of(path: str) -> ErrorDialect:
    """In whose words to say that there is nothing at ``path``."""
    for route in ROUTES:
        if route.path == path:
            return route.dialect
    return OPENAI
