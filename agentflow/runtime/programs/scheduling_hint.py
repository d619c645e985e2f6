"""Hints for the scheduler about a state's requests, derived from its program's graph."""

from __future__ import annotations

import msgspec

from agentflow.protocol.ops import Objective


class SchedulingHint(msgspec.Struct, frozen=True):
    """The position of a state in its program. The latest hint applies to the state's next request, and to its
    waiting or running one. It affects the order of requests and the eviction of KV, but not results.

    Args:
        program: The number of the program, unique in the process; 0: none.
        group: The same number for all requests of one stage below one consumer; 0: none.
        objective: The objective of the state's requests.
        steps: The number of requests that must end, one after the other, before the state's next request can
            begin. 0: it runs or waits in the queue. None: unknown, because the state waits for its client.
        returns_s: The expected time until a state that waits for its client continues, in seconds; None:
            unknown.
        is_streamed: A client reads the next request's text while it grows.
        ttft_s: The reader's target for the time to the first token, in seconds; None: none.
        tpot_s: The reader's target for the time per further token, in seconds; None: none.
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
