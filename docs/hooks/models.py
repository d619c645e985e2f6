"""An mkdocs hook that writes the tables of architectures of operating/models.md and concepts/images.md."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from agentflow.engine.models.families.registry import FAMILIES
from agentflow.engine.store.native_architectures import IMAGE_ARCHITECTURES

MARK = "<!-- architectures -->"
IMAGE_MARK = "<!-- image architectures -->"


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replaces the marks with the tables."""
    for mark, table in ((MARK, _table), (IMAGE_MARK, _image_table)):
        if mark in markdown:
            markdown = markdown.replace(mark, "\n".join(table()))
    return markdown


def _table() -> Iterator[str]:
    yield "| architecture in `config.json` | models | GGUF |"
    yield "|---|---|---|"
    for family in FAMILIES.values():
        gguf = ", ".join(f"`{name}`" for name in family.gguf) or "no"
        yield f"| `{family.architecture}` | {family.models} | {gguf} |"


def _image_table() -> Iterator[str]:
    yield "| architecture in `config.json` | models |"
    yield "|---|---|"
    for family in FAMILIES.values():
        if family.architecture in IMAGE_ARCHITECTURES:
            yield f"| `{family.architecture}` | {family.models.partition(':')[0]} |"
