"""OpenAI's completions, which continue a plain text: for states without turns."""

from __future__ import annotations

from typing import Any

import msgspec

from agentflow.backends.apis.answers.answer import NO_TOKEN_ID, AnswerCollector, TokenInfo
from agentflow.backends.apis.answers.reported_usage import is_given
from agentflow.backends.apis.capability_table import ModelFacts
from agentflow.backends.apis.chat.chat_completions import (
    ChoicePart,
    Chunk,
    ChunkReader,
    TokenLogprobs,
    stream_options,
)
from agentflow.backends.apis.chat.flavours import Flavour, constraint_fields
from agentflow.backends.apis.chat.sampling_fields import SamplingWriter
from agentflow.backends.apis.generation.api_format import MAX_PLAIN_TOP_LOGPROBS, ApiRequest, Call
from agentflow.backends.apis.generation.conversation import ApiContext
from agentflow.backends.apis.http.api_errors import ErrorMapping
from agentflow.backends.apis.http.event_stream import EventSink
from agentflow.errors import NotSupported
from agentflow.protocol.events import TokenLogprob

_encode = msgspec.json.Encoder().encode


class TextCompletions:
    """The ``ApiFormat`` of ``/completions``. The arguments are as in ``ChatCompletions``."""

    path = "completions"
    min_tokens = 1
    may_stop_reasoning = False  # a plain text goes on without

    def __init__(self, model: str, flavour: Flavour, facts: ModelFacts, errors: ErrorMapping) -> None:
        self._model = model
        self._flavour = flavour
        self._facts = facts
        self._errors = errors
        self._sampling = SamplingWriter(model, flavour, facts)

    def request(self, context: ApiContext, call: Call) -> ApiRequest:
        """The request for a call. ``NotSupported`` if the API cannot express it."""
        if call.is_reply:
            raise NotSupported(f"{self._model} replies to turns only, and this state has plain text")
        if not context.open_text:
            raise NotSupported(f"{self._model} cannot begin without a prompt: append text before the gen")
        if call.params.top_logprobs > MAX_PLAIN_TOP_LOGPROBS:
            raise NotSupported(
                f"{self._model} reports at most {MAX_PLAIN_TOP_LOGPROBS} top_logprobs after plain text",
                param="top_logprobs",
            )
        fields: dict[str, Any] = {
            "model": self._model,
            "prompt": context.open_text,
            "stream": True,
            "stream_options": stream_options(self._flavour),
        }
        enforced = self._flavour.enforced(self._facts)
        fields |= constraint_fields(self._flavour, enforced, call.constraint, is_plain=True).fields
        fields |= self._sampling.fields(call)
        if "max_completion_tokens" in fields:
            fields["max_tokens"] = fields.pop("max_completion_tokens")
        if call.params.wants_logprobs:
            fields["logprobs"] = max(call.params.top_logprobs, self._flavour.least_logprobs)
        if context.cache_salt and self._flavour.takes_salt:
            fields["cache_salt"] = context.cache_salt
        return ApiRequest(self.path, _encode(fields))

    def sink(self, request: ApiRequest, answer: AnswerCollector) -> EventSink:
        """The reader of a stream."""
        return CompletionReader(answer, self._errors, len(request.body))


class _Logprobs(TokenLogprobs):
    """``content``: where llama.cpp has them."""

    tokens: list[str] | None = None
    token_logprobs: list[float | None] | None = None
    top_logprobs: list[dict[str, float | None] | None] | None = None


_logprobs = msgspec.json.Decoder(_Logprobs)


class _Choice(ChoicePart):
    text: str | None = None


class CompletionReader(ChunkReader):
    """Reads the stream of a completion."""

    chunks = msgspec.json.Decoder(Chunk[_Choice])

    def read(self, choice: _Choice) -> None:
        """Reads a part of the answer."""
        if choice.index:
            return
        if self.answer.wants_logprobs and is_given(choice.logprobs):
            self._read_logprobs(self._decoded(_logprobs.decode, choice.logprobs))
        if choice.text:
            self.answer.add_text(choice.text)
        if choice.finish_reason:
            self.end(choice.finish_reason, choice.stop)

    def _read_logprobs(self, found: _Logprobs) -> None:
        for one in found.content or ():
            self.answer.add_token(one.info())
        tops = found.top_logprobs or [None] * len(found.tokens or ())
        for text, logprob, top in zip(found.tokens or (), found.token_logprobs or (), tops, strict=False):
            pairs = sorted((top or {}).items(), key=lambda pair: -(pair[1] or 0.0))
            likely = tuple([TokenLogprob(NO_TOKEN_ID, token, value or 0.0) for token, value in pairs])
            if logprob is not None:
                self.answer.add_token(TokenInfo(text, logprob, likely))
