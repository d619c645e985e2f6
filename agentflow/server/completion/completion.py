"""Runs completion requests on a tenant's generator and yields their deltas as they arrive.

::

    async with completing(generator, request) as completion:
        while deltas := await completion.next():
            …

Several requests run as one: their answers are numbered consecutively, and an error of one is an error of all.
Leaving the block aborts the answers that still run. Deltas that are not fetched in time are merged, so a slow
consumer gets fewer and larger ones.

``Completion`` collects the deltas of all requests, ``_Run`` runs one request on an engine and ``ApiRun`` (in
``api_run``) on a model behind an API, and ``_AnswerReader`` and
``LogprobReader`` (in ``logprobs``) turn the engine's progress on one answer into deltas.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import anyio
import msgspec

from agentflow.engine.generator.context import EngineContext, num_chars, texts_of
from agentflow.engine.generator.generator import EngineGenerator
from agentflow.engine.grammar.compiler.messages import CompiledConstraint, Relaxed
from agentflow.engine.messages import Finished, Progress
from agentflow.engine.text.channel_output import ChannelOutput
from agentflow.engine.text.reasoning import (
    AnswerOutput,
    Thinking,
    finish_output,
    push_output,
    reasoning_marks,
    thinking_values,
)
from agentflow.engine.text.tool_output import ToolOutput
from agentflow.engine.text.tools import answer_output
from agentflow.errors import AgentflowError, BadArgument, faults_of
from agentflow.protocol.chat import (
    Arguments,
    CallBegun,
    CalledTool,
    Message,
    Piece,
    ReasoningPiece,
    TextPiece,
)
from agentflow.protocol.events import Usage
from agentflow.runtime.task_group import first_of, open_task_group
from agentflow.server.completion.api_run import ApiRun
from agentflow.server.completion.checks import check_answer
from agentflow.server.completion.logprobs import LogprobReader, prompt_delta
from agentflow.server.completion.request import (
    MAX_LOGPROB_TOKENS,
    Answer,
    AnswerEnded,
    Check,
    CompletionDelta,
    CompletionRequest,
    Continuation,
    FinishReason,
    ReasoningDelta,
    TextDelta,
    Times,
    TokenIds,
    TokenLogprob,
    ToolArguments,
    ToolCallBegun,
    answers_of,
    merged,
)
from agentflow.server.http.caller import ANYONE, Caller
from agentflow.server.models.models import TextGenerator

COUNTED_CONTEXTS = 4
"""Prompts of up to this many contexts are counted, so that clients learn how much to leave out."""
_SEED_BITS = 62
# An odd number near 2**63 divided by the golden ratio keeps the seeds of one request's answers far apart.
_SEED_STEP = 5_700_357_409_661_598_991
# Some templates write a space before each answer, others remove it.
_ANY_ANSWERS = ("x", " x")


@asynccontextmanager
async def completing(
    generator: TextGenerator,
    *requests: CompletionRequest,
    caller: Caller = ANYONE,
    on_cut: Callable[[Usage], None] | None = None,
) -> AsyncIterator[Completion]:
    """Runs the requests while the scope lasts.

    Args:
        caller: where the requests come from.
        on_cut: receives the usage so far if the scope ends before the answers are complete.

    Raises:
        BadArgument: invalid parameters. The ``param`` is ``prompt``, ``constraint`` or ``tools``, or a
            sampling parameter.
        RateLimited: the tenant may not send this many requests.
    """
    for request in requests:
        request.params.check()
        if request.constraint is not None:
            with faults_of("constraint"):
                request.constraint.check()
    num_scored = sum(request.prompt_logprobs is not None for request in requests)
    generator.check_gate(num_scored + sum(request.n for request in requests if request.generates))
    completion = Completion(generator, requests, caller)
    try:
        async with open_task_group() as group:
            for run in completion.runs:
                group.start_soon(completion.follow, run)
            yield completion
            group.cancel_scope.cancel()
    finally:
        if on_cut is not None and completion.is_accepted and not completion.is_complete:
            on_cut(completion.usage_so_far())


async def prompt_ids(generator: EngineGenerator, request: CompletionRequest) -> list[int]:
    """The token ids of the prompt, as the model would be given them. Runs nothing on the engine."""
    most = COUNTED_CONTEXTS * generator.limits.max_tokens()
    values = _template_values(generator, request)
    context = generator.open(request.cache_salt, template_values=values, max_tokens=most)
    try:
        await _check_length(generator, request, most)
        await _fill(generator, request, context)
        return await generator.prompt_ids(context)
    finally:
        generator.free(context)


class Completion:
    """Requests that run, and the deltas of their answers. ``completing`` creates it."""

    def __init__(
        self, generator: TextGenerator, requests: Sequence[CompletionRequest], caller: Caller
    ) -> None:
        self._num_answers = 0
        self.runs: list[_Run | ApiRun] = []
        for request in requests:
            place = (request, self._num_answers, caller)
            if isinstance(generator, EngineGenerator):
                most = MAX_LOGPROB_TOKENS // len(requests)
                run: _Run | ApiRun = _Run(
                    generator, *place, most_logprobs=most, on_delta=self._add, on_sent=self._count_sent
                )
            else:
                run = ApiRun(generator, *place, on_delta=self._add, on_sent=self._count_sent)
            self.runs.append(run)
            self._num_answers += request.n
        self._num_sent = 0
        self._num_running = len(requests)
        self._failure: Exception | None = None
        self._deltas: list[CompletionDelta] = []
        self._checks: list[Check] = []
        self._usages: dict[int, Usage] = {}  # of each answer that has ended
        self._changed = anyio.Event()

    @property
    def num_prompt_tokens(self) -> int:
        """The prompt tokens of the first request, once it is accepted."""
        return self.runs[0].num_prompt_tokens

    @property
    def times(self) -> Times:
        """The times of the first request."""
        return self.runs[0].times

    @property
    def relaxed(self) -> tuple[Relaxed, ...]:
        """The parts of the client's schemas that no grammar enforces, once all requests are accepted."""
        return tuple(dict.fromkeys([one for run in self.runs for one in run.relaxed]))

    @property
    def checks(self) -> list[Check]:
        """The checks of calls and answers under relaxed schemas, at the end."""
        return self._checks

    @property
    def usage(self) -> Usage:
        """The usage of all answers, at the end. Tokens that the first answer of a prompt computes do not
        count as cached, although the other answers find them in the cache."""
        total, start = Usage(), 0
        for run in self.runs:
            usages = [self._usages[start + number] for number in range(run.num_answers)]
            total += Usage(
                usages[0].prompt_tokens,
                min(usage.cached_tokens for usage in usages),
                sum(usage.output_tokens for usage in usages),
                reasoning_tokens=sum(usage.reasoning_tokens for usage in usages),
                cost=sum(usage.cost for usage in usages),
                miss_reason=usages[0].miss_reason,
            )
            start += run.num_answers
        return total

    def usage_so_far(self) -> Usage:
        """The tokens of the prompts, and of all answers so far. Cached tokens are known at the end."""
        num_prompt_tokens = sum(run.num_prompt_tokens for run in self.runs)
        return Usage(num_prompt_tokens, 0, sum(sum(run.num_output_tokens) for run in self.runs))

    def usage_of(self, index: int) -> Usage:
        """As ``usage_so_far``, of one answer that has not ended."""
        for run in self.runs:
            if index < run.num_answers:
                break
            index -= run.num_answers
        return Usage(run.num_prompt_tokens, 0, run.num_output_tokens[index])

    @property
    def is_accepted(self) -> bool:
        """Whether the engine's queue has all requests."""
        return self._num_sent == self._num_answers

    @property
    def is_complete(self) -> bool:
        """Whether all answers have ended."""
        return len(self._usages) == self._num_answers

    async def until_accepted(self) -> None:
        """Waits until the engine's queue has all requests. Raises the error of one that is rejected."""
        while self._num_sent < self._num_answers and not self._has_ended:
            await self._changed.wait()
        if self._failure is not None and (self._num_sent < self._num_answers or not self._deltas):
            raise self._failure

    async def next(self) -> list[CompletionDelta]:
        """The deltas since the last call, merged; waits for some. Empty at the end. An error is raised after
        the deltas that preceded it."""
        while not self._deltas and not self._has_ended:
            await self._changed.wait()
        if not self._deltas and self._failure is not None:
            raise self._failure
        deltas, self._deltas = self._deltas, []
        return merged(deltas) if len(deltas) > 1 else deltas

    async def rest(self) -> list[CompletionDelta]:
        """All further deltas, at the end."""
        deltas: list[CompletionDelta] = []
        while some := await self.next():
            deltas += some
        return deltas

    async def answers(self) -> list[Answer]:
        """All answers, at the end. No deltas may have been fetched."""
        return answers_of(await self.rest(), self._num_answers)

    async def follow(self, run: _Run | ApiRun) -> None:
        """Runs one request to its end."""
        try:
            await run.run()
        except Exception as error:
            self._failure = self._failure or first_of(error)
        self._num_running -= 1
        self._notify()

    @property
    def _has_ended(self) -> bool:
        return not self._num_running or self._failure is not None

    def _count_sent(self) -> None:
        self._num_sent += 1
        self._notify()

    def _add(self, delta: CompletionDelta) -> None:
        self._deltas.append(delta)
        if isinstance(delta, AnswerEnded):
            self._usages[delta.index] = delta.usage
            self._checks += delta.checks
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()


class _Run:
    """One request, whose answers are numbered from ``first_index``. ``most_logprobs``: the limit for
    its prompt."""

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
    ) -> None:
        self._generator = generator
        self.num_answers = request.n
        self._request = request
        self._first_index = first_index
        self._caller = caller
        self._most_logprobs = most_logprobs
        self._on_delta = on_delta
        self._on_sent = on_sent
        self._seed = secrets.randbits(_SEED_BITS) if request.params.seed is None else request.params.seed
        self._context: EngineContext | None = None
        self._scored: Finished | None = None
        self.relaxed: tuple[Relaxed, ...] = ()
        self.num_output_tokens = [0] * request.n  # of each answer
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
                num_tokens = len(await generator.prompt_ids(context))
                generator.limits.check_num_tokens(
                    num_tokens, generator.limits.max_tokens(request.max_prompt_tokens)
                )
            if request.returns_prompt or request.prompt_logprobs is not None:
                await self._return_prompt(context)
            if not request.generates:
                self._end_at_once()
                return
            if request.n > 1:
                # The first answer computes the prompt. A separate request for that would make the prompt
                # look cached to all of them.
                contexts += await generator.fork(context, request.n - 1, ahead=False)
            async with open_task_group() as group:
                for number, one in enumerate(contexts):
                    group.start_soon(self._answer, number, one)
        finally:
            for one in contexts:
                generator.free(one)

    async def _return_prompt(self, context: EngineContext) -> None:
        """Begins each answer with the prompt. If it is to be scored, a separate request computes all rows of
        logits, and generation then finds the prompt in the cache."""
        generator, request = self._generator, self._request
        token_ids = await generator.prompt_ids(context)
        num_top = request.prompt_logprobs
        if num_top is not None:
            num_logprobs = len(token_ids) * (1 + num_top) * request.n
            if num_logprobs > self._most_logprobs:
                raise BadArgument(
                    f"the prompt has {num_logprobs:,} log-probabilities with those of its alternatives; the "
                    f"limit is {self._most_logprobs:,}: request fewer alternatives, or shorten it",
                    param="prompt",
                )
            if len(token_ids) > 1:
                self._scored = await generator.score_prompt(context, num_top)
        prompt = await generator.encode_beside(
            len(token_ids), prompt_delta, generator.tokenizer, request, token_ids, self._scored
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

    async def _thinking(self, context: EngineContext) -> Thinking | None:
        """The reasoning that an answer may begin with."""
        prompt = self._request.prompt
        if isinstance(prompt, str | TokenIds) or reasoning_marks(context.tokens.template.source) is None:
            return None
        if isinstance(prompt, Continuation):
            context, _ = await _after_answer(self._generator, self._request, prompt.messages)
        await self._generator.prompt_ids(context)
        return context.thinking(0 if self._request.thinks is False else self._request.reasoning_budget)

    async def _answer(self, number: int, context: EngineContext) -> None:
        request, use, constraint = self._request, context.tools, self._request.constraint
        if use is not None:
            constraint = use.constraint(constraint)
        thinking = await self._thinking(context)
        seed = (self._seed + number * _SEED_STEP) % 2**63
        params = msgspec.structs.replace(request.params, seed=seed)
        logprobs = None
        if params.wants_logprobs:
            has_jumps = constraint is not None or (thinking is not None and thinking.budget is not None)
            logprobs = LogprobReader(self._generator.tokenizer, params, has_jumps=has_jumps)
        output = answer_output(use, request.constraint, thinking)
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
            # Nothing marks the begin of a call in this model's notation, so no part of it is enforced.
            self.relaxed = tuple([Relaxed(name, ()) for name in use.callable_names])
            unkept.update(use.callable_names)
        try:
            end = await self._generator.complete(
                context,
                params,
                push,
                constraint,
                accept,
                thinking=thinking,
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
        reader.finish(end)
        checks = await check_answer(self._generator, request, end, reader.outputs(), unkept) if unkept else ()
        # The client may send its next request as soon as it has the end.
        await self._generator.keep_answer(context, end)
        reader.end(end, checks)
        self._generator.output_token_cache.put_answer(context, end, reader.message())
        if self._caller.prefills_next and request.n == 1 and isinstance(request.prompt, tuple):
            await self._generator.fill_next_turn(context, end, reader.message())


def _template_values(generator: EngineGenerator, request: CompletionRequest) -> dict[str, Any]:
    """The variables of the chat template. The request's own take precedence."""
    values = thinking_values(generator.template.source, request.thinks, request.effort)
    return {**values, **request.template_values}


async def _check_length(generator: EngineGenerator, request: CompletionRequest, most: int) -> None:
    """Rejects a prompt that is too long in any encoding before encoding it, and one that is far too long at
    little cost."""
    prompt = request.prompt
    if isinstance(prompt, TokenIds):
        generator.limits.check_num_tokens(len(prompt.ids), most)
    elif isinstance(prompt, Continuation):
        generator.limits.check_num_tokens(len(prompt.ids), most)
        texts = texts_of(prompt.messages)
        generator.limits.check_length(sum(map(len, texts)), most)
        await generator.check_texts(texts, most)
    elif isinstance(prompt, str):
        generator.limits.check_length(len(prompt), most)
        await generator.check_texts([prompt], most)
    else:
        generator.limits.check_length(num_chars(request.conversation), most)
        await generator.check_texts(texts_of(prompt), most)


async def _fill(generator: EngineGenerator, request: CompletionRequest, context: EngineContext) -> None:
    prompt = request.prompt
    if isinstance(prompt, str):
        # All of it is the client's, special tokens included: no content has to be separated from markup.
        token_ids = await generator.encode_beside(len(prompt), generator.tokenizer.encode_markup, prompt)
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
        generator.limits.check_ids(prompt.ids)
        after, num_before = await _after_answer(generator, request, prompt.messages)
        context.tokens.only((*prompt.ids, *after.tokens.ids()[num_before:]))
    else:
        context.tokens.attach_to(
            generator.rendered_prefixes, request.cache_salt.encode("utf-8", "backslashreplace")
        )
        await generator.fill_conversation(context, request.conversation, opens_turn=request.opens_turn)
        generator.keep(context, request.kept)


async def _after_answer(
    generator: EngineGenerator, request: CompletionRequest, messages: Sequence[Message]
) -> tuple[EngineContext, int]:
    """A conversation whose first answer these turns and the opening of the assistant's next turn follow, and
    the number of ids up to the last word of that answer. What comes after them follows any other answer, too.
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
        token_ids = await generator.prompt_ids(context)
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
        self._num_tokens = 0  # with their log-probabilities
        self._undecided: list[TokenLogprob] = []  # of reasoning or of the answer
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

    def _read(self, output: AnswerOutput, progress: Progress, tokens: list[TokenLogprob]) -> None:
        reasoning = None if isinstance(output, ToolOutput) else output
        is_reasoning = isinstance(output, ChannelOutput) and output.is_thinking
        was_head = isinstance(output, ChannelOutput) and output.may_begin
        pieces = push_output(output, progress.text, progress.answer_at)
        tokens, self._undecided = [*self._undecided, *tokens], []
        if reasoning is not None and reasoning.may_begin:
            self._undecided = tokens
            return
        is_reasoning = is_reasoning or (reasoning is not None and reasoning.is_thinking)
        if isinstance(output, ChannelOutput) and was_head and output.is_text and not pieces:
            is_reasoning = True  # the head of an answer in text, which is none of its text
        self._emit_pieces(pieces, tokens, is_reasoning=is_reasoning)

    def finish(self, end: Finished) -> None:
        rest = end.text[self._num_chars :]
        tokens = self._undecided + ([] if self._logprobs is None else self._logprobs.finish(end))
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

    def end(self, end: Finished, checks: tuple[Check, ...]) -> None:
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
        """The calls, as the names of tools and arguments; or the text, without a name."""
        return [(name, "".join(parts)) for name, parts in self._calls or [("", self._texts)]]

    def message(self) -> Message:
        """The answer as the client gets it, without reasoning and the ids of calls."""
        calls = [CalledTool("", *call) for call in self.outputs() if self._calls]
        return Message("assistant", "".join(self._texts), tool_calls=tuple(calls))

    def _reason(self, end: Finished) -> FinishReason:
        if end.finish_reason == "length":
            return "length"
        if self._output is None or not self._output.num_calls:
            return "stop"
        # A call that a stop has cut must look truncated, so that no client runs it.
        return "tool_calls" if self.message().tool_calls[-1].is_whole else "length"

    def _emit_text(self, text: str, tokens: Sequence[TokenLogprob]) -> None:
        self._texts.append(text)
        if text or tokens:
            self._on_delta(TextDelta(self._index, text, tuple(tokens)))

    def _emit_pieces(
        self, pieces: Sequence[Piece], tokens: Sequence[TokenLogprob], *, is_reasoning: bool = False
    ) -> None:
        """``is_reasoning``: the tokens are of reasoning, at least the first of them."""
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
