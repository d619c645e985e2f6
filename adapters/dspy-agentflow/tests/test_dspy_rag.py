"""``examples/dspy_rag.py``: on scripted answers, and as a user runs it."""

from __future__ import annotations

import asyncio
import io
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from scripts import as_json, scripted

EXAMPLES = Path(__file__).parents[3] / "examples"
sys.path.insert(0, str(EXAMPLES))

import dspy_rag  # noqa: E402


def test_the_passages_stand_in_the_prompt_and_the_answers_are_shown() -> None:
    lm, model = scripted(lambda prompt: as_json(reasoning="It says so [/].", answer="Because [red it is so."))
    console = Console(file=io.StringIO(), width=200)
    asyncio.run(dspy_rag.main(lm, console))
    assert len(model.prompts) == len(dspy_rag.QUESTIONS)
    [honey] = [prompt for prompt in model.prompts if "How do bees make honey?" in prompt]
    assert "Bees collect nectar from flowers" in honey
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert shown.count("Because [red it is so.") == len(dspy_rag.QUESTIONS)
    assert "generated" in dspy_rag.figures(lm)
    assert len(set(model.programs)) == len(dspy_rag.QUESTIONS)


@pytest.mark.parametrize("options", [[], ["--url", "ws://127.0.0.1:1"]], ids=["embedded", "nobody there"])
def test_as_a_user_runs_it(options: list[str]) -> None:
    command = [sys.executable, str(EXAMPLES / "dspy_rag.py"), *options]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert "Traceback" not in ran.stdout + ran.stderr
    if options:
        assert ran.returncode == 1
        assert "agentflow serve" in " ".join(ran.stdout.split())
    else:
        assert ran.returncode == 0, ran.stderr
        assert ran.stdout.count("╭─") == len(dspy_rag.QUESTIONS)
        assert "of them cached" in ran.stdout
