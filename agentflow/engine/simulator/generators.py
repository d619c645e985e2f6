"""Made workloads: the shapes of programs, with random tokens. The same parameters give the same one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping

import numpy as np

from agentflow.engine.cache.radix_node import TokenArray
from agentflow.engine.simulator.workload import Arrival
from agentflow.errors import BadArgument

VOCABULARY = 49_000


class _Tokens:
    """Random token ids: two runs of more than a few are never alike."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)

    def run(self, length: int) -> TokenArray:
        return self.random.integers(10, VOCABULARY, length, dtype=np.int32)

    def around(self, length: int) -> TokenArray:
        """A run of half to one and a half times the length."""
        return self.run(max(1, int(length * self.random.uniform(0.5, 1.5))))

    def times(self, count: int, per_s: float) -> list[float]:
        """A Poisson process; a rate of 0: all at once."""
        if per_s <= 0:
            return [0.0] * count
        times: list[float] = np.cumsum(self.random.exponential(1 / per_s, count)).tolist()
        return times


def hot_and_cold(
    *,
    num_requests: int = 400,
    per_s: float = 4.0,
    num_prefixes: int = 8,
    prefix: int = 1000,
    own: int = 60,
    cold_share: float = 0.1,
    cold: int = 1000,
    output: int = 16,
    seed: int = 0,
) -> list[Arrival]:
    """A burst of requests over a few long prefixes, and among them some that share nothing."""
    tokens = _Tokens(seed)
    prefixes = [tokens.run(prefix) for _ in range(num_prefixes)]
    arrivals = []
    for at_s in tokens.times(num_requests, per_s):
        if tokens.random.random() < cold_share:
            arrivals.append(Arrival(tokens.around(cold), tokens.around(output), at_s, label="cold"))
        else:
            stem = prefixes[tokens.random.integers(num_prefixes)]
            prompt = np.concatenate((stem, tokens.around(own)))
            arrivals.append(Arrival(prompt, tokens.around(output), at_s, label="hot"))
    return arrivals


def few_shot(
    *,
    num_requests: int = 200,
    per_s: float = 0.0,
    num_tasks: int = 8,
    examples: int = 1000,
    question: int = 60,
    output: int = 16,
    seed: int = 0,
) -> list[Arrival]:
    """Questions that come in any order, each behind the examples of its task."""
    tokens = _Tokens(seed)
    tasks = [tokens.run(examples) for _ in range(num_tasks)]
    return [
        Arrival(
            np.concatenate((tasks[tokens.random.integers(num_tasks)], tokens.around(question))),
            tokens.around(output),
            at_s,
            label="few-shot",
        )
        for at_s in tokens.times(num_requests, per_s)
    ]


def tree_of_thought(
    *,
    num_programs: int = 16,
    per_s: float = 0.0,
    question: int = 300,
    depth: int = 3,
    branching: int = 3,
    thought: int = 48,
    seed: int = 0,
) -> list[Arrival]:
    """Programs that expand a question into thoughts, each thought into more, and so on: a thought's
    prompt is the path to it, and the thoughts below one start when it is there, as a task group."""
    tokens = _Tokens(seed)
    arrivals: list[Arrival] = []
    for program, at_s in enumerate(tokens.times(num_programs, per_s)):
        arrivals.append(Arrival(tokens.around(question), tokens.around(thought), at_s, label="thought"))
        level = [len(arrivals) - 1]
        for _ in range(depth):
            parents, level = level, []
            for parent in parents:
                path = arrivals[parent].tokens
                for _ in range(branching):
                    prompt = np.concatenate((path, tokens.run(8)))
                    group = f"{program}/{parent}"
                    arrivals.append(
                        Arrival(
                            prompt,
                            tokens.around(thought),
                            after=parent,
                            task_group=group,
                            label="thought",
                        )
                    )
                    level.append(len(arrivals) - 1)
    return arrivals


def chat(
    *,
    num_chats: int = 40,
    per_s: float = 0.0,
    turns: int = 4,
    system: int = 200,
    message: int = 80,
    reply: int = 80,
    pause_s: float = 5.0,
    seed: int = 0,
) -> list[Arrival]:
    """Conversations under one system message: each turn comes a while after the last reply."""
    tokens = _Tokens(seed)
    opening = tokens.run(system)
    arrivals: list[Arrival] = []
    for number, at_s in enumerate(tokens.times(num_chats, per_s)):
        history, after = opening, None
        for turn in range(turns):
            prompt = np.concatenate((history, tokens.around(message)))
            delay = at_s if turn == 0 else tokens.random.exponential(pause_s)
            arrivals.append(
                Arrival(prompt, tokens.around(reply), delay, after, state=f"chat {number}", label="turn")
            )
            history, after = arrivals[-1].tokens, len(arrivals) - 1
    return arrivals


def unshared(
    *,
    num_requests: int = 200,
    per_s: float = 0.0,
    prompt: int = 300,
    output: int = 64,
    limit: int = 0,
    num_tenants: int = 1,
    seed: int = 0,
) -> list[Arrival]:
    """Requests that share nothing. ``limit``: the most that each may generate, if not just what it does."""
    tokens = _Tokens(seed)
    return [
        Arrival(
            tokens.around(prompt),
            tokens.around(output),
            at_s,
            max_new_tokens=limit,
            tenant=f"tenant {tokens.random.integers(num_tenants)}" if num_tenants > 1 else "",
            label="unshared",
        )
        for at_s in tokens.times(num_requests, per_s)
    ]


GENERATORS: dict[str, Callable[..., list[Arrival]]] = {
    "hot-and-cold": hot_and_cold,
    "few-shot": few_shot,
    "tree-of-thought": tree_of_thought,
    "chat": chat,
    "unshared": unshared,
}


def generate(name: str, parameters: Mapping[str, float | int]) -> list[Arrival]:
    """The workload of a generator. ``BadArgument`` for a name or a parameter that there is not."""
    if name not in GENERATORS:
        raise BadArgument(f"no workload generator {name!r}; there are: {', '.join(GENERATORS)}")
    known = inspect.signature(GENERATORS[name]).parameters
    for parameter in parameters:
        if parameter not in known:
            raise BadArgument(f"{name} has no parameter {parameter!r}; it has: {', '.join(known)}")
    return GENERATORS[name](**parameters)
