"""Whom the engine works for: a tenant, and the gate that its requests pass."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Tenant:
    """``name`` separates caches, queues and constraints of tenants from each other; a server without keys
    has one, whose name is empty. ``weight``: of its work against other tenants' while both wait.
    ``requests_per_minute`` and ``tokens_per_minute`` (prompt and output): more are refused until there is
    room again. ``max_unfinished``: requests at once, those that wait included. ``models``: those it may use;
    None: all. ``sees_metrics``: may read ``/metrics``, which tells of all tenants."""

    name: str = ""
    weight: float = 1.0
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_unfinished: int | None = None
    models: tuple[str, ...] | None = None
    sees_metrics: bool = False

    def may_use(self, model: str) -> bool:
        """Whether the model exists for this tenant."""
        return self.models is None or model in self.models


ANONYMOUS = Tenant(sees_metrics=True)
"""The tenant of a server without keys."""


@dataclass(slots=True)
class AdmittedRequest:
    """What a request turned out to use; counted when it has ended. ``cached_tokens``: of its prompt, whose
    length may be set anew too, where it was a guess."""

    prompt_tokens: int
    output_tokens: int = 0
    cached_tokens: int = 0


class RequestGate(Protocol):
    """Decides how much a tenant may ask for; ``RateLimited`` where it asks for more."""

    def check(self, tenant: Tenant, num_requests: int = 1) -> None:
        """Whether so many requests that came now would all be admitted."""

    def is_unlimited(self, tenant: Tenant) -> bool:
        """Whether the tenant may use as many tokens and requests as it likes."""

    def request(self, tenant: Tenant, prompt_tokens: int) -> AbstractContextManager[AdmittedRequest]:
        """Around one request, which is charged when it ends."""
