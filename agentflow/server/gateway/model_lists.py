"""The models of all targets in one list: ``/v1/models`` of OpenAI and Anthropic, and Ollama's tags."""

from __future__ import annotations

from typing import Any

import anyio
import httpx2
import msgspec
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from agentflow.protocol.unreadable import UNREADABLE
from agentflow.runtime.task_group import open_task_group
from agentflow.server.errors import ApiError
from agentflow.server.gateway.http_proxy import raw_path, request_headers
from agentflow.server.gateway.target import CHECK_TIMEOUT_S, Target, fetch
from agentflow.server.routes import error_response

LISTS = {"/v1/models": ("data", "id"), "/api/tags": ("models", "name")}
"""The paths, each with the field of its list and the field of a name."""


class ModelLists:
    """Answers requests for a list by joining the lists of all targets, requested with the client's key."""

    def __init__(self, targets: list[Target], transport: httpx2.AsyncBaseTransport, via: str) -> None:
        self._targets = targets
        self._transport = transport
        self._via = via.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        answers: dict[int, tuple[int, bytes]] = {}

        async def ask(target: Target) -> None:
            headers = [
                (name, value)
                for name, value in request_headers(scope, target, self._via)
                if name != b"accept-encoding"
            ]
            url = target.url(raw_path(scope), scope.get("query_string", b""))
            request = httpx2.Request("GET", url, headers=[*headers, (b"accept-encoding", b"identity")])
            try:
                with anyio.fail_after(CHECK_TIMEOUT_S):
                    answers[target.number] = await fetch(self._transport, request)
            except (httpx2.HTTPError, TimeoutError):
                pass

        async with open_task_group() as group:
            for target in self._targets:
                if target.circuit.is_ready:
                    group.start_soon(ask, target)
        in_order = [answers[number] for number in sorted(answers)]
        good = [body for status, body in in_order if status == 200]
        merged = _merged(good, *LISTS[scope["path"]])
        if merged is not None:
            response = Response(merged, media_type="application/json")
        elif in_order:
            status, body = in_order[0]
            response = Response(body, status, media_type="application/json")
        else:
            error = ApiError(503, "no_target", "no server answers now: try again in a moment", None, 1.0)
            response = error_response(scope["path"], Headers(scope=scope), error, error.headers)
        await response(scope, receive, send)


def _merged(bodies: list[bytes], items: str, name: str) -> bytes | None:
    """The first body with the models of all bodies. If several have a model, the first entry is kept."""
    first: dict[str, Any] | None = None
    found: dict[str, Any] = {}
    for body in bodies:
        try:
            decoded = msgspec.json.decode(body, type=dict[str, Any])
            for item in decoded[items]:
                found.setdefault(str(item[name]), item)
        except (*UNREADABLE, KeyError, TypeError):
            continue
        first = first or decoded
    if first is None:
        return None
    names = list(found)
    if "first_id" in first:  # Anthropic's pages
        first |= {"first_id": names[0] if names else None, "last_id": names[-1] if names else None}
    return msgspec.json.encode(first | {items: list(found.values())})
