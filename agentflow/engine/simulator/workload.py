"""A workload: the arrivals of requests, with their prompts and outputs as token ids. No text, no model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from agentflow.engine.cache.token_run import TokenArray
from agentflow.engine.request import Objective
from agentflow.errors import BadArgument


@dataclass(slots=True)
class Arrival:
    """One request."""

    prompt: TokenArray
    output: TokenArray  # the tokens that it generates
    at_s: float = 0.0  # after the start, or after the end of ``after``
    after: int | None = None  # the index in the workload of the request that this one follows
    max_new_tokens: int = 0  # the limit that the scheduler knows
    tenant: str = ""
    salt: str = ""
    objective: Objective = "latency"
    task_group: str = ""
    state: str = ""
    label: str = ""  # the kind of request, for the summary
    program: str = ""  # the program that it belongs to
    joins: Sequence[int] = ()  # requests that must end too, besides ``after``, before it arrives
    model: str = ""  # the model that runs it, if there are several
    is_extra: bool = False  # as in ``Origin``

    def __post_init__(self) -> None:
        self.max_new_tokens = max(self.max_new_tokens, len(self.output))

    @property
    def tokens(self) -> TokenArray:
        """The prompt followed by the output."""
        return np.concatenate((self.prompt, self.output))


@dataclass(slots=True)
class Workload:
    """The requests of a file or a generator."""

    name: str
    arrivals: Sequence[Arrival]
    kv_tokens: int = 65_536  # the size of the pool that it was recorded with or made for
    is_truncated: bool = False  # the file ends in the middle of a line, as if the server was killed

    def check(self) -> None:
        """Raises ``BadArgument`` for a request that cannot run: its prompt is empty, or it follows a request
        that is not before it."""
        for index, arrival in enumerate(self.arrivals):
            if not len(arrival.prompt):
                raise BadArgument(f"request {index} of the workload has an empty prompt")
            first = () if arrival.after is None else (arrival.after,)
            for before in (*first, *arrival.joins):
                if not 0 <= before < index:
                    raise BadArgument(
                        f"request {index} of the workload follows request {before}, which is not before it"
                    )


def awaited_groups(arrivals: Sequence[Arrival]) -> frozenset[str]:
    """Returns the task groups that a request with the objective ``latency`` waits for."""
    return frozenset(
        [
            arrivals[before].task_group
            for arrival in arrivals
            if arrival.after is not None and arrival.objective == "latency"
            for before in {arrival.after, *arrival.joins}
            if arrivals[before].task_group not in ("", arrival.task_group)
        ]
    )
