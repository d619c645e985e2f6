"""Small local models with vision, from a request to its answer: the same answers as transformers, in sessions
and over each HTTP API, with the engine in this process and in one that dies."""

from __future__ import annotations

import base64
import io
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import describe_image
import httpx2
import pytest
from gguf import GGUFWriter
from rich.console import Console
from support.engine.gguf_models import write_vocabulary
from support.engine.gguf_vision import write_gguf_files
from support.engine.vision_folders import EARLIER, FAMILIES, VisionFolder, picture_file
from support.processes import signal_child
from support.server.http_clients import only_asyncio

import agentflow as af
from agentflow.engine.options import EngineOptions
from agentflow.engine.tenant import ANONYMOUS
from agentflow.protocol.images import image_file
from agentflow.protocol.sampling import GenParams
from agentflow.server.app import create_app
from agentflow.server.models.models import EngineModel, Models
from agentflow.server.models.open_models import open_models

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(240)]

KV_TOKENS = 3000
MAX_TOKENS = 6
Folders = Callable[[str], VisionFolder]


anyio_backend = pytest.fixture(only_asyncio)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    made: dict[str, VisionFolder] = {}

    def folder(name: str) -> VisionFolder:
        if name not in made:
            made[name] = VisionFolder(name, tmp_path_factory.mktemp(name))
        return made[name]

    return folder


def session(folder: VisionFolder) -> af.Session:
    return af.session(backend=af.Embedded(str(folder.path), kv_tokens=KV_TOKENS, dtype="float32"))


def asked(*parts: str) -> Any:
    """A turn of the user; parts that begin with # are pictures."""
    return af.user(*[af.image(picture_file(part[1:])) if part[:1] == "#" else part for part in parts])


ANSWER = af.gen("answer", max_tokens=MAX_TOKENS, temperature=0)


@pytest.mark.parametrize("name", FAMILIES)
async def test_answers_are_those_of_transformers(folders: Folders, name: str) -> None:
    folder = folders(name)
    prompts = [["#cat", "Is it red?"], ["#dog", "Is it red?"], ["Compare ", "#cat", "with ", "#dog", "."]]
    if name == "llava_onevision":  # transformers makes no tiles in prompts with several images
        prompts.pop()
    answers = []
    async with session(folder) as flow:
        assert flow.capabilities.images
        for parts in prompts:
            s = flow.state()
            s += asked(*parts) + af.assistant(ANSWER)
            wanted, ids = folder.answer([("user", parts)], MAX_TOKENS)
            assert await s["answer"] == wanted
            usage = s["answer"].usage
            assert usage.prompt_tokens + usage.output_tokens == len(ids)
            answers.append(wanted)
    assert len({*answers}) == len(answers)  # they depend on the pictures


@pytest.mark.parametrize("name", ["smolvlm", "qwen2_5_vl"])
async def test_gguf_files(folders: Folders, name: str, tmp_path: Path) -> None:
    """The model of a folder, in a GGUF file with a projector file next to it."""
    folder = folders(name)

    def write_texts(writer: GGUFWriter) -> None:
        write_vocabulary(folder.path, writer)
        writer.add_chat_template(folder.family.template)

    path = write_gguf_files(folder.path, tmp_path, vocabulary=write_texts)
    async with af.session(backend=af.Embedded(str(path), kv_tokens=KV_TOKENS, dtype="float32")) as flow:
        s = flow.state()
        parts = ["Compare ", "#cat", "with ", "#dog", "."]
        s += asked(*parts) + af.assistant(ANSWER)
        assert await s["answer"] == folder.answer([("user", parts)], MAX_TOKENS)[0]


async def test_later_questions_compute_their_tokens_only(folders: Folders) -> None:
    folder = folders("smolvlm")
    async with session(folder) as flow:
        s = flow.state()
        s += asked("#cat", "Is it red?") + af.assistant(ANSWER)
        turns = [("user", ["#cat", "Is it red?"])]
        first, ids = folder.answer(turns, MAX_TOKENS)
        assert await s["answer"] == first
        s += asked("And blue?") + af.assistant(ANSWER)
        turns += [("assistant", [EARLIER]), ("user", ["And blue?"])]
        assert await s["answer"] == folder.answer(turns, MAX_TOKENS, ids[-MAX_TOKENS:])[0]
        # The template writes a space before the answer, so the answer's keys and values are computed again.
        assert s["answer"].usage.cached_tokens >= len(ids) - MAX_TOKENS
        shared = flow.state()
        async with shared.user():
            shared += af.image(picture_file("dog"))
            forks = shared.fork(3)
        for number, fork in enumerate(forks):
            fork += f"Question {number}?"
            fork.end()
            fork += af.assistant(ANSWER)
        for number, fork in enumerate(forks):
            wanted, _ = folder.answer([("user", ["#dog", f"Question {number}?"])], MAX_TOKENS)
            assert await fork["answer"] == wanted
        # The picture is computed for one of them, or before all of them.
        usages = [fork["answer"].usage for fork in forks]
        assert sum(usage.prompt_tokens - usage.cached_tokens < 40 for usage in usages) >= 2


async def test_the_example_describes_a_picture(folders: Folders) -> None:
    console = Console(file=io.StringIO(), width=120)
    async with session(folders("smolvlm")) as flow:
        await describe_image.main(flow, console)
    assert all(question in console.file.getvalue() for question in describe_image.QUESTIONS)


@asynccontextmanager
async def served(folder: VisionFolder) -> AsyncIterator[tuple[EngineModel, httpx2.AsyncClient]]:
    """The model, with its engine in a process, and a client of its server."""
    options = EngineOptions(model=str(folder.path), kv_tokens=KV_TOKENS, dtype="float32")
    opened: list[EngineModel] = []

    @asynccontextmanager
    async def opening() -> AsyncIterator[Models]:
        async with open_models({"viewer": options}) as models:
            [model] = models
            assert isinstance(model, EngineModel)
            opened.append(model)
            yield models

    app = create_app(opening)
    async with app.router.lifespan_context(app):
        transport = httpx2.ASGITransport(app=app)
        async with httpx2.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as client:
            yield opened[0], client


DATA = base64.b64encode(picture_file("cat")).decode()
URL = f"data:image/png;base64,{DATA}"
TEXT = "What is it?"
SOURCE = {"type": "base64", "media_type": "image/png", "data": DATA}


def turn(*content: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [*content]}]


REQUESTS: dict[str, tuple[str, dict[str, Any], Callable[[Any], str]]] = {
    "chat": (
        "/v1/chat/completions",
        {
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
            "messages": turn(
                {"type": "image_url", "image_url": {"url": URL}}, {"type": "text", "text": TEXT}
            ),
        },
        lambda answer: answer["choices"][0]["message"]["content"],
    ),
    "responses": (
        "/v1/responses",
        {
            "max_output_tokens": 16,
            "temperature": 0,
            "input": turn({"type": "input_image", "image_url": URL}, {"type": "input_text", "text": TEXT}),
        },
        lambda answer: answer["output"][0]["content"][0]["text"],
    ),
    "messages": (
        "/v1/messages",
        {
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
            "messages": turn({"type": "image", "source": SOURCE}, {"type": "text", "text": TEXT}),
        },
        lambda answer: answer["content"][0]["text"],
    ),
    "ollama": (
        "/api/chat",
        {
            "stream": False,
            "options": {"num_predict": MAX_TOKENS, "temperature": 0},
            "messages": [{"role": "user", "content": TEXT, "images": [DATA]}],
        },
        lambda answer: answer["message"]["content"],
    ),
}


async def test_each_api_and_the_death_of_the_engine(folders: Folders) -> None:
    """One server, because its engine takes seconds to start."""
    folder = folders("smolvlm")
    async with served(folder) as (model, client):
        for api, (path, body, text_of) in REQUESTS.items():
            response = await client.post(path, json={"model": "viewer", **body})
            assert response.status_code == 200, response.text
            wanted, _ = folder.answer([("user", ["#cat", TEXT])], body.get("max_output_tokens", MAX_TOKENS))
            assert text_of(response.json()) == wanted, api
        generator = model.generator(ANONYMOUS)
        context = generator.open("")
        generator.begin_role(context, "user")
        generator.image(context, image_file(picture_file("dog")))
        generator.fill(context, TEXT)
        generator.end_role(context)
        generator.begin_role(context, "assistant")
        killed: list[int] = []

        def on_text(_: str) -> None:
            if not killed:
                killed.append(model.client.engine.pid)
                signal_child(killed[0], signal.SIGKILL)

        params = GenParams(max_tokens=48, temperature=0.0)
        found = await generator.generate(context, params, on_text)
        assert model.client.engine.restarts == 1
        assert found.text == folder.answer([("user", ["#dog", TEXT])], 48)[0]
