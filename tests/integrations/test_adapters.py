"""The adapters, read as source: their environments are not needed."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ADAPTERS = Path(__file__).parents[2] / "adapters"
PUBLISHED = {"agentflow", "agentflow.integrations"}


def imported(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def test_adapters_import_only_agentflow_and_its_integrations() -> None:
    files = sorted(ADAPTERS.glob("*/*_agentflow/*.py"))
    assert {file.parent.name for file in files} == {"dspy_agentflow", "langchain_agentflow"}
    wrong = {
        f"{file.relative_to(ADAPTERS)}: {module}"
        for file in files
        for module in imported(file)
        if module.split(".")[0] == "agentflow" and module not in PUBLISHED
    }
    assert wrong == set()


def test_both_classes_for_dspy_inherit_their_signature() -> None:
    folder = ADAPTERS / "dspy-agentflow" / "dspy_agentflow"
    for name in ("engines.py", "older_lm.py"):
        [found] = [
            node
            for node in ast.parse((folder / name).read_text(encoding="utf-8")).body
            if isinstance(node, ast.ClassDef) and node.name == "AgentflowLM"
        ]
        assert [ast.unparse(base) for base in found.bases] == ["BaseAgentflowLM"]
        methods = {
            node.name for node in found.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        }
        assert not methods & {"__init__", "__new__", "__call__", "acall"}
