"""The numbers of tokens that servers report with an answer.

The answer does not depend on them: a number in a form that no API documents counts as missing, and missing
numbers are estimated. The fields have the names in OpenAI's APIs and in the APIs that imitate them.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import msgspec

from agentflow.protocol.events import Usage
from agentflow.protocol.sampling import is_number
from agentflow.protocol.unreadable import UNREADABLE

MAX_COUNT: Final = 1 << 53
"""Higher numbers make no sense, and do not fit into all messages."""
NULL: Final = msgspec.Raw(b"null")
_CACHED: Final = (
    "prompt_tokens_details.cached_tokens",
    "input_tokens_details.cached_tokens",
    "prompt_cache_hit_tokens",  # DeepSeek
    "cached_tokens",  # Moonshot
    "cache_read_input_tokens",  # Databricks
)
_WRITTEN: Final = ("prompt_tokens_details.cache_write_tokens", "input_tokens_details.cache_write_tokens")
_REASONING: Final = (
    "completion_tokens_details.reasoning_tokens",
    "output_tokens_details.reasoning_tokens",
    "reasoning_tokens",
)


class Reported(NamedTuple):
    """The usage of an answer, and the tokens of its prompt that were written to the provider's cache."""

    usage: Usage
    written_tokens: int = 0


def is_given(raw: msgspec.Raw) -> bool:
    """Whether a field of an event has a value other than null."""
    return len(raw) > 0 and raw != NULL


def read_count(found: object, *names: str) -> int | None:
    """The number in the first of some fields that has one; inner fields follow a dot.

    >>> read_count({"tokens": {"input": 12.0}}, "input", "tokens.input")
    12
    >>> read_count({"input": "many"}, "input") is None
    True
    """
    for name in names:
        value = found
        for part in name.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        if isinstance(value, int | float) and is_number(value, 0, MAX_COUNT) and value == int(value):
            return int(value)
    return None


def counts_in(raw: msgspec.Raw) -> object:
    """The content of the field with the numbers; None if it cannot be read."""
    try:
        return msgspec.json.decode(raw) if is_given(raw) else None
    except UNREADABLE:
        return None


def read_usage(raw: msgspec.Raw, guess: Usage) -> Reported:
    """As ``usage_in``, of a field that is not decoded."""
    return usage_in(counts_in(raw), guess)


def usage_in(found: object, guess: Usage) -> Reported:
    """The usage in an answer of OpenAI's APIs and their relatives.

    Args:
        found: The content of the field with the numbers.
        guess: The numbers of the prompt and the output, if the server does not report them.
    """
    prompt = read_count(found, "prompt_tokens", "input_tokens")
    output = read_count(found, "completion_tokens", "output_tokens")
    reasoning = read_count(found, *_REASONING) or 0
    if prompt is not None and output is not None:
        # xAI and Google leave the reasoning out of the output, for which it is paid.
        hidden = (read_count(found, "total_tokens") or 0) - prompt - output
        if hidden > 0 and reasoning in (0, hidden):
            output, reasoning = output + hidden, hidden
    usage = Usage(
        guess.prompt_tokens if prompt is None else prompt,
        max([read_count(found, name) or 0 for name in _CACHED]),
        guess.output_tokens if output is None else output,
        reasoning_tokens=reasoning,
    )
    return Reported(usage, read_count(found, *_WRITTEN) or 0)
