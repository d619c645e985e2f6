"""Docstrings: guides of packages name the modules and folders in reading order, and functions with many
parameters list them."""

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


MAX_UNLISTED = 4
"""Public functions with more parameters list them."""
# A docstring refers to a function or class whose arguments these are.
_REFERS = re.compile(r"(?i)\b(?:like|arguments\s+are)\b[^.]*``")
RECORDS = {"engine/cache/nodes.py: Node.__init__"}  # a comment for each field


def unlisted_parameters(file: Path) -> list[str]:
    """The public functions and methods whose docstrings lack a list of their parameters. Methods without a
    docstring inherit their base class's docstring."""
    return list(_unlisted(ast.parse(file.read_text(encoding="utf-8")), "", ""))


def _unlisted(scope: ast.Module | ast.ClassDef, path: str, outer: str) -> Iterator[str]:
    for node in scope.body:
        match node:
            case ast.ClassDef(name=name) if not name.startswith("_"):
                yield from _unlisted(node, f"{path}{name}.", ast.get_docstring(node) or "")
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                is_public = not name.startswith("_") or name == "__init__"
                if not is_public or any("jit" in ast.unparse(one) for one in node.decorator_list):
                    continue
                given = node.args
                names = [one.arg for one in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
                described = (ast.get_docstring(node) or "") + (outer if name == "__init__" else "")
                num_named = len(names) - (names[:1] in (["self"], ["cls"]))
                is_listed = "Args:" in described or _REFERS.search(described)
                if num_named > MAX_UNLISTED and described and not is_listed:
                    yield f"{path}{name}"


@pytest.mark.parametrize("wing", WINGS)
def test_functions_with_many_parameters_list_them(wing: str) -> None:
    package = ROOT / "agentflow"
    found = {
        f"{file.relative_to(package).as_posix()}: {name}"
        for file in sorted((package / wing).rglob("*.py"))
        for name in unlisted_parameters(file)
    }
    assert found - RECORDS == set()


def test_an_unlisted_parameter_is_found(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text(
        "def four(a, b, c, *, d):\n    'Adds.'\n"
        "def five(a, b, c, d, e):\n    'Adds.'\n"
        "def listed(a, b, c, d, e):\n    'Adds.\\n\\n    Args:\\n        a: One.'\n"
        "def like(a, b, c, d, e):\n    'Like ``listed``.'\n"
        "class Sum:\n    'A sum. The arguments are as in ``listed``.'\n"
        "    def __init__(self, a, b, c, d, e):\n        pass\n"
        "    def add(self, a, b, c, d, e):\n        'Adds.'\n"
    )
    assert unlisted_parameters(file) == ["five", "Sum.add"]
