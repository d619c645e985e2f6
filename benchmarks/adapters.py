"""LangChain and DSPy pipelines through their adapters, through OpenAI's API, and without the prefix cache.

Each run has a server of its own, so that it begins with an empty cache; the pipelines run in the environments
of the adapters (``make test-adapters`` makes them).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.report import Report, Result, median_of

ROOT = Path(__file__).parents[1]
PIPELINES = {"langchain": ("langchain-agentflow", 32), "dspy": ("dspy-agentflow", 100)}
ROUNDS = 3
# A route, and what its server is told.
RUNS = {"adapter": ("adapter", ()), "openai": ("openai", ()), "no cache": ("adapter", ("--no-cache",))}


def run(report: Report, console: Console, only: str) -> None:
    """All figures; ``only`` leaves out the pipelines whose name does not contain it."""
    rounds = ROUNDS if report.scale == "full" else 1
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for pipeline, (adapter, size) in PIPELINES.items():
        if only not in pipeline:
            continue
        found[pipeline] = {name: [] for name in RUNS}
        for number in range(rounds):
            for name, (route, options) in RUNS.items():  # interleaved
                console.print(f"[dim]{pipeline}, {name}, round {number + 1} …[/]")
                taken = _measure(adapter, pipeline, route, options, size if report.scale == "full" else 8)
                found[pipeline][name].append(taken)
    for pipeline, runs in found.items():
        report.results += _results(pipeline, runs)
    if found:
        report.results += _least(report.results)


def _results(pipeline: str, runs: dict[str, list[dict[str, Any]]]) -> list[Result]:
    speeds = {name: [one["output_tokens"] / one["seconds"] for one in taken] for name, taken in runs.items()}
    shown = ", ".join(f"{name} {max(found):.0f}" for name, found in speeds.items())
    against = [a / o for a, o in zip(speeds["adapter"], speeds["openai"], strict=True)]
    gain = [a / n for a, n in zip(speeds["adapter"], speeds["no cache"], strict=True)]
    computed = [
        a["computed_tokens"] / o["computed_tokens"]
        for a, o in zip(runs["adapter"], runs["openai"], strict=True)
    ]
    tokens = runs["adapter"][0]
    note = f"{tokens['num_calls']} calls, {tokens['prompt_tokens']:,} prompt tokens; output tokens/s: {shown}"
    return [
        median_of(f"adapters.{pipeline}_vs_openai_route", against, "ratio", note=note, goal=">= 0.97"),
        median_of(
            f"adapters.{pipeline}_computed_tokens_share",
            computed,
            "ratio",
            note=f"{tokens['computed_tokens']:,} computed through the adapter, of the OpenAI route's",
            goal="<= 1",
        ),
        median_of(f"adapters.{pipeline}_cache_gain", gain, "ratio", note="against no cache", goal=">= 1.5"),
    ]


def _least(results: list[Result]) -> list[Result]:
    """Of both pipelines the worse."""
    figures = []
    for name, worse, goal in (
        ("vs_openai_route", min, ">= 0.97"),
        ("computed_tokens_share", max, "<= 1"),
        ("cache_gain", min, ">= 1.5"),
    ):
        of_each = [result for result in results if result.id.endswith(name)]
        value = worse(result.value for result in of_each)
        runs = [result.value for result in of_each]
        figures.append(Result(f"adapters.{name}", value, "ratio", runs, "the worse of the pipelines", goal))
    return figures


def _measure(adapter: str, pipeline: str, route: str, options: tuple[str, ...], size: int) -> dict[str, Any]:
    python = ROOT / "adapters" / adapter / ".venv" / "bin" / "python"
    if not python.exists():
        raise SystemExit(f"there is no environment for {adapter}: run `make test-adapters` first")
    with _served(*options) as url:
        command = [str(python), "-P", str(ROOT / "benchmarks" / "adapter_pipelines.py"), pipeline, route, url]
        done = subprocess.run([*command, str(size)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{pipeline} through {route} failed:\n{done.stderr}")
    taken: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return taken


@contextmanager
def _served(*options: str) -> Iterator[str]:
    command = [sys.executable, "-m", "agentflow.cli", "serve", "--port", "0", *options]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as server:
        assert server.stdout is not None
        lines = iter(server.stdout)
        yield next("ws://" + line.partition("ws://")[2].split()[0] for line in lines if "ws://" in line)
        server.terminate()
        server.communicate()
