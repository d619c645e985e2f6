"""The remote backend against servers that break the protocol, and over TLS: real websockets whose other
end misbehaves as a test asks."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio
import msgspec
import pytest
from anyio.abc import ByteStream
from support.session_peer import Listener, gen, opened
from websockets.client import ClientProtocol
from websockets.exceptions import ConnectionClosed
from websockets.protocol import State
from websockets.server import ServerProtocol
from websockets.sync.server import ServerConnection, serve
from websockets.uri import parse_uri

from agentflow.backends.remote import Remote, RemoteConnection
from agentflow.backends.websocket import WebSocket
from agentflow.errors import (
    AgentflowError,
    FrameTooLarge,
    ProtocolError,
    RateLimited,
    ServerLost,
    ServerUnreachable,
)
from agentflow.protocol import ops
from agentflow.protocol.events import Capabilities, Delta, ErrorInfo, Stats, StatsReply, Usage, Value
from agentflow.protocol.wire import (
    VERSION,
    Bye,
    Events,
    Hello,
    Limits,
    Refused,
    Resume,
    ServerFrame,
    UnreadOps,
    Welcome,
    client_frames,
    encode,
    op_reader,
)

pytestmark = [pytest.mark.anyio, pytest.mark.on_trio]

CERTIFICATE = Path(__file__).parents[1] / "support" / "localhost_for_tests.pem"
MODELS = {"canned": Capabilities("canned")}
WELCOME = Welcome(VERSION, "session", "secret", "canned", MODELS, Limits(4096, 60.0))

Handler = Callable[[ServerConnection], None]


@contextmanager
def canned_server(handler: Handler, ssl_context: ssl.SSLContext | None = None) -> Iterator[str]:
    """A websocket server in a thread; ``handler`` has each connection. Gives its address, and raises at
    the end the exception of a handler."""
    faults: list[BaseException] = []

    def handle(connection: ServerConnection) -> None:
        try:
            handler(connection)
        except ConnectionClosed:
            pass  # the client has hung up
        except BaseException as fault:
            faults.append(fault)

    with serve(handle, "127.0.0.1", 0, ssl=ssl_context, compression=None) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"127.0.0.1:{server.socket.getsockname()[1]}"
        finally:
            server.shutdown()
            thread.join()
    if faults:
        raise faults[0]


def send(connection: ServerConnection, *frames: ServerFrame) -> None:
    """Sends frames."""
    for frame in frames:
        connection.send(encode(frame, binary=True))


def welcome(connection: ServerConnection, ack: int = 0) -> Hello:
    """Receives a hello and answers it."""
    data = connection.recv()
    assert isinstance(data, bytes)
    hello = client_frames().decode(data)
    assert isinstance(hello, Hello)
    send(connection, msgspec.structs.replace(WELCOME, ack=ack))
    return hello


# In place of a welcome


def _other_version(connection: ServerConnection) -> None:
    connection.recv()
    send(connection, Welcome(VERSION + 1, "a", "b", "canned", MODELS, Limits(4096, 1.0)))


def _no_model(connection: ServerConnection) -> None:
    connection.recv()
    send(connection, msgspec.structs.replace(WELCOME, model="unknown"))


def _no_welcome(connection: ServerConnection) -> None:
    connection.recv()
    send(connection, Events(0))


def _garbage(connection: ServerConnection) -> None:
    connection.recv()
    connection.send(b"\xc1garbage")


def _refusal(connection: ServerConnection) -> None:
    connection.recv()
    send(connection, Refused(ErrorInfo("engine_failed", "out of order", ErrorInfo("run_failed", "why"))))


def _close(connection: ServerConnection) -> None:
    connection.recv()
    connection.close(1011, "no reason")


@pytest.mark.parametrize(
    ("handler", "code", "message"),
    [
        (_other_version, "protocol_error", f"uses version {VERSION + 1} .* version {VERSION}:"),
        (_no_model, "protocol_error", "does not describe its model 'unknown'"),
        (_no_welcome, "protocol_error", "expected a welcome frame .* a events frame"),
        (_garbage, "protocol_error", "a frame cannot be read"),
        (_refusal, "engine_failed", "out of order"),
        (
            _close,
            "server_unreachable",
            "closed the connection before it answered: closed with code 1011 no reason",
        ),
    ],
)
async def test_a_wrong_answer_to_hello_is_one_clear_error(handler: Handler, code: str, message: str) -> None:
    with canned_server(handler) as address:
        with pytest.raises(AgentflowError, match=message) as caught:
            async with opened(Remote(f"ws://{address}")):
                pytest.fail("connected")
        assert caught.value.code == code


# Later


async def _lost_with(handler: Handler) -> Exception:
    """The error of a lost session that opened a state and a variable 2."""
    with canned_server(handler) as address:
        async with opened(Remote(f"ws://{address}", reconnect=False)) as (connection, listener):
            connection.send([ops.Open(1), gen(1, 2)])
            return await listener.wait_until_lost()


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (Events(2, (Delta(2, 5, "late"),)), "variable 2 at character 5, but only 0 characters came before"),
        (Events(9), "acknowledged op 9, but only 2 were sent"),
        (WELCOME, "expected an events frame .* a welcome frame"),
    ],
)
async def test_a_frame_that_makes_no_sense_loses_the_session(frame: ServerFrame, message: str) -> None:
    def handler(connection: ServerConnection) -> None:
        welcome(connection)
        connection.recv()
        send(connection, frame)
        connection.recv()

    error = await _lost_with(handler)
    assert isinstance(error, ProtocolError)
    assert error.args
    with pytest.raises(ProtocolError, match=message):
        raise error


async def test_garbage_loses_the_session() -> None:
    def handler(connection: ServerConnection) -> None:
        welcome(connection)
        connection.recv()
        connection.send("no msgpack")
        connection.recv()

    with pytest.raises(ProtocolError, match="cannot be read"):
        raise await _lost_with(handler)


@pytest.mark.parametrize(
    ("code", "kind", "message"),
    [
        (1000, ServerLost, "the server ended the session"),
        (1002, ServerLost, "could not decode a frame"),
        (1009, FrameTooLarge, "accepts only smaller frames"),
        (1012, ServerLost, "was shut down"),
        (4001, ServerLost, "another connection has taken the session over"),
    ],
)
async def test_a_close_code_that_is_final_is_not_answered_by_resuming(
    code: int, kind: type[AgentflowError], message: str
) -> None:
    hellos: list[Hello] = []

    def handler(connection: ServerConnection) -> None:
        hellos.append(welcome(connection))
        connection.recv()
        connection.close(code)

    with pytest.raises(kind, match=message):
        raise await _lost_with(handler)
    assert len(hellos) == 1


async def test_a_refusal_before_a_close_is_reported() -> None:
    def handler(connection: ServerConnection) -> None:
        welcome(connection)
        connection.recv()
        send(connection, Refused(ErrorInfo("overloaded", "full")))
        connection.close(1013)

    error = await _lost_with(handler)
    assert isinstance(error, AgentflowError)
    assert (error.code, str(error)) == ("overloaded", "full")


async def test_a_refusal_has_its_retry_after() -> None:
    def handler(connection: ServerConnection) -> None:
        connection.recv()
        send(connection, Refused(ErrorInfo("rate_limited", "slow down", retry_after_s=2.5)))

    with canned_server(handler) as address, pytest.raises(RateLimited, match="slow down") as caught:
        async with opened(Remote(f"ws://{address}")):
            pytest.fail("a session was opened")
    assert caught.value.retry_after_s == 2.5


class _BrokenWhenSending(ByteStream):
    """A connection that cannot be written to, while earlier data can still be read."""

    def __init__(self, came_before: bytes) -> None:
        self._came_before = came_before
        self._has_failed = anyio.Event()

    async def send(self, item: bytes) -> None:
        self._has_failed.set()
        raise anyio.BrokenResourceError

    async def receive(self, max_bytes: int = 65536) -> bytes:
        await self._has_failed.wait()
        await anyio.lowlevel.checkpoint()
        data, self._came_before = self._came_before, b""
        if not data:
            raise anyio.EndOfStream
        return data

    async def send_eof(self) -> None:
        raise anyio.BrokenResourceError

    async def aclose(self) -> None:
        await anyio.lowlevel.checkpoint()


async def test_a_refusal_is_reported_after_sending_has_failed() -> None:
    server_side = ServerProtocol(state=State.OPEN)
    server_side.send_binary(encode(Refused(ErrorInfo("overloaded", "full")), binary=True))
    stream = _BrokenWhenSending(b"".join(server_side.data_to_send()))
    client_side = ClientProtocol(parse_uri("ws://host/"), state=State.OPEN)
    websocket = WebSocket(stream, client_side, binary=True, keepalive_s=60)

    async def reopen(resume: Resume | None) -> tuple[WebSocket, Welcome]:
        raise ServerUnreachable("resumed before the refusal was received")

    listener = Listener()
    connection = RemoteConnection("url", reopen, websocket, WELCOME, listener.deliver, listener.lost)
    connection.send([ops.Open(1)])
    await connection.run()
    assert str(await listener.wait_until_lost()) == "full"


async def test_the_cursors_of_a_broken_connection_are_exact_and_repeats_are_trimmed() -> None:
    hellos: list[Hello] = []

    def handler(connection: ServerConnection) -> None:
        hellos.append(welcome(connection))
        if len(hellos) == 1:
            connection.recv()
            send(
                connection,
                Events(1, (Delta(2, 0, "abc"), Delta(3, 0, "x"), Value(3, 1, "y", "eos", Usage()))),
            )
            connection.close(1011)
        else:
            connection.recv()
            send(connection, Events(3, (Delta(2, 1, "bc"), Delta(2, 1, "bcd"), Delta(3, 0, "xy"))))
            send(connection, Events(3, (Value(2, 0, "abcdef", "eos", Usage()),)))
            connection.recv()

    with canned_server(handler) as address:
        async with opened(Remote(f"ws://{address}")) as (connection, listener):
            connection.send([ops.Open(1), gen(1, 2), gen(1, 3)])
            assert await listener.text(2) == "abcdef"
            assert listener.texts == {2: "abcdef", 3: "xy"}
    resume = hellos[1].resume
    assert resume is not None
    assert (resume.session, resume.secret) == ("session", "secret")
    assert (resume.variables, resume.states) == ({2: 3}, {1: 0})


async def test_a_lost_reply_is_requested_again() -> None:
    hellos: list[Hello] = []
    frames: list[object] = []

    def handler(connection: ServerConnection) -> None:
        hellos.append(welcome(connection, ack=len(hellos)))
        data = connection.recv()
        assert isinstance(data, bytes)
        frame = client_frames().decode(data)
        assert isinstance(frame, UnreadOps)
        frames.append((frame.first, [op_reader(binary=True)(op) for op in frame.ops]))
        if len(hellos) == 1:
            connection.close(1011)
        else:
            send(connection, Events(2, (StatsReply(5, Stats("canned")), StatsReply(5, Stats("canned")))))
            connection.recv()

    with canned_server(handler) as address:
        async with opened(Remote(f"ws://{address}")) as (connection, listener):
            connection.send([ops.GetStats(5)])
            await listener.wait_for(lambda received: 5 in received.stats)
    assert frames == [(1, [ops.GetStats(5)]), (2, [ops.GetStats(5)])]


async def test_messages_in_fragments_and_pings_between_are_understood() -> None:
    def handler(connection: ServerConnection) -> None:
        welcome(connection)
        connection.recv()
        frame = encode(Events(2, (Delta(2, 0, "whole"),)), binary=True)
        connection.send([frame[:5], frame[5:6], frame[6:]])
        assert connection.ping("are you there").wait(60)
        send(connection, Events(2, (Value(2, 5, "", "eos", Usage()),)))
        connection.recv()

    with canned_server(handler) as address:
        async with opened(Remote(f"ws://{address}")) as (connection, listener):
            connection.send([ops.Open(1), gen(1, 2)])
            assert await listener.text(2) == "whole"


async def test_the_key_is_sent_in_the_header_and_the_session_ends_with_bye() -> None:
    received: list[object] = []
    is_done = threading.Event()

    def handler(connection: ServerConnection) -> None:
        assert connection.request is not None
        received.append(connection.request.headers["Authorization"])
        welcome(connection)
        data = connection.recv()
        assert isinstance(data, bytes)
        received.append(client_frames().decode(data))
        with pytest.raises(ConnectionClosed) as caught:
            connection.recv()
        assert caught.value.rcvd is not None
        received.append(caught.value.rcvd.code)
        is_done.set()

    with canned_server(handler) as address:
        async with opened(Remote(f"ws://{address}", api_key="my key")):
            pass
        assert is_done.wait(10)
    assert received == ["Bearer my key", Bye(), 1000]


async def test_a_session_over_tls() -> None:
    server_side = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_side.load_cert_chain(CERTIFICATE)

    def handler(connection: ServerConnection) -> None:
        welcome(connection)
        connection.recv()
        send(connection, Events(2, (Value(2, 0, "private" * 500, "eos", Usage()),)))
        connection.recv()

    with canned_server(handler, server_side) as address:
        url = f"wss://{address}"
        with pytest.raises(ServerUnreachable, match="self-signed certificate"):
            async with opened(Remote(url)):
                pytest.fail("trusted an unknown certificate")
        trusting = ssl.create_default_context(cafile=str(CERTIFICATE))
        async with opened(Remote(url, ssl_context=trusting)) as (connection, listener):
            connection.send([ops.Open(1), gen(1, 2)])
            assert await listener.text(2) == "private" * 500
