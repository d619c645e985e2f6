"""In which order waiting requests are admitted, by name.

``fcfs``: in order of arrival. ``lpm``: longest cached prefix first (Zheng et al., "SGLang", 2024,
section 3.2), ties in order of arrival.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from agentflow.errors import BadArgument
from agentflow.server.core.radix_cache import RadixCache
from agentflow.server.core.request import Request

Policy = Callable[[Iterable[Request], RadixCache], list[Request]]


def first_come(waiting: Iterable[Request], cache: RadixCache) -> list[Request]:
    """In order of arrival."""
    return list(waiting)


def longest_prefix(waiting: Iterable[Request], cache: RadixCache) -> list[Request]:
    """Longest cached prefix first; the sort is stable, so ties keep their order of arrival."""

    def cached(request: Request) -> int:
        reusable = request.tokens[: request.num_reusable]
        return cache.match(request.extra_key, reusable).num_tokens

    return sorted(waiting, key=cached, reverse=True)


POLICIES: dict[str, Policy] = {"fcfs": first_come, "lpm": longest_prefix}


def policy_named(name: str) -> Policy:
    """The policy of that name, or ``BadArgument`` listing the names there are."""
    if name not in POLICIES:
        raise BadArgument(f"no scheduling policy {name!r}; there are: {', '.join(POLICIES)}")
    return POLICIES[name]
