"""Tenants: the owner of a request, and the gate that limits the requests of a tenant."""

from __future__ import annotations

from collections.abc import Awaitable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Tenant:
    """The owner of requests. Caches, queues and constraints of tenants are separate."""

    name: str = ""  # empty: the one tenant of a server without keys
    weight: float = 1.0  # of its work against the work of other tenants that wait too
    requests_per_minute: int | None = None  # further ones are rejected until there is room again
    tokens_per_minute: int | None = None  # of prompts and outputs
    max_unfinished: int | None = None  # running and waiting requests
    models: tuple[str, ...] | None = None  # the models that it may use; None: all
    sees_metrics: bool = False  # may read ``/metrics`` and watch the engine; both cover all tenants
    manages_adapters: bool = False  # may load and unload adapters
    max_cost_per_day: float | None = None  # US dollars for calls to models behind an API

    def may_use(self, model: str) -> bool:
        """Whether the model exists for this tenant."""
        return self.models is None or model in self.models


ANONYMOUS = Tenant(sees_metrics=True)
"""The one tenant of a server without keys."""


@dataclass(slots=True)
class AdmittedRequest:
    """The usage of a request, charged when it ends. The caller sets all three; ``prompt_tokens`` is an
    estimate at first. ``cached_tokens``: of the prompt."""

    prompt_tokens: int
    output_tokens: int = 0
    cached_tokens: int = 0


class RequestGate(Protocol):
    """Limits the requests of a tenant. Raises ``RateLimited`` beyond the limits."""

    def check(self, tenant: Tenant, num_requests: int = 1) -> None:
        """Raises ``RateLimited`` if ``num_requests`` requests would not all be admitted now."""

    def ready(self, tenant: Tenant) -> Awaitable[None] | None:
        """Returns an awaitable to be awaited immediately before ``request``, which may be rejected otherwise;
        None: nothing."""

    def is_unlimited(self, tenant: Tenant) -> bool:
        """Whether the tenant has no limit on tokens and requests."""

    def request(self, tenant: Tenant, prompt_tokens: int) -> AbstractContextManager[AdmittedRequest]:
        """The scope of one request, which is charged when it ends."""
