"""A backend that interprets its ops in this process: the common part of the embedded engine, the
API clients and the scripted fake. They differ in the generator."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from typing import Generic

from agentflow.protocol.backend import Connection, Deliver
from agentflow.protocol.ops import Op
from agentflow.runtime.generator import Capabilities, ContextT, Generator
from agentflow.runtime.interpreter import Interpreter
from agentflow.runtime.task_group import open_task_group


class InterpretedConnection(Generic[ContextT]):
    """A ``Connection`` whose other side is an interpreter in the same event loop."""

    def __init__(self, interpreter: Interpreter[ContextT], capabilities: Capabilities) -> None:
        self._interpreter = interpreter
        self.capabilities = capabilities

    def send(self, ops: Sequence[Op]) -> None:
        for op in ops:
            self._interpreter.submit(op)

    def end(self, error: BaseException | None) -> None:
        pass


@asynccontextmanager
async def interpreted(generator: Generator[ContextT], deliver: Deliver) -> AsyncIterator[Connection]:
    """Interprets ops with ``generator`` while the scope lasts; leaving it aborts what runs."""
    with ExitStack() as at_the_end:
        async with open_task_group() as group:
            interpreter = Interpreter(generator, group)
            at_the_end.callback(interpreter.close)

            async def pump() -> None:
                while True:
                    await interpreter.outbox.wait()
                    deliver(interpreter.outbox.drain())

            group.start_soon(pump)
            try:
                yield InterpretedConnection(interpreter, generator.capabilities)
            finally:
                group.cancel_scope.cancel()
