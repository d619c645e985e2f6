"""The process that runs an engine, as a supervisor sees it.

``EngineChild`` is a process on this machine. Other ways to run an engine, such as an actor on another
machine, implement ``Child`` and a function of the type ``StartChild``. Supervisor, journal and replay work
with all of them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

from agentflow.engine.machine.child_process import ChildProcess
from agentflow.engine.messages import Start


class Child(Protocol):
    """One engine process, from its start to ``end``. ``send`` gets frames with their length
    (``child_process.to_frame``); ``receive`` returns frames without it."""

    @property
    def pid(self) -> int | None:
        """The process id; None if it is unknown."""

    @property
    def node(self) -> str:
        """The address of the process's machine; empty: this machine."""

    async def send(self, frame: bytes) -> None:
        """Sends a frame. May wait while the process reads slowly. Raises ``OSError`` if the process has
        ended."""

    async def receive(self) -> list[bytes]:
        """Waits for frames. Raises ``EOFError`` if the process has ended."""

    async def end(self, grace_s: float = 0.0) -> str:
        """Ends the process, by force if it does not exit by itself within ``grace_s``. Returns a phrase for
        messages: how it ended. Cannot be cancelled."""


StartChild = Callable[[Start], Awaitable[Child]]
"""Starts an engine process, which then loads its engine: it sends lists of ``Logged`` first, then ``Loaded``
or ``LoadFailed``. Raises ``OSError`` if the process cannot be started. Leaves no process if it is
cancelled."""


class EngineChild(ChildProcess):
    """An engine process on this machine, from ``start`` to ``end``."""

    node = ""

    @classmethod
    def start(cls, start: Start) -> EngineChild:
        """Starts a process, which then loads its engine."""
        return cls.run("agentflow.engine.process.worker", start)


async def start_child_process(start: Start) -> Child:
    """The ``StartChild`` for this machine."""
    return EngineChild.start(start)
