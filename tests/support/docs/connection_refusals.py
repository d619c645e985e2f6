"""Makes connections fail below HTTP's routes, mostly in the web server itself, per cause in
docs/reference/errors.md."""

from __future__ import annotations

import contextlib
import socket
import threading
from unittest.mock import patch

from support.api_errors import (
    CLOSED,
    TIMEOUT_S,
    Response,
    connection_with,
    port_of,
    request_bytes,
    request_fields,
    response_to,
    response_to_bytes,
)
from support.api_server import ApiServer, api_server
from support.server.apis import MESSAGES, Api

from agentflow.server import serve
from agentflow.server.config.limits import ServerLimits
from agentflow.server.http import acceptor
from agentflow.server.http import protocol as http_protocol
from agentflow.server.serve import listen


def too_many_connections(_: ApiServer, api: Api) -> Response:
    with (
        api_server(server_limits=ServerLimits(max_connections=1), constraints=False) as server,
        connection_with(server, b"GET /health/live HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n") as other,
    ):
        assert other.recv(1)
        return response_to(server, api, request_fields())


def slow_headers(_: ApiServer, api: Api) -> Response:
    with api_server(server_limits=ServerLimits(header_timeout_s=0.05), constraints=False) as server:
        return response_to_bytes(server, api, request_bytes(api, request_fields())[:20])


def no_request(_: ApiServer, api: Api) -> Response:
    with api_server(server_limits=ServerLimits(idle_timeout_s=0.05), constraints=False) as server:
        return response_to_bytes(server, api, b"")


def too_many_of_one_address(_: ApiServer, api: Api) -> Response:
    with (
        patch.object(acceptor, "client_network", lambda host: host),  # also of this machine
        api_server(server_limits=ServerLimits(max_connections_per_address=1), constraints=False) as server,
        connection_with(server, b"GET /health/live HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n") as other,
    ):
        assert other.recv(1)
        return response_to_bytes(server, api, b"")


def large_headers(server: ApiServer, api: Api) -> Response:
    many = response_to_bytes(server, api, request_bytes(api, request_fields(), *["x: 1"] * 300))
    assert many == response_to_bytes(server, api, request_bytes(api, request_fields(), "x: " + "1" * 70_000))
    return many


def a_long_url(server: ApiServer, api: Api) -> Response:
    return response_to_bytes(server, api, b"GET /%b HTTP/1.1\r\n" % (b"a" * 20_000))


def not_read(_: ApiServer, api: Api) -> Response:
    """The client reads none of many answers, on a connection with small buffers."""

    def listen_with_little_room(host: str, port: int) -> socket.socket:
        listener = listen(host, port)
        for side in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            listener.setsockopt(socket.SOL_SOCKET, side, 4096)
        return listener

    is_lost = threading.Event()

    class Watched(http_protocol.TimedHttpProtocol):
        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            is_lost.set()

    requests = request_bytes(api, request_fields(**{"x" * 600: 1})) * 200
    with (
        patch.object(http_protocol, "TimedHttpProtocol", Watched),
        patch.object(http_protocol, "WRITE_WATCH_S", 0.05),
        patch.object(serve, "listen", listen_with_little_room),
        socket.socket() as stream,
        api_server(constraints=False) as server,
    ):
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stream.settimeout(TIMEOUT_S)
        stream.connect(("127.0.0.1", port_of(server)))
        with contextlib.suppress(ConnectionError):  # it is cut off before all is sent
            stream.sendall(requests)
        assert is_lost.wait(TIMEOUT_S)
        answers = b""
        with contextlib.suppress(ConnectionError):
            while some := stream.recv(100_000):
                answers += some
        assert answers.count(b"HTTP/1.1 400") < 200
        return CLOSED


def a_websocket_with_a_body(server: ApiServer, api: Api) -> Response | None:
    if api is MESSAGES:
        return None
    head = "GET /v1/session HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    return response_to_bytes(server, api, f"{head}Content-Length: 9\r\n\r\n".encode())


def no_http(server: ApiServer, api: Api) -> Response:
    return response_to_bytes(server, api, b"HELLO\r\n\r\n")
