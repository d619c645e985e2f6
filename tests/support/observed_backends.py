"""Backends for tests of the frontend: one that notes what passes, one that speaks word by word."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import anyio
import anyio.lowlevel

from agentflow.backends.local import interpreted
from agentflow.backends.scripted import Script, Scripted, ScriptedContext, ScriptedGenerator
from agentflow.protocol import ops
from agentflow.protocol.backend import Backend, Connection, Deliver, Lost
from agentflow.protocol.constraint import Constraint
from agentflow.protocol.events import Event, Usage
from agentflow.protocol.sampling import SamplingParams
from agentflow.runtime.generator import Generated, OnText


class Noted:
    """Another backend whose ops are noted on their way. ``lose`` makes it gone."""

    def __init__(self, backend: Backend) -> None:
        self.ops: list[ops.Op] = []
        self.lose: Lost
        self._backend = backend

    def of(self, kind: type) -> list:
        """The ops of one kind, in order."""
        return [op for op in self.ops if isinstance(op, kind)]

    @asynccontextmanager
    async def connect(self, deliver: Deliver, lost: Lost) -> AsyncIterator[Connection]:
        self.lose = lost
        async with self._backend.connect(deliver, lost) as connection:
            yield _NotingConnection(connection, self.ops)


class _NotingConnection:
    def __init__(self, connection: Connection, noted: list[ops.Op]) -> None:
        self.capabilities = connection.capabilities
        self._connection = connection
        self._noted = noted

    def send(self, ops: Sequence[ops.Op]) -> None:
        self._connection.send(ops)
        self._noted += ops

    def end(self, error: BaseException | None) -> None:
        self._connection.end(error)


class Dribbling:
    """Another backend whose events come one at a time, as if each had a frame of its own: whatever is
    not told in the same breath, the frontend must not take for told."""

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


class SpokenGenerator(ScriptedGenerator):
    """Says a word only when one is allowed."""

    def __init__(self, script: Script) -> None:
        super().__init__(script)
        self._allowance = anyio.Semaphore(0)
        self._num_waiting = 0

    async def allow(self, num_words: int) -> None:
        """Lets so many words be said, one after the other, each heard before the next."""
        for _ in range(num_words):
            self._allowance.release()
            await settle()

    async def generate(
        self,
        context: ScriptedContext,
        params: SamplingParams,
        on_text: OnText,
        constraint: Constraint | None = None,
    ) -> Generated:
        words = self._answer(context.text).split(" ")
        self.num_running += 1
        try:
            for index, word in enumerate(words):
                await self._allowance.acquire()
                context.text += f" {word}" if index else word
                on_text(f" {word}" if index else word)
        finally:
            self.num_running -= 1
        return Generated(" ".join(words), "eos", Usage(1, 0, len(words)))


class Spoken:
    """A scripted backend whose words are allowed one by one: ``await backend.allow(1)``."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self.generator: SpokenGenerator

    async def allow(self, num_words: int) -> None:
        """See ``SpokenGenerator.allow``."""
        await self.generator.allow(num_words)

    def connect(self, deliver: Deliver, lost: Lost) -> AbstractAsyncContextManager[Connection]:
        self.generator = SpokenGenerator(self._script)
        return interpreted(self.generator, deliver)


async def settle() -> None:
    """Lets everything run that can run: nothing here waits for anything but the loop."""
    for _ in range(40):
        await anyio.lowlevel.checkpoint()


def assert_left_nothing(backend: Scripted | Spoken) -> None:
    """After the session: no context is open and nothing runs."""
    assert (backend.generator.num_open, backend.generator.num_running) == (0, 0)
