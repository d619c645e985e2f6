"""Programs in the scheduler: chains, groups, agents and mixes in the settings of the Parrot paper (Lin et
al., OSDI 2024, figures 11 to 19), and agent sessions.

Most settings are simulated: time follows ``GPU``, so the same commit gives the same figures everywhere. The
workloads are generated from seeds in shapes that papers publish, not taken from traces. Each setting runs
with the program's graph in the service, and as single requests: a client waits for each
answer and sends the next request after a round trip of 200 to 300 ms, as in the paper, and the scheduler
does not know programs, groups, states or objectives. Both sides have the same engines, and the same target if
there is one. ``real_programs`` runs small programs on a model.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from rich.console import Console

from agentflow.cluster.routing.load import EngineShape
from agentflow.cluster.routing.router import Router, RoutingPolicy
from agentflow.cluster.simulated.published import LeastTokens
from agentflow.cluster.simulated.simulation import MODEL, SimulatedCluster
from agentflow.engine.scheduling.scheduler import SchedulerConfig
from agentflow.engine.simulator.cost_model import CostModel
from agentflow.engine.simulator.generators import (
    agent_sessions,
    chains,
    combined,
    hot_and_cold,
    map_reduce,
    multi_agent,
    unshared,
)
from agentflow.engine.simulator.simulation import Served, Simulated, simulate
from agentflow.engine.simulator.summary import program_times
from agentflow.engine.simulator.workload import Arrival, Workload
from benchmarks.engine import program_policies
from benchmarks.engine.real_programs import PROGRAMS, measure_real
from benchmarks.report import Report

GPU = CostModel(base_s=5.1e-3, row_s=20.5e-6, logits_s=0.0, read_s=2.5e-8, pair_s=1.2e-9)
"""Chosen by hand to follow the measured steps of a model with the shapes of Llama 3.1 8B on one NVIDIA H200
(``results/nvidia-h200/gpu.json``: decoding of 1 to 256 requests, prefill of 2,048 tokens)."""
GPU_CONTEXT = 160_000
LOAD = 0.7
"""The arrival rate of other requests, as a part of the rate that the engine serves."""
BUSY = 0.9
"""The arrival rate at which requests wait."""
ROUND_TRIP_S = (0.2, 0.3)
BATCH_TOKENS = 12_288
"""``max_total_tokens`` of the engines in the paper's artifact: the tokens of one batch."""
TPOT_TARGET_MS = 10
"""About twice the step of a lone request. The paper's 40 ms is twice its 20 ms."""

Chats = Callable[[int, float], list[Arrival]]
"""Makes a number of single requests, which arrive at a rate; 0: at the start."""


@dataclass(frozen=True)
class Engines:
    """The engines of a setting. Each has a pool of ``kv_tokens``."""

    max_running: int = 256
    kv_tokens: int = BATCH_TOKENS
    count: int = 1

    def run(
        self,
        name: str,
        arrivals: Sequence[Arrival],
        *,
        policy: str = "fair-lpm",
        knows_programs: bool = True,
        tpot_target_ms: int | None = None,
        use_cache: bool = True,
    ) -> Simulated:
        """Simulates a workload."""
        config = SchedulerConfig(
            max_running=self.max_running,
            token_budget=4096,
            policy=policy,
            tpot_target_ms=tpot_target_ms,
            use_cache=use_cache,
        )
        workload = Workload(name, arrivals, self.kv_tokens)
        if self.count > 1:
            return SimulatedCluster(
                workload,
                config,
                self._router(tpot_target_ms / 1e3) if knows_programs and tpot_target_ms else LeastTokens(),
                num_engines=self.count,
                cost=GPU,
                max_context=GPU_CONTEXT,
                knows_programs=knows_programs,
            ).run()
        return simulate(workload, config, cost=GPU, max_context=GPU_CONTEXT, knows_programs=knows_programs)

    def _router(self, tpot_s: float) -> RoutingPolicy:
        """The policy that places requests by their objectives."""
        return Router(EngineShape(GPU, self.max_running, self.kv_tokens, tpot_s, keeps_tpot=True), MODEL)

    def capacity(self, chats: Chats) -> float:
        """Returns the number of single requests that the engines serve per second, except while the batch
        fills and empties."""
        alone = replace(self, count=1)
        ended = sorted(one.ended_s for one in alone.run("capacity", chats(500, 0.0)).served)
        first, last = len(ended) // 5, 4 * len(ended) // 5
        return self.count * (last - first) / (ended[last] - ended[first])


@dataclass(frozen=True)
class Setting:
    """One workload.

    Args:
        name: The name in its figures.
        note: Its description, with the figure of the paper.
        arrivals: Its requests, as a service that knows the programs receives them.
        engines: The engines that serve them.
        goal: The goal for the gain over programs that are driven by a client.
        has_round_trips: A client would send dependent requests after a round trip.
        tpot_target_ms: The target of the engines.
    """

    name: str
    note: str
    arrivals: Sequence[Arrival]
    engines: Engines
    goal: str = ">= 1.0"
    has_round_trips: bool = True
    tpot_target_ms: int | None = None


def single_requests(arrivals: Sequence[Arrival]) -> list[Arrival]:
    """Returns the requests for a server that does not know programs."""
    return [replace(arrival, task_group="", state="", objective="latency") for arrival in arrivals]


def over_network(arrivals: Sequence[Arrival], seed: int = 3) -> list[Arrival]:
    """Returns the requests of a client that waits for the answers on which they depend."""
    random = np.random.default_rng(seed)
    return [
        arrival
        if arrival.after is None
        else replace(arrival, at_s=arrival.at_s + float(random.uniform(*ROUND_TRIP_S)))
        for arrival in arrivals
    ]


def starting(arrivals: Sequence[Arrival], at_s: float, name: str) -> list[Arrival]:
    """Returns one program as a program of another name that arrives later."""
    return [
        replace(
            arrival,
            at_s=arrival.at_s + (at_s if arrival.after is None else 0.0),
            program=name,
        )
        for arrival in arrivals
    ]


# The paper's workloads.


def background(count: int, per_s: float) -> list[Arrival]:
    """Requests of figure 12a: prompts of about 512 tokens, 50 generated."""
    return unshared(num_requests=count, prompt=512, output=50, per_s=per_s, seed=5)


def conversations(count: int, per_s: float, seed: int = 9) -> list[Arrival]:
    """Requests with the mean lengths of ShareGPT, 161 and 338 tokens (Kwon et al., 2023)."""
    return unshared(num_requests=count, prompt=161, output=338, per_s=per_s, seed=seed)


def document_chain(seed: int, chunk: int = 1024) -> list[Arrival]:
    """A chain over a document of 20,000 tokens, 50 generated of each chunk, as in figures 11 to 13."""
    return chains(num_chains=1, length=20_480 // chunk, chunk=chunk, summary=50, seed=seed)


def document_map(seed: int) -> list[Arrival]:
    """Map-reduce over a document of 20,000 tokens, as in figure 14."""
    return map_reduce(num_programs=1, width=20, chunk=1024, summary=50, seed=seed)


def copilot(count: int) -> list[Arrival]:
    """Requests over one prompt of 6,000 tokens, as in figures 15 and 16, which generate about 330."""
    arrivals = hot_and_cold(
        num_requests=count, per_s=0.0, num_prefixes=1, prefix=6000, own=100, cold_share=0.0, output=330
    )
    return [replace(arrival, program=f"copilot {number}") for number, arrival in enumerate(arrivals)]


APPLICATIONS = {"productivity": (7437, 7, 704, 19), "images": (1116, 8, 89, 40)} | {
    "programming": (1694, 4, 631, 28),
    "analysis": (2031, 4, 416, 13),
}
"""The applications of figure 17, from the paper's artifact: the tokens of the shared prompt, of the query and
of the output, and the part of the requests in percent."""


def applications(count: int, per_s: float, seed: int = 0) -> list[Arrival]:
    """Requests of ``APPLICATIONS``."""
    random = np.random.default_rng(7 + seed)
    names = [*APPLICATIONS]
    prompts = {
        name: unshared(num_requests=1, prompt=2 * APPLICATIONS[name][0], seed=i)
        for i, name in enumerate(names)
    }
    chosen = random.choice(len(names), count, p=[APPLICATIONS[name][3] / 100 for name in names])
    rest = unshared(num_requests=count, prompt=20, output=1500, per_s=per_s, seed=8 + seed)
    arrivals: list[Arrival] = []
    for number, (index, one) in enumerate(zip(chosen, rest, strict=True)):
        shared, query, output, _ = APPLICATIONS[names[index]]
        prompt = np.concatenate((prompts[names[index]][0].prompt[:shared], one.prompt[:query]))
        arrivals.append(
            Arrival(
                prompt, one.output[:output], one.at_s, label=names[index], program=f"application {number}"
            )
        )
    return arrivals


def mix(engines: Engines, seconds: float, load: float) -> tuple[list[Arrival], float]:
    """Figure 19: chats and map-reduce, each half of the load. Documents come in threes, with the pauses of
    the paper's artifact (0.5, 0.5 and 10 s) in proportion. Returns the rate of chats, too."""
    rate = load / 2 * engines.capacity(conversations)
    one = replace(engines, count=1).run("document", document_map(0))
    per_document_s = sum(len(served.arrival.tokens) for served in one.served) * GPU.row_s
    period_s = 3 * per_document_s / (load / 2 * engines.count)
    starts = [
        first + period_s * pause / 11
        for first in np.arange(0.0, seconds, period_s)
        for pause in (0.0, 0.5, 1.0)
    ]
    documents = [
        starting(document_map(100 + number), at_s, f"document {number}") for number, at_s in enumerate(starts)
    ]
    return combined(conversations(int(rate * seconds), rate), *documents), rate


LONGEST = "programs.longest_setting_s"
FIGURES = ("latency_gain", "scheduler_gain", "throughput", "chat_tpot_p95_ms")


def settings(scale: str, only: str) -> dict[str, Callable[[], Setting]]:
    """Returns functions that make the workloads with a figure whose id contains ``only``."""
    size = 1 if scale == "small" else 3
    one, four = Engines(), Engines(max_running=64, kv_tokens=400_000, count=4)
    found: dict[str, Callable[[], Setting]] = {}

    def add(name: str, make: Callable[[], Setting]) -> None:
        if any(only in f"programs.{figure}_{name}_fcfs" for figure in FIGURES):
            found[name] = make

    def chain_alone() -> Setting:
        note = "figure 11: a chain of 20 requests over 1,024 tokens each, 50 generated"
        return Setting("chain_alone", note, document_chain(1), one, ">= 1.2")

    def chain_beside(name: str, load: float, goal: str) -> Setting:
        rate = load * one.capacity(background)
        each_s = 16.0
        documents = [
            starting(document_chain(number), 2 + each_s * number, f"chain {number}") for number in range(size)
        ]
        arrivals = combined(background(int(rate * each_s * size), rate), *documents)
        note = f"figure 12a: a chain next to requests at {load} of the served rate ({rate:.0f} a second)"
        return Setting(name, note, arrivals, one, goal)

    def many_chains() -> Setting:
        note = "figures 12b and 13: 25 chains at a time, of 10 requests over 2,048 tokens each"
        documents = [starting(document_chain(number, 2048), 0.0, f"chain {number}") for number in range(25)]
        return Setting("many_chains", note, combined(*documents), one, ">= 1.5")

    def map_alone() -> Setting:
        note = "figure 14: 20 requests over 1,024 tokens each and one over their outputs"
        return Setting("map_reduce_alone", note, document_map(1), one)

    def map_beside() -> Setting:
        rate = LOAD * one.capacity(background)
        seconds = 12.0 * size
        documents = [
            starting(document_map(number), 2 + 3.0 * number, f"document {number}")
            for number in range(int(seconds / 3) - 1)
        ]
        arrivals = combined(background(int(rate * seconds), rate), *documents)
        note = f"figure 14 next to requests at {LOAD} of the served rate ({rate:.0f} a second)"
        return Setting("map_reduce", note, arrivals, one, ">= 1.5")

    def copilots() -> Setting:
        note = "figures 15 and 16: 64 requests over a prompt of 6,000 tokens, 32 at a time"
        engines = Engines(max_running=32, kv_tokens=100_000)
        return Setting("copilot", note, copilot(64), engines, has_round_trips=False)

    def mixed_applications() -> Setting:
        rate = LOAD * four.capacity(applications)
        note = f"figure 17: four applications, four engines, {LOAD} of the served rate ({rate:.0f} a second)"
        return Setting("applications", note, applications(200 * size, rate), four, has_round_trips=False)

    def coding() -> Setting:
        note = "figure 18: 8 coders and 8 reviewers in three rounds, in the shape of MetaGPT"
        engines = Engines(max_running=64, kv_tokens=400_000)
        return Setting("multi_agent", note, multi_agent(num_programs=2 * size, per_s=1.0), engines)

    def mixed(name: str, load: float, goal: str) -> Setting:
        arrivals, rate = mix(four, 6.0 * size, load)
        note = (
            f"figure 19: chats ({rate:.0f} a second) and map-reduce on four engines, each half of {load} of "
            f"the served rate; tpot_target_ms {TPOT_TARGET_MS}"
        )
        return Setting(name, note, arrivals, four, goal, tpot_target_ms=TPOT_TARGET_MS)

    def agents() -> Setting:
        note = (
            "sessions of 43 turns up to 142,000 tokens, tools of 1 to 10 s, generated in that shape; the "
            "pool has half of them"
        )
        arrivals = agent_sessions(num_sessions=3 * size, per_s=0.2)
        engines = Engines(max_running=16, kv_tokens=142_000 * 3 * size // 2)
        return Setting("agents", note, arrivals, engines, has_round_trips=False)

    add("chain_alone", chain_alone)
    add("chain", lambda: chain_beside("chain", LOAD, ">= 1.5"))
    add("chain_busy", lambda: chain_beside("chain_busy", BUSY, ""))
    add("many_chains", many_chains)
    add("map_reduce_alone", map_alone)
    add("map_reduce", map_beside)
    add("copilot", copilots)
    add("applications", mixed_applications)
    add("multi_agent", coding)
    add("mix", lambda: mixed("mix", LOAD, ">= 1.0"))
    add("mix_busy", lambda: mixed("mix_busy", BUSY, ">= 1.0"))
    add("agents", agents)
    return found


# Figures.


def mean_s(simulated: Simulated) -> float:
    """Returns the mean time of a program."""
    return float(np.mean([*program_times(simulated).values()]))


def others(simulated: Simulated) -> list[Served]:
    """Returns the requests that belong to no program."""
    return [served for served in simulated.served if not served.arrival.program]


def p95_ms(values: Sequence[float]) -> float:
    """Returns the 95th percentile of seconds, in milliseconds."""
    return 1e3 * float(np.percentile(values, 95))


def measure(setting: Setting, report: Report) -> None:
    """Adds the figures of one workload."""
    engines, name, target = setting.engines, setting.name, setting.tpot_target_ms
    wired, alone = setting.arrivals, single_requests(setting.arrivals)
    driven = over_network(alone) if setting.has_round_trips else alone
    aware = engines.run(name, wired, tpot_target_ms=target)
    unaware = engines.run(name, driven, knows_programs=False, tpot_target_ms=target)
    fcfs = engines.run(name, driven, knows_programs=False, tpot_target_ms=target, policy="fcfs")
    in_order = unaware
    if setting.has_round_trips:
        in_order = engines.run(name, alone, knows_programs=False, tpot_target_ms=target)
    times = [mean_s(one) for one in (aware, unaware, fcfs, in_order)]
    after = " after round trips of 200 to 300 ms" if setting.has_round_trips else ""
    note = (
        f"{setting.note}; a program takes {times[0]:.2f} s, as single requests{after} {times[1]:.2f}, with "
        f"fcfs {times[2]:.2f}"
    )
    if name == "many_chains":
        ended, without = program_times(aware), program_times(unaware)
        note += f"; {sum(ended[one] > without[one] for one in ended)} of {len(ended)} end later"
    if name == "copilot":
        uncached = engines.run(name, alone, knows_programs=False, use_cache=False)
        note += f", without the prefix cache {mean_s(uncached):.2f}"

    def add(figure: str, value: float, note: str = "", goal: str = "") -> None:
        report.add(f"programs.{figure}", round(value, 3), "ratio", note=note, goal=goal)

    add(f"latency_gain_{name}", times[1] / times[0], f"{note}; simulated", setting.goal)
    add(f"latency_gain_{name}_fcfs", times[2] / times[0])
    if setting.has_round_trips:
        text = "against single requests without round trips: the gain of the scheduler alone"
        add(f"scheduler_gain_{name}", times[3] / times[0], text)
    throughput = "the time of the whole workload as single requests, by the time with programs"
    add(f"throughput_{name}", unaware.elapsed_s / aware.elapsed_s, throughput, ">= 0.97")
    if others(aware):
        _add_waits(report, setting, driven, aware, unaware)


def _add_waits(
    report: Report, setting: Setting, driven: Sequence[Arrival], aware: Simulated, unaware: Simulated
) -> None:
    """Adds the time per token of the other requests, and the waits of requests."""
    engines, target = setting.engines, setting.tpot_target_ms
    tpot = [p95_ms([one.tpot_s for one in others(run)]) for run in (aware, unaware)]
    ttft = [p95_ms([one.ttft_s for one in others(run)]) for run in (aware, unaware)]
    note = f"p95 of the other requests, {tpot[1]:.1f} without programs"
    if target is not None:
        without = engines.run(setting.name, setting.arrivals)
        plain = engines.run(setting.name, driven, knows_programs=False)
        both = [p95_ms([one.tpot_s for one in others(run)]) for run in (without, plain)]
        note += (
            f"; without the target {both[0]:.1f} and {both[1]:.1f}, where a program takes "
            f"{mean_s(without):.2f} s, and {mean_s(plain):.2f} as single requests"
        )
    note += f"; first token {ttft[0]:.0f} ms, {ttft[1]:.0f} without programs"
    steps = [one.ttft_s for one in unaware.served if one.arrival.program]
    first = min(steps)
    note += (
        f"; a program's request waits {1e3 * float(np.mean(steps)):.0f} ms for its first token without "
        f"programs, at least {1e3 * first:.0f}"
    )
    goal = "" if target is None else f"<= {target}"
    name = f"programs.chat_tpot_p95_ms_{setting.name}"
    report.add(name, round(tpot[0], 2), "ms", note=note, goal=goal)


RECOMPUTED_SEEDS = range(6)
"""A single workload is not meaningful: equal rules differ by a third over these."""


def measure_recomputed(report: Report) -> None:
    """Adds the tokens that are computed again in agent sessions, compared with a cache that knows when each
    session continues, and with one that does not know sessions. Sums over ``RECOMPUTED_SEEDS``."""
    name = "recomputed_of_optimum"

    def recomputed(arrivals: Sequence[Arrival], *, knows_returns: bool = False) -> tuple[int, float]:
        unique = sum({arrival.program: len(arrival.tokens) for arrival in arrivals}.values())
        config = SchedulerConfig(max_running=16, token_budget=4096)
        workload = Workload(name, arrivals, 8 * 30_000 // 2)
        done = simulate(workload, config, cost=GPU, max_context=GPU_CONTEXT, knows_returns=knows_returns)
        return done.counters.computed_tokens - unique, mean_s(done)

    ours, optimum, stateless = [], [], []
    for seed in RECOMPUTED_SEEDS:
        arrivals = agent_sessions(
            num_sessions=8, per_s=1.0, turns=15, first=4000, last=30_000, output=150, seed=seed
        )
        ours.append(recomputed(arrivals))
        optimum.append(recomputed(arrivals, knows_returns=True))
        stateless.append(recomputed([replace(arrival, state="") for arrival in arrivals]))
    tokens = [sum(count for count, _ in runs) for runs in (ours, optimum, stateless)]
    times = [float(np.mean([seconds for _, seconds in runs])) for runs in (ours, optimum)]
    each = [round(mine / best, 3) for (mine, _), (best, _) in zip(ours, optimum, strict=True)]
    note = (
        f"8 sessions of 15 turns up to 30,000 tokens, the pool has half of them: {tokens[0]:,} tokens in "
        f"{len(each)} workloads, {tokens[1]:,} if the time of each tool is known before, {tokens[2]:,} "
        f"without states; a session takes {times[0]:.1f} s, {times[1]:.1f} if the times are known; a run for "
        "each workload; simulated"
    )
    value = round(tokens[0] / tokens[1], 3)
    report.add(f"programs.{name}", value, "ratio", each, note=note, goal="<= 1.3")


def run(report: Report, console: Console, only: str) -> None:
    """Measures the workloads whose name ``only`` contains, or all."""
    for name, make in settings(report.scale, only).items():
        with report.timed(name):
            setting = make()
            console.print(f"{name}: {len(setting.arrivals):,} requests, simulated")
            measure(setting, report)
    if only in "programs.recomputed_of_optimum":
        with report.timed("recomputed_of_optimum"):
            measure_recomputed(report)
    program_policies.run(report, console, only)
    if not report.is_exact and any(only in f"programs.real_{name}_gain" for name in PROGRAMS):
        console.print("programs on the model", style="dim")
        with report.timed("real"):
            asyncio.run(measure_real(report))
    if report.seconds:
        longest = max(report.seconds, key=report.seconds.__getitem__)
        note = f"the time to measure one setting; {longest} takes the longest"
        seconds = report.seconds[longest]
        report.add(LONGEST, seconds, "s", [*report.seconds.values()], note, "<= 180")
    report.results = [result for result in report.results if only in result.id]
