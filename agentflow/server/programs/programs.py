"""The programs of a server: their tasks, and when they end.

A program ends when its client closes it, when it has been idle for too long, when its API key is revoked, and
with the server. Then everything that it runs is cancelled.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import anyio
from anyio.abc import TaskGroup, TaskStatus

from agentflow.errors import incident
from agentflow.runtime.generator import SessionModels
from agentflow.runtime.programs.live import TenantGraphs
from agentflow.runtime.programs.store import ProgramLimits, ProgramStore
from agentflow.runtime.task_group import open_task_group
from agentflow.server.programs.program import ServedProgram
from agentflow.server.programs.shared_values import SharedValues

logger = logging.getLogger(__name__)


class Programs:
    """All programs of a server. ``open_programs`` creates it."""

    def __init__(
        self, tasks: TaskGroup, store: ProgramStore[ServedProgram], values: SharedValues | None = None
    ) -> None:
        self._tasks = tasks
        self.store = store
        self.values = values
        """The values that other servers can show."""

    async def open(
        self,
        models: SessionModels,
        tenant: str,
        *,
        program_id: str | None = None,
        cache_salt: str = "",
        is_valid: Callable[[], bool] = lambda: True,
        graphs: TenantGraphs | None = None,
    ) -> ServedProgram:
        """Opens a program of the tenant.

        Args:
            models: The models that its requests may use.
            tenant: The tenant's name.
            program_id: Its id; None: a random one.
            cache_salt: Programs with different salts share no cached prompts.
            is_valid: Whether the tenant's API key is still valid.
            graphs: The live graphs of the tenant.

        Raises:
            RateLimited: the tenant has too many programs.
            Overloaded: there is no memory for it.
        """
        program = ServedProgram(
            program_id or f"prog_{secrets.token_hex(16)}",
            tenant,
            self.store.tenant_memory(tenant),
            cache_salt=cache_salt,
            is_valid=is_valid,
            graphs=graphs,
        )
        await self._tasks.start(self._run, program, models)
        return program

    def close(self, program: ServedProgram) -> None:
        """Ends a program."""
        self.store.remove(program)
        program.end()

    def end_revoked(self) -> None:
        """Ends the programs whose API keys were revoked."""
        for program in self.store:
            if not program.is_valid():
                self.close(program)

    async def expire(self) -> None:
        """Ends programs when they expire, until it is cancelled."""
        while True:
            for program in self.store.take_expired():
                program.end()
            await anyio.sleep(self.store.next_expiry_s())  # noqa: TID251 - the time is the purpose

    async def _run(
        self, program: ServedProgram, models: SessionModels, *, task_status: TaskStatus[None]
    ) -> None:
        self.store.add(program)  # before the first await, so that the limit holds for concurrent requests
        has_begun = False
        try:
            async with open_task_group() as group:
                program.begin(models, group)
                if self.values is not None:
                    group.start_soon(self.values.follow, program)
                has_begun = True
                task_status.started()
                await program.ended.wait()
                group.cancel_scope.cancel()
        except Exception as error:
            if not has_begun:
                raise
            incident(logger, "the program", error)  # a fault of the server ends this program only
        finally:
            self.store.remove(program)
            if self.values is not None and program.has_ended:
                await self.values.forget(program)
            try:
                await program.aclose()
            except Exception:
                logger.exception("not all contexts of a program could be freed")


@asynccontextmanager
async def open_programs(
    limits: ProgramLimits, clock: Callable[[], float] = time.monotonic, values: SharedValues | None = None
) -> AsyncIterator[Programs]:
    """The programs of a server, which are cancelled at the end of the scope. ``values``: the variables that
    other servers can read."""
    async with open_task_group() as group:
        programs = Programs(group, ProgramStore(limits, clock), values)
        group.start_soon(programs.expire)
        yield programs
        group.cancel_scope.cancel()
