"""The pages of the APIs of Ollama, SGLang and programs name every field of a request, and no other."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from agentflow.server.ollama.models import MANAGEMENT
from agentflow.server.ollama.routes import OLLAMA
from agentflow.server.ollama.types import (
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaOptions,
)
from agentflow.server.programs_api.types import (
    Placeholder,
    ProgramRequest,
    ProgramSampling,
    SubmitRequest,
    VariableQuery,
)
from agentflow.server.routes import ROUTES
from agentflow.server.sglang.models import FLUSH
from agentflow.server.sglang.types import SamplingFields, SglangRequest

REFERENCE = Path(__file__).parents[2].joinpath("docs", "reference")
OLLAMA_PAGE = REFERENCE.joinpath("ollama-api.md").read_text(encoding="utf-8")
PROGRAMS_PAGE = REFERENCE.joinpath("programs-api.md").read_text(encoding="utf-8")
SGLANG_PAGE = REFERENCE.joinpath("sglang-api.md").read_text(encoding="utf-8")


def section(page: str, heading: str) -> str:
    """The text under a heading, up to the next one."""
    return re.split(r"^#+ ", page.partition(f"# {heading}\n")[2], flags=re.MULTILINE)[0]


def in_table(text: str) -> set[str]:
    """The names in the first column."""
    rows = re.findall(r"^\| (`[^|]*) \|", text, re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`(\w+)`", row)}


def paths_in(page: str, heading: str) -> set[str]:
    """The paths that are named under a heading."""
    return set(re.findall(r"`(?:GET |POST |HEAD )?(/[\w/]*)`", section(page, heading)))


@pytest.mark.parametrize(
    ("page", "heading", "kinds"),
    [
        (OLLAMA_PAGE, "Chat and generate", (OllamaChatRequest, OllamaGenerateRequest)),
        (OLLAMA_PAGE, "Options", (OllamaOptions,)),
        (SGLANG_PAGE, "Generate", (SglangRequest,)),
        (SGLANG_PAGE, "Sampling parameters", (SamplingFields,)),
        (PROGRAMS_PAGE, "Register and close", (ProgramRequest,)),
        (PROGRAMS_PAGE, "Submit", (SubmitRequest, Placeholder)),
        (PROGRAMS_PAGE, "Sampling parameters", (ProgramSampling,)),
        (PROGRAMS_PAGE, "Get", (VariableQuery,)),
    ],
)
def test_each_field_has_its_line(page: str, heading: str, kinds: tuple[type[msgspec.Struct], ...]) -> None:
    known = {name for kind in kinds for name in kind.__struct_encode_fields__}
    assert in_table(section(page, heading)) == known


def test_each_field_of_embeddings_is_named() -> None:
    named = set(re.findall(r"`(\w+)`", section(OLLAMA_PAGE, "Embeddings")))
    kinds = (OllamaEmbedRequest, OllamaEmbeddingsRequest)
    assert named == {name for kind in kinds for name in kind.__struct_encode_fields__}


def test_each_endpoint_is_listed() -> None:
    of_ollama = {route.path for route in ROUTES if route.error_format is OLLAMA}
    assert paths_in(OLLAMA_PAGE, "Ollama API") == of_ollama | {*MANAGEMENT, "/"}
    of_sglang = {route.path for route in ROUTES if "sglang" in route.handler.__module__}
    listed = paths_in(SGLANG_PAGE, "SGLang API") - {"/health/ready"}
    assert listed == of_sglang | {FLUSH, "/health_generate"}
