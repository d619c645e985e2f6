"""Answers of OpenAI's responses API, built with the types of OpenAI's client. Errors of whole requests are
come from ``openai_answers``."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, Literal

from openai import BaseModel
from openai.types.responses import (
    Response,
    ResponseCompletedEvent,
    ResponseContentPartAddedEvent,
    ResponseContentPartDoneEvent,
    ResponseCreatedEvent,
    ResponseError,
    ResponseErrorEvent,
    ResponseFailedEvent,
    ResponseFunctionCallArgumentsDeltaEvent,
    ResponseFunctionToolCall,
    ResponseIncompleteEvent,
    ResponseInProgressEvent,
    ResponseOutputItemAddedEvent,
    ResponseOutputItemDoneEvent,
    ResponseOutputMessage,
    ResponseOutputRefusal,
    ResponseOutputText,
    ResponseReasoningItem,
    ResponseReasoningSummaryPartAddedEvent,
    ResponseReasoningSummaryTextDeltaEvent,
    ResponseRefusalDeltaEvent,
    ResponseTextDeltaEvent,
    ResponseTextDoneEvent,
    ResponseUsage,
)
from openai.types.responses.response import IncompleteDetails
from openai.types.responses.response_reasoning_item import Summary
from openai.types.responses.response_reasoning_summary_part_added_event import Part
from openai.types.responses.response_text_delta_event import Logprob, LogprobTopLogprob
from openai.types.responses.response_usage import InputTokensDetails, OutputTokensDetails
from support.apis.fake_server import Answer, Step

MODEL = "gpt-4o"
EVENT_STREAM = "text/event-stream; charset=utf-8"
Item = ResponseOutputMessage | ResponseReasoningItem | ResponseFunctionToolCall
Incomplete = Literal["max_output_tokens", "content_filter", "max_messages"]


def usage(
    prompt: int = 9, output: int = 3, *, cached: int = 0, written: int = 0, reasoning: int = 0
) -> ResponseUsage:
    """Numbers of tokens, as in ``openai_answers.usage``."""
    return ResponseUsage(
        input_tokens=prompt,
        output_tokens=output,
        total_tokens=prompt + output,
        input_tokens_details=InputTokensDetails(cached_tokens=cached, cache_write_tokens=written),
        output_tokens_details=OutputTokensDetails(reasoning_tokens=reasoning),
    )


USAGE = usage()


def _response(**fields: Any) -> Response:
    return Response(
        id="resp_1",
        object="response",
        created_at=1_790_000_000,
        model=MODEL,
        output=[],
        tools=[],
        tool_choice="auto",
        parallel_tool_calls=True,
        **fields,
    )


def beginning() -> list[BaseModel]:
    """The first events. All events have the number 0, which no reader needs."""
    begun = _response(status="in_progress")
    return [
        ResponseCreatedEvent(type="response.created", response=begun, sequence_number=0),
        ResponseInProgressEvent(type="response.in_progress", response=begun, sequence_number=0),
    ]


def _added(item: Item, index: int) -> BaseModel:
    return ResponseOutputItemAddedEvent(
        type="response.output_item.added", item=item, output_index=index, sequence_number=0
    )


def _done(item: Item, index: int) -> BaseModel:
    return ResponseOutputItemDoneEvent(
        type="response.output_item.done", item=item, output_index=index, sequence_number=0
    )


def logprob(text: str, value: float, *alternatives: tuple[str, float]) -> Logprob:
    """The log-probability of a token, and the log-probabilities of the likeliest tokens."""
    top = [LogprobTopLogprob(token=token, logprob=number) for token, number in alternatives]
    return Logprob(token=text, logprob=value, top_logprobs=top)


def message(
    *pieces: str | Logprob,
    index: int = 0,
    phase: Literal["commentary", "final_answer"] | None = None,
) -> list[BaseModel]:
    """A message in pieces, which may be tokens with log-probabilities."""
    place: dict[str, Any] = {
        "item_id": f"msg_{index}",
        "output_index": index,
        "content_index": 0,
        "sequence_number": 0,
    }
    fields: dict[str, Any] = {"id": f"msg_{index}", "type": "message", "role": "assistant", "phase": phase}
    text = "".join([piece if isinstance(piece, str) else piece.token for piece in pieces])
    part = ResponseOutputText(type="output_text", text="", annotations=[])
    whole = part.model_copy(update={"text": text})
    deltas = [
        ResponseTextDeltaEvent(
            type="response.output_text.delta",
            delta=piece if isinstance(piece, str) else piece.token,
            logprobs=[] if isinstance(piece, str) else [piece],
            **place,
        )
        for piece in pieces
    ]
    return [
        _added(ResponseOutputMessage(status="in_progress", content=[], **fields), index),
        ResponseContentPartAddedEvent(type="response.content_part.added", part=part, **place),
        *deltas,
        ResponseTextDoneEvent(type="response.output_text.done", text=text, logprobs=[], **place),
        ResponseContentPartDoneEvent(type="response.content_part.done", part=whole, **place),
        _done(ResponseOutputMessage(status="completed", content=[whole], **fields), index),
    ]


def refusal(*pieces: str) -> list[BaseModel]:
    """A message that declines to answer."""
    place: dict[str, Any] = {
        "item_id": "msg_0",
        "output_index": 0,
        "content_index": 0,
        "sequence_number": 0,
    }
    fields: dict[str, Any] = {"id": "msg_0", "type": "message", "role": "assistant"}
    content = [ResponseOutputRefusal(type="refusal", refusal="".join(pieces))]
    return [
        _added(ResponseOutputMessage(status="in_progress", content=[], **fields), 0),
        *[ResponseRefusalDeltaEvent(type="response.refusal.delta", delta=piece, **place) for piece in pieces],
        _done(ResponseOutputMessage(status="completed", content=[*content], **fields), 0),
    ]


def reasoning(*summaries: list[str], index: int = 0, encrypted: str | None = None) -> list[BaseModel]:
    """Reasoning. ``summaries``: the pieces of each part of its summary."""
    place: dict[str, Any] = {"item_id": f"rs_{index}", "output_index": index, "sequence_number": 0}
    events: list[BaseModel] = []
    for number, pieces in enumerate(summaries):
        events.append(
            ResponseReasoningSummaryPartAddedEvent(
                type="response.reasoning_summary_part.added",
                summary_index=number,
                part=Part(type="summary_text", text=""),
                **place,
            )
        )
        events += [
            ResponseReasoningSummaryTextDeltaEvent(
                type="response.reasoning_summary_text.delta", summary_index=number, delta=piece, **place
            )
            for piece in pieces
        ]
    written = [Summary(type="summary_text", text="".join(pieces)) for pieces in summaries]
    item = ResponseReasoningItem(id=f"rs_{index}", type="reasoning", summary=[])
    whole = item.model_copy(update={"summary": written, "encrypted_content": encrypted})
    return [_added(item, index), *events, _done(whole, index)]


def call(call_id: str, name: str, *pieces: str, index: int = 0) -> list[BaseModel]:
    """A tool call, with the pieces of its arguments."""
    item = ResponseFunctionToolCall(
        id=f"fc_{index}", type="function_call", call_id=call_id, name=name, arguments=""
    )
    deltas = [
        ResponseFunctionCallArgumentsDeltaEvent(
            type="response.function_call_arguments.delta",
            item_id=f"fc_{index}",
            output_index=index,
            delta=piece,
            sequence_number=0,
        )
        for piece in pieces
    ]
    return [
        _added(item, index),
        *deltas,
        _done(item.model_copy(update={"arguments": "".join(pieces)}), index),
    ]


def ending(incomplete: Incomplete | None = None, usage: ResponseUsage | None = USAGE) -> BaseModel:
    """The last event. ``incomplete``: why the answer ended before its end."""
    if incomplete is None:
        response = _response(status="completed", usage=usage)
        return ResponseCompletedEvent(type="response.completed", response=response, sequence_number=0)
    response = _response(
        status="incomplete", usage=usage, incomplete_details=IncompleteDetails(reason=incomplete)
    )
    return ResponseIncompleteEvent(type="response.incomplete", response=response, sequence_number=0)


def failed(code: Any, text: str) -> BaseModel:
    """The last event of an answer that failed."""
    response = _response(status="failed", error=ResponseError(code=code, message=text))
    return ResponseFailedEvent(type="response.failed", response=response, sequence_number=0)


def error_event(code: str | None, text: str) -> BaseModel:
    """An error in the middle of a stream."""
    return ResponseErrorEvent(type="error", code=code, message=text, sequence_number=0)


def event(data: BaseModel | dict[str, Any]) -> bytes:
    """A server-sent event."""
    fields = data if isinstance(data, dict) else data.to_dict(mode="json")
    return f"event: {fields['type']}\ndata: {json.dumps(fields, ensure_ascii=False)}\n\n".encode()


def events(*parts: Any) -> list[bytes]:
    """The events of parts, each of which is an event, several, or bytes."""
    return [step for step in _steps(parts) if isinstance(step, bytes)]


def _steps(parts: Iterable[Any]) -> Iterable[Step]:
    for part in parts:
        if isinstance(part, list | tuple):
            yield from _steps(part)
        else:
            yield event(part) if isinstance(part, BaseModel | dict) else part


def stream(*parts: BaseModel | Iterable[BaseModel] | Step) -> Answer:
    """A stream of events, with other steps between them, after the first ones."""
    return Answer([*_steps([beginning(), *parts])], content_type=EVENT_STREAM)


def whole(*parts: Any) -> bytes:
    """The response of which these events are the stream."""
    found = [event for part in parts for event in (part if isinstance(part, list) else [part])]
    items = [event.item for event in found if isinstance(event, ResponseOutputItemDoneEvent)]
    response: Response = found[-1].response
    return response.model_copy(update={"output": items}).to_json(indent=None).encode()


def text_stream(
    *pieces: str, incomplete: Incomplete | None = None, usage: ResponseUsage | None = USAGE
) -> Answer:
    """A whole answer of text."""
    return stream(message(*pieces), ending(incomplete, usage))
