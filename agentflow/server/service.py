"""What a running server consists of, for all that answers its requests."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

import anyio

from agentflow.engine.tenant import Tenant
from agentflow.runtime.limits import TenantMemory
from agentflow.server.config.limits import HttpLimits, ServerLimits
from agentflow.server.http.errors import unready
from agentflow.server.models import Models
from agentflow.server.tenants.keys import Tenants
from agentflow.server.websocket.sessions import Sessions


class CallsInFlight:
    """Counts what is being answered."""

    def __init__(self) -> None:
        self.num = 0
        self._none = anyio.Event()

    def __enter__(self) -> None:
        self.num += 1

    def __exit__(self, *_: object) -> None:
        self.num -= 1
        if self.num == 0:
            self._none.set()
            self._none = anyio.Event()

    async def until_none(self) -> None:
        """Returns when nothing is being answered."""
        while self.num:
            await self._none.wait()


@dataclass(eq=False)
class Service:
    """``is_draining``: the server ends; what runs may finish, and nothing new is taken. ``logs_prompts``:
    what is asked and answered over HTTP goes into the log. ``bodies``: what the HTTP APIs hold of requests'
    bodies."""

    models: Models
    sessions: Sessions[Any]
    tenants: Tenants
    limits: ServerLimits
    http_limits: HttpLimits
    calls: CallsInFlight = field(default_factory=CallsInFlight)
    bodies: TenantMemory = field(init=False)
    is_draining: bool = False
    logs_prompts: bool = False
    _body_threads: WeakValueDictionary[str, anyio.CapacityLimiter] = field(
        init=False, default_factory=WeakValueDictionary
    )

    def __post_init__(self) -> None:
        self.bodies = TenantMemory(
            self.http_limits.bodies_bytes,
            "the requests that are being answered may have bodies of",
            "try again later",
        )

    def body_threads(self, tenant: Tenant) -> anyio.CapacityLimiter:
        """Large bodies of one tenant are read in one thread, one after the other: two would only compete for
        the interpreter's lock, with the event loop too. Keep it while it is used."""
        limiter = self._body_threads.get(tenant.name)
        if limiter is None:
            limiter = self._body_threads[tenant.name] = anyio.CapacityLimiter(1)
        return limiter

    def check_open(self) -> None:
        """``ApiError`` while it ends."""
        if self.is_draining:
            raise unready()

    async def reload_tenants(self) -> None:
        """Reads the keys file again, and ends the sessions whose keys it has no more. ``BadArgument`` where
        it cannot be used now: then nothing changes."""
        await anyio.to_thread.run_sync(self.tenants.reload)
        self.models.keep_tenants(self.tenants)
        self.sessions.end_revoked()

    async def drain(self, drain_s: float) -> bool:
        """Takes nothing new, and returns when all is answered, or after ``drain_s`` (False)."""
        self.is_draining = True
        with anyio.move_on_after(drain_s) as scope:
            await self.calls.until_none()
            await self.models.until_idle()
        return not scope.cancelled_caught
