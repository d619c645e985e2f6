"""Workloads for many replicas: programs from papers and agent sessions, as many as the replicas can serve.

The shared parts of a workload (examples, system messages, prompts of applications) grow with the replicas,
like the users of a larger service, except the four prompts of ``applications``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace

import numpy as np

from agentflow.cluster.routing.load import EngineShape
from agentflow.cluster.routing.router import Router, RoutingPolicy
from agentflow.cluster.simulated.published import PUBLISHED_ROUTERS, RoundRobin
from agentflow.cluster.simulated.simulation import MODEL, SimulatedCluster
from agentflow.engine.scheduling.scheduler import SchedulerConfig
from agentflow.engine.simulator.cost_model import CostModel
from agentflow.engine.simulator.generators import (
    agent_sessions,
    chat,
    combined,
    few_shot,
    map_reduce,
    multi_agent,
    tree_of_thought,
)
from agentflow.engine.simulator.simulation import Served, Simulated
from agentflow.engine.simulator.workload import Arrival, Workload
from benchmarks.engine.programs import GPU, applications, conversations

OURS, LARGE = "ours", "one-large"
TPOT_S = 0.05
TTFT_S = 1.0
LOAD = 0.8
OVERLOAD = 1.3


@dataclass(frozen=True)
class Case:
    """A workload of any number of replicas.

    Args:
        name: The name in its figures.
        note: Its description.
        make: Makes the programs for a number of replicas, at a rate of programs per second (0: all at the
            start), from a seed.
        burst: The number of programs that keep one replica busy, to measure how many it serves.
        with_pauses: Their pauses are included, because the memory that they hold meanwhile is the limit.
        warm_s: The time until programs end at the rate at which they arrive: about the time of a program.
        steady_s: How long requests are measured after that.
        overloaded_s: The seconds of arrivals to measure scaling: long compared to the time of a request.
        kv_tokens: The pool of a replica.
        max_running: The batch of a replica.
        max_context: The longest sequence.
    """

    name: str
    note: str
    make: Callable[[int, int, float, int], list[Arrival]]
    burst: int
    warm_s: float
    steady_s: float
    overloaded_s: float
    with_pauses: bool = False
    kv_tokens: int = 100_000
    max_running: int = 64
    max_context: int = 16_384

    def workload(self, num_replicas: int, per_s: float, seconds: float, seed: int = 0) -> Workload:
        """The programs of ``seconds`` seconds for a number of replicas, ``per_s`` for each."""
        count = max(2, round(per_s * seconds * num_replicas))
        return Workload(self.name, self.make(num_replicas, count, per_s * num_replicas, seed), self.kv_tokens)

    def config(self, scale: int = 1) -> SchedulerConfig:
        """The configuration of a replica, or of one engine that is ``scale`` times as large."""
        return SchedulerConfig(max_running=self.max_running * scale, token_budget=2048 * scale)

    def router(self) -> Router:
        """The router."""
        return Router(EngineShape(GPU, self.max_running, self.kv_tokens, TPOT_S), MODEL)

    def run(
        self, workload: Workload, num_replicas: int, policy: RoutingPolicy, until_s: float = math.inf
    ) -> Simulated:
        """Simulates a workload until ``until_s``."""
        return SimulatedCluster(
            workload,
            self.config(),
            policy,
            num_engines=num_replicas,
            cost=GPU,
            max_context=self.max_context,
        ).run(until_s)

    def run_one_large(self, workload: Workload, scale: int, until_s: float) -> Simulated:
        """Simulates one engine with ``scale`` times the pool, the batch and the speed until ``until_s``."""
        cost = replace(CostModel(*[part / scale for part in astuple(GPU)]), base_s=GPU.base_s)
        return SimulatedCluster(
            Workload(workload.name, workload.arrivals, workload.kv_tokens * scale),
            self.config(scale),
            RoundRobin(),
            num_engines=1,
            cost=cost,
            max_context=self.max_context,
        ).run(until_s)

    def programs_per_s(self) -> float:
        """The number of programs that one replica serves per second, except while the batch fills and
        empties: ``burst`` programs run at any time, until three times as many have begun. They are counted
        while the second third of them ends."""
        arrivals = self.make(1, 3 * self.burst, float(self.burst), 0)
        programs = _in_turns(arrivals, self.burst)
        workload = self._busy(Workload(self.name, arrivals, self.kv_tokens))
        done = self.run(workload, 1, RoundRobin())
        ends = {id(one.arrival): one.ended_s for one in done.served}
        ended = sorted(max(ends[id(workload.arrivals[index])] for index in program) for program in programs)
        return self.burst / (ended[2 * self.burst - 1] - ended[self.burst - 1])

    def overloaded_per_s(self, num_replicas: int, per_s: float) -> float:
        """Returns the number of requests that end per second, in the second half of ``overloaded_s``, while
        more programs arrive than the replicas serve. ``per_s``: the programs that one replica serves."""
        seconds = self.overloaded_s
        workload = self._busy(self.workload(num_replicas, OVERLOAD * per_s, seconds))
        ended = [one.ended_s for one in self.run(workload, num_replicas, self.router(), seconds).served]
        return sum(seconds / 2 <= end < seconds for end in ended) / (seconds / 2)

    def _busy(self, workload: Workload) -> Workload:
        """The workload with clients and tools that take no time, unless memory is the limit."""
        if self.with_pauses:
            return workload
        arrivals = [
            arrival if arrival.after is None else replace(arrival, at_s=0.0) for arrival in workload.arrivals
        ]
        return replace(workload, arrivals=arrivals)

    def steady(self, name: str, num_replicas: int, per_s: float, seed: int = 0) -> Steady:
        """Simulates programs at a rate for each replica, under the policy of this name (``OURS``, ``LARGE``
        or a published one). Measures the requests that arrive in ``steady_s`` seconds after ``warm_s``."""
        start_s, end_s = self.warm_s, self.warm_s + self.steady_s
        workload = self.workload(num_replicas, per_s, end_s, seed)
        longest = max(len(arrival.output) for arrival in workload.arrivals)
        until_s = end_s + TTFT_S + TPOT_S * longest  # no request is good that has not ended by then
        if name == LARGE:
            done = self.run_one_large(workload, num_replicas, until_s)
        else:
            policy = self.router() if name == OURS else PUBLISHED_ROUTERS[name]()
            done = self.run(workload, num_replicas, policy, until_s)
        served = [one for one in done.served if start_s <= one.arrived_s < end_s]
        prompts = [(one.num_cached, len(one.arrival.prompt)) for one in served if one.ended_s < math.inf]
        cached, total = (sum(numbers) for numbers in zip(*prompts, strict=True))
        return Steady(
            num_requests=len(served),
            goodput=goodput(served),
            hit_rate=cached / total,
            latency_s=float(np.mean([min(one.ended_s, until_s) - one.arrived_s for one in served])),
            ttft_p99_s=float(
                np.percentile([min(one.first_s, until_s) - one.arrived_s for one in served], 99)
            ),
        )


@dataclass(frozen=True)
class Steady:
    """The requests of some seconds while programs end at the rate at which they begin.

    Args:
        num_requests: The number of requests.
        goodput: The part with a first token within TTFT_S and further ones every TPOT_S.
        hit_rate: The part of the prompts' tokens that was cached.
        latency_s: A lower bound of the mean time of a request: unfinished requests are counted until the
            simulation's end.
        ttft_p99_s: The 99th percentile of the time until the first token.
    """

    num_requests: int
    goodput: float
    hit_rate: float
    latency_s: float
    ttft_p99_s: float

    @classmethod
    def mean(cls, several: Sequence[Steady]) -> Steady:
        """The mean of workloads that differ by their seeds."""

        def part(name: str) -> float:
            return float(np.mean([getattr(one, name) for one in several]))

        rest = {name: part(name) for name in ("goodput", "hit_rate", "latency_s", "ttft_p99_s")}
        return cls(num_requests=sum(one.num_requests for one in several), **rest)


def _in_turns(arrivals: list[Arrival], count: int) -> list[list[int]]:
    """Lets each program begin when another has ended, so that ``count`` run at any time. Returns the
    requests of each."""
    roots: list[int] = []
    programs: dict[int | str, list[int]] = {}
    for index, arrival in enumerate(arrivals):
        roots.append(index if arrival.after is None else roots[arrival.after])
        programs.setdefault(arrival.program or roots[index], []).append(index)
    ordered = sorted(programs.values(), key=lambda program: arrivals[program[0]].at_s)
    for before, program in zip(ordered, ordered[count:], strict=False):
        for index in program:
            if arrivals[index].after is None:
                arrivals[index] = replace(arrivals[index], after=before[0], joins=before[1:], at_s=0.0)
    return ordered


def goodput(served: Sequence[Served]) -> float:
    """The part of the requests with a first token within TTFT_S and further ones every TPOT_S."""
    return float(np.mean([one.ttft_s <= TTFT_S and one.tpot_s <= TPOT_S for one in served]))


def _mix(num_replicas: int, count: int, per_s: float, seed: int) -> list[Arrival]:
    """Half of the programs are chats, and a tenth of the others map-reduce."""
    documents = max(1, count // 40)
    return combined(
        conversations(count - documents, per_s * (count - documents) / count, 9 + seed),
        map_reduce(
            num_programs=documents, per_s=per_s * documents / count, width=20, chunk=1024, seed=4 + seed
        ),
    )


def _agents(num_replicas: int, count: int, per_s: float, seed: int) -> list[Arrival]:
    return agent_sessions(
        num_sessions=count,
        per_s=per_s,
        turns=15,
        first=4000,
        last=30_000,
        output=450,
        most_gap_s=4.0,
        seed=seed,
    )


CASES = [
    Case(
        "few_shot",
        "SGLang: questions after the examples of one of 8 tasks for each replica",
        lambda n, count, per_s, seed: few_shot(
            num_requests=count, per_s=per_s, num_tasks=8 * n, examples=2000, output=32, seed=seed
        ),
        burst=300,
        warm_s=3,
        steady_s=5,
        overloaded_s=8,
        kv_tokens=50_000,
    ),
    Case(
        "tree_of_thought",
        "SGLang: programs of 40 thoughts",
        lambda n, count, per_s, seed: tree_of_thought(
            num_programs=count, per_s=per_s, question=1500, seed=seed
        ),
        burst=16,
        warm_s=8,
        steady_s=6,
        overloaded_s=16,
        kv_tokens=50_000,
    ),
    Case(
        "chat",
        "SGLang: conversations of 6 turns under one system message",
        lambda n, count, per_s, seed: chat(
            num_chats=count,
            per_s=per_s,
            turns=6,
            system=400,
            message=200,
            reply=150,
            pause_s=4.0,
            seed=seed,
        ),
        burst=150,
        warm_s=30,
        steady_s=6,
        overloaded_s=20,
    ),
    Case(
        "applications",
        "Parrot, figure 17: four applications",
        lambda n, count, per_s, seed: applications(count, per_s, seed),
        burst=200,
        warm_s=20,
        steady_s=10,
        overloaded_s=40,
    ),
    Case(
        "mix",
        "Parrot, figure 19: chats and map-reduce",
        _mix,
        burst=200,
        warm_s=15,
        steady_s=10,
        overloaded_s=30,
    ),
    Case(
        "multi_agent",
        "Parrot, figure 18: coders and reviewers in three rounds",
        lambda n, count, per_s, seed: multi_agent(num_programs=count, per_s=per_s, seed=seed),
        burst=16,
        warm_s=20,
        steady_s=12,
        overloaded_s=40,
    ),
    Case(
        "agents",
        "sessions of 15 turns up to 30,000 tokens, tools of 1 to 4 s",
        _agents,
        burst=16,
        warm_s=70,
        steady_s=20,
        overloaded_s=60,
        with_pauses=True,
        kv_tokens=200_000,
        max_running=16,
        max_context=65_536,
    ),
]
