"""Each example is tested, run by ``make examples``, and named in docs/quickstart.md."""

import importlib
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from example_session import example_parser, figures, run_example
from msgspec.structs import replace
from scripted_example import EXAMPLES, OPTIONS, ROOT, scripted, shown
from support.commands import run_python

import agentflow as af
from agentflow.backends.scripted_generator import ScriptedContext, ScriptedGenerator
from agentflow.runtime.generator import Scored


def make(*options: str) -> subprocess.CompletedProcess[str]:
    """``make examples``, without its set-up."""
    command = ["make", "-o", ".venv/.installed-examples", *options, "examples"]
    # The tests may run inside `make test`, whose options are not meant for this make.
    environment = {name: value for name, value in os.environ.items() if "MAKE" not in name and name != "ARGS"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)


@pytest.fixture
def recording_bin(tmp_path):
    """Stands for the virtual environment's folder of commands: ``python`` records its arguments."""

    def made(failing: str = "none") -> Path:
        for name in ("agentflow", "python"):
            command = tmp_path / name
            command.write_text(f'#!/bin/sh\necho "{name} $@"\ncase "$1" in *{failing}.py) exit 3;; esac\n')
            command.chmod(0o755)
        return tmp_path

    return made


def test_make_runs_every_example(recording_bin):
    result = make(f"BIN={recording_bin()}", "ARGS=--url ws://there")
    assert result.returncode == 0, result.stderr
    ran = [line for line in result.stdout.splitlines() if line.startswith("python ")]
    assert sorted(ran) == [f"python examples/{name}.py --url ws://there" for name in EXAMPLES]
    for name in EXAMPLES:
        assert f"=== examples/{name}.py\n" in result.stdout


@pytest.mark.parametrize("failing", ["few_shot", "react", "retrieval"])
def test_make_fails_where_an_example_fails(recording_bin, failing):
    result = make(f"BIN={recording_bin(failing)}")
    assert result.returncode != 0
    lines = result.stdout.splitlines()
    assert lines[-2:] == [f"python examples/{failing}.py", f"make: examples/{failing}.py failed"]


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_tested_and_says_how_to_run_it(name):
    assert (Path(__file__).parent / f"test_{name}.py").exists()
    source = (ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8")
    docstring = source.split('"""')[1]
    assert f"\n    python examples/{name}.py" in docstring
    assert "[--url ws://127.0.0.1:8410]" in docstring
    assert f"| `{name}` |" in (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")


class FirstChoice(ScriptedGenerator):
    """Always selects the first choice."""

    async def score(self, context: ScriptedContext, choices: Sequence[str], method: str) -> Scored:
        return await ScriptedGenerator(lambda prompt: choices[0]).score(context, choices, method)


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("anyio_backend", "name"),
    [
        (backend, name)
        for backend in ("asyncio", "trio")
        for name in EXAMPLES
        # The second shows no text of a model; test_agent_with_tools tests the third, in whose process it is.
        if name not in ("essay_judge", "triage", "agent_with_tools")
        and (backend, name) != ("trio", "fastapi_stream")  # uvicorn needs asyncio
    ],
)
async def test_the_markup_in_a_models_text_is_shown_literally(anyio_backend, name):
    """Square brackets mean something to rich, and a model may write them anywhere."""
    said: dict[str, Any] = {
        "extraction": {"name": "[/] [red", "born": 1900, "kind": "athlete"},
        "describe_image": {"kind": "chart", "title": "[/] [red"},
    }
    backend = scripted(str)
    backend.generator = FirstChoice(lambda prompt: said.get(name, "[/] [red"))
    page = await shown(importlib.import_module(name).main, backend, **OPTIONS.get(name, {}))
    assert "[/] [red" in page


def test_a_missing_server_is_reported(capsys):
    options = example_parser("An example.\n\nMore.").parse_args(["--url", "ws://127.0.0.1:1"])

    async def main(flow, console):
        raise AssertionError("there is no session")

    assert run_example(main, options) == 1
    assert "agentflow serve" in " ".join(capsys.readouterr().out.split())


def test_a_missing_document_is_reported():
    result = run_python(ROOT / "examples" / "long_document.py", "no-such-file.txt")
    assert result.returncode == 2
    assert "no-such-file.txt cannot be read" in result.stderr
    assert "Traceback" not in result.stderr


def test_the_figures_are_differences():
    before = af.Stats("m", steps=5, prompt_tokens=100, cached_tokens=90, generated_tokens=7)
    after = af.Stats("m", steps=15, prompt_tokens=1300, cached_tokens=990, generated_tokens=1007)
    assert figures(before, after) == "m: 1,200 prompt tokens, 75% of them cached; 1,000 generated in 10 steps"
    assert "0 prompt tokens, 0% of them cached" in figures(after, after)
    assert figures(before, replace(before, cost=0.00125)).startswith(
        "m: 0 prompt tokens, 0% of them cached; 0 generated; $0.00125"
    )
