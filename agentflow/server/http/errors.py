"""How a refusal looks over HTTP: which status an error has, and its name in the APIs' error bodies.

docs/reference/errors.md lists what comes of it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from agentflow.errors import (
    AgentflowError,
    BadArgument,
    EngineDown,
    EngineFailed,
    FrameTooLarge,
    NotAuthorized,
    NotSupported,
    Overloaded,
    PromptTooLong,
    RateLimited,
    RequestRefused,
    UnknownModel,
)
from agentflow.runtime.task_group import first_of

# Where a limit is reached and nobody can say for how long.
RETRY_AFTER_S = 1.0
# Messages quote what the client sent: so much of it says which part is meant.
MAX_MESSAGE_CHARS = 2_000
MAX_PARAM_CHARS = 500
ENDING = "the server is starting or shutting down: try again in a moment"

_STATUS_AND_CODE: dict[type[AgentflowError], tuple[int, str]] = {
    BadArgument: (400, "invalid_value"),
    NotSupported: (400, "unsupported"),
    PromptTooLong: (400, "context_length_exceeded"),
    RequestRefused: (400, "request_refused"),
    NotAuthorized: (401, "invalid_api_key"),
    UnknownModel: (404, "model_not_found"),
    FrameTooLarge: (413, "request_too_large"),
    RateLimited: (429, "rate_limit_exceeded"),
    EngineFailed: (500, "engine_failed"),
    EngineDown: (503, "engine_down"),
    Overloaded: (503, "overloaded"),
}


@dataclass(eq=False)
class ApiError(Exception):
    """An answer that is an error. ``code``: our name for its cause; ``param``: the field of the request
    that is wrong, where it is one; ``retry_after_s``: when to try again, where that helps."""

    status: int
    code: str
    message: str
    param: str | None = None
    retry_after_s: float | None = None

    def shortened(self) -> ApiError:
        """The same with ``message`` and ``param`` cut to what an answer holds of them."""
        param = None if self.param is None else cut(self.param, MAX_PARAM_CHARS)
        return replace(self, message=cut(self.message, MAX_MESSAGE_CHARS), param=param)


def cut(text: str, most: int) -> str:
    """At most ``most`` characters of a text.

    >>> cut("abcdef", 4), cut("abcd", 4)
    ('abc…', 'abcd')
    """
    return text if len(text) <= most else f"{text[: most - 1]}…"


def unready() -> ApiError:
    """Of a server that does not take requests yet, or any more."""
    return ApiError(503, "unready", ENDING, retry_after_s=RETRY_AFTER_S)


def api_error_of(error: Exception) -> ApiError:
    """What a client is told of an error. Of a fault of the server's own it learns no more than that."""
    error = first_of(error)
    if isinstance(error, ApiError):
        return error
    for kind in type(error).__mro__:
        if kind in _STATUS_AND_CODE:
            status, code = _STATUS_AND_CODE[kind]
            retry_after_s = getattr(error, "retry_after_s", None)
            if status in (429, 503):
                retry_after_s = retry_after_s or RETRY_AFTER_S
            param = error.param if isinstance(error, AgentflowError) else None
            return ApiError(status, code, str(error), param, retry_after_s)
    return ApiError(500, "internal_error", "the server failed to answer this request; its log says why")
