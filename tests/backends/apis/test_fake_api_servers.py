"""The fake servers of the API tests, as the vendors' own clients read them."""

from __future__ import annotations

from typing import Any

import anthropic
import anyio
import httpx2
import openai
import pytest
from anthropic.types import ToolUseBlock
from support.apis import anthropic_answers, openai_answers, responses_answers
from support.apis.fake_server import Answer, Close, FakeServer, Forever, Hold, RawAnswer, Reset, fake_server
from support.apis.hostile_answers import hostile, silent, slow, written
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
    ],
)
async def test_openais_client_raises_the_error(answer: Answer, error: type[openai.APIStatusError]) -> None:
    async with fake_server([answer]) as server, openai_client(server) as client:
        with pytest.raises(error) as raised:
            await client.chat.completions.create(model="gpt-4o", messages=MESSAGES)
    assert raised.value.request_id == "req_1"
    assert raised.value.response.headers.items() >= answer.headers.items()


@pytest.mark.parametrize(
    ("answer", "error"),
    [
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
async def test_anthropics_client_raises_the_error(
    answer: Answer, error: type[anthropic.APIStatusError]
) -> None:
    async with fake_server([answer]) as server, anthropic_client(server) as client:
        with pytest.raises(error):
            async with client.messages.stream(model="claude", max_tokens=9, messages=MESSAGES) as stream:
                await stream.get_final_message()


async def test_a_connection_is_reused_and_an_unused_answer_waits() -> None:
    answers = [openai_answers.completion("one"), openai_answers.completion("two")]
    async with fake_server(answers) as server, openai_client(server) as client:
        for expected in ("one", "two"):
            found = await client.chat.completions.create(model="gpt-4o", messages=MESSAGES)
            assert found.choices[0].message.content == expected
        with pytest.raises(openai.InternalServerError, match="has ended"):
            await client.chat.completions.create(model="gpt-4o", messages=MESSAGES)
    assert server.num_connections == 1
    assert [request.connection for request in server.received] == [1, 1, 1]


async def test_a_script_may_be_a_function_of_the_request() -> None:
    def script(request: Any) -> Answer:
        return openai_answers.completion(request.json["messages"][0]["content"].upper())

    async with fake_server(script) as server, openai_client(server) as client:
        found = await client.chat.completions.create(model="gpt-4o", messages=MESSAGES)
    assert found.choices[0].message.content == "HELLO"


async def received(server: FakeServer) -> bytes:
    """The raw body of a request that is not answered as HTTP wants it."""
    async with httpx2.AsyncClient() as client:
        found = b""
        async with client.stream("POST", server.url) as response:
            async for data in response.aiter_raw():
                found += data
        return found


async def test_a_held_stream_goes_on_when_the_test_says_so() -> None:
    hold = Hold()
    async with (
        fake_server([slow([b"one", b"two"], hold)]) as server,
        httpx2.AsyncClient() as client,
        client.stream("POST", server.url) as response,
    ):
        parts = response.aiter_raw()
        assert await anext(parts) == b"one"
        await hold.reached.wait()
        hold.go_on()
        assert await anext(parts) == b"two"


@pytest.mark.parametrize("steps", [[b"one", Hold()], [b"one", Forever(b"more")]])
async def test_the_server_notices_that_the_client_has_gone(steps: list[Any]) -> None:
    async with fake_server([Answer(steps)]) as server:
        async with httpx2.AsyncClient() as client, client.stream("POST", server.url) as response:
            assert await anext(response.aiter_raw())
        await server.wait_until_gone()


async def test_a_silent_server_gets_the_request() -> None:
    hold = Hold()
    async with fake_server([silent(hold)]) as server, anyio.create_task_group() as group:
        group.start_soon(received, server)
        await server.wait_for_requests(1)
        await hold.reached.wait()
        group.cancel_scope.cancel()


@pytest.mark.parametrize("end", [Close(), Reset()])
async def test_a_broken_connection_is_an_error_of_the_client(end: Close | Reset) -> None:
    async with fake_server([Answer([b"one", end])]) as server:
        with pytest.raises(httpx2.HTTPError):
            await received(server)


async def test_a_stream_is_cut_anywhere() -> None:
    async with fake_server([written([b"data: 1\n\n", "é".encode()], 3)]) as server:
        assert await received(server) == "data: 1\n\né".encode()


def test_hostile_answers_are_all_different() -> None:
    events = [b"data: 1\n\n", b"data: 2\n\n", b"data: 3\n\n"]
    answers = [make() for make in hostile(events).values()]
    assert all(isinstance(answer, Answer | RawAnswer) for answer in answers)
    assert len({repr(answer) for answer in answers}) == len(answers)
