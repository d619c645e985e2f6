"""Runs a ``CompletionRequest`` on a tenant's generator and gives what comes of it, as it comes.

::

    async with completing(generator, request) as completion:
        while deltas := await completion.next():
            …

Leaving the block aborts what still runs. Deltas that were not fetched in time are put together: whoever
reads slowly gets larger ones.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import anyio
import anyio.to_thread
import msgspec

from agentflow.errors import BadArgument, PromptTooLong
from agentflow.sampling import SamplingParams
from agentflow.server.answer_memory import conversation_keys
from agentflow.server.answer_reading import AnswerReader
from agentflow.server.chat_message import CalledTool, Message
from agentflow.server.completion_request import (
    Answer,
    AnswerEnded,
    CompletionDelta,
    CompletionRequest,
    TextDelta,
    TokenIds,
    ToldToken,
    ToolArguments,
    ToolCallBegun,
)
from agentflow.server.engine_generator import MAX_INLINE_CHARS, EngineContext, EngineGenerator
from agentflow.server.told_tokens import ToldTokens
from agentflow.server.tool_use import ToolUse, tool_use
from agentflow.task_group import first_of, open_task_group

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
        self._tools: ToolUse | None = None
        self._conversation: bytes | None = None  # its key, where the answers are turns that may come back
        self._context: EngineContext | None = None

    @property
    def num_prompt_tokens(self) -> int:
        """Known as soon as there is something to fetch."""
        return 0 if self._context is None else len(self._context.tokens.ids())

    async def next(self) -> list[CompletionDelta]:
        """What came since the last call; waits for it. Empty at the end. Raises what the request failed
        with; what came before that is given first."""
        while not self._deltas and not self._has_ended:
            await self._changed.wait()
        if not self._deltas and self._failure is not None:
            raise self._failure
        deltas, self._deltas = self._deltas, []
        return _joined(deltas) if len(deltas) > 1 else deltas

    async def until_begun(self) -> None:
        """Waits until there is something to fetch. Raises what the request failed with before that."""
        while not self._deltas and not self._has_ended:
            await self._changed.wait()
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
            await self._fill(context)
            return await self._generator.prompt_ids(context)
        finally:
            self._generator.free(context)

    async def run(self) -> None:
        """For ``completing``."""
        try:
            context = self._generator.open(self._request.cache_salt, priority=self._request.priority)
            contexts, self._context = [context], context
            try:
                self._check_length()
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

    def _check_length(self) -> None:
        prompt = self._request.prompt
        if isinstance(prompt, TokenIds):
            return
        num_chars = len(prompt) if isinstance(prompt, str) else sum(len(one.content) for one in prompt)
        self._generator.check_length(num_chars, self._request.max_prompt_tokens)

    async def _check_size(self, context: EngineContext) -> None:
        most = self._request.max_prompt_tokens
        if most is None:
            return
        num_tokens = len(await self._generator.prompt_ids(context))
        if num_tokens > most:
            raise PromptTooLong(
                f"the prompt has {num_tokens} tokens, and this server takes at most {most}: shorten it"
            )

    async def _fill(self, context: EngineContext) -> None:
        prompt = self._request.prompt
        if isinstance(prompt, str):
            # All of it is the client's, marks included: there is no content here to be told from markup.
            encode = self._generator.tokenizer.encode_markup
            if len(prompt) > MAX_INLINE_CHARS:
                token_ids = await anyio.to_thread.run_sync(encode, prompt)
            else:
                token_ids = encode(prompt)
            if not token_ids:
                raise BadArgument("the prompt is empty: give a text with at least one token")
            context.tokens.generated(token_ids, prompt)
        elif isinstance(prompt, TokenIds):
            self._generator.check_ids(prompt.ids)
            context.tokens.only(prompt.ids)
        else:
            self._fill_turns(context)

    def _fill_turns(self, context: EngineContext) -> None:
        use = self._tools = tool_use(self._generator.template, self._request)
        context.tokens.tools(use.tools)
        start = repr((self._request.cache_salt, use.tools)).encode("utf-8", "backslashreplace")
        keys = conversation_keys(use.messages, start=start)
        last = len(use.messages) - 1
        for number, (message, key) in enumerate(zip(use.messages, keys, strict=True)):
            if message.tool_calls or message.role == "tool":
                context.tokens.turn(message)
                context.num_unencoded_chars += len(message.content)
                continue
            token_ids = self._generator.answers.recall(key) if message.role == "assistant" else None
            self._generator.begin_role(context, message.role)
            if token_ids is None:
                self._generator.fill(context, message.content)
            else:
                context.tokens.generated(token_ids, message.content)
            if number == last and message.role == "assistant":
                return  # it goes on
            self._generator.end_role(context)
        if self._request.opens_turn:
            self._generator.begin_role(context, "assistant")
            self._conversation = keys[-1] if keys else b""

    async def _answer(self, index: int, context: EngineContext) -> None:
        params, use, constraint = self._params(index), self._tools, self._request.constraint
        if use is not None:
            constraint = use.constraint
        told = None
        if params.wants_logprobs:
            told = ToldTokens(self._generator.tokenizer, params, is_constrained=constraint is not None)
        output = use.output() if use is not None and use.callable_names else None
        reader = AnswerReader(index, self._add, told=told, output=output)
        end = await self._generator.complete(context, params, reader.hear, constraint)
        reader.finish(end)
        if self._conversation is not None:
            [key] = conversation_keys([Message("assistant", end.text)], start=self._conversation)
            self._generator.answers.remember(key, end.token_ids)

    def _params(self, index: int) -> SamplingParams:
        seed = (self._seed + index * _SEED_STEP) % 2**63
        return msgspec.structs.replace(self._request.params, seed=seed)

    def _add(self, delta: CompletionDelta) -> None:
        self._deltas.append(delta)
        self._changed.set()
        self._changed = anyio.Event()


@asynccontextmanager
async def completing(generator: EngineGenerator, request: CompletionRequest) -> AsyncIterator[Completion]:
    """Runs the request while the scope lasts. ``BadArgument`` for parameters that are wrong."""
    request.params.check()
    if request.constraint is not None:
        request.constraint.check()
    completion = Completion(generator, request)
    async with open_task_group() as group:
        group.start_soon(completion.run)
        yield completion
        group.cancel_scope.cancel()


def answers_of(deltas: Sequence[CompletionDelta], n: int) -> list[Answer]:
    """The ``n`` answers that the deltas make up."""
    return [_answer_of([delta for delta in deltas if delta.index == index]) for index in range(n)]


def _answer_of(deltas: Sequence[CompletionDelta]) -> Answer:
    texts: list[str] = []
    tokens: list[ToldToken] = []
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
    joined: list[CompletionDelta] = []
    last: dict[int, int] = {}  # of each answer the place of its last delta
    for delta in deltas:
        place = last.get(delta.index)
        before = None if place is None else joined[place]
        if isinstance(delta, TextDelta) and isinstance(before, TextDelta) and place is not None:
            joined[place] = TextDelta(delta.index, before.text + delta.text, before.tokens + delta.tokens)
        elif isinstance(delta, ToolArguments) and isinstance(before, ToolArguments) and place is not None:
            joined[place] = ToolArguments(delta.index, delta.call, before.text + delta.text)
        else:
            last[delta.index] = len(joined)
            joined.append(delta)
    return joined
