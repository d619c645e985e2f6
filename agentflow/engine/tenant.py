"""Tenants: the owner of a request, and the gate that limits the requests of a tenant."""

from __future__ import annotations

from collections.abc import Awaitable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Tenant:
    """``name`` separates the caches, queues and constraints of tenants; a server without keys has one tenant,
    with an empty name. ``weight``: of its work against other tenants' while both wait.
    ``requests_per_minute`` and ``tokens_per_minute`` (prompt and output): more are rejected until there is
    room again. ``max_cost_per_day``: the same for the US dollars that calls to models behind an API cost.
    ``max_unfinished``: running and waiting requests. ``models``: those it may use; None: all.
    ``sees_metrics``: may read ``/metrics`` and watch the engine; both
    cover all tenants. ``manages_adapters``: may load and unload adapters."""

    name: str = ""
    weight: float = 1.0
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_unfinished: int | None = None
    models: tuple[str, ...] | None = None
    sees_metrics: bool = False
    manages_adapters: bool = False
    max_cost_per_day: float | None = None

    def may_use(self, model: str) -> bool:
        """Whether the model exists for this tenant."""
        return self.models is None or model in self.models


ANONYMOUS = Tenant(sees_metrics=True)
"""The one tenant of a server without keys."""


@dataclass(slots=True)
class AdmittedRequest:
    """The usage of a request, charged when it ends. The holder sets all three; ``prompt_tokens`` is a guess
    at first. ``cached_tokens``: of the prompt."""

    prompt_tokens: int
    output_tokens: int = 0
    cached_tokens: int = 0


class RequestGate(Protocol):
    """Limits the requests of a tenant. ``RateLimited`` beyond the limits."""

    def check(self, tenant: Tenant, num_requests: int = 1) -> None:
        """Raises ``RateLimited`` if ``num_requests`` requests would not all be admitted now."""

    def ready(self, tenant: Tenant) -> Awaitable[None] | None:
        """Returns an awaitable to be awaited immediately before ``request``, which may be rejected otherwise;
        None: nothing."""

    def is_unlimited(self, tenant: Tenant) -> bool:
        """Whether the tenant has no limit on tokens and requests."""

    def request(self, tenant: Tenant, prompt_tokens: int) -> AbstractContextManager[AdmittedRequest]:
        """The scope of one request, which is charged when it ends."""
