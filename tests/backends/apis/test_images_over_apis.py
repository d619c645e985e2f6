"""Images of a program in the requests of each API. The requests are checked against the vendors' types."""

from __future__ import annotations

import base64
import json
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from anthropic.types.message_create_params import MessageCreateParamsStreaming
from openai.types.chat.completion_create_params import CompletionCreateParamsStreaming
from openai.types.responses.response_create_params import ResponseCreateParamsStreaming
from pydantic import TypeAdapter
from support.apis import anthropic_answers, openai_answers, responses_answers
from support.apis.fake_server import FakeServer, fake_server

import agentflow as af
from agentflow.backends.apis.anthropic import Anthropic
from agentflow.backends.apis.conversation import ApiContext
from agentflow.backends.apis.openai import OpenAI
from agentflow.protocol.images import image_file

pytestmark = pytest.mark.anyio

DATA = b"\x89PNG\r\n\x1a\n rest"
ENCODED = base64.b64encode(DATA).decode()
URL = "https://example.org/x.png"
TYPES: dict[str, Any] = {
    "chat": CompletionCreateParamsStreaming,
    "responses": ResponseCreateParamsStreaming,
    "messages": MessageCreateParamsStreaming,
}
ANSWERS = {
    "chat": openai_answers.text_stream("A", " cat"),
    "responses": responses_answers.text_stream("A", " cat"),
    "messages": anthropic_answers.text_stream("A", " cat"),
}


@asynccontextmanager
async def opened(
    api: str, num_answers: int = 1, **options: Any
) -> AsyncIterator[tuple[af.Session, FakeServer]]:
    """A session over one of the APIs."""
    async with fake_server([ANSWERS[api]] * num_answers) as server:
        backend: Any
        if api == "messages":
            backend = Anthropic("claude-opus-4-5", base_url=server.url, api_key="sk-1", max_retries=0)
        else:
            backend = OpenAI("gpt-4o", base_url=f"{server.url}/v1", api_key="sk-1", api=api, max_retries=0)
        async with af.session(backend=backend, **options) as flow:
            yield flow, server
        for request in server.received:
            types = TypeAdapter(TYPES[api])
            types.dump_json(types.validate_python(request.json))


CONTENT = {
    "chat": [
        {"type": "text", "text": "Compare "},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{ENCODED}"}},
        {"type": "text", "text": " with "},
        {"type": "image_url", "image_url": {"url": URL}},
    ],
    "responses": [
        {"type": "input_text", "text": "Compare "},
        {"type": "input_image", "image_url": f"data:image/png;base64,{ENCODED}", "detail": "auto"},
        {"type": "input_text", "text": " with "},
        {"type": "input_image", "image_url": URL, "detail": "auto"},
    ],
    "messages": [
        {"type": "text", "text": "Compare "},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ENCODED}},
        {"type": "text", "text": " with "},
        {"type": "image", "source": {"type": "url", "url": URL}},
    ],
}


def without_marks(value: Any) -> Any:
    """Without the marks of Anthropic's cache."""
    return json.loads(json.dumps(value).replace(', "cache_control": {"type": "ephemeral"}', ""))


@pytest.mark.parametrize("api", TYPES)
async def test_an_image_stands_where_the_program_put_it(api: str) -> None:
    async with opened(api) as (flow, server), flow.state() as s:
        s += af.user("Compare ", af.image(DATA), " with ", af.image(URL)) + af.assistant(af.gen("x"))
        assert await s["x"] == "A cat"
        assert "Compare <image> with <image>" in await s.text()
    sent = server.last.json["input" if api == "responses" else "messages"][0]
    assert without_marks(sent) == {"role": "user", "content": CONTENT[api]}


@pytest.mark.parametrize("api", TYPES)
async def test_a_turn_may_be_an_image_alone(api: str) -> None:
    async with opened(api, 2) as (flow, server), flow.state() as s:
        s += af.user(af.image(URL)) + af.assistant(af.gen("x"))
        await s["x"]
        s += af.user("And now?") + af.assistant(af.gen("y"))
        await s["y"]
    first, second = [each.json["input" if api == "responses" else "messages"] for each in server.received]
    assert without_marks(first)[0] == without_marks(second)[0]
    assert len(first[0]["content"]) == 1


@pytest.mark.parametrize("api", ["responses", "messages"])
async def test_the_result_of_a_tool_may_have_an_image(api: str) -> None:
    async with opened(api) as (flow, server), flow.state() as s:
        call = {"id": "call_1", "type": "function", "function": {"name": "screenshot", "arguments": "{}"}}
        s += af.conversation(
            [
                {"role": "user", "content": "What is on the screen?"},
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {
                    "role": "tool",
                    "tool_call_id": "call_1",
                    "content": [
                        {"type": "text", "text": "The screen: "},
                        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{ENCODED}"}},
                    ],
                },
            ]
        ) + af.gen("x")
        assert await s["x"] == "A cat"
    if api == "responses":
        found = server.last.json["input"][-1]["output"]
    else:
        found = server.last.json["messages"][-1]["content"][0]["content"]
    assert without_marks(found)[1:] == CONTENT[api][1:2]


async def test_the_chat_api_has_the_image_of_a_result_in_the_next_message() -> None:
    async with opened("chat") as (flow, server), flow.state() as s:
        s += af.user("Look.") + af.tool_result(
            "The screen: ", af.image(DATA), call=af.ToolCall("look", {}, id="c1")
        )
        s += af.user("And?") + af.assistant(af.gen("x"))
        assert await s["x"] == "A cat"
    _, result, shown, question = server.last.json["messages"]
    assert (result["role"], result["content"]) == ("tool", "The screen: [image 1]")
    assert (shown["role"], shown["content"][1]) == ("user", CONTENT["chat"][1])
    assert question["content"] == "And?"


async def test_a_server_of_vllm_is_sent_videos() -> None:
    clip = b"\x00\x00\x00\x18ftypmp42 and more"
    async with fake_server([ANSWERS["chat"]]) as server:
        backend = af.OpenAICompatible(f"{server.url}/v1", "m", flavour="vllm", videos=True)
        async with af.session(backend=backend) as flow, flow.state() as s:
            s += af.user("What happens? ", af.video(clip)) + af.assistant(af.gen("x"))
            assert await s["x"] == "A cat"
            assert "What happens? <video>" in await s.text()
            with pytest.raises(af.errors.NotSupported) as caught:
                s += af.user(af.video(clip, num_frames=4))
            assert caught.value.param == "num_frames"
    part = server.last.json["messages"][0]["content"][1]
    assert part == {
        "type": "video_url",
        "video_url": {"url": f"data:video/mp4;base64,{base64.b64encode(clip).decode()}"},
    }


async def test_only_the_user_and_tools_show_images() -> None:
    for turn in (af.system, af.assistant):
        async with opened("chat") as (flow, _), flow.state() as s:
            s += turn(af.image(DATA))
            with pytest.raises(af.errors.NotSupported):
                await s
    async with opened("chat") as (flow, _), flow.state() as s:
        s += af.image(DATA)
        with pytest.raises(af.errors.NotSupported):
            await s


async def test_a_model_without_vision_takes_no_image() -> None:
    async with fake_server([]) as server:
        backend = OpenAI("gpt-3.5-turbo", base_url=f"{server.url}/v1", api_key="sk-1")
        async with af.session(backend=backend) as flow, flow.state() as s:
            with pytest.raises(af.errors.NotSupported):
                s += af.user(af.image(DATA))


@pytest.mark.parametrize("api", TYPES)
async def test_an_image_costs_its_tokens_and_not_its_bytes(api: str) -> None:
    price = af.Price(input=1.0, output=1.0)
    prices = {"gpt-4o": price, "claude-opus-4-5": price}
    async with opened(api, prices=prices, max_cost=0.2) as (flow, _), flow.state() as s:
        s += af.user("Look", af.image(DATA + bytes(3_000_000)))
        s += af.assistant(af.gen("x", max_tokens=10))
        assert await s["x"] == "A cat"


async def test_an_address_of_an_image_costs_the_tokens_of_the_image() -> None:
    prices = {"gpt-4o": af.Price(input=1.0, output=1.0)}
    async with opened("chat", 0, prices=prices, max_cost=0.02) as (flow, _), flow.state() as s:
        s += af.user("Look", af.image(URL)) + af.assistant(af.gen("x", max_tokens=10))
        with pytest.raises(af.BudgetExceeded):
            await s["x"]


def test_states_with_the_same_image_keep_its_bytes_once() -> None:
    image = image_file(DATA + bytes(1_000_000))

    def asked() -> ApiContext:
        context = ApiContext()
        context.begin_role("user")
        context.show(image)
        context.end_role()
        for node in context.messages():
            node.encoded(lambda message: message.images[0].image.url.encode())
        return context

    tracemalloc.start()
    try:
        contexts = [asked() for _ in range(10)]
        assert tracemalloc.get_traced_memory()[0] < 1_000_000
    finally:
        tracemalloc.stop()
    assert len(contexts) == 10
