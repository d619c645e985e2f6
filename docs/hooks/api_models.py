"""An mkdocs hook that writes the tables of reference/api-models.md from the table of models."""

from __future__ import annotations

from typing import Any

from agentflow.backends.apis.capability_table import facts_as_markdown

MARK = "<!-- api models -->"


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replaces the mark with the tables."""
    return markdown.replace(MARK, facts_as_markdown()) if MARK in markdown else markdown
