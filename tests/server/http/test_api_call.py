"""One HTTP request to an API, message by message: limits, errors, streams, and clients that vanish."""

from __future__ import annotations

import json
import logging
from collections import Counter
from types import SimpleNamespace
from typing import Any

import anyio
import msgspec
import pytest
from support.server.exchanges import Exchange, exchange, service

from agentflow.engine.tenant import Tenant
from agentflow.errors import (
    Overloaded,
)
from agentflow.runtime.task_group import open_task_group
from agentflow.server.compatible.error_format import OpenAIErrorFormat
from agentflow.server.compatible.fields import Unread
from agentflow.server.errors import MAX_MESSAGE_CHARS, MAX_PARAM_CHARS, ApiError
from agentflow.server.http.call import ApiCall, ApiEndpoint
from agentflow.server.log import MAX_LOGGED_BYTES
from agentflow.server.tenants.keys import DEFAULT_TENANT, Tenants

pytestmark = pytest.mark.anyio

Message = dict[str, Any]


class Asked(msgspec.Struct, forbid_unknown_fields=True):
    word: str
    times: int = 1
    any: Any = None
    unread: Unread = None
    parts: list[dict[str, int]] = []


async def echo(call: ApiCall) -> None:
    asked = call.read(Asked)
    await call.reply({"said": asked.word * asked.times})


async def test_a_body_in_any_number_of_parts_is_answered():
    for parts in ((b'{"word": "ab", "times": 2}',), (b'{"word"', b"", b': "ab", "ti', b'mes": 2}')):
        client = await exchange(echo, Exchange(*parts))
        assert (client.status, json.loads(client.body)) == (200, {"said": "abab"})
        assert client.answer_headers[b"content-length"] == b"15"


WORD = b'{"word": "a", '


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        (b"{", "invalid_json", None),
        (b"", "invalid_json", None),
        (b"\xff", "invalid_json", None),
        (b'{"word": "\xff"}', "invalid_json", None),
        (WORD + b'"unread": "\xff"}', "invalid_json", None),
        (WORD + b'"unread": [1,]}', "invalid_json", None),
        (WORD + b'"unread": ' + b"[" * 50_000, "invalid_json", None),
        (WORD + b'"any": ' + b"[" * 50_000, "invalid_json", None),
        (b'{"word": "\\ud800"}', "invalid_json", "word"),
        (b'{"word": "\\udc00 and more text"}', "invalid_json", "word"),
        (WORD + b'"any": {"b": [1, "\\ud800 and more text"]}}', "invalid_json", "any.b[1]"),
        (WORD + b'"any": {"\\ud800": 1}}', "invalid_json", "any"),
        (b'{"word": "\\ud800", "any": "%s"}' % (b"x" * 40_000), "invalid_json", "word"),
        (b"[]", "invalid_request", None),
        (b"{}", "invalid_request", "word"),
        (WORD + b'"no": 1}', "invalid_request", "no"),
        (b'{"word": 1}', "invalid_request", "word"),
        (WORD + b'"parts": [{"x": "y"}]}', "invalid_request", "parts[0][...]"),
    ],
)
async def test_an_invalid_body_is_reported_with_its_field(body, code, param):
    client = await exchange(echo, Exchange(body))
    assert client.status == 400
    assert (client.error["code"], client.error["param"]) == (code, param)
    assert client.error["type"] == "invalid_request_error"


@pytest.mark.parametrize("body", [{"%s": 1}, {"word": "a", "parts": [{"%s": "y"}]}, {"word": "%s"}])
async def test_of_a_long_name_a_message_holds_the_beginning(body):
    async def quote(call: ApiCall) -> None:
        raise ApiError(400, "invalid_value", call.read(Asked).word, param="x" * 10_000)

    name = "Invalid value ' - at `$." * 100_000
    client = await exchange(quote, Exchange(json.dumps(body).replace("%s", name).encode()))
    assert client.status == 400
    assert 20 < len(client.error["message"]) <= MAX_MESSAGE_CHARS
    assert len(client.error["param"]) <= MAX_PARAM_CHARS


async def test_a_body_over_the_limit_is_refused_before_it_is_read():
    body = b'{"word": "%s"}' % (b"x" * 100)
    for client in (
        Exchange(body, headers={"content-length": "5000"}),
        Exchange(body[:60], body[60:], b"the rest"),
    ):
        await exchange(echo, client, body_bytes=100)
        assert (client.status, client.error["code"]) == (413, "request_too_large")
        assert client.answer_headers[b"connection"] == b"close"
        assert len(client._messages) == 1


async def test_a_compressed_body_is_refused_as_such():
    client = await exchange(echo, Exchange(b'{"word": "a"}', headers={"content-encoding": "gzip"}))
    assert (client.status, client.error["code"]) == (415, "unsupported_encoding")
    client = await exchange(echo, Exchange(b'{"word": "a"}', headers={"content-encoding": "Identity"}))
    assert client.status == 200


async def test_a_body_that_does_not_come_is_not_waited_for():
    client = Exchange(b"{", b"never")
    client._messages.pop()
    await exchange(echo, client, body_timeout_s=0.01)
    assert (client.status, client.error["code"]) == (408, "request_timeout")


async def test_a_client_that_disconnects_during_its_request_gets_no_response():
    client = Exchange(b"{", b"never")
    client._messages.pop()
    client.has_hung_up.set()
    await exchange(echo, client)
    assert client.sent == []


async def test_a_client_that_goes_has_its_work_cancelled():
    is_working, was_cancelled = anyio.Event(), anyio.Event()

    async def work(call: ApiCall) -> None:
        is_working.set()
        try:
            await anyio.sleep_forever()
        finally:
            was_cancelled.set()

    client = Exchange(b"{}")
    async with open_task_group() as group:
        group.start_soon(exchange, work, client)
        await is_working.wait()
        client.has_hung_up.set()
    assert was_cancelled.is_set()
    assert client.sent == []


async def test_a_client_that_goes_while_it_is_streamed_to_has_its_work_cancelled():
    async def work(call: ApiCall) -> None:
        async with call.streaming() as stream:
            await stream.send(b"data: 1\n\n")
            await anyio.sleep_forever()

    client = Exchange(b"{}")
    async with open_task_group() as group:
        group.start_soon(exchange, work, client)
        await client.has_answer.wait()
        client.has_hung_up.set()
    assert client.body == b"data: 1\n\n"


@pytest.mark.parametrize(
    "fault", [ZeroDivisionError("a secret"), OSError(28, "a secret"), BrokenPipeError("a secret")]
)
async def test_an_internal_error_is_logged_and_not_shown_to_the_client(fault, caplog):
    async def fail(call: ApiCall) -> None:
        raise fault

    answers: Counter[tuple[str, int]] = Counter()
    client = await exchange(fail, Exchange(b"{}"), answers=answers)
    assert (client.status, client.error["code"]) == (500, "internal_error")
    assert "secret" not in client.error["message"]
    assert "a secret" in caplog.text
    assert "Traceback" in caplog.text
    assert answers == {("", 500): 1}


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_an_error_of_the_connection_is_a_client_that_left(is_streamed, caplog):
    class Lost(Exchange):
        async def send(self, message: Message) -> None:
            raise ConnectionResetError

    async def answer(call: ApiCall) -> None:
        if not is_streamed:
            await call.reply({})
            return
        async with call.streaming() as stream:
            await stream.send(b"data: 1\n\n")

    answers: Counter[tuple[str, int]] = Counter()
    await exchange(answer, Lost(b"{}"), answers=answers)
    assert "Traceback" not in caplog.text
    assert [number for _, number in answers] == [0]


@pytest.mark.parametrize(
    ("error", "code"), [(Overloaded("busy"), "overloaded"), (OSError(28, "a secret"), "internal_error")]
)
async def test_an_error_in_a_stream_is_its_last_event(error, code):
    async def fail(call: ApiCall) -> None:
        async with call.streaming() as stream:
            await stream.send(b"data: 1\n\n")
            raise error

    client = await exchange(fail, Exchange(b"{}"))
    first, last, rest = client.body.split(b"\n\n")
    assert (client.status, first, rest) == (200, b"data: 1", b"")
    assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == code
    assert client.sent[-1]["more_body"] is False


async def test_a_server_that_ends_takes_nothing_new():
    async with service() as ending:
        ending.is_draining = True
        client = await exchange(echo, Exchange(b'{"word": "a"}'), ending)
    assert (client.status, client.error["code"]) == (503, "unready")


@pytest.mark.parametrize(("asked", "is_used"), [("abc-1.2:3", True), ("a b", False), ("x" * 129, False)])
async def test_requests_have_an_id(asked, is_used, caplog):
    caplog.set_level(logging.INFO, "agentflow.requests")
    body = b'{"word": "private"}'
    client = await exchange(echo, Exchange(body, headers={"x-request-id": asked}))
    reported = client.answer_headers[b"x-request-id"].decode()
    assert (reported == asked) == is_used
    [record] = caplog.records
    assert record.request["id"] == reported
    assert record.request["status"] == 200
    assert record.request.keys().isdisjoint({"error", "asked", "answered"})
    assert "private" not in caplog.text


async def test_bodies_are_logged_only_if_configured(caplog):
    caplog.set_level(logging.INFO, "agentflow.requests")
    async with service() as running:
        running.logs_prompts = True
        await exchange(echo, Exchange(b'{"word": "private"}'), running)
    [record] = caplog.records
    assert record.request["asked"] == '{"word": "private"}'
    assert record.request["answered"] == '{"said":"private"}'
    assert "private" in caplog.text


async def test_of_long_bodies_the_beginning_is_logged(caplog):
    caplog.set_level(logging.INFO, "agentflow.requests")
    num_events = 20_000

    async def answer(call: ApiCall) -> None:
        async with call.streaming() as stream:
            for _ in range(num_events):
                await stream.send(b"x" * 100)
            await stream.end(b"end")

    async with service() as running:
        running.logs_prompts = True
        client = await exchange(answer, Exchange(b"\n" * 1_000_000), running)
    assert len(client.body) == num_events * 100 + 3
    [record] = caplog.records
    assert record.request["asked"] == "\n" * MAX_LOGGED_BYTES + "… (1,000,000 bytes in all)"
    assert record.request["answered"] == "x" * MAX_LOGGED_BYTES + "… (2,000,003 bytes in all)"


async def test_answers_are_counted_by_their_status():
    answers: Counter[tuple[str, int]] = Counter()
    async with service() as running:
        await exchange(echo, Exchange(b'{"word": "a"}'), running, answers)
        for _ in range(2):
            await exchange(echo, Exchange(b"{"), running, answers)
        gone = Exchange(b"{", b"never")
        gone._messages.pop()
        gone.has_hung_up.set()
        await exchange(echo, gone, running, answers)
    assert answers == {("", 200): 1, ("", 400): 2, ("", 0): 1}


async def test_draining_waits_for_what_runs_and_not_for_ever():
    may_end = anyio.Event()
    is_working = anyio.Event()

    async def work(call: ApiCall) -> None:
        is_working.set()
        await may_end.wait()
        await call.reply({})

    async with service() as running, open_task_group() as group:
        client = Exchange(b"{}")
        app = SimpleNamespace(state=SimpleNamespace(service=running, answers=Counter()))
        scope = {"type": "http", "method": "POST", "path": "/v1/test", "headers": [], "app": app}
        group.start_soon(ApiEndpoint(work, OpenAIErrorFormat()), scope, client.receive, client.send)
        await is_working.wait()
        assert not await running.drain(0.01)
        may_end.set()
        assert await running.drain(10)
    assert client.status == 200


async def test_a_key_stands_for_a_tenant():
    seen: list[Tenant] = []

    async def who(call: ApiCall) -> None:
        seen.append(call.tenant)
        await call.reply({})

    async with service() as running:
        running.tenants = Tenants(["secret"])
        for headers, status in (
            ({"authorization": "Bearer secret"}, 200),
            ({"x-api-key": "secret"}, 200),
            ({"authorization": "Bearer other"}, 401),
            ({}, 401),
        ):
            client = await exchange(who, Exchange(b"{}", headers=headers), running)
            assert client.status == status
    assert seen == [DEFAULT_TENANT] * 2
