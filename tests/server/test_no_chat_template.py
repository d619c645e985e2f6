"""A model without a chat template: every interface explains the error, and accepts a template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx2
import pytest
from support.api_server import MODEL, ApiServer
from support.chat_template_shapes import CHATML
from support.engine.random_model import write_random_model
from support.fake_engine import FakeEngine
from support.server.http_clients import only_asyncio
from support.server.module_servers import module_server

import agentflow as af
from agentflow.engine.options import EngineOptions
from agentflow.engine.tenant import ANONYMOUS
from agentflow.engine.text.chat_template import ChatTemplate
from agentflow.errors import BadArgument, BadModelFolder
from agentflow.server.config.config import Flags, load_config
from agentflow.server.models.open_models import open_models

anyio_backend = pytest.fixture(only_asyncio)

TURNS = [{"role": "user", "content": "Hi"}]
SCHEMA = {"type": "object", "properties": {}}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": SCHEMA}}]
WAYS_OUT = ("/v1/completions", "--chat-template", "chat_template=")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model whose folder has no chat template."""
    folder = write_random_model(tmp_path_factory.mktemp("base"))
    (folder / "chat_template.jinja").unlink()
    return folder


server = module_server(template=ChatTemplate(None), constraints=False)


@pytest.fixture
def template(tmp_path: Path) -> Path:
    file = tmp_path / "template.jinja"
    file.write_text(CHATML, encoding="utf-8")
    return file


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": TURNS}),
        ("/v1/chat/completions", {"messages": TURNS, "tools": TOOLS}),
        ("/v1/responses", {"input": "Hi"}),
        ("/v1/messages", {"messages": TURNS, "max_tokens": 4}),
        ("/api/chat", {"messages": TURNS, "stream": False}),
        ("/api/generate", {"prompt": "Hi", "system": "Be kind.", "stream": False}),
        ("/tokenize", {"messages": TURNS}),
    ],
)
def test_f42e_each_api_says_what_to_do(server: ApiServer, path: str, body: dict[str, Any]) -> None:
    answer = httpx2.post(f"{server.url}{path}", json={"model": MODEL, **body})
    assert answer.status_code == 400
    assert all(way in answer.text for way in WAYS_OUT)
    text = httpx2.post(f"{server.url}/v1/completions", json={"model": MODEL, "prompt": "Hi"})
    assert text.status_code == 200


@pytest.mark.anyio
@pytest.mark.parametrize(
    "asked",
    [af.user("Hi"), af.reply("answer"), af.conversation(TURNS)],
    ids=["turn", "reply", "conversation"],
)
async def test_f42e_a_program_is_told_what_to_do(asked: Any) -> None:
    async with af.session(backend=FakeEngine(template=ChatTemplate(None))) as flow:
        with pytest.raises(af.errors.NotSupported) as caught:
            await flow.state().add(asked)
        assert all(way in str(caught.value) for way in WAYS_OUT)
        plain = flow.state()
        plain += "Once upon"
        plain += af.gen("rest", max_tokens=2)
        await plain


@pytest.mark.anyio
async def test_f42f_a_session_takes_a_template(folder: Path, template: Path) -> None:
    async with af.session(model=str(folder), kv_tokens=2000, chat_template=template) as flow:
        s = flow.state()
        s += af.user("Hi") + af.assistant(af.gen("answer", max_tokens=2))
        await s
        assert "<|im_start|>user\nHi<|im_end|>" in await s.text()


@pytest.mark.anyio
async def test_f42f_a_server_takes_a_template(folder: Path, template: Path) -> None:
    flags = Flags({"chat_template": str(template)}, (f"base={folder}",))
    [model] = load_config(flags, {}).config.models
    given = model.engine_options()
    async with open_models({"base": EngineOptions(str(folder), chat_template=given.chat_template)}) as models:
        [served] = models
        generator = served.generator(ANONYMOUS)
        assert generator.capabilities.roles
        assert generator.template.source == CHATML
        # The template's tokens are closed to texts of users.
        start = generator.tokenizer.find_id("<|im_start|>")
        assert start not in generator.tokenizer.encode("<|im_start|>")


@pytest.mark.anyio
async def test_f42f_a_template_that_cannot_be_used_is_refused_before_the_model_loads(
    folder: Path, template: Path
) -> None:
    wrong = template.with_name("wrong.jinja")
    wrong.write_text("{% if %}", encoding="utf-8")
    for file, kind in ((template.with_name("nowhere.jinja"), BadArgument), (wrong, BadModelFolder)):
        with pytest.raises(kind) as caught:
            async with open_models({"base": EngineOptions(str(folder), chat_template=str(file))}):
                pytest.fail("it opened")
        assert caught.value.param == "chat_template"
        assert file.name in str(caught.value)
