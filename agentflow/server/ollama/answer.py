"""The answers of Ollama's API: whole answers, the lines of streams, and errors.

A line of a stream is a JSON object with more text, or with a complete tool call. The last line, like a whole
answer, has the reason why it ended, the counts and the durations.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from agentflow.protocol.chat import CalledTool
from agentflow.protocol.events import Usage
from agentflow.server.compatible.logprobs import token_logprob
from agentflow.server.completion.request import (
    Answer,
    AnswerEnded,
    AnswerToken,
    CompletionDelta,
    PromptDelta,
    ReasoningDelta,
    TextDelta,
    Times,
    ToolArguments,
    ToolCallBegun,
    arguments_json,
)
from agentflow.server.errors import ApiError
from agentflow.server.ollama.types import (
    CalledFunction,
    OllamaAnswerMessage,
    OllamaChatAnswer,
    OllamaGenerateAnswer,
    OllamaLogprob,
    OllamaToolCall,
)
from agentflow.server.tenants.limit_headers import openai_limit_headers
from agentflow.server.tenants.rate_limit import LimitState

_encode_json = msgspec.json.Encoder().encode
_LINE_END = b"\n"


class OllamaErrorBody(msgspec.Struct, kw_only=True):
    """The body of an error. ``code``: the cause, as in OpenAI's API. ``param``: the field of the request that
    is wrong, if any. Clients read ``error`` only."""

    error: str
    code: str
    param: str | None


class OllamaErrorFormat:
    """The ``ErrorFormat`` of Ollama's API. It has no headers for limits, so they are OpenAI's."""

    request_id_header = b"x-request-id"
    processing_header = b""
    stream_type = "application/x-ndjson"
    # An extra line would not be JSON, but a line may begin with spaces.
    keepalive = b" "
    body_type: type[msgspec.Struct] = OllamaErrorBody

    def status(self, error: ApiError) -> int:
        return error.status

    def body(self, error: ApiError, request_id: str) -> bytes:
        return _encode_json(OllamaErrorBody(error=error.message, code=error.code, param=error.param))

    def limit_headers(self, limits: LimitState) -> dict[bytes, bytes]:
        return openai_limit_headers(limits)

    def in_stream(self, body: bytes) -> bytes:
        return body + _LINE_END


class AnswerLines:
    """The lines of one answer.

    Args:
        model: the model's name in the request.
        began_ns: when the request was received, as ``time.perf_counter_ns``.
        is_chat: whether the endpoint is ``/api/chat``.
        has_context: whether the last line has the token ids.
    """

    def __init__(self, model: str, began_ns: int, *, is_chat: bool, has_context: bool) -> None:
        self.times = Times()
        self._model = model
        self._began_ns = began_ns
        self._is_chat = is_chat
        self._has_context = has_context
        self._prompt_ids: tuple[int, ...] = ()
        self._num_calls = 0
        self._call: tuple[ToolCallBegun, list[str]] | None = None
        self._end: AnswerEnded | None = None
        self._violated: str | None = None

    def start(self, prompt_tokens: int) -> bytes:
        """Returns no bytes: each answer begins with its first text."""
        return b""

    def write(self, deltas: Sequence[CompletionDelta]) -> bytes:
        """The lines of these deltas."""
        parts: list[bytes] = []
        for delta in deltas:
            match delta:
                case PromptDelta():
                    self._prompt_ids = delta.token_ids
                case TextDelta():
                    if delta.text:
                        parts.append(self._finish_call())
                    parts.append(self._encoded(delta.text, tokens=delta.tokens))
                case ReasoningDelta():
                    if delta.text:
                        parts.append(self._finish_call())
                    parts.append(self._encoded("", tokens=delta.tokens, thinking=delta.text))
                case ToolCallBegun():
                    parts.append(self._finish_call())
                    self._call = delta, []
                case ToolArguments():
                    assert self._call is not None
                    self._call[1].append(delta.text)
                case AnswerEnded():
                    parts.append(self._finish_call())
                    self._end = delta
        return b"".join(parts)

    def report(self, violated: str) -> bytes:
        """Returns no bytes: the last line has the paths, because clients parse every line."""
        self._violated = violated
        return b""

    def end(self, usage: Usage) -> bytes:
        """The last line."""
        assert self._end is not None
        return self._encoded("", **self._ending(self._end, self._prompt_ids), violated=self._violated)

    def whole(self, answer: Answer) -> bytes:
        """The whole answer."""
        whole = [call for call in answer.tool_calls if call.is_whole]
        calls = [_shown(number, call) for number, call in enumerate(whole)]
        end = AnswerEnded(0, answer.finish_reason, answer.usage, token_ids=answer.token_ids)
        prompt_ids = () if answer.prompt is None else answer.prompt.token_ids
        ending = self._ending(end, prompt_ids)
        return self._encoded(answer.text, calls, answer.tokens, thinking=answer.reasoning, **ending)

    def loaded(self) -> bytes:
        """The answer to a request without a prompt, which loads a model."""
        return self._encoded("", done=True, done_reason="load")

    def _finish_call(self) -> bytes:
        if self._call is None:
            return b""
        (begun, parts), self._call = self._call, None
        call = CalledTool(begun.id, begun.name, "".join(parts))
        if not call.is_whole:  # the API cannot show a truncated call, and a client would run it
            return b""
        self._num_calls += 1
        return self._encoded("", [_shown(self._num_calls - 1, call)])

    def _ending(self, end: AnswerEnded, prompt_ids: Sequence[int]) -> dict[str, Any]:
        times, now = self.times, time.perf_counter_ns()
        ended = times.ended or now
        first_token = times.first_token or ended
        fields: dict[str, Any] = {
            "done": True,
            "done_reason": "length" if end.finish_reason == "length" else "stop",
            "total_duration": now - self._began_ns,
            "load_duration": times.accepted - self._began_ns,
            "prompt_eval_count": end.usage.prompt_tokens,
            "prompt_eval_duration": first_token - times.accepted,
            "eval_count": end.usage.output_tokens,
            "eval_duration": ended - first_token,
        }
        if self._has_context:
            fields["context"] = [*prompt_ids, *end.token_ids]
        return fields

    def _encoded(
        self,
        text: str,
        calls: Sequence[OllamaToolCall] = (),
        tokens: Sequence[AnswerToken] = (),
        *,
        thinking: str = "",
        done: bool = False,
        **ending: Any,
    ) -> bytes:
        fields = ending | {"model": self._model, "created_at": datetime.now(UTC), "done": done}
        if tokens:
            fields["logprobs"] = _logprobs(tokens)
        if not self._is_chat:
            return _encode_json(OllamaGenerateAnswer(response=text, thinking=thinking, **fields)) + _LINE_END
        message = OllamaAnswerMessage(role="assistant", content=text, thinking=thinking, tool_calls=[*calls])
        return _encode_json(OllamaChatAnswer(message=message, **fields)) + _LINE_END


def _shown(index: int, call: CalledTool) -> OllamaToolCall:
    function = CalledFunction(index=index, name=call.name, arguments=arguments_json(call.arguments))
    return OllamaToolCall(id=call.id, function=function)


def _logprobs(tokens: Sequence[AnswerToken]) -> list[OllamaLogprob]:
    """The tokens, except those without a log-probability (their text was encoded again): clients need a
    number."""
    shown = [(token_logprob(token), token.logprob) for token in tokens]
    return [
        OllamaLogprob(token=one.token, bytes=one.bytes, logprob=logprob, top_logprobs=one.top_logprobs)
        for one, logprob in shown
        if logprob is not None
    ]
