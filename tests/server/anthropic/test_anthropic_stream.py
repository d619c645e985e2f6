"""Streams of Anthropic's API: their events on the wire, and in the client's answer."""

from __future__ import annotations

import http.client
import json

import anthropic
import pytest
from support.server.anthropic_peer import AnthropicPeer, anthropic_peer, asking
from support.server.module_servers import module_fixture

peer = module_fixture(anthropic_peer, constraints=False)


def events_of(peer: AnthropicPeer, **params) -> list[tuple[str, dict]]:
    """The events on the wire: their names and data."""
    body = asking(stream=True, **params)
    body |= body.pop("extra_body")
    connection = http.client.HTTPConnection("127.0.0.1", int(peer.server.url.rpartition(":")[2]))
    try:
        connection.request("POST", "/v1/messages", json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        assert response.status == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        sent = response.read().decode()
    finally:
        connection.close()
    assert sent.endswith("\n\n")
    read = []
    for event in sent.removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\n")
        read.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return read


def test_events_come_in_anthropics_order(peer):
    events = events_of(peer)
    names = [name for name, _ in events]
    assert all(name == said["type"] for name, said in events)
    assert names[:4] == ["message_start", "content_block_start", "ping", "content_block_delta"]
    assert set(names[3:-3]) == {"content_block_delta"}
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    start, block, end = events[0][1]["message"], events[1][1], events[-2][1]
    assert (start["content"], start["stop_reason"], start["role"]) == ([], None, "assistant")
    assert block["content_block"]["text"] == ""
    assert end["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert end["usage"]["output_tokens"] == 12
    # The first event counts the whole prompt, the last one how much of it was cached.
    usage = end["usage"]
    assert start["usage"]["input_tokens"] == usage["input_tokens"] + usage["cache_read_input_tokens"]


def test_an_answer_without_text_streams_no_block(peer):
    free = peer.ask().content[0].text
    events = events_of(peer, stop_sequences=[free[0]])
    assert [name for name, _ in events] == ["message_start", "message_delta", "message_stop"]
    assert events[1][1]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": free[0]}


def test_text_comes_while_the_rest_is_generated(peer):
    gate = peer.server.engine.gate
    gate.allow(9)
    try:
        stream = peer.client.messages.create(**asking(stream=True))
        first = next(event for event in stream if event.type == "content_block_delta")
        assert first.delta.text
        peer.server.call(gate.held)
    finally:
        gate.open()
    assert [event.type for event in stream][-1] == "message_stop"


def test_a_later_failure_is_an_event():
    with anthropic_peer(constraints=False) as peer:
        gate = peer.server.engine.gate

        def fail(batch) -> None:
            raise RuntimeError("the step failed")

        gate.allow(9)
        stream = peer.client.messages.create(**asking(stream=True))
        next(event for event in stream if event.type == "content_block_delta")
        peer.server.call(gate.held)
        peer.server.engine.runner._on_step = fail
        gate.open()
        with pytest.raises(anthropic.APIStatusError) as caught:
            list(stream)
    assert caught.value.type == "api_error"
    assert caught.value.body["request_id"].startswith("req_")
