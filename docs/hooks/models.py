"""An mkdocs hook that writes the table of architectures of operating/models.md from the families."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from agentflow.engine.models.families.registry import FAMILIES

MARK = "<!-- architectures -->"


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replaces the mark with the table."""
    return markdown.replace(MARK, "\n".join(_table())) if MARK in markdown else markdown


def _table() -> Iterator[str]:
    yield "| architecture in `config.json` | models | GGUF |"
    yield "|---|---|---|"
    for family in FAMILIES.values():
        gguf = ", ".join(f"`{name}`" for name in family.gguf) or "no"
        yield f"| `{family.architecture}` | {family.models} | {gguf} |"
