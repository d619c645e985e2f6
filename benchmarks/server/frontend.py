"""The cost of the frontend to a client: CPU per op and per token over the websocket, round trips, stalls, a
round of ``af.act``, and the import.

The server is a separate process with a scripted generator, so that only the client is measured. Figures are
CPU time of this process, not wall time, except for the import.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from tempfile import TemporaryDirectory
from typing import Any

import anyio
import anyio.lowlevel
from rich.console import Console

import agentflow as af
from agentflow.language.graphs.graph import Graph
from agentflow.protocol import ops
from agentflow.protocol.backend import Backend, Connection, Deliver, Lost
from agentflow.protocol.events import Event
from benchmarks.report import Report
from benchmarks.server.stalls import LoopWatch
from benchmarks.serving import serving

CHAIN = 10
NUM_STREAMING = 1000


class Counted:
    """A backend that counts ops and round trips: bursts of ops that depend on the answer to the previous
    burst."""

    def __init__(self, backend: Backend) -> None:
        self.num_ops = 0
        self.round_trips = 0
        self._backend = backend
        self._has_sent = False

    @asynccontextmanager
    async def _connect(self, deliver: Deliver, lost: Lost) -> AsyncIterator[Connection]:
        def hear(events: Iterable[Event]) -> None:
            self.round_trips += self._has_sent
            self._has_sent = False
            deliver(events)

        async with self._backend.connect(hear, lost) as connection:
            send = connection.send

            def counted(sent: Sequence[ops.Op]) -> None:
                self.num_ops += len(sent)
                self._has_sent = self._has_sent or any(not isinstance(op, ops.Close) for op in sent)
                send(sent)

            connection.send = counted  # type: ignore[method-assign]
            yield connection

    def connect(self, deliver: Deliver, lost: Lost) -> AbstractAsyncContextManager[Connection]:
        return self._connect(deliver, lost)


@af.program
async def conversation(s: af.State, turns: int) -> None:
    """Many ops, with one word of text per gen."""
    for _ in range(turns):
        s += af.user("What comes after this, and what before it?")
        s += af.assistant("It is ", af.gen("next", max_tokens=1))
        await s


@af.program
async def chain(s: af.State, subject: str) -> str:
    """Ten gens, each of which depends on the previous one; nothing is awaited in between."""
    s += af.user(f"Tell me of {subject}.")
    step = af.gen("step0", max_tokens=4)
    s += af.assistant(step)
    for number in range(1, CHAIN):
        branch = s.copy()
        branch += af.user(f"And what of {s[step].strip()}?")
        step = af.gen(f"step{number}", max_tokens=4)
        branch += af.assistant(step)
        s = branch
    return await s[step]


async def cpu_us(work: Callable[[], Awaitable[Any]]) -> float:
    """Returns the CPU time of this process for ``work``, in microseconds."""
    start = time.process_time()
    await work()
    return (time.process_time() - start) * 1e6


async def measure_ops(url: str, report: Report) -> None:
    """Measures the CPU time per op, including its answer."""
    runs = []
    turns = 100 if report.scale == "full" else 20
    for _ in range(7):
        counted = Counted(af.Remote(url))
        async with af.session(backend=counted) as flow:
            await flow.run(conversation, 5)
            before = counted.num_ops
            spent = await cpu_us(lambda: flow.run(conversation, turns))
            runs.append(spent / (counted.num_ops - before))
    note = f"turns of text and an awaited gen of one token; {turns} turns per run"
    report.median("frontend.client_us_per_op", runs, "us", note=note, goal="<= 150")


async def measure_tokens(url: str, report: Report) -> None:
    """Measures the CPU time per token that is streamed to a reader."""
    runs = []
    num_tokens = 4000 if report.scale == "full" else 500
    for _ in range(7):
        async with af.session(url) as flow, flow.state() as s:
            s += "Count: " + af.gen("words", max_tokens=num_tokens)
            num_heard = 0

            async def read() -> None:
                nonlocal num_heard
                async for delta in s["words"]:  # noqa: B023
                    num_heard += delta.count("word")

            spent = await cpu_us(read)
            assert num_heard == num_tokens
            runs.append(spent / num_tokens)
    note = (
        f"one stream of {num_tokens} tokens; "
        "tokens that arrive while the reader is busy are merged into one delta"
    )
    report.median("frontend.client_us_per_token", runs, "us", note=note, goal="<= 60")


async def measure_stalls(url: str, report: Report) -> None:
    """Measures the delay of a timer while a thousand states stream."""
    runs = []
    for _ in range(3):
        watch = LoopWatch()

        @af.program
        async def stream(s: af.State) -> None:
            s += "Count: " + af.gen("words", max_tokens=30)
            async for _ in s["words"]:
                pass

        async with af.session(url) as flow, anyio.create_task_group() as group:
            group.start_soon(watch.run)
            async with anyio.create_task_group() as programs:
                for _ in range(NUM_STREAMING):
                    programs.start_soon(flow.run, stream)
                    await anyio.lowlevel.checkpoint()
            group.cancel_scope.cancel()
        runs.append(watch.longest_s * 1e3)
    note = f"{NUM_STREAMING} concurrent states of 30 tokens, server on the same machine"
    report.median("frontend.max_stall_ms", runs, "ms", note=note, goal="<= 50")


async def measure_chain(url: str, report: Report) -> None:
    """Measures round trips and the client's CPU time of ten dependent gens, run eagerly and as a graph."""
    graph = chain.trace()
    ratios: list[float] = []
    eager_us: list[float] = []
    compiled_us: list[float] = []
    counted = Counted(af.Remote(url))
    async with af.session(backend=counted) as flow:
        trips = [await _trips(counted, flow, None), await _trips(counted, flow, graph)]
        for _ in range(40 if report.scale == "full" else 10):
            eager_us.append(await cpu_us(lambda: flow.run(chain, "stars")))
            compiled_us.append(await cpu_us(lambda: flow.submit(graph, {"subject": "stars"})))
        for chunk in range(5):
            ratios.append(sum(compiled_us[chunk::5]) / sum(eager_us[chunk::5]))
    note = f"eager {trips[0]}, compiled {trips[1]}; {CHAIN} dependent gens"
    worst = float(max(trips))
    report.add("frontend.chain_round_trips", worst, "trips", note=note, goal="<= 1")
    note = f"{min(compiled_us):.0f} us compiled, {min(eager_us):.0f} us eager, best runs"
    report.median("frontend.compiled_cpu_share", ratios, "ratio", note=note, goal="<= 0.2")


async def measure_act(_url: str, report: Report) -> None:
    """Measures the CPU time that ``af.act`` adds to a round with one tool call, over a loop written by
    hand."""
    rounds = 50 if report.scale == "full" else 10

    async def look_up(topic: str) -> str:
        """Looks up a topic."""
        return f"{topic} is known"

    call = af.ToolCall("look_up", {"topic": "stars"})

    async def by_hand(s: af.State) -> None:
        for _ in range(rounds + 1):
            reply = af.reply("answer", tools=[look_up])
            s += reply
            for wanted in (await s[reply]).tool_calls:
                s += af.tool_result(await look_up(**wanted.arguments), call=wanted)

    async def by_act(s: af.State) -> None:
        await af.act(s, tools=[look_up], max_rounds=rounds + 1)

    added: list[float] = []
    totals: list[float] = []
    for _ in range(9):
        spent: list[float] = []
        for work in (by_hand, by_act):
            backend = af.Scripted({"answer": [call] * rounds + ["Done."]})
            async with af.session(backend=backend) as flow, flow.state() as s:
                s += af.user("What are stars?")
                spent.append(await cpu_us(lambda: work(s)) / rounds / 1000)  # noqa: B023
        added.append(spent[1] - spent[0])
        totals.append(spent[1])
    note = (
        f"over the same loop by hand; a round with a call takes {min(totals):.2f} ms in all, {rounds} rounds"
    )
    report.median("frontend.act_ms_per_round", added, "ms", note=note, goal="<= 1")


async def measure_import(_url: str, report: Report) -> None:
    """Measures ``import agentflow`` in a new interpreter with bytecode, less the start of the interpreter."""
    runs = []
    with TemporaryDirectory() as folder:
        environment = {**os.environ, "PYTHONPYCACHEPREFIX": folder, "PYTHONDONTWRITEBYTECODE": ""}

        async def took_ms(code: str) -> float:
            start = time.perf_counter()
            await anyio.run_process([sys.executable, "-c", code], env=environment)
            return (time.perf_counter() - start) * 1e3

        await took_ms("import agentflow")  # compiles
        for _ in range(15):
            bare = await took_ms("pass")
            runs.append(await took_ms("import agentflow") - bare)
    note = "without the start of the interpreter"
    report.median("frontend.import_ms", runs, "ms", note=note, goal="<= 150")


async def _trips(counted: Counted, flow: af.Session, graph: Graph | None) -> int:
    before = counted.round_trips
    if graph is None:
        await flow.run(chain, "stars")
    else:
        await flow.submit(graph, {"subject": "stars"})
    return counted.round_trips - before


def run(report: Report, console: Console, only: str) -> None:
    """Measures the figures whose id contains ``only``."""
    measures = {
        "client_us_per_op": measure_ops,
        "client_us_per_token": measure_tokens,
        "max_stall_ms": measure_stalls,
        "chain_round_trips compiled_cpu_share": measure_chain,
        "act_ms_per_round": measure_act,
        "import_ms": measure_import,
    }
    with serving("benchmarks.server.scripted_server") as (url, _):
        for names, measure in measures.items():
            if not only or any(only in f"frontend.{name}" for name in names.split()):
                with console.status(names):
                    anyio.run(measure, url, report)
