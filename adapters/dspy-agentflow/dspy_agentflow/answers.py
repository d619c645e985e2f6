"""Calls of the model for DSPy, and the completion of answers that ``max_tokens`` truncated.

``Asked`` is one call. ``complete`` and ``stream`` make it; an answer that was truncated within its adapter's
format is continued under a constraint that allows only the missing part. While an answer is streamed,
``CertainText`` holds back an unfinished value, because the continuation may generate it again.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Generator, Iterator, Sequence
from contextlib import aclosing, closing
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, Final, TypeVar

import agentflow as af
from agentflow.integrations import (
    Answer,
    Delta,
    ModelCall,
    ModelConnection,
    TextPiece,
    ToolChoice,
    ToolSpec,
    conversation_with,
    read_reply,
)
from dspy_agentflow.answer_format import AnswerFormat, Rest
from dspy_agentflow.call_notes import WIRED_CALL
from dspy_agentflow.programs import CALLS

# The maximum number of tokens for completing a truncated answer: the missing values are short.
MAX_TOKENS_TO_END: Final = 1024
# Sampling options that apply only to the answer as a whole.
_ONLY_WHOLE: Final = ("min_tokens", "stop", "stop_regex", "ignore_eos")


@dataclass(frozen=True)
class Asked:
    """A call of the model. ``sampling`` and ``constraint``: arguments of ``af.reply``. A truncated answer can
    be completed if the constraint comes from ``answer_format``. ``is_streamed``: the caller reads the answer
    while it is generated. Transient failures are retried ``max_retries`` times."""

    messages: list[af.Message]
    sampling: dict[str, Any]
    tools: list[ToolSpec] = field(default_factory=list)
    choice: ToolChoice = field(default_factory=ToolChoice)
    constraint: dict[str, Any] = field(default_factory=dict)
    answer_format: AnswerFormat | None = None
    n: int = 1
    cache_salt: str = ""
    deadline_s: float | None = None
    is_streamed: bool = False
    max_retries: int = 0

    def call(self) -> ModelCall:
        """Returns the call for ``ModelConnection``. Raises ``BadArgument`` if it is invalid."""
        prompt = conversation_with(self.messages, self.tools, self.choice)
        output = af.reply("answer", **self.sampling, **self.constraint)
        return ModelCall(prompt, output, n=self.n, cache_salt=self.cache_salt, deadline_s=self.deadline_s)

    def rest_of(self, answer: Answer) -> Rest | None:
        """Returns the missing part of an answer that was truncated within its format, else None."""
        if self.answer_format is None or answer.finish_reason != "length":
            return None
        reply = read_reply(answer.text)
        return None if reply.tool_calls else self.answer_format.rest(reply.text)

    def for_rest(self, rest: Rest) -> Asked:
        """Returns the call that generates the rest. The text before it is in the prefix cache."""
        kept = [af.Message("assistant", rest.kept)] if rest.kept else []
        sampling = {name: value for name, value in self.sampling.items() if name not in _ONLY_WHOLE}
        sampling["max_tokens"] = MAX_TOKENS_TO_END
        return replace(
            self,
            messages=[*self.messages, *kept],
            sampling=sampling,
            choice=ToolChoice("none"),
            constraint=rest.constraint,
            n=1,
        )


def complete(connection: ModelConnection, asked: Asked) -> list[Answer]:
    """Returns the complete answers, by index; blocks until then."""
    program = CALLS.program_of(connection)
    answers = connection.complete(asked.call(), *program, max_retries=asked.max_retries)
    for place, answer in enumerate(answers):
        if (rest := asked.rest_of(answer)) is not None:
            call = asked.for_rest(rest).call()
            [end] = connection.complete(call, *program, max_retries=asked.max_retries)
            answers[place] = _joined(answer, end, rest)
    return answers


async def acomplete(connection: ModelConnection, asked: Asked) -> list[Answer]:
    """Like ``complete``, without blocking the event loop. A call of a wired program may get its prompt by
    reference."""
    program = CALLS.program_of(connection)
    wired_call = WIRED_CALL.get()
    answers = None if wired_call is None else await wired_call.answers(connection, asked, *program)
    if wired_call is not None:
        asked = await wired_call.filled(asked)
    if answers is None:
        answers = await connection.acomplete(asked.call(), *program, max_retries=asked.max_retries)
    for place, answer in enumerate(answers):
        if (rest := asked.rest_of(answer)) is not None:
            call = asked.for_rest(rest).call()
            [end] = await connection.acomplete(call, *program, max_retries=asked.max_retries)
            answers[place] = _joined(answer, end, rest)
    return answers


def stream(connection: ModelConnection, asked: Asked) -> Generator[Delta | Answer, None, None]:
    """Yields the answers piece by piece and then complete; blocks between them."""
    program = CALLS.program_of(connection)
    text = CertainText(asked.answer_format if asked.is_streamed else None)
    truncated: list[tuple[Answer, Rest]] = []
    call, num = asked.call(), asked.max_retries
    with closing(connection.stream(call, *program, max_retries=num)) as events:
        for event in events:
            if isinstance(event, Answer) and (rest := asked.rest_of(event)) is not None:
                truncated.append((event, rest))
            else:
                yield from text.events(event)
    for answer, rest in truncated:
        text.continue_after(rest)
        call = asked.for_rest(rest).call()
        with closing(connection.stream(call, *program, max_retries=num)) as events:
            for event in events:
                yield from text.events(_continued(event, answer, rest))


async def astream(connection: ModelConnection, asked: Asked) -> AsyncGenerator[Delta | Answer, None]:
    """Like ``stream``, without blocking the event loop."""
    program = CALLS.program_of(connection)
    text = CertainText(asked.answer_format if asked.is_streamed else None)
    truncated: list[tuple[Answer, Rest]] = []
    call, num = asked.call(), asked.max_retries
    async with aclosing(connection.astream(call, *program, max_retries=num)) as events:
        async for event in events:
            if isinstance(event, Answer) and (rest := asked.rest_of(event)) is not None:
                truncated.append((event, rest))
                continue
            for one in text.events(event):
                yield one
    for answer, rest in truncated:
        text.continue_after(rest)
        call = asked.for_rest(rest).call()
        async with aclosing(connection.astream(call, *program, max_retries=num)) as events:
            async for event in events:
                for one in text.events(_continued(event, answer, rest)):
                    yield one


def _continued(event: Delta | Answer, answer: Answer, rest: Rest) -> Delta | Answer:
    return Delta(answer.index, event.piece) if isinstance(event, Delta) else _joined(answer, event, rest)


def _joined(answer: Answer, end: Answer, rest: Rest) -> Answer:
    """Returns a truncated answer with its end. Its finish reason stays ``length``. Tokens that are not within
    the kept text, and their log-probabilities, are left out."""
    text = rest.kept + read_reply(end.text).text
    num = _num_kept(answer, rest.kept)
    logprobs, top, tokens = answer.logprobs, answer.top_logprobs, answer.tokens
    return replace(
        answer,
        text=json.dumps([{"text": text}], separators=(",", ":"), ensure_ascii=False),
        usage=answer.usage + end.usage,
        logprobs=_with_end(logprobs, end.logprobs, num),
        top_logprobs=_with_end(top, end.top_logprobs, num),
        tokens=_with_end(tokens, end.tokens, num),
    )


def _num_kept(answer: Answer, kept: str) -> int | None:
    """Returns the number of an answer's tokens within the kept text; None if that is unknown."""
    if kept == read_reply(answer.text).text:
        return len(answer.logprobs or ())
    if answer.tokens is None:
        return None
    ends = accumulate([len(token) for token in answer.tokens])
    return sum([end <= len(kept) for end in ends])


ItemT = TypeVar("ItemT")


def _with_end(
    first: tuple[ItemT, ...] | None, end: tuple[ItemT, ...] | None, num: int | None
) -> tuple[ItemT, ...] | None:
    return None if first is None or end is None or num is None else first[:num] + end


def tokens_of(answer: Answer) -> Iterator[tuple[str, float, Sequence[Any]]]:
    """Yields the text of each token with its log-probability, and the likeliest tokens at its place. Omits a
    token that was re-encoded at the end of the text, which has no log-probability."""
    logprobs = answer.logprobs or ()
    places = answer.top_logprobs or [None] * len(logprobs)
    texts = answer.tokens or [None] * len(logprobs)
    for text, logprob, place in zip(texts, logprobs, places, strict=True):
        likely = place or ()
        if logprob is None:
            continue
        if text is None:  # an earlier version of the server sends no texts
            text = next((one.text for one in likely if one.logprob == logprob), "")
        yield text, logprob, likely


class CertainText:
    """The text of one streamed answer, except the part that may be generated again if ``max_tokens``
    truncates it. Without a format, all text is passed on immediately."""

    def __init__(self, answer_format: AnswerFormat | None) -> None:
        self._is_held = answer_format is not None
        self._format = answer_format
        self._text = ""
        self._num_sent = 0

    def events(self, event: Delta | Answer) -> Iterator[Delta | Answer]:
        """Yields the events to send after this one was received."""
        if not self._is_held or (isinstance(event, Delta) and not isinstance(event.piece, TextPiece)):
            yield event
            return
        if isinstance(event, Delta) and isinstance(event.piece, TextPiece):
            self._text += event.piece.text
        num_certain = len(self._text)
        if self._format is not None and isinstance(event, Delta):
            num_certain = self._format.num_certain(self._text)
        if num_certain > self._num_sent:
            yield Delta(event.index, TextPiece(self._text[self._num_sent : num_certain]))
            self._num_sent = num_certain
        if isinstance(event, Answer):
            yield event

    def continue_after(self, rest: Rest) -> None:
        """Continues a truncated answer after ``rest.kept``. Text sent beyond that is generated again."""
        self._text, self._format = rest.kept, None
