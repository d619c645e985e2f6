"""Runs a ``CompletionRequest`` on a tenant's generator and gives what comes of it, as it comes.

::

    async with completing(generator, request) as completion:
        while deltas := await completion.next():
            …

Leaving the block aborts what still runs. Deltas that were not fetched in time are put together: whoever
reads slowly gets larger ones.

Several completion requests as one: their answers are counted on, request by request.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import anyio
import msgspec

from agentflow.engine.context import EngineContext
from agentflow.engine.conversation_context import fill_beside, num_chars, remember_answer, texts_of
from agentflow.engine.generator import EngineGenerator
from agentflow.errors import AgentflowError, BadArgument, faults_of
from agentflow.protocol.chat import CalledTool
from agentflow.protocol.sampling import SamplingParams
from agentflow.runtime.task_group import first_of, open_task_group
from agentflow.server.completion.answer import AnswerReader, LogprobReader
from agentflow.server.completion.request import (
    Answer,
    AnswerEnded,
    CompletionDelta,
    CompletionRequest,
    TextDelta,
    TokenIds,
    TokenLogprob,
    ToolArguments,
    ToolCallBegun,
)

COUNTED_CONTEXTS = 4
"""Prompts may be counted that are so many times too long: then one knows how much to leave out."""
_SEED_BITS = 62
# An odd number near 2**63 divided by the golden ratio: seeds of the answers of one request lie far apart.
_SEED_STEP = 5_700_357_409_661_598_991


class Completion:
    """Use ``completing`` to make one."""

    def __init__(self, generator: EngineGenerator, request: CompletionRequest) -> None:
        self._generator = generator
        self._request = request
        self._seed = secrets.randbits(_SEED_BITS) if request.params.seed is None else request.params.seed
        self._deltas: list[CompletionDelta] = []
        self._changed = anyio.Event()
        self._failure: Exception | None = None
        self._has_ended = False
        self._num_sent = 0
        self._context: EngineContext | None = None

    @property
    def num_prompt_tokens(self) -> int:
        """Known as soon as it is accepted."""
        return 0 if self._context is None else len(self._context.tokens.ids())

    async def next(self) -> list[CompletionDelta]:
        """What came since the last call; waits for it. Empty at the end. Raises what the request failed
        with; what came before that is given first."""
        while not self._deltas and not self._has_ended:
            await self._changed.wait()
        self._raise_failure()
        deltas, self._deltas = self._deltas, []
        return _joined(deltas) if len(deltas) > 1 else deltas

    async def until_accepted(self) -> None:
        """Waits until the engine's queue has all that the request asks for, or until it has ended. Raises
        what it was refused with."""
        while self._num_sent < self._request.n and not self._has_ended:
            await self._changed.wait()
        self._raise_failure()

    def _raise_failure(self) -> None:
        if not self._deltas and self._failure is not None:
            raise self._failure

    async def answers(self) -> list[Answer]:
        """All answers, when they are there. Nothing else may have fetched deltas."""
        all_deltas: list[CompletionDelta] = []
        while deltas := await self.next():
            all_deltas += deltas
        return answers_of(all_deltas, self._request.n)

    async def prompt_ids(self) -> list[int]:
        """What the model would be given. It is asked for nothing: for this no ``completing`` is needed."""
        context = self._generator.open(self._request.cache_salt)
        try:
            await self._check_length(COUNTED_CONTEXTS * self._generator.most_tokens())
            await self._fill(context)
            return await self._generator.prompt_ids(context)
        finally:
            self._generator.free(context)

    async def run(self) -> None:
        """For ``completing``."""
        try:
            context = self._generator.open(
                self._request.cache_salt,
                priority=self._request.priority,
                patience_s=self._generator.patience_s,
            )
            contexts, self._context = [context], context
            try:
                await self._check_length(self._generator.most_tokens(self._request.max_prompt_tokens))
                self._generator.check_gate(self._request.n)
                await self._fill(context)
                await self._check_size(context)
                if self._request.n > 1:
                    # Whoever comes first computes the prompt; a request of its own for that would make it
                    # look cached to all of them.
                    contexts += await self._generator.fork(context, self._request.n - 1, ahead=False)
                async with open_task_group() as group:
                    for index, one in enumerate(contexts):
                        group.start_soon(self._answer, index, one)
            finally:
                for one in contexts:
                    self._generator.free(one)
        except Exception as error:
            self._failure = first_of(error)
        self._has_ended = True
        self._changed.set()

    async def _check_length(self, most: int) -> None:
        """What is too long however it is encoded is refused before it costs anything, and what is far too
        long before it costs much."""
        prompt = self._request.prompt
        if isinstance(prompt, TokenIds):
            self._generator.check_num_tokens(len(prompt.ids), most)
        elif isinstance(prompt, str):
            self._generator.check_length(len(prompt), most)
            await self._generator.check_texts([prompt], most)
        else:
            self._generator.check_length(num_chars(self._request.conversation), most)
            await self._generator.check_texts(texts_of(prompt), most)

    async def _check_size(self, context: EngineContext) -> None:
        most = self._request.max_prompt_tokens
        if most is None:
            return
        num_tokens = len(await self._generator.prompt_ids(context))
        self._generator.check_num_tokens(num_tokens, self._generator.most_tokens(most))

    async def _fill(self, context: EngineContext) -> None:
        prompt = self._request.prompt
        if isinstance(prompt, str):
            # All of it is the client's, marks included: there is no content here to be told from markup.
            encode = self._generator.tokenizer.encode_markup
            token_ids = await self._generator.encode_beside(len(prompt), encode, prompt)
            if not token_ids:
                raise BadArgument("the prompt is empty: give a text with at least one token", param="prompt")
            context.tokens.generated(token_ids, prompt)
        elif isinstance(prompt, TokenIds):
            self._generator.check_ids(prompt.ids)
            context.tokens.only(prompt.ids)
        else:
            await fill_beside(
                self._generator,
                context,
                self._request.conversation,
                opens_turn=self._request.opens_turn,
            )

    async def _answer(self, index: int, context: EngineContext) -> None:
        params, use, constraint = self._params(index), context.tools, self._request.constraint
        if use is not None:
            constraint = use.constraint(constraint)
        told = None
        if params.wants_logprobs:
            told = LogprobReader(self._generator.tokenizer, params, is_constrained=constraint is not None)
        output = None
        if use is not None and use.callable_names:
            output = use.output(self._request.constraint)
        reader = AnswerReader(index, self._add, told=told, output=output)
        try:
            end = await self._generator.complete(context, params, reader.hear, constraint, self._note_sent)
        except AgentflowError as error:
            if error.param == "instead":
                error.param = "constraint"
            elif error.param == "constraint" and constraint is not self._request.constraint:
                error.param = "tools"
            raise
        reader.finish(end)
        remember_answer(self._generator, context, end)

    def _params(self, index: int) -> SamplingParams:
        seed = (self._seed + index * _SEED_STEP) % 2**63
        return msgspec.structs.replace(self._request.params, seed=seed)

    def _note_sent(self) -> None:
        self._num_sent += 1
        self._tell()

    def _add(self, delta: CompletionDelta) -> None:
        self._deltas.append(delta)
        self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()


@asynccontextmanager
async def completing(generator: EngineGenerator, request: CompletionRequest) -> AsyncIterator[Completion]:
    """Runs the request while the scope lasts. ``BadArgument`` for parameters that are wrong. The ``param`` of
    an error is ``prompt``, ``constraint`` or ``tools``, or a sampling parameter."""
    request.params.check()
    if request.constraint is not None:
        with faults_of("constraint"):
            request.constraint.check()
    completion = Completion(generator, request)
    async with open_task_group() as group:
        group.start_soon(completion.run)
        yield completion
        group.cancel_scope.cancel()


def answers_of(deltas: Sequence[CompletionDelta], n: int) -> list[Answer]:
    """The ``n`` answers that the deltas make up."""
    by_index: list[list[CompletionDelta]] = [[] for _ in range(n)]
    for delta in deltas:
        by_index[delta.index].append(delta)
    return [_answer_of(own) for own in by_index]


def _answer_of(deltas: Sequence[CompletionDelta]) -> Answer:
    texts: list[str] = []
    tokens: list[TokenLogprob] = []
    calls: list[tuple[ToolCallBegun, list[str]]] = []
    end: AnswerEnded | None = None
    for delta in deltas:
        match delta:
            case TextDelta():
                texts.append(delta.text)
                tokens += delta.tokens
            case ToolCallBegun():
                calls.append((delta, []))
            case ToolArguments():
                calls[delta.call][1].append(delta.text)
            case AnswerEnded():
                end = delta
    assert end is not None
    called = tuple(CalledTool(begun.id, begun.name, "".join(parts)) for begun, parts in calls)
    return Answer("".join(texts), called, tuple(tokens), end.finish_reason, end.usage, end.stop)


def _joined(deltas: Sequence[CompletionDelta]) -> list[CompletionDelta]:
    """Deltas of the same text that follow each other, put together."""
    runs: list[list[CompletionDelta]] = []
    last: dict[int, list[CompletionDelta]] = {}  # of each answer its last run
    for delta in deltas:
        run = last.get(delta.index)
        if run is not None and type(run[0]) is type(delta) and isinstance(delta, TextDelta | ToolArguments):
            run.append(delta)
        else:
            last[delta.index] = run = [delta]
            runs.append(run)
    return [run[0] if len(run) == 1 else _one_of(run) for run in runs]


def _one_of(run: Sequence[CompletionDelta]) -> CompletionDelta:
    first = run[0]
    text = "".join([delta.text for delta in run if isinstance(delta, TextDelta | ToolArguments)])
    if isinstance(first, ToolArguments):
        return ToolArguments(first.index, first.call, text)
    tokens = [token for delta in run if isinstance(delta, TextDelta) for token in delta.tokens]
    return TextDelta(first.index, text, tuple(tokens))


class CompletionSet:
    """Use ``completing_all`` to make one. What fails one request fails all."""

    def __init__(self, num_requests: int) -> None:
        self._deltas: list[CompletionDelta] = []
        self._num_unaccepted = num_requests
        self._num_running = num_requests
        self._failure: Exception | None = None
        self._changed = anyio.Event()

    async def until_accepted(self) -> None:
        """Waits until all requests are. Raises what one was refused with."""
        while self._num_unaccepted and self._failure is None:
            await self._changed.wait()
        if self._failure is not None:
            raise self._failure

    async def next(self) -> list[CompletionDelta]:
        """As of a ``Completion``."""
        while not self._deltas and self._num_running and self._failure is None:
            await self._changed.wait()
        if not self._deltas and self._failure is not None:
            raise self._failure
        deltas, self._deltas = self._deltas, []
        return deltas

    async def run(self, generator: EngineGenerator, request: CompletionRequest, first_index: int) -> None:
        """For ``completing_all``: runs one request and takes over what comes of it."""
        try:
            async with completing(generator, request) as completion:
                await completion.until_accepted()
                self._num_unaccepted -= 1
                self._tell()
                while deltas := await completion.next():
                    self._deltas += [replace(delta, index=first_index + delta.index) for delta in deltas]
                    self._tell()
        except Exception as error:
            self._failure = self._failure or first_of(error)
        self._num_running -= 1
        self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()


@asynccontextmanager
async def completing_all(
    generator: EngineGenerator, requests: Sequence[CompletionRequest]
) -> AsyncIterator[CompletionSet]:
    """Runs the requests while the scope lasts. ``RateLimited`` where the tenant may not send so many."""
    generator.check_gate(sum(request.n for request in requests))
    completions = CompletionSet(len(requests))
    async with open_task_group() as group:
        first_index = 0
        for request in requests:
            group.start_soon(completions.run, generator, request, first_index)
            first_index += request.n
        yield completions
        group.cancel_scope.cancel()
