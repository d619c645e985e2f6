"""Every imported distribution is declared in pyproject.toml, and every declared one is pinned in the lock."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator, Set
from importlib.metadata import packages_distributions
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDERS = ("agentflow", "tests", "benchmarks", "examples")


def canonical(requirement: str) -> str:
    """The name of a distribution, without versions and extras, as indexes compare it."""
    found = re.match(r"[\w.-]+", requirement)
    assert found is not None
    return re.sub(r"[-_.]+", "-", found[0]).lower()


def declared() -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"].values()
    return {canonical(name) for names in (project["dependencies"], *extras) for name in names} | {
        canonical(project["name"])
    }


def imported(file: Path, suspects: Set[str]) -> Iterator[str]:
    """The top-level modules outside the standard library."""
    text = file.read_text(encoding="utf-8")
    # Parsing takes long: only files with possible suspects are parsed. The linter forbids `import a, b`.
    seen = set(re.findall(r"^\s*(?:import|from)\s+(\w+)", text, flags=re.MULTILINE))
    if not seen & suspects:
        return
    for node in ast.walk(ast.parse(text)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None and not node.level:
            names = [node.module]
        tops = (name.partition(".")[0] for name in names)
        yield from (top for top in tops if top not in sys.stdlib_module_names)


def test_every_distribution_that_is_imported_is_declared() -> None:
    """Modules of no installed distribution are the project's own, or an adapter's environment has them."""
    distributions, known = packages_distributions(), declared()
    suspects = {module for module, names in distributions.items() if not known & set(map(canonical, names))}
    undeclared = {
        f"{file.relative_to(ROOT)}: {module}"
        for folder in FOLDERS
        for file in (ROOT / folder).rglob("*.py")
        for module in imported(file, suspects)
        if module in suspects
    }
    assert undeclared == set()


def pins(file: str) -> set[str]:
    text = (ROOT / file).read_text(encoding="utf-8")
    return set(re.findall(r"^[\w.-]+==[^ \n]+", text, flags=re.MULTILINE))


def test_every_declared_distribution_is_pinned_with_hashes() -> None:
    """torch is not: the Makefile chooses its build. ``make lock`` writes both files."""
    lock = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    assert pins("constraints.txt") == pins("requirements.lock")
    assert {canonical(pin) for pin in pins("requirements.lock")} >= declared() - {"agentflow-lm", "torch"}
    assert all("--hash=sha256:" in entry for entry in re.split(r"\n(?=[\w.-]+==)", lock)[1:])
    assert "//" not in lock, "the lock names the address of an index"


def test_f43k_the_extra_for_the_docs_has_a_formatter_of_signatures() -> None:
    """Without one, mkdocstrings writes each signature on a single line, however long."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    names = {canonical(name) for name in extras["optional-dependencies"]["docs"]}
    assert "separate_signature: true" in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert names & {"ruff", "black"}
