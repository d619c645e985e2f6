"""Backends for tests of the frontend: they record ops and events, deliver events one at a time, generate
word by word, or ignore constraints."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import anyio
import anyio.lowlevel
from support.programs import by_end

import agentflow as af
from agentflow.backends.local import interpreted
from agentflow.backends.scripted import Scripted
from agentflow.backends.scripted_generator import Script, ScriptedContext, ScriptedGenerator
from agentflow.language.program import ProgramFunction
from agentflow.protocol import ops
from agentflow.protocol.backend import Backend, Connection, Deliver, Lost
from agentflow.protocol.events import Event, Usage
from agentflow.protocol.sampling import GenParams
from agentflow.runtime.generator import METER, Generated, OnText


class Observed:
    """Records the ops and the events of another backend. ``lose`` loses its connection."""

    def __init__(self, backend: Backend) -> None:
        self.ops: list[ops.Op] = []
        self.events: list[Event] = []
        self.lose: Lost
        self._backend = backend

    def of(self, kind: type) -> list:
        """The ops of one kind, in order."""
        return [op for op in self.ops if isinstance(op, kind)]

    @asynccontextmanager
    async def connect(self, deliver: Deliver, lost: Lost) -> AsyncIterator[Connection]:
        def observe(events: Iterable[Event]) -> None:
            observed = list(events)
            self.events += observed
            deliver(iter(observed))

        self.lose = lost
        async with self._backend.connect(observe, lost) as connection:
            yield _ObservedConnection(connection, self.ops)


class _ObservedConnection:
    is_connected = True
    has_room = True

    def __init__(self, connection: Connection, observed: list[ops.Op]) -> None:
        self.models = connection.models
        self._connection = connection
        self._observed = observed

    def send(self, ops: Sequence[ops.Op]) -> None:
        self._connection.send(ops)
        self._observed += ops

    def end(self, error: BaseException | None) -> None:
        self._connection.end(error)


class Unbatched:
    """Delivers the events of another backend one at a time, as if each had come in a separate frame: the
    frontend must not rely on two events arriving together."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    @asynccontextmanager
    async def connect(self, deliver: Deliver, lost: Lost) -> AsyncIterator[Connection]:
        send, receive = anyio.create_memory_object_stream[Event](math.inf)

        def queue(events: Iterable[Event]) -> None:
            for event in events:
                send.send_nowait(event)

        async def pump() -> None:
            async for event in receive:
                for _ in range(5):
                    await anyio.lowlevel.checkpoint()
                deliver([event])

        with send, receive:
            async with anyio.create_task_group() as group:
                group.start_soon(pump)
                async with self._backend.connect(queue, lost) as connection:
                    yield connection
                group.cancel_scope.cancel()


class _Unconstrained(ScriptedGenerator):
    async def generate(
        self, context: ScriptedContext, params: GenParams, on_text: OnText, *rest: Any, **options: Any
    ) -> Generated:
        return await super().generate(context, params, on_text)


def unconstrained(script: Script) -> Scripted:
    """A scripted backend that does not check its answers against constraints."""
    backend = Scripted(script)
    backend.generator = _Unconstrained(script)
    return backend


class SteppedGenerator(ScriptedGenerator):
    """Generates a word, or a character, only when one is allowed."""

    def __init__(self, script: Script, *, by_character: bool = False) -> None:
        super().__init__(by_end(script) if isinstance(script, Mapping) else script)
        self._separator = "" if by_character else " "
        self._allowance = anyio.Semaphore(0)
        self._num_waiting = 0

    async def allow(self, num_words: int) -> None:
        """Generates ``num_words`` words, and lets each be delivered before the next."""
        for _ in range(num_words):
            self._allowance.release()
            await settle()

    async def generate(
        self, context: ScriptedContext, params: GenParams, on_text: OnText, *rest: Any, **options: Any
    ) -> Generated:
        text = str(self._answer(self._call(context, "gen", params.resolved())))
        words = text.split(self._separator) if self._separator else list(text)
        self.num_running += 1
        meter = METER.get()
        try:
            for index, word in enumerate(words):
                await self._allowance.acquire()
                if meter is not None:
                    meter(1)
                delta = f"{self._separator}{word}" if index else word
                context.text += delta
                on_text(delta)
        finally:
            self.num_running -= 1
        return Generated(text, "eos", Usage(1, 0, len(words)))


class Stepped:
    """A scripted backend that generates word by word, or ``by_character``: ``await backend.allow(1)``."""

    def __init__(self, script: Script, *, by_character: bool = False) -> None:
        self._script = script
        self._by_character = by_character
        self.generator: SteppedGenerator

    async def allow(self, num_words: int) -> None:
        """See ``SteppedGenerator.allow``."""
        await self.generator.allow(num_words)

    def connect(self, deliver: Deliver, lost: Lost) -> AbstractAsyncContextManager[Connection]:
        self.generator = SteppedGenerator(self._script, by_character=self._by_character)
        return interpreted(self.generator, deliver)


async def settle() -> None:
    """Lets all tasks run until they wait for something else than the event loop."""
    for _ in range(40):
        await anyio.lowlevel.checkpoint()


def assert_idle(backend: Scripted | Stepped) -> None:
    """No context is open and nothing runs."""
    assert (backend.generator.num_open, backend.generator.num_running) == (0, 0)


async def outcome_of(program: ProgramFunction[[], Any], backend: Stepped, *, num_words: int) -> Any:
    """The result of a program whose backend may generate ``num_words`` words. The backend is idle at the
    end."""
    results: list[Any] = []
    async with af.session(backend=backend) as flow, anyio.create_task_group() as group:

        async def run() -> None:
            results.append(await flow.run(program))

        group.start_soon(run)
        await settle()
        await backend.allow(num_words)
    assert_idle(backend)
    return results[0]
