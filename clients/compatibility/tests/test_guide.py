"""The Python blocks of docs/guides/clients.md run on the server."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
from conftest import Server
from subjects import MODEL

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "clients.md"
CLIENTS = {
    "OpenAI": "openai",
    "Anthropic": "anthropic",
    "LiteLLM": "litellm",
    "OpenAI Agents SDK": "openai-agents",
    "LangChain": "langchain-openai",
    "LlamaIndex": "llama-index-llms-openai",
    "smolagents": "smolagents",
    "AutoGen": "autogen-ext",
    "Instructor": "instructor",
    "Outlines": "outlines",
    "Mirascope": "mirascope",
    "DSPy": "dspy",
}


def blocks() -> dict[str, str]:
    """The block of each client."""
    found = {}
    for section in GUIDE.read_text(encoding="utf-8").split("\n## ")[1:]:
        for block in re.findall(r"^```py\n(.*?)^```$", section, re.MULTILINE | re.DOTALL):
            found[CLIENTS[section.partition("\n")[0]]] = block
    return found


@pytest.mark.parametrize(
    "block",
    [pytest.param(block, id=name, marks=pytest.mark.client(name)) for name, block in blocks().items()],
)
def test_guide(block: str, server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "http://127.0.0.1:8410" in block
    script = tmp_path / "guide.py"  # some decorators read their function's source
    script.write_text(block.replace("http://127.0.0.1:8410", server.url).replace("smollm2-135m", MODEL))
    runpy.run_path(str(script))
    assert capsys.readouterr().out.strip()
