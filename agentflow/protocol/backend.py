"""The seam between the frontend and whatever runs its ops."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from agentflow.protocol.events import Capabilities, Event
from agentflow.protocol.ops import Op

Deliver = Callable[[Iterable[Event]], None]
Lost = Callable[[Exception], None]


class Connection(Protocol):
    """An open backend. ``send`` never waits."""

    capabilities: Capabilities

    def send(self, ops: Sequence[Op]) -> None:
        """Submits ops, all of them or (raising at once, where one can never be taken) none."""

    def end(self, error: BaseException | None) -> None:
        """The session's block was left: by ``error``, or (None) by its end. Called once, before the scope
        ends. The scope itself is left without the error, which belongs to the program."""


class Backend(Protocol):
    """Something that runs ops: embedded, on a server, on an API, or from a script."""

    def connect(self, deliver: Deliver, lost: Lost) -> AbstractAsyncContextManager[Connection]:
        """Runs the backend while the scope lasts. ``deliver`` is called with events, in the loop;
        ``lost`` once, if the backend is gone for good before the scope ends."""
