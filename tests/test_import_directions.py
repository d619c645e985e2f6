"""The directions of import: who may know whom, and what a light import must not load.

- The frontend (``agentflow/*.py``, ``agentflow/backends``) knows neither the server nor what it is built
  from. ``backends/local.py`` and ``cli.py`` may import the server, but only when they run it: inside
  functions, or for the type checker alone.
- ``agentflow/server/core`` is pure: the standard library, numpy, the errors, the sampling parameters, and
  how Mermaid's labels are written.
- ``agentflow/kernels`` knows no other module of agentflow.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
HEAVY = (
    "torch",
    "transformers",
    "starlette",
    "uvicorn",
    "prometheus_client",
    "safetensors",
    "tokenizers",
    "llguidance",
    "accelerate",
)
LAZY_FILES = ("agentflow/backends/local.py", "agentflow/cli.py")
CORE_MAY_IMPORT = (
    "numpy",
    "agentflow.errors",
    "agentflow.language.mermaid_text",
    "agentflow.protocol.sampling",
    "agentflow.server.core",
)


@dataclass(frozen=True)
class Import:
    """One imported module, with ``lazy`` if loading the file does not load it."""

    module: str
    line: int
    lazy: bool


def _is_below(module: str, *parents: str) -> bool:
    return any(module == parent or module.startswith(f"{parent}.") for parent in parents)


def _is_for_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def _names(node: ast.AST, package: str, known: set[str]) -> Iterator[str]:
    """The modules that one statement or call imports; ``from package import module`` names the module."""
    match node:
        case ast.Import(names=names):
            yield from (alias.name for alias in names)
        case ast.ImportFrom(module=module, names=names, level=level):
            parents = package.split(".")[: len(package.split(".")) - level + 1] if level else []
            base = ".".join([*parents, *([module] if module else [])])
            for alias in names:
                yield f"{base}.{alias.name}" if f"{base}.{alias.name}" in known else base
        case ast.Call(func=function, args=[ast.Constant(value=str(name)), *_]):
            if ast.unparse(function) in ("importlib.import_module", "import_module", "__import__"):
                yield name


def _imports(node: ast.AST, package: str, known: set[str], lazy: bool = False) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        for name in _names(child, package, known):
            yield Import(name, getattr(child, "lineno", 0), lazy)
        within = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) or _is_for_type_checking(child)
        yield from _imports(child, package, known, lazy or within)


def _is_refused(file: str, found: Import) -> bool:
    module = found.module
    if file.startswith("agentflow/kernels/"):
        return _is_below(module, "agentflow") and not _is_below(module, "agentflow.kernels")
    if file.startswith("agentflow/server/core/"):
        known = _is_below(module, *CORE_MAY_IMPORT) or module.split(".")[0] in sys.stdlib_module_names
        return not known
    if file.startswith("agentflow/server/"):
        return False
    if file in LAZY_FILES and found.lazy:
        return _is_below(module, *HEAVY)
    return _is_below(module, "agentflow.server", "agentflow.kernels", *HEAVY)


def wrong_imports(root: Path) -> list[str]:
    """Every import below ``root/agentflow`` that goes in a forbidden direction, as ``file:line: module``."""
    files = sorted((root / "agentflow").rglob("*.py"))
    dotted = {file: ".".join(file.relative_to(root).with_suffix("").parts) for file in files}
    known = {name.removesuffix(".__init__") for name in dotted.values()}
    wrong = []
    for file in files:
        path = file.relative_to(root).as_posix()
        package = dotted[file].rpartition(".")[0]
        for found in _imports(ast.parse(file.read_text(encoding="utf-8")), package, known):
            if _is_refused(path, found):
                wrong.append(f"{path}:{found.line}: {found.module}")
    return wrong


def test_agentflow_imports_in_the_right_directions() -> None:
    assert wrong_imports(ROOT) == []


@pytest.mark.parametrize(
    ("file", "source", "module"),
    [
        ("agentflow/language/state.py", "import torch", "torch"),
        ("agentflow/language/state.py", "def f():\n    import torch.nn as nn", "torch.nn"),
        ("agentflow/language/state.py", "from starlette.websockets import WebSocket", "starlette.websockets"),
        ("agentflow/language/state.py", "from agentflow import server", "agentflow.server"),
        ("agentflow/language/state.py", "from . import server", "agentflow.server"),
        ("agentflow/language/state.py", "from .server.engine import Engine", "agentflow.server.engine"),
        ("agentflow/language/state.py", "class A:\n    x = __import__('torch')", "torch"),
        ("agentflow/language/state.py", "import importlib\nx = importlib.import_module('torch')", "torch"),
        ("agentflow/backends/remote.py", "from ..server import engine", "agentflow.server.engine"),
        ("agentflow/backends/local.py", "import agentflow.server.engine", "agentflow.server.engine"),
        ("agentflow/backends/local.py", "def f():\n    import torch", "torch"),
        ("agentflow/cli.py", "if True:\n    import agentflow.server", "agentflow.server"),
        ("agentflow/server/core/policy.py", "import torch", "torch"),
        ("agentflow/server/core/policy.py", "import msgspec", "msgspec"),
        ("agentflow/server/core/policy.py", "from agentflow import ops", "agentflow.protocol.ops"),
        ("agentflow/server/core/policy.py", "from .. import engine", "agentflow.server.engine"),
        ("agentflow/kernels/ops.py", "from agentflow.errors import NotSupported", "agentflow.errors"),
        ("agentflow/kernels/ops.py", "async def f():\n    from .. import server", "agentflow.server"),
    ],
)
def test_a_wrong_import_is_found(tmp_path: Path, file: str, source: str, module: str) -> None:
    line = len(source.splitlines())
    assert _wrong_in_tree(tmp_path, file, source) == [f"{file}:{line}: {module}"]


@pytest.mark.parametrize(
    ("file", "source"),
    [
        (
            "agentflow/language/state.py",
            "import anyio\nfrom .errors import StateClosed\nfrom agentflow import ops",
        ),
        ("agentflow/backends/local.py", "def f():\n    from agentflow.server.engine import Engine"),
        (
            "agentflow/backends/local.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import agentflow.server",
        ),
        ("agentflow/cli.py", "async def serve():\n    from .server import engine"),
        (
            "agentflow/server/core/policy.py",
            "import heapq, numpy.typing\nfrom agentflow.errors import NotSupported",
        ),
        ("agentflow/server/core/policy.py", "from . import request\nfrom ..core import radix_cache"),
        ("agentflow/server/engine.py", "import torch\nimport starlette\nfrom agentflow.kernels import ops"),
        ("agentflow/kernels/ops.py", "import torch\nfrom . import reference_ops"),
    ],
)
def test_a_right_import_is_let_through(tmp_path: Path, file: str, source: str) -> None:
    assert _wrong_in_tree(tmp_path, file, source) == []


def _wrong_in_tree(root: Path, file: str, source: str) -> list[str]:
    """``wrong_imports`` of a small tree in which only ``file`` imports anything."""
    modules = (
        "errors",
        "ops",
        "server/engine",
        "server/core/request",
        "kernels/reference_ops",
        "backends/remote",
    )
    for module in modules:
        (root / "agentflow" / module).with_suffix(".py").parent.mkdir(parents=True, exist_ok=True)
        (root / "agentflow" / module).with_suffix(".py").touch()
    for folder in ("", "server", "server/core", "kernels", "backends"):
        (root / "agentflow" / folder / "__init__.py").touch()
    (root / file).write_text(source)
    return wrong_imports(root)


def test_importing_the_frontend_and_the_core_loads_nothing_heavy() -> None:
    folders = ("agentflow", "agentflow/backends", "agentflow/server/core")
    files = [file for folder in folders for file in sorted((ROOT / folder).glob("*.py"))]
    modules = [
        ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for file in files
    ]
    assert {"agentflow", "agentflow.errors", "agentflow.server.core.radix_cache"} <= set(modules)
    script = (
        "import importlib, sys\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    child = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (child.stdout, child.stderr) == ("[]\n", "")
