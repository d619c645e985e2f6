"""Replays a workload under each policy, and shows the results in one table: ``agentflow simulate``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from agentflow.engine.scheduling.defaults import SIMULATED_CONTEXT
from agentflow.engine.scheduling.scheduler import SchedulerConfig
from agentflow.engine.simulator.cost_model import CostModel, default_cost
from agentflow.engine.simulator.simulation import simulate
from agentflow.engine.simulator.summary import Summary, summarise
from agentflow.engine.simulator.workload import Workload
from agentflow.engine.simulator.workload_file import read_workload
from agentflow.errors import BadArgument


@dataclass(frozen=True)
class SimulateOptions:
    """The options of ``agentflow simulate``."""

    workload: Path
    policies: Sequence[str]
    config: SchedulerConfig = field(default_factory=SchedulerConfig)  # its policy is replaced by ``policies``
    kv_tokens: int | None = None  # the size of the pool; None: the size in the workload
    max_context: int = SIMULATED_CONTEXT  # in tokens
    cost: Path | None = None  # a cost model; None: ``default_cost``
    json: Path | None = None  # a file to write the results to as well


def run_simulate(options: SimulateOptions, console: Console | None = None) -> list[Summary]:
    """Replays, prints the table, and returns the summaries. Raises ``BadArgument`` for invalid files, and
    for a pool or a batch that does not fit into memory."""
    console = console or Console()
    workload = read_workload(options.workload)
    workload.check()
    if workload.is_truncated:
        console.print(f"{options.workload} ends in the middle of a line; the complete lines are replayed")
    cost = CostModel.read(options.cost) if options.cost is not None else default_cost()
    summaries = [
        _simulate_one(workload, policy, cost, options, console) for policy in dict.fromkeys(options.policies)
    ]
    console.print(_table(workload, options, summaries))
    if options.json is not None:
        try:
            options.json.write_bytes(msgspec.json.format(msgspec.json.encode(summaries)))
        except OSError as error:
            raise BadArgument(f"cannot write {options.json}: {error.strerror}") from error
    return summaries


def _simulate_one(
    workload: Workload, policy: str, cost: CostModel, options: SimulateOptions, console: Console
) -> Summary:
    columns = (TextColumn("{task.description:<12}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(policy, total=len(workload.arrivals))
        return summarise(
            simulate(
                workload,
                replace(options.config, policy=policy),
                cost=cost,
                kv_tokens=options.kv_tokens,
                max_context=options.max_context,
                on_progress=lambda ended, total: progress.update(task, completed=ended, total=total),
            )
        )


def _table(workload: Workload, options: SimulateOptions, summaries: Sequence[Summary]) -> Table:
    kv_tokens = options.kv_tokens or workload.kv_tokens
    table = Table(
        title=f"{workload.name}: {len(workload.arrivals):,} requests, {kv_tokens:,} KV tokens",
        title_justify="left",
    )
    table.add_column("", no_wrap=True)
    for summary in summaries:
        table.add_column(summary.policy, justify="right", no_wrap=True)

    def row(name: str, values: Sequence[str], *, ends: bool = False) -> None:
        table.add_row(name, *values, end_section=ends)

    row("hit rate", [f"{s.hit_rate:.1%}" for s in summaries])
    row("output tokens/s", [f"{s.output_tokens_per_s:.1f}" for s in summaries])
    row("simulated time", [f"{s.elapsed_s:.1f} s" for s in summaries], ends=True)
    labels = list(summaries[0].by_label) if len(summaries[0].by_label) > 1 else []
    for label in ["", *labels]:
        waits = [s.by_label[label] if label else s.all for s in summaries]
        prefix = f"{label}: " if label else ""
        row(f"{prefix}TTFT p50", [f"{w.ttft_p50_s:.2f} s" for w in waits])
        row(f"{prefix}TTFT p99", [f"{w.ttft_p99_s:.2f} s" for w in waits])
        row(f"{prefix}TPOT p50", [f"{w.tpot_p50_s * 1e3:.0f} ms" for w in waits])
        row(f"{prefix}TPOT p99", [f"{w.tpot_p99_s * 1e3:.0f} ms" for w in waits], ends=True)
    row("fairness (Jain)", [f"{s.fairness:.3f}" for s in summaries])
    if any(s.refused for s in summaries):
        row("refused", [f"{s.refused:,}" for s in summaries])
    row("computed tokens", [f"{s.computed_tokens:,}" for s in summaries])
    row("evicted tokens", [f"{s.evicted_tokens:,}" for s in summaries])
    row("preemptions", [f"{s.preemptions:,}" for s in summaries])
    row("forward passes", [f"{s.steps:,}" for s in summaries])
    row("scheduling / pass", [f"{s.scheduling_ms:.2f} ms" for s in summaries])
    row("faster than real time", [f"{s.speedup:,.0f}x" for s in summaries])
    return table
