"""Runs completion requests on a model behind an API, with the deltas that an engine's answers have.

A request becomes a context of the model's generator, and each of its answers a call. Parameters that the
model does not support are rejected before anything is sent.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import anyio
import msgspec

from agentflow.engine.grammar.compiler.messages import PartedConstraint, Relaxed
from agentflow.errors import EngineFailed, InvalidValue, NotSupported, PromptTooLong, RequestRefused
from agentflow.protocol.chat import Arguments, CallBegun, CalledTool, ReplyReader, TextPiece
from agentflow.protocol.constraint import Constraint
from agentflow.protocol.events import Usage
from agentflow.protocol.sampling import GenParams, SamplingParams
from agentflow.runtime.generator import Generated, StateHint
from agentflow.runtime.task_group import open_task_group
from agentflow.server.completion.request import (
    AnswerEnded,
    CompletionDelta,
    CompletionRequest,
    Continuation,
    FinishReason,
    ReasoningDelta,
    TextDelta,
    Times,
    TokenIds,
    ToolArguments,
    ToolCallBegun,
)
from agentflow.server.http.caller import Caller
from agentflow.server.models.api_model import CHARS_PER_TOKEN, TenantGenerator

EFFORT: Final = "effort"
"""The ``param`` of errors about the reasoning effort."""
# An error of the API within this time sets the answer's status. Then a stream begins, which keeps its
# connection open.
ACCEPTED_AFTER_S = 10.0
_SENT_IF_GIVEN = ("max_tokens", "temperature", "top_p")
_OF_CONSTRAINTS = ("schema", "regex", "choices", "grammar", "tags")
_NEUTRAL = SamplingParams()


def find_params(request: CompletionRequest) -> GenParams:
    """The parameters that the client gave: an API has other defaults, and rejects many parameters."""
    found: dict[str, Any] = {}
    for name in GenParams.__struct_fields__:
        value = getattr(request.params, name)
        is_sent = name in _SENT_IF_GIVEN or value != getattr(_NEUTRAL, name)
        if is_sent and name not in request.unset:
            found[name] = value
    return GenParams(**{**found, "stream_reasoning": True})


def checked_params(generator: TenantGenerator, request: CompletionRequest) -> GenParams:
    """Returns the parameters, including the parameters of reasoning. ``NotSupported``, whose ``param`` is the
    name, for a parameter that the model does not support."""
    model, features = generator.capabilities.model, generator.capabilities

    def refuse(param: str, why: str) -> NotSupported:
        return NotSupported(f"{model} is behind an API: {why}", param=param)

    match request.prompt:
        case TokenIds():
            raise refuse("prompt", "it accepts text, not token ids")
        case Continuation():
            raise refuse("context", "it accepts messages, not token ids")
        case str() if not features.plain_text:
            raise refuse("prompt", "it accepts only conversations")
        case _:
            pass
    if request.params.wants_logprobs:
        raise refuse("logprobs", "its log-probabilities are not passed on")
    if request.prompt_logprobs is not None or request.returns_prompt:
        raise refuse("prompt", "its prompts cannot be returned")
    if not request.generates:
        raise refuse("max_tokens", "it generates at least one token")
    params = find_params(request)
    can_limit = features.accepts("max_reasoning_tokens")
    if request.effort is not None and not (request.reasons is False and can_limit):
        raise refuse(EFFORT, "its reasoning effort cannot be set")
    if request.reasons is False and not can_limit and features.reasons:
        raise refuse("max_reasoning_tokens", "its reasoning cannot be turned off")
    if request.reasons is False and can_limit:
        params = msgspec.structs.replace(params, max_reasoning_tokens=0)
    elif request.reasoning_budget is not None:
        params = msgspec.structs.replace(params, max_reasoning_tokens=request.reasoning_budget)
    elif request.reasons and not can_limit:
        raise refuse(EFFORT, "reasoning cannot be turned on or off")
    features.require_params(params)
    return params


class ApiRun:
    """Runs one request.

    Args:
        generator: The model.
        request: The request.
        first_index: The number of its first answer.
        caller: The place of the request in a program.
        on_delta: Called with each delta.
        on_sent: Called when the request has been sent.
    """

    def __init__(
        self,
        generator: TenantGenerator,
        request: CompletionRequest,
        first_index: int,
        caller: Caller,
        *,
        on_delta: Callable[[CompletionDelta], None],
        on_sent: Callable[[], None],
    ) -> None:
        self.num_answers = request.n
        self.relaxed: tuple[Relaxed, ...] = ()
        self.times = Times()
        self.num_prompt_tokens = 0  # an estimate, until an answer has ended
        self._generator = generator
        self._request = request
        self._first_index = first_index
        self._caller = caller
        self._on_delta = on_delta
        self._on_sent = on_sent
        self._answers = [_Answer(first_index + number, on_delta) for number in range(request.n)]

    @property
    def num_output_tokens(self) -> list[int]:
        """The estimated tokens of each answer."""
        return [-(-answer.num_chars // CHARS_PER_TOKEN) for answer in self._answers]

    async def run(self) -> None:
        generator, request = self._generator, self._request
        params = checked_params(generator, request)
        constraint = _plain(request.constraint)
        with _naming_constraint(constraint):
            generator.capabilities.require(constraint)
        contexts = [generator.open(request.cache_salt)]
        try:
            if self._caller.trace:
                generator.hint(contexts[0], StateHint(trace=self._caller.trace))
            if isinstance(request.prompt, str):
                generator.fill(contexts[0], request.prompt)
            else:
                await generator.converse(contexts[0], request.conversation.check())
            self.num_prompt_tokens = len(generator.text(contexts[0])) // CHARS_PER_TOKEN
            most = request.max_prompt_tokens
            if most is not None and self.num_prompt_tokens > most:
                raise PromptTooLong(
                    f"the prompt has about {self.num_prompt_tokens:,} tokens, and the limit is {most:,}"
                )
            if request.n > 1:
                contexts += await generator.fork(contexts[0], request.n - 1)
            async with open_task_group() as group:
                for number, context in enumerate(contexts):
                    own = params
                    if params.seed is not None:
                        own = msgspec.structs.replace(params, seed=(params.seed + number) % 2**63)
                    group.start_soon(self._answer, self._answers[number], context, own, constraint)
        finally:
            for context in contexts:
                generator.free(context)

    async def _answer(
        self, answer: _Answer, context: Any, params: GenParams, constraint: Constraint | None
    ) -> None:
        times = self.times if answer.index == self._first_index else Times()
        accepted = anyio.Event()

        def accept() -> None:
            if not accepted.is_set():
                accepted.set()
                times.accepted = time.perf_counter_ns()
                self._on_sent()

        async def accept_late() -> None:
            with anyio.move_on_after(ACCEPTED_AFTER_S):
                await accepted.wait()
            accept()

        def has_begun() -> None:
            times.first_token = times.first_token or time.perf_counter_ns()
            accept()

        answer.on_begin = has_begun
        async with open_task_group() as group:
            group.start_soon(accept_late)
            generated = await self._generated(answer, context, params, constraint)
            has_begun()
            times.ended = time.perf_counter_ns()
            group.cancel_scope.cancel()
        self.num_prompt_tokens = generated.usage.prompt_tokens or self.num_prompt_tokens
        answer.end(generated, self._request.params.stop)

    async def _generated(
        self, answer: _Answer, context: Any, params: GenParams, constraint: Constraint | None
    ) -> Generated:
        generator = self._generator
        generate, on_text = generator.generate, answer.add_text
        if self._request.tools:
            generate, on_text = generator.reply, answer.add_notation
        try:
            with _naming_constraint(constraint):
                return await generate(context, params, on_text, constraint, answer.add_reasoning)
        except InvalidValue as error:  # the answer violates the constraint
            raise EngineFailed(str(error)) from error


@contextmanager
def _naming_constraint(constraint: Constraint | None) -> Iterator[None]:
    """Sets ``param`` of errors about the constraint."""
    try:
        yield
    except RequestRefused as error:
        if error.param in _OF_CONSTRAINTS or (error.param is None and constraint is not None):
            error.param = "constraint"
        raise


def _plain(constraint: Constraint | None) -> Constraint | None:
    """The constraint without the parts that a compiler of this server may relax."""
    if not isinstance(constraint, PartedConstraint):
        return constraint
    fields = {name: getattr(constraint, name) for name in Constraint.__struct_fields__}
    return Constraint(**{**fields, "instead": _plain(constraint.instead)})


class _Answer:
    """Turns the text of one answer into deltas. ``on_begin`` is called before each."""

    def __init__(self, index: int, on_delta: Callable[[CompletionDelta], None]) -> None:
        self.index = index
        self.num_chars = 0
        self.on_begin: Callable[[], None] = _nothing
        self._on_delta = on_delta
        self._notation = ReplyReader()
        self._call = -1
        self._arguments: list[str] = []  # the arguments of the latest call
        self._is_in_call = False
        self._held: list[str] = []  # reasoning within the arguments of a call, which comes after them

    def add_text(self, text: str) -> None:
        self._emit(TextDelta(self.index, text), text)

    def add_reasoning(self, text: str) -> None:
        if self._is_in_call:
            self._held.append(text)
        else:
            self._emit(ReasoningDelta(self.index, text), text)

    def add_notation(self, text: str) -> None:
        """Reads more of a reply, in which tool calls are notation."""
        for piece in self._notation.push(text):
            match piece:
                case TextPiece():
                    self._end_call()
                    self.add_text(piece.text)
                case CallBegun():
                    self._end_call()
                    self._is_in_call = True
                    self._call += 1
                    self._arguments = []
                    self._emit(ToolCallBegun(self.index, self._call, piece.id, piece.name), piece.name)
                case Arguments():
                    self._arguments.append(piece.text)
                    self._emit(ToolArguments(self.index, self._call, piece.text), piece.text)

    def _end_call(self) -> None:
        held, self._held, self._is_in_call = "".join(self._held), [], False
        self.add_reasoning(held)

    def end(self, generated: Generated, stops: Sequence[str]) -> None:
        self._end_call()
        stop = stops[0] if generated.finish_reason == "stop" and len(stops) == 1 else None
        self._on_delta(AnswerEnded(self.index, self._reason(generated), _counted(generated.usage), stop))

    def _reason(self, generated: Generated) -> FinishReason:
        if generated.finish_reason == "length":
            return "length"
        if self._call < 0:
            return "stop"
        # A call that was cut must look truncated, so that no client runs it.
        return "tool_calls" if CalledTool("", "", "".join(self._arguments)).is_whole else "length"

    def _emit(self, delta: CompletionDelta, text: str) -> None:
        if text:
            self.num_chars += len(text)
            self.on_begin()
            self._on_delta(delta)


def _counted(usage: Usage) -> Usage:
    """The usage without the forced tokens and saved calls that only programs have."""
    return msgspec.structs.replace(usage, forced_tokens=0, saved_calls=0, saved_tokens=0)


def _nothing() -> None:
    """The default of ``on_begin``."""
