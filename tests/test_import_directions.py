"""Directions of import: between wings, between the rooms of a wing, and the limits of light imports.

Imports run down the table ``MAY_IMPORT``, also imports inside of functions and for the type checker. The
frontend (``language`` and the modules next to it) and the server are two branches on the same ``runtime`` and
``protocol``; the one bridge between them is ``backends/local.py``, which loads the engine when it runs it.
"""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
_GROUND = ("errors", "version")
_RUNTIME = (*_GROUND, "protocol", "runtime")
_FRONTEND = (*_RUNTIME, "language", "recording", "backends")
_ENGINE = (*_RUNTIME, "engine", "kernels")
MAY_IMPORT = {
    "errors": (),
    "version": (),
    "__main__": ("cli",),
    "kernels": ("kernels",),
    "protocol": (*_GROUND, "protocol"),
    "runtime": _RUNTIME,
    "language": (*_RUNTIME, "language"),
    "recording": (*_RUNTIME, "recording"),
    "backends": _FRONTEND,
    "integrations": (*_FRONTEND, "integrations"),
    "engine": _ENGINE,
    "cluster": (*_ENGINE, "cluster"),
    "server": (*_ENGINE, "cluster", "server"),
    "cli": (*_ENGINE, *_FRONTEND, "cluster", "server", "cli"),
}
# The rooms (modules and folders) of each wing from the ground up: a room imports only rooms before it.
ROOMS = {
    "protocol": (
        "unreadable",
        "growing_text",
        "constraint",
        "schemas",
        "bounds",
        "grammars",
        "record",
        "sampling",
        "images",
        "events",
        "chat",
        "text",
        "decisions",
        "ops",
        "backend",
        "batches",
        "op_table",
        "wire",
    ),
    "runtime": (
        "backoff",
        "circuit",
        "payer",
        "declared",
        "limits",
        "programs",
        "generator",
        "loop_turns",
        "task_group",
        "interpreter",
        "locked_file",
        "telemetry",
        "word_embedding",
    ),
    "language": (
        "records",
        "markers",
        "by_name",
        "failures",
        "typed",
        "expressions",
        "media",
        "gen",
        "op_log",
        "display",
        "observing",
        "uploads",
        "link",
        "states",
        "graphs",
        "program",
        "agents",
        "batch",
        "session",
        "host",
        "race",
    ),
    "backends": (
        "local",
        "websocket",
        "op_queue",
        "cursors",
        "remote",
        "apis",
        "several",
        "open_session",
        "replay",
        "scripted_answers",
        "scripted_generator",
        "scripted",
    ),
    "recording": ("images", "file", "places", "runs"),
    "engine": (
        "machine",
        "store",
        "grammar",
        "cache",
        "media_run",
        "text",
        "token_tree",
        "batch",
        "runner",
        "request",
        "media",
        "models",
        "scheduling",
        "messages",
        "adapters",
        "constrained",
        "tenant",
        "watching",
        "outputs",
        "engine",
        "client",
        "generator",
        "process",
        "options",
        "local_engine",
        "simulator",
    ),
    "kernels": (
        "activations",
        "uploads",
        "device_stream",
        "page_advice",
        "inputs",
        "ranks",
        "decoder_weights",
        "native_library",
        "attention",
        "linear",
        "rows",
        "sampling",
        "native_ops",
        "triton_ops",
        "platforms",
        "__main__",
    ),
    "cluster": ("routing", "simulated", "ray", "replicas"),
    "server": (
        "log",
        "addresses",
        "errors",
        "event_stream",
        "config",
        "stores",
        "tenants",
        "image_fetcher",
        "models",
        "websocket",
        "responses",
        "programs",
        "metrics",
        "service",
        "http",
        "completion",
        "compatible",
        "openai",
        "anthropic",
        "ollama",
        "sglang",
        "programs_api",
        "replicas",
        "routes",
        "openapi",
        "origin_guard",
        "ui",
        "app",
        "serve",
        "gateway",
    ),
    "integrations": ("background_loop", "client", "wiring"),
    "cli": (
        "command",
        "server_query",
        "word_wrap",
        "run",
        "chat",
        "models",
        "pull",
        "replay",
        "doctor",
        "operating",
        "main",
    ),
}
# Rooms of which none imports another, in any order.
SIBLINGS = {"server": {"openai", "anthropic", "ollama", "sglang", "programs_api"}}
# Imports in functions that break the table or the rule of light imports.
LAZY = {
    ("agentflow/backends/local.py", "agentflow.engine.local_engine"),
}
LIGHT = ("errors.py", "protocol", "runtime", "language", "recording", "backends", "integrations")
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
TEXT = ("tokenizer", "chat_template", "chat_layout", "detokenizer", "state.token_state")
# The scheduling core: the standard library, numpy, and these. A request has the message that submitted it.
CORE = (
    "agentflow/engine/batch.py",
    "agentflow/engine/media_run.py",
    "agentflow/engine/token_tree.py",
    "agentflow/engine/cache/",
    "agentflow/engine/scheduling/",
)
CORE_MAY_IMPORT = (
    "numpy",
    "agentflow.errors",
    "agentflow.protocol.sampling",
    "agentflow.engine.batch",
    "agentflow.engine.media_run",
    "agentflow.engine.request",
    "agentflow.engine.runner",
    "agentflow.engine.token_tree",
    "agentflow.engine.cache",
    "agentflow.engine.scheduling",
    "agentflow.engine.grammar.grammar",
    "agentflow.kernels.sampling.no_choice",
)


def _is_below(module: str, *parents: str) -> bool:
    return any(module == parent or module.startswith(f"{parent}.") for parent in parents)


def _imports(source: str, package: str, known: set[str]) -> Iterator[tuple[str, int]]:
    """Every imported module with its line, wherever it stands; ``from package import module`` names the
    module."""
    tree = ast.parse(source)
    # Most files call no function that imports, so that the nodes of their expressions, most of all, are left.
    nodes = ast.walk(tree) if re.search(r"import_module|__import__", source) else _statements(tree)
    for node in nodes:
        match node:
            case ast.Import(names=names):
                yield from ((alias.name, node.lineno) for alias in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                parents = package.split(".")[: len(package.split(".")) - level + 1] if level else []
                base = ".".join([*parents, *([module] if module else [])])
                for alias in names:
                    full = f"{base}.{alias.name}"
                    yield (full if full in known else base), node.lineno
            case ast.Call(
                func=ast.Name(id="import_module" | "__import__") | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                yield name, node.lineno


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    for field in ("body", "orelse", "finalbody", "handlers", "cases"):
        inner = getattr(node, field, None)
        for each in inner if isinstance(inner, list) else ():
            yield each
            yield from _statements(each)


def _is_rejected(file: str, module: str) -> bool:
    wing = file.split("/")[1].removesuffix(".py")
    if wing == "__init__" or (file, module) in LAZY:
        return False
    if file.startswith(CORE):
        return not (_is_below(module, *CORE_MAY_IMPORT) or module.split(".")[0] in sys.stdlib_module_names)
    if not _is_below(module, "agentflow"):
        return wing.split(".")[0] in {name.removesuffix(".py") for name in LIGHT} and _is_below(
            module, *HEAVY
        )
    return module == "agentflow" or module.split(".")[1] not in MAY_IMPORT[wing]


@dataclass(frozen=True)
class _Module:
    """A file below ``agentflow``, its name (without ``__init__``), and its imports with their lines."""

    file: str
    name: str
    imports: tuple[tuple[str, int], ...]


@functools.cache
def _modules(root: Path) -> list[_Module]:
    files = {file.relative_to(root): file for file in sorted((root / "agentflow").rglob("*.py"))}
    names = {path: ".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in files}
    known, made = set(names.values()), []
    for path, file in files.items():
        imports = _imports(file.read_text(encoding="utf-8"), ".".join(path.parent.parts), known)
        made.append(_Module(path.as_posix(), names[path], tuple(imports)))
    return made


def wrong_imports(root: Path) -> list[str]:
    """Every import below ``root/agentflow`` that goes in a forbidden direction, as ``file:line: module``."""
    return [
        f"{made.file}:{line}: {module}"
        for made in _modules(root)
        for module, line in made.imports
        if _is_rejected(made.file, module)
    ]


def upward_imports(root: Path) -> list[str]:
    """Every import between two rooms of a wing against the order of ``ROOMS``, as ``file:line: module``."""
    upward = []
    for made in _modules(root):
        _, wing, room, *_ = (*made.name.split("."), "", "")
        if wing not in ROOMS or not room:
            continue
        lower = ROOMS[wing][: ROOMS[wing].index(room) + 1]
        if room in SIBLINGS.get(wing, ()):
            lower = (room, *[name for name in lower if name not in SIBLINGS[wing]])
        for module, line in made.imports:
            if _is_below(module, f"agentflow.{wing}") and module.split(".")[2:3] not in [
                [name] for name in lower
            ]:
                upward.append(f"{made.file}:{line}: {module}")
    return upward


def test_agentflow_imports_in_the_right_directions() -> None:
    assert wrong_imports(ROOT) == []


def test_rooms_import_only_rooms_below_them() -> None:
    assert upward_imports(ROOT) == []


@pytest.mark.parametrize("wing", ROOMS)
def test_the_order_has_every_room_of_a_wing(wing: str) -> None:
    folder = ROOT / "agentflow" / wing
    modules = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    folders = {path.parent.name for path in folder.glob("*/__init__.py")}
    assert sorted(ROOMS[wing]) == sorted(modules | folders)


def test_an_upward_import_is_found(tmp_path: Path) -> None:
    room = tmp_path / "agentflow/recording/file.py"
    room.parent.mkdir(parents=True)
    for name in ("__init__", "runs", "places"):
        (room.parent / f"{name}.py").touch()
    room.write_text("from . import runs")
    (room.parent / "runs.py").write_text("from .file import x\nfrom agentflow.recording import places")
    assert upward_imports(tmp_path) == ["agentflow/recording/file.py:1: agentflow.recording.runs"]


def test_an_import_of_a_sibling_is_found(tmp_path: Path) -> None:
    for room in ("openai", "ollama", "http"):
        folder = tmp_path / "agentflow/server" / room
        folder.mkdir(parents=True)
        (folder / "__init__.py").touch()
        (folder / "types.py").touch()
    types = tmp_path / "agentflow/server/ollama/types.py"
    types.write_text("from ..http import types as http\nfrom ..openai import types as openai")
    assert upward_imports(tmp_path) == ["agentflow/server/ollama/types.py:2: agentflow.server.openai.types"]


def circles(root: Path) -> list[str]:
    """The modules below ``root/agentflow``, and the rooms of each folder, on a circle of imports."""
    modules = _modules(root)
    names = {made.name for made in modules}
    imports = {made.name: {name for name, _ in made.imports if name in names} for made in modules}
    found = [*_on_circles(imports)]
    for folder in sorted({made.file.rpartition("/")[0].replace("/", ".") for made in modules}):
        rooms: dict[str, set[str]] = {}
        for name, imported in imports.items():
            if name.startswith(f"{folder}."):
                room = _room(name, folder)
                below = {_room(one, folder) for one in imported if one.startswith(f"{folder}.")}
                rooms.setdefault(room, set()).update(below - {room})
        found += _on_circles(rooms)
    return sorted({*found})


def _room(module: str, folder: str) -> str:
    return f"{folder}.{module.removeprefix(f'{folder}.').partition('.')[0]}"


def _on_circles(imports: dict[str, set[str]]) -> list[str]:
    while True:
        imported = set().union(*imports.values())
        # Without imports from the rest, or without an import by the rest, a name is on no circle.
        rest = {
            name: imports[name] & imports.keys()
            for name in imports
            if name in imported and imports[name] & imports.keys()
        }
        if rest == imports:
            return sorted(rest)
        imports = rest


def test_no_module_and_no_room_imports_itself_in_a_circle() -> None:
    assert circles(ROOT) == []


def test_a_circle_of_rooms_is_found(tmp_path: Path) -> None:
    for room in ("chat", "calls"):
        folder = tmp_path / "agentflow/backends/apis" / room
        folder.mkdir(parents=True)
        for name in ("__init__", "one", "two"):
            (folder / f"{name}.py").touch()
    apis = tmp_path / "agentflow/backends/apis"
    (apis / "__init__.py").touch()
    (apis / "chat/one.py").write_text("from agentflow.backends.apis.calls.one import x")
    (apis / "calls/two.py").write_text("from agentflow.backends.apis.chat.two import x")
    assert circles(tmp_path) == ["agentflow.backends.apis.calls", "agentflow.backends.apis.chat"]


@pytest.mark.parametrize(
    ("file", "source", "module"),
    [
        ("language/states/state.py", "import torch", "torch"),
        ("language/states/state.py", "def f():\n    import torch.nn as nn", "torch.nn"),
        ("language/states/state.py", "from starlette.websockets import WebSocket", "starlette.websockets"),
        ("language/states/state.py", "from agentflow import server", "agentflow.server"),
        ("language/states/state.py", "from ... import server", "agentflow.server"),
        ("language/states/state.py", "from ...engine.engine import Engine", "agentflow.engine.engine"),
        ("language/states/state.py", "from agentflow.backends import remote", "agentflow.backends.remote"),
        ("language/states/state.py", "class A:\n    x = __import__('torch')", "torch"),
        ("language/states/state.py", "import importlib\nx = importlib.import_module('torch')", "torch"),
        (
            "language/states/state.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import agentflow.backends.remote",
            "agentflow.backends.remote",
        ),
        ("protocol/ops.py", "from agentflow import runtime", "agentflow.runtime"),
        (
            "protocol/ops.py",
            "try:\n    x = 1\nexcept A:\n    from agentflow import runtime",
            "agentflow.runtime",
        ),
        (
            "protocol/ops.py",
            "for x in y:\n    pass\nelse:\n    import agentflow.runtime",
            "agentflow.runtime",
        ),
        ("protocol/ops.py", "match x:\n    case 1:\n        import agentflow.runtime", "agentflow.runtime"),
        ("protocol/ops.py", "try:\n    x = 1\nfinally:\n    import agentflow.runtime", "agentflow.runtime"),
        ("backends/remote.py", "def f():\n    from ..engine import engine", "agentflow.engine.engine"),
        ("backends/local.py", "def f():\n    import torch", "torch"),
        ("engine/engine.py", "from agentflow.server import app", "agentflow.server.app"),
        (
            "engine/engine.py",
            "from agentflow.language import gen",
            "agentflow.language",
        ),
        ("engine/scheduling/pace.py", "import torch", "torch"),
        ("engine/scheduling/pace.py", "import msgspec", "msgspec"),
        ("engine/scheduling/pace.py", "from agentflow.protocol import ops", "agentflow.protocol.ops"),
        ("engine/cache/radix_cache.py", "from .. import engine", "agentflow.engine.engine"),
        ("kernels/platforms.py", "from agentflow.errors import NotSupported", "agentflow.errors"),
        ("kernels/platforms.py", "async def f():\n    from .. import server", "agentflow.server"),
    ],
)
def test_a_wrong_import_is_found(tmp_path: Path, file: str, source: str, module: str) -> None:
    line = len(source.splitlines())
    assert _wrong_in_tree(tmp_path, file, source) == [f"agentflow/{file}:{line}: {module}"]


@pytest.mark.parametrize(
    ("file", "source"),
    [
        (
            "language/states/state.py",
            "import anyio\nfrom ..errors import StateClosed\nfrom agentflow.protocol import ops",
        ),
        ("backends/local.py", "def f():\n    from agentflow.engine.local_engine import start_engine"),
        ("cli/main.py", "async def serve():\n    from ..server import app"),
        (
            "engine/scheduling/pace.py",
            "import heapq, numpy.typing\nfrom agentflow.errors import NotSupported",
        ),
        ("engine/scheduling/pace.py", "from . import scheduler\nfrom ..cache import radix_cache"),
        ("engine/engine.py", "import torch\nimport numpy\nfrom agentflow.kernels import platforms"),
        ("kernels/platforms.py", "import torch\nfrom . import native_library"),
    ],
)
def test_a_right_import_is_let_through(tmp_path: Path, file: str, source: str) -> None:
    assert _wrong_in_tree(tmp_path, file, source) == []


def _wrong_in_tree(root: Path, file: str, source: str) -> list[str]:
    """``wrong_imports`` of a small tree in which only ``file`` imports anything."""
    modules = (
        "errors",
        "protocol/ops",
        "runtime/interpreter",
        "backends/remote",
        "language/state",
        "engine/engine",
        "engine/local_engine",
        "engine/cache/radix_cache",
        "engine/scheduling/scheduler",
        "kernels/native_library",
        "server/app",
    )
    for path in (*(root / "agentflow" / f"{module}.py" for module in modules), root / "agentflow" / file):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        for folder in path.relative_to(root).parents[:-1]:
            (root / folder / "__init__.py").touch()
    (root / "agentflow" / file).write_text(source)
    return wrong_imports(root)


def test_importing_the_frontend_and_the_core_loads_nothing_heavy() -> None:
    folders = [ROOT / "agentflow" / name for name in LIGHT] + [ROOT / name for name in CORE]
    files = [file for path in folders for file in (sorted(path.rglob("*.py")) if path.is_dir() else [path])]
    modules = [
        ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for file in files
    ]
    assert {"agentflow.language", "agentflow.errors", "agentflow.engine.cache.radix_cache"} <= set(modules)
    text = [f"agentflow.engine.text.{name}" for name in TEXT]
    script = (
        "import importlib, sys\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])\n"
        f"for name in {text!r}: importlib.import_module(name)\n"
        "print({'torch', 'transformers'} & set(sys.modules))"  # which the text of a prompt needs as little
    )
    child = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (child.stdout, child.stderr) == ("[]\nset()\n", "")


def test_names_of_test_modules_are_unique() -> None:
    """pytest imports test modules by their base name: with two of a name, it collects neither of the
    folders."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []


APIS = ("openai", "anthropic", "ollama", "sglang")  # their classes have the names that these APIs have
SAME_NAMES = {
    "AdapterTable": "the interface and Triton's",
    "GroupedAdapters": "the interface and Triton's",
    "TreeAttention": "the kernels' interface and the engine's record",
    "Ready": "the first message of two kinds of child processes",
    "Image": "the op and its file",
    "Video": "the op and its file",
    "Message": "as in af, and on the wire",
    "Reply": "as in af, and on the wire",
    "TextDelta": "as in af, and in an answer of the server",
    "Answer": "of an adapter's call, and of the server",
    "Delta": "of an adapter's call, and the event",
}


def test_names_of_classes_have_one_meaning() -> None:
    package = ROOT / "agentflow"
    names: Counter[str] = Counter()
    for file in package.rglob("*.py"):
        if file.relative_to(package).parts[:2] not in [("server", api) for api in APIS]:
            nodes = ast.parse(file.read_text(encoding="utf-8")).body
            names.update({node.name for node in nodes if isinstance(node, ast.ClassDef)})
    several = {name for name, count in names.items() if count > 1 and not name.startswith("_")}
    assert several == SAME_NAMES.keys()
