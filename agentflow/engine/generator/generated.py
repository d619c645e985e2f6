"""The result of a generation for a program: its text, without reasoning, with log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence

from agentflow.engine.client import OnProgress
from agentflow.engine.messages import Finished, Progress
from agentflow.engine.submit import TopTokens
from agentflow.engine.text.reasoning import AnswerText
from agentflow.engine.text.tokenizer import Tokenizer
from agentflow.engine.text.tools import ReplyText
from agentflow.protocol.events import TokenLogprob, TopLogprobs, Usage
from agentflow.protocol.sampling import SamplingParams
from agentflow.runtime.generator import Generated, OnText


def generated_of(
    end: Finished, params: SamplingParams, tokenizer: Tokenizer, text: str, reasoning: str
) -> Generated:
    """Returns the value of a finished generation.

    Args:
        end: the end of the request.
        params: its parameters.
        tokenizer: of the model.
        text: of the value.
        reasoning: the reasoning before it, whose tokens do not belong to the value.
    """
    first = end.reasoning_tokens
    logprobs = tuple(end.logprobs[first:]) if params.wants_logprobs else None
    top_logprobs = _with_texts(tokenizer, end.top_logprobs[first:]) if params.top_logprobs else None
    tokens = tuple(tokenizer.shown(token)[0] for token in end.token_ids[first:]) if logprobs else None
    return Generated(
        text,
        end.finish_reason,
        usage_of(end),
        logprobs,
        top_logprobs,
        reasoning=reasoning or None,
        tokens=tokens,
    )


def reporting(text: AnswerText | ReplyText, on_text: OnText, on_reasoning: OnText | None) -> OnProgress:
    """Returns a callback for the progress of a generation, which reports new text and new reasoning."""

    def on_progress(progress: Progress) -> None:
        new = text.push(progress.text, progress.answer_at)
        if on_reasoning is not None and (reasoning := text.reasoning.new()):
            on_reasoning(reasoning)
        if new:
            on_text(new)

    return on_progress


def usage_of(end: Finished) -> Usage:
    """Returns the token counts of the generation."""
    return Usage(
        end.prompt_tokens, end.cached_tokens, end.output_tokens, end.forced_tokens, end.reasoning_tokens
    )


def _with_texts(tokenizer: Tokenizer, places: Sequence[TopTokens | None]) -> TopLogprobs:
    return tuple(
        None
        if place is None
        else tuple(TokenLogprob(token, tokenizer.shown(token)[0], p) for token, p in place)
        for place in places
    )
