"""The blocks of each documentation page as a module, so that type checkers can check them.

``python -m support.docs.typed_blocks FOLDER`` writes them. Blocks keep the numbers of their lines in the
page. A page may define a name again; names of all pages (``flow``, ``essay``) are parameters.
"""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

from support.docs.page_blocks import ROOT, blocks_of, pages

HEAD = """\
from __future__ import annotations
import agentflow as af  # a page may define a name twice
# mypy: disable-error-code="no-redef"
# pyright: reportRedeclaration=false
async def page(flow: af.Session, essay: str) -> None:
"""


def module_of(page: Path) -> str:
    """The page's blocks in one function. Empty if none of them runs."""
    lines = HEAD.splitlines()
    for block in blocks_of(page):
        if block.runs:
            lines += [""] * (block.line - 1 - len(lines))
            lines += textwrap.indent(block.source, "    ").splitlines()
    if len(lines) == len(HEAD.splitlines()):
        return ""
    # Only the first line may import from __future__.
    return "\n".join([lines[0], *("" if "import annotations" in line else line for line in lines[1:])]) + "\n"


def main(folder: Path) -> None:
    """Replaces the modules in the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.py"):
        old.unlink()
    for page in pages():
        name = "_".join(page.relative_to(ROOT).with_suffix("").parts).replace("-", "_")
        if source := module_of(page):
            (folder / f"{name}.py").write_text(source, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
