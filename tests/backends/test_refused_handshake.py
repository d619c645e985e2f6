"""Refused handshakes: their errors and reasons, and sessions whose resume is refused. The answers
are real ones, over TCP."""

from __future__ import annotations

import json

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.faults import has_param
from support.session_peer import count_words, gen, opened
from support.tcp_proxy import Proxy, proxied
from support.wire_server import ThreadServer, thread_server
from websockets.datastructures import Headers
from websockets.http11 import Response

import agentflow as af
from agentflow.backends.remote import Remote
from agentflow.backends.websocket import MAX_REASON_CHARS, handshake_error
from agentflow.errors import (
    BadArgument,
    NotAuthorized,
    Overloaded,
    RateLimited,
    ServerError,
    ServerLost,
    ServerUnreachable,
)
from agentflow.protocol import ops
from agentflow.server.config.limits import ServerLimits

pytestmark = pytest.mark.anyio


def answer(status: str, body: object = None, *headers: str) -> bytes:
    """An HTTP response: JSON, unless the headers have another content type."""
    raw = body.encode() if isinstance(body, str) else b"" if body is None else json.dumps(body).encode()
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(raw)}", *headers]
    if body is not None and not any(header.startswith("Content-Type") for header in headers):
        lines.append("Content-Type: application/json")
    return "\r\n".join([*lines, "", ""]).encode() + raw


async def error_for(proxy: Proxy, given_answer: bytes) -> ServerError:
    proxy.answers = [given_answer]
    with pytest.raises(ServerError) as caught:
        async with opened(Remote(proxy.url)):
            pytest.fail("let in")
    return caught.value


PLAIN = "Content-Type: text/plain; charset=utf-8"
HTML = "Content-Type: text/html"
REFUSALS = [
    (answer("401 Unauthorized", {"reason": "no such key"}), NotAuthorized, "HTTP 401): no such key"),
    (answer("401 Unauthorized", {"error": {"message": "who?"}}), NotAuthorized, "HTTP 401): who?"),
    (
        answer("401 Unauthorized", {"type": "error", "error": {"type": "x", "message": "who?"}}),
        NotAuthorized,
        "who?",
    ),
    (answer("401 Unauthorized", {"detail": "Not authenticated"}), NotAuthorized, "Not authenticated"),
    (answer("401 Unauthorized"), NotAuthorized, "HTTP 401): no reason given"),
    (answer("401 Unauthorized", "<html>no</html>", HTML), NotAuthorized, "HTTP 401): no reason given"),
    (answer("403 Forbidden", {"reason": "not this model"}), NotAuthorized, "HTTP 403): not this model"),
    (answer("403 Forbidden", "not\r\n\x1b[1mhere", PLAIN), NotAuthorized, "HTTP 403): not [1mhere"),
    (answer("403 Forbidden"), ServerUnreachable, "(HTTP 403): check the address"),
    (answer("429 Too Many Requests", {"reason": "slow down"}), RateLimited, "HTTP 429): slow down"),
    (answer("503 Service Unavailable", {"reason": "starting"}), Overloaded, "HTTP 503): starting"),
    (
        answer("503 Service Unavailable", "{", "Content-Type: application/json"),
        Overloaded,
        "no reason given",
    ),
    (answer("404 Not Found", {"reason": "gone"}), ServerUnreachable, "(HTTP 404): check the address"),
    (answer("500 Internal Server Error"), ServerUnreachable, "(HTTP 500): check the address"),
    (answer("200 OK", "hello", PLAIN), ServerUnreachable, "(HTTP 200): check the address"),
]


async def test_each_status_is_its_error_with_the_servers_reason(server: ThreadServer) -> None:
    async with proxied(server.port) as proxy:
        for given_answer, kind, message in REFUSALS:
            error = await error_for(proxy, given_answer)
            assert type(error) is kind, given_answer
            assert message in str(error)
            assert str(error).startswith(f"{proxy.url}/v1/session ")
            assert str(error).isprintable()


async def test_retry_after_is_read_from_the_header(server: ThreadServer) -> None:
    async with proxied(server.port) as proxy:
        for value, expected_s in [
            ("7", 7.0),
            ("0", 0.0),
            ("Wed, 21 Oct 2015 07:28:00 GMT", None),
            ("-1", None),
        ]:
            for status in ("429 Too Many Requests", "503 Service Unavailable"):
                error = await error_for(proxy, answer(status, None, f"Retry-After: {value}"))
                assert isinstance(error, Overloaded)
                assert error.retry_after_s == expected_s
        error = await error_for(proxy, answer("503 Service Unavailable"))
        assert isinstance(error, Overloaded)
        assert error.retry_after_s is None


@given(
    status=st.integers(300, 599),
    body=st.binary(max_size=200)
    | st.recursive(
        st.none() | st.text() | st.integers(), lambda c: st.lists(c) | st.dictionaries(st.text(), c)
    ).map(lambda value: json.dumps(value).encode())
    | st.dictionaries(st.sampled_from(["reason", "error", "message"]), st.text()).map(
        lambda value: json.dumps(value).encode()
    ),
    content_type=st.sampled_from(
        ["application/json", "application/problem+json", "text/plain", "", "text/html"]
    ),
    retry_after=st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E)) | st.integers().map(str),
)
def test_the_error_is_one_line_for_any_response(
    status: int, body: bytes, content_type: str, retry_after: str
) -> None:
    headers = Headers({"Content-Type": content_type, "Retry-After": retry_after})
    error = handshake_error("ws://host:1/", Response(status, "", headers, body))
    assert str(error).isprintable()
    assert len(str(error)) < MAX_REASON_CHARS + 200


def test_a_nested_body_has_no_reason() -> None:
    headers = Headers({"Content-Type": "application/json"})
    for body in (b"[" * 200_000, b'{"reason": 3}', b'{"reason": {"reason": {"reason": "deep"}}}', b"[1]"):
        assert "no reason given" in str(handshake_error("ws://host:1/", Response(401, "", headers, body)))


async def test_a_page_of_another_origin_is_rejected_with_the_reason(server: ThreadServer) -> None:
    remote = Remote(server.url, api_key="af-1")
    assert remote.headers == {"Authorization": "Bearer af-1"}
    remote.headers["Origin"] = "http://elsewhere.example"
    with pytest.raises(NotAuthorized, match="pages of other origins"):
        async with opened(remote):
            pytest.fail("let in")


@pytest.mark.parametrize("api_key", ["", " af-1", "line\r\nHost: other", "schlüssel"])
def test_a_key_that_is_invalid_in_a_header_is_rejected(api_key: str) -> None:
    with pytest.raises(BadArgument, check=has_param("api_key")):
        Remote("ws://127.0.0.1:1", api_key=api_key)


# Coming back


async def test_a_session_resumes_after_an_overload(server: ThreadServer) -> None:
    async with proxied(server.port) as proxy, opened(Remote(proxy.url)) as (connection, listener):
        proxy.answers = [
            answer("503 Service Unavailable", {"reason": "starting"}),
            answer("429 Too Many Requests", {"reason": "later"}, "Retry-After: 0"),
        ]
        proxy.current.up = 0
        connection.send([ops.Open(1), ops.Text(1, ("later #4",)), gen(1, 2)])
        assert await listener.text(2) == count_words("later #4")
        assert proxy.num_connections == 4
    await server.wait_until_idle()


@pytest.mark.parametrize(
    ("grace_s", "refusal", "kind", "reason"),
    [
        (0.5, ("503 Service Unavailable", "full", "Retry-After: 100"), ServerLost, "HTTP 503): full"),
        (60.0, ("401 Unauthorized", "an unknown API key"), NotAuthorized, "an unknown API key"),
    ],
    ids=["told to come back later", "a revoked key"],
)
async def test_a_session_that_is_refused_does_not_try_again(
    grace_s: float, refusal: tuple[str, ...], kind: type[Exception], reason: str
) -> None:
    status, said, *headers = refusal
    with thread_server(ServerLimits(resume_grace_s=grace_s)) as other:
        async with proxied(other.port) as proxy, opened(Remote(proxy.url)) as (connection, listener):
            proxy.answers = [answer(status, {"reason": said}, *headers)] * 50
            proxy.current.up = 0
            connection.send([ops.Open(1)])
            error = await listener.wait_until_lost()
            assert isinstance(error, kind)
            assert reason in str(error)
            assert proxy.num_connections == 2
        if kind is ServerLost:
            await other.wait_until_idle()


# Refused while it is open


async def test_a_rate_limit_of_a_request_has_its_retry_after(server: ThreadServer) -> None:
    limited = RateLimited("slow down")
    limited.retry_after_s = 2.5
    server.generator.generate_fault = limited
    try:
        async with af.session(server.url) as flow, flow.state() as s:
            s += af.gen("answer")
            with pytest.raises(af.AgentflowError) as caught:
                await s["answer"]
    finally:
        server.generator.generate_fault = None
    error: BaseException | None = caught.value
    while error is not None and not isinstance(error, RateLimited):
        error = error.__cause__
    assert isinstance(error, RateLimited)
    assert error.retry_after_s == 2.5
    with anyio.fail_after(10):
        await server.wait_until_idle()


def test_f37_the_remedy_for_a_missing_key_fits_programs_and_commands():
    message = str(handshake_error("ws://host:1/", Response(401, "", Headers(), b"")))
    assert all(way in message for way in ("api_key=", "--api-key", "AGENTFLOW_API_KEY"))
