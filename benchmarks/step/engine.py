"""The parts of an engine's step outside the kernels: scheduling, Python, sampling, detokenising, and the
messages to the server's process.

``overhead_share`` is the part of a step's time in which no kernel runs. Work while kernels run is not in it,
but is not free: meanwhile the kernels have one thread fewer, and so with two threads it costs half of its
time. The note of a result has this time, too.
"""

from __future__ import annotations

import random
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from agentflow.engine.engine import Engine
from agentflow.engine.grammar.compiler.compile import compile_constraint
from agentflow.engine.machine.child_process import to_frame
from agentflow.engine.machine.resources import collect_garbage_rarely
from agentflow.engine.messages import PHASES, Abort, FromEngine
from agentflow.engine.models.torch_runner import TorchRunner
from agentflow.engine.request import Submit
from agentflow.engine.scheduling.scheduler import SchedulerConfig
from agentflow.engine.text.detokenizer import TextEnd
from agentflow.engine.text.tokenizer import Tokenizer
from agentflow.kernels.native_ops import team
from agentflow.protocol.constraint import Constraint
from agentflow.protocol.sampling import SamplingParams
from benchmarks.report import Report

KERNEL_PARTS = tuple(part for part in team.PARTS if part != "plan")
NUM_STEPS = 40
NUM_TEXT_STEPS = 10
MAX_TOKENS = 20 * NUM_STEPS
"""More than a request generates until the prompts of all others are computed and the steps are measured."""
NUM_SLOTS = 40_000
OF_KINDS = ("<= 0.06", "<= 0.03")
GOALS: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "bfloat16": {"": ("<= 0.1", "<= 0.05"), "constrained": OF_KINDS, "logprobs": OF_KINDS},
    "auto": {"4bit": ("<= 0.08", "")},
}
"""The goals for 1 and for 32 streams, by the data type and the kind of the requests. ``auto``: the 4 bits of
the default model's file, whose steps are shorter."""
WORDS = r"(?:[a-z]{1,12}[ ,.])+\x1f{9}"
"""Text with few states, as most grammars have, that models do not end."""


def measure(report: Report, folder: Path) -> None:
    """Measures ``overhead_share``: the share of a step outside the kernels, for 1 and for 32 streams, also of
    requests under a grammar, of requests that want log-probabilities, and with weights of 4 bits."""
    for dtype, goals in GOALS.items():
        runner = TorchRunner(folder, num_slots=NUM_SLOTS, dtype=dtype, device="cpu", num_threads=2)
        _measure_runner(runner, folder, goals, report)
        runner.close()


def _measure_runner(
    runner: TorchRunner, folder: Path, goals_of: Mapping[str, tuple[str, str]], report: Report
) -> None:
    with _other_process() as connection:

        def deliver(messages: list[FromEngine]) -> None:
            connection.sendall(to_frame(messages))

        engine = Engine(runner, Tokenizer.from_folder(folder), SchedulerConfig(max_running=64), deliver)
        collect_garbage_rarely()
        runs = 5 if report.scale == "full" else 3
        for kind, goals in goals_of.items():
            for num, context, goal in ((1, 100, goals[0]), (32, 300, goals[1])):
                shares = []
                for turn in range(runs):
                    share, note = _overhead(engine, 1000 * (turn + 1), num, context, kind)
                    shares.append(share)
                name = "_".join(
                    ["overhead_share", *([kind] if kind else []), *(["batch32"] if num > 1 else [])]
                )
                report.median(f"step.{name}", shares, "ratio", note=note, goal=goal)


@contextmanager
def _other_process() -> Iterator[socket.socket]:
    """Opens a socket like an engine process's, with a process at the other end that reads everything."""
    mine, its_own = socket.socketpair()
    with subprocess.Popen(["cat"], stdin=its_own.fileno(), stdout=subprocess.DEVNULL), mine:
        its_own.close()
        yield mine


def _overhead(engine: Engine, first_id: int, num: int, context: int, kind: str) -> tuple[float, str]:
    """Decodes one batch of requests of a kind of ``GOALS``, and measures the share of its steps outside the
    kernels."""
    numbers = random.Random(first_id)
    num_top = 5 if kind == "logprobs" else 0
    params = SamplingParams(
        max_tokens=MAX_TOKENS, ignore_eos=True, temperature=0.7, top_p=0.9, top_logprobs=num_top
    )
    constraint = compile_constraint(Constraint("regex", WORDS)) if kind == "constrained" else None
    for request_id in range(first_id, first_id + num):
        ids = [numbers.randrange(10, 49_000) for _ in range(context)]
        submit = Submit(
            request_id=request_id, token_ids=ids, params=params, seed=request_id, constraint=constraint
        )
        engine.send(submit)
    engine.take_messages()
    running = engine.scheduler.running
    num_before = engine.scheduler.memory.num_steps
    while len(running) < num or any(request.num_generated < 3 for request in running.values()):
        engine.take_messages()  # a grammar is built meanwhile
        engine.step()
        if engine.scheduler.memory.num_steps - num_before > MAX_TOKENS - 2 * NUM_STEPS:
            raise RuntimeError(f"the prompts of {num} requests need too many steps")
    before = [phase.total for phase in engine.times]
    team.part_seconds()
    with _time_beside_kernels() as beside_s:
        began = time.perf_counter()
        for _ in range(NUM_STEPS):
            engine.step()
        took = time.perf_counter() - began
    parts = team.part_seconds()
    in_kernels = sum(parts[part] for part in KERNEL_PARTS)
    phases = [phase.total - seen for phase, seen in zip(engine.times, before, strict=True)]
    text_ms = _text_ms(engine)
    for request_id in range(first_id, first_id + num):
        engine.send(Abort(request_id))
    engine.take_messages()
    each = {name: 1e3 * seconds / NUM_STEPS for name, seconds in zip(PHASES, phases, strict=True)}
    each["run"] -= 1e3 * in_kernels / NUM_STEPS
    around = ", ".join(f"{name} {ms:.2f}" for name, ms in each.items())
    note = (
        f"{num} {kind or 'plain'} streams at {context} tokens, top_p 0.9: "
        f"{1e3 * took / NUM_STEPS:.1f} ms per step, "
        f"{1e3 * in_kernels / NUM_STEPS:.1f} in kernels; around them, ms: {around} (to another process, and "
        f"while a step runs); next to kernels {1e3 * sum(beside_s) / NUM_STEPS:.2f} ms, of which "
        f"detokenising {text_ms:.2f} (last run)"
    )
    return 1 - in_kernels / took, note


@contextmanager
def _time_beside_kernels() -> Iterator[list[float]]:
    """Yields a list that gets the seconds from the start of each forward pass in one call until the engine's
    thread joins it."""
    library, seconds = team.library(), list[float]()
    really_start, really_finish = library.af_start_forward, library.af_finish_forward
    began = 0.0

    def start(*arguments: object) -> None:
        nonlocal began
        really_start(*arguments)
        began = time.perf_counter()

    def finish() -> None:
        seconds.append(time.perf_counter() - began)
        really_finish()

    with patch.object(library, "af_start_forward", start), patch.object(library, "af_finish_forward", finish):
        yield seconds


def _text_ms(engine: Engine) -> float:
    """Measures the time of detokenising per step, in some more steps."""
    took = 0.0
    really_push = TextEnd.push

    def push(*arguments: Any, **options: Any) -> str:
        nonlocal took
        began = time.perf_counter()
        delta = really_push(*arguments, **options)
        took += time.perf_counter() - began
        return delta

    with patch.object(TextEnd, "push", push):
        for _ in range(NUM_TEXT_STEPS):
            engine.step()
    return 1e3 * took / NUM_TEXT_STEPS
