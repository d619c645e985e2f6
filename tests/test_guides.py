"""The guides: the docstring of each package names its modules and folders, in reading order."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
WINGS = (
    "server",
    "cluster",
    "engine",
    "language",
    "protocol",
    "runtime",
    "backends",
    "recording",
    "integrations",
    "cli",
    "kernels",
)
# Names of modules, and paths to them. Names of commands, classes and arguments look different.
_MODULE = re.compile(r"``([a-z_][a-z0-9_]*(?:/[a-z_][a-z0-9_]*)*)/?``")


def missing_names(package: Path) -> list[str]:
    """The modules and folders of a package that its guide does not name."""
    modules = {path.stem for path in package.glob("*.py")} - {"__init__"}
    folders = {path.parent.name for path in package.glob("*/__init__.py")}
    return sorted((modules | folders) - set(_named(package)))


def wrong_names(package: Path, root: Path) -> list[str]:
    """The names in a package's guide that are no module or folder in it or in one of its parents."""
    depth = len(package.relative_to(root).parts)
    places = [package, *package.parents[:depth]]
    return [
        name
        for name in _named(package)
        if not any((place / name).is_dir() or (place / f"{name}.py").is_file() for place in places)
    ]


def _named(package: Path) -> Iterator[str]:
    source = (package / "__init__.py").read_text(encoding="utf-8")
    for found in _MODULE.finditer(ast.get_docstring(ast.parse(source)) or ""):
        yield found[1]


PACKAGES = [
    ROOT / "agentflow",
    *(path.parent for wing in WINGS for path in sorted((ROOT / "agentflow" / wing).rglob("__init__.py"))),
]


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_guide_names_the_modules_of_its_package(package: Path) -> None:
    assert missing_names(package) == []
    assert wrong_names(package, ROOT) == []


def test_a_missing_and_a_wrong_name_are_found(tmp_path: Path) -> None:
    package = tmp_path / "agentflow/models"
    (package / "families").mkdir(parents=True)
    for name in ("loader", "sampler", "families/__init__", "families/llama", "../cache"):
        (package / f"{name}.py").touch()
    guide = "``sampler``, ``families/llama``, ``cache``, ``LoRA`` and ``gone``; ``models/gone/``."
    (package / "__init__.py").write_text(f'"""{guide}"""')
    assert missing_names(package) == ["families", "loader"]
    assert wrong_names(package, tmp_path) == ["gone", "models/gone"]
