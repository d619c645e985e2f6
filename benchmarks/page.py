"""``python -m benchmarks.page``: writes docs/benchmarks.md from the results that are committed. No figure on
that page is typed in by hand; with matplotlib installed it draws the plots, too."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.report import Result

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "benchmarks.md"
TITLES = {
    "step": "The budget of a step",
    "foundation": "The engine against transformers",
    "radix": "The radix cache",
    "scheduler": "The scheduler",
    "frontend": "What a client costs",
    "constrained": "Constrained decoding and select",
    "server": "Serving over HTTP",
    "adapters": "Under LangChain and DSPy",
    "ablation": "What each part is worth",
}
REMARKS = {
    "step": (
        "What a step must read and multiply, against the memory and the matrix products of the same machine, "
        "measured in the same run. Of a single stream the limit is its bytes, of a prefill its operations, "
        "of a batch both, one after the other; what overlaps can take less. Each `kernel` figure is the same "
        "for one kernel of a step. Goals in milliseconds and tokens per second are for a processor with AMX. "
        "[What the kernels do](internals/kernels.md).\n\n![How costs grow](images/step-growth.svg)\n"
    ),
    "radix": "The cost follows the path (the number of edges that the prompt runs along), not the tree.",
    "scheduler": (
        "`cold-tail.json` is the known failure of plain longest-prefix-first: a burst at 1.3 times what the "
        "machine can do, a tenth of it requests that share nothing. A step at 10,000 waiting is everything "
        "that the scheduler does between two forward passes, with 100 requests through each of its stages: "
        "about 50 µs of a request's whole life. Most of "
        "it is the same under `fcfs`, which keeps no order but that of arrival."
    ),
    "frontend": (
        "CPU time of the client's process; the server is a process of its own, with a scripted generator. "
        "A round trip is a burst of ops that could not have been sent before the answer to the one before."
    ),
    "constrained": (
        "A record has ten fields; 32 are written at once. Plain masked decoding lets the model write forced "
        "text in any tokens that spell it, and small models often take short ones (a space at a time); "
        "jump-forward writes the tokenizer's own, so it has fewer tokens to compute and the model reads "
        "text as it was trained on. That is also why the two differ in what they write: nearly always, the "
        "first difference is forced text that stands in other tokens. The gain is in records per second."
    ),
    "server": (
        "The engine alone is the same engine process, driven by its own client in the server's process: "
        "no HTTP, no JSON, nobody at the other end. The HTTP clients are a process of their own on the "
        "same two cores, so what they cost is counted, too. What HTTP adds to the first token is what a "
        "client waits, less what the engine's own client waited for the same request. In each overload "
        "requests come at three times the rate of the peak, whatever becomes of those before them; a request "
        "is good when it ends, and its first token comes within twice the time that the server lets a "
        "request expect to wait. At the peak more clients than the batch has places ask again and again. "
        "What counts is what ends while requests come, when all places are taken. The goodput is that of "
        "short overloads between peaks, as this machine's speed changes within a minute; what is lost, late, "
        "kept in memory or slow to recover is that of a minute's overload."
    ),
    "adapters": (
        "Each run has a server of its own, which begins with an empty cache. Both routes reach the same "
        "scheduler and cache, so that of prompts that are asked once hardly anything is left to save; where "
        "several answers are drawn to a prompt, DSPy asks OpenAI's API for one after the other, and the "
        "adapter for a fork. DSPy does not know of this server's models that they keep schemas: through "
        "OpenAI's route answers are free text, longer, and not always of the form that its adapter reads."
    ),
    "ablation": (
        "The pool holds half of the working set. Hints raise the hit rate where branches come and go (trees "
        "of thought), but not the speed here: what is kept for a program's next request is not given to "
        "others, so batches are smaller, and on this machine a row more in a batch costs about as much as "
        "the prompt tokens that are saved. Chat and few-shot programs answer faster than their KV would be "
        "evicted, so hints change nothing for them. Of a chat few turns wait at a time, so the order "
        "in which they are admitted matters little there."
    ),
}
_INTRODUCTION = """# Benchmarks

Made by `python -m benchmarks.page` from the results under `benchmarks/results/`; each section names the
command that measured it. A ratio is taken side by side in one run, interleaved, as the median of its
runs. A *disturbed* run shared the machine with others.
"""


def write_page() -> None:
    """The whole page."""
    parts = [_INTRODUCTION]
    for name, title in TITLES.items():
        # Beside a run of all figures, those of some of them (``--only``).
        files = sorted([*RESULTS.glob(f"*/{name}.json"), *RESULTS.glob(f"*/{name}-*.json")])
        if files:
            remark = f"{REMARKS[name]}\n" if name in REMARKS else ""
            parts.append(f"## {title}\n\n```console\n$ python -m benchmarks {name}\n```\n\n{remark}")
        for file in files:
            parts.append("\n".join(_table(json.loads(file.read_text(encoding="utf-8")))) + "\n")
        if name == "scheduler":
            parts.append(_simulations())
    PAGE.write_text("\n".join(parts), encoding="utf-8")


def _table(results: dict[str, Any]) -> Iterator[str]:
    machine = results["machine"]
    features = ", ".join(machine.get("cpu_features", []))
    disturbed = " **Disturbed.**" if machine["disturbed"] else ""
    yield (
        f"{machine['cpu']}, {machine['cores']} cores ({features}), {machine['memory_gb']:.0f} GB; "
        f"Python {machine['python']}, torch {machine['torch']}; commit `{results['commit']}`, "
        f"{results['scale']} scale.{disturbed}"
    )
    yield ""
    yield "| figure | value | goal | runs | |"
    yield "|---|---:|---|---|---|"
    for result in results["results"]:
        runs = ", ".join(f"{run:.4g}" for run in result["runs"])
        goal = result["goal"].replace(">=", "≥").replace("<=", "≤")
        value = f"{result['value']:.4g} {result['unit']}".replace(" ratio", "")
        missed = " (missed)" if Result(**result).is_reached is False else ""
        yield f"| `{result['id']}` | {value} | {goal}{missed} | {runs} | {result['note']} |"


def _simulations() -> str:
    """The policies on the committed workloads: simulated here and now, for it takes seconds."""
    from agentflow.engine.scheduling.policies import POLICIES
    from agentflow.engine.scheduling.scheduler import SchedulerConfig
    from agentflow.engine.simulator.simulation import simulate
    from agentflow.engine.simulator.summary import summarise
    from agentflow.engine.simulator.workload import read_workload

    lines = ["### Policies on the committed workloads, simulated\n"]
    for file in sorted((ROOT / "benchmarks" / "workloads").glob("*.json")):
        workload = read_workload(file)
        lines.append(f"```console\n$ agentflow simulate benchmarks/workloads/{file.name}\n```\n")
        lines.append(f"{len(workload.arrivals):,} requests, {workload.kv_tokens:,} KV tokens.\n")
        lines.append("| policy | hit rate | output tokens/s | TTFT p50 | TTFT p99 | fairness | retractions |")
        lines.append("|---|---:|---:|---:|---:|---:|---:|")
        for policy in POLICIES:
            s = summarise(simulate(workload, SchedulerConfig(policy=policy)))
            lines.append(
                f"| {policy} | {s.hit_rate:.1%} | {s.output_tokens_per_s:.0f} | {s.all.ttft_p50_s:.2f} s "
                f"| {s.all.ttft_p99_s:.2f} s | {s.fairness:.3f} | {s.retractions} |"
            )
        lines.append("")
    plot = _plot_cold_tail()
    if plot is not None:
        lines.append(f"![How long requests that share nothing wait]({plot})\n")
    return "\n".join(lines)


def _plot_cold_tail() -> str | None:
    """Waiting times of the cold requests, by policy. None where there is no matplotlib."""
    try:
        import matplotlib.pyplot as plt  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        return "images/cold-tail.svg" if (PAGE.parent / "images" / "cold-tail.svg").exists() else None
    from agentflow.engine.scheduling.scheduler import SchedulerConfig
    from agentflow.engine.simulator.simulation import simulate
    from agentflow.engine.simulator.workload import read_workload

    workload = read_workload(ROOT / "benchmarks" / "workloads" / "cold-tail.json")
    plt.rcParams["svg.hashsalt"] = "agentflow"
    figure, (cold, everybody) = plt.subplots(1, 2, figsize=(9, 3.2), sharey=True)
    for policy in ("fair-lpm", "lpm", "fcfs", "random"):
        served = simulate(workload, SchedulerConfig(policy=policy, max_running=32)).served
        for axes, label in ((cold, "cold"), (everybody, "")):
            waits = sorted(s.ttft_s for s in served if label in ("", s.arrival.label))
            shares = [(i + 1) / len(waits) for i in range(len(waits))]
            axes.plot(waits, shares, label=policy, linewidth=2 if policy == "fair-lpm" else 1)
    cold.set(title="requests that share nothing", xlabel="time to first token, s", ylabel="share of requests")
    everybody.set(title="all requests", xlabel="time to first token, s")
    everybody.legend(frameon=False)
    figure.tight_layout()
    target = PAGE.parent / "images" / "cold-tail.svg"
    target.parent.mkdir(exist_ok=True)
    figure.savefig(target, metadata={"Date": None})
    return "images/cold-tail.svg"


if __name__ == "__main__":
    write_page()
    sys.exit(0)
