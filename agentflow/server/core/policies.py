"""The scheduling policies by name."""

from __future__ import annotations

from collections.abc import Callable

from agentflow.errors import BadArgument
from agentflow.server.core.fair_policy import FairLongestPrefix
from agentflow.server.core.policy import FirstCome, Peek, Policy, RandomOrder
from agentflow.server.core.prefix_policy import DfsWeight, LongestPrefix

DEFAULT_POLICY = "fair-lpm"
POLICIES: dict[str, Callable[[Peek, int], Policy]] = {
    DEFAULT_POLICY: FairLongestPrefix,
    "lpm": LongestPrefix,
    "dfs-weight": DfsWeight,
    "fcfs": FirstCome,
    "random": RandomOrder,
}


def policy_named(name: str, peek: Peek, token_budget: int) -> Policy:
    """A new policy, for batches of so many rows. ``BadArgument`` names those there are."""
    if name not in POLICIES:
        raise BadArgument(f"no scheduling policy {name!r}; there are: {', '.join(POLICIES)}")
    return POLICIES[name](peek, token_budget)
