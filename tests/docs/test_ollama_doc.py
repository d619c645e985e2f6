"""docs/reference/ollama-api.md names every field and option that requests may have, and no other."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from agentflow.server.http.routes import OLLAMA, ROUTES
from agentflow.server.ollama.models import MANAGEMENT
from agentflow.server.ollama.types import (
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    Options,
)

PAGE = Path(__file__).parents[2].joinpath("docs", "reference", "ollama-api.md").read_text(encoding="utf-8")


def section(heading: str) -> str:
    """The text under a heading, up to the next one."""
    return re.split(r"^#+ ", PAGE.partition(f"# {heading}\n")[2], flags=re.MULTILINE)[0]


def in_table(text: str) -> set[str]:
    """The names in the first column."""
    rows = re.findall(r"^\| (`[^|]*) \|", text, re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`(\w+)`", row)}


@pytest.mark.parametrize(
    ("heading", "kinds"),
    [("Chat and generate", (OllamaChatRequest, OllamaGenerateRequest)), ("Options", (Options,))],
)
def test_each_field_has_its_line(heading: str, kinds: tuple[type[msgspec.Struct], ...]) -> None:
    known = {name for kind in kinds for name in kind.__struct_fields__}
    assert in_table(section(heading)) == known


def test_each_field_of_embeddings_is_named() -> None:
    named = set(re.findall(r"`(\w+)`", section("Embeddings")))
    kinds = (OllamaEmbedRequest, OllamaEmbeddingsRequest)
    assert named == {name for kind in kinds for name in kind.__struct_fields__}


def test_each_endpoint_is_listed() -> None:
    listed = set(re.findall(r"`(?:GET |POST |HEAD )?(/[\w/]*)`", section("Ollama API")))
    assert listed == {route.path for route in ROUTES if route.error_format is OLLAMA} | {*MANAGEMENT, "/"}
