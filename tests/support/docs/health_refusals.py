"""Makes the health checks and the metrics fail, by the causes in docs/reference/errors.md."""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Callable

from support.api_errors import TIMEOUT_S, port_of, request_fields, response_to
from support.api_server import ApiServer, api_server
from support.faulty_servers import BEARER, changed, failing_engine, of_any_address, tenants
from support.server.apis import CHAT
from support.session_errors import session

from agentflow.server.config.limits import ServerLimits


def status_of(server: ApiServer, path: str, headers: dict[str, str] | None = None) -> tuple[str, str]:
    """The status, and the headers that instruct the client."""
    connection = http.client.HTTPConnection("127.0.0.1", port_of(server), timeout=TIMEOUT_S)
    with contextlib.closing(connection):
        connection.request("GET", path, headers=headers or {})
        answer = connection.getresponse()
        assert json.loads(answer.read())["reason"]
        telling = [f"`{name}`" for name in ("Retry-After", "WWW-Authenticate") if name in answer.headers]
        return str(answer.status), ", ".join(telling)


def ready(server: ApiServer) -> tuple[str, str]:
    return status_of(server, "/health/ready")


def an_ending_server(server: ApiServer) -> tuple[str, str]:
    with changed(server, server.service, "is_draining", True):
        ending = ready(server)
    with changed(server, server._server.app.state, "service", None):
        assert ready(server) == ending
    return ending


def a_dead_engine(_: ApiServer) -> tuple[str, str]:
    with api_server(failing_engine(SystemExit(3)), constraints=False) as server:
        response_to(server, CHAT, request_fields())
        return ready(server)


def many_sessions(_: ApiServer) -> tuple[str, str]:
    limits = ServerLimits(max_sessions=1)
    with api_server(server_limits=limits, constraints=False) as server, session(server):
        return ready(server)


def metrics(*settings: str, headers: dict[str, str] | None = None) -> tuple[str, str]:
    with api_server(tenants=tenants(*settings), constraints=False) as server:
        return status_of(server, "/metrics", headers)


def many_wrong_keys(_: ApiServer) -> tuple[str, str]:
    with of_any_address(), api_server(tenants=tenants(), constraints=False) as server:
        status_of(server, "/metrics", {"x-api-key": "af-other"})
        return status_of(server, "/metrics", BEARER)


REFUSED: dict[str, Callable[[ApiServer], tuple[str, str]]] = {
    "ready_not_ready": an_ending_server,
    "ready_engine_down": a_dead_engine,
    "ready_sessions_full": many_sessions,
    "metrics_wrong_key": lambda _: metrics(),
    "metrics_too_many_wrong_keys": many_wrong_keys,
    "metrics_forbidden": lambda _: metrics(headers=BEARER),
}
