"""The scheduling policies by name."""

from __future__ import annotations

from collections.abc import Callable

from agentflow.engine.scheduling.fair_policy import FairLongestPrefix
from agentflow.engine.scheduling.policy import FirstCome, Peek, Policy, RandomOrder
from agentflow.engine.scheduling.prefix_policy import DfsWeight, LongestPrefix
from agentflow.errors import BadArgument

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
