"""Errors of Anthropic's API: the classes that its client raises."""

from __future__ import annotations

import json

import anthropic
import httpx2
import pytest
from support.faulty_servers import FAULTS, FaultyKeys
from support.server.anthropic_peer import HELLO, anthropic_peer
from support.server.http_clients import CLIENTS
from support.server.module_servers import module_fixture

from agentflow.server.errors import MAX_MESSAGE_CHARS, MAX_PARAM_CHARS

peer = module_fixture(anthropic_peer, "right", tenants=FaultyKeys(), constraints=False)


def test_a_key_comes_in_either_header(peer):
    assert peer.ask().content
    with anthropic.Anthropic(auth_token="right", base_url=peer.server.url, max_retries=0) as client:
        assert client.messages.count_tokens(model="fake", messages=HELLO).input_tokens


@pytest.mark.parametrize(
    ("key", "error", "kind"),
    [
        ("other", anthropic.AuthenticationError, "authentication_error"),
        ("limited", anthropic.RateLimitError, "rate_limit_error"),
        ("full", anthropic.OverloadedError, "overloaded_error"),
        ("broken", anthropic.InternalServerError, "api_error"),
    ],
)
@pytest.mark.parametrize("client", CLIENTS)
def test_errors_have_the_classes_of_the_client(peer, key, error, kind, client):
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
        assert caught.value.error_code == FAULTS[key]
        assert caught.value.request_id == caught.value.body["request_id"]
    assert caught.value.response.headers.get("retry-after") == {"limited": "3", "full": "1"}.get(key)


@pytest.mark.parametrize("place", [{"%s": 1}, {"service_tier": "%s"}, {"messages": [{"role": "%s"}]}])
def test_a_huge_text_of_the_clients_is_shortened_in_the_error(peer, place):
    """The text repeats the beginning of a message of the decoder."""
    huge = "Invalid value '" * 30_000
    body = json.dumps({"model": "fake", "max_tokens": 1, "messages": HELLO, **place}).replace("%s", huge)
    url = f"{peer.server.url}/v1/messages"
    answer = httpx2.post(url, content=body, headers={"x-api-key": "right"}, timeout=60)
    assert answer.status_code == 400
    reported = answer.json()["error"]
    assert len(reported["message"]) <= MAX_MESSAGE_CHARS
    assert len(reported["details"]["param"]) <= MAX_PARAM_CHARS
