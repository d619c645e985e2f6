"""Errors of Anthropic's API: the classes that its client raises, and what is refused by name."""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Iterator

import anthropic
import pytest
from support.faulty_servers import KEY as ANN
from support.faulty_servers import tenants
from support.server.anthropic_peer import HELLO, AnthropicPeer, anthropic_peer
from support.server.http_clients import CLIENTS

from agentflow.engine.tenant import ANONYMOUS, Tenant
from agentflow.errors import EngineFailed, NotAuthorized, Overloaded, RateLimited
from agentflow.server.config.limits import HttpLimits
from agentflow.server.errors import MAX_MESSAGE_CHARS, MAX_PARAM_CHARS
from agentflow.server.tenants.keys import Tenants
from agentflow.server.tenants.rate_limit import TenantGate

KEY = "sk-1"
TOOL = {"name": "weather", "description": "The weather.", "input_schema": {"type": "object"}}


class KeyRing(Tenants):
    """One key is valid; others are the name of the error that they cause."""

    def of(self, key: str | None) -> Tenant:
        limited = RateLimited("60 requests in a minute, which is the limit")
        limited.retry_after_s = 2.5
        faults = {"limited": limited, "full": Overloaded("too many wait"), "broken": EngineFailed("it broke")}
        if key in faults:
            raise faults[key]
        if key != KEY:
            raise NotAuthorized("no such key")
        return ANONYMOUS


@pytest.fixture(scope="module")
def peer() -> Iterator[AnthropicPeer]:
    with anthropic_peer(
        KEY, tenants=KeyRing(), limits=HttpLimits(body_bytes=20_000), constraints=False
    ) as running:
        yield running
        running.server.assert_idle()


def test_a_key_comes_in_either_header(peer):
    assert peer.ask().content
    with anthropic.Anthropic(auth_token=KEY, base_url=peer.server.url, max_retries=0) as client:
        assert client.messages.count_tokens(model="fake", messages=HELLO).input_tokens


@pytest.mark.parametrize(
    ("key", "error", "kind", "code"),
    [
        ("wrong", anthropic.AuthenticationError, "authentication_error", "invalid_api_key"),
        ("limited", anthropic.RateLimitError, "rate_limit_error", "rate_limit_exceeded"),
        ("full", anthropic.OverloadedError, "overloaded_error", "overloaded"),
        ("broken", anthropic.InternalServerError, "api_error", "engine_failed"),
    ],
)
@pytest.mark.parametrize("client", CLIENTS)
def test_errors_have_the_classes_of_the_client(peer, key, error, kind, code, client):
    asked = {"model": "fake", "messages": HELLO}
    for method, fields in (
        ("create", {**asked, "max_tokens": 3}),
        ("create", {**asked, "max_tokens": 3, "stream": True}),
        ("stream", {**asked, "max_tokens": 3}),
        ("count_tokens", asked),
    ):
        with pytest.raises(error) as caught:
            peer.called(client, method, key, **fields)
        assert caught.value.type == kind
        assert caught.value.error_code == code
        assert caught.value.request_id == caught.value.body["request_id"]
    assert caught.value.response.headers.get("retry-after") == {"limited": "3", "full": "1"}.get(key)


def test_counting_tokens_costs_a_request():
    known = tenants("requests_per_minute = 2")
    with anthropic_peer(ANN, tenants=known, gate=TenantGate(), constraints=False) as peer:
        assert peer.client.messages.count_tokens(model="fake", messages=HELLO).input_tokens
        assert peer.ask().content
        with pytest.raises(anthropic.RateLimitError):
            peer.client.messages.count_tokens(model="fake", messages=HELLO)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("client", CLIENTS)
def test_an_unknown_model_is_not_found(peer, client, stream):
    with pytest.raises(anthropic.NotFoundError, match="'nowhere'"):
        peer.message(client, stream, model="nowhere")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("client", CLIENTS)
def test_a_body_over_the_limit_is_too_large(peer, client, stream):
    with pytest.raises(anthropic.ContentTooLargeError) as caught:
        peer.message(client, stream, messages=[{"role": "user", "content": "x" * 30_000}])
    assert caught.value.body["error"]["type"] == "request_too_large"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("client", CLIENTS)
def test_a_prompt_that_does_not_fit_is_refused(peer, client, stream):
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long: ") as caught:
        peer.message(client, stream, messages=[{"role": "user", "content": "x" * 3000}])
    assert caught.value.error_code == "context_length_exceeded"
    assert caught.value.body["error"]["details"]["param"] == "messages"


def user(*blocks):
    return [{"role": "user", "content": [*blocks]}]


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
THOUGHT = {"type": "thinking", "thinking": "Hm.", "signature": "s"}
SERVER_TOOL = {"type": "web_search_20250305", "name": "web_search", "max_uses": 2}
SEARCHED = {"type": "server_tool_use", "id": "x", "name": "web_search", "input": {}}


@pytest.mark.parametrize(
    ("params", "param", "code"),
    [
        ({"messages": user(IMAGE)}, "messages[0].content[0].type", "unsupported"),
        ({"messages": user({"type": "document"})}, "messages[0].content[0].type", "unsupported"),
        ({"messages": user(THOUGHT)}, "messages[0].content[0]", "invalid_value"),
        ({"messages": [*HELLO, {"role": "assistant", "content": [SEARCHED]}]}, None, "unsupported"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", "unsupported"),
        ({"messages": []}, "messages", "invalid_request"),
        ({"system": [IMAGE]}, "system[0].type", "unsupported"),
        ({"system": [{"text": "Be brief."}]}, "system[0].type", "invalid_request"),
        ({"tools": [TOOL, SERVER_TOOL]}, "tools[1].type", "unsupported"),
        ({"tools": [{"name": "weather"}]}, "tools[0].input_schema", "invalid_request"),
        ({"tools": [{**TOOL, "descripton": ""}]}, "tools[0].descripton", "invalid_request"),
        ({"tools": [{**TOOL, "name": "a b"}]}, "tools[0].name", "invalid_request"),
        ({"tools": [{**TOOL, "input_examples": [1]}]}, "tools[0].input_examples[0]", "invalid_value"),
        ({"tools": [TOOL, TOOL]}, "tools", "invalid_value"),
        ({"tool_choice": {"type": "any"}}, "tool_choice", "invalid_value"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "x"}},
            "tool_choice",
            "invalid_value",
        ),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens", "invalid_value"),
        ({"container": "c_1"}, "container", "unsupported"),
        ({"inference_geo": "us"}, "inference_geo", "unsupported"),
        ({"diagnostics": {"previous_message_id": "m"}}, "diagnostics", "unsupported"),
        ({"extra_body": {"mcp_servers": [{"name": "x"}]}}, "mcp_servers[0]", "unsupported"),
        (
            {"extra_body": {"context_management": {"edits": [{"type": "x"}]}}},
            "context_management.edits[0].type",
            "unsupported",
        ),
        (
            {
                "extra_body": {
                    "context_management": {
                        "edits": [
                            {
                                "type": "clear_thinking_20251015",
                                "keep": {"type": "thinking_turns", "value": 1},
                            }
                        ]
                    }
                }
            },
            "context_management.edits[0].keep",
            "unsupported",
        ),
        (
            {"extra_body": {"context_management": {"edits": [{"type": "clear_thinking_20251015"}]}}},
            "context_management.edits[0].keep",
            "unsupported",
        ),
        ({"extra_body": {"thread": {"type": "create"}}}, "thread", "thread_unsupported_request"),
        ({"extra_body": {"nothing": 1}}, "nothing", "invalid_request"),
        ({"extra_body": {"temperature": 1.5}}, "temperature", "invalid_request"),
        ({"extra_body": {"top_p": -0.1}}, "top_p", "invalid_request"),
        ({"extra_body": {"seed": -1}}, "seed", "invalid_request"),
        ({"speed": "fast"}, "speed", "unsupported"),
        ({"service_tier": "batch"}, "service_tier", "unsupported"),
        ({"max_tokens": 0}, "max_tokens", "invalid_request"),
        ({"stop_sequences": [""]}, "stop_sequences[0]", "invalid_request"),
    ],
)
def test_what_is_not_there_is_refused_by_name(peer, params, param, code):
    with pytest.raises(anthropic.BadRequestError) as caught:
        peer.ask(**params)
    error = caught.value.body["error"]
    assert error["type"] == "invalid_request_error"
    assert error["details"]["error_code"] == code
    if param is not None:
        assert error["details"]["param"] == param


SCHEMA = {"type": "json_schema", "schema": {"type": "object"}}


@pytest.mark.parametrize(
    ("params", "param", "code"),
    [
        ({"messages": [*HELLO, {"role": "assistant", "content": "{"}]}, "messages", "invalid_value"),
        ({"extra_body": {"output_format": SCHEMA}}, "output_format", "invalid_value"),
        ({}, None, "unsupported"),  # this server has no compiler
    ],
)
def test_a_schema_that_cannot_be_kept_is_refused(peer, params, param, code):
    with pytest.raises(anthropic.BadRequestError) as caught:
        peer.ask(output_config={"format": SCHEMA}, **params)
    details = caught.value.body["error"]["details"]
    assert (details["param"], details["error_code"]) == (param, code)


def test_a_schema_that_cannot_be_compiled_names_its_field():
    bad = {"type": "json_schema", "schema": {"type": "string", "pattern": "a("}}
    with anthropic_peer() as peer, pytest.raises(anthropic.BadRequestError) as caught:
        peer.ask(output_config={"format": bad})
    assert caught.value.body["error"]["details"]["param"] == "output_config.format.schema"


@pytest.mark.parametrize("place", [{"%s": 1}, {"service_tier": "%s"}, {"messages": [{"role": "%s"}]}])
def test_a_huge_text_of_the_clients_is_refused_at_once(place):
    """What looks like the beginning of a message, again and again."""
    huge = "Invalid value '" * 30_000
    body = json.dumps({"model": "fake", "max_tokens": 1, "messages": HELLO, **place}).replace("%s", huge)
    with anthropic_peer(KEY, tenants=KeyRing(), constraints=False) as peer:
        address = peer.server.url.removeprefix("http://")
        connection = http.client.HTTPConnection(address)
        with contextlib.closing(connection):
            connection.request("POST", "/v1/messages", body, {"x-api-key": KEY})
            answer = connection.getresponse()
            reported = json.loads(answer.read())["error"]
    assert answer.status == 400
    assert len(reported["message"]) <= MAX_MESSAGE_CHARS
    assert len(reported["details"]["param"]) <= MAX_PARAM_CHARS
