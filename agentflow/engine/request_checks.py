"""Checks of a submitted request: those that a client runs in advance, and those of the engine.

``check_task`` and ``check_request`` are for clients that must know before they submit. ``make_request`` turns
a ``Submit`` into the scheduler's ``Request``.
"""

from __future__ import annotations

import math
import time

import numpy as np

from agentflow.engine.media_run import MediaRun
from agentflow.engine.request import Request
from agentflow.engine.runner import RunnerInfo
from agentflow.engine.submit import GREEDY, Submit
from agentflow.errors import BadArgument, EngineFailed, PromptTooLong
from agentflow.protocol.sampling import SamplingParams


def check_task(embeds: bool, info: RunnerInfo) -> None:
    """``BadArgument`` if a model that generates is asked for an embedding, or the reverse."""
    if embeds and not info.embedding_size:
        raise BadArgument(
            "this model generates text: serve it, or an embedding model, with --task embed for embeddings",
            param="model",
        )
    if info.embedding_size and not embeds:
        raise BadArgument(
            "this model makes embeddings only (--task embed): take another one to generate text",
            param="model",
        )


def check_request(num_prompt: int, params: SamplingParams, info: RunnerInfo) -> None:
    """Raises what the engine would reject a generation with: ``BadArgument`` for a bias outside the
    vocabulary, or ``PromptTooLong``. For clients that must know before they submit."""
    _end_ids(params, info)
    limit = min(info.max_context, info.num_slots)
    if num_prompt >= limit:
        raise PromptTooLong(
            f"the prompt has {num_prompt:,} tokens; with at least one of output it must fit into "
            f"{limit:,} (the smaller of the model's context and the KV pool): shorten it",
            param="prompt",
        )


def make_request(message: Submit, info: RunnerInfo, max_total_tokens: int) -> Request:
    """The scheduler's request for a ``Submit``. Tokens that an engine generated before it died are part of
    it and will be computed again, as after a preemption. ``max_total_tokens``: limit of prompt and output.
    ``BadArgument`` for a parameter out of range."""
    params = message.params or GREEDY
    check_task(message.embeds, info)
    if not message.token_ids:
        raise EngineFailed("a request needs at least one token")
    token_ids = np.array(message.token_ids, dtype=np.int32)
    media = [MediaRun.of(run) for run in message.media]
    if np.count_nonzero(token_ids < 0) != sum([run.num_tokens for run in media]):
        raise EngineFailed("a prompt has other tokens below 0 than those of its images")
    if (last := int(token_ids.max())) >= info.vocab_size:
        raise BadArgument(
            f"the prompt has the token {last}, which the tokenizer knows and the model does not: its ids are "
            f"0 to {info.vocab_size - 1}",
            param="prompt",
        )
    request = Request.of(
        message,
        token_ids,
        _output_limit(message, max_total_tokens),
        end_ids=_end_ids(params, info),
        media=media,
    )
    request.deadline = _time_in(message.origin.deadline_s)
    request.patience_end = _time_in(message.origin.patience_s)
    request.received_s = time.perf_counter()
    end = request.num_prompt + len(message.generated_ids)
    request.tokens[request.num_prompt : end] = message.generated_ids
    request.num_tokens = end
    request.num_redrawn = message.num_redrawn
    request.logprobs += message.generated_logprobs
    request.num_scored = len(request.logprobs)
    request.top_logprobs += message.generated_top_logprobs
    return request


def _output_limit(message: Submit, max_total_tokens: int) -> int:
    if message.params is None or message.score_from:
        return 0
    return min(message.params.max_tokens, max(1, max_total_tokens - len(message.token_ids)))


def _time_in(seconds: float | None) -> float:
    return math.inf if seconds is None else time.monotonic() + seconds


def _end_ids(params: SamplingParams, info: RunnerInfo) -> tuple[int, ...]:
    """Tokens of the vocabulary that end a generation. ``BadArgument`` for a bias outside the vocabulary."""
    for token_id, _ in params.logit_bias:
        if token_id >= info.vocab_size:
            raise BadArgument(
                f"gen: logit_bias names token {token_id}; this model's ids are 0 to {info.vocab_size - 1}",
                param="logit_bias",
            )
    own = () if params.ignore_eos else info.end_token_ids
    return tuple({token_id for token_id in (*own, *params.stop_token_ids) if token_id < info.vocab_size})
