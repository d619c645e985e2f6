"""The transport repeats requests where that is safe, ends stalled streams, and gives connections back."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import pytest
from support.apis.fake_server import (
    Answer,
    Close,
    FakeServer,
    Forever,
    Hold,
    RawAnswer,
    Received,
    Reset,
    Script,
    fake_server,
)
from support.apis.hostile_answers import hostile

from agentflow.backends.apis.http.api_errors import ErrorMapping
from agentflow.backends.apis.http.connections import Connections
from agentflow.backends.apis.http.event_stream import ServerEvent
from agentflow.backends.apis.http.transport import ApiTransport, open_http
from agentflow.errors import (
    AgentflowError,
    BadArgument,
    EngineFailed,
    NotAuthorized,
    Overloaded,
    ProtocolError,
    RateLimited,
    RequestRefused,
    ServerLost,
    ServerUnreachable,
)

pytestmark = pytest.mark.anyio

CERTIFICATE = Path(__file__).parents[3] / "support" / "localhost_for_tests.pem"
STREAM = "text/event-stream"
EVENTS = [b"data: 1\n\n", b"data: 2\n\n", b"data: end\n\n"]


class Sink:
    """Everything is visible that begins with ``v``; ``status`` begins no answer, ``end`` is the end, and at
    ``leave`` the rest is not wanted."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.is_visible = self.has_begun = self.is_over = self.is_left = False

    def event(self, event: ServerEvent) -> None:
        text = event.data.decode("utf-8", "replace")
        self.events.append(text)
        self.is_visible = self.is_visible or text.startswith("v")
        self.has_begun = self.has_begun or text != "status"
        self.is_over, self.is_left = text == "end", text == "leave"

    def close(self) -> None:
        raise ServerLost("cut")


def good(*events: str) -> Answer:
    return Answer([f"data: {event}\n\n".encode() for event in (*events, "end")], content_type=STREAM)


@asynccontextmanager
async def opened(script: Script, **options: Any) -> AsyncIterator[tuple[ApiTransport, FakeServer]]:
    async with fake_server(script) as server, open_http(server.url, {"x-key": "k"}) as http:
        yield ApiTransport(http, ErrorMapping(server.url, "m"), **options), server


async def stream(transport: ApiTransport) -> list[str]:
    return (await transport.stream("chat", b"{}", Sink, {"x-more": "m"})).events


async def test_a_stream_is_read_and_its_connection_used_again() -> None:
    async with opened([good("1"), good("2")]) as (transport, server):
        assert await stream(transport) == ["1", "end"]
        assert await stream(transport) == ["2", "end"]
        assert server.num_connections == 1
        headers = server.last.headers
    assert (headers["x-key"], headers["x-more"], headers["accept"]) == ("k", "m", STREAM)
    assert headers["accept-encoding"] == "identity"


async def test_f37_an_untrusted_certificate_is_the_reason() -> None:
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(CERTIFICATE)
    async with fake_server([], tls) as server, open_http(server.url, {}) as http:
        transport = ApiTransport(http, ErrorMapping(server.url, "m"), max_retries=0)
        with pytest.raises(ServerUnreachable, match=r"certificate of https://127.* is not .*SSL_CERT_FILE"):
            await stream(transport)


async def test_similar_requests_keep_their_lengths_and_send_cookies_back() -> None:
    first = Answer([b"data: end\n\n"], headers={"set-cookie": "seat=1; Path=/"}, content_type=STREAM)
    bodies = [b"{}", b'{"a": 1}', b"[" + b"1," * 100_000 + b"1]"]
    async with opened([first, good(), good()]) as (transport, server):
        for body in bodies:
            await transport.stream("chat", body, Sink)
        assert [request.body for request in server.received] == bodies
        cookies = [request.headers.get("cookie") for request in server.received]
        keys = {(request.headers["x-key"], request.headers["accept"]) for request in server.received}
    assert cookies == [None, "seat=1", "seat=1"]
    assert keys == {("k", STREAM)}


TRANSIENT = {
    "429": Answer(b"{}", 429),
    "429 with a wait": Answer(b"{}", 429, {"retry-after-ms": "1"}),
    "500": Answer(b"{}", 500),
    "502": Answer(b"<html>", 502),
    "503": Answer(b"{}", 503, {"retry-after": "0.001"}),
    "529": Answer(b"{}", 529),
    "408": Answer(b"{}", 408),
    "closed before the answer": RawAnswer([]),
    "reset before the answer": RawAnswer([Reset()]),
    "closed before a visible event": Answer([EVENTS[0], Close()], content_type=STREAM),
    "reset before a visible event": Answer([EVENTS[0], Reset()], content_type=STREAM),
    "ended before a visible event": Answer([EVENTS[0]], content_type=STREAM),
    "an error within the stream": Answer(b'{"error": {"type": "overloaded_error"}}'),
}


@pytest.mark.parametrize("name", TRANSIENT)
async def test_failures_before_anything_is_visible_are_repeated(name: str) -> None:
    async with opened([TRANSIENT[name], TRANSIENT[name], good()]) as (transport, server):
        assert await stream(transport) == ["end"]
        assert len(server.received) == 3


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (Answer(b"{}", 401), NotAuthorized),
        (Answer(b"{}", 400), AgentflowError),
        (Answer(b"{}", 429, {"retry-after": "3600"}), RateLimited),
        (Answer(b"{}", 503, {"x-should-retry": "false"}), Overloaded),
        (Answer(b'{"error": {"code": "insufficient_quota"}}', 429), NotAuthorized),
        (Answer(b'{"error": {"message": "Insufficient Balance"}}', 402), NotAuthorized),
        (Answer(b"", 302, {"location": "http://127.0.0.1:1"}), BadArgument),
        (Answer(b"<html>", content_type="text/html"), ProtocolError),
        (Answer([b"data: v\n\n", Close()], content_type=STREAM), ServerLost),
        (Answer([b"data: v\n\n", Reset()], content_type=STREAM), ServerLost),
        (Answer([b"data: v\n\n"], content_type=STREAM), ServerLost),
    ],
)
async def test_other_failures_are_not_repeated(answer: Answer, kind: type[AgentflowError]) -> None:
    async with opened([answer, good()]) as (transport, server):
        with pytest.raises(kind):
            await stream(transport)
        assert len(server.received) == 1


async def with_alternative(transport: ApiTransport) -> list[str]:
    return (await transport.stream("chat", b"{}", Sink, has_alternative=lambda: True)).events


@pytest.mark.parametrize("name", [name for name in TRANSIENT if not name.startswith("429")])
async def test_nothing_is_repeated_where_another_endpoint_can_answer(name: str) -> None:
    async with opened([TRANSIENT[name], good()]) as (transport, server):
        with pytest.raises(AgentflowError):
            await with_alternative(transport)
        assert len(server.received) <= 1


@pytest.mark.on_trio
async def test_the_longest_wait_that_a_server_may_ask_for_is_kept() -> None:
    async with opened([Answer(b"{}", 429, {"retry-after": "60"})] * 9) as (transport, server):
        with anyio.move_on_after(0.5) as scope:
            await stream(transport)
        assert scope.cancelled_caught
        assert len(server.received) == 1


@pytest.mark.parametrize("content_type", [None, "text/plain; charset=utf-8", "application/octet-stream"])
async def test_a_stream_without_its_type(content_type: str | None) -> None:
    for before in ([], [b": hello\n\n"], [b"event: ping\ndata:\n\n", b"data: \n\n"]):
        answer = Answer([*before, *EVENTS], content_type=content_type)
        async with opened([answer]) as (transport, _):
            assert await stream(transport) == ["1", "2", "end"]


@pytest.mark.parametrize(
    "answer",
    [
        Answer(EVENTS, headers={"content-encoding": "gzip"}, content_type=STREAM),
        Answer(EVENTS, headers={"content-encoding": "gzip"}, content_type=None),
        Answer(b'{"choices": []}'),
        Answer(b"database", content_type="text/plain"),
        Answer(EVENTS, content_type="text/html"),
    ],
)
async def test_an_answer_that_is_no_stream(answer: Answer) -> None:
    async with opened([answer, good()]) as (transport, server):
        with pytest.raises(ProtocolError):
            await stream(transport)
        assert len(server.received) == 1


@pytest.mark.on_trio
@pytest.mark.parametrize("wait", ["0", "-5", "Wed, 21 Oct 2015 07:28:00 GMT"])
async def test_a_server_that_asks_for_no_wait_is_not_asked_again_immediately(
    wait: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentflow.backends.apis.http.transport.FIRST_PAUSE_S", 60.0)
    script = [Answer(b"{}", 429, {"retry-after": wait})] * 9
    async with opened(script) as (transport, server):
        with anyio.move_on_after(0.5) as scope:
            await stream(transport)
        assert scope.cancelled_caught
        assert len(server.received) == 1


async def test_a_short_wait_for_a_rate_is_kept_although_another_endpoint_can_answer() -> None:
    short, long = [Answer(b"{}", 429, {"retry-after": wait}) for wait in ("0.001", "20")]
    async with opened([short, short, good(), long, good()]) as (transport, server):
        assert await with_alternative(transport) == ["end"]
        assert transport.circuit.num_failures == 0
        with pytest.raises(RateLimited):
            await with_alternative(transport)
        assert transport.circuit.status == "open"
        with pytest.raises(RateLimited):  # the requests behind it do not wait either
            await with_alternative(transport)
        assert len(server.received) == 4


@pytest.mark.on_trio
async def test_an_open_circuit_stops_only_requests_that_another_endpoint_can_answer() -> None:
    broken = Answer(b"{}", 500)
    async with opened([broken, broken, broken, good()], max_retries=0) as (transport, server):
        for _ in range(3):
            with pytest.raises(EngineFailed):
                await stream(transport)
        with pytest.raises(Overloaded) as raised:
            await with_alternative(transport)
        assert raised.value.retry_after_s is not None
        assert len(server.received) == 3
        assert await stream(transport) == ["end"]
        assert transport.circuit.status == "closed"


async def test_a_refused_request_is_no_failure_of_the_endpoint() -> None:
    async with opened([Answer(b"{}", 400)] * 5) as (transport, _):
        for _ in range(5):
            with pytest.raises(RequestRefused):
                await stream(transport)
        assert (transport.circuit.status, transport.circuit.num_failures) == ("closed", 0)


async def test_the_last_attempts_error_is_raised() -> None:
    script = [Answer(b"{}", 503), Answer(b"{}", 503), Answer(b"{}", 500)]
    async with opened(script) as (transport, server):
        with pytest.raises(EngineFailed):
            await stream(transport)
        assert len(server.received) == 3
    async with opened([Answer(b"{}", 503)], max_retries=0) as (transport, server):
        with pytest.raises(Overloaded):
            await stream(transport)


@pytest.mark.on_trio
async def test_a_crowd_gets_through_a_limit_of_the_rate() -> None:
    served = 0

    def answer(_: Received) -> Answer:
        nonlocal served
        served += 1
        return good() if served % 3 == 0 else Answer(b"{}", 429, {"retry-after-ms": "1"})

    async with opened(answer, max_retries=5) as (transport, _), anyio.create_task_group() as group:
        for _ in range(12):
            group.start_soon(stream, transport)
    assert served >= 36


@pytest.mark.on_trio
@pytest.mark.parametrize("before", [(), (b"data: v\n\n",)])
async def test_a_silent_server_is_left(before: tuple[bytes, ...]) -> None:
    options = {"timeout_s": 0.05, "stall_timeout_s": 0.05, "max_retries": 0}
    async with opened([Answer([*before, Hold()], content_type=STREAM), good()], **options) as (
        transport,
        server,
    ):
        with pytest.raises(ServerLost):
            await stream(transport)
        await server.wait_until_gone()
        patient = ApiTransport(transport._http, transport.errors)  # on the same connections
        assert await stream(patient) == ["end"]


async def test_f37_a_model_may_reason_in_silence_after_the_first_event() -> None:
    hold = Hold()
    answer = Answer([b"data: status\n\n", hold, b"data: v\n\ndata: end\n\n"], content_type=STREAM)
    async with opened([answer], stall_timeout_s=0.01) as (transport, server):
        found: list[list[str]] = []

        async def ask() -> None:
            found.append(await stream(transport))

        async with anyio.create_task_group() as group:
            group.start_soon(ask)
            await hold.reached.wait()
            with anyio.move_on_after(0.2):
                await server.wait_until_gone()  # it does not go
                raise AssertionError("the answer was left")
            hold.go_on()
        assert found == [["status", "v", "end"]]
        assert len(server.received) == 1


@pytest.mark.parametrize("first", [b"data: 1\n\n", b"data: v\n\n"], ids=["held", "visible"])
@pytest.mark.parametrize("step", [Close(), Reset()], ids=["closed", "reset"])
async def test_f37_a_connection_that_breaks_after_the_last_event_loses_nothing(
    first: bytes, step: Close | Reset
) -> None:
    broken = Answer([first, b"data: end\n\n", step], content_type=STREAM)
    async with opened([broken, good("again")]) as (transport, server):
        assert await stream(transport) == [first[6:7].decode(), "end"]
        assert len(server.received) == 1


@pytest.mark.on_trio
async def test_comments_do_not_keep_a_stream_alive() -> None:
    endless = Answer([b"data: v\n\n", Forever(b": keep-alive\n\n")], content_type=STREAM)
    async with opened([endless], stall_timeout_s=0.05, max_retries=0) as (transport, server):
        with pytest.raises(ServerLost):
            await stream(transport)
        await server.wait_until_gone()


@pytest.mark.on_trio
async def test_a_stream_that_goes_on_after_its_end_loses_its_connection() -> None:
    endless = Answer([*EVENTS, Forever(b"data: more\n\n")], content_type=STREAM)
    async with opened([endless, good()]) as (transport, server):
        assert await stream(transport) == ["1", "2", "end"]
        await server.wait_until_gone()
        assert await stream(transport) == ["end"]
        assert server.num_connections == 2


@pytest.mark.on_trio
async def test_a_stream_that_is_left_loses_its_connection() -> None:
    endless = Answer([b"data: leave\n\n", Forever(b"data: more\n\n")], content_type=STREAM)
    async with opened([endless, good()]) as (transport, server):
        assert await stream(transport) == ["leave"]
        await server.wait_until_gone()
        assert await stream(transport) == ["end"]


@pytest.mark.on_trio
async def test_cancelling_closes_the_connection() -> None:
    hold = Hold()
    async with opened([Answer([b"data: v\n\n", hold], content_type=STREAM), good()]) as (transport, server):
        async with anyio.create_task_group() as group:
            group.start_soon(stream, transport)
            await hold.reached.wait()
            group.cancel_scope.cancel()
        await server.wait_until_gone()
        assert await stream(transport) == ["end"]


@pytest.mark.on_trio
@pytest.mark.parametrize("name", hostile(EVENTS))
async def test_hostile_servers_leave_no_connection_behind(name: str) -> None:
    async with opened([hostile(EVENTS)[name](), good()], max_retries=0) as (transport, _):
        with suppress(AgentflowError):
            await stream(transport)
        assert await stream(transport) == ["end"]
        connections = transport._http._transport
        assert isinstance(connections, Connections)
        assert connections.num_in_use == 0


class Faulty(Sink):
    def event(self, event: ServerEvent) -> None:
        raise ZeroDivisionError


@pytest.mark.on_trio
async def test_a_fault_of_the_reader_is_raised_and_its_connection_dropped() -> None:
    endless = Answer([b"data: 1\n\n", Forever(b"data: more\n\n")], content_type=STREAM)
    async with opened([endless, good()]) as (transport, server):
        with pytest.raises(ZeroDivisionError):
            await transport.stream("chat", b"{}", Faulty)
        await server.wait_until_gone()
        assert await stream(transport) == ["end"]


async def test_a_request_that_was_refused_because_of_a_rate_is_sent_again() -> None:
    answers = [Answer(b"{}", 429, {"retry-after-ms": "1"}), Answer(b"{}", 429), Answer(b'{"data": []}')]
    async with opened(answers) as (transport, server):
        assert await transport.post("embeddings", b"{}") == {"data": []}
        assert len(server.received) == 3


async def test_a_request_may_be_sent_once_only() -> None:
    async with opened([Answer(b"{}", 503), Answer(b"{}")]) as (transport, server):
        with pytest.raises(Overloaded):
            await transport.post_once("batches", b"{}")
        assert len(server.received) == 1


async def test_lists_are_fetched_again_after_a_failure() -> None:
    async with opened([Answer(b"{}", 503), Answer(b'{"data": []}')]) as (transport, server):
        assert await transport.get("models") == {"data": []}
        assert (server.last.method, server.last.path) == ("GET", "/models")
    for answer, kind in ((Answer(b"<html>"), ProtocolError), (Answer(b"{}", 401), NotAuthorized)):
        async with opened([answer]) as (transport, _):
            with pytest.raises(kind):
                await transport.get("models")
