"""Runs the Python blocks of a documentation page, which may await, in order and in one namespace.

A block marked ``python`` runs. In it, lines that begin with ``# →`` show its output, ``...`` standing for
anything. A block marked ``py`` needs another package, a model or a server: it runs on a server of the test,
or in a separate test, and is only compiled if one of its packages is missing.
"""

from __future__ import annotations

import ast
import contextlib
import doctest
import importlib.util
import inspect
import io
import re
import textwrap
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

import anyio.to_thread

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"


class Block(NamedTuple):
    """A Python block: the heading above it, the number of its first line in the page, its text."""

    heading: str
    line: int
    source: str
    runs: bool = True


def pages() -> list[Path]:
    """The pages with Python blocks, and the README."""
    found = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
    return [page for page in found if blocks_of(page)]


def blocks_of(page: Path) -> list[Block]:
    """The page's Python blocks, in order. Blocks in tabs are indented."""
    found: list[Block] = []
    heading, start, runs = "", None, True
    lines = page.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if start is None and line.startswith("#"):
            heading = line.lstrip("# ")
        elif start is None and (fence := re.match(r"```(python|py)\b", text)):
            start, runs = number + 1, fence[1] == "python"
        elif start is not None and text.startswith("```"):
            source = textwrap.dedent("\n".join(lines[start - 1 : number - 1]) + "\n")
            found.append(Block(heading, start, source, runs))
            start = None
    return found


def compiled(page: Path, block: Block) -> CodeType:
    """The block as code, with the page's line numbers."""
    source = "\n" * (block.line - 1) + block.source
    code = compile(source, str(page), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    assert isinstance(code, CodeType)
    return code


def with_packages(blocks: Sequence[Block]) -> list[Block]:
    """The page's blocks marked ``py`` before the first one that imports a missing package."""
    return list(takewhile(_has_packages, [block for block in blocks if not block.runs]))


def _has_packages(block: Block) -> bool:
    names = set[str]()
    for node in ast.walk(ast.parse(block.source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
    return all(_is_installed(name) for name in names)


def _is_installed(name: str) -> bool:
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError:  # not even the package around it
        return False
    # A folder of tests of that name is a package without a file.
    return spec is not None and spec.origin is not None


async def run_block(page: Path, block: Block, namespace: dict[str, Any]) -> None:
    """Runs the block, and compares its output with the shown output."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = compiled(page, block)
        if code.co_flags & inspect.CO_COROUTINE:
            await eval(code, namespace)
        else:  # in a thread without an event loop: ``af.run`` wants none
            await anyio.to_thread.run_sync(exec, code, namespace)
    shown = "".join(f"{text}\n" for text in re.findall(r"^ *# → ?(.*)$", block.source, flags=re.MULTILINE))
    found = re.sub(r"(?<=[^\n])\Z", "\n", printed.getvalue())  # the last line may have no end
    assert doctest.OutputChecker().check_output(shown, found, doctest.ELLIPSIS), (
        f"the block at line {block.line} shows\n{shown}and prints\n{found}"
    )
