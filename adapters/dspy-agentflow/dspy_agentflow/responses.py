"""agentflow's answers as responses of DSPy's engines, whole or as they come."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from dspy import lm15

from agentflow.integrations.client import Ended, Said
from agentflow.protocol.chat import Arguments, CallBegun, read_reply
from agentflow.protocol.events import TopLogprobs


def response_of(end: Ended) -> lm15.Response:
    """A whole answer."""
    reply = read_reply(end.text)
    parts: list[Any] = [lm15.TextPart(reply.text)] if reply.text or not reply.tool_calls else []
    parts += [lm15.ToolCallPart(call.id, call.name, _read(call.arguments)) for call in reply.tool_calls]
    return lm15.Response(
        id=None,
        model=end.model,
        message=lm15.Message("assistant", tuple(parts)),
        finish_reason=_reason(end, has_calls=bool(reply.tool_calls)),
        usage=_usage(end),
        logprobs=_logprobs(end.logprobs, end.top_logprobs),
    )


def _read(arguments: str) -> dict[str, Any]:
    try:
        found = json.loads(arguments)
    except ValueError:  # max_tokens cut it off
        return {"partial_json": arguments}
    return found if isinstance(found, dict) else {"value": found}


def _reason(end: Ended, *, has_calls: bool) -> lm15.FinishReason:
    if end.finish_reason == "length":
        return "length"
    return "tool_call" if has_calls else "stop"


def _usage(end: Ended) -> lm15.Usage:
    return lm15.Usage(
        input_tokens=end.usage.prompt_tokens,
        output_tokens=end.usage.output_tokens,
        cache_read_tokens=end.usage.cached_tokens,
    )


def _logprobs(
    logprobs: tuple[float | None, ...] | None, top: TopLogprobs | None
) -> tuple[lm15.TokenLogprob, ...] | None:
    """A token that was encoded anew at the end of the text has none, and is left out."""
    if logprobs is None:
        return None
    told = []
    for logprob, place in zip(logprobs, top or [None] * len(logprobs), strict=True):
        likely = tuple([lm15.TopLogprob(one.text, one.logprob) for one in place or ()])
        chosen = next((one.token for one in likely if one.logprob == logprob), "")
        if logprob is not None:
            told.append(lm15.TokenLogprob(chosen, logprob, top=likely))
    return tuple(told)


class EventWriter:
    """The events of one streamed answer. Parts are numbered as they begin."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._num_parts = 0
        self._has_text = False
        self._num_calls = 0

    def start(self) -> lm15.StreamStartEvent:
        """The first one."""
        return lm15.StreamStartEvent(model=self._model)

    def deltas(self, event: Said) -> Iterator[lm15.StreamDeltaEvent]:
        """The answer goes on."""
        piece = event.piece
        match piece:
            case CallBegun():
                self._begin_part(is_text=False)
                self._num_calls += 1
                delta: Any = lm15.ToolCallDelta(
                    input="", part_index=self._num_parts - 1, id=piece.id, name=piece.name
                )
            case Arguments():
                delta = lm15.ToolCallDelta(input=piece.text, part_index=self._num_parts - 1)
            case _:
                if not self._has_text:
                    self._begin_part(is_text=True)
                delta = lm15.TextDelta(text=piece.text, part_index=self._num_parts - 1)
        yield lm15.StreamDeltaEvent(delta)

    def end(self, end: Ended) -> Iterator[lm15.StreamDeltaEvent | lm15.StreamEndEvent]:
        """The last ones."""
        logprobs = _logprobs(end.logprobs, end.top_logprobs)
        if logprobs:
            yield lm15.StreamDeltaEvent(
                lm15.TextDelta(text="", part_index=max(self._num_parts - 1, 0), logprobs=logprobs)
            )
        reason = _reason(end, has_calls=self._num_calls > 0)
        yield lm15.StreamEndEvent(finish_reason=reason, usage=_usage(end))

    def _begin_part(self, *, is_text: bool) -> None:
        self._has_text = is_text
        self._num_parts += 1
