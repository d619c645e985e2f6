"""The TypeScript client on Node.js, against real servers."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import anyio
import pytest
from support.session_peer import HANG, count_words
from support.wire_server import Budget, ThreadServer, proxied

CLIENT = Path(__file__).parents[2] / "clients" / "typescript"
TIMEOUT_S = 60

pytestmark = [
    pytest.mark.skipif(shutil.which("node") is None, reason="needs Node.js"),
    pytest.mark.skipif(
        not (CLIENT / "node_modules").is_dir(), reason="needs the client's packages: make test-clients"
    ),
    pytest.mark.anyio,
]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def scenarios() -> Path:
    """The compiled scenarios."""
    compiler = CLIENT / "node_modules" / "typescript" / "bin" / "tsc"
    built = CLIENT / "build"
    subprocess.run(
        ["node", compiler, "-p", CLIENT / "tsconfig.json"], check=True, timeout=TIMEOUT_S, cwd=CLIENT
    )
    return built / "test" / "scenarios.js"


async def outcome(scenarios: Path, name: str, url: str, **options: Any) -> dict[str, Any]:
    """What a scenario prints: its ``result`` or its ``error``."""
    given = json.dumps({"url": url, "prompts": [], **options})
    with anyio.fail_after(TIMEOUT_S):
        done = await anyio.run_process(["node", str(scenarios), name, given], check=False)
    assert done.returncode == 0, done.stderr.decode()
    return json.loads(done.stdout)


async def result(scenarios: Path, name: str, url: str, **options: Any) -> Any:
    printed = await outcome(scenarios, name, url, **options)
    assert "result" in printed, printed
    return printed["result"]


async def test_a_fork_streams_and_leaves_nothing_behind(scenarios: Path, server: ThreadServer) -> None:
    prompts = ["Tell. #30", " One #20", " Two 😀 #7", " Three #1"]
    found = await result(scenarios, "fork", server.url, prompts=prompts)
    first = count_words(prompts[0])
    content = prompts[0] + first
    expected = [first, *(count_words(content + own) for own in prompts[1:])]
    assert found["texts"] == found["streamed"] == expected
    assert found["content"] == content
    assert found["stats"]["model"] == "scripted"
    await server.wait_until_idle()


async def test_one_branch_of_a_graph_is_cancelled(scenarios: Path, server: ThreadServer) -> None:
    prompts = ["one #5", HANG, "three #9"]
    found = await result(scenarios, "graph", server.url, prompts=prompts)
    first, cancelled, third = found["results"]
    assert [first, third] == [
        count_words("The input. " + prompts[0]),
        count_words("The input. " + prompts[2]),
    ]
    assert cancelled == ["begun", "cancelled"]
    await server.wait_until_idle()


async def test_connections_break_anywhere(scenarios: Path, server: ThreadServer) -> None:
    prompts = [f"Text {number} é😀 #{150 * number}" for number in range(1, 6)]
    async with proxied(server.port) as proxy:
        proxy.budgets = [
            Budget(down=900),
            Budget(up=250),
            Budget(down=1500),
            Budget(down=1),
            Budget(down=5000),
            Budget(up=40),
        ]
        num_cuts = len(proxy.budgets)
        found = await result(scenarios, "dropped", proxy.url, prompts=prompts)
        assert found["texts"] == found["streamed"] == [count_words(prompt) for prompt in prompts]
        assert proxy.num_connections == num_cuts + 1
        assert found["statuses"][:2] == ["lost", "open"]
    await server.wait_until_idle()


async def test_a_server_that_is_not_there(scenarios: Path, server: ThreadServer) -> None:
    async with proxied(server.port) as proxy:
        proxy.refuses = True
        printed = await outcome(scenarios, "model", proxy.url)
    assert printed["error"]["code"] == "server_unreachable"


async def test_an_unknown_model(scenarios: Path, server: ThreadServer) -> None:
    printed = await outcome(scenarios, "model", server.url, model="unknown")
    assert printed["error"]["code"] == "unknown_model"
