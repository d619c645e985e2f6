"""From a ``Submit`` to the request that the scheduler runs, and to what follows its text."""

from __future__ import annotations

import math
import time

import numpy as np

from agentflow.engine.process.ipc import Submit
from agentflow.engine.request import Request
from agentflow.engine.runner import RunnerInfo
from agentflow.engine.text.detokenizer import TextEnd
from agentflow.engine.text.tokenizer import Tokenizer
from agentflow.engine.token_tree import token_tree
from agentflow.errors import BadArgument, EngineFailed, PromptTooLong
from agentflow.protocol.sampling import SamplingParams

_GREEDY = SamplingParams()


def request_of(message: Submit, info: RunnerInfo, max_total_tokens: int) -> Request:
    """The request, with what an engine that died had generated of it: as after a retraction, these tokens
    are known and none of them is computed. ``max_total_tokens``: that a request may have at most."""
    params, origin = message.params or _GREEDY, message.origin
    if not message.token_ids:
        raise EngineFailed("a request without a single token cannot be computed")
    request = Request.create(
        message.request_id,
        np.array(message.token_ids, dtype=np.int32),
        _output_limit(message, max_total_tokens),
        params,
        seed=message.seed,
        tenant=origin.tenant,
        salt=origin.cache_salt,
        score_from=message.score_from,
        tree=token_tree(message.choices) if message.choices else None,
        objective=origin.objective,
        task_group=origin.task_group or None,
        state=origin.state or None,
        expected_output=origin.output_tokens,
        deadline=_time_in(origin.deadline_s),
        patience_end=_time_in(origin.patience_s),
        priority=origin.priority,
        share=origin.share,
        end_ids=_end_ids(params, info),
    )
    end = request.num_prompt + len(message.generated_ids)
    request.tokens[request.num_prompt : end] = message.generated_ids
    request.num_tokens = end
    request.logprobs += message.generated_logprobs
    request.top_logprobs += message.generated_top_logprobs
    return request


def check_intake(num_prompt: int, params: SamplingParams, info: RunnerInfo) -> None:
    """What the engine would refuse a generation for when it reads it: ``BadArgument`` for a bias beyond the
    vocabulary, ``PromptTooLong``. For callers that must know before they send it."""
    _end_ids(params, info)
    most = min(info.max_context, info.num_slots)
    if num_prompt >= most:
        raise PromptTooLong(
            f"the prompt has {num_prompt:,} tokens, and with at least one of output it has to fit into "
            f"{most:,} (the smaller of the model's context and the KV pool): shorten it"
        )


def text_end_of(message: Submit, tokenizer: Tokenizer) -> TextEnd | None:
    """Follows the text of what is generated, from where an engine that died had got to. None where nothing
    is generated."""
    params = message.params
    if params is None or message.score_from:
        return None
    text = TextEnd(tokenizer, params.stop, stop_regex=params.stop_regex, min_tokens=params.min_tokens)
    for token_id in message.generated_ids:
        text.push(token_id)  # the text it gives is at the other side already
    return text


def _time_in(seconds: float | None) -> float:
    return math.inf if seconds is None else time.monotonic() + seconds


def _output_limit(message: Submit, max_total_tokens: int) -> int:
    if message.params is None or message.score_from:
        return 0
    room = max_total_tokens - len(message.token_ids)
    return min(message.params.max_tokens, max(1, room))


def _end_ids(params: SamplingParams, info: RunnerInfo) -> tuple[int, ...]:
    """The tokens of the vocabulary that end a generation. BadArgument for a bias beyond the vocabulary."""
    for token_id, _ in params.logit_bias:
        if token_id >= info.vocab_size:
            raise BadArgument(
                f"gen: logit_bias names token {token_id}; this model's ids are 0 to {info.vocab_size - 1}"
            )
    own = () if params.ignore_eos else info.end_token_ids
    return tuple({token_id for token_id in (*own, *params.stop_token_ids) if token_id < info.vocab_size})
