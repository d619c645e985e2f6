"""The ``agentflow`` command: ``pull`` fetches a model, ``serve`` runs the server, ``simulate`` replays a
workload against its scheduler, ``replay`` shows a recording."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from agentflow.errors import AgentflowError
from agentflow.protocol import DEFAULT_PORT

DEFAULT_HOST = "127.0.0.1"
POLICY_NAMES = ["fair-lpm", "lpm", "dfs-weight", "fcfs", "random"]
"""Those of ``server.core.policies``, which the bare frontend does not import."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; its exit code. An error of agentflow's own is one line, not a traceback."""
    options = _parser().parse_args(arguments)
    try:
        match options.command:
            case "pull":
                return _pull(options)
            case "serve":
                return _serve(options)
            case "replay":
                return _replay(options)
            case _:
                return _simulate(options)
    except AgentflowError as error:
        print(f"agentflow: {error}", file=sys.stderr)
        return 1
    except ImportError as error:
        print(
            f"agentflow: `{options.command}` needs the package {error.name!r}: "
            "pip install 'agentflow-lm[engine,server]'",
            file=sys.stderr,
        )
        return 1
    except KeyboardInterrupt:
        print("agentflow: interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="agentflow", description="Programs that call language models many times, and their server."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    pull = commands.add_parser(
        "pull",
        help="fetch a model into the local store",
        description="Fetches a model, verifies it, and stores it for `serve` and for embedded sessions.",
    )
    pull.add_argument("model", nargs="?", default="smollm2-135m", help="its name (default: %(default)s)")
    serve = commands.add_parser(
        "serve",
        help="run the server",
        description="Serves a model over websockets: af.session('ws://HOST:PORT') connects to it.",
    )
    _add_serve_options(serve)
    simulate = commands.add_parser(
        "simulate",
        help="replay a workload against the scheduler, without a model",
        description="Replays a workload in simulated time against the real scheduler and cache: hit rate, "
        "waiting times, fairness, evictions. Several policies give a line each.",
    )
    _add_simulate_options(simulate)
    replay = commands.add_parser(
        "replay",
        help="show the recording of a session",
        description="Shows what af.session(record=FILE) recorded: the fork tree of each run, with texts, "
        "tokens and times. (af.Replay(FILE) runs the program again on it.)",
    )
    replay.add_argument("recording", type=Path, metavar="FILE", help="a recording (.jsonl)")
    return parser


def _add_serve_options(serve: argparse.ArgumentParser) -> None:
    add = serve.add_argument
    add("--model", default="smollm2-135m", help="a pulled model or a Hugging Face folder (%(default)s)")
    add("--host", default=DEFAULT_HOST, help="address to listen on (%(default)s: this machine only)")
    add("--port", type=int, default=DEFAULT_PORT, help="port to listen on (%(default)s)")
    add("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="of the weights (%(default)s)")
    add("--device", choices=["cpu", "cuda"], help="where the model runs (default: a GPU where there is one)")
    add("--kv-tokens", type=_count, metavar="N", help="tokens that the KV pool holds (default: fits memory)")
    add("--token-budget", type=_count, metavar="N", help="rows of one forward pass (default: by device)")
    add("--max-running", type=_count, default=64, metavar="N", help="requests in one batch (%(default)s)")
    add("--threads", type=_count, metavar="N", help="CPU threads (default: torch's choice)")
    add("--policy", choices=POLICY_NAMES, default=POLICY_NAMES[0], help="order of admission (%(default)s)")
    add(
        "--max-unfinished",
        type=_count,
        default=4096,
        metavar="N",
        help="requests waiting and running at once; more are refused (%(default)s)",
    )
    add("--no-cache", action="store_true", help="turn the prefix cache off")
    add(
        "--resume-grace",
        type=float,
        default=10.0,
        metavar="SECONDS",
        help="how long a session outlives a broken connection (%(default)s)",
    )
    add(
        "--record-workload",
        type=Path,
        metavar="FILE",
        help="write what is served there (.jsonl, .jsonl.gz), for `simulate`: token ids, so also prompts",
    )


def _add_simulate_options(simulate: argparse.ArgumentParser) -> None:
    add = simulate.add_argument
    add("workload", type=Path, metavar="WORKLOAD", help="recorded (.jsonl, .jsonl.gz) or generated (.json)")
    add(
        "--policy",
        choices=[*POLICY_NAMES, "all"],
        action="append",
        help="order of admission; may be repeated; all: one line each (default: all)",
    )
    add(
        "--kv-tokens",
        type=_count,
        metavar="N",
        help="tokens that the KV pool holds (default: the workload's)",
    )
    add(
        "--token-budget", type=_count, default=256, metavar="N", help="rows of one forward pass (%(default)s)"
    )
    add("--max-running", type=_count, default=64, metavar="N", help="requests in one batch (%(default)s)")
    add("--max-context", type=_count, default=8192, metavar="N", help="tokens of one request (%(default)s)")
    add("--no-cache", action="store_true", help="turn the prefix cache off")
    add(
        "--cost",
        type=Path,
        metavar="FILE",
        help="a cost model, as `python -m benchmarks scheduler --only cost` fits one",
    )
    add("--json", type=Path, metavar="FILE", help="also write the results there")


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


def _pull(options: argparse.Namespace) -> int:
    from agentflow.server.model_store import pull_model

    folder = pull_model(options.model)
    print(f"{options.model} is ready in {folder}")
    return 0


def _serve(options: argparse.Namespace) -> int:
    from agentflow.server.limits import ServerLimits
    from agentflow.server.local_engine import EngineOptions
    from agentflow.server.model_store import resolve_model
    from agentflow.server.open_models import open_models
    from agentflow.server.serve import serve

    resolve_model(options.model)  # a wrong name is told before anything starts
    engine = EngineOptions(
        model=options.model,
        dtype=options.dtype,
        device=options.device,
        kv_tokens=options.kv_tokens,
        token_budget=options.token_budget,
        max_running=options.max_running,
        num_threads=options.threads,
        policy=options.policy,
        use_cache=not options.no_cache,
        own_process=True,
        max_unfinished=options.max_unfinished,
    )
    serve(
        lambda: open_models({options.model: engine}, record_to=options.record_workload),
        host=options.host,
        port=options.port,
        limits=ServerLimits(resume_grace_s=options.resume_grace),
    )
    return 0


def _replay(options: argparse.Namespace) -> int:
    from agentflow.replay_command import run_replay

    run_replay(options.recording)
    return 0


def _simulate(options: argparse.Namespace) -> int:
    from agentflow.server.simulator.command import SimulateOptions, run_simulate

    names = options.policy or ["all"]
    run_simulate(
        SimulateOptions(
            workload=options.workload,
            policies=POLICY_NAMES if "all" in names else names,
            kv_tokens=options.kv_tokens,
            token_budget=options.token_budget,
            max_running=options.max_running,
            max_context=options.max_context,
            use_cache=not options.no_cache,
            cost=options.cost,
            json=options.json,
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
