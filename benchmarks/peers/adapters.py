"""LangChain and DSPy pipelines through their adapters, through OpenAI's API, and without the prefix cache.

Each run has a separate server, so that it begins with an empty cache. The pipelines run in the adapters'
environments, which ``make test-adapters`` creates.
"""

from __future__ import annotations

import json
import statistics
import subprocess
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.report import Report
from benchmarks.serving import serving

ROOT = Path(__file__).parents[2]
# For each pipeline: its adapter, and the number of inputs.
PIPELINES = {
    "langchain": ("langchain-agentflow", 32),
    "dspy": ("dspy-agentflow", 100),
    "dspy_votes": ("dspy-agentflow", 32),
}
ROUNDS = 3
# A route, and the options of its server.
RUNS = {"adapter": ("adapter", ()), "openai": ("openai", ()), "no cache": ("adapter", ("--no-cache",))}

# The output of ``adapter_pipelines`` for one run; and the outputs of all rounds, by the run's name.
Taken = dict[str, Any]
Runs = dict[str, list[Taken]]


def run(report: Report, console: Console, only: str) -> None:
    """Measures the pipelines whose name contains ``only``."""
    rounds = ROUNDS if report.scale == "full" else 1
    found: dict[str, Runs] = {}
    sizes = {name: size if report.scale == "full" else 8 for name, (_, size) in PIPELINES.items()}
    for pipeline, (adapter, _) in PIPELINES.items():
        if only not in pipeline:
            continue
        found[pipeline] = {name: [] for name in RUNS}
        for number in range(rounds):
            for name, (route, options) in RUNS.items():  # interleaved
                console.print(f"[dim]{pipeline}, {name}, round {number + 1} …[/]")
                taken = _measure(adapter, pipeline, route, options, sizes[pipeline])
                found[pipeline][name].append(taken)
    for pipeline, runs in found.items():
        _report_pipeline(report, pipeline, sizes[pipeline], runs)
    if found:
        _report_all(report, found)


def _report_pipeline(report: Report, pipeline: str, size: int, runs: Runs) -> None:
    """Reports one pipeline. Throughput is in inputs: both routes have the same inputs, but different
    outputs."""
    speeds = {name: [size / one["seconds"] for one in taken] for name, taken in runs.items()}
    against = [a / o for a, o in zip(speeds["adapter"], speeds["openai"], strict=True)]
    gain = [a / n for a, n in zip(speeds["adapter"], speeds["no cache"], strict=True)]
    speed = ", ".join(f"{name} {statistics.median(found):.2f}" for name, found in speeds.items())
    said = ", ".join(f"{name} {taken[0]['output_tokens']:,}" for name, taken in runs.items())
    failed = ", ".join(f"{name} {sum(one['num_failed'] for one in taken)}" for name, taken in runs.items())
    note = f"{size} inputs; inputs/s: {speed}; output tokens: {said}; malformed answers: {failed}"
    computed, asked = (runs["adapter"][0][name] for name in ("computed_tokens", "prompt_tokens"))
    share = [_computed(run["adapter"]) / _computed(run["openai"]) for run in _rounds({pipeline: runs})]
    report.median(f"adapters.{pipeline}_vs_openai_route", against, "ratio", note=note, goal=">= 0.97")
    report.median(f"adapters.{pipeline}_cache_gain", gain, "ratio", note="against no cache", goal=">= 1.5")
    note = f"{computed:,} of {asked:,} prompt tokens computed through the adapter"
    report.median(f"adapters.{pipeline}_computed_tokens_share", share, "ratio", note=note, goal="<= 1")


def _report_all(report: Report, found: dict[str, Runs]) -> None:
    """Reports the throughput of the worst pipeline, and the tokens that all pipelines computed."""
    for name, goal in (("vs_openai_route", ">= 0.97"), ("cache_gain", ">= 1.5")):
        of_each = [result.value for result in report.results if result.id.endswith(name)]
        report.add(f"adapters.{name}", min(of_each), "ratio", of_each, "the worst pipeline", goal)
    share = [_computed(run["adapter"]) / _computed(run["openai"]) for run in _rounds(found)]
    note = "all pipelines; the server shares prompts on both routes"
    report.median("adapters.computed_tokens_share", share, "ratio", note=note, goal="< 1")


def _rounds(found: dict[str, Runs]) -> list[dict[str, list[Taken]]]:
    """Returns for each round the results of all pipelines, by the name of the run."""
    num_rounds = min(len(taken) for runs in found.values() for taken in runs.values())
    return [
        {name: [runs[name][number] for runs in found.values()] for name in RUNS}
        for number in range(num_rounds)
    ]


def _computed(taken: list[Taken]) -> int:
    return sum(one["computed_tokens"] for one in taken)


def _measure(adapter: str, pipeline: str, route: str, options: tuple[str, ...], size: int) -> Taken:
    python = ROOT / "adapters" / adapter / ".venv" / "bin" / "python"
    if not python.exists():
        raise SystemExit(f"there is no environment for {adapter}: run `make test-adapters` first")
    serve = ("agentflow", "serve", "--port", "0", "--dtype", "bfloat16", *options)
    with serving(*serve, errors=subprocess.DEVNULL) as (url, _):
        script = Path(__file__).with_name("adapter_pipelines.py")
        command = [str(python), "-P", str(script), pipeline, route, url, str(size)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{pipeline} through {route} failed:\n{done.stderr}")
    taken: Taken = json.loads(done.stdout.splitlines()[-1])
    return taken
