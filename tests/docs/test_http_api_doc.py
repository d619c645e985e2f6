"""docs/reference/http-api.md names every field that requests may have, and none that they may not."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from agentflow.engine.request import MAX_PRIORITY
from agentflow.protocol.bounds.json_bounds import BODY_BOUNDS, OBJECT_BOUNDS
from agentflow.protocol.constraint import MAX_SOURCE_CHARS
from agentflow.server.app import ENDPOINTS
from agentflow.server.compatible.fields import MAX_MESSAGES
from agentflow.server.completion.request import MAX_LOGPROB_TOKENS
from agentflow.server.openai.completions import TextRequest
from agentflow.server.openai.decisions import DecisionRequest
from agentflow.server.openai.embeddings import EmbeddingsRequest
from agentflow.server.openai.models import DetokenizeRequest, TokenizeRequest
from agentflow.server.openai.responses.types import MAX_ITEMS, ResponseRequest
from agentflow.server.openai.types import ChatRequest

PAGES = Path(__file__).parents[2] / "docs" / "reference"
PAGE = (PAGES / "http-api.md").read_text(encoding="utf-8")
# For each section, the fields that its tables and its paragraphs on accepted and refused fields name.
SECTIONS = dict(re.findall(r"^## `(POST [^`]*)`[^\n]*\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))


def fields(*kinds: type[msgspec.Struct]) -> set[str]:
    return {name for kind in kinds for name in kind.__struct_fields__}


def in_tables(section: str) -> set[str]:
    """The names in the first column."""
    rows = re.findall(r"^\| (`[^|]*) \|", section, re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`(\w+)`", row)}


def in_list(section: str) -> list[str]:
    """The points of a section's list."""
    return re.findall(r"^- (.*(?:\n  .*)*)", section, re.MULTILINE)


def test_f37_every_endpoint_is_on_a_page() -> None:
    pages = [page.read_text(encoding="utf-8") for page in PAGES.glob("*.md")]
    spans = {span for page in pages for span in re.findall(r"`([^`\n]+)`", page)}
    named = {word.partition("?")[0] for span in spans for word in re.split(r"[ ,]+", span)}
    assert {path for one in ENDPOINTS if (path := one.partition(" ")[2]) not in named} == set()


def test_chat_completions() -> None:
    section = SECTIONS["POST /v1/chat/completions"]
    known = fields(ChatRequest)
    assert in_tables(section) <= known
    named = set(re.findall(r"`(\w+)`", section))
    assert known - named == set()
    assert f"at most {MAX_MESSAGES:,}" in section
    assert f"At most {MAX_LOGPROB_TOKENS:,} for a request" in section


def test_responses() -> None:
    section = SECTIONS["POST /v1/responses"]
    known = fields(ResponseRequest)
    tops = {name.partition(".")[0] for name in re.findall(r"`([\w.]+)`", section)}
    assert known - tops == set()
    assert f"up to {MAX_ITEMS:,} items" in section


def test_completions() -> None:
    """The page lists each field, in the table or among the shared fields of both endpoints, and no other."""
    section = SECTIONS["POST /v1/completions"]
    table = in_tables(section)
    shared = {name for line in in_list(section) for name in re.findall(r"`(\w+)`", line)}
    assert table | shared == fields(TextRequest)
    assert table & shared == set()
    assert shared <= fields(ChatRequest)


def test_embeddings() -> None:
    section = SECTIONS["POST /v1/embeddings"]
    shared = {name for line in in_list(section) for name in re.findall(r"`(\w+)`", line)}
    assert in_tables(section) | shared == fields(EmbeddingsRequest)


def test_decisions() -> None:
    section = SECTIONS["POST /v1/decisions"]
    shared = {name for line in in_list(section) for name in re.findall(r"`(\w+)`", line)}
    assert {"model", "input", "questions"} | shared == fields(DecisionRequest)


def test_priority_has_its_range() -> None:
    for page in ("http-api.md", "anthropic-api.md"):
        text = (PAGES / page).read_text(encoding="utf-8")
        [row] = re.findall(r"^\|[^|]*`priority`.*", text, re.MULTILINE)
        assert f"{-MAX_PRIORITY} to {MAX_PRIORITY}" in row


@pytest.mark.parametrize("kind", [TokenizeRequest, DetokenizeRequest])
def test_tokenize(kind: type[msgspec.Struct]) -> None:
    named = set(re.findall(r"`(\w+)`", SECTIONS["POST /tokenize"]))
    assert fields(kind) <= named


@pytest.mark.parametrize("page", ["http-api.md", "errors.md"])
def test_f37_the_sizes_are_the_bounds(page: str) -> None:
    text = " ".join((PAGES / page).read_text(encoding="utf-8").split())
    inner = f"{OBJECT_BOUNDS.parts:,} objects, lists and strings and {(OBJECT_BOUNDS.bytes or 0) // 10**6} MB"
    assert inner in text
    assert f"{BODY_BOUNDS.parts:,} objects, lists and strings (including member names)" in text
    assert f" {BODY_BOUNDS.values:,} values" in text
    assert f" {BODY_BOUNDS.escapes:,} backslash escapes" in text
    assert f" {BODY_BOUNDS.wide_bytes:,} bytes of characters beyond ASCII" in text
    if page == "http-api.md":
        assert f"nest {OBJECT_BOUNDS.depth} deep" in text
        assert f"a schema has at most {MAX_SOURCE_CHARS:,} characters" in text
