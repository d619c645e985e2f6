"""Errors as OpenAI's own client raises them: its class, code, parameter and headers."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from support.api_server import MODEL, ApiServer, api_server
from support.fake_engine import TOKENIZER, FakeEngine
from support.server.http_clients import CLIENTS, ClientKind
from support.server.openai_peer import MESSAGES, called, logit_engine_of_server, sync_client

from agentflow.engine.fake_runner import FakeRunner
from agentflow.server.config.limits import HttpLimits
from agentflow.server.tenants.keys import Tenants, hashed_key
from agentflow.server.tenants.rate_limit import TenantGate

ASK: Any = {"model": MODEL, "messages": MESSAGES, "max_tokens": 4}
PROMPT: Any = {"model": MODEL, "prompt": "x"}
CHAT, TEXT, MODELS = "chat.completions.create", "completions.create", "models.retrieve"
KEY, SLOW_KEY = "af-free", "af-slow"
KEYS = f"""
[tenants.free]
keys = ["{hashed_key(KEY)}"]

[tenants.slow]
keys = ["{hashed_key(SLOW_KEY)}"]
requests_per_minute = 1

[tenants.other]
keys = ["{hashed_key("af-other")}"]
models = ["another"]
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """A server with tenants and limits."""
    file: Path = tmp_path_factory.mktemp("keys") / "keys.toml"
    file.write_text(KEYS)
    limits = HttpLimits(body_bytes=2000)
    with api_server(
        logit_engine_of_server(),
        tenants=Tenants(file=file),
        gate=TenantGate(),
        limits=limits,
        constraints=False,
    ) as running:
        yield running


def test_a_key_that_is_known(server: ApiServer) -> None:
    with sync_client(server, api_key=KEY) as client:
        assert client.chat.completions.create(**ASK).choices
        assert [model.id for model in client.models.list()] == [MODEL]
        assert client.models.retrieve(MODEL).owned_by == "agentflow"


@pytest.mark.parametrize("kind", CLIENTS)
def test_a_key_that_is_not(server: ApiServer, kind: ClientKind) -> None:
    for method, asked in ((CHAT, ASK), (CHAT, {**ASK, "stream": True}), (TEXT, PROMPT), ("models.list", {})):
        with pytest.raises(openai.AuthenticationError) as caught:
            called(server, kind, method, "af-wrong", **asked)
        assert caught.value.code == "invalid_api_key"
        assert caught.value.response.headers["www-authenticate"] == "Bearer"
        assert caught.value.request_id == caught.value.response.headers["x-request-id"]


@pytest.mark.parametrize("kind", CLIENTS)
@pytest.mark.parametrize("key", [KEY, "af-other"])
def test_a_model_that_is_not_there_or_not_allowed(server: ApiServer, key: str, kind: ClientKind) -> None:
    name = "unknown" if key == KEY else MODEL
    for method, asked in ((CHAT, ASK), (TEXT, PROMPT), (TEXT, {**PROMPT, "stream": True}), (MODELS, {})):
        with pytest.raises(openai.NotFoundError, match=f"'{name}'") as caught:
            called(server, kind, method, key, **{**asked, "model": name})
        assert caught.value.code == "model_not_found"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", CLIENTS)
def test_a_parameter_that_is_wrong(server: ApiServer, kind: ClientKind, stream: bool) -> None:
    for method, asked in ((CHAT, ASK), (TEXT, PROMPT)):
        with pytest.raises(openai.BadRequestError) as caught:
            called(server, kind, method, KEY, **asked, temperature=-1, stream=stream)
        assert (caught.value.param, caught.value.type) == ("temperature", "invalid_request_error")


def test_over_a_limit(server: ApiServer) -> None:
    called(server, "sync", CHAT, SLOW_KEY, **ASK)
    for kind, stream in itertools.product(CLIENTS, (False, True)):
        with pytest.raises(openai.RateLimitError) as caught:
            called(server, kind, CHAT, SLOW_KEY, **ASK, stream=stream)
        assert caught.value.code == "rate_limit_exceeded"
        assert 0 < int(caught.value.response.headers["retry-after"]) <= 60


@pytest.mark.parametrize("kind", CLIENTS)
def test_a_body_that_is_too_large(server: ApiServer, kind: ClientKind) -> None:
    with pytest.raises(openai.APIStatusError, match="2,000") as caught:
        called(server, kind, TEXT, KEY, model=MODEL, prompt="x" * 3000)
    assert caught.value.status_code == 413


def test_a_server_that_ends() -> None:
    with api_server(constraints=False) as server:
        server.service.is_draining = True
        for kind in CLIENTS:
            with pytest.raises(openai.InternalServerError) as caught:
                called(server, kind, CHAT, **ASK)
            assert (caught.value.status_code, caught.value.code) == (503, "unready")
            assert caught.value.type == "server_error"
            assert caught.value.response.headers["retry-after"] == "1"


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
@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_fails(stream: bool, kind: ClientKind) -> None:
    with api_server(failing_after(0), constraints=False) as server:
        # A stream's status is sent before anything runs.
        with pytest.raises(openai.APIError if stream else openai.InternalServerError) as caught:
            called(server, kind, CHAT, **ASK, stream=stream)
        assert (caught.value.type, caught.value.code) == ("server_error", "engine_failed")


@pytest.mark.parametrize("kind", CLIENTS)
def test_an_engine_that_fails_in_the_middle_of_a_stream(kind: ClientKind) -> None:
    received: list[str] = []

    def hear(chunk: Any) -> None:
        received.append(chunk.choices[0].delta.content or "")

    with (
        api_server(failing_after(3), constraints=False) as server,
        pytest.raises(openai.APIError) as caught,
    ):
        called(server, kind, CHAT, **{**ASK, "max_tokens": 20}, stream=True, hear=hear)
    assert "".join(received) == "aaa"
    assert caught.value.code == "engine_failed"
    assert caught.value.type == "server_error"


def test_more_log_probabilities_than_are_kept() -> None:
    runner = FakeRunner(vocab_size=TOKENIZER.vocab_size, num_slots=4096, max_context=4096)
    with api_server(FakeEngine(runner=runner), constraints=False) as server, sync_client(server) as client:
        asked = {"model": MODEL, "n": 120, "logprobs": True, "top_logprobs": 20, "messages": MESSAGES}
        for fields in (asked, {**asked, "max_tokens": 5_000}):
            with pytest.raises(openai.BadRequestError) as caught:
                client.chat.completions.create(**fields)
            assert caught.value.param == "top_logprobs"
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(model=MODEL, prompt=["x"] * 100, logprobs=5, max_tokens=4000)
        assert caught.value.param == "logprobs"
        assert len(client.chat.completions.create(**{**asked, "max_tokens": 2}).choices) == 120
        server.assert_idle()


OTHER = {"type": "function", "function": {"name": "other"}}


def test_of_what_cannot_be_compiled_the_field_is_named() -> None:
    bad, good = {"type": "string", "pattern": "a("}, {"type": "object", "properties": {}}

    def tool(parameters: dict[str, object]) -> dict[str, object]:
        function = {"name": "f", "strict": True}
        function["parameters"] = {"type": "object", "properties": {"a": parameters}}
        return {"type": "function", "function": function}

    def form(schema: dict[str, object]) -> dict[str, object]:
        return {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": True}}

    of_tool = "tools[0].function.parameters.properties.a.pattern"
    cases: list[tuple[dict[str, object], str]] = [
        ({"tools": [tool(bad)], "tool_choice": "required"}, of_tool),
        ({"tools": [OTHER, tool(bad)]}, of_tool.replace("0", "1")),
        ({"response_format": form(bad)}, "response_format"),
        ({"tools": [tool(good)], "response_format": form(bad)}, "response_format"),
        ({"tools": [tool(bad)], "response_format": form(good)}, of_tool),
        ({"regex": "a("}, "regex"),
        ({"grammar": "nothing"}, "grammar"),
    ]
    with api_server() as server:
        for asked, param in cases:
            body = {
                "model": "fake",
                "messages": [{"role": "user", "content": "Hi"}],
                "max_tokens": 8,
                **asked,
            }
            answer = httpx2.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), (asked, answer.text)


def test_a_choice_that_is_unknown_lists_those_that_are_known() -> None:
    says = [{"role": "user", "content": "Hi"}]
    cases: list[tuple[str, dict[str, object], str, set[str]]] = [
        ("chat/completions", {"messages": [{"role": "robot"}]}, "messages[0].role", {"user", "tool"}),
        ("chat/completions", {"messages": says, "tool_choice": "must"}, "tool_choice", {"auto", "none"}),
        ("chat/completions", {"messages": says, "tools": [{"type": "x"}]}, "tools[0].type", {"function"}),
        (
            "responses",
            {"input": "Hi", "text": {"format": {"type": "xml"}}},
            "text.format.type",
            {"json_object"},
        ),
        ("responses", {"input": [{"role": "robot", "content": ""}]}, "input[0].role", {"developer"}),
        ("messages", {"messages": says, "max_tokens": 1, "tool_choice": {"type": "x"}}, "", {"any", "tool"}),
    ]
    with api_server(constraints=False) as server:
        for path, asked, param, values in cases:
            answer = httpx2.post(f"{server.url}/v1/{path}", json={"model": MODEL, **asked}, timeout=60)
            error = answer.json()["error"]
            assert (answer.status_code, error.get("param", "")) == (400, param)
            assert values <= set(re.findall(r"'(\w+)'", error["message"])), error["message"]
