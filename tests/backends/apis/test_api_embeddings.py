"""``flow.embed`` with models behind OpenAI's API: against a fake server, and on agentflow's own route."""

from __future__ import annotations

import base64
import json
import struct
from typing import Any

import anyio
import numpy as np
import pytest
from support.api_server import EMBEDDER, MODEL, ApiServer
from support.apis import openai_answers as answers
from support.apis.api_sessions import ApiSession, compatible_session, openai_session
from support.apis.fake_server import Answer, AnyAnswer, Hold, Received, Script, fake_server
from support.fake_engine import embedding_engine
from support.server.module_servers import module_server

import agentflow as af
from agentflow.errors import (
    AgentflowError,
    BadArgument,
    BudgetExceeded,
    NotSupported,
    PromptTooLong,
    ProtocolError,
    RateLimited,
    UnknownModel,
)

pytestmark = pytest.mark.anyio

SMALL = "text-embedding-3-small"
SIZE = 24


def vector(text: str, size: int) -> list[float]:
    return [len(text) + number / 4 for number in range(size)]


def embedded(request: Received, **changes: Any) -> Answer:
    """An answer with the embeddings in reverse order: clients must sort them by index."""
    fields = request.json
    rows: list[dict[str, Any]] = []
    for index, text in enumerate(fields["input"]):
        numbers = vector(text, fields.get("dimensions", 4))
        packed = base64.b64encode(struct.pack(f"<{len(numbers)}f", *numbers)).decode()
        is_packed = fields["encoding_format"] == "base64"
        rows.insert(0, {"object": "embedding", "index": index, "embedding": packed if is_packed else numbers})
    body = {"object": "list", "data": rows, "model": fields["model"], "usage": {"prompt_tokens": len(rows)}}
    return Answer(json.dumps(body | changes).encode())


def opened(script: Script = embedded, **options: Any) -> ApiSession:
    """A session with a model for chats and one for embeddings."""
    return openai_session(script, **{"model": "gpt-4.1-mini", "embed_model": SMALL, **options})


async def test_texts_are_embedded_in_their_order() -> None:
    async with opened() as (flow, server):
        assert flow.capabilities.embedding_models == (SMALL,)
        assert await flow.embed(["a", "bcd"]) == [vector("a", 4), vector("bcd", 4)]
        assert await flow.embed("a", model=SMALL, dimensions=2, prompt="To: ") == vector("To: a", 2)
        assert (await flow.stats()).prompt_tokens == 3
    first, last = server.received
    assert (first.path, first.method) == ("/v1/embeddings", "POST")
    assert first.json == {"model": SMALL, "input": ["a", "bcd"], "encoding_format": "base64"}
    assert last.json == {
        "model": SMALL,
        "input": ["To: a"],
        "encoding_format": "base64",
        "dimensions": 2,
    }


async def test_a_model_for_embeddings_generates_no_text() -> None:
    async with opened(model=SMALL, embed_model=None) as (flow, server):
        assert (flow.capabilities.model, flow.capabilities.embedding_models) == (SMALL, (SMALL,))
        assert await flow.embed("a") == vector("a", 4)
        async with flow.state() as s:
            with pytest.raises(NotSupported) as caught:
                s += af.user("Hi") + af.assistant(af.gen("x"))
        assert caught.value.param == "model"
    assert len(server.received) == 1


async def test_one_of_several_models_makes_the_embeddings(monkeypatch: pytest.MonkeyPatch) -> None:
    async with fake_server(embedded) as server:
        monkeypatch.setenv("OPENAI_API_KEY", "k")
        monkeypatch.setenv("OPENAI_BASE_URL", f"{server.url}/v1")
        models: Any = {"chat": "openai:gpt-4.1-mini", "embed": f"openai:{SMALL}"}
        async with af.session(models=models) as flow:
            for name in ("embed", SMALL, None):
                assert await flow.embed("abc", model=name) == vector("abc", 4)
            with pytest.raises(UnknownModel) as caught:
                await flow.embed("abc", model="chat")
            assert caught.value.param == "model"
        async with af.session("openai:gpt-4.1-mini", embed_model=SMALL) as flow:
            assert await flow.embed("abc") == vector("abc", 4)
    assert {request.json["model"] for request in server.received} == {SMALL}
    with pytest.raises(BadArgument):
        af.session("anthropic:claude-opus-4-5", api_key="k", embed_model=SMALL)


async def test_a_session_without_a_model_for_embeddings_sends_nothing() -> None:
    async with opened(embed_model=None) as (flow, server):
        with pytest.raises(NotSupported):
            await flow.embed("a")
    assert not server.received


@pytest.mark.parametrize(
    ("model", "options", "kind", "param"),
    [
        (SMALL, {"dimensions": 1537}, BadArgument, "dimensions"),
        ("text-embedding-ada-002", {"dimensions": 8}, NotSupported, "dimensions"),
        (SMALL, {"prompt_name": "query"}, NotSupported, "prompt_name"),
    ],
)
async def test_options_that_the_model_does_not_have(
    model: str, options: dict[str, Any], kind: type[AgentflowError], param: str
) -> None:
    async with opened(embed_model=model) as (flow, server):
        with pytest.raises(kind) as caught:
            await flow.embed("a", **options)
        assert caught.value.param == param
    assert not server.received


@pytest.mark.parametrize(
    ("flavour", "most", "encoding"),
    [("vllm", 256, "base64"), ("ollama", 256, "base64"), ("generic", 32, "float")],
)
async def test_requests_stay_within_the_limits_of_the_server(flavour: Any, most: int, encoding: str) -> None:
    texts = [f"{number}" for number in range(300)]
    async with compatible_session(embedded, flavour, embed_model="e") as (flow, server):
        assert await flow.embed(texts) == [vector(text, 4) for text in texts]
    assert max(len(request.json["input"]) for request in server.received) == most
    assert {request.json["encoding_format"] for request in server.received} == {encoding}


async def test_a_request_has_bounded_bytes() -> None:
    """A character of three bytes may be three tokens."""
    texts = ["€" * 60_000, "€" * 60_000, "b"]
    async with opened() as (flow, server):
        assert len(await flow.embed(texts)) == 3
    assert [len(request.json["input"]) for request in server.received] == [1, 2]


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (answers.TOO_LONG, PromptTooLong),
        (answers.NO_MODEL, UnknownModel),
        (answers.rate_limited(), RateLimited),
        (Answer(b"[]"), ProtocolError),
        (Answer(b"no json"), ProtocolError),
        (Answer(b'{"data": []}'), ProtocolError),
        (Answer(b'{"data": [{"index": 1, "embedding": [1.0]}]}'), ProtocolError),
        (Answer(b'{"data": [{"index": 0, "embedding": []}]}'), ProtocolError),
        (Answer(b'{"data": [{"index": 0, "embedding": "AAAA"}]}'), ProtocolError),
        (Answer(b'{"data": [{"index": 0, "embedding": "?"}]}'), ProtocolError),
        (Answer(b'{"data": [{"index": 0, "embedding": [1e99]}]}'), ProtocolError),
    ],
)
async def test_errors_of_the_api(answer: AnyAnswer, kind: type[AgentflowError]) -> None:
    async with opened([answer]) as (flow, _):
        with pytest.raises(kind):
            await flow.embed("a")


async def test_a_refusal_because_of_a_rate_is_repeated() -> None:
    refusals = [answers.rate_limited(ms=1)]

    def answer(request: Received) -> AnyAnswer:
        return refusals.pop() if refusals else embedded(request)

    async with opened(answer, max_retries=1) as (flow, server):
        assert await flow.embed("a") == vector("a", 4)
    assert len(server.received) == 2


async def test_a_server_that_ignores_dimensions() -> None:
    ignoring = Answer(b'{"data": [{"index": 0, "embedding": [1.0, 2.0, 3.0]}]}')
    async with opened([ignoring]) as (flow, _):
        with pytest.raises(NotSupported) as caught:
            await flow.embed("a", dimensions=2)
        assert caught.value.param == "dimensions"


async def test_costs_of_embeddings() -> None:
    prices = {SMALL: af.Price(input=1e6, output=0), "gpt-4.1-mini": af.Price(input=1, output=1)}
    async with opened(embedded, session={"prices": prices, "max_cost": 200.0}) as (flow, server):
        await flow.embed(["a", "b"])
        assert (await flow.stats()).cost == flow.runs[-1].usage.cost == 2.0
        with pytest.raises(BudgetExceeded):
            await flow.embed("x" * 200)
    assert len(server.received) == 1


async def test_embeddings_that_the_server_does_not_count_are_estimated() -> None:
    prices = {SMALL: af.Price(input=1e6, output=1e6), "gpt-4.1-mini": af.Price(input=1, output=1)}
    async with opened(
        lambda request: embedded(request, usage=None), session={"prices": prices, "max_cost": 200.0}
    ) as (flow, _):
        await flow.embed("x" * 40)  # its output costs nothing, as there is none
        assert 10 < (await flow.stats()).cost < 100


async def test_f37_a_lost_request_is_in_the_costs_of_the_session_with_those_before_it() -> None:
    prices = {SMALL: af.Price(input=1e6, output=0), "gpt-4.1-mini": af.Price(input=1, output=1)}

    def script(request: Received) -> Answer:
        return embedded(request) if len(request.body) < 1_000 else Answer(b"{}")

    async with opened(script, session={"prices": prices}) as (flow, server):
        with pytest.raises(ProtocolError):
            await flow.embed(["a", "x" * 260_000])  # two requests
        assert (await flow.stats()).cost == 1.0 + len(server.received[1].body) // 4


async def test_embeddings_that_are_left_cost_about_their_input() -> None:
    prices = {SMALL: af.Price(input=1e6, output=0), "gpt-4.1-mini": af.Price(input=1, output=1)}
    hold, text = Hold(), "x" * 400
    script: Any = [
        answers.stream(hold),
        Answer(b'{"data":[{"embedding":[1.0]}],"usage":{"prompt_tokens":1}}'),
    ]
    async with opened(script, session={"prices": prices, "max_cost": 800.0}) as (flow, server):
        async with anyio.create_task_group() as group:
            group.start_soon(flow.embed, text)
            with anyio.fail_after(20):
                await hold.reached.wait()
            group.cancel_scope.cancel()
        await server.wait_until_gone()
        await flow.embed(text)  # at most a token a byte: more than half of the cap


server = module_server(embedder=embedding_engine(SIZE, 64))


async def test_our_own_server_gives_the_embeddings_of_its_session(server: ApiServer) -> None:
    texts = ["A quick brown fox.", "A dog."]
    async with af.session(server.url.replace("http", "ws"), embed_model=EMBEDDER) as flow:
        expected = np.array(await flow.embed(texts))
        shorter = np.array(await flow.embed(texts, dimensions=5))
    url = f"{server.url}/v1"
    for options in (
        {"model": MODEL, "embed_model": EMBEDDER},
        {"embed_model": EMBEDDER},
        {"model": EMBEDDER},
    ):
        async with af.session(url, **options) as flow:
            assert np.array(await flow.embed(texts)) == pytest.approx(expected)
            assert np.array(await flow.embed(texts, dimensions=5)) == pytest.approx(shorter)
            assert flow.runs[-1].usage.prompt_tokens > 0
            assert flow.capabilities.model == options.get("model", MODEL)
            with pytest.raises(PromptTooLong):
                await flow.embed("word " * 500)
