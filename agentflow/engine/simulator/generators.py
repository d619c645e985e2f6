"""Generators of workloads: the request patterns of typical programs with random tokens. Equal parameters give
equal workloads."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from agentflow.engine.cache.token_run import TokenArray
from agentflow.engine.simulator.workload import Arrival
from agentflow.errors import BadArgument

VOCABULARY = 49_000


class _Tokens:
    """Random token ids. Two runs of more than a few tokens are never equal."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)

    def run(self, length: int) -> TokenArray:
        return self.random.integers(10, VOCABULARY, length, dtype=np.int32)

    def around(self, length: int) -> TokenArray:
        """Returns a run of half to one and a half times the length."""
        return self.run(max(1, int(length * self.random.uniform(0.5, 1.5))))

    def times(self, count: int, per_s: float) -> list[float]:
        """Returns arrival times of a Poisson process. With a rate of 0, all arrive at the start."""
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
    """Requests over a few long prefixes, mixed with some that share nothing.

    Args:
        num_requests: the requests in total.
        per_s: the mean arrival rate; 0: all arrive at the start.
        num_prefixes: the shared prefixes.
        prefix: the length of each, in tokens.
        own: the mean number of tokens after the prefix.
        cold_share: the fraction of requests that share nothing.
        cold: the mean length of their prompts.
        output: the mean number of generated tokens.
        seed: the seed of the random numbers.
    """
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
    """Questions in random order, each after the examples of its task.

    Args:
        num_requests: the questions in total.
        per_s: the mean arrival rate; 0: all arrive at the start.
        num_tasks: the tasks.
        examples: the tokens of the examples of a task.
        question: the mean tokens of a question.
        output: the mean number of generated tokens.
        seed: the seed of the random numbers.
    """
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
    """Programs that expand a question into thoughts, each thought into further ones, and so on. The prompt of
    a thought is the path to it; its children start when it ends, as a task group.

    Args:
        num_programs: the programs.
        per_s: the mean arrival rate of programs; 0: all arrive at the start.
        question: the mean tokens of a question.
        depth: the levels of thoughts.
        branching: the children of a question or thought.
        thought: the mean tokens of a thought.
        seed: the seed of the random numbers.
    """
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
    """Conversations with the same system message. Each turn comes some time after the last reply.

    Args:
        num_chats: the conversations.
        per_s: their mean arrival rate; 0: all begin at the start.
        turns: the turns of a conversation.
        system: the tokens of the system message.
        message: the mean tokens of a user's message.
        reply: the mean tokens of a reply.
        pause_s: the mean time between a reply and the next message.
        seed: the seed of the random numbers.
    """
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
    """Requests that share nothing.

    Args:
        num_requests: the requests in total.
        per_s: the mean arrival rate; 0: all arrive at the start.
        prompt: the mean tokens of a prompt.
        output: the mean number of generated tokens.
        limit: the most tokens that each request may generate; 0: exactly its output.
        num_tenants: the tenants; each request belongs to a random one.
        seed: the seed of the random numbers.
    """
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


def chains(
    *,
    num_chains: int = 20,
    per_s: float = 0.0,
    length: int = 20,
    chunk: int = 1000,
    summary: int = 50,
    round_trip_s: float = 0.0,
    seed: int = 0,
) -> list[Arrival]:
    """Summaries of long documents, chunk by chunk. Each request has the same instruction, the summary so far,
    and the next chunk.

    Args:
        num_chains: the documents, each a program.
        per_s: the mean arrival rate of documents; 0: all arrive at the start.
        length: the chunks of a document.
        chunk: the tokens of a chunk.
        summary: the tokens of a summary.
        round_trip_s: the time from the end of a request to the arrival of the next.
        seed: the seed of the random numbers.
    """
    tokens = _Tokens(seed)
    arrivals: list[Arrival] = []
    instruction = tokens.run(50)
    for number, at_s in enumerate(tokens.times(num_chains, per_s)):
        before, after = tokens.run(0), None
        for _ in range(length):
            prompt = np.concatenate((instruction, before, tokens.run(chunk)))
            arrivals.append(
                Arrival(
                    prompt,
                    tokens.run(summary),
                    at_s if after is None else round_trip_s,
                    after,
                    program=f"chain {number}",
                    label="chain",
                )
            )
            before, after = arrivals[-1].output, len(arrivals) - 1
    return arrivals


def map_reduce(
    *,
    num_programs: int = 10,
    per_s: float = 0.0,
    width: int = 16,
    chunk: int = 1000,
    summary: int = 50,
    seed: int = 0,
) -> list[Arrival]:
    """Summaries of long documents: all chunks next to each other, then one request over their summaries.

    Args:
        num_programs: the documents.
        per_s: their mean arrival rate; 0: all arrive at the start.
        width: the chunks of a document.
        chunk: the tokens of a chunk.
        summary: the tokens of a summary.
        seed: the seed of the random numbers.
    """
    tokens = _Tokens(seed)
    arrivals: list[Arrival] = []
    instruction, question = tokens.run(50), tokens.run(50)
    for number, at_s in enumerate(tokens.times(num_programs, per_s)):
        name = f"map-reduce {number}"
        first = len(arrivals)
        for _ in range(width):
            prompt = np.concatenate((instruction, tokens.run(chunk)))
            arrivals.append(
                Arrival(
                    prompt,
                    tokens.run(summary),
                    at_s,
                    label="map",
                    program=name,
                )
            )
        prompt = np.concatenate((question, *[arrival.output for arrival in arrivals[first:]]))
        arrivals.append(
            Arrival(
                prompt,
                tokens.run(summary),
                after=first,
                joins=range(first + 1, len(arrivals)),
                label="reduce",
                program=name,
            )
        )
    return arrivals


def multi_agent(
    *,
    num_programs: int = 6,
    per_s: float = 0.0,
    num_files: int = 8,
    rounds: int = 3,
    task: int = 1000,
    code: int = 200,
    review: int = 50,
    seed: int = 0,
) -> list[Arrival]:
    """Programs in which an architect designs files, and coders and reviewers work on each file in rounds, in
    the shape of MetaGPT. Prompts begin with the role and the design, and grow with the rounds.

    Args:
        num_programs: the programs.
        per_s: their mean arrival rate; 0: all arrive at the start.
        num_files: the files, each with a coder and a reviewer.
        rounds: the rounds of code and review.
        task: the tokens of the task.
        code: the mean tokens of a file.
        review: the mean tokens of a review.
        seed: the seed of the random numbers.
    """
    tokens = _Tokens(seed)
    roles = [tokens.run(200) for _ in range(3)]
    arrivals: list[Arrival] = []

    def add(
        role: int,
        body: Sequence[TokenArray],
        output: int,
        before: Sequence[int],
        program: str,
        at_s: float = 0.0,
    ) -> int:
        prompt = np.concatenate((roles[role], *body))
        arrivals.append(
            Arrival(
                prompt,
                tokens.around(output),
                at_s,
                after=before[0] if before else None,
                joins=before[1:],
                label="agent",
                program=program,
            )
        )
        return len(arrivals) - 1

    for number, at_s in enumerate(tokens.times(num_programs, per_s)):
        name = f"multi-agent {number}"
        design = add(0, [tokens.run(task)], code, (), name, at_s)
        context = arrivals[design].tokens
        done: list[TokenArray] = []
        before: Sequence[int] = [design]
        for stage in range(2 * rounds):
            role, output = (1, code) if stage % 2 == 0 else (2, review)
            body = [context, *done]
            before = [add(role, [*body, tokens.run(20)], output, before, name) for _ in range(num_files)]
            done += [arrivals[index].output for index in before]
    return arrivals


def agent_sessions(
    *,
    num_sessions: int = 8,
    per_s: float = 0.0,
    turns: int = 43,
    first: int = 12_000,
    last: int = 142_000,
    output: int = 444,
    least_gap_s: float = 1.0,
    most_gap_s: float = 10.0,
    seed: int = 0,
) -> list[Arrival]:
    """Sessions of coding agents, generated in the published shape of TraceLab (2606.30560) and AgentX: 43
    turns, 142,000 tokens of context at the end, 444 generated in a session, and tools that take 1 to 10
    seconds. The tokens are random, not taken from a trace.

    Args:
        num_sessions: the sessions, each a program.
        per_s: their mean arrival rate; 0: all arrive at the start.
        turns: the turns of a session.
        first: the tokens of the first prompt.
        last: the tokens of the context at the end.
        output: the tokens that a session generates.
        least_gap_s: the least time of a tool.
        most_gap_s: the most time of a tool.
        seed: the seed of the random numbers.
    """
    tokens = _Tokens(seed)
    arrivals: list[Arrival] = []
    for number, at_s in enumerate(tokens.times(num_sessions, per_s)):
        name, after = f"agent {number}", None
        context = tokens.run(first)
        for turn in range(turns):
            if turn:
                new = (last - first - output) // (turns - 1)
                context = np.concatenate((arrivals[-1].tokens, tokens.around(new)))
            gap_s = float(tokens.random.uniform(least_gap_s, most_gap_s))
            num_output = output * (turn + 1) // turns - output * turn // turns
            arrivals.append(
                Arrival(
                    context,
                    tokens.run(max(1, num_output)),
                    at_s if after is None else gap_s,
                    after,
                    state=name,
                    label="turn",
                    program=name,
                )
            )
            after = len(arrivals) - 1
    return arrivals


def two_models(
    *,
    num_programs: int = 20,
    per_s: float = 0.0,
    rounds: int = 3,
    width: int = 4,
    role: int = 400,
    question: int = 300,
    draft: int = 150,
    verdict: int = 80,
    drafter: str = "small",
    judge: str = "large",
    seed: int = 0,
) -> list[Arrival]:
    """Programs over two models: in each round, one model writes drafts, and the other one judges them. Values
    cross between the models as text, so each model has different tokens for them.

    Args:
        num_programs: the programs.
        per_s: their mean arrival rate; 0: all arrive at the start.
        rounds: the rounds, each of drafts and a verdict.
        width: the drafts of a round.
        role: the tokens of a model's role.
        question: the mean tokens of the question.
        draft: the mean tokens of a draft.
        verdict: the mean tokens of a verdict.
        drafter: the name of the model that writes.
        judge: the name of the model that judges.
        seed: the seed of the random numbers.
    """
    tokens = _Tokens(seed)
    roles = tokens.run(role), tokens.run(role)
    arrivals: list[Arrival] = []
    for number, at_s in enumerate(tokens.times(num_programs, per_s)):
        name = f"two models {number}"
        asked = [tokens.around(question) for _ in range(2)]  # the tokens of each model
        contexts = [np.concatenate((one, text)) for one, text in zip(roles, asked, strict=True)]
        last: int | None = None
        for _ in range(rounds):
            first = len(arrivals)
            for _ in range(width):
                prompt = np.concatenate((contexts[0], tokens.run(8)))
                arrivals.append(
                    Arrival(
                        prompt,
                        tokens.around(draft),
                        at_s if last is None else 0.0,
                        last,
                        label="draft",
                        program=name,
                        model=drafter,
                    )
                )
            crossing = tokens.run(sum(len(one.output) for one in arrivals[first:]))
            arrivals.append(
                Arrival(
                    np.concatenate((contexts[1], crossing)),
                    tokens.around(verdict),
                    after=first,
                    joins=range(first + 1, len(arrivals)),
                    label="verdict",
                    program=name,
                    model=judge,
                )
            )
            last = len(arrivals) - 1
            contexts[1] = arrivals[last].tokens
            contexts[0] = np.concatenate((contexts[0], tokens.run(len(arrivals[last].output))))
    return arrivals


def combined(*workloads: Sequence[Arrival]) -> list[Arrival]:
    """Returns the requests of all workloads, which run next to each other."""
    joined: list[Arrival] = []
    for arrivals in workloads:
        first = len(joined)
        joined += [
            replace(
                arrival,
                after=None if arrival.after is None else first + arrival.after,
                joins=[first + index for index in arrival.joins],
            )
            for arrival in arrivals
        ]
    return joined


GENERATORS: dict[str, Callable[..., list[Arrival]]] = {
    "hot-and-cold": hot_and_cold,
    "few-shot": few_shot,
    "tree-of-thought": tree_of_thought,
    "chat": chat,
    "unshared": unshared,
    "chains": chains,
    "map-reduce": map_reduce,
    "multi-agent": multi_agent,
    "agent-sessions": agent_sessions,
    "two-models": two_models,
}


def make_arrivals(name: str, parameters: Mapping[str, float | int]) -> list[Arrival]:
    """Returns the requests of a generator. Raises ``BadArgument`` for an unknown name or parameter,
    or a value that the generator cannot use."""
    if name not in GENERATORS:
        raise BadArgument(f"unknown workload generator {name!r}; known: {', '.join(GENERATORS)}")
    known = inspect.signature(GENERATORS[name]).parameters
    for parameter in parameters:
        if parameter not in known:
            raise BadArgument(f"{name} has no parameter {parameter!r}; it has: {', '.join(known)}")
    try:
        return GENERATORS[name](**parameters)
    except (ValueError, TypeError, ArithmeticError, IndexError) as error:
        raise BadArgument(f"{name}: a parameter has an unsuitable value: {error}") from error
