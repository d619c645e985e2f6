"""The exception that a program sees for a failure that the backend reports."""

from __future__ import annotations

from collections.abc import Mapping

from agentflow.errors import AgentflowError
from agentflow.language.link import StateEvents
from agentflow.protocol.events import ErrorInfo


def located(error: ErrorInfo, states: Mapping[int, StateEvents]) -> AgentflowError:
    """The exception, with a note that names the program's line whose op failed. If a function of the program
    raised an error, that error is the end of the chain of causes."""
    exception = error.to_exception()
    if error.place is None or (state := states.get(error.place[0])) is None:
        return exception
    if (line := state.line_of(error.place[1])) is not None:
        exception.add_note(f"what failed was appended at {line}")
    last: BaseException = exception
    while last.__cause__ is not None:
        last = last.__cause__
    last.__cause__ = state.origin_of(error.place[1])
    return exception
