"""Errors as OpenAI's own client raises them: the class, the code and the headers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import openai
import pytest
from support.api_server import MODEL, ApiServer, api_server
from support.fake_engine import TOKENIZER, FakeEngine
from support.faulty_servers import FAULTS, FaultyKeys
from support.server.apis import CHAT, MESSAGES, RESPONSES, Api, post
from support.server.http_clients import CLIENTS, ClientKind
from support.server.module_servers import module_server
from support.server.openai_peer import MESSAGES as TURNS
from support.server.openai_peer import called, sync_client

from agentflow.engine.simulator.fake_runner import FakeRunner

ASK: Any = {"model": MODEL, "messages": TURNS, "max_tokens": 4}
CALLS: list[tuple[str, Any]] = [
    ("chat.completions.create", ASK),
    ("chat.completions.create", {**ASK, "stream": True}),
    ("completions.create", {"model": MODEL, "prompt": "x"}),
    ("models.list", {}),
]


server = module_server(tenants=FaultyKeys(), constraints=False)


@pytest.mark.parametrize(
    ("key", "error", "status", "kind", "headers"),
    [
        ("other", openai.AuthenticationError, 401, "invalid_request_error", {"www-authenticate": "Bearer"}),
        ("limited", openai.RateLimitError, 429, "rate_limit_error", {"retry-after": "3"}),
        ("full", openai.InternalServerError, 503, "server_error", {"retry-after": "1"}),
        ("broken", openai.InternalServerError, 500, "server_error", {}),
    ],
)
@pytest.mark.parametrize("client", CLIENTS)
def test_errors_have_the_classes_of_the_client(
    server: ApiServer,
    key: str,
    error: type[openai.APIStatusError],
    status: int,
    kind: str,
    headers: Any,
    client: ClientKind,
) -> None:
    for method, asked in CALLS:
        with pytest.raises(error) as caught:
            called(server, client, method, key, **asked)
        found = caught.value
        assert (found.status_code, found.code, found.type) == (status, FAULTS[key], kind)
        assert found.request_id == found.response.headers["x-request-id"]
        assert headers.items() <= dict(found.response.headers).items()


def failing_after(num_tokens: int) -> FakeEngine:
    """A model that breaks within an answer."""
    seen: list[int] = []

    def next_token(tokens: Sequence[int]) -> int:
        seen.append(len(tokens))
        if len(seen) > num_tokens:
            raise RuntimeError("the model broke")
        return TOKENIZER.encode("a")[0]

    runner = FakeRunner(vocab_size=TOKENIZER.vocab_size, max_context=256, next_token=next_token)
    return FakeEngine(runner=runner)


@pytest.mark.parametrize("kind", CLIENTS)
def test_an_engine_that_fails_in_the_middle_of_a_stream(kind: ClientKind) -> None:
    received: list[str] = []

    def hear(chunk: Any) -> None:
        received.append(chunk.choices[0].delta.content or "")

    asked = {**ASK, "max_tokens": 20, "stream": True}
    with (
        api_server(failing_after(3), constraints=False) as server,
        pytest.raises(openai.APIError) as caught,
    ):
        called(server, kind, "chat.completions.create", **asked, hear=hear)
    assert "".join(received) == "aaa"
    assert (caught.value.code, caught.value.type) == ("engine_failed", "server_error")


def test_more_log_probabilities_than_are_kept() -> None:
    runner = FakeRunner(vocab_size=TOKENIZER.vocab_size, num_slots=4096, max_context=4096)
    with api_server(FakeEngine(runner=runner), constraints=False) as server, sync_client(server) as client:
        asked = {"model": MODEL, "n": 120, "logprobs": True, "top_logprobs": 20, "messages": TURNS}
        for fields in (asked, {**asked, "max_tokens": 5_000}):
            with pytest.raises(openai.BadRequestError) as caught:
                client.chat.completions.create(**fields)
            assert caught.value.param == "top_logprobs"
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(model=MODEL, prompt=["x"] * 100, logprobs=5, max_tokens=4000)
        assert caught.value.param == "logprobs"
        assert len(client.chat.completions.create(**{**asked, "max_tokens": 2}).choices) == 120
        server.assert_idle()


@pytest.mark.parametrize(
    ("api", "fields", "known"),
    [
        (CHAT, {"messages": [{"role": "robot"}]}, {"user", "tool"}),
        (CHAT, {"tool_choice": "must"}, {"auto", "none"}),
        (CHAT, {"tools": [{"type": "x"}]}, {"function"}),
        (RESPONSES, {"text": {"format": {"type": "xml"}}}, {"json_object"}),
        (RESPONSES, {"input": [{"role": "robot", "content": ""}]}, {"developer"}),
        (MESSAGES, {"tool_choice": {"type": "x"}}, {"any", "tool"}),
    ],
)
def test_an_error_of_an_unknown_choice_lists_the_known_ones(
    server: ApiServer, api: Api, fields: Any, known: set[str]
) -> None:
    answer = post(server, api, api.body("Hi") | fields, key="right")
    assert answer.status_code == 400
    assert known <= set(re.findall(r"'(\w+)'", answer.json()["error"]["message"]))
