"""Decides which failures of a program may pass, and how long to wait before the next attempt."""

from __future__ import annotations

from typing import Final

from agentflow.errors import (
    Cancelled,
    EngineFailed,
    InvalidValue,
    Overloaded,
    RunFailed,
    ServerLost,
    ServerUnreachable,
)
from agentflow.runtime.backoff import doubled_s

FIRST_PAUSE_S: Final = 0.5
MAX_PAUSE_S: Final = 30.0
_TRANSIENT: Final = (
    Overloaded,
    EngineFailed,
    ServerLost,
    ServerUnreachable,
    InvalidValue,
    ConnectionError,
    TimeoutError,
)


def pause_s(error: Exception, num_failed: int, *also: type[Exception]) -> float | None:
    """The seconds to wait after ``num_failed`` failed attempts, the last with ``error``; None if another
    attempt would fail too. ``also``: further errors that may pass. An invalid value is generated again
    without a pause. If the server says when to retry, the pause ends then. Other pauses double.

    >>> pause_s(EngineFailed("out of memory"), 1), pause_s(EngineFailed("out of memory"), 2)
    (0.5, 1.0)
    """
    if isinstance(error, ExceptionGroup):
        pauses = [pause_s(inner, num_failed, *also) for inner in error.exceptions]
        known = [pause for pause in pauses if pause is not None]
        return max(known) if len(known) == len(pauses) else None
    origin: BaseException = error
    while not isinstance(origin, (*_TRANSIENT, *also)):
        # Dependents of a failure fail with it as their cause.
        if not isinstance(origin, RunFailed | Cancelled) or origin.__cause__ is None:
            return None
        origin = origin.__cause__
    if isinstance(origin, InvalidValue):
        return 0.0
    asked_s: float | None = getattr(origin, "retry_after_s", None)
    return asked_s if asked_s is not None else doubled_s(FIRST_PAUSE_S, MAX_PAUSE_S, num_failed)
