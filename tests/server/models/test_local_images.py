"""Images in requests of each HTTP API, for a model of the engine that has vision."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import httpx2
import pytest
from support.direct_compiler import direct_compiler
from support.engine.fake_vision import TEMPLATE, TOKENIZER, FakeReader, clip, picture, vision_runner

import agentflow as af
from agentflow.engine.client import running_engine
from agentflow.engine.generator.generator import EngineGenerator
from agentflow.engine.scheduling.scheduler import SchedulerConfig
from agentflow.engine.simulator.fake_runner import FakeRunner
from agentflow.server.app import create_app
from agentflow.server.models.models import one_model
from agentflow.server.serve import running_server

pytestmark = pytest.mark.anyio

DATA = base64.b64encode(picture("cat").data).decode()
URL = f"data:image/png;base64,{DATA}"
TEXT = {"type": "text", "text": "What is it? "}
CHAT = {"messages": [{"role": "user", "content": [TEXT, {"type": "image_url", "image_url": {"url": URL}}]}]}
RESPONSE_PARTS = [{"type": "input_text", "text": TEXT["text"]}, {"type": "input_image", "image_url": URL}]
BLOCK = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": DATA}}
FRAMES: list[dict[str, Any]] = [{}, {"num_frames": 2}, {}]
REQUESTS = {
    "chat": ("/v1/chat/completions", {"max_tokens": 4} | CHAT),
    "responses": (
        "/v1/responses",
        {"max_output_tokens": 16, "input": [{"role": "user", "content": RESPONSE_PARTS}]},
    ),
    "messages": ("/v1/messages", {"max_tokens": 4, "messages": [{"role": "user", "content": [TEXT, BLOCK]}]}),
    "ollama": (
        "/api/chat",
        {
            "stream": False,
            "options": {"num_predict": 4},
            "messages": [{"role": "user", "content": "What is it? ", "images": [DATA]}],
        },
    ),
}


def opening(
    runner: FakeRunner, *, has_vision: bool = True
) -> Callable[[], AbstractAsyncContextManager[EngineGenerator]]:
    """Opens a model with vision, or without."""

    @asynccontextmanager
    async def open_generator() -> AsyncIterator[EngineGenerator]:
        opening = running_engine(lambda: (runner, TOKENIZER, SchedulerConfig()))
        async with opening as client, direct_compiler() as compiler:
            reader = FakeReader() if has_vision else None
            yield EngineGenerator(client, TEMPLATE, name="fake", compiler=compiler, reader=reader)

    return open_generator


@asynccontextmanager
async def served(*, has_vision: bool = True) -> AsyncIterator[tuple[httpx2.AsyncClient, FakeRunner]]:
    runner = vision_runner()
    app = create_app(one_model(opening(runner, has_vision=has_vision)))
    async with app.router.lifespan_context(app):
        transport = httpx2.ASGITransport(app=app)
        async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client:
            yield client, runner


@pytest.mark.parametrize("api", REQUESTS)
async def test_the_image_is_part_of_the_prompt(api: str) -> None:
    path, body = REQUESTS[api]
    async with served() as (client, runner):
        first = await client.post(path, json={"model": "fake", **body})
        assert first.status_code == 200, first.text
        again = await client.post(path, json={"model": "fake", **body})
        assert again.status_code == 200
        assert runner.num_encoded == 1


@pytest.mark.parametrize(("has_vision", "expected"), [(True, ["text", "image", "video"]), (False, ["text"])])
async def test_the_list_of_models_says_what_prompts_may_contain(
    has_vision: bool, expected: list[str]
) -> None:
    async with served(has_vision=has_vision) as (client, _):
        [row] = (await client.get("/v1/models")).json()["data"]
        assert row["input_modalities"] == expected


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_program_shows_an_image_over_the_chat_api() -> None:
    runner = vision_runner()
    async with running_server(one_model(opening(runner))) as server:
        address = server.url.replace("ws://", "http://")
        async with af.session(f"{address}/v1") as flow, flow.state() as s:
            async with s.user():
                s += af.image(picture("cat").data)
                branches = s.fork(2)
            for number, branch in enumerate(branches):
                branch += f"Question {number}?"
                branch.end()
                branch += af.assistant(af.gen("answer", max_tokens=4))
            await branches.gather("answer")
            assert branches[1]["answer"].usage.prompt_tokens > 12
    assert runner.num_encoded == 1


async def test_a_picture_counts_as_tokens_and_is_cached_with_them() -> None:
    async with served() as (client, _):
        body = {"model": "fake", "max_tokens": 4} | CHAT
        first = (await client.post("/v1/chat/completions", json=body)).json()
        again = (await client.post("/v1/chat/completions", json=body)).json()
        assert again["choices"] == first["choices"]
        num_prompt = first["usage"]["prompt_tokens"]
        assert num_prompt > 12
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == num_prompt - 1
        other = {"type": "image_url", "image_url": {"url": URL.replace(DATA, _encoded("dog"))}}
        body["messages"] = [{"role": "user", "content": [TEXT, other]}]
        third = (await client.post("/v1/chat/completions", json=body)).json()
        assert third["usage"]["prompt_tokens_details"]["cached_tokens"] < num_prompt - 12


def _encoded(name: str) -> str:
    return base64.b64encode(picture(name).data).decode()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
async def test_f37_unreadable_images_are_errors_of_a_field_of_the_request(path: str) -> None:
    url = "https://example.org/a.png"
    part: dict[str, Any] = {"type": "image_url", "image_url": {"url": url}}
    if path == "/v1/messages":
        part = {"type": "image", "source": {"type": "url", "url": url}}
    body = {"model": "fake", "max_tokens": 4, "messages": [{"role": "user", "content": [part]}]}
    async with served() as (client, _):
        answer = await client.post(path, json=body)
        error = answer.json()["error"]
        assert (answer.status_code, error.get("details", error)["param"]) == (400, "messages")


CLIP = f"data:video/mp4;base64,{base64.b64encode(clip('cat').data).decode()}"


def chat_with(*parts: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    return "/v1/chat/completions", {"messages": [{"role": "user", "content": [TEXT, *parts]}]}


def response_with(*parts: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    return "/v1/responses", {"input": [{"role": "user", "content": [RESPONSE_PARTS[0], *parts]}]}


@pytest.mark.parametrize(
    "requests",
    [
        [chat_with({"type": "video_url", "video_url": {"url": CLIP, **frames}}) for frames in FRAMES],
        [response_with({"type": "input_video", "video_url": CLIP, **frames}) for frames in FRAMES],
    ],
    ids=["chat", "responses"],
)
async def test_videos(requests: list[tuple[str, dict[str, Any]]]) -> None:
    """Requests with other numbers of frames are about other frames."""
    async with served() as (client, runner):
        for path, body in requests:
            answer = await client.post(path, json={"model": "fake", **body})
            assert answer.status_code == 200, answer.text
        assert runner.num_encoded == 2


@pytest.mark.parametrize(
    ("request_", "param"),
    [
        (
            chat_with({"type": "video_url", "video_url": {"url": CLIP, "num_frames": 0}}),
            "messages[0].content[1].video_url.url",
        ),
        (
            chat_with({"type": "video_url", "video_url": {"url": URL}}),
            "messages[0].content[1].video_url.url",
        ),
        (response_with({"type": "input_video", "video_url": URL}), "input[0].content[1].video_url"),
    ],
)
async def test_wrong_videos(request_: tuple[str, dict[str, Any]], param: str) -> None:
    path, body = request_
    async with served() as (client, _):
        answer = await client.post(path, json={"model": "fake", **body})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("media", [CHAT, chat_with({"type": "video_url", "video_url": {"url": CLIP}})[1]])
async def test_a_model_without_vision_takes_no_images(media: dict[str, Any]) -> None:
    async with served(has_vision=False) as (client, _):
        answer = await client.post("/v1/chat/completions", json={"model": "fake"} | media)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "messages[0].content[1]"
