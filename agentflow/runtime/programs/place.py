"""A state's place in its program: the advice that the program's graph gives to a scheduler."""

from __future__ import annotations

import msgspec

from agentflow.protocol.ops import Objective


class Place(msgspec.Struct, frozen=True):
    """A state's place in its program. The latest place of a state holds for its next request, and for the one
    that waits or runs now. It changes the order of requests, and which KV is kept, but no result.

    Args:
        program: The number of the program, unique in the process; 0: none.
        group: Equal for the requests of one stage below one consumer; 0: none.
        objective: The objective of the state's requests.
        steps: The requests that must end, one after the other, before the state's next request can begin. 0:
            it runs or waits in the queue. None: unknown, because the state waits for its client.
        returns_s: The expected time until a state that waits for its client continues, in seconds; None:
            unknown.
        is_streamed: Somebody reads the next request's text while it grows.
        ttft_s: The time until its first token that this reader asks for, in seconds; None: none.
        tpot_s: The time of each further token that this reader asks for, in seconds; None: none.
        group_objective: The objective of the consumer of the group.
    """

    program: int = 0
    group: int = 0
    objective: Objective = "latency"
    steps: int | None = 0
    returns_s: float | None = None
    is_streamed: bool = False
    ttft_s: float | None = None
    tpot_s: float | None = None
    group_objective: Objective = "latency"
