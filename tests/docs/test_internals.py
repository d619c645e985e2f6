"""The pages for contributors show the code as it is, and name files and folders that exist."""

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


def test_the_plain_engine_is_shown_whole() -> None:
    page = (DOCS / "internals" / "plain-engine.md").read_text(encoding="utf-8")
    shown = "".join(re.findall(r"``` \{\.python\}\n(.*?)```", page, flags=re.DOTALL))
    source = (ROOT / "tests" / "support" / "plain_engine.py").read_text(encoding="utf-8")
    assert [line for line in shown.splitlines() if line] == [line for line in source.splitlines() if line]
    assert source.count("\n") <= 300


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_paths_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    paths = re.findall(r"\b(?:agentflow|tests|benchmarks|docs)/[\w/.-]*\w", text)
    assert [path for path in paths if not (ROOT / path).exists()] == []
