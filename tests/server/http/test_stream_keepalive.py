"""Streams before the first token: their headers are sent immediately, and silence is filled with bytes that
clients skip."""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import anthropic
import pytest
from support.api_errors import request_fields
from support.api_server import ApiServer, api_server
from support.server.apis import CHAT, MESSAGES, OLLAMA, TEXT, Api
from support.server.openai_peer import sync_client

from agentflow.server.config.limits import HttpLimits
from agentflow.server.http.call import ApiCall

OFTEN = HttpLimits(stream_keepalive_s=0.01)
SKIPPED = {CHAT: b": keep-alive\n\n", MESSAGES: b'event: ping\ndata: {"type":"ping"}\n\n', OLLAMA: b" "}
ENDS = {CHAT: b"data: [DONE]", MESSAGES: b'"type":"message_stop"}', OLLAMA: b"}"}


@contextmanager
def streaming(
    server: ApiServer, api: Api, prompt: Any = "Hi", **fields: Any
) -> Iterator[http.client.HTTPResponse]:
    """The answer to a request for a stream, from when its headers are there."""
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=30)
    with contextlib.closing(connection):
        body = {**api.body(prompt, max_tokens=4, **fields), "stream": True}
        connection.request("POST", api.path, json.dumps(body))
        yield connection.getresponse()


@pytest.mark.parametrize("api", SKIPPED, ids=lambda api: api.name)
def test_silence_before_the_first_token_is_filled(api: Api) -> None:
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
                assert (b"message_start" in read) == (api is MESSAGES)
                gate.open()
                read += answer.read()
        finally:
            gate.open()
        assert read.rstrip().endswith(ENDS[api])
        assert api.streamed(read.decode()).reason == "length"
        server.assert_idle()


@pytest.mark.parametrize(
    ("api", "prompt", "extra"), [(CHAT, "Hi", {"n": 3}), (MESSAGES, "Hi", {}), (TEXT, ["a", "b"], {})]
)
def test_headers_of_several_answers_are_sent_immediately(
    api: Api, prompt: Any, extra: dict[str, Any]
) -> None:
    with api_server(limits=OFTEN, constraints=False) as server:
        server.engine.gate.allow(0)
        try:
            with streaming(server, api, prompt, extra=extra) as answer:
                assert answer.status == 200
                server.call(server.engine.gate.held)
        finally:
            server.engine.gate.open()


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiServer]:
    """A server whose engine is paused until three keep-alives were sent."""
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
