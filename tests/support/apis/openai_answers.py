"""Answers of OpenAI's chat API and of compatible servers, built with the types of OpenAI's client."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from openai.types import CompletionUsage
from openai.types.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionTokenLogprob
from openai.types.chat.chat_completion_chunk import (
    Choice,
    ChoiceDelta,
    ChoiceDeltaToolCall,
    ChoiceDeltaToolCallFunction,
    ChoiceLogprobs,
)
from openai.types.chat.chat_completion_token_logprob import TopLogprob
from openai.types.completion_usage import CompletionTokensDetails, PromptTokensDetails
from openai.types.shared import ErrorObject
from support.apis.fake_server import Answer, Step

FinishReason = Literal["stop", "length", "tool_calls", "content_filter"]
MODEL = "gpt-4o"
DONE = b"data: [DONE]\n\n"
EVENT_STREAM = "text/event-stream; charset=utf-8"


def usage(
    prompt: int = 9, output: int = 3, *, cached: int = 0, written: int | None = None, reasoning: int = 0
) -> CompletionUsage:
    """Numbers of tokens. ``cached`` and ``written`` are parts of the prompt, ``reasoning`` of the output."""
    return CompletionUsage(
        prompt_tokens=prompt,
        completion_tokens=output,
        total_tokens=prompt + output,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=cached, cache_write_tokens=written),
        completion_tokens_details=CompletionTokensDetails(reasoning_tokens=reasoning),
    )


USAGE = usage()


def chunk(
    delta: ChoiceDelta | None = None,
    *,
    finish_reason: FinishReason | None = None,
    logprobs: ChoiceLogprobs | None = None,
    usage: CompletionUsage | None = None,
    **unknown: Any,
) -> ChatCompletionChunk:
    """One chunk of a stream. A chunk with a ``usage`` and no ``delta`` has no choice.

    Args:
        unknown: Fields that OpenAI's types do not have.
    """
    choices = []
    if delta is not None or usage is None:
        choices.append(
            Choice(index=0, delta=delta or ChoiceDelta(), finish_reason=finish_reason, logprobs=logprobs)
        )
    return ChatCompletionChunk(
        id="chatcmpl-1",
        object="chat.completion.chunk",
        created=1_790_000_000,
        model=MODEL,
        choices=choices,
        usage=usage,
        **unknown,
    )


def text_chunks(*pieces: str) -> list[ChatCompletionChunk]:
    """The beginning of a message, and its text in pieces."""
    first = chunk(ChoiceDelta(role="assistant", content=""))
    return [first, *[chunk(ChoiceDelta(content=piece)) for piece in pieces]]


def reasoning_chunks(
    *pieces: str, key: Literal["reasoning", "reasoning_content"] = "reasoning"
) -> list[ChatCompletionChunk]:
    """Reasoning in pieces, as compatible servers send it: OpenAI's types have no field for it."""
    return [chunk(ChoiceDelta.model_validate({key: piece})) for piece in pieces]


def refusal_chunks(*pieces: str) -> list[ChatCompletionChunk]:
    """A refusal in pieces."""
    return [chunk(ChoiceDelta(refusal=piece)) for piece in pieces]


def call_chunks(*calls: tuple[str, str, Sequence[str]]) -> list[ChatCompletionChunk]:
    """Tool calls, each with its id, its name and the pieces of its arguments."""
    found = []
    for index, (call_id, name, pieces) in enumerate(calls):
        begun = ChoiceDeltaToolCall(
            index=index,
            id=call_id,
            type="function",
            function=ChoiceDeltaToolCallFunction(name=name, arguments=""),
        )
        found.append(chunk(ChoiceDelta(tool_calls=[begun])))
        for piece in pieces:
            more = ChoiceDeltaToolCall(index=index, function=ChoiceDeltaToolCallFunction(arguments=piece))
            found.append(chunk(ChoiceDelta(tool_calls=[more])))
    return found


def logprob_chunk(text: str, logprob: float, *alternatives: tuple[str, float]) -> ChatCompletionChunk:
    """One token of the text with its log-probability and the log-probabilities of the likeliest tokens."""
    top = [
        TopLogprob(token=token, logprob=value, bytes=list(token.encode())) for token, value in alternatives
    ]
    token = ChatCompletionTokenLogprob(
        token=text, logprob=logprob, bytes=list(text.encode()), top_logprobs=top
    )
    return chunk(ChoiceDelta(content=text), logprobs=ChoiceLogprobs(content=[token]))


def ending(
    finish_reason: FinishReason = "stop", usage: CompletionUsage | None = USAGE
) -> list[ChatCompletionChunk]:
    """The last chunks: the finish reason, and the usage, if any."""
    return [
        chunk(finish_reason=finish_reason),
        *([] if usage is None else [chunk(usage=usage)]),
    ]


def event(data: ChatCompletionChunk | dict[str, Any]) -> bytes:
    """A server-sent event."""
    fields = data if isinstance(data, dict) else data.to_dict(mode="json")
    return f"data: {json.dumps(fields, ensure_ascii=False)}\n\n".encode()


def stream(*parts: ChatCompletionChunk | Iterable[ChatCompletionChunk] | Step, done: bool = True) -> Answer:
    """A stream of chunks, with other steps between them, and ``[DONE]`` at its end."""
    return Answer([*_steps(parts), *([DONE] if done else [])], content_type=EVENT_STREAM)


def _steps(parts: Iterable[Any]) -> Iterable[Step]:
    for part in parts:
        if isinstance(part, ChatCompletionChunk):
            yield event(part)
        elif isinstance(part, list | tuple):
            yield from _steps(part)
        else:
            yield part


def text_stream(
    *pieces: str, finish_reason: FinishReason = "stop", usage: CompletionUsage | None = USAGE
) -> Answer:
    """A whole answer of text."""
    return stream(text_chunks(*pieces), ending(finish_reason, usage))


def call_stream(*calls: tuple[str, str, Sequence[str]], text: Sequence[str] = ()) -> Answer:
    """A whole answer with tool calls, and the text before them."""
    return stream(text_chunks(*text), call_chunks(*calls), ending("tool_calls"))


def completion(
    text: str, finish_reason: FinishReason = "stop", usage: CompletionUsage | None = USAGE
) -> Answer:
    """An answer that is not streamed."""
    whole = ChatCompletion.model_validate(
        {
            "id": "chatcmpl-1",
            "object": "chat.completion",
            "created": 1_790_000_000,
            "model": MODEL,
            "choices": [
                {
                    "index": 0,
                    "finish_reason": finish_reason,
                    "logprobs": None,
                    "message": {"role": "assistant", "content": text, "refusal": None},
                }
            ],
            "usage": usage,
        }
    )
    return Answer(whole.to_json(indent=None).encode())


def error(
    status: int,
    message: str,
    *,
    kind: str = "invalid_request_error",
    code: str | None = None,
    param: str | None = None,
    headers: dict[str, str] | None = None,
) -> Answer:
    """An error. The request's id is in a header."""
    described = ErrorObject(message=message, type=kind, code=code, param=param)
    body = json.dumps({"error": described.to_dict(exclude_unset=False)}).encode()
    return Answer(body, status, {"x-request-id": "req_1", **(headers or {})})


def error_event(message: str, *, kind: str = "server_error", code: str | None = None) -> bytes:
    """An error in the middle of a stream."""
    return event({"error": ErrorObject(message=message, type=kind, code=code, param=None).to_dict()})


WRONG_KEY = error(401, "Incorrect API key provided: sk-wrong.", code="invalid_api_key")
NO_MODEL = error(404, "The model `gpt-0` does not exist.", code="model_not_found", param="model")
REFUSED_PARAMETER = error(
    400,
    "Unsupported parameter: 'stop' is not supported with this model.",
    code="unsupported_parameter",
    param="stop",
)
TOO_LONG = error(
    400,
    "This model's maximum context length is 128000 tokens.",
    code="context_length_exceeded",
    param="messages",
)
BROKEN = error(500, "The server had an error.", kind="server_error")
OVERLOADED = error(503, "The engine is currently overloaded.", kind="server_error", code="overloaded")


def rate_limited(
    *, ms: int | None = None, s: float | None = None, code: str = "rate_limit_exceeded"
) -> Answer:
    """A request too many, with the time to wait in either header."""
    headers = {"x-ratelimit-limit-requests": "60", "x-ratelimit-remaining-requests": "0"}
    if ms is not None:
        headers["retry-after-ms"] = str(ms)
    if s is not None:
        headers["retry-after"] = f"{s:g}"
    return error(429, "Rate limit reached.", kind="requests", code=code, headers=headers)
