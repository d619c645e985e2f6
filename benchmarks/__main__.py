"""``python -m benchmarks NAME [--scale small|full] [--json FILE]``, and ``python -m benchmarks soak``"""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
from pathlib import Path

from rich.console import Console

from benchmarks.report import Report

# For each name: its module below this package, and a description.
NAMES = {
    "step": (
        "step.suite",
        "the budget of a step: bytes, operations, their limits, and the remaining time",
    ),
    "foundation": ("engine.foundation", "the engine against transformers, and the prefix cache against none"),
    "quantized": (
        "engine.quantized",
        "quantised weights against bfloat16: steps, memory, loading, errors",
    ),
    "models": (
        "engine.models",
        "shapes of models of every family against the machine's limits, adapters, a server's memory",
    ),
    "vision": (
        "engine.vision",
        "images: a tower against the machine's products, first answers, later questions, forks, streams",
    ),
    "radix": ("engine.radix", "the radix cache on a tree of a million tokens"),
    "scheduler": ("engine.scheduler", "fairness, deep queues and a full pool, simulated"),
    "programs": (
        "engine.programs",
        "chains, map-reduce, agents and mixes with and without knowledge of programs, simulated and real",
    ),
    "cluster": (
        "cluster.suite",
        "many replicas behind a router, simulated: scaling, hit rate, goodput, and the cost of a decision; "
        "a model on two processes",
    ),
    "server": ("server.suite", "HTTP against the engine alone, idle sessions, an overload"),
    "frontend": ("server.frontend", "the cost of a client: CPU per op and token, round trips, stalls"),
    "schema_suite": (
        "constrained.schema_suite",
        "JSON Schema's test suite: accepted schemas, rejected ones, and valid instances",
    ),
    "constrained": ("constrained.suite", "masks, jump-forward, select in one pass, hostile constraints"),
    "apis": ("apis.suite", "models behind APIs: saved calls and tokens, the client's cost, stalls, prefixes"),
    "servers": ("peers.servers", "loads over the OpenAI API against vLLM's and llama.cpp's servers"),
    "adapters": ("peers.adapters", "LangChain and DSPy pipelines: adapters, OpenAI route, and no cache"),
    "ui": (
        "ui.suite",
        "the page in a browser: first paint, weight, frames; the cost of watching",
    ),
    "ablation": ("engine.ablation", "an ablation of the design on the real model"),
    "soak": ("soak.run", "good and bad clients on a server whose engine is killed: leaks"),
}


def main() -> int:
    """Runs one benchmark. Exits with 0 even if goals are missed; a failed soak run exits with 1.

    SIGINT and SIGTERM end a run, whose figures until then are shown and written.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measures agentflow.")
    listing = "; ".join(f"{name}: {what}" for name, (_, what) in NAMES.items())
    parser.add_argument("name", choices=list(NAMES), help=listing)
    parser.add_argument("--scale", choices=["small", "full"], default="full", help="small: a quick look")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results there")
    parser.add_argument("--only", metavar="PART", help="run only the figures whose id contains this")
    parser.add_argument(
        "--exact",
        action="store_true",
        help="cluster, programs: only simulated figures, equal on any machine; workloads of cluster "
        "that --json has from a run of the same commit that was stopped are not run again",
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="of a soak run (default: %(default)s)")
    parser.add_argument("--replicas", type=int, default=1, help="of a soak run's server (default: 1)")
    parser.add_argument("--out", type=Path, default=Path("build/soak"), help="folder of a soak run's results")
    options = parser.parse_args()
    console = Console()
    if options.name == "soak":
        from benchmarks.soak import run as soak

        return soak.main(options.minutes, options.out, console, options.replicas)
    report = Report(options.scale, is_exact=options.exact, file=options.json)
    benchmark = importlib.import_module(f"benchmarks.{NAMES[options.name][0]}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    is_stopped = False
    try:
        benchmark.run(report, console, options.only or "")
    except KeyboardInterrupt:
        is_stopped = True
        console.print("stopped: the figures until then are")
    report.show(console)
    if options.json is not None:
        report.write()
        console.print(f"written to {options.json}")
    return 130 if is_stopped else 0


if __name__ == "__main__":
    sys.exit(main())
