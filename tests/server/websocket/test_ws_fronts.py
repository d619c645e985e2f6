"""The id of a session in the address of its websocket, by which it is found among several servers."""

from __future__ import annotations

import secrets

import pytest
from support.api_server import ApiServer, api_server
from support.redis_server import RedisServer
from websockets.exceptions import InvalidStatus
from websockets.sync.client import ClientConnection, connect

from agentflow.backends.remote import Remote
from agentflow.protocol.wire import (
    SESSION_PATH,
    VERSION,
    Hello,
    Refused,
    Resume,
    ServerFrame,
    Welcome,
    encode,
    server_frames,
)
from agentflow.server.stores.shared import SharedStore


def opened(server: ApiServer, query: str = "") -> ClientConnection:
    return connect(server.url.replace("http", "ws") + SESSION_PATH + query, compression=None)


def greeted(socket: ClientConnection, resume: Resume | None = None) -> ServerFrame:
    socket.send(encode(Hello(VERSION, resume), binary=False).decode())
    return server_frames().decode(socket.recv(timeout=10))


def test_only_the_server_of_a_session_resumes_it(redis: RedisServer) -> None:
    prefix = f"{secrets.token_hex(8)}:"
    first, second = (SharedStore(redis.url, prefix=prefix, front=name) for name in "ab")
    with (
        api_server(constraints=False, shared=first) as here,
        api_server(constraints=False, shared=second) as there,
    ):
        with opened(here) as socket:
            welcome = greeted(socket)
            assert isinstance(welcome, Welcome)
        assert welcome.session.startswith(f"{first.front}.")
        resume, query = Resume(welcome.session, welcome.secret), f"?session={welcome.session}"
        with pytest.raises(InvalidStatus) as caught, opened(there, query):
            pass
        assert caught.value.response.status_code == 503  # so clients try again
        with opened(here, query) as socket:
            again = greeted(socket, resume)
            assert isinstance(again, Welcome)
            assert again.session == welcome.session
        for other in ("?session=gone-1.x", "?session=x", "?session="):
            with opened(there, other) as socket:
                assert isinstance(greeted(socket, resume), Refused)


@pytest.mark.parametrize("query", ["", "?team=a%20b"])
@pytest.mark.parametrize(
    ("model", "resume", "param"),
    [
        (None, Resume("a-1.x_-Y", "secret"), "session=a-1.x_-Y"),
        ("small", Resume("a-1.x_-Y", "secret"), "session=a-1.x_-Y"),
        ("a/b:c d", None, "model=a%2Fb%3Ac+d"),
        (None, None, ""),
    ],
)
def test_the_client_resumes_at_the_address_of_its_session(
    query: str, model: str | None, resume: Resume | None, param: str
) -> None:
    """And it opens a session at the address of its model."""
    remote = Remote(f"ws://127.0.0.1:1/v1/session{query}", model=model)
    found = remote._address(resume).resource_name
    assert found == "/v1/session" + query + (param and ("&" if query else "?") + param)
