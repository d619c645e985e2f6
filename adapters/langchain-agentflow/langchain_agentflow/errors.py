"""agentflow's errors as LangChain's: each is both, so that code that catches either goes on working."""

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


class AgentflowAPIError(ModelAPIError, af.ServerError):
    """The engine failed, or the server has no room now: the same request may succeed later."""


class AgentflowAuthenticationError(ModelAuthenticationError, af.NotAuthorized):
    """The server wants an API key, or another one."""


class AgentflowConnectionError(ModelConnectionError, af.ServerError):
    """There is no server at this address, or it is gone."""


class AgentflowContextOverflowError(ContextOverflowError, af.PromptTooLong):
    """The prompt is longer than the model's context."""


class AgentflowInvalidRequestError(ModelInvalidRequestError, af.BadArgument):
    """What was asked makes no sense, or cannot be done: a schema that cannot be kept, say."""


class AgentflowModelNotFoundError(ModelNotFoundError, af.UnknownModel):
    """Neither the server nor this machine has a model of that name."""


class AgentflowRateLimitError(ModelRateLimitError, af.RateLimited):
    """The tenant's limit of requests or tokens is reached."""


class AgentflowTimeoutError(ModelTimeoutError, af.DeadlineExceeded):
    """It took longer than it may."""


class AgentflowModelError(ModelError, af.AgentflowError):
    """Anything else that agentflow may say."""


_KINDS: tuple[tuple[type[Exception] | tuple[type[Exception], ...], type[ModelError]], ...] = (
    (af.PromptTooLong, AgentflowContextOverflowError),
    (af.UnknownModel, AgentflowModelNotFoundError),
    (af.NotAuthorized, AgentflowAuthenticationError),
    (af.RateLimited, AgentflowRateLimitError),
    (af.DeadlineExceeded, AgentflowTimeoutError),
    ((af.ServerUnreachable, af.ServerLost), AgentflowConnectionError),
    (
        (af.BadArgument, af.RequestRefused, af.LimitExceeded, af.ScriptMismatch),
        AgentflowInvalidRequestError,
    ),
    ((af.ServerError, af.EngineFailed), AgentflowAPIError),
    (af.AgentflowError, AgentflowModelError),
)


_made: dict[tuple[type[ModelError], type[af.AgentflowError]], type[Exception]] = {}


def as_langchain(error: af.AgentflowError) -> Exception:
    """The error of LangChain's kind; itself where it is one already."""
    if isinstance(error, ModelError):
        return error
    kind = next(kind for known, kind in _KINDS if isinstance(error, known))
    told = _both(kind, type(error))(str(error))
    told.__dict__.update(error.__dict__)  # such as ``retry_after_s``
    return told


def _both(kind: type[ModelError], raised: type[af.AgentflowError]) -> type[Exception]:
    """The one, and what was raised."""
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
    """What agentflow raises in the block comes out as LangChain's."""
    try:
        yield
    except af.AgentflowError as error:
        raise as_langchain(error) from error
