"""The state of a running server, which all of its handlers share."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

import anyio

from agentflow.engine.tenant import Tenant
from agentflow.runtime.generator import Generator
from agentflow.runtime.limits import TenantMemory
from agentflow.server.config.limits import HttpLimits, ServerLimits
from agentflow.server.errors import cut_off, not_ready
from agentflow.server.models.models import Models
from agentflow.server.programs.programs import Programs
from agentflow.server.responses.background import BackgroundRuns
from agentflow.server.responses.keeping import Responses
from agentflow.server.stores.fronts import Fronts
from agentflow.server.tenants.keys import Tenants
from agentflow.server.websocket.sessions import Sessions


class CallsInFlight:
    """The requests in progress."""

    def __init__(self) -> None:
        self._scopes: set[anyio.CancelScope] = set()
        self._none = anyio.Event()

    @property
    def num(self) -> int:
        """The number of requests in progress."""
        return len(self._scopes)

    @contextmanager
    def running(self) -> Iterator[None]:
        """The scope of one request. Raises ``ApiError`` at its end if ``cut`` cancelled it."""
        with anyio.CancelScope() as scope:
            self._scopes.add(scope)
            try:
                yield
            finally:
                self._scopes.remove(scope)
                if not self._scopes:
                    self._none.set()
                    self._none = anyio.Event()
        if scope.cancelled_caught:
            raise cut_off()

    def cut(self) -> None:
        """Cancels all requests in progress. Each still sends its error."""
        for scope in self._scopes:
            scope.cancel()

    async def until_none(self) -> None:
        """Waits until no request is in progress."""
        while self._scopes:
            await self._none.wait()


@dataclass(eq=False)
class Service:
    """The parts of a running server, and its shutdown."""

    models: Models
    sessions: Sessions[Any]
    tenants: Tenants
    limits: ServerLimits
    http_limits: HttpLimits
    background: BackgroundRuns  # responses that run without a connection
    programs: Programs  # programs that outlive their requests
    responses: Responses  # stored responses and conversations
    fronts: Fronts | None = None  # the servers with the same store; None: it is not shared
    calls: CallsInFlight = field(default_factory=CallsInFlight)
    bodies: TenantMemory = field(init=False)  # the memory of the bodies of all requests
    is_draining: bool = False  # running requests may finish, and new ones are rejected
    logs_prompts: bool = False  # log the bodies of requests and answers
    _body_threads: WeakValueDictionary[str, anyio.CapacityLimiter] = field(
        init=False, default_factory=WeakValueDictionary
    )

    def __post_init__(self) -> None:
        self.bodies = TenantMemory(
            self.http_limits.bodies_bytes,
            "the bodies of all requests in progress may have",
            "try again later",
        )

    def new_id(self, kind: str, num_bytes: int = 24) -> str:
        """A new random id, such as ``resp_…``. With a shared store it contains the id of this front, so that
        a proxy can route requests to it."""
        own = "" if self.fronts is None else f"{self.fronts.own}_"
        return f"{kind}_{own}{secrets.token_hex(num_bytes)}"

    async def runs_at(self, front: str) -> bool:
        """Whether ``front`` is another front, and alive. ``Overloaded`` if the store does not answer."""
        return self.fronts is not None and front != self.fronts.own and await self.fronts.is_alive(front)

    def body_threads(self, tenant: Tenant) -> anyio.CapacityLimiter:
        """Limits a tenant to one thread that decodes large bodies: several threads would compete with each
        other and the event loop for the GIL. Callers must keep a reference while they use the limiter."""
        limiter = self._body_threads.get(tenant.name)
        if limiter is None:
            limiter = self._body_threads[tenant.name] = anyio.CapacityLimiter(1)
        return limiter

    def context_length(self, generator: Generator[Any]) -> int | None:
        """The maximum number of tokens of a prompt, which the APIs show as the model's context: the smaller
        of the generator's ``max_context`` and ``max_prompt_tokens``. None if neither is set."""
        most, asked = generator.capabilities.max_context, self.http_limits.max_prompt_tokens
        return asked if most is None else min(most, asked or most)

    def check_open(self) -> None:
        """``ApiError`` while the server shuts down."""
        if self.is_draining:
            raise not_ready()

    async def reload_tenants(self) -> None:
        """Reads the keys file again, and ends the sessions, background responses and programs of revoked
        keys. ``BadArgument`` if the file is invalid; then nothing changes."""
        await anyio.to_thread.run_sync(self.tenants.reload)
        self.models.keep_tenants(self.tenants)
        self.sessions.end_revoked()
        self.background.end_revoked()
        self.programs.end_revoked()

    def end(self) -> None:
        """Rejects new requests, and ends running ones with an error."""
        self.is_draining = True
        self.calls.cut()

    async def drain(self, drain_s: float) -> bool:
        """Rejects new requests and waits until all running ones have ended. Returns False if that takes
        longer than ``drain_s``."""
        self.is_draining = True
        with anyio.move_on_after(drain_s) as scope:
            await self.calls.until_none()
            await self.models.until_idle()
        return not scope.cancelled_caught
