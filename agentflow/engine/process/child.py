"""The process that runs an engine, as a supervisor sees it.

``EngineChild`` is a process on this machine. Other ways to run an engine, such as an actor on another
machine, implement ``Child`` and a function of the type ``StartChild``. Supervisor, journal and replay work
with each of them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

from agentflow.engine.machine.child_process import ChildProcess
from agentflow.engine.messages import Start


class Child(Protocol):
    """One running engine process, from its start to ``end``. Frames to it are a length and a message
    (``child_process.to_frame``); frames from it come without their length."""

    @property
    def pid(self) -> int | None:
        """Its process id; None if it is unknown."""

    @property
    def node(self) -> str:
        """The address of its machine; empty: it is this one."""

    async def send(self, frame: bytes) -> None:
        """Sends a frame. May wait while the process reads slowly. Raises ``OSError`` if the process is
        gone."""

    async def receive(self) -> list[bytes]:
        """Waits for frames. Raises ``EOFError`` if the process is gone."""

    async def end(self, grace_s: float = 0.0) -> str:
        """Ends the process, by force if it does not end by itself within ``grace_s``. Returns a phrase that
        says how it ended, for messages. Cannot be cancelled."""


StartChild = Callable[[Start], Awaitable[Child]]
"""Starts an engine process, which begins to load its engine: the first frames that it sends are lists of
``Logged``, then ``Loaded`` or ``LoadFailed``. Raises ``OSError`` if it cannot be started. If it is cancelled,
no process is left."""


class EngineChild(ChildProcess):
    """An engine process on this machine, from ``start`` to ``end``."""

    node = ""

    @classmethod
    def start(cls, start: Start) -> EngineChild:
        """Starts a process, which begins to load its engine."""
        return cls.run("agentflow.engine.process.worker", start)


async def start_child_process(start: Start) -> Child:
    """The ``StartChild`` of this machine."""
    return EngineChild.start(start)
