"""The fake servers of the API tests, as the vendors' own clients read them."""

from __future__ import annotations

from typing import Any

import anthropic
import openai
import pytest
from anthropic.types import ToolUseBlock
from support.apis import anthropic_answers, openai_answers, responses_answers
from support.apis.fake_server import Answer, FakeServer, RawAnswer, fake_server
from support.apis.hostile_answers import hostile
from support.server.http_clients import only_asyncio

pytestmark = pytest.mark.anyio
anyio_backend = pytest.fixture(only_asyncio)

MESSAGES: Any = [{"role": "user", "content": "Hello"}]


def openai_client(server: FakeServer) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(api_key="sk-1", base_url=f"{server.url}/v1", max_retries=0)


def anthropic_client(server: FakeServer) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(api_key="sk-1", base_url=server.url, max_retries=0)


async def test_openais_client_reads_a_stream() -> None:
    answer = openai_answers.stream(
        openai_answers.reasoning_chunks("Hm", "m."),
        openai_answers.text_chunks("Hel", "lo"),
        openai_answers.ending(usage=openai_answers.usage(20, 5, cached=16, reasoning=2)),
    )
    async with fake_server([answer]) as server, openai_client(server) as client:
        chunks = [
            chunk
            async for chunk in await client.chat.completions.create(
                model="gpt-4o", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
            )
        ]
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
    assert "".join(delta.content or "" for delta in deltas) == "Hello"
    assert "".join((delta.model_extra or {}).get("reasoning", "") for delta in deltas) == "Hmm."
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert (usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens) == (20, 16)
    assert server.last.path == "/v1/chat/completions"
    assert server.last.headers["authorization"] == "Bearer sk-1"
    assert server.last.json["messages"] == MESSAGES


async def test_openais_client_reads_tool_calls_and_logprobs() -> None:
    calls = openai_answers.call_stream(("c1", "find", ['{"a"', ": 1}"]), ("c2", "look", ["{}"]))
    tokens = openai_answers.stream(
        openai_answers.logprob_chunk("A", -0.1, ("A", -0.1), ("B", -2.5)), openai_answers.ending()
    )
    async with fake_server([calls, tokens]) as server, openai_client(server) as client:
        async with client.chat.completions.stream(model="gpt-4o", messages=MESSAGES) as stream:
            called = (await stream.get_final_completion()).choices[0]
        async with client.chat.completions.stream(model="gpt-4o", messages=MESSAGES) as stream:
            scored = (await stream.get_final_completion()).choices[0]
    assert called.finish_reason == "tool_calls"
    found = [
        (call.id, call.function.name, call.function.arguments) for call in called.message.tool_calls or []
    ]
    assert found == [("c1", "find", '{"a": 1}'), ("c2", "look", "{}")]
    assert scored.logprobs is not None
    assert scored.logprobs.content is not None
    assert [top.token for top in scored.logprobs.content[0].top_logprobs] == ["A", "B"]


async def test_openais_client_reads_a_response() -> None:
    answer = responses_answers.stream(
        responses_answers.reasoning(["Hm", "m."], encrypted="gAAA"),
        responses_answers.message("He", "llo", index=1),
        responses_answers.call("c1", "find", '{"a"', ": 1}", index=2),
        responses_answers.ending(usage=responses_answers.usage(20, 5, cached=16, reasoning=2)),
    )
    async with fake_server([answer]) as server, openai_client(server) as client:
        events = [
            event
            async for event in await client.responses.create(model="gpt-5.5", input=MESSAGES, stream=True)
        ]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    items = [event.item for event in events if event.type == "response.output_item.done"]
    assert "".join(deltas) == "Hello"
    assert [item.type for item in items] == ["reasoning", "message", "function_call"]
    last = events[-1]
    assert last.type == "response.completed"
    assert last.response.usage is not None
    assert last.response.usage.input_tokens_details.cached_tokens == 16
    assert (server.last.path, server.last.json["input"]) == ("/v1/responses", MESSAGES)


async def test_anthropics_client_reads_a_message() -> None:
    answer = anthropic_answers.stream(
        anthropic_answers.beginning(4, cached=100, written=20),
        anthropic_answers.PING,
        anthropic_answers.thinking_block("Let me ", "see.", signature="sig"),
        anthropic_answers.text_block("I ", "look.", index=1),
        anthropic_answers.call_block("toolu_1", "find", '{"a":', " 1}", index=2),
        anthropic_answers.ending("tool_use", 30, thinking=10),
    )
    async with (
        fake_server([answer]) as server,
        anthropic_client(server) as client,
        client.messages.stream(model="claude-opus-4-5", max_tokens=99, messages=MESSAGES) as stream,
    ):
        message = await stream.get_final_message()
    thinking, text, call = message.content
    assert (thinking.type, thinking.to_dict()["signature"]) == ("thinking", "sig")
    assert text.to_dict()["text"] == "I look."
    assert isinstance(call, ToolUseBlock)
    assert (call.id, call.name, call.input) == ("toolu_1", "find", {"a": 1})
    assert message.stop_reason == "tool_use"
    usage = message.usage
    assert (usage.cache_read_input_tokens, usage.cache_creation_input_tokens) == (100, 20)
    assert usage.output_tokens == 30
    assert (server.last.path, server.last.headers["authorization"]) == ("/v1/messages", "Bearer sk-1")


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (openai_answers.WRONG_KEY, openai.AuthenticationError),
        (openai_answers.NO_MODEL, openai.NotFoundError),
        (openai_answers.REFUSED_PARAMETER, openai.BadRequestError),
        (openai_answers.rate_limited(ms=20), openai.RateLimitError),
        (openai_answers.BROKEN, openai.InternalServerError),
        (anthropic_answers.WRONG_KEY, anthropic.AuthenticationError),
        (anthropic_answers.NO_MODEL, anthropic.NotFoundError),
        (anthropic_answers.REFUSED_PARAMETER, anthropic.BadRequestError),
        (anthropic_answers.rate_limited(s=2), anthropic.RateLimitError),
        (anthropic_answers.OVERLOADED, anthropic.InternalServerError),
        (anthropic_answers.BROKEN, anthropic.InternalServerError),
        (
            anthropic_answers.stream(
                anthropic_answers.beginning(), anthropic_answers.error_event("Overloaded")
            ),
            anthropic.APIStatusError,
        ),
    ],
)
async def test_clients_raise_the_error(answer: Answer, error: Any) -> None:
    async def ask() -> None:
        if issubclass(error, anthropic.APIStatusError):
            asked: Any = {"model": "claude", "max_tokens": 9, "messages": MESSAGES}
            async with anthropic_client(server) as client, client.messages.stream(**asked) as stream:
                await stream.get_final_message()
        else:
            async with openai_client(server) as vendor:
                await vendor.chat.completions.create(model="gpt-4o", messages=MESSAGES)

    async with fake_server([answer]) as server:
        with pytest.raises(error) as raised:
            await ask()
    assert raised.value.request_id == "req_1"
    assert raised.value.response.headers.items() >= answer.headers.items()


def test_hostile_answers_are_all_different() -> None:
    events = [b"data: 1\n\n", b"data: 2\n\n", b"data: 3\n\n"]
    answers = [make() for make in hostile(events).values()]
    assert all(isinstance(answer, Answer | RawAnswer) for answer in answers)
    assert len({repr(answer) for answer in answers}) == len(answers)
