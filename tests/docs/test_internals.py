"""The pages for contributors name files and folders that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.docs.page_blocks import DOCS, ROOT

PAGES = [*sorted((DOCS / "internals").glob("*.md")), ROOT / "CONTRIBUTING.md"]


def test_the_worked_example_is_a_family() -> None:
    page = (DOCS / "internals" / "add-a-model.md").read_text(encoding="utf-8")
    [block] = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    file = ROOT / "agentflow" / "engine" / "models" / "families" / "starcoder.py"
    assert block == file.read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_paths_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    paths = re.findall(r"\b(?:agentflow|tests|benchmarks|docs)/[\w/.-]*\w", text)
    assert [path for path in paths if not (ROOT / path).exists()] == []
