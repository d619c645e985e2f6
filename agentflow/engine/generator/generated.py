"""What a generation of the engine is to a program: its text, without thoughts, with log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence

from agentflow.engine.client import OnProgress
from agentflow.engine.messages import Finished, Progress
from agentflow.engine.submit import TopTokens
from agentflow.engine.text.thoughts import AnswerText
from agentflow.engine.text.tokenizer import Tokenizer
from agentflow.engine.text.tools import ReplyText
from agentflow.protocol.events import TokenLogprob, TopLogprobs, Usage
from agentflow.protocol.sampling import SamplingParams
from agentflow.runtime.generator import Generated, OnText


def generated_of(
    end: Finished, params: SamplingParams, tokenizer: Tokenizer, text: str, thoughts: str
) -> Generated:
    """``text``: that of the value, to which the tokens of ``thoughts`` do not belong."""
    first = end.thought_tokens
    logprobs = tuple(end.logprobs[first:]) if params.wants_logprobs else None
    top_logprobs = _with_texts(tokenizer, end.top_logprobs[first:]) if params.top_logprobs else None
    tokens = tuple(tokenizer.shown(token)[0] for token in end.token_ids[first:]) if logprobs else None
    return Generated(
        text,
        end.finish_reason,
        usage_of(end),
        logprobs,
        top_logprobs,
        reasoning=thoughts or None,
        tokens=tokens,
    )


def reporting(text: AnswerText | ReplyText, on_text: OnText, on_reasoning: OnText | None) -> OnProgress:
    """Reads the progress of a generation, and reports new text and new thoughts."""

    def on_progress(progress: Progress) -> None:
        new = text.push(progress.text, progress.answer_at)
        if on_reasoning is not None and (thoughts := text.thoughts.new()):
            on_reasoning(thoughts)
        if new:
            on_text(new)

    return on_progress


def usage_of(end: Finished) -> Usage:
    """The tokens of the generation."""
    return Usage(
        end.prompt_tokens, end.cached_tokens, end.output_tokens, end.forced_tokens, end.thought_tokens
    )


def _with_texts(tokenizer: Tokenizer, places: Sequence[TopTokens | None]) -> TopLogprobs:
    return tuple(
        None
        if place is None
        else tuple(TokenLogprob(token, tokenizer.shown(token)[0], p) for token, p in place)
        for place in places
    )
