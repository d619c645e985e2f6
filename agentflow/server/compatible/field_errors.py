"""Adds the field of the request to errors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from agentflow.errors import BadArgument, PromptTooLong, RequestRefused
from agentflow.protocol.sampling import SamplingParams
from agentflow.server.compatible.fields import is_given
from agentflow.server.completion.api_run import EFFORT
from agentflow.server.completion.request import MAX_LOGPROB_TOKENS
from agentflow.server.errors import ApiError, invalid_field, param_of_tool, unsupported
from agentflow.server.models.models import TextGenerator


def check_unsupported(
    body: object, reasons: Mapping[str, str], neutral: Mapping[str, object] | None = None, prefix: str = ""
) -> None:
    """``ApiError`` for a field of ``reasons`` that has a value, unless it is the field's ``neutral`` value.
    ``prefix``: the beginning of the fields' names in errors."""
    for name, why in reasons.items():
        value = getattr(body, name)
        if is_given(value) and value != (neutral or {}).get(name, ...):
            raise unsupported(f"{prefix}{name}", why)


@contextmanager
def naming_param(param: str | None = None) -> Iterator[None]:
    """Converts ``BadArgument`` to an ``ApiError`` with the field ``param``, by default the error's."""
    try:
        yield
    except BadArgument as error:
        field = param or error.param
        if field is None:
            raise
        raise ApiError(400, "invalid_value", str(error).removeprefix("gen: "), field) from error


@contextmanager
def naming_field(
    generator: TextGenerator,
    prompt: str,
    form: str = "response_format",
    arguments: str = "function.parameters",
    effort: str = "reasoning_effort",
    budget: str | None = None,
    too_long: str | None = None,
) -> Iterator[None]:
    """Adds the field of the request to errors of the engine.

    Args:
        generator: The model.
        prompt: The field of the prompt, for a prompt that is too long or empty, or has unknown ids or
            unreadable images.
        form: The field of the constraint.
        arguments: The field of a tool's arguments.
        effort: The field of the reasoning effort.
        budget: The field of the limit of reasoning tokens; None: ``effort``.
        too_long: The beginning of the error about a prompt that is too long. Agents that shorten their
            conversation recognise it. None: the words of OpenAI's API.
    """
    try:
        yield
    except PromptTooLong as error:
        if too_long is None:
            most = generator.capabilities.max_context
            limit = "exceeded" if most is None else f"{most} tokens"
            too_long = f"This model's maximum context length is {limit}"
        raise ApiError(400, "context_length_exceeded", f"{too_long}: {error}", prompt) from error
    except (BadArgument, RequestRefused) as error:
        if error.param in ("prompt", "image", "video"):
            error.param = prompt
        elif error.param == "constraint":
            error.param = form
        elif error.param == "choice":
            error.param = "tool_choice"
        elif error.param == EFFORT:
            error.param = effort
        elif error.param == "max_reasoning_tokens":
            error.param = budget or effort
        elif error.param is not None and error.param.startswith("tools["):
            error.param = param_of_tool(error.param, arguments)
        raise


def check_num_logprobs(
    params: SamplingParams, generator: TextGenerator, num_answers: int, param: str
) -> None:
    """``ApiError`` if a request asks for too many log-probabilities. An answer is not longer than the
    context."""
    if not params.wants_logprobs:
        return
    num_tokens = min(params.max_tokens, generator.capabilities.max_context or params.max_tokens)
    num_logprobs = num_answers * num_tokens * (1 + params.top_logprobs)
    if num_logprobs > MAX_LOGPROB_TOKENS:
        raise invalid_field(
            param,
            f"{num_answers} answers of up to {num_tokens:,} tokens, with {params.top_logprobs} alternatives "
            f"each, have {num_logprobs:,} log-probabilities; the limit is {MAX_LOGPROB_TOKENS:,}",
        )
