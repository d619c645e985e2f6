"""Answers of Anthropic's messages API, built with the types of Anthropic's client."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from anthropic.types import (
    InputJSONDelta,
    Message,
    MessageDeltaUsage,
    OutputTokensDetails,
    RawContentBlockDeltaEvent,
    RawContentBlockStartEvent,
    RawContentBlockStopEvent,
    RawMessageDeltaEvent,
    RawMessageStartEvent,
    RawMessageStopEvent,
    RedactedThinkingBlock,
    RefusalStopDetails,
    SignatureDelta,
    StopReason,
    TextBlock,
    TextDelta,
    ThinkingBlock,
    ThinkingDelta,
    ToolUseBlock,
    Usage,
)
from anthropic.types.raw_message_delta_event import Delta
from anthropic.types.shared import ErrorResponse
from support.apis.fake_server import Answer, Step

MODEL = "claude-opus-4-5"
EVENT_STREAM = "text/event-stream; charset=utf-8"
PING = b'event: ping\ndata: {"type": "ping"}\n\n'
Event = (
    RawMessageStartEvent
    | RawContentBlockStartEvent
    | RawContentBlockDeltaEvent
    | RawContentBlockStopEvent
    | RawMessageDeltaEvent
    | RawMessageStopEvent
)
Block = TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock


def beginning(
    prompt: int = 9, *, cached: int = 0, written: int = 0, output: int = 1, **unknown: Any
) -> RawMessageStartEvent:
    """The first event. ``prompt``: without the tokens that were read from the cache or written to it."""
    numbers = Usage(
        input_tokens=prompt,
        cache_read_input_tokens=cached,
        cache_creation_input_tokens=written,
        output_tokens=output,
    )
    message = Message(
        id="msg_1", type="message", role="assistant", model=MODEL, content=[], usage=numbers, **unknown
    )
    return RawMessageStartEvent(type="message_start", message=message)


def block(index: int, begun: Block, *deltas: Any) -> list[Event]:
    """One block of the content: its start, its deltas and its end."""
    return [
        RawContentBlockStartEvent(type="content_block_start", index=index, content_block=begun),
        *[
            RawContentBlockDeltaEvent(type="content_block_delta", index=index, delta=delta)
            for delta in deltas
        ],
        RawContentBlockStopEvent(type="content_block_stop", index=index),
    ]


def text_block(*pieces: str, index: int = 0) -> list[Event]:
    """Text in pieces."""
    return block(
        index, TextBlock(type="text", text=""), *[TextDelta(type="text_delta", text=text) for text in pieces]
    )


def thinking_block(*pieces: str, signature: str = "c2lnbmVk", index: int = 0) -> list[Event]:
    """Thinking in pieces, with its signature."""
    return block(
        index,
        ThinkingBlock(type="thinking", thinking="", signature=""),
        *[ThinkingDelta(type="thinking_delta", thinking=text) for text in pieces],
        SignatureDelta(type="signature_delta", signature=signature),
    )


def redacted_block(data: str = "aGlkZGVu", *, index: int = 0) -> list[Event]:
    """Thinking that only the vendor can read."""
    return block(index, RedactedThinkingBlock(type="redacted_thinking", data=data))


def call_block(call_id: str, name: str, *pieces: str, index: int = 0) -> list[Event]:
    """A tool call, with its arguments in pieces."""
    begun = ToolUseBlock(type="tool_use", id=call_id, name=name, input={})
    deltas = [InputJSONDelta(type="input_json_delta", partial_json=piece) for piece in pieces]
    return block(index, begun, *deltas)


def ending(
    stop_reason: StopReason | None = "end_turn",
    output: int = 3,
    *,
    stop_sequence: str | None = None,
    refusal: str | None = None,
    thinking: int | None = None,
    **counts: int,
) -> list[Event]:
    """The last two events. ``output``: all tokens of the output. ``counts``: other fields of the usage."""
    details = RefusalStopDetails(type="refusal", explanation=refusal) if refusal is not None else None
    delta = Delta(stop_reason=stop_reason, stop_sequence=stop_sequence, stop_details=details)
    numbers = MessageDeltaUsage(
        output_tokens=output,
        output_tokens_details=None if thinking is None else OutputTokensDetails(thinking_tokens=thinking),
        **counts,
    )
    return [
        RawMessageDeltaEvent(type="message_delta", delta=delta, usage=numbers),
        RawMessageStopEvent(type="message_stop"),
    ]


def event(data: Event | dict[str, Any]) -> bytes:
    """A server-sent event, whose name is the type of its data."""
    fields = data if isinstance(data, dict) else data.to_dict(mode="json", exclude_unset=False)
    return f"event: {fields['type']}\ndata: {json.dumps(fields, ensure_ascii=False)}\n\n".encode()


def stream(*parts: Event | Iterable[Event] | Step) -> Answer:
    """A stream of events, with other steps between them."""
    return Answer(list(_steps(parts)), content_type=EVENT_STREAM, headers={"request-id": "req_1"})


def _steps(parts: Iterable[Any]) -> Iterable[Step]:
    for part in parts:
        if isinstance(part, Event):
            yield event(part)
        elif isinstance(part, list | tuple):
            yield from _steps(part)
        else:
            yield part


def text_stream(*pieces: str, stop_reason: StopReason = "end_turn", **options: Any) -> Answer:
    """A whole answer of text. ``options``: of ``ending``."""
    return stream(beginning(), PING, text_block(*pieces), ending(stop_reason, **options))


def call_stream(*calls: tuple[str, str, Sequence[str]], text: Sequence[str] = ()) -> Answer:
    """A whole answer with tool calls: the id, the name and the pieces of the arguments of each.

    Args:
        text: The text before the calls, in pieces.
    """
    parts: list[Event] = text_block(*text) if text else []
    for index, (call_id, name, pieces) in enumerate(calls, 1 if text else 0):
        parts += call_block(call_id, name, *pieces, index=index)
    return stream(beginning(), parts, ending("tool_use"))


def error(status: int, message: str, *, kind: str, headers: dict[str, str] | None = None) -> Answer:
    """An error."""
    body = json.dumps(_described(message, kind)).encode()
    return Answer(body, status, {"request-id": "req_1", **(headers or {})})


def error_event(message: str, *, kind: str = "overloaded_error") -> bytes:
    """An error in the middle of a stream."""
    return event(_described(message, kind))


def _described(message: str, kind: str) -> dict[str, Any]:
    content = {"type": "error", "error": {"type": kind, "message": message}, "request_id": "req_1"}
    return ErrorResponse.model_validate(content).to_dict()


WRONG_KEY = error(401, "invalid x-api-key", kind="authentication_error")
NO_MODEL = error(404, "model: claude-0", kind="not_found_error")
REFUSED_PARAMETER = error(
    400, "`temperature` and `top_p` cannot both be specified for this model.", kind="invalid_request_error"
)
NO_PREFILL = error(
    400,
    "This model does not support assistant message prefill. The conversation must end with a user message.",
    kind="invalid_request_error",
)
TOO_LONG = error(400, "prompt is too long: 200001 tokens > 200000 maximum", kind="invalid_request_error")
BROKEN = error(500, "Internal server error", kind="api_error")
OVERLOADED = error(529, "Overloaded", kind="overloaded_error")


def rate_limited(*, ms: int | None = None, s: float | None = None) -> Answer:
    """A request too many, with the time to wait in either header."""
    headers = {"anthropic-ratelimit-requests-limit": "50", "anthropic-ratelimit-requests-remaining": "0"}
    if ms is not None:
        headers["retry-after-ms"] = str(ms)
    if s is not None:
        headers["retry-after"] = f"{s:g}"
    return error(429, "This request would exceed your rate limit.", kind="rate_limit_error", headers=headers)
