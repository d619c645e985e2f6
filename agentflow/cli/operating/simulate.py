"""``agentflow simulate``: its options. ``engine/simulator/side_by_side.py`` runs it."""

from __future__ import annotations

import argparse
from pathlib import Path

from agentflow.cli.command import Command, positive_int
from agentflow.engine.scheduling.defaults import (
    CPU_TOKEN_BUDGET,
    MAX_RUNNING,
    SIMULATED_CONTEXT,
    SIMULATED_POLICY_NAMES,
)


def _add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "workload",
        type=Path,
        metavar="WORKLOAD",
        help="recorded (.jsonl, .jsonl.gz) or generated (.json)",
    )
    add(
        "--policy",
        choices=[*SIMULATED_POLICY_NAMES, "all"],
        action="append",
        help="scheduling policy; can be repeated (default: all)",
    )
    add(
        "--kv-tokens",
        type=positive_int,
        metavar="N",
        help="capacity of the KV pool in tokens (default: the workload's)",
    )
    add(
        "--token-budget",
        type=positive_int,
        default=CPU_TOKEN_BUDGET,
        metavar="N",
        help="tokens of one forward pass (%(default)s)",
    )
    add(
        "--max-running",
        type=positive_int,
        default=MAX_RUNNING,
        metavar="N",
        help="requests in one batch (%(default)s)",
    )
    add(
        "--max-context",
        type=positive_int,
        default=SIMULATED_CONTEXT,
        metavar="N",
        help="tokens of one request (%(default)s)",
    )
    add(
        "--tpot-target-ms",
        type=positive_int,
        metavar="MS",
        help="time per output token that requests of the objective latency keep (default: none)",
    )
    add("--no-cache", action="store_true", help="disable the prefix cache")
    add(
        "--cost",
        type=Path,
        metavar="FILE",
        help="a cost model, as measured by `python -m benchmarks scheduler --only cost`",
    )
    add("--json", type=Path, metavar="FILE", help="also write the results to this file")


def _run(options: argparse.Namespace) -> int:
    from agentflow.engine.scheduling.scheduler import SchedulerConfig
    from agentflow.engine.simulator.side_by_side import SimulateOptions, run_simulate

    names = options.policy or ["all"]
    run_simulate(
        SimulateOptions(
            workload=options.workload,
            policies=SIMULATED_POLICY_NAMES if "all" in names else names,
            config=SchedulerConfig(
                max_running=options.max_running,
                token_budget=options.token_budget,
                use_cache=not options.no_cache,
                tpot_target_ms=options.tpot_target_ms,
            ),
            kv_tokens=options.kv_tokens,
            max_context=options.max_context,
            cost=options.cost,
            json=options.json,
        )
    )
    return 0


COMMAND = Command(
    name="simulate",
    summary="replay a workload against the scheduler, without a model",
    description="""\
Replays a workload in simulated time on the real scheduler and cache, and
reports hit rate, waiting times, fairness and evictions for each policy.""",
    examples="""\
agentflow serve --record-workload served.jsonl.gz
agentflow simulate served.jsonl.gz             under every policy
agentflow simulate served.jsonl.gz --policy fair-lpm --kv-tokens 20000
""",
    add_options=_add_options,
    run=_run,
)
