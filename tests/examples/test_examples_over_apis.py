"""Each example runs over the APIs of a server, as with ``--url http://…/v1``, ``openai:…`` and
``anthropic:…``, on a deterministic model. One that an API cannot express fails with an error that says
why."""

from __future__ import annotations

import contextlib
import importlib
import io
import sys

import agent_with_tools
import essay_judge
import pytest
from example_session import session_at
from rich.console import Console
from scripted_example import EXAMPLES, OPTIONS
from support.api_server import MODEL, ApiServer
from support.fake_engine import ConstrainedEngine
from support.logit_runner import logit_runner
from support.server.http_clients import only_asyncio
from support.server.module_servers import module_server

import agentflow as af
from agentflow.errors import RequestRefused, RunFailed

pytestmark = pytest.mark.anyio
anyio_backend = pytest.fixture(only_asyncio)

ROUTES = ("v1", "openai", "anthropic")
CONTINUES = {"generative_agents", "self_consistency", "skeleton_of_thought", "tree_of_thought"}
"""The examples with text before a gen in its turn: a model whose API continues no turn has to write it."""
CANNOT = {*CONTINUES, "react", "describe_image"}
"""Also without turns, and with an image for a model that reads none, of which only its server knows."""


server = module_server(lambda: ConstrainedEngine(runner=logit_runner(max_context=4096)))


@pytest.fixture(autouse=True)
def addresses(server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The address of each route, whose server is in the variables of the vendors' clients."""
    monkeypatch.setenv("OPENAI_BASE_URL", f"{server.url}/v1")
    monkeypatch.setenv("ANTHROPIC_BASE_URL", server.url)
    for vendor in ("OPENAI", "ANTHROPIC"):
        monkeypatch.setenv(f"{vendor}_API_KEY", "any")
    return {"v1": f"{server.url}/v1", "openai": f"openai:{MODEL}", "anthropic": f"anthropic:{MODEL}"}


async def printed(name: str, url: str) -> str:
    console = Console(file=io.StringIO(), width=160)
    async with session_at(url, {"seed": 1}) as flow:
        await importlib.import_module(name).main(flow, console, **OPTIONS.get(name, {}))
        assert (await flow.stats()).prompt_tokens or name == "describe_image"  # the model has no vision
    return console.file.getvalue()


# The vendors' APIs do not enforce the length of a name, and this model writes without end.
RUNS = [
    (name, route)
    for name in EXAMPLES
    for route in ROUTES
    if name not in ("agent_with_tools", "essay_judge") and (name != "extraction" or route == "v1")
]


@pytest.mark.parametrize(("name", "route"), RUNS)
async def test_an_example_runs(addresses: dict[str, str], route: str, name: str) -> None:
    if route == "v1" or name not in CANNOT:
        assert await printed(name, addresses[route])
        return
    with pytest.raises((RequestRefused, RunFailed)) as caught:
        await printed(name, addresses[route])
    message = str(caught.value)
    assert MODEL in message
    assert "\n" not in message


async def test_the_agent_runs(addresses: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Over all routes with one MCP server, which takes longer to start than a run."""
    async with af.mcp([sys.executable, agent_with_tools.__file__, "--serve"]) as shop:
        monkeypatch.setattr(af, "mcp", lambda _: contextlib.nullcontext(shop))
        for route in ROUTES:
            assert await printed("agent_with_tools", addresses[route]), route


@pytest.mark.parametrize("route", ROUTES)
async def test_the_judge_runs(
    addresses: dict[str, str], route: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["essay_judge.py", "--url", addresses[route]])
    assert await essay_judge.main() == 0
    assert "hit rate" in capsys.readouterr().out
