"""Streams of both APIs before the first token: the headers are there at once, and silence is filled with what
clients skip. What a request is refused with still has its status."""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import anthropic
import openai
import pytest
from support.api_errors import ANTHROPIC, OPENAI, Api, request_fields
from support.api_server import ApiServer, api_server
from support.fake_engine import FakeEngine
from support.faulty_servers import failing_engine
from support.server.anthropic_peer import anthropic_peer, asking
from support.server.openai_peer import sync_client

from agentflow.server.config.limits import HttpLimits
from agentflow.server.http.call import ApiCall

OFTEN = HttpLimits(stream_keepalive_s=0.01)
SKIPPED = {OPENAI: b": keep-alive\n\n", ANTHROPIC: b'event: ping\ndata: {"type":"ping"}\n\n'}
APIS = pytest.mark.parametrize("api", [OPENAI, ANTHROPIC], ids=lambda api: api.name)


@contextmanager
def streaming(server: ApiServer, api: Api, **fields: Any) -> Iterator[http.client.HTTPResponse]:
    """The answer to a request for a stream, from when its headers are there."""
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=30)
    with contextlib.closing(connection):
        connection.request("POST", api.path, json.dumps(request_fields(stream=True, **fields)))
        yield connection.getresponse()


@APIS
def test_headers_come_before_anything_runs_and_silence_is_filled(api: Api) -> None:
    with api_server(limits=OFTEN, constraints=False) as server:
        gate = server.engine.gate
        gate.allow(0)
        try:
            with streaming(server, api) as answer:
                assert answer.status == 200
                server.call(gate.held)
                read = b""
                while read.count(SKIPPED[api]) < 3:
                    read += answer.read1(1_000)
                assert (b"message_start" in read) == (api is ANTHROPIC)
                gate.open()
                read += answer.read()
        finally:
            gate.open()
        assert read.rstrip().endswith(b"data: [DONE]" if api is OPENAI else b'"type":"message_stop"}')
        server.assert_idle()


@APIS
def test_a_text_with_several_prompts_or_answers_begins_at_once_too(api: Api) -> None:
    fields: dict[str, Any] = {"n": 3} if api is OPENAI else {}
    with api_server(limits=OFTEN, constraints=False) as server:
        server.engine.gate.allow(0)
        try:
            with streaming(server, api, **fields) as answer:
                assert answer.status == 200
                server.call(server.engine.gate.held)
            if api is OPENAI:
                path = Api("", "/v1/completions", "")
                with streaming(server, path, messages=None, prompt=["a", "b"]) as answer:
                    assert answer.status == 200
        finally:
            server.engine.gate.open()


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiServer]:
    """Its engine is paused until three keep-alives were sent."""
    num_sent = 0
    write = ApiCall._write

    async def counting(call: ApiCall, data: bytes, more: bool) -> None:
        nonlocal num_sent
        num_sent += data in SKIPPED.values()
        if num_sent == 3:
            server.engine.gate.open()
        await write(call, data, more)

    monkeypatch.setattr(ApiCall, "_write", counting)
    with api_server(limits=OFTEN, constraints=False) as server:
        server.engine.gate.allow(0)
        yield server
        assert num_sent >= 3


def test_openais_client_skips_them(silent: ApiServer) -> None:
    body = {**request_fields(), "seed": 1}
    with sync_client(silent) as client:
        chunks = list(client.chat.completions.create(**body, stream=True))
        whole = client.chat.completions.create(**body)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content


def test_anthropics_client_skips_them(silent: ApiServer) -> None:
    with (
        anthropic.Anthropic(api_key="none", base_url=silent.url, max_retries=0) as client,
        client.messages.stream(**request_fields()) as stream,
    ):
        message = stream.get_final_message()
    assert message.stop_reason == "max_tokens"
    assert message.usage.output_tokens == 4


@APIS
def test_a_step_that_fails_is_the_last_event(api: Api) -> None:
    with api_server(failing_engine(ArithmeticError("no memory")), constraints=False) as server:
        with streaming(server, api) as answer:
            assert answer.status == 200
            last = answer.read().strip().rpartition(b"\n")[2]
        error = json.loads(last.removeprefix(b"data: "))["error"]
        assert error["type"] == ("server_error" if api is OPENAI else "api_error")


def test_a_failed_step_is_an_error_of_both_clients() -> None:
    with api_server(failing_engine(ArithmeticError("no memory")), constraints=False) as server:
        with sync_client(server) as client, pytest.raises(openai.APIError) as caught:
            list(client.chat.completions.create(**request_fields(), stream=True))
        assert caught.value.code == "engine_failed"
    with anthropic_peer(engine=failing_engine(ArithmeticError("no memory"))) as peer:
        with pytest.raises(anthropic.APIStatusError) as failed:
            list(peer.client.messages.create(**asking(stream=True)))
        assert failed.value.type == "api_error"


@APIS
@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"model": "nowhere"}, 404),
        ({"top_p": -1}, 400),
        ({"messages": [{"role": "user", "content": "x" * 1_100}]}, 400),
        ({"messages": [{"role": "user", "content": "x" * 9_000}]}, 400),
    ],
)
def test_what_is_refused_has_its_status(api: Api, fields: dict[str, Any], status: int) -> None:
    with api_server(limits=OFTEN, constraints=False) as server, streaming(server, api, **fields) as answer:
        assert answer.status == status


def test_a_bias_beyond_the_vocabulary_has_its_status() -> None:
    with (
        api_server(limits=OFTEN, constraints=False) as server,
        streaming(server, OPENAI, logit_bias={"9999999": 1}) as answer,
    ):
        assert answer.status == 400


@APIS
def test_a_full_queue_has_its_status(api: Api) -> None:
    with api_server(FakeEngine(max_unfinished=1), limits=OFTEN, constraints=False) as server:
        server.engine.gate.allow(0)
        try:
            with streaming(server, api) as first, streaming(server, api) as second:
                assert first.status == 200
                assert second.status == (503 if api is OPENAI else 529)
        finally:
            server.engine.gate.open()
