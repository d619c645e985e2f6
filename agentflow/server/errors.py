"""Errors over HTTP: the status and the code of each error. docs/reference/errors.md lists them."""

from __future__ import annotations

import math
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
from agentflow.runtime.task_group import first_error

# If the server does not know how long a limit stays reached.
RETRY_AFTER_S = 1.0
# Messages quote the request, up to these lengths.
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


class ClientGone(Exception):
    """The client has closed the connection."""


@dataclass(eq=False)
class ApiError(Exception):
    """An error that a client receives."""

    status: int
    code: str  # the cause
    message: str
    param: str | None = None  # the field of the request that is wrong
    retry_after_s: float | None = None  # the time to wait before a retry, if a retry can help

    @property
    def headers(self) -> dict[str, str]:
        """The headers for the client's next step: when to try again, or how to authenticate."""
        headers: dict[str, str] = {}
        if self.retry_after_s is not None:
            headers["retry-after"] = f"{math.ceil(self.retry_after_s)}"
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return headers

    def shortened(self) -> ApiError:
        """The same error with ``message`` and ``param`` truncated."""
        param = None if self.param is None else truncated(self.param, MAX_PARAM_CHARS)
        return replace(self, message=truncated(self.message, MAX_MESSAGE_CHARS), param=param)


def truncated(text: str, most: int) -> str:
    """The text, truncated to ``most`` characters, of which the last is then an ellipsis.

    >>> truncated("abcdef", 4), truncated("abcd", 4)
    ('abc…', 'abcd')
    """
    return text if len(text) <= most else f"{text[: most - 1]}…"


def invalid_field(param: str, message: str) -> ApiError:
    """The error for a field whose value is wrong."""
    return ApiError(400, "invalid_value", f"{param}: {message}", param=param)


def unsupported(param: str, why: str) -> ApiError:
    """The error for a field, or a value of it, that is not supported."""
    return ApiError(400, "unsupported", f"{param} is not supported: {why}", param=param)


def param_of_tool(param: str, member: str) -> str:
    """Converts a path in a tool's schema to the field of a request whose tools have their
    schemas in the field ``member``.

    >>> param_of_tool("tools[1].properties.a", "input_schema")
    'tools[1].input_schema.properties.a'
    """
    tool, _, path = param.partition("].")
    return f"{tool}].{member}.{path}" if path else f"{tool.removesuffix(']')}].{member}"


def not_ready() -> ApiError:
    """The error of a server that is starting or shutting down."""
    return ApiError(503, "unready", ENDING, retry_after_s=RETRY_AFTER_S)


def cut_off() -> ApiError:
    """The error of a request that is cancelled because the server stops."""
    text = "the server stopped before the answer was complete: try again in a moment"
    return ApiError(503, "unready", text, retry_after_s=RETRY_AFTER_S)


def make_api_error(error: Exception) -> ApiError:
    """The error that a client receives. It has no details of internal errors."""
    error = first_error(error)
    if isinstance(error, ApiError):
        return error
    for kind in type(error).__mro__:
        if kind in _STATUS_AND_CODE:
            status, code = _STATUS_AND_CODE[kind]
            retry_after_s = getattr(error, "retry_after_s", None)
            if status in (429, 503):
                retry_after_s = retry_after_s or RETRY_AFTER_S
            param = error.param if isinstance(error, AgentflowError) else None
            return ApiError(status, code, str(error).removeprefix("conversation: "), param, retry_after_s)
    return ApiError(500, "internal_error", "the server failed to answer this request; its log has the reason")
