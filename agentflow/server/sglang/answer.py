"""The answers of ``/generate``, whole and as the events of a stream.

An event has the whole text so far, as SGLang's clients expect. An event for each token would make the size
of a stream quadratic in the size of its answer, so an event is sent once the text is longer by 1/64, and at
the end. All events together are then at most 65 times as large as the last text. Token ids and
log-probabilities, which may change until the end of a constrained answer, are only in its last event.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
from msgspec import UNSET

from agentflow.protocol.events import Usage
from agentflow.server.completion.completion import Completion
from agentflow.server.completion.request import (
    Answer,
    AnswerEnded,
    AnswerToken,
    CompletionDelta,
    PromptDelta,
    TextDelta,
)
from agentflow.server.completion.streaming import CommentedEvents
from agentflow.server.event_stream import event
from agentflow.server.sglang.types import LoggedToken, LoggedTops, SglangAnswer, SglangFinish, SglangMeta

_encode_json = msgspec.json.Encoder().encode
_DONE = event(b"[DONE]")

GROWTH = 64
"""An event is sent when the text is longer by 1/``GROWTH``."""


@dataclass(frozen=True, slots=True)
class LogprobForm:
    """The log-probabilities that answers have."""

    start: int  # the first position in the prompt; -1: only the output has log-probabilities
    num_top: int  # the number of alternatives to each token
    has_texts: bool  # tokens have texts

    def of_prompt(self, prompt: PromptDelta | None) -> tuple[Sequence[LoggedToken], LoggedTops]:
        """The log-probabilities of the prompt. The first position shown has none, as in SGLang."""
        if prompt is None or self.start < 0:
            return [], []
        tokens = prompt.tokens[self.start :]
        shown, tops = self.of_tokens(tokens)
        if tokens:
            shown[0], tops[0] = (None, *shown[0][1:]), None
        return shown, tops

    def of_tokens(self, tokens: Sequence[AnswerToken]) -> tuple[list[LoggedToken], LoggedTops]:
        """The log-probabilities of an answer."""
        return self._shown(tokens), [self._shown(token.top) for token in tokens]

    def _shown(self, tokens: Sequence[AnswerToken]) -> list[LoggedToken]:
        has_texts = self.has_texts
        return [(one.logprob, one.token_id, one.text if has_texts else None) for one in tokens]


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """The form of a request's answers."""

    id: str
    began_s: float  # when the request was received, as ``time.perf_counter``
    is_list: bool  # the answers are a list, even if there is one
    logprobs: LogprobForm | None

    def begun(self, index: int, text: str, usage: Usage) -> SglangAnswer:
        """An unfinished answer."""
        return SglangAnswer(text=text, output_ids=[], meta_info=self._meta(index, usage, None))

    def ended(self, index: int, answer: Answer) -> SglangAnswer:
        """A whole answer."""
        if answer.finish_reason == "length":
            finish = SglangFinish(type="length", length=answer.usage.output_tokens)
        else:
            finish = SglangFinish(type="stop", matched=answer.stop)
        meta = self._meta(index, answer.usage, finish)
        meta.e2e_latency = time.perf_counter() - self.began_s
        if (form := self.logprobs) is not None:
            prompt, prompt_tops = form.of_prompt(answer.prompt)
            output, output_tops = form.of_tokens(answer.tokens)
            meta.input_token_logprobs, meta.output_token_logprobs = [*prompt], output
            if form.num_top:
                meta.input_top_logprobs, meta.output_top_logprobs = prompt_tops, output_tops
        return SglangAnswer(text=answer.text, output_ids=[*answer.token_ids], meta_info=meta)

    def _meta(self, index: int, usage: Usage, finish: SglangFinish | None) -> SglangMeta:
        return SglangMeta(
            id=f"{self.id}_{index}" if self.is_list else self.id,
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.output_tokens,
            cached_tokens=usage.cached_tokens,
            finish_reason=finish,
        )


@dataclass(slots=True)
class _Written:
    """An unfinished answer, of which ``num_sent`` characters were sent."""

    parts: list[str] = field(default_factory=list)
    tokens: list[AnswerToken] = field(default_factory=list)
    prompt: PromptDelta | None = None
    num_chars: int = 0
    num_sent: int = 0

    def push(self, delta: TextDelta) -> None:
        self.parts.append(delta.text)
        self.tokens += delta.tokens
        self.num_chars += len(delta.text)

    @property
    def is_due(self) -> bool:
        return self.num_chars > self.num_sent and (self.num_chars - self.num_sent) * GROWTH >= self.num_sent

    def text(self) -> str:
        """The text so far, which counts as sent."""
        self.parts, self.num_sent = ["".join(self.parts)], self.num_chars
        return self.parts[0]


class AnswerEvents(CommentedEvents):
    """The events of one stream."""

    def __init__(self, form: AnswerForm, completion: Completion) -> None:
        self._form = form
        self._completion = completion
        self._written: dict[int, _Written] = {}

    def start(self, prompt_tokens: int) -> bytes:
        """Returns no bytes: each answer begins with its first text."""
        return b""

    def write(self, deltas: Sequence[CompletionDelta]) -> bytes:
        """The events of the answers that have ended, or have grown enough."""
        events: list[bytes] = []
        touched: dict[int, _Written] = {}
        for delta in deltas:
            own = touched[delta.index] = self._written.setdefault(delta.index, _Written())
            match delta:
                case PromptDelta():
                    own.prompt = delta
                case TextDelta():
                    own.push(delta)
                case AnswerEnded():
                    del touched[delta.index], self._written[delta.index]
                    events.append(self._event(delta.index, self._form.ended(delta.index, _whole(own, delta))))
        for index, own in touched.items():
            if own.is_due:
                usage = self._completion.make_usage(index)
                events.append(self._event(index, self._form.begun(index, own.text(), usage)))
        return b"".join(events)

    def end(self, usage: Usage) -> bytes:
        """The end of the stream."""
        return _DONE

    def _event(self, index: int, answer: SglangAnswer) -> bytes:
        answer.index = index if self._form.is_list else UNSET
        return event(_encode_json(answer))


def _whole(written: _Written, end: AnswerEnded) -> Answer:
    return Answer(
        written.text(),
        (),
        tuple(written.tokens),
        end.finish_reason,
        end.usage,
        end.stop,
        written.prompt,
        end.token_ids,
    )
