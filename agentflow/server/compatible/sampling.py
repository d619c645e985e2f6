"""Sampling parameters whose values in APIs differ from the engine's."""

from __future__ import annotations

from agentflow.protocol.sampling import SamplingParams
from agentflow.server.compatible.fields import StopField
from agentflow.server.models.models import TextGenerator


def read_nucleus(top_p: float | None, top_k: int | None = None) -> tuple[float, int]:
    """Converts ``top_p`` and ``top_k`` to the engine's values. A ``top_p`` of 0 is greedy sampling, and a
    ``top_k`` of -1, like 0, is off."""
    return (1.0, 1) if top_p == 0 else (top_p or 1.0, max(0, top_k or 0))


def read_stops(stop: StopField | None) -> tuple[str, ...]:
    """The strings that end the answer."""
    return (stop,) if isinstance(stop, str) else tuple(stop or ())


def max_answer_tokens(generator: TextGenerator) -> int:
    """The limit of an answer whose request has none: the length of the context."""
    return generator.capabilities.max_context or SamplingParams().max_tokens
