"""agentflow's answers and errors as those of LiteLLM, which LMs of DSPy before 3.4 speak."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import litellm
from litellm import exceptions
from litellm.types import utils

import agentflow as af
from agentflow.integrations.client import Ended, Said
from agentflow.protocol.chat import TextPiece, read_reply

_KINDS: Final[tuple[tuple[type[Exception] | tuple[type[Exception], ...], Any], ...]] = (
    (af.PromptTooLong, exceptions.ContextWindowExceededError),
    (af.UnknownModel, exceptions.NotFoundError),
    (af.NotAuthorized, exceptions.AuthenticationError),
    (af.RateLimited, exceptions.RateLimitError),
    (af.DeadlineExceeded, exceptions.Timeout),
    ((af.ServerUnreachable, af.ServerLost), exceptions.APIConnectionError),
    (af.NotSupported, exceptions.UnsupportedParamsError),
    ((af.ServerError, af.EngineFailed), exceptions.InternalServerError),
    (af.AgentflowError, exceptions.BadRequestError),
)
PASSING: Final = (exceptions.RateLimitError, exceptions.APIConnectionError, exceptions.InternalServerError)
"""Failures of which the next try may know nothing."""


@contextmanager
def litellm_errors(model: str) -> Iterator[None]:
    """What agentflow raises in the block comes out as LiteLLM's."""
    try:
        yield
    except af.AgentflowError as error:
        kind: Any = next(kind for known, kind in _KINDS if isinstance(error, known))
        raise kind(message=str(error), model=model, llm_provider="agentflow") from error


def response_of(ends: Sequence[Ended]) -> Any:
    """All answers to one prompt."""
    usage: dict[str, Any] = {
        "prompt_tokens": sum(end.usage.prompt_tokens for end in ends),
        "completion_tokens": sum(end.usage.output_tokens for end in ends),
        "prompt_tokens_details": {"cached_tokens": sum(end.usage.cached_tokens for end in ends)},
    }
    usage["total_tokens"] = usage["prompt_tokens"] + usage["completion_tokens"]
    return litellm.ModelResponse(
        model=ends[0].model,
        choices=[_choice(index, end) for index, end in enumerate(ends)],
        usage=litellm.Usage(**usage),
    )


def _choice(index: int, end: Ended) -> dict[str, Any]:
    reply = read_reply(end.text)
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in reply.tool_calls
    ]
    reason = "length" if end.finish_reason == "length" else "tool_calls" if calls else "stop"
    message = {"role": "assistant", "content": reply.text, **({"tool_calls": calls} if calls else {})}
    return {"index": index, "finish_reason": reason, "message": message, **_logprobs(end)}


def _logprobs(end: Ended) -> dict[str, Any]:
    if end.logprobs is None:
        return {}
    content = []
    for logprob, place in zip(end.logprobs, end.top_logprobs or [None] * len(end.logprobs), strict=True):
        likely = [{"token": one.text, "logprob": one.logprob, "bytes": None} for one in place or ()]
        chosen = next((one.text for one in place or () if one.logprob == logprob), "")
        if logprob is not None:
            content.append({"token": chosen, "logprob": logprob, "bytes": None, "top_logprobs": likely})
    return {"logprobs": {"content": content}}


def chunk_of(said: Said, model: str, predict_id: int | None) -> Any:
    """For a listener; None where it has nothing to hear."""
    if not isinstance(said.piece, TextPiece):
        return None
    delta = utils.Delta(content=said.piece.text, role="assistant")
    choice = utils.StreamingChoices(index=said.index, delta=delta)
    chunk = litellm.ModelResponseStream(model=model, choices=[choice])
    if predict_id is not None:
        chunk.predict_id = predict_id
    return chunk
