"""The addresses of models behind APIs, as ``af.session`` takes them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.apis import openai_answers as answers
from support.apis.fake_server import Answer, AnyAnswer, Received, fake_server

import agentflow as af
from agentflow.errors import BadArgument, NotAuthorized, PromptTooLong, ServerUnreachable, UnknownModel

pytestmark = pytest.mark.anyio


def server_of(owner: str, *models: str) -> Any:
    """A server that lists its models and answers with the name of the requested model."""

    def answer(request: Received) -> AnyAnswer:
        if request.path.endswith("/models"):
            rows = ",".join(f'{{"id":"{model}","owned_by":"{owner}"}}' for model in models)
            return Answer(f'{{"object":"list","data":[{rows}]}}'.encode())
        return answers.text_stream(request.json["model"])

    return answer


async def asked(flow: af.Session) -> str:
    async with flow.state() as s:
        s += af.user("Hi") + af.gen("x", max_tokens=5)
        return await s["x"]


@pytest.mark.parametrize(("vendor", "variable"), [("openai", "OPENAI"), ("anthropic", "ANTHROPIC")])
async def test_a_vendors_model_takes_key_and_address_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, vendor: str, variable: str
) -> None:
    for name in ("API_KEY", "BASE_URL", "AUTH_TOKEN"):
        monkeypatch.delenv(f"{variable}_{name}", raising=False)
    with pytest.raises(NotAuthorized):
        af.session(f"{vendor}:some-model")
    async with fake_server([answers.text_stream("Hello")]) as server:
        monkeypatch.setenv(f"{variable}_API_KEY", "the-key")
        monkeypatch.setenv(f"{variable}_BASE_URL", f"{server.url}/v1" if vendor == "openai" else server.url)
        async with af.session(f"{vendor}:some-model") as flow:
            assert flow.capabilities.model == "some-model"
            if vendor == "openai":
                assert await asked(flow) == "Hello"
                assert server.last.headers["authorization"] == "Bearer the-key"


@pytest.mark.parametrize("path", ["/v1", "/v1/", "", "/"])
async def test_a_server_is_asked_for_its_model(path: str) -> None:
    async with (
        fake_server(server_of("vllm", "qwen")) as server,
        af.session(f"{server.url}{path}") as flow,
    ):
        assert (flow.capabilities.model, flow.capabilities.continuation) == ("qwen", True)
        assert await asked(flow) == "qwen"


async def test_a_server_with_several_models_wants_a_name() -> None:
    async with fake_server(server_of("sglang", "a", "b")) as server:
        with pytest.raises(UnknownModel):
            async with af.session(f"{server.url}/v1"):
                raise AssertionError
        async with af.session(f"{server.url}/v1", model="b") as flow:
            assert await asked(flow) == "b"


async def test_the_owner_of_the_models_tells_the_flavour() -> None:
    flavours = {
        "vllm": "vllm",
        "sglang": "sglang",
        "llamacpp": "llamacpp",
        "library": "ollama",
        "me": "generic",
    }
    for owner, flavour in flavours.items():
        async with fake_server(server_of(owner, "m")) as server:
            given: Any = {"flavour": flavour}
            alike = af.OpenAICompatible(f"{server.url}/v1", "m", **given)
            async with af.session(f"{server.url}/v1") as found, af.session(backend=alike) as expected:
                assert found.capabilities == expected.capabilities


SHOWN = {"parameters": "temperature 0.7\nnum_ctx 8192", "model_info": {"qwen3.context_length": 40_960}}


@pytest.mark.parametrize(
    ("owner", "fields", "shown", "expected"),
    [
        ("vllm", {"max_model_len": 4096}, None, 4096),
        ("llamacpp", {"meta": {"n_ctx": 2048, "n_ctx_train": 8192}}, None, 2048),
        ("llamacpp", {"meta": {"n_ctx": 0}}, None, None),
        ("library", {}, SHOWN, 8192),
        ("library", {}, {"parameters": "", "model_info": SHOWN["model_info"]}, 40_960),
        ("library", {}, None, None),
        ("me", {"context_length": 100}, None, 100),
        ("me", {"context_length": True, "context_window": "5"}, None, None),
    ],
)
async def test_the_context_of_a_model_is_asked_for(
    owner: str, fields: dict[str, Any], shown: Any, expected: int | None
) -> None:
    def answer(request: Received) -> AnyAnswer:
        if request.path == "/v1/models":
            row = {"id": "m", "owned_by": owner, **fields}
            return Answer(json.dumps({"data": [row, {"id": "other"}]}).encode())
        if request.path == "/api/show" and shown is not None and request.json == {"model": "m"}:
            return Answer(json.dumps(shown).encode())
        return answers.TOO_LONG if request.path.startswith("/v1/chat") else Answer(b"no such page", 404)

    async with fake_server(answer) as server, af.session(f"{server.url}/v1", model="m") as flow:
        assert flow.capabilities.max_context == expected
        with pytest.raises(PromptTooLong) as caught:
            await asked(flow)
        assert expected is None or f"{expected:,} tokens" in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "images", "videos"),
    [
        ({}, False, False),
        ({"input_modalities": ["text", "image"]}, True, False),
        ({"architecture": {"input_modalities": ["text", "video", "image"]}}, True, True),
        ({"input_modalities": "image", "architecture": ["image"]}, False, False),
        ({"input_modalities": [{"image": True}, 3]}, False, False),
    ],
)
async def test_a_server_may_list_the_media_that_its_model_accepts(
    fields: dict[str, Any], images: bool, videos: bool
) -> None:
    def answer(request: Received) -> AnyAnswer:
        return Answer(json.dumps({"data": [{"id": "m", "owned_by": "vllm", **fields}]}).encode())

    async with fake_server(answer) as server, af.session(f"{server.url}/v1") as flow:
        assert (flow.capabilities.images, flow.capabilities.videos) == (images, videos)


async def test_the_key_is_sent_to_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "of the vendor")
    async with fake_server(server_of("vllm", "m")) as server:
        async with af.session(f"{server.url}/v1", api_key="mine") as flow:
            await asked(flow)
        assert {request.headers.get("authorization") for request in server.received} == {"Bearer mine"}
        async with af.session(f"{server.url}/v1") as flow:
            await asked(flow)
        assert "authorization" not in server.last.headers


@pytest.mark.parametrize("path", ["/v1", ""])
@pytest.mark.parametrize(
    "answer", ['{"data":5}', '{"data":[{"id":7,"owned_by":["x"]},3]}', '{"data":{"id":"m"}}', "[1]", "null"]
)
async def test_a_server_whose_list_of_models_is_none(path: str, answer: str) -> None:
    async with fake_server(lambda request: Answer(answer.encode())) as server:
        with pytest.raises((UnknownModel, ServerUnreachable)):
            async with af.session(f"{server.url}{path}"):
                raise AssertionError


async def test_no_server_at_an_address() -> None:
    for path in ("", "/v1"):
        with pytest.raises(ServerUnreachable):
            async with af.session(f"http://127.0.0.1:9{path}"):
                raise AssertionError


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("openai:", {}),
        ("anthropic:", {}),
        ("openai:gpt-4o", {"model": "x"}),
        ("openai:gpt-4o", {"quantize": "int8"}),
        ("anthropic:claude-opus-4-5", {"embed_model": "x"}),
        ("openai:gpt-4o", {"embed_model": ""}),
        ("http://127.0.0.1:9/v1", {"embed_model": ""}),
        ("http://", {}),
        ("http://127.0.0.1:9/v1?api-version=1", {}),
        ("http://127.0.0.1:9/?key=k", {}),
        ("http://127.0.0.1:9/v1#top", {}),
    ],
)
def test_an_address_that_names_no_model_is_refused(
    monkeypatch: pytest.MonkeyPatch, url: str, options: dict[str, Any]
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    monkeypatch.setenv("ANTHROPIC_API_KEY", "k")
    with pytest.raises(BadArgument):
        af.session(url, **options)


@pytest.mark.parametrize("host", ["é" * 70, "a\0b"], ids=["too long", "not printable"])
async def test_an_address_with_a_host_that_has_no_form_in_dns(host: str) -> None:
    with pytest.raises(BadArgument) as caught:
        async with af.session(backend=af.OpenAICompatible(f"http://{host}/v1")):
            raise AssertionError
    assert caught.value.param == "url"


async def test_one_session_has_models_of_several_vendors(monkeypatch: pytest.MonkeyPatch) -> None:
    async with fake_server(server_of("vllm", "m")) as server:
        monkeypatch.setenv("OPENAI_API_KEY", "k")
        monkeypatch.setenv("OPENAI_BASE_URL", f"{server.url}/v1")
        models: Any = {"gpt": "openai:gpt-4o", "own": f"{server.url}/v1", "canned": af.Scripted("Hm")}
        async with af.session(models=models) as flow:
            said = []
            for model in models:
                async with flow.state(model=model) as s:
                    s += af.user("Hi") + af.gen("x")
                    said.append(await s["x"])
            assert said == ["gpt-4o", "m", "Hm"]
