"""Chat completions with OpenAI's own client, sync and async, whole and streamed, against the engine asked
directly."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest
from support.api_server import MODEL, ApiServer
from support.server.http_clients import CLIENTS, ClientKind, ask_engine, only_asyncio
from support.server.openai_peer import (
    ASK,
    MAX_CONTEXT,
    MESSAGES,
    SEED,
    async_client,
    called,
    chat_defaults,
    logit_server,
    sync_client,
)

from agentflow.protocol.events import Usage
from agentflow.server.completion.request import Answer, CompletionRequest

CREATE = "chat.completions.create"


anyio_backend = pytest.fixture(only_asyncio)
server = pytest.fixture(logit_server, scope="module")


@dataclass
class Streamed:
    """The chunks of one answer, put together."""

    text: str = ""
    reasons: list[str] = field(default_factory=list)
    num_roles: int = 0


def gathered(chunks: Iterable[Any], n: int = 1) -> list[Streamed]:
    answers = [Streamed() for _ in range(n)]
    for chunk in chunks:
        assert (chunk.object, chunk.model) == ("chat.completion.chunk", MODEL)
        for choice in chunk.choices:
            answer = answers[choice.index]
            if choice.delta.role is not None:
                assert (choice.delta.role, choice.delta.content, answer.text) == ("assistant", "", "")
                answer.num_roles += 1
            assert not answer.reasons
            answer.text += choice.delta.content or ""
            assert choice.logprobs is None
            if choice.finish_reason is not None:
                answer.reasons.append(choice.finish_reason)
    assert all(answer.num_roles == 1 for answer in answers)
    return answers


def same_logprobs(reported: Any, answer: Answer) -> bool:
    return [(one.token, bytes(one.bytes), one.logprob) for one in reported] == [
        (token.text, token.raw, token.logprob) for token in answer.tokens
    ] and [[(top.token, top.logprob) for top in one.top_logprobs] for one in reported] == [
        [(top.text, top.logprob) for top in token.top] for token in answer.tokens
    ]


def test_a_breakpoint_of_the_cache_is_taken(server: ApiServer) -> None:
    part = {"type": "text", "text": "Hi", "prompt_cache_breakpoint": {"mode": "explicit"}}
    plain, marked = ([{"role": "user", "content": content}] for content in ("Hi", [part]))
    with sync_client(server) as client:
        texts = [
            client.chat.completions.create(model=MODEL, messages=messages, seed=SEED, max_tokens=9)  # type: ignore[arg-type]
            .choices[0]
            .message.content
            for messages in (plain, marked)
        ]
    assert texts[0] == texts[1] != ""


@pytest.mark.anyio
async def test_the_stream_helper(server: ApiServer) -> None:
    [answer] = ask_engine(server, CompletionRequest(ASK, chat_defaults(logprobs=True, top_logprobs=3)))
    asked: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "seed": SEED}
    asked |= {"logprobs": True, "top_logprobs": 3}
    with sync_client(server) as client, client.chat.completions.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    async with async_client(server) as client, client.chat.completions.stream(**asked) as stream:
        async_kinds = [event.type async for event in stream]
        async_final = await stream.get_final_completion()
    for seen, end in ((kinds, final), (async_kinds, async_final)):
        assert {"chunk", "content.delta", "content.done", "logprobs.content.done"} <= set(seen)
        assert end.choices[0].message.content == answer.text
        assert same_logprobs(end.choices[0].logprobs.content, answer)
    [choice] = called(server, "sync", CREATE, **asked).choices
    assert same_logprobs(choice.logprobs.content, answer)
    assert len(answer.tokens) > 1


@pytest.mark.parametrize("kind", CLIENTS)
def test_several_answers_of_one_prompt(server: ApiServer, kind: ClientKind) -> None:
    request = CompletionRequest(ASK, chat_defaults(max_tokens=20), n=3)
    answers = ask_engine(server, request)
    common: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "seed": SEED, "n": 3, "max_tokens": 20}
    whole = called(server, kind, CREATE, **common)
    streamed = gathered(called(server, kind, CREATE, **common, stream=True), 3)
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    texts = [answer.text for answer in answers]
    assert (
        {choice.logprobs for choice in whole.choices}
        == {choice.message.refusal for choice in whole.choices}
        == {None}
    )
    assert [choice.message.content for choice in whole.choices] == texts
    assert [answer.text for answer in streamed] == texts
    assert len(set(texts)) > 1
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == answers[0].usage.prompt_tokens
    assert whole.usage.completion_tokens == sum(answer.usage.output_tokens for answer in answers)


@pytest.mark.parametrize("kind", CLIENTS)
def test_usage_counts_cached_tokens(server: ApiServer, kind: ClientKind) -> None:
    messages: Any = [{"role": "user", "content": f"A question that nobody asked before, {kind}."}]
    common: dict[str, Any] = {"model": MODEL, "messages": messages, "n": 2, "max_tokens": 4}
    usages = []
    for _ in range(2):
        usages.append(called(server, kind, CREATE, **common).usage)
        assert usages[-1].total_tokens == usages[-1].prompt_tokens + usages[-1].completion_tokens
    chunks = called(server, kind, CREATE, **common, stream=True, stream_options={"include_usage": True})
    plain = called(server, kind, CREATE, **common, stream=True)
    num_prompt = usages[0].prompt_tokens
    cached = [usage.prompt_tokens_details.cached_tokens for usage in usages]
    assert cached[0] < num_prompt - 10
    assert cached[1] == num_prompt - 1
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    reported = chunks[-1].usage
    assert (reported.prompt_tokens, reported.prompt_tokens_details.cached_tokens) == (
        num_prompt,
        num_prompt - 1,
    )
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert all(chunk.usage is None and chunk.choices for chunk in plain)


def test_headers_ids_and_the_log(server: ApiServer, caplog: pytest.LogCaptureFixture) -> None:
    server.call(server.service.calls.until_none)  # calls of other tests are logged by now
    with sync_client(server) as client, caplog.at_level("INFO", logger="agentflow.requests"):
        raw = client.chat.completions.with_raw_response.create(
            model=MODEL, messages=MESSAGES, max_tokens=3, extra_headers={"x-request-id": "mine-1"}
        )
        other = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=3)
        chunks = list(client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True))
        server.call(server.service.calls.until_none)  # the log is written after the answer
    assert raw.headers["x-request-id"] == "mine-1"
    assert raw.headers["content-type"] == "application/json"
    first = raw.parse()
    assert first.id.startswith("chatcmpl-")
    assert first.id != other.id
    assert first.system_fingerprint == other.system_fingerprint == chunks[0].system_fingerprint
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    records = [record.request for record in caplog.records]  # type: ignore[attr-defined]
    assert [record["is_streamed"] for record in records] == [False, False, True]
    assert all(record["model"] == MODEL and record["status"] == 200 for record in records)
    assert records[0]["id"] == "mine-1"
    assert first.usage is not None
    reported = Usage(first.usage.prompt_tokens, records[0]["cached_tokens"], first.usage.completion_tokens)
    assert reported == Usage(*[records[0][f"{name}_tokens"] for name in ("prompt", "cached", "output")])
    assert records[2]["output_tokens"] > 0


def test_without_a_limit_an_answer_may_fill_the_context(server: ApiServer) -> None:
    with sync_client(server) as client:
        whole = client.chat.completions.create(
            model=MODEL, messages=MESSAGES, extra_body={"ignore_eos": True}
        )
    assert whole.usage is not None
    assert whole.usage.total_tokens == MAX_CONTEXT
    assert whole.choices[0].finish_reason == "length"


def test_a_seed_may_be_negative(server: ApiServer) -> None:
    with sync_client(server) as client:
        texts = {
            client.chat.completions.create(model=MODEL, messages=MESSAGES, seed=seed)
            .choices[0]
            .message.content
            for seed in (-7, -7, 7)
        }
    assert len(texts) == 2
