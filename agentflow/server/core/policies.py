"""The scheduling policies by name."""

from __future__ import annotations

from collections.abc import Callable

from agentflow.errors import BadArgument
from agentflow.server.core.fair_policy import FairLongestPrefix
from agentflow.server.core.policy import FirstCome, Peek, Policy, RandomOrder
from agentflow.server.core.prefix_policy import DfsWeight, LongestPrefix

DEFAULT_POLICY = "fair-lpm"
POLICIES: dict[str, Callable[[Peek], Policy]] = {
    DEFAULT_POLICY: FairLongestPrefix,
    "lpm": LongestPrefix,
    "dfs-weight": DfsWeight,
    "fcfs": FirstCome,
    "random": RandomOrder,
}


def policy_named(name: str, peek: Peek) -> Policy:
    """A policy of that name, or ``BadArgument`` listing the names there are."""
    if name not in POLICIES:
        raise BadArgument(f"no scheduling policy {name!r}; there are: {', '.join(POLICIES)}")
    return POLICIES[name](peek)
