"""The TypeScript client on Node.js, against real servers."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
from support.api_server import ApiServer, api_server
from support.apis.anthropic_answers import text_stream as claude_stream
from support.apis.fake_server import Received
from support.apis.openai_answers import text_stream
from support.fake_engine import TOKENIZER, FakeEngine
from support.faulty_servers import KEY, tenants
from support.server.api_models import served_apis
from support.session_peer import HANG, count_words
from support.tcp_proxy import Budget, proxied
from support.wire_server import ThreadServer

import agentflow as af
from agentflow.engine.simulator.fake_runner import FakeRunner
from agentflow.engine.store.embedding_folder import EmbeddingFolder
from agentflow.protocol import ops
from agentflow.recording.file import read_recording
from agentflow.recording.runs import RecordedRuns
from agentflow.version import __version__

ROOT = Path(__file__).parents[2]
CLIENT = ROOT / "clients" / "typescript"
ADDRESS = "ws://127.0.0.1:8410"
TIMEOUT_S = 60

pytestmark = [pytest.mark.clients, pytest.mark.anyio]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def compile_project(project: Path) -> None:
    compiler = CLIENT / "node_modules" / "typescript" / "bin" / "tsc"
    done = subprocess.run(
        ["node", compiler, "-p", project], capture_output=True, text=True, timeout=TIMEOUT_S, cwd=CLIENT
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def scenarios() -> Path:
    """The compiled scenarios."""
    compile_project(CLIENT / "tsconfig.json")
    return CLIENT / "build" / "test" / "scenarios.js"


@pytest.fixture(scope="module")
def package() -> Path:
    """The built package."""
    compile_project(CLIENT / "tsconfig.build.json")
    return CLIENT


async def outcome(scenarios: Path, name: str, url: str, **options: Any) -> dict[str, Any]:
    """The output of a scenario: its ``result`` or its ``error``."""
    given = json.dumps({"url": url, "prompts": [], **options})
    with anyio.fail_after(TIMEOUT_S):
        done = await anyio.run_process(["node", str(scenarios), name, given], check=False)
    assert done.returncode == 0, done.stderr.decode()
    return json.loads(done.stdout)


async def result(scenarios: Path, name: str, url: str, **options: Any) -> Any:
    printed = await outcome(scenarios, name, url, **options)
    assert "result" in printed, printed
    return printed["result"]


async def test_the_model_sees_an_image(scenarios: Path) -> None:
    data = b"\x89PNG\r\n\x1a\n".ljust(7_000_000, b"\0")
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    seen: list[str] = []

    def answer(request: Received) -> Any:
        parts = request.json["messages"][-1]["content"]
        seen.append("".join(part.get("text") or part["image_url"]["url"] for part in parts))
        return text_stream("a square")

    async with served_apis(answer) as served:
        found = await result(scenarios, "image", served.ws_url, prompts=[str(len(data))])
    assert found == ["a square"] * 3
    assert seen == [f"Look: {url}What is it?"] * 2 + [url]


async def test_several_models_in_one_session(scenarios: Path, tmp_path: Path) -> None:
    models = {"small": "openai:gpt-4.1-mini", "large": "anthropic:claude-sonnet-4-5"}
    asked: list[list[dict[str, Any]]] = []

    def answer(request: Received) -> Any:
        if not request.path.endswith("/messages"):
            return text_stream("A leaf")
        asked.append(request.json["messages"])
        return claude_stream("yes" if "true?" in json.dumps(asked[-1]) else "Leaves")

    async with served_apis(answer, models) as served:
        found = await result(scenarios, "models", served.ws_url, prompts=["Write."])
    assert found["values"] == ["A leaf", "yes", "Leaves", "Leaves"]
    assert found["states"] == ["small", "large", "large"]
    assert [len(messages) for messages in sorted(asked, key=len)] == [1, 1, 3]
    assert all(cost > 0 for cost in found["costs"])
    assert sum(found["costs"]) == pytest.approx(found["total"])
    assert found["refused"] == ["not_supported", None]
    assert "schema" in found["constraints"][1]
    path = tmp_path / "run.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in found["recording"]))
    recording = read_recording(path)
    assert list(recording.header.models) == ["small", "large"]
    opened = [entry.sent for entry in recording.entries if isinstance(entry.sent, ops.Open)]
    assert [(op.model, op.program) for op in opened[:2]] == [("", "draft"), ("large", "judge")]
    forks = [entry.sent for entry in recording.entries if isinstance(entry.sent, ops.Fork)]
    assert [fork.model for fork in forks] == ["large"]
    last = RecordedRuns(recording).runs[-1].root
    assert (last.is_cancelled, str(last.program_failure)) == (True, "RangeError: no more rows")


async def test_decisions(scenarios: Path) -> None:
    with api_server(constraints=False) as server:
        found = await result(scenarios, "decide", server.url, prompts=["Buy this!"])
    spam, tone = found["value"]["Is it spam?"], found["value"]["tone"]
    assert isinstance(spam["value"], bool)
    assert tone["value"] == max(tone["probabilities"], key=tone["probabilities"].__getitem__)
    assert sum(tone["probabilities"].values()) == pytest.approx(1)
    assert (found["by"], found["reason"]) == ("logprobs", "decided")


async def test_live_graphs_of_a_session_and_of_its_tenant(scenarios: Path, server: ThreadServer) -> None:
    async with af.session(server.url) as flow, flow.state(program="from python") as s:
        s += HANG + af.gen("first")
        await anext(aiter(s["first"]))
        found = await result(scenarios, "livegraph", server.url, prompts=[HANG, HANG])
    nodes = found["graph"]["nodes"]
    assert [node["name"] for node in nodes] == ["part", "part", "whole"]
    assert nodes[2]["needs"] == [node["id"] for node in nodes[:2]]
    assert nodes[0]["group"] == nodes[1]["group"]
    assert found["labels"] == [["judges", "judges", ""], ["from python"]]


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


@pytest.fixture(scope="module")
def keyed_server() -> Iterator[ApiServer]:
    """A server with one tenant."""
    with api_server(tenants=tenants(), constraints=False) as running:
        yield running


async def test_a_key_becomes_a_ticket_for_each_connection(scenarios: Path, keyed_server: ApiServer) -> None:
    async with proxied(int(keyed_server.url.rpartition(":")[2])) as proxy:
        # The first connection carries the request for a ticket, the second the websocket, which breaks.
        proxy.budgets = [Budget(), Budget(down=1500)]
        found = await result(scenarios, "dropped", proxy.url, key=KEY, prompts=["Tell a long story."])
        assert found["texts"] == found["streamed"]
        assert found["statuses"][:2] == ["lost", "open"]
        assert proxy.num_connections >= 3  # a request may share the connection of the one before
    keyed_server.assert_idle()


@pytest.mark.parametrize("key", ["af-wrong", None])
async def test_a_wrong_or_missing_key_is_not_authorized(
    scenarios: Path, keyed_server: ApiServer, key: str | None
) -> None:
    options = {} if key is None else {"key": key}
    printed = await outcome(scenarios, "model", keyed_server.url, **options)
    assert (printed["error"]["code"], printed["error"]["name"]) == ("not_authorized", "NotAuthorized")
    assert "af-" not in printed["error"]["message"]


async def test_forced_text_and_tokens(scenarios: Path) -> None:
    with api_server() as server:
        found = await result(scenarios, "forced", server.url, prompts=["Give it: "])
    text, forced = found["text"], found["forced"]
    assert text in ("forced text a", "forced text b")
    assert "".join(found["tokens"]) == "Give it: " + text
    assert forced
    assert found["usage"]["forced_tokens"] > 0
    assert all(text[at : at + length] in "forced text " for at, length in forced)


@pytest.fixture(scope="module")
def embedding_server() -> Iterator[ApiServer]:
    """A server with a generating model and an embedding model."""
    embedder = FakeEngine()
    embedder.runner = FakeRunner(vocab_size=TOKENIZER.vocab_size, max_context=64, embedding_size=24)
    folder = EmbeddingFolder(("lasttoken",), (None,), prompts={"query": "Question: "})
    with api_server(constraints=False, embedding=folder, embedder=embedder) as running:
        yield running
        running.assert_idle()
        running.call(embedder.assert_idle)


@pytest.mark.parametrize("options", [{}, {"dimensions": 5}, {"prompt_name": "query"}, {"prompt": "Q 😀 "}])
async def test_embeddings_are_those_of_sessions_in_python(
    scenarios: Path, embedding_server: ApiServer, options: dict[str, Any]
) -> None:
    texts = ["The quick brown fox", "a dog 😀", *[f"text {number}" for number in range(1500)]]
    async with af.session(embedding_server.url) as flow:
        expected = await flow.embed(texts, **options)
    given = {"promptName" if name == "prompt_name" else name: value for name, value in options.items()}
    found = await result(scenarios, "embed", embedding_server.url, prompts=texts, embed=given)
    assert found["vectors"] == expected
    assert (found["one"], found["none"]) == (expected[0], [])


async def test_errors_of_embeddings(scenarios: Path, embedding_server: ApiServer) -> None:
    found = await result(scenarios, "embedErrors", embedding_server.url)
    assert found["found"] == [
        ["bad_argument", "texts"],
        ["prompt_too_long", "texts"],
        ["bad_argument", "dimensions"],
        ["unknown_model", "model"],
        ["bad_argument", "promptName"],
        ["before", None],
        ["meanwhile", None],
    ]
    assert found["dimensions"] == 24


async def test_a_server_that_makes_no_embeddings(scenarios: Path, keyed_server: ApiServer) -> None:
    printed = await outcome(scenarios, "embed", keyed_server.url, key=KEY, prompts=["a"])
    assert printed["error"]["code"] == "not_supported"


async def test_a_watch_sees_steps_and_nodes(scenarios: Path) -> None:
    with api_server(constraints=False) as server:
        found = await result(scenarios, "watch", server.url, prompts=["What do plants do?"])
    assert found["isReset"]
    assert found["steps"] > 0
    assert found["peeked"]["numTokens"] == found["numTokens"] > 0
    assert found["peeked"]["text"].startswith("What do plants do?")
    assert found["unknown"] == "bad_argument"
    assert found["hasEnded"]


PAGES = (CLIENT / "README.md", ROOT / "docs" / "guides" / "typescript.md")
BLOCKS = [
    (page, number, block)
    for page in PAGES
    for number, block in enumerate(
        re.findall(r"^```ts\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL), 1
    )
]


@pytest.fixture(scope="module")
def compiled_blocks(scenarios: Path, package: Path) -> Path:
    """The blocks of the pages as modules that import the built package like its users."""
    folder = CLIENT / "build" / "docs"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for page, number, block in BLOCKS:
        (folder / f"{page.stem}{number}.ts").write_text(block, encoding="utf-8")
    options = {"noEmit": False, "types": ["node"], "rootDir": ".", "outDir": "out", "noUnusedLocals": False}
    settings = {"extends": "../../tsconfig.json", "compilerOptions": options, "include": ["*.ts"]}
    (folder / "tsconfig.json").write_text(json.dumps(settings), encoding="utf-8")
    compile_project(folder / "tsconfig.json")
    return folder / "out"


@pytest.mark.parametrize(
    ("page", "number", "block"),
    [pytest.param(*block, id=f"{block[0].stem}-{block[1]}") for block in BLOCKS],
)
async def test_the_blocks_of_the_pages_run(
    compiled_blocks: Path, page: Path, number: int, block: str
) -> None:
    name = f"{page.stem}{number}"
    text = (compiled_blocks / f"{name}.js").read_text(encoding="utf-8")
    with api_server() as server:
        script = compiled_blocks / f"{name}.run.mjs"
        assert ADDRESS in text
        script.write_text(text.replace(ADDRESS, server.url.replace("http", "ws")), encoding="utf-8")
        preload = CLIENT / "build" / "test" / "support" / "global_websocket.js"
        command = ["node", "--import", preload.as_uri(), str(script)]
        with anyio.fail_after(TIMEOUT_S):
            done = await anyio.run_process(command, check=False)
        assert done.returncode == 0, done.stderr.decode()
        if "console.log" in block:
            assert done.stdout.strip()
        server.assert_idle()


def test_the_package_contains_what_users_need(package: Path) -> None:
    command = ["npm", "pack", "--dry-run", "--json", "--ignore-scripts"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=TIMEOUT_S, cwd=package)
    (packed,) = json.loads(done.stdout)
    paths = {file["path"] for file in packed["files"]}
    assert {"README.md", "LICENSE", "package.json", "dist/index.js", "dist/index.d.ts"} <= paths
    assert {path for path in paths if not path.startswith("dist/")} == {
        "README.md",
        "LICENSE",
        "package.json",
    }
    modules = {path.stem for path in (package / "src").glob("*.ts")}
    assert paths & {f"dist/{module}.js" for module in modules} == {f"dist/{module}.js" for module in modules}
    declarations = "".join(file.read_text(encoding="utf-8") for file in (package / "dist").glob("*.d.ts"))
    assert "@internal" not in declarations
    assert packed["version"] == __version__
