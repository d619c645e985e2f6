"""Makes sessions fail, at the handshake or later, per cause in docs/reference/errors.md."""

from __future__ import annotations

import base64
import contextlib
import os
from collections.abc import Callable
from typing import Any
from unittest import mock

from support.api_errors import connection_with
from support.api_server import ApiServer, api_server
from support.docs.http_refusals import Opened, another
from support.faulty_servers import KEY, changed, of_any_address, tenants
from support.session_errors import ASK, HELLO, NO_CODE, OPEN, address, gen, refused_handshake, text
from support.session_errors import session as session_on

from agentflow.engine.generator.generator import EngineGenerator
from agentflow.runtime.interpreter import interpreter
from agentflow.runtime.interpreter import observation as stats_answers
from agentflow.server.config.limits import ServerLimits
from agentflow.server.tenants.keys import hashed_key

Ends = Callable[[ApiServer], tuple[str, str]]


# Before the session: the status of the handshake, and its headers


def no_key(_: ApiServer) -> tuple[str, str]:
    with api_server(tenants=tenants(), constraints=False) as server:
        wrong = {"Authorization": "Bearer af-other"}
        assert refused_handshake(address(server), wrong) == refused_handshake(address(server))
        ticket = {"Sec-WebSocket-Protocol": "agentflow.v2, agentflow.ticket.wrong"}
        assert refused_handshake(address(server), ticket) == refused_handshake(address(server))
        return refused_handshake(address(server))


def many_wrong_keys(_: ApiServer) -> tuple[str, str]:
    with of_any_address(), api_server(tenants=tenants(), constraints=False) as server:
        refused_handshake(address(server), {"Authorization": "Bearer af-other"})
        return refused_handshake(address(server), {"Authorization": f"Bearer {KEY}"})


def another_host(_: ApiServer) -> tuple[str, str]:
    with api_server(hosts=("here.example",), constraints=False) as server:
        return refused_handshake(address(server))


def an_ending_server(server: ApiServer) -> tuple[str, str]:
    with changed(server, server.service, "is_draining", True):
        ending = refused_handshake(address(server))
    with changed(server, server._server.app.state, "service", None):
        assert refused_handshake(address(server)) == ending
    return ending


def large_headers(server: ApiServer) -> tuple[str, str]:
    many = refused_handshake(address(server), {f"x-{number}": "1" for number in range(130)}, is_json=False)
    assert many == refused_handshake(address(server), {"x": "1" * 9_000}, is_json=False)
    return many


def same(*ends: Ends) -> Ends:
    """Several causes of the same end."""

    def end(server: ApiServer) -> tuple[str, str]:
        [found] = {one(server) for one in ends}
        return found

    return end


HANDSHAKES: dict[str, Ends] = {
    "wrong_key": no_key,
    "too_many_wrong_keys": many_wrong_keys,
    "forbidden_origin": lambda server: refused_handshake(
        address(server), {"Origin": "http://elsewhere.example"}
    ),
    "unknown_host": another_host,
    "unknown_path": same(
        lambda server: refused_handshake(address(server, "/v1/models")),
        lambda server: refused_handshake(address(server, "/v1/elsewhere")),
    ),
    "large_headers": large_headers,
    "not_ready": an_ending_server,
}


# In the session: the close code, and the error that ends the session


def sending(*frames: Any, greets: bool = True, on: Opened | None = None) -> Ends:
    """Frames (bytes: unchanged, in a text message) of which the last one is refused. ``on``: opens another
    server."""

    def end(server: ApiServer) -> tuple[str, str]:
        with (
            contextlib.nullcontext(server) if on is None else on() as asked,
            session_on(asked, greets=greets) as session,
        ):
            for frame in frames:
                if isinstance(frame, bytes):
                    session.socket.send(frame, text=True)
                else:
                    session.send(frame)
            return session.end()

    return end


def ops(*ops: dict[str, Any], first: int = 1) -> Ends:
    return sending({"frame": "ops", "first": first, "ops": ops})


def limited(**limits: Any) -> Opened:
    """Opens a server with these limits."""
    return another(server_limits=ServerLimits(**limits))


def mixed_frames(server: ApiServer) -> tuple[str, str]:
    with session_on(server) as session:
        session.socket.send(b"\x80", text=False)
        return session.end()


def second(*, key: str | None = None, greets: bool = True, **limits: Any) -> Ends:
    """A second session is too many, of any client or of this key. ``greets``: so does the first one; a
    connection has its place before it says anything."""

    def end(_: ApiServer) -> tuple[str, str]:
        known = None if key is None else tenants()
        opened = another(tenants=known, server_limits=ServerLimits(**limits))
        with (
            opened() as server,
            session_on(server, key=key, greets=greets),
            session_on(server, key=key, greets=False) as refused,
        ):
            refused.send(HELLO)
            return refused.end()

    return end


def patched(module: Any, name: str, value: int, end: Ends) -> Ends:
    def patched_end(server: ApiServer) -> tuple[str, str]:
        with mock.patch.object(module, name, value):
            return end(server)

    return patched_end


def an_unknown_session(server: ApiServer) -> tuple[str, str]:
    unknown = resuming(server, {"session": "none", "secret": "none"})
    with session_on(server) as session:
        assert resuming(server, {**session.to_resume, "secret": "wrong"}) == unknown
    with api_server(tenants=tenants(*_BOB), constraints=False) as other, session_on(other, key=KEY) as anns:
        assert resuming(other, anns.to_resume, key="af-bob") == unknown
    return unknown


_BOB = ("[tenants.bob]", f'keys = ["{hashed_key("af-bob")}"]')


def resuming(server: ApiServer, resume: dict[str, Any], *, key: str | None = None) -> tuple[str, str]:
    with session_on(server, key=key, greets=False) as session:
        session.send({**HELLO, "resume": resume})
        return session.end()


def an_unknown_model(server: ApiServer) -> tuple[str, str]:
    unknown = sending({**HELLO, "model": "nowhere"}, greets=False)(server)
    with api_server(tenants=tenants('models = ["another"]'), constraints=False) as other:
        for model in ("fake", None):
            with session_on(other, key=KEY, greets=False) as session:
                session.send({**HELLO, "model": model})
                assert session.end() == unknown
    return unknown


def a_revoked_key(_: ApiServer) -> tuple[str, str]:
    known = tenants()
    with api_server(tenants=known, constraints=False) as server, session_on(server, key=KEY) as session:
        known._known.by_hash.clear()
        known._known.by_name.clear()
        server.call(server.service.sessions.end_revoked)
        return session.end()


def taken_over(server: ApiServer) -> tuple[str, str]:
    with session_on(server) as first, session_on(server, greets=False) as second:
        second.hello(resume=first.to_resume)
        return first.end()


def the_servers_end(_: ApiServer) -> tuple[str, str]:
    with contextlib.ExitStack() as client:
        with api_server(constraints=False) as server:
            session = client.enter_context(session_on(server))
        return session.end()


def a_fault_of_the_server(server: ApiServer) -> tuple[str, str]:
    with mock.patch.object(EngineGenerator, "open", side_effect=ZeroDivisionError):
        return ops(OPEN)(server)


def no_answer_to_a_ping(_: ApiServer) -> tuple[str, str]:
    key = base64.b64encode(os.urandom(16)).decode()
    head = (
        "GET /v1/session HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        f"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {key}\r\n\r\n"
    )
    with limited(ping_interval_s=0.05)() as server, connection_with(server, head.encode()) as stream:
        reader = stream.makefile("rb")
        while reader.readline() != b"\r\n":
            pass
        while True:
            opcode, length = reader.read(2)  # the frames of a server are short here, and not masked
            body = reader.read(length)
            if opcode == 0x88:
                return str(int.from_bytes(body[:2], "big")), NO_CODE


LONG = {"frame": "ops", "first": 1, "ops": [], "filler": "x" * 5000}
VERY_LONG = {**LONG, "filler": "x" * 9000}
NO_LIMIT = {"op": "limit", "output_tokens": -1}
PROVIDED = {"op": "provide", "var": 2, "text": "x"}

SESSION_ENDS: dict[str, Ends] = {
    "no_hello": sending(greets=False, on=limited(hello_timeout_s=0.05)),
    "frame_before_hello": same(
        sending({"frame": "bye"}, greets=False),
        sending({"frame": "ops", "first": 1, "ops": []}, greets=False),
    ),
    "wrong_version": sending({**HELLO, "version": 99}, greets=False),
    "unreadable_frame": sending(b"[]"),
    "unexpected_frame": sending(HELLO),
    "mixed_messages": mixed_frames,
    "not_utf8": sending(b"\xff"),
    "frame_too_large": sending(LONG, on=limited(frame_bytes=4096)),
    "frame_far_too_large": sending(VERY_LONG, on=limited(frame_bytes=4096)),
    "op_gap": ops(OPEN, first=2),
    "unknown_state": ops(text("x", state=7)),
    "no_state": ops({"op": "text", "state": "1", "parts": ["x"]}),
    "large_state_number": ops({"op": "open", "state": 2**63}),
    "invalid_session_limit": ops({**NO_LIMIT, "state": 0}),
    "unexpected_provide": ops(*ASK, gen(), PROVIDED),
    "too_many_sessions": second(max_sessions=1),
    "too_many_sessions_of_tenant": second(key=KEY, max_sessions=2),
    "too_many_connections": second(max_connections=1),
    "too_many_connections_of_tenant": second(key=KEY, greets=False, max_connections=2),
    "too_many_rejected_ops": patched(
        interpreter, "REJECTED_BYTES", 1, ops({**OPEN, "cache_salt": "x" * 257})
    ),
    "too_many_getstats": patched(
        stats_answers, "MAX_TICKETS", 1, ops(*[{"op": "getstats", "ticket": 1}] * 2)
    ),
    "too_many_peeks": patched(
        stats_answers, "MAX_PEEKS", 1, ops(*[{"op": "peek", "ticket": 1, "node": 1}] * 2)
    ),
    "session_gone": an_unknown_session,
    "unknown_model": an_unknown_model,
    "revoked_key": a_revoked_key,
    "taken_over": taken_over,
    "shutdown": the_servers_end,
    "no_pong": no_answer_to_a_ping,
    "internal_error": a_fault_of_the_server,
}
