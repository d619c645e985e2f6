"""A tenant: whom an API key names, and what it may use."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Tenant:
    """``name`` separates caches, queues and constraints of tenants from each other; a server without keys
    has one, whose name is empty. ``share``: of the engine's work, against that of others, while both wait.
    ``requests_per_minute`` and ``tokens_per_minute`` (prompt and output): more are refused until there is
    room again. ``max_unfinished``: requests at once, those that wait included. ``models``: those it may use;
    None: all. ``sees_metrics``: may read ``/metrics``, which tells of all tenants."""

    name: str = ""
    share: float = 1.0
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_unfinished: int | None = None
    models: tuple[str, ...] | None = None
    sees_metrics: bool = False

    def may_use(self, model: str) -> bool:
        """Whether the model exists for this tenant."""
        return self.models is None or model in self.models


NOBODY_ELSE = Tenant(sees_metrics=True)
"""The tenant of a server without keys."""


class Tenants(Protocol):
    """Whom a server serves."""

    def of(self, key: str | None) -> Tenant:
        """The tenant whose key it is. ``NotAuthorized`` where it is nobody's."""


class Anybody:
    """No keys: everybody is the same tenant."""

    def of(self, key: str | None) -> Tenant:
        return NOBODY_ELSE


@dataclass(slots=True)
class RequestEntry:
    """What one request of a tenant turned out to be. Whoever runs it fills it in, as far as it got."""

    cached_tokens: int = 0
    output_tokens: int = 0


class RequestGate(Protocol):
    """Says how much a tenant may ask for: each request passes through it."""

    def request(self, tenant: Tenant, prompt_tokens: int) -> AbstractContextManager[RequestEntry, None]:
        """Entered before the request is sent, left at its end. ``RateLimited`` where it may not be sent."""
