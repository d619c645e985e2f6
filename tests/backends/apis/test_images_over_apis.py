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
from support.apis.api_sessions import anthropic_session, compatible_session, openai_session
from support.apis.fake_server import FakeServer, fake_server

import agentflow as af
from agentflow.backends.apis.generation.conversation import ApiContext
from agentflow.backends.apis.http import file_slots
from agentflow.backends.apis.http.file_slots import (
    FilledBody,
    files_in,
    filled_size,
    has_slots,
    slot,
    slot_url,
    without_nonce,
)
from agentflow.backends.apis.openai import OpenAI
from agentflow.protocol.images import Image, image_file

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
    script = [ANSWERS[api]] * num_answers
    opening = (
        anthropic_session(script, session=options)
        if api == "messages"
        else openai_session(script, api=api, session=options)
    )
    async with opening as (flow, server):
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
    """The value without the marks of Anthropic's cache."""
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
    opening = compatible_session([ANSWERS["chat"]], videos=True)
    async with opening as (flow, server), flow.state() as s:
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
    async with openai_session([], "gpt-3.5-turbo") as (flow, _), flow.state() as s:
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
            node.encoded(lambda message: slot_url(message.images[0].image).encode())
        return context

    tracemalloc.start()
    try:
        contexts = [asked() for _ in range(10)]
        assert tracemalloc.get_traced_memory()[0] < 1_000_000
    finally:
        tracemalloc.stop()
    assert len(contexts) == 10


async def sent(body: bytes) -> bytes:
    return b"".join([piece async for piece in FilledBody(body)])


@pytest.mark.parametrize("num_bytes", [0, 1, 2, 393_216, 393_217, 1_000_001])
async def test_a_slot_becomes_the_file_while_the_body_is_sent(num_bytes: int) -> None:
    image = image_file(DATA + bytes(num_bytes))
    body = json.dumps({"a": slot_url(image), "b": slot(image), "c": "file-" + "0" * 64}).encode()
    whole = json.dumps({"a": image.url, "b": image.base64, "c": "file-" + "0" * 64}).encode()
    assert has_slots(body)
    assert not has_slots(whole)
    assert len(body) < 600
    assert filled_size(body) == len(whole)
    assert await sent(body) == await sent(body) == whole
    pieces = [piece async for piece in FilledBody(body)]
    assert max(map(len, pieces)) <= 600_000
    assert slot(image).encode() not in without_nonce(body)


async def test_a_slot_has_its_file_while_any_session_has_it() -> None:
    data = DATA + b"in two sessions"
    first, second = [Image(image_file(data).source, "image/png", data) for _ in range(2)]
    body = f"{slot(first)}{slot(second)}".encode()
    del second
    assert files_in(body) == [first, first]
    third = Image(first.source, "image/png", data)
    slot(third)
    del first
    assert files_in(body) == [third, third]
    del third
    with pytest.raises(af.errors.EngineFailed):
        files_in(body)


def test_a_file_is_found_while_another_with_its_bytes_is_forgotten() -> None:
    image = image_file(b"\x89PNG\r\nforgotten")
    body = slot(image).encode()
    digest = image.source.removeprefix("sha256:")

    def ends() -> None:  # as a reference to a file that ends in this moment
        file_slots._forget(digest, ends)  # type: ignore[arg-type]

    known = file_slots._files[digest]
    file_slots._files[digest] = type(known)([ends, *known])  # type: ignore[list-item]
    assert files_in(body) == [image]


async def test_a_request_that_is_repeated_has_its_image_again() -> None:
    answers = [openai_answers.error(503, "overloaded"), ANSWERS["chat"]]
    async with fake_server(answers) as server:
        backend = OpenAI("gpt-4o", base_url=f"{server.url}/v1", api_key="sk-1", api="chat", max_retries=1)
        async with af.session(backend=backend) as flow, flow.state() as s:
            s += af.user(af.image(DATA + bytes(2_000_000))) + af.assistant(af.gen("x"))
            assert await s["x"] == "A cat"
    first, second = server.received
    assert first.json["messages"] == second.json["messages"]
    url = first.json["messages"][0]["content"][0]["image_url"]["url"]
    assert url == image_file(DATA + bytes(2_000_000)).url
    assert int(first.headers["content-length"]) > 2_600_000
