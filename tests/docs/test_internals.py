"""The pages for contributors show the current code, and name files and folders that exist."""

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


NAMED = re.compile(r"`([\w.]+)`\s+\(`((?:agentflow|tests)/[\w/]+\.py)`\)")
"""A name, and in parentheses the file that defines it."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_named_files_define_the_names(page: Path) -> None:
    named = NAMED.findall(page.read_text(encoding="utf-8"))
    assert [name for name, file in named if name not in defined_in(ROOT / file)] == []


def test_a_generation_takes_the_steps_of_the_page_in_order() -> None:
    page = (DOCS / "internals" / "architecture.md").read_text(encoding="utf-8")
    section = page.partition("## The life of a token\n")[2].partition("\n## ")[0]
    steps = [NAMED.findall(step) for step in re.split(r"^\d\. ", section, flags=re.MULTILINE)[1:]]
    assert len(steps) == 8
    assert all(steps)
    functions = [(str(ROOT / file), name) for step in steps for name, file in step]
    on_torch = {(file, name) for file, name in functions if "/models/" in file}  # the walk has a fake model
    assert len(on_torch) == 2
    calls = iter(anyio.run(generation).calls)
    assert [one for one in functions if one not in on_torch and one not in calls] == []  # each after the last


UNUSED = (  # by a gen of plain text
    "language/markers.py",
    "language/states/traced.py",
    "language/states/readers.py",
    "language/states/reported.py",
    "language/failures/user_code.py",
    "language/typed/values.py",
    "runtime/interpreter/image_store.py",
    "runtime/programs/deduction.py",
    "engine/media/known_media.py",
    "engine/text/reasoning.py",
    "engine/text/chat_template.py",
    "runtime/task_group.py",
)
MAX_FILES = 41
"""A generation enters at most this many files, the snapshots that are made from time to time among them.
Divide files, but keep the way through them short."""


def test_a_generation_enters_no_file_of_features_that_it_does_not_use() -> None:
    unused = {str(ROOT / "agentflow" / file) for file in UNUSED}
    assert [file for file in unused if not Path(file).exists()] == []
    entered = anyio.run(generation).files.keys()
    assert unused & entered == set()
    assert len(entered) <= MAX_FILES


def defined_in(file: Path) -> set[str]:
    """The classes, functions, methods and constants of a module."""
    names: set[str] = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        match node:
            case ast.ClassDef(name=name, body=body):
                names |= {name, *(f"{name}.{one.name}" for one in body if hasattr(one, "name"))}
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                names.add(name)
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                names.add(name)
    return names
