"""The Python blocks of every page run, in order, and print the output that the page shows."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import anyio
import pytest
from openai import OpenAI
from support.api_server import MODEL, ApiServer
from support.apis.fake_server import fake_server
from support.docs import page_apis
from support.docs.page_blocks import DOCS, ROOT, Block, blocks_of, compiled, pages, run_block, with_packages
from support.docs.page_model import ESSAY, SCRIPT
from support.fake_engine import embedding_engine
from support.programs import by_end
from support.server.http_clients import only_asyncio
from support.server.module_servers import module_server

import agentflow as af
from agentflow import integrations
from agentflow.backends.local import Embedded
from agentflow.engine.store.embedding_folder import EmbeddingFolder
from agentflow.protocol.sampling import SamplingParams
from agentflow.recording.file import Entry, Header
from benchmarks.page import HEADLINES, with_headlines

anyio_backend = pytest.fixture(only_asyncio)


@pytest.mark.anyio
@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
async def test_the_blocks_run(page: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    # Pages open sessions as their readers do, without a backend.
    monkeypatch.setattr(Embedded, "connect", af.Scripted(by_end(SCRIPT)).connect)
    monkeypatch.delenv("AGENTFLOW_URL", raising=False)
    monkeypatch.chdir(tmp_path)  # some write files
    with anyio.fail_after(60):
        async with fake_server(page_apis.answer) as apis, af.session(seed=7) as flow:
            page_apis.use(apis, monkeypatch)
            namespace: dict[str, Any] = {"af": af, "essay": ESSAY}
            for block in blocks_of(page):
                block = block._replace(source=page_apis.on_servers(block.source, apis))
                if not isinstance(namespace.get("flow"), af.OpenSession):
                    namespace["flow"] = flow  # the page's own sessions end with their blocks
                if block.runs:
                    await run_block(page, block, namespace)
                else:
                    compiled(page, block)


FOLDER = EmbeddingFolder(("lasttoken",), (None,), prompts={"query": "Question: "})
ON_A_SERVER = [
    "concepts/forks.md",
    "operating/embeddings.md",
    "operating/lora.md",
    "quickstart.md",
    "reference/anthropic-api.md",
    "reference/http-api.md",
    "reference/programs-api.md",
    "reference/sglang-api.md",
]
ELSEWHERE = {
    "guides/clients.md": "clients/compatibility/tests/test_guide.py",
    "guides/dspy.md": "adapters/dspy-agentflow/tests/test_guide.py",
    "guides/langchain.md": "adapters/langchain-agentflow/tests/test_guide.py",
    "guides/offline-tests.md": "tests/integrations/test_pytest_plugin.py",
    "guides/pydantic-ai.md": "tests/examples/test_pydantic_ai_agent.py",
    "guides/tools.md": "tests/language/test_mcp.py",
}
"""Pages whose blocks marked ``py`` run in a separate test."""


def on_a_server(block: Block, url: str) -> Block:
    """The block with the address and the model of a server of the tests."""
    source = re.sub("smollm2-135m|qwen3-0.6b:polite", MODEL, block.source)
    source = source.replace("http://127.0.0.1:8410", url)
    source = source.replace("ws://127.0.0.1:8410", url.replace("http://", "ws://"))
    source = source.replace('"openai:gpt-4.1-mini"', f'"{url}/v1", model="{MODEL}"')
    return block._replace(source=source.replace("import httpx\n", "import httpx2 as httpx\n"))


server = module_server(embedding=FOLDER, embedder=embedding_engine(256, 64))


@pytest.mark.anyio
@pytest.mark.parametrize("name", ON_A_SERVER)
async def test_the_blocks_of_clients_run_on_a_server(
    name: str, server: ApiServer, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(Embedded, "connect", af.Scripted(by_end(SCRIPT)).connect)
    namespace: dict[str, Any] = {"af": af, "essay": ESSAY}
    url = server.url.replace("http://", "ws://")
    blocks = [on_a_server(block, server.url) for block in blocks_of(DOCS / name)]
    calling = with_packages(blocks)
    assert calling
    messages = [{"role": "user", "content": "Hello"}]
    with anyio.fail_after(60), OpenAI(base_url=f"{server.url}/v1", api_key="none") as openai:
        async with af.session(seed=7) as flow, af.session(url) as remote:
            for block in blocks:
                if block.runs:
                    namespace["flow"] = flow
                    await run_block(DOCS / name, block, namespace)
                elif block in calling:
                    # The engine of the tests writes other texts than the page shows.
                    quiet = {"client": openai, "messages": messages, **namespace, "flow": remote}
                    quiet["print"] = lambda *_, **__: None
                    await run_block(DOCS / name, block, quiet)
                    if (client := quiet["client"]) is not openai:
                        client.close()


def test_f47f_every_block_that_can_run_is_run():
    left_out = [
        f"{page}:{block.line}"
        for page in pages()
        if page.relative_to(ROOT).as_posix().removeprefix("docs/") not in {*ON_A_SERVER, *ELSEWHERE}
        for block in with_packages([on_a_server(block, "http://127.0.0.1:8410") for block in blocks_of(page)])
    ]
    assert left_out == []


def test_the_comparison_has_every_program_in_all_four_frameworks():
    blocks = blocks_of(DOCS / "guides" / "coming-from.md")
    for what in ("a judge", "a chat"):
        found = [block.heading.partition(":")[0] for block in blocks if block.heading.endswith(what)]
        assert found == ["SGLang", "Guidance", "LangChain", "agentflow"]


def test_every_parameter_of_gen_is_named():
    text = (DOCS / "concepts" / "states.md").read_text(encoding="utf-8")
    section = text.partition("## gen and select")[2].partition("\n## ")[0]
    named = set(re.findall(r"`(\w+)(?:=[^`]*)?`", section))
    assert set(inspect.signature(af.gen).parameters) - {"name"} <= named


def test_f37_the_defaults_of_gen_are_those_of_the_code():
    text = (DOCS / "concepts" / "states.md").read_text(encoding="utf-8")
    section = text.partition("## gen and select")[2].partition("\n## ")[0]
    names = re.findall(r"^\| (`\w.*?) \|", section, re.MULTILINE)
    shown = [pair for name in names for pair in re.findall(r"`(\w+)=([^`]*)`", name)]
    known = {name: parameter.default for name, parameter in inspect.signature(af.gen).parameters.items()}
    engine = SamplingParams()
    assert len(shown) > 10
    for name, value in shown:
        default = known[name] if known[name] is not None else getattr(engine, name)
        assert value.replace('"', "'") == repr(default)


@pytest.mark.parametrize("package", [af, integrations], ids=["agentflow", "agentflow.integrations"])
def test_the_reference_has_every_public_name_once(package: ModuleType):
    pages = [page.read_text(encoding="utf-8") for page in (DOCS / "reference" / "api").glob("*.md")]
    names = rf"^::: {re.escape(package.__name__)}\.(\w+)$"
    documented = [name for page in pages for name in re.findall(names, page, re.MULTILINE)]
    if package is af:  # one block has the module of errors
        documented += [name for name in af.__all__ if is_error(getattr(af, name))]
        documented.append("__version__")
    assert sorted(documented) == sorted(package.__all__)


def is_error(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, af.AgentflowError | af.errors.BlockingWarning)


@pytest.mark.anyio
@pytest.mark.parametrize("source", ["print(1)\n# → 2\n", "print(1)\n", "1\n# → 1\n"])
async def test_a_block_that_prints_something_else_fails(source: str):
    with pytest.raises(AssertionError, match="the block at line 7 shows"):
        await run_block(DOCS / "guides" / "coming-from.md", Block("a heading", 7, source), {})


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"])
def test_links_of_pages_outside_the_site_have_a_target(name: str):
    """mkdocs checks the others."""
    targets = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", (ROOT / name).read_text(encoding="utf-8"))
    assert [target for target in targets if not (ROOT / target).exists()] == []


def test_the_figures_of_the_readme_are_the_committed_ones():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert with_headlines(readme) == readme
    assert all(f"| {text} |" in readme for _, text in HEADLINES)


def test_f47h_the_guide_to_recordings_names_all_fields_of_a_line():
    text = (DOCS / "guides" / "recording.md").read_text(encoding="utf-8")
    section = text.partition("## The file")[2].partition("\n## ")[0]
    fields = {*Header.__struct_fields__, *Entry.__struct_fields__}
    assert fields - set(re.findall(r"`(\w+)`", section)) == set()
