"""Several completion requests as one: their answers are counted on, request by request."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import anyio

from agentflow.engine.generator import EngineGenerator
from agentflow.runtime.task_group import first_of, open_task_group
from agentflow.server.completion.completion import completing
from agentflow.server.completion.request import CompletionDelta, CompletionRequest


class CompletionSet:
    """Use ``completing_all`` to make one. What fails one request fails all."""

    def __init__(self, num_requests: int) -> None:
        self._deltas: list[CompletionDelta] = []
        self._num_unaccepted = num_requests
        self._num_running = num_requests
        self._failure: Exception | None = None
        self._changed = anyio.Event()

    async def until_accepted(self) -> None:
        """Waits until all requests are. Raises what one was refused with."""
        while self._num_unaccepted and self._failure is None:
            await self._changed.wait()
        if self._failure is not None:
            raise self._failure

    async def next(self) -> list[CompletionDelta]:
        """As of a ``Completion``."""
        while not self._deltas and self._num_running and self._failure is None:
            await self._changed.wait()
        if not self._deltas and self._failure is not None:
            raise self._failure
        deltas, self._deltas = self._deltas, []
        return deltas

    async def run(self, generator: EngineGenerator, request: CompletionRequest, first_index: int) -> None:
        """For ``completing_all``: runs one request and takes over what comes of it."""
        try:
            async with completing(generator, request) as completion:
                await completion.until_accepted()
                self._num_unaccepted -= 1
                self._tell()
                while deltas := await completion.next():
                    self._deltas += [replace(delta, index=first_index + delta.index) for delta in deltas]
                    self._tell()
        except Exception as error:
            self._failure = self._failure or first_of(error)
        self._num_running -= 1
        self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()


@asynccontextmanager
async def completing_all(
    generator: EngineGenerator, requests: Sequence[CompletionRequest]
) -> AsyncIterator[CompletionSet]:
    """Runs the requests while the scope lasts. ``RateLimited`` where the tenant may not send so many."""
    generator.check_gate(sum(request.n for request in requests))
    completions = CompletionSet(len(requests))
    async with open_task_group() as group:
        first_index = 0
        for request in requests:
            group.start_soon(completions.run, generator, request, first_index)
            first_index += request.n
        yield completions
        group.cancel_scope.cancel()
