"""The pages for contributors show the code as it is, and name files and folders that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import anyio
import pytest
from support.docs.page_blocks import DOCS, ROOT
from support.walk import generation

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


def test_a_token_takes_the_described_steps() -> None:
    """The functions that the page names exist, and a generation calls them in its order."""
    page = (DOCS / "internals" / "architecture.md").read_text(encoding="utf-8")
    section = page.partition("## The life of a token\n")[2].partition("\n## ")[0]
    steps = re.split(r"^\d\. ", section, flags=re.MULTILINE)[1:]
    named = [re.findall(r"`([\w.]+)`\s+\(`(agentflow/[\w/]+\.py)`\)", step) for step in steps]
    assert len(steps) == 8
    assert all(named)
    functions = [(str(ROOT / file), name) for step in named for name, file in step]
    assert [found for found in functions if found[1] not in functions_of(found[0])] == []
    on_torch = {(file, name) for file, name in functions if "/models/" in file}  # the walk has a fake model
    assert len(on_torch) == 2
    calls = iter(anyio.run(generation).calls)
    assert [one for one in functions if one not in on_torch and one not in calls] == []  # each after the last


def functions_of(file: str) -> set[str]:
    """The functions and methods that a module defines."""
    tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    for owner in tree.body:
        if isinstance(owner, ast.ClassDef):
            names |= {f"{owner.name}.{node.name}" for node in owner.body if hasattr(node, "name")}
    return names
