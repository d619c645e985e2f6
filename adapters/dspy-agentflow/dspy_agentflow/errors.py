"""agentflow's errors as those of DSPy's engines, which DSPy shows as its own: ``dspy.LMError`` and below."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

from dspy import lm15

import agentflow as af

_KINDS: Final[tuple[tuple[type[Exception] | tuple[type[Exception], ...], Any], ...]] = (
    (af.PromptTooLong, lm15.ContextLengthError),
    (af.UnknownModel, lm15.UnsupportedModelError),
    (af.NotAuthorized, lm15.AuthError),
    (af.RateLimited, lm15.RateLimitError),
    (af.DeadlineExceeded, lm15.TimeoutError),
    ((af.ServerUnreachable, af.ServerLost), lm15.TransportError),
    (af.NotSupported, lm15.UnsupportedFeatureError),
    ((af.BadArgument, af.RequestRefused, af.LimitExceeded, af.ScriptMismatch), lm15.InvalidRequestError),
    ((af.ServerError, af.EngineFailed), lm15.ServerError),  # which DSPy tries again
    (af.AgentflowError, lm15.ProviderError),
)


def as_lm15(error: af.AgentflowError) -> Exception:
    """The error of the kind that an engine raises."""
    kind: Any = next(kind for known, kind in _KINDS if isinstance(error, known))
    if kind is lm15.AuthError:
        hint = "pass api_key= to AgentflowLM, or set AGENTFLOW_API_KEY"
        kind = partial(kind, credential_hint=hint)
    wrapped: Exception = kind(str(error), provider="agentflow")
    return wrapped


@contextmanager
def engine_errors() -> Iterator[None]:
    """What agentflow raises in the block comes out as an engine's error."""
    try:
        yield
    except af.AgentflowError as error:
        raise as_lm15(error) from error
