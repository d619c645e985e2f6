"""The routes of the HTTP APIs: which handler answers which path, and in whose dialect errors are written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from starlette.routing import BaseRoute, Route

from agentflow.server.api_call import ApiEndpoint, ErrorDialect, Handler
from agentflow.server.openai_errors import OpenAIErrors
from agentflow.server.openai_models import ModelCard, ModelList, get_model, list_models

OPENAI = OpenAIErrors()


@dataclass(frozen=True, slots=True)
class ApiRoute:
    """One method on one path. ``request``: what its body is decoded as (None: it has none); ``response``:
    the answer with status 200; ``streams``: with ``"stream": true`` server-sent events come instead. The
    OpenAPI document is made of these (openapi.py)."""

    method: str
    path: str
    handler: Handler
    dialect: ErrorDialect
    response: type[msgspec.Struct]
    request: type[msgspec.Struct] | None = None
    streams: bool = False


ROUTES = (
    ApiRoute("GET", "/v1/models", list_models, OPENAI, response=ModelList),
    ApiRoute("GET", "/v1/models/{name:path}", get_model, OPENAI, response=ModelCard),
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
