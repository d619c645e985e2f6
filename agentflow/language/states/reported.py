"""Failures that the backend reports, as the tasks that wait for their states and variables raise them.

A task that waits for a cancelled state or variable raises ``Cancelled`` with the state and the reason
(``cancelled``, ``left_by``). If several tasks wait, one error must end their task group, not a group of
consequences of one cause: ``CauseFirst`` orders them.
"""

from __future__ import annotations

from collections.abc import Mapping

import anyio
import anyio.lowlevel

from agentflow.errors import AgentflowError, Cancelled
from agentflow.language.link import StateEvents
from agentflow.protocol.events import ErrorInfo
from agentflow.protocol.ops import Failure


def located(error: ErrorInfo, states: Mapping[int, StateEvents]) -> AgentflowError:
    """The exception, with a note that has the line of the program whose op failed. If a function of the
    program raised an error, that error ends the chain of causes."""
    exception = error.to_exception()
    if error.place is None or (state := states.get(error.place[0])) is None:
        return exception
    if (line := state.find_line(error.place[1])) is not None:
        exception.add_note(f"what failed was appended at {line}")
    last: BaseException = exception
    while last.__cause__ is not None:
        last = last.__cause__
    last.__cause__ = state.find_origin(error.place[1])
    return exception


def cancelled(error: Cancelled, path: tuple[int, ...], name: str | None) -> Cancelled:
    """``error``, whose message is the reason, for tasks that wait for the state at ``path`` or its variable
    ``name``."""
    what = f"state {path}" if name is None else f"variable {name!r} of state {path}"
    error.args = (f"{what} was cancelled: {error}",)
    error.path, error.variable = path, name
    return error


def left_by(error: BaseException) -> str:
    """Describes how ``error`` ended a block, for the reasons of cancellations. Also outside event loops."""
    if not isinstance(error, Exception) and type(error).__name__ in ("CancelledError", "Cancelled"):
        return "by the cancellation of its task"
    return f"by {type(error).__name__}"


def program_failure(error: BaseException) -> Failure | None:
    """The failure of a program that ``error`` ended; None if it was cancelled. Of a group, its first error
    that is no cancellation."""
    if not isinstance(error, Exception):
        return None
    pending: list[BaseException] = [error]
    while pending:
        one = pending.pop()
        if isinstance(one, BaseExceptionGroup):
            pending += reversed(one.exceptions)
        elif isinstance(one, Exception) and not isinstance(one, Cancelled):
            return Failure.of(one)
    return None


_TURNS = 10
"""Turns of the event loop. An error takes two of them for each task group that it leaves."""


class CauseFirst:
    """The order in which the tasks of one run raise errors after a cancellation.

    The cancellation of a task's own scope comes before ``Cancelled``. The failure that led to a cancellation,
    and the first ``Cancelled``, come before any further ``Cancelled``: these wait a few turns of the event
    loop, in which the first error cancels the task group."""

    def __init__(self) -> None:
        self._has_raised = False

    async def wait(self, error: ErrorInfo | None) -> None:
        """Called before ``error`` is raised. Has no effect unless it is a ``Cancelled``."""
        if error is None or error.code != Cancelled.code:
            return
        await anyio.lowlevel.checkpoint_if_cancelled()
        num_turns = _TURNS * (self._has_raised + (error.cause is not None))
        self._has_raised = True
        for _ in range(num_turns):
            await anyio.lowlevel.checkpoint()
