"""A route of an API: the handler of one method of one path, its types, and the format of its errors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from agentflow.server.http.call import ErrorFormat, Handler


@dataclass(frozen=True, slots=True)
class ApiRoute:
    """One method of one path. The OpenAPI document is made from all of them (openapi.py)."""

    method: str
    path: str
    handler: Handler
    error_format: ErrorFormat
    response: type[Any] | tuple[type[Any], ...]  # the type, or types, of the answer with status 200
    request: type[msgspec.Struct] | None = None  # the type of the body
    query: type[msgspec.Struct] | None = None  # the type of the query parameters
    statuses: tuple[int, ...] = ()  # error statuses that not every route has
    anthropic: Handler | None = None  # the handler for clients of Anthropic's API, which has this path, too
    streams: bool = False  # the answer can be a stream, in the format's ``stream_type``
