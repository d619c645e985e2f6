"""agentflow's errors as LangChain's. Each error is an instance of both, so code may catch either."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from langchain_core.exceptions import (
    ContextOverflowError,
    ModelAPIError,
    ModelAuthenticationError,
    ModelConnectionError,
    ModelError,
    ModelInvalidRequestError,
    ModelNotFoundError,
    ModelRateLimitError,
    ModelTimeoutError,
)

import agentflow as af


class AgentflowAPIError(ModelAPIError, af.errors.ServerError):
    """The engine failed, or the server is overloaded. The same request may succeed later."""


class AgentflowAuthenticationError(ModelAuthenticationError, af.errors.NotAuthorized):
    """The server requires an API key, or rejects this one."""


class AgentflowConnectionError(ModelConnectionError, af.errors.ServerError):
    """No server answers at this address, or the connection was lost."""


class AgentflowContextOverflowError(ContextOverflowError, af.PromptTooLong):
    """The prompt is longer than the model's context."""


class AgentflowInvalidRequestError(ModelInvalidRequestError, af.errors.BadArgument):
    """The request is invalid or not supported: a schema that cannot be enforced, for example."""


class AgentflowModelNotFoundError(ModelNotFoundError, af.errors.UnknownModel):
    """Neither the server nor this machine has a model with this name."""


class AgentflowRateLimitError(ModelRateLimitError, af.errors.RateLimited):
    """The tenant's limit of requests or tokens is used up."""


class AgentflowTimeoutError(ModelTimeoutError, af.DeadlineExceeded):
    """The answer took longer than its time limit."""


class AgentflowModelError(ModelError, af.AgentflowError):
    """Any other error of agentflow."""


_KINDS: tuple[tuple[type[Exception] | tuple[type[Exception], ...], type[ModelError]], ...] = (
    (af.PromptTooLong, AgentflowContextOverflowError),
    (af.errors.UnknownModel, AgentflowModelNotFoundError),
    (af.errors.NotAuthorized, AgentflowAuthenticationError),
    (af.errors.RateLimited, AgentflowRateLimitError),
    (af.DeadlineExceeded, AgentflowTimeoutError),
    ((af.errors.ServerUnreachable, af.ServerLost), AgentflowConnectionError),
    (
        (af.errors.BadArgument, af.errors.RequestRefused, af.errors.LimitExceeded, af.errors.ScriptMismatch),
        AgentflowInvalidRequestError,
    ),
    ((af.errors.ServerError, af.errors.EngineFailed), AgentflowAPIError),
    (af.AgentflowError, AgentflowModelError),
)


_made: dict[tuple[type[ModelError], type[af.AgentflowError]], type[Exception]] = {}


def as_langchain(error: af.AgentflowError) -> Exception:
    """Returns the LangChain error for an error, or the error itself if it is one already."""
    if isinstance(error, ModelError):
        return error
    kind = next(kind for known, kind in _KINDS if isinstance(error, known))
    converted = _both(kind, type(error))(str(error))
    converted.__dict__.update(error.__dict__)  # such as ``retry_after_s``
    return converted


def _both(kind: type[ModelError], raised: type[af.AgentflowError]) -> type[Exception]:
    """Returns a class that is both, so that handlers for the exact agentflow error match, too."""
    if issubclass(kind, raised):
        return kind
    if (kind, raised) in _made:
        return _made[kind, raised]

    def as_kind(self: Exception) -> tuple[type[Exception], tuple[str]]:
        return kind, (str(self),)  # for pickle, which finds classes by their names

    made = type(kind.__name__, (kind, raised), {"__module__": kind.__module__, "__reduce__": as_kind})
    return _made.setdefault((kind, raised), made)


@contextmanager
def langchain_errors() -> Iterator[None]:
    """Converts agentflow's errors that are raised in the block."""
    try:
        yield
    except af.AgentflowError as error:
        raise as_langchain(error) from error
