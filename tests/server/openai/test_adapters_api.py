"""Adapters (LoRA) over HTTP: separate models on every API; only allowed keys load and unload them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import openai
import pytest
import torch
from support.api_server import MODEL, ApiServer, api_server
from support.engine.adapters import write_plain_adapter
from support.fake_engine import TOKENIZER, FakeEngine
from support.faulty_servers import BEARER, KEY, tenants
from support.server.openai_peer import sync_client

import agentflow as af
from agentflow.engine.messages import AdapterLoaded
from agentflow.engine.runner import ReadAdapter
from agentflow.engine.simulator.fake_runner import FakeRunner
from agentflow.server.openai import adapters
from agentflow.server.tenants.keys import Tenants

POLITE = f"{MODEL}:polite"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tensors = {"q_proj.lora_A": torch.ones(4, 8)}
    return write_plain_adapter(tmp_path_factory.mktemp("adapters") / "polite", tensors)


@pytest.fixture
def server() -> Iterator[ApiServer]:
    """A server whose only tenant manages adapters."""
    with api_server(tenants=tenants("manages_adapters = true"), constraints=False) as running:
        yield running
        running.assert_idle()


def post(server: ApiServer, path: str, **body: Any) -> Any:
    return httpx2.post(f"{server.url}/v1/{path}", json=body, headers=BEARER)


def load(server: ApiServer, folder: Path, **body: Any) -> Any:
    return post(server, "load_lora_adapter", lora_name="polite", lora_path=str(folder), **body)


def said_by(client: openai.OpenAI, model: str) -> str:
    answer = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": "Hi."}], max_tokens=8, seed=1, temperature=0
    )
    assert answer.model == model
    return answer.choices[0].message.content or ""


def test_an_adapter_is_a_model_until_it_is_unloaded(server: ApiServer, folder: Path) -> None:
    with sync_client(server, api_key=KEY) as client:
        plain = said_by(client, MODEL)
        with pytest.raises(openai.NotFoundError):
            said_by(client, POLITE)
        loaded = load(server, folder)
        assert loaded.status_code == 200
        assert (loaded.json()["id"], loaded.json()["parent"]) == (POLITE, MODEL)
        assert [model.id for model in client.models.list()] == [MODEL, POLITE]
        polite = said_by(client, POLITE)
        assert said_by(client, MODEL) == plain != polite
        responded = client.responses.create(model=POLITE, input="Hi.", max_output_tokens=8, temperature=0)
        assert (responded.model, responded.output_text) == (POLITE, polite)
        assert post(server, "unload_lora_adapter", lora_name="polite").json()["deleted"]
        assert [model.id for model in client.models.list()] == [MODEL]
        with pytest.raises(openai.NotFoundError):
            said_by(client, POLITE)


def test_f37_an_adapter_that_is_unloaded_before_the_answer_is_not_found(
    server: ApiServer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another client may unload it as soon as the engine has loaded it."""
    client = server.generator._client
    load_adapter = client.load_adapter

    async def load_and_unload(name: str, path: Path) -> AdapterLoaded:
        loaded = await load_adapter(name, path)
        client.unload_adapter(name)
        return loaded

    monkeypatch.setattr(client, "load_adapter", load_and_unload)
    answer = load(server, folder)
    assert (answer.status_code, answer.json()["error"]["param"]) == (404, "lora_name")


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_sessions_and_anthropics_api_take_its_name(server: ApiServer, folder: Path) -> None:
    load(server, folder)
    async with anthropic.AsyncAnthropic(api_key=KEY, base_url=server.url, max_retries=0) as client:
        message = await client.messages.create(
            model=POLITE,
            max_tokens=8,
            messages=[{"role": "user", "content": "Hi."}],
            extra_body={"temperature": 0},
        )
    url = server.url.replace("http", "ws")
    async with af.session(url, model=POLITE, api_key=KEY) as flow, flow.state() as s:
        s += af.user("Hi.")
        s += af.assistant(af.gen("answer", max_tokens=8, temperature=0))
        text = await s["answer"]
    assert message.model == POLITE
    assert [block.text for block in message.content if block.type == "text"] == ([text] if text else [])


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("load_lora_adapter", {"lora_name": "a b", "lora_path": "x"}, 400, "lora_name"),
        ("load_lora_adapter", {"lora_name": "", "lora_path": "x"}, 400, "lora_name"),
        ("load_lora_adapter", {"lora_name": "other", "lora_path": "/nowhere"}, 400, "lora_path"),
        ("load_lora_adapter", {"lora_name": "other"}, 400, "lora_path"),
        (
            "load_lora_adapter",
            {"lora_name": "other", "lora_path": "~no-such-user/x"},
            400,
            "lora_path",
        ),
        ("load_lora_adapter", {"lora_name": "other", "lora_path": "/tmp/" + 400 * "x"}, 400, "lora_path"),
        ("unload_lora_adapter", {"lora_name": "other"}, 404, "lora_name"),
        ("unload_lora_adapter", {"lora_name": "other", "model": "nothing"}, 404, None),
    ],
)
def test_an_adapter_that_cannot_be_loaded_is_refused(
    server: ApiServer, path: str, body: dict[str, Any], status: int, param: str | None
) -> None:
    answer = post(server, path, **body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)


def test_a_model_has_a_bounded_number_of_adapters(
    server: ApiServer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapters, "MAX_ADAPTERS", 2)
    for name in ("one", "two"):
        assert post(server, "load_lora_adapter", lora_name=name, lora_path=str(folder)).status_code == 200
    refused = load(server, folder)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "lora_name")
    again = post(server, "load_lora_adapter", lora_name="two", lora_path=str(folder), load_inplace=True)
    assert again.status_code == 200
    post(server, "unload_lora_adapter", lora_name="one")
    assert load(server, folder).status_code == 200


def test_a_loaded_name_is_replaced_only_on_request(server: ApiServer, folder: Path, tmp_path: Path) -> None:
    other = write_plain_adapter(tmp_path, {"q_proj.lora_A": torch.full((4, 8), 2.0)})
    load(server, folder)
    with sync_client(server, api_key=KEY) as client:
        before = said_by(client, POLITE)
        assert load(server, other).status_code == 400
        assert said_by(client, POLITE) == before
        assert load(server, other, load_inplace=True).status_code == 200
        assert said_by(client, POLITE) != before


class HeldReader(FakeRunner):
    """Reads adapters once ``may_read`` is set."""

    def __init__(self) -> None:
        super().__init__(vocab_size=TOKENIZER.vocab_size, num_slots=4096, max_context=1024)
        self.has_begun, self.may_read = threading.Event(), threading.Event()

    def read_adapter(self, folder: Path) -> ReadAdapter:
        self.has_begun.set()
        assert self.may_read.wait(timeout=30)
        return super().read_adapter(folder)


def test_f37_a_name_is_taken_while_its_adapter_is_read(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So is its place among the adapters of the model. It may be replaced on request."""
    monkeypatch.setattr(adapters, "MAX_ADAPTERS", 1)
    other = write_plain_adapter(tmp_path, {"q_proj.lora_A": torch.full((4, 8), 2.0)})
    runner, known = HeldReader(), tenants("manages_adapters = true")
    with (
        api_server(FakeEngine(runner=runner), tenants=known, constraints=False) as server,
        ThreadPoolExecutor() as pool,
    ):
        try:
            first = pool.submit(load, server, folder)
            assert runner.has_begun.wait(timeout=30)
            for name in ("polite", "second"):
                refused = post(server, "load_lora_adapter", lora_name=name, lora_path=str(other))
                assert (refused.status_code, refused.json()["error"]["param"]) == (400, "lora_name")
            client = server.generator._client
            in_place = pool.submit(load, server, other, load_inplace=True)
            server.wait_until(lambda: len(client._queries) == 2)
        finally:
            runner.may_read.set()
        assert (first.result().status_code, in_place.result().status_code) == (200, 200)
        assert client.adapters["polite"].folder == str(other)
        assert len(runner.adapters) == 1


@pytest.mark.parametrize("settings", [[], None], ids=["a key without the permission", "no keys"])
def test_only_those_who_may_load_adapters(folder: Path, settings: list[str] | None) -> None:
    known = None if settings is None else tenants(*settings)
    with api_server(tenants=known, constraints=False) as server:
        answer = load(server, folder)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "adapters_forbidden")


def test_a_key_of_the_model_alone_does_not_see_its_adapters(folder: Path) -> None:
    known = tenants("manages_adapters = true", f'models = ["{MODEL}"]')
    with api_server(tenants=known, constraints=False) as server:
        load(server, folder)
        with sync_client(server, api_key=KEY) as client:
            assert [model.id for model in client.models.list()] == [MODEL]


def test_f40c_the_key_of_the_command_line_may_load_adapters(folder: Path) -> None:
    with api_server(tenants=Tenants(keys=[KEY]), constraints=False) as server:
        assert load(server, folder).status_code == 200
