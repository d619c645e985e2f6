"""Each example runs over OpenAI's chat API, as with ``--url http://…/v1``, on a deterministic model."""

from __future__ import annotations

import importlib
import io
import sys
from collections.abc import Iterator
from typing import Any

import essay_judge
import pytest
from rich.console import Console
from support.api_server import ApiServer, api_server
from support.fake_engine import ConstrainedEngine
from support.logit_runner import logit_runner
from support.server.http_clients import only_asyncio

import agentflow as af

pytestmark = pytest.mark.anyio
anyio_backend = pytest.fixture(only_asyncio)

EXAMPLES: dict[str, dict[str, Any]] = {
    "agent_with_tools": {},
    "cascade": {},
    "chat": {},
    "describe_image": {},
    "evaluation": {},
    "extraction": {},
    "fastapi_stream": {},
    "few_shot": {},
    "generative_agents": {},
    "long_document": {"text": "A fox found a key. The key opened a door.\n\n" * 5},
    "react": {},
    "retrieval": {},
    "self_consistency": {},
    "skeleton_of_thought": {},
    "tree_of_thought": {},
    "triage": {},
}


@pytest.fixture(scope="module")
def server() -> Iterator[ApiServer]:
    with api_server(ConstrainedEngine(runner=logit_runner(max_context=4096))) as running:
        yield running
        running.assert_idle()


@pytest.mark.parametrize("name", EXAMPLES)
async def test_an_example_runs(server: ApiServer, name: str) -> None:
    printed = io.StringIO()
    async with af.session(f"{server.url}/v1", seed=1) as flow:
        await importlib.import_module(name).main(flow, Console(file=printed, width=160), **EXAMPLES[name])
        assert (await flow.stats()).prompt_tokens or name == "describe_image"  # the model has no vision
    assert printed.getvalue()


async def test_the_judge_runs(
    server: ApiServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["essay_judge.py", "--url", f"{server.url}/v1"])
    assert await essay_judge.main() == 0
    assert "hit rate" in capsys.readouterr().out
