"""Websockets through the gateway, before websocket servers in the test's loop."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from http import HTTPStatus

import anyio
import pytest
from support.server.gateways import Routed, routed
from support.server.http_clients import only_asyncio
from websockets.asyncio.client import ClientConnection, connect
from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.http11 import Request, Response
from websockets.typing import Subprotocol

from agentflow.backends.remote import Remote
from agentflow.protocol.wire import Limits, Welcome, encode
from agentflow.server.gateway import route as gateway_route
from agentflow.server.gateway import target_choice, websocket_proxy
from agentflow.server.gateway.websocket_proxy import welcomed_session

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60)]
anyio_backend = pytest.fixture(only_asyncio)
Handler = Callable[[ServerConnection], Awaitable[None]]
MODELS = b'{"data": [{"id": "m"}]}'


async def echo(socket: ServerConnection) -> None:
    async for message in socket:
        await socket.send(message)


def _answer(status: int, body: bytes = b"") -> Callable[[ServerConnection, Request], Response | None]:
    """Lists the models over HTTP. ``status``: of handshakes; 101: they are accepted."""

    def answer(socket: ServerConnection, request: Request) -> Response | None:
        if request.path == "/v1/models":
            response = socket.respond(HTTPStatus.OK, "")
            response.body = MODELS
            del response.headers["content-length"]
            response.headers["content-length"] = str(len(MODELS))
            return response
        return None if status == 101 else socket.respond(HTTPStatus(status), body.decode())

    return answer


def _named(socket: ServerConnection, request: Request, response: Response) -> Response:
    response.headers["x-agentflow-session"] = "s7"
    return response


@asynccontextmanager
async def before(*targets: tuple[Handler, int]) -> AsyncIterator[tuple[Routed, list[Server]]]:
    """A gateway before websocket servers: their handlers, and the status of handshakes."""
    async with AsyncExitStack() as stack:
        servers = [
            await stack.enter_async_context(
                serve(
                    handler,
                    "127.0.0.1",
                    0,
                    process_request=_answer(status, b"not now"),
                    process_response=_named,
                    select_subprotocol=lambda _, offered: offered[0] if offered else None,
                    max_size=None,
                )
            )
            for handler, status in targets
        ]
        urls = [f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}" for server in servers]
        yield await stack.enter_async_context(routed(urls)), servers


def opened(route: Routed, path: str = "/v1/session", *subprotocols: str) -> connect:
    names = [Subprotocol(name) for name in subprotocols] or None
    return connect(f"ws{route.url.removeprefix('http')}{path}", subprotocols=names, max_size=None)


async def ended(socket: ClientConnection) -> ConnectionClosed:
    with anyio.fail_after(10), pytest.raises(ConnectionClosed) as caught:
        await socket.recv()
    return caught.value


async def test_messages_of_both_kinds_pass_in_both_directions() -> None:
    seen: list[str] = []

    async def handler(socket: ServerConnection) -> None:
        assert socket.request is not None
        seen.extend([socket.request.path, socket.request.headers["authorization"]])
        await echo(socket)

    async with before((handler, 101)) as (route, _):
        socket = opened(route, "/v1/realtime?model=m%20x", "one", "two")
        socket.additional_headers = {"authorization": "Bearer k"}
        async with socket as client:
            assert client.subprotocol == "one"
            for message in ("text é", b"\x00\xff", "", b"", b"x" * 3_000_000):
                await client.send(message)
                assert await client.recv() == message
        assert seen == ["/v1/realtime?model=m%20x", "Bearer k"]


async def test_f37_a_message_has_the_same_limit_in_both_directions(monkeypatch: pytest.MonkeyPatch) -> None:
    most = 100_000  # the real limit takes a second
    assert gateway_route.MAX_MESSAGE_BYTES == websocket_proxy.MAX_MESSAGE_BYTES
    for module in (gateway_route, websocket_proxy):
        monkeypatch.setattr(module, "MAX_MESSAGE_BYTES", most)

    async def handler(socket: ServerConnection) -> None:
        message = await socket.recv()
        await socket.send(message)
        await socket.send(b"y" * (most + 1))

    async with before((handler, 101), (handler, 101)) as (route, _):
        async with opened(route) as client:
            message = b"x" * most
            await client.send(message)
            assert await client.recv() == message
            await ended(client)
        async with opened(route) as client:
            with suppress(ConnectionClosed):
                await client.send(message + b"x")
            closed = await ended(client)
            assert closed.rcvd is not None
            assert closed.rcvd.code == 1009


async def test_close_codes_pass_in_both_directions() -> None:
    codes: list[int | None] = []
    has_closed = anyio.Event()

    async def handler(socket: ServerConnection) -> None:
        message = await anext(aiter(socket), None)
        if message == "close":
            await socket.close(4001, "enough")
        await socket.wait_closed()
        codes.append(socket.close_code)
        has_closed.set()

    async with before((handler, 101)) as (route, _):
        async with opened(route) as client:
            await client.send("close")
            closed = await ended(client)
            assert closed.rcvd is not None
            assert (closed.rcvd.code, closed.rcvd.reason) == (4001, "enough")
        has_closed = anyio.Event()
        async with opened(route) as client:
            await client.send("stay")
            await client.close(4002)
        with anyio.fail_after(10):
            await has_closed.wait()
        assert codes[1] == 4002


async def test_a_lost_client_is_a_lost_client_for_the_server() -> None:
    codes: list[int | None] = []
    has_closed = anyio.Event()

    async def handler(socket: ServerConnection) -> None:
        await socket.send("hello")
        await socket.wait_closed()
        codes.append(socket.close_code)
        has_closed.set()

    async with before((handler, 101)) as (route, _):
        async with opened(route) as client:
            await client.recv()
            client.transport.abort()
            with anyio.fail_after(10):
                await has_closed.wait()
        assert codes == [1006]


async def test_a_lost_server_makes_clients_connect_again() -> None:
    async def handler(socket: ServerConnection) -> None:
        await socket.recv()
        socket.transport.abort()

    async with before((handler, 101)) as (route, _), opened(route) as client:
        await client.send("go")
        closed = await ended(client)
        assert closed.rcvd is not None
        assert closed.rcvd.code == 1013


@pytest.mark.parametrize(("status", "is_passed"), [(503, False), (429, False), (401, True), (404, True)])
async def test_refused_handshakes(status: int, is_passed: bool) -> None:
    async with before((echo, status), (echo, 101)) as (route, _):
        route.gateway.targets[1].num_websockets = 1
        if not is_passed:
            async with opened(route) as client:
                await client.send("x")
                assert await client.recv() == "x"
            return
        with pytest.raises(InvalidStatus) as caught:
            await opened(route)
        assert (caught.value.response.status_code, caught.value.response.body) == (status, b"not now")


async def test_a_session_is_resumed_where_it_is() -> None:
    async with before((echo, 101), (echo, 101)) as (route, _):
        first, second = route.gateway.targets
        for address, subprotocols in [
            ("/v1/session?session=abc", ()),
            ("/v1/session", ("agentflow.v2", "agentflow.session.def")),
        ]:
            second.num_websockets = 9
            async with opened(route, address, *subprotocols):
                assert first.num_websockets == 1
            await route.gateway.until_idle()
            first.num_websockets, second.num_websockets = 9, 0
            async with opened(route, address, *subprotocols):
                assert (first.num_websockets, second.num_websockets) == (10, 0)
            await route.gateway.until_idle()
            first.num_websockets = 0


async def test_a_session_whose_id_the_server_gives() -> None:
    async with before((echo, 101), (echo, 101)) as (route, _):
        first, second = route.gateway.targets
        async with opened(route) as client:
            assert client.response is not None
            assert client.response.headers["x-agentflow-session"] == "s7"
        await route.gateway.until_idle()
        first.num_websockets = 9
        async with opened(route, "/v1/session?session=s7"):
            assert (first.num_websockets, second.num_websockets) == (10, 0)
        await route.gateway.until_idle()


@pytest.mark.parametrize("name", ["s7", "theirs"])
async def test_f37_the_server_of_a_session_is_known_whatever_else_happens(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Many other objects and sessions come while a session is open. ``name``: an id that the server gave, or
    one that the client wrote when it resumed an earlier session."""
    monkeypatch.setattr(target_choice, "MAX_OWNED", 4)
    async with before((echo, 101), (echo, 101)) as (route, _):
        first, second = route.gateway.targets
        placement = route.gateway.placement
        for _ in range(2):
            second.num_websockets = 9
            async with opened(route, f"/v1/session?session={name}"):
                assert first.num_websockets == 1
                for number in range(4):
                    placement.own(f"session-{number}", second)
                    placement.own(f"resp_{number}", second, is_sure=False)
            await route.gateway.until_idle()
            first.num_websockets, second.num_websockets = 9, 0
            async with opened(route, f"/v1/session?session={name}"):
                assert (first.num_websockets, second.num_websockets) == (10, 0)
            await route.gateway.until_idle()
            first.num_websockets = 0


async def test_f37_answers_push_out_no_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target_choice, "MAX_OWNED", 4)
    async with before((echo, 101), (echo, 101)) as (route, _):
        first, second = route.gateway.targets
        async with opened(route):
            assert first.num_websockets == 1
        await route.gateway.until_idle()
        for number in range(4):
            route.gateway.placement.own(f"resp_{number}", second, is_sure=False)
        route.gateway.placement.own("s7", second, is_sure=False)
        first.num_websockets = 9
        async with opened(route, "/v1/session?session=s7"):
            assert (first.num_websockets, second.num_websockets) == (10, 0)
        await route.gateway.until_idle()
        assert len(route.gateway.placement._owners) == 4


WELCOME = Welcome(2, "front-a.aBcD_1-2", "secret", model="m", models={}, limits=Limits(1_000, 1.0), ack=0)


@pytest.mark.parametrize("binary", [True, False])
async def test_a_session_whose_id_is_in_the_first_message(binary: bool) -> None:
    async def handler(socket: ServerConnection) -> None:
        await socket.send(encode(WELCOME, binary=binary))
        await echo(socket)

    async with before((handler, 101), (handler, 101)) as (route, _):
        first, second = route.gateway.targets
        second.num_websockets = 9
        async with opened(route) as client:
            assert await client.recv() == encode(WELCOME, binary=binary)
            await client.send('{"session":"not-the-first"}')
            await client.recv()
        await route.gateway.until_idle()
        first.num_websockets, second.num_websockets = 9, 0
        for name, expected in (("front-a.aBcD_1-2", (10, 0)), ("not-the-first", (9, 1))):
            async with opened(route, f"/v1/session?session={name}"):
                assert (first.num_websockets, second.num_websockets) == expected
            await route.gateway.until_idle()


async def test_a_client_cannot_take_the_session_of_another_from_its_server() -> None:
    async with before((echo, 101), (echo, 101)) as (route, _):
        own, other = route.gateway.targets
        route.gateway.placement.own("theirs", own)
        route.gateway.placement.own("mine", other)
        async with opened(route, "/v1/session?session=mine&session=theirs"):
            assert other.num_websockets == 1
        await route.gateway.until_idle()
        assert route.gateway.placement.owner(["theirs"]) is own
        many = "&".join(f"session={number}-1234567" for number in range(200))
        async with opened(route, f"/v1/session?{many}"):
            pass
        await route.gateway.until_idle()
        assert len(route.gateway.placement._owners) < 10


@pytest.mark.parametrize("message", ["", b"", "{}", b"\xa7session\xff", b"\xa7session", '{"session":3}'])
def test_first_messages_without_an_id(message: str | bytes) -> None:
    assert welcomed_session(message) is None


async def test_f37_a_slow_answer_to_a_handshake_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """The target has accepted the connection, and answers after the time for connecting."""
    monkeypatch.setattr(websocket_proxy, "CONNECT_TIMEOUT_S", 1.0)

    async def slowly(socket: ServerConnection, request: Request) -> Response | None:
        if request.path == "/v1/session":
            with anyio.move_on_after(1.5):
                await anyio.sleep_forever()
        return _answer(101)(socket, request)

    async with serve(echo, "127.0.0.1", 0, process_request=slowly) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with routed([url]) as route, opened(route) as client:
            await client.send("x")
            assert await client.recv() == "x"
            assert route.gateway.placement.targets[0].is_up


async def test_f37_another_server_is_tried_if_one_hangs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert Remote("ws://127.0.0.1:1").open_timeout_s > websocket_proxy.HANDSHAKE_S
    monkeypatch.setattr(websocket_proxy, "HANDSHAKE_S", 0.1)

    is_over = anyio.Event()

    async def hang(socket: ServerConnection, request: Request) -> Response | None:
        if request.path == "/v1/session":
            await is_over.wait()
        return _answer(101)(socket, request)

    async with (
        serve(echo, "127.0.0.1", 0, process_request=hang, open_timeout=None) as hung,
        serve(echo, "127.0.0.1", 0, process_request=_answer(101)) as server,
    ):
        ports = [one.sockets[0].getsockname()[1] for one in (hung, server)]
        async with routed([f"http://127.0.0.1:{port}" for port in ports]) as route:
            with anyio.fail_after(8):
                for _ in range(2):
                    async with opened(route) as client:
                        await client.send("x")
                        assert await client.recv() == "x"
            is_over.set()


async def test_no_server_answers() -> None:
    async with before((echo, 101)) as (route, servers):
        servers[0].close()
        await servers[0].wait_closed()
        with pytest.raises(InvalidStatus) as caught:
            await opened(route)
        assert caught.value.response.status_code == 502
        with pytest.raises(InvalidStatus) as caught:
            await opened(route)
        assert caught.value.response.status_code == 503
