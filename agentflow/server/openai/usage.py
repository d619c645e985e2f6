"""How OpenAI's API tells the tokens of a request."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from agentflow.protocol.events import Usage
from agentflow.server.log import RequestRecord


class PromptDetails(msgspec.Struct):
    """``cached_tokens``: of the prompt, those that were not computed for this request."""

    cached_tokens: int


class UsageBody(msgspec.Struct, kw_only=True):
    """Tokens. A prompt counts once, however many answers it has."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


def usage_of_prompts(answers: Sequence[Usage], n: int) -> Usage:
    """Of prompts with ``n`` answers each, prompt by prompt. What the first answer to run had to compute was
    not cached, though the others found it so."""
    total = Usage()
    for start in range(0, len(answers), n):
        same = answers[start : start + n]
        total += Usage(
            same[0].prompt_tokens,
            min(usage.cached_tokens for usage in same),
            sum(usage.output_tokens for usage in same),
        )
    return total


def usage_body(usage: Usage, record: RequestRecord) -> UsageBody:
    """For the answer, and for the log."""
    record.prompt_tokens, record.cached_tokens = usage.prompt_tokens, usage.cached_tokens
    record.output_tokens = usage.output_tokens
    return UsageBody(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.output_tokens,
        total_tokens=usage.prompt_tokens + usage.output_tokens,
        prompt_tokens_details=PromptDetails(usage.cached_tokens),
    )
