"""Runs the Python blocks of a documentation page, which may await, in order and in one namespace.

In a block, lines that begin with ``# →`` show what it prints, ``...`` standing for anything.
"""

from __future__ import annotations

import ast
import contextlib
import doctest
import inspect
import io
import re
from pathlib import Path
from typing import Any, NamedTuple

DOCS = Path(__file__).parents[3] / "docs"


class Block(NamedTuple):
    """A Python block: the heading above it, the number of its first line in the page, its text."""

    heading: str
    line: int
    source: str


def blocks_of(page: Path) -> list[Block]:
    """The page's Python blocks, in order."""
    found: list[Block] = []
    heading, start = "", None
    lines = page.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, 1):
        if start is None and line.startswith("#"):
            heading = line.lstrip("# ")
        elif start is None and line.startswith("```python"):
            start = number + 1
        elif start is not None and line.startswith("```"):
            found.append(Block(heading, start, "\n".join(lines[start - 1 : number - 1]) + "\n"))
            start = None
    return found


def compiled(page: Path, block: Block) -> Any:
    """The block as code; what it raises names the page's lines."""
    source = "\n" * (block.line - 1) + block.source
    return compile(source, str(page), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)


async def run_block(page: Path, block: Block, namespace: dict[str, Any]) -> None:
    """Runs it, and compares what it prints with what it shows."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        made = eval(compiled(page, block), namespace)
        if inspect.iscoroutine(made):
            await made
    shown = "".join(f"{text}\n" for text in re.findall(r"^ *# → ?(.*)$", block.source, flags=re.MULTILINE))
    assert doctest.OutputChecker().check_output(shown, printed.getvalue(), doctest.ELLIPSIS), (
        f"the block at line {block.line} shows\n{shown}and prints\n{printed.getvalue()}"
    )
