"""A route of an API: the handler of one method of one path, its types, and the format of its errors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from agentflow.server.http.call import ErrorFormat, Handler


@dataclass(frozen=True, slots=True)
class ApiRoute:
    """One method of one path. ``request``: the type of its body, if it has one; ``query``: the type of the
    parameters of its address; ``response``: the type, or types, of the answer with status 200; ``streams``:
    whether ``"stream": true`` gets server-sent events instead. The OpenAPI document is derived from these
    (openapi.py)."""

    method: str
    path: str
    handler: Handler
    error_format: ErrorFormat
    response: type[Any] | tuple[type[Any], ...]
    request: type[msgspec.Struct] | None = None
    query: type[msgspec.Struct] | None = None
    streams: bool = False
