"""Runs one completion request on an engine.

A request becomes a context of the engine's generator, and each of its answers a generation. ``_AnswerReader``
and ``LogprobReader`` (in ``logprobs``) turn the progress of one answer into deltas.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from agentflow.engine.generator.context import EngineContext, list_texts, num_chars
from agentflow.engine.generator.generator import EngineGenerator
from agentflow.engine.grammar.compiler.messages import CompiledConstraint, Relaxed
from agentflow.engine.messages import Finished, Progress
from agentflow.engine.text.channel_output import ChannelOutput
from agentflow.engine.text.reasoning import (
    AnswerOutput,
    ReasoningFormat,
    finish_output,
    push_output,
    reasoning_marks,
    reasoning_values,
)
from agentflow.engine.text.tool_output import ToolOutput
from agentflow.engine.text.tools import answer_output
from agentflow.errors import AgentflowError, BadArgument
from agentflow.protocol.chat import (
    Arguments,
    CallBegun,
    CalledTool,
    Message,
    ReasoningPiece,
    ReplyPiece,
    TextPiece,
)
from agentflow.protocol.events import Usage
from agentflow.runtime.task_group import open_task_group
from agentflow.server.completion.checks import check_answer
from agentflow.server.completion.logprobs import LogprobReader, prompt_delta
from agentflow.server.completion.request import (
    AnswerEnded,
    AnswerToken,
    CheckedOutput,
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

COUNTED_CONTEXTS = 4
"""Prompts up to this multiple of the context are counted, so that errors tell clients how much to remove."""
_SEED_BITS = 62
# An odd number near 2**63 divided by the golden ratio keeps the seeds of one request's answers far apart.
_SEED_STEP = 5_700_357_409_661_598_991
# Some templates write a space before each answer, others remove it.
_ANY_ANSWERS = ("x", " x")


async def prompt_ids(generator: EngineGenerator, request: CompletionRequest) -> list[int]:
    """The token ids of the prompt that the model would get. Runs nothing on the engine."""
    most = COUNTED_CONTEXTS * generator.limits.max_tokens()
    values = _template_values(generator, request)
    context = generator.open(request.cache_salt, template_values=values, max_tokens=most)
    try:
        await _check_length(generator, request, most)
        await _fill(generator, request, context)
        return await generator.requests.prompt_ids(context)
    finally:
        generator.free(context)


class EngineRun:
    """Runs one request.

    Args:
        generator: The model.
        request: The request.
        first_index: The number of its first answer.
        caller: The place of the request in a program.
        most_logprobs: The limit of log-probabilities of the prompt.
        on_delta: Called with each delta.
        on_sent: Called when the request has been sent.
        on_scored: Called with the number of log-probabilities of the prompt, before they are read.
    """

    def __init__(
        self,
        generator: EngineGenerator,
        request: CompletionRequest,
        first_index: int,
        caller: Caller,
        *,
        most_logprobs: int,
        on_delta: Callable[[CompletionDelta], None],
        on_sent: Callable[[], None],
        on_scored: Callable[[int], None] | None,
    ) -> None:
        self._generator = generator
        self.num_answers = request.n
        self._request = request
        self._first_index = first_index
        self._caller = caller
        self._most_logprobs = most_logprobs
        self._on_delta = on_delta
        self._on_sent = on_sent
        self._on_scored = on_scored
        self._seed = secrets.randbits(_SEED_BITS) if request.params.seed is None else request.params.seed
        self._context: EngineContext | None = None
        self._scored: Finished | None = None
        self.relaxed: tuple[Relaxed, ...] = ()
        self.num_output_tokens = [0] * request.n  # the tokens of each answer so far
        self.times = Times()

    @property
    def num_prompt_tokens(self) -> int:
        return 0 if self._context is None else len(self._context.tokens.ids())

    async def run(self) -> None:
        generator, request = self._generator, self._request
        context = generator.open(
            request.cache_salt,
            priority=request.priority,
            patience_s=generator.patience_s,
            trace=self._caller.trace,
            template_values=_template_values(generator, request),
        )
        self._caller.advise(generator, context)
        contexts, self._context = [context], context
        try:
            await _check_length(generator, request, generator.limits.max_tokens(request.max_prompt_tokens))
            await _fill(generator, request, context)
            if request.max_prompt_tokens is not None:
                num_tokens = len(await generator.requests.prompt_ids(context))
                generator.limits.check_num_tokens(
                    num_tokens, generator.limits.max_tokens(request.max_prompt_tokens)
                )
            if request.returns_prompt or request.prompt_logprobs is not None:
                await self._return_prompt(context)
            if not request.generates:
                self._end_at_once()
                return
            if request.n > 1:
                # The first answer computes the prompt. If a separate request did, the prompt would count as
                # cached for all answers.
                contexts += await generator.fork(context, request.n - 1, ahead=False)
            async with open_task_group() as group:
                for number, one in enumerate(contexts):
                    group.start_soon(self._answer, number, one)
        finally:
            for one in contexts:
                generator.free(one)

    async def _return_prompt(self, context: EngineContext) -> None:
        """Begins each answer with the prompt. If its log-probabilities are requested, a separate request
        computes them, and generation then finds the prompt in the cache."""
        generator, request = self._generator, self._request
        token_ids = await generator.requests.prompt_ids(context)
        num_top = request.prompt_logprobs
        if num_top is not None:
            num_logprobs = len(token_ids) * (1 + num_top) * request.n
            if num_logprobs > self._most_logprobs:
                raise BadArgument(
                    f"with its alternatives, the prompt has {num_logprobs:,} log-probabilities; the limit is "
                    f"{self._most_logprobs:,}: request fewer alternatives, or shorten the prompt",
                    param="prompt",
                )
            if len(token_ids) > 1:
                self._scored = await generator.score_prompt(context, num_top)
            if self._on_scored is not None:
                self._on_scored(num_logprobs)
        prompt = await generator.requests.run_off_loop(
            len(token_ids) * (1 + (num_top or 0)),
            prompt_delta,
            generator.tokenizer,
            request,
            token_ids,
            self._scored,
        )
        for number in range(request.n):
            self._on_delta(replace(prompt, index=self._first_index + number))

    def _end_at_once(self) -> None:
        """Ends the answers of a request that generates nothing."""
        num_cached = 0 if self._scored is None else self._scored.cached_tokens
        usage = Usage(self.num_prompt_tokens, num_cached, 0)
        for number in range(self._request.n):
            self._on_sent()
            self._on_delta(AnswerEnded(self._first_index + number, "length", usage))

    async def _reasoning_format(self, context: EngineContext) -> ReasoningFormat | None:
        """The format of the reasoning that an answer may begin with."""
        prompt = self._request.prompt
        if isinstance(prompt, str | TokenIds) or reasoning_marks(context.tokens.template.source) is None:
            return None
        if isinstance(prompt, Continuation):
            context, _ = await _after_answer(self._generator, self._request, prompt.messages)
        await self._generator.requests.prompt_ids(context)
        budget = 0 if self._request.reasons is False else self._request.reasoning_budget
        return context.reasoning_format(budget)

    async def _answer(self, number: int, context: EngineContext) -> None:
        request, use, constraint = self._request, context.tools, self._request.constraint
        if use is not None:
            constraint = use.constraint(constraint)
        reasoning_format = await self._reasoning_format(context)
        seed = (self._seed + number * _SEED_STEP) % 2**63
        params = msgspec.structs.replace(request.params, seed=seed)
        logprobs = None
        if params.wants_logprobs:
            has_budget = reasoning_format is not None and reasoning_format.budget is not None
            has_jumps = constraint is not None or has_budget
            logprobs = LogprobReader(self._generator.tokenizer, params, has_jumps=has_jumps)
        output = answer_output(use, request.constraint, reasoning_format)
        reader = _AnswerReader(self._first_index + number, self._on_delta, logprobs=logprobs, output=output)
        unkept: set[str] = set()

        def on_compiled(compiled: CompiledConstraint) -> None:
            self.relaxed = compiled.relaxed
            unkept.update([one.name for one in compiled.relaxed])

        times = Times() if number else self.times

        def accept() -> None:
            times.accepted = time.perf_counter_ns()
            self._on_sent()

        def push(progress: Progress) -> None:
            times.first_token = times.first_token or time.perf_counter_ns()
            self.num_output_tokens[number] += len(progress.token_ids) - progress.num_dropped
            reader.push(progress)

        if constraint is None and use is not None and use.callable_names:
            # Nothing marks the beginning of a call in this model's notation, so no part of it is enforced.
            self.relaxed = tuple([Relaxed(name, ()) for name in use.callable_names])
            unkept.update(use.callable_names)
        try:
            self._generator.capabilities.require(constraint)
            end = await self._generator.complete(
                context,
                params,
                push,
                constraint,
                accept,
                reasoning_format=reasoning_format,
                on_compiled=on_compiled,
                calls=None if use is None else use.marks,
            )
        except AgentflowError as error:
            if error.param == "instead":
                error.param = "constraint"
            elif error.param == "constraint" and constraint is not request.constraint:
                error.param = "tools"
            raise
        if self._scored is not None:
            end = msgspec.structs.replace(end, cached_tokens=self._scored.cached_tokens)
        times.ended = time.perf_counter_ns()
        rest: list[AnswerToken] = []
        if logprobs is not None:
            rest = await self._generator.requests.run_off_loop(logprobs.num_left(end), logprobs.finish, end)
        reader.finish(end, rest)
        checks = await check_answer(self._generator, request, end, reader.outputs(), unkept) if unkept else ()
        # Before the end is sent: the client may send its next request as soon as it has it.
        await self._generator.keep_answer(context, end)
        reader.end(end, checks)
        self._generator.output_token_cache.put_answer(context, end, reader.message())
        if self._caller.prefills_next and request.n == 1 and isinstance(request.prompt, tuple):
            await self._generator.fill_next_turn(context, end, reader.message())


def _template_values(generator: EngineGenerator, request: CompletionRequest) -> dict[str, Any]:
    """The variables of the chat template. The request's own take precedence."""
    values = reasoning_values(generator.template.source, request.reasons, request.effort)
    return {**values, **request.template_values}


async def _check_length(generator: EngineGenerator, request: CompletionRequest, most: int) -> None:
    """Rejects a prompt that is too long in any encoding without encoding it, and one that is far too long at
    little cost."""
    prompt = request.prompt
    if isinstance(prompt, TokenIds):
        generator.limits.check_num_tokens(len(prompt.ids), most)
    elif isinstance(prompt, Continuation):
        generator.limits.check_num_tokens(len(prompt.ids), most)
        texts = list_texts(prompt.messages)
        generator.limits.check_length(sum(map(len, texts)), most)
        await generator.requests.check_texts(texts, most)
    elif isinstance(prompt, str):
        generator.limits.check_length(len(prompt), most)
        await generator.requests.check_texts([prompt], most)
    else:
        generator.limits.check_length(num_chars(request.conversation), most)
        await generator.requests.check_texts(list_texts(prompt), most)


async def _fill(generator: EngineGenerator, request: CompletionRequest, context: EngineContext) -> None:
    prompt = request.prompt
    if isinstance(prompt, str):
        # The client wrote all of it, including special tokens: no content has to be separated from markup.
        token_ids = await generator.requests.run_off_loop(
            len(prompt), generator.tokenizer.encode_markup, prompt
        )
        if not token_ids:
            raise BadArgument("the prompt is empty: give a text with at least one token", param="prompt")
        prefix = generator.tokenizer.prefix_ids
        if prefix and tuple(token_ids[: len(prefix)]) == prefix:  # written out by the client
            context.tokens.only(token_ids)
        else:
            context.tokens.generated(token_ids, prompt)
    elif isinstance(prompt, TokenIds):
        generator.limits.check_ids(prompt.ids)
        context.tokens.only(prompt.ids)
    elif isinstance(prompt, Continuation):
        after, num_before = await _after_answer(generator, request, prompt.messages)
        context.tokens.only((*prompt.ids, *after.tokens.ids()[num_before:]))
    else:
        context.tokens.attach_to(
            generator.rendered_prefixes, request.cache_salt.encode("utf-8", "backslashreplace")
        )
        conversation = request.conversation
        await generator.requests.run_off_loop(num_chars(conversation), conversation.check)
        await generator.fill_conversation(context, conversation, opens_turn=request.opens_turn)
        generator.keep(context, request.kept)


async def _after_answer(
    generator: EngineGenerator, request: CompletionRequest, messages: Sequence[Message]
) -> tuple[EngineContext, int]:
    """Returns a conversation with an answer, these turns, and the opening of the assistant's next turn; and
    the number of ids up to the end of the answer's text. The ids after them can follow any other answer.
    ``BadArgument`` if the template rewrites earlier turns."""
    for answer in _ANY_ANSWERS:
        context = generator.open(request.cache_salt, template_values=_template_values(generator, request))
        context.tokens.turn(Message("user", answer))
        context.begin_role("assistant")
        context.tokens.generated(generator.tokenizer.encode(answer, continues=True), answer)
        before = await generator.token_ids(context)
        context.end_role()
        for message in messages:
            context.begin_role(message.role)
            context.fill(message.content)
            context.end_role()
        context.begin_role("assistant")
        token_ids = await generator.requests.prompt_ids(context)
        if token_ids[: len(before)] == before:
            return context, len(before)
    text = "the chat template rewrites earlier turns: send the whole conversation instead"
    raise BadArgument(text, param="context")


class _AnswerReader:
    """Turns the progress of answer ``index`` into deltas. ``output`` separates reasoning and tool calls from
    text, if the answer may have some."""

    def __init__(
        self,
        index: int,
        on_delta: Callable[[CompletionDelta], None],
        *,
        logprobs: LogprobReader | None = None,
        output: AnswerOutput | None = None,
    ) -> None:
        self._index = index
        self._on_delta = on_delta
        self._logprobs = logprobs
        self._output = output
        self._num_chars = 0
        self._num_tokens = 0  # the tokens with log-probabilities so far
        self._undecided: list[AnswerToken] = []  # tokens either of reasoning or of the answer
        self._texts: list[str] = []
        self._calls: list[tuple[str, list[str]]] = []

    def push(self, progress: Progress) -> None:
        self._num_chars += len(progress.text)
        tokens = [] if self._logprobs is None else self._logprobs.push(progress)
        self._num_tokens += len(tokens)
        if self._output is None:
            self._emit_text(progress.text, tokens)
        elif progress.text or tokens:
            self._read(self._output, progress, tokens)

    def _read(self, output: AnswerOutput, progress: Progress, tokens: list[AnswerToken]) -> None:
        reasoning = None if isinstance(output, ToolOutput) else output
        is_reasoning = isinstance(output, ChannelOutput) and output.is_reasoning
        was_head = isinstance(output, ChannelOutput) and output.is_undecided
        pieces = push_output(output, progress.text, progress.answer_at)
        tokens, self._undecided = [*self._undecided, *tokens], []
        if reasoning is not None and reasoning.is_undecided:
            self._undecided = tokens
            return
        is_reasoning = is_reasoning or (reasoning is not None and reasoning.is_reasoning)
        if isinstance(output, ChannelOutput) and was_head and output.is_text and not pieces:
            is_reasoning = True  # the head of a text answer, which is not part of its text
        self._emit_pieces(pieces, tokens, is_reasoning=is_reasoning)

    def finish(self, end: Finished, tokens: list[AnswerToken]) -> None:
        """Ends the text. ``tokens``: the rest of the tokens with log-probabilities."""
        rest = end.text[self._num_chars :]
        tokens = self._undecided + tokens
        if reasoning := tokens[: max(0, end.reasoning_tokens - self._num_tokens)]:
            self._on_delta(ReasoningDelta(self._index, "", tuple(reasoning)))
            tokens = tokens[len(reasoning) :]
        if self._output is None:
            self._emit_text(rest, tokens)
        else:
            is_truncated = end.finish_reason == "length"
            self._emit_pieces(
                finish_output(self._output, rest, end.answer_at, is_truncated=is_truncated), tokens
            )

    def end(self, end: Finished, checks: tuple[CheckedOutput, ...]) -> None:
        usage = Usage(
            end.prompt_tokens,
            end.cached_tokens,
            end.output_tokens,
            reasoning_tokens=end.reasoning_tokens,
            miss_reason=end.miss_reason,
        )
        ids = tuple(end.token_ids)
        self._on_delta(AnswerEnded(self._index, self._reason(end), usage, end.stopped_by, ids, checks))

    def outputs(self) -> list[tuple[str, str]]:
        """The calls, as names of tools with arguments; or the text, with an empty name."""
        return [(name, "".join(parts)) for name, parts in self._calls or [("", self._texts)]]

    def message(self) -> Message:
        """The answer that the client gets, without reasoning and the ids of calls."""
        calls = [CalledTool("", *call) for call in self.outputs() if self._calls]
        return Message("assistant", "".join(self._texts), tool_calls=tuple(calls))

    def _reason(self, end: Finished) -> FinishReason:
        if end.finish_reason == "length":
            return "length"
        if self._output is None or not self._output.num_calls:
            return "stop"
        # A call that a stop string has cut must look truncated, so that no client runs it.
        return "tool_calls" if self.message().tool_calls[-1].is_whole else "length"

    def _emit_text(self, text: str, tokens: Sequence[AnswerToken]) -> None:
        self._texts.append(text)
        if text or tokens:
            self._on_delta(TextDelta(self._index, text, tuple(tokens)))

    def _emit_pieces(
        self, pieces: Sequence[ReplyPiece], tokens: Sequence[AnswerToken], *, is_reasoning: bool = False
    ) -> None:
        """``is_reasoning``: at least the first of the tokens belongs to reasoning."""
        assert self._output is not None
        if tokens and is_reasoning:
            self._on_delta(ReasoningDelta(self._index, "", tuple(tokens)))
        elif tokens:
            self._emit_text("", tokens)
        call = self._output.num_calls - sum(isinstance(piece, CallBegun) for piece in pieces) - 1
        for piece in pieces:
            match piece:
                case TextPiece():
                    self._emit_text(piece.text, ())
                case ReasoningPiece():
                    self._on_delta(ReasoningDelta(self._index, piece.text))
                case CallBegun():
                    call += 1
                    self._calls.append((piece.name, []))
                    self._on_delta(ToolCallBegun(self._index, call, piece.id, piece.name))
                case Arguments():
                    self._calls[-1][1].append(piece.text)
                    self._on_delta(ToolArguments(self._index, call, piece.text))
