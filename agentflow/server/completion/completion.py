"""Runs completion requests on a tenant's generator and yields their deltas as they arrive.

::

    async with completing(generator, request) as completion:
        while deltas := await completion.next():
            …

Several requests run as one: their answers are numbered consecutively, and an error of one is an error of all.
Leaving the block aborts running answers. Deltas that are not fetched in time are merged, so a slow consumer
gets fewer and larger deltas.

``Completion`` collects the deltas of all requests, each of which runs on an engine (``engine_run``) or on a
model behind an API (``api_run``).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import anyio

from agentflow.engine.generator.generator import EngineGenerator
from agentflow.engine.grammar.compiler.messages import Relaxed
from agentflow.errors import error_param
from agentflow.protocol.events import Usage
from agentflow.runtime.task_group import first_error, open_task_group
from agentflow.server.completion.api_run import ApiRun
from agentflow.server.completion.engine_run import EngineRun
from agentflow.server.completion.request import (
    MAX_LOGPROB_TOKENS,
    Answer,
    AnswerEnded,
    CheckedOutput,
    CompletionDelta,
    CompletionRequest,
    Times,
    join_answers,
    merge_deltas,
)
from agentflow.server.http.caller import ANYONE, Caller
from agentflow.server.models.models import TextGenerator


@asynccontextmanager
async def completing(
    generator: TextGenerator,
    *requests: CompletionRequest,
    caller: Caller = ANYONE,
    on_cut: Callable[[Usage], None] | None = None,
    on_scored: Callable[[int], None] | None = None,
) -> AsyncIterator[Completion]:
    """Runs the requests while the scope lasts.

    Args:
        caller: the program that the requests belong to.
        on_cut: receives the usage so far if the scope ends before the answers are complete.
        on_scored: receives the number of log-probabilities of a prompt, before they are read. It may reject
            the request.

    Raises:
        BadArgument: an invalid prompt, constraint or tool: its ``param`` is ``prompt``, ``constraint`` or
            ``tools``.
        RateLimited: the tenant may not send this many requests.
    """
    for request in requests:
        if request.constraint is not None:
            with error_param("constraint"):
                request.constraint.check()
    num_scored = sum(request.prompt_logprobs is not None for request in requests)
    generator.check_gate(num_scored + sum(request.n for request in requests if request.generates))
    completion = Completion(generator, requests, caller, on_scored)
    try:
        async with open_task_group() as group:
            for run in completion.runs:
                group.start_soon(completion.follow, run)
            yield completion
            group.cancel_scope.cancel()
    finally:
        if on_cut is not None and completion.is_accepted and not completion.is_complete:
            on_cut(completion.usage_so_far())


class Completion:
    """Running requests, and the deltas of their answers. ``completing`` creates it."""

    def __init__(
        self,
        generator: TextGenerator,
        requests: Sequence[CompletionRequest],
        caller: Caller,
        on_scored: Callable[[int], None] | None,
    ) -> None:
        self._num_answers = 0
        self.runs: list[EngineRun | ApiRun] = []
        for request in requests:
            given = (request, self._num_answers, caller)
            if isinstance(generator, EngineGenerator):
                most = MAX_LOGPROB_TOKENS // len(requests)
                run: EngineRun | ApiRun = EngineRun(
                    generator,
                    *given,
                    most_logprobs=most,
                    on_delta=self._add,
                    on_sent=self._count_sent,
                    on_scored=on_scored,
                )
            else:
                run = ApiRun(generator, *given, on_delta=self._add, on_sent=self._count_sent)
            self.runs.append(run)
            self._num_answers += request.n
        self._num_sent = 0
        self._num_running = len(requests)
        self._failure: Exception | None = None
        self._deltas: list[CompletionDelta] = []
        self._checks: list[CheckedOutput] = []
        self._usages: dict[int, Usage] = {}  # the usage of each finished answer, by index
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
        """The parts of the client's schemas that the grammar does not enforce, once all requests are
        accepted."""
        return tuple(dict.fromkeys([one for run in self.runs for one in run.relaxed]))

    @property
    def checks(self) -> list[CheckedOutput]:
        """The checks of tool calls and answers under relaxed schemas, at the end."""
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
        """The tokens of the prompts, and of all answers so far. Cached tokens are known only at the end."""
        num_prompt_tokens = sum(run.num_prompt_tokens for run in self.runs)
        return Usage(num_prompt_tokens, 0, sum(sum(run.num_output_tokens) for run in self.runs))

    def make_usage(self, index: int) -> Usage:
        """Like ``usage_so_far``, for one answer."""
        for run in self.runs:
            if index < run.num_answers:
                break
            index -= run.num_answers
        return Usage(run.num_prompt_tokens, 0, run.num_output_tokens[index])

    @property
    def is_accepted(self) -> bool:
        """Whether all requests were sent to the engine or the API."""
        return self._num_sent == self._num_answers

    @property
    def is_complete(self) -> bool:
        """Whether all answers have ended."""
        return len(self._usages) == self._num_answers

    async def until_accepted(self) -> None:
        """Waits until all requests are accepted. Raises the error of a rejected request."""
        while self._num_sent < self._num_answers and not self._has_ended:
            await self._changed.wait()
        if self._failure is not None and (self._num_sent < self._num_answers or not self._deltas):
            raise self._failure

    async def next(self) -> list[CompletionDelta]:
        """Waits for deltas and returns all since the last call, merged. Empty at the end. An error is raised
        after the deltas that preceded it."""
        while not self._deltas and not self._has_ended:
            await self._changed.wait()
        if not self._deltas and self._failure is not None:
            raise self._failure
        deltas, self._deltas = self._deltas, []
        return merge_deltas(deltas) if len(deltas) > 1 else deltas

    async def rest(self) -> list[CompletionDelta]:
        """Waits for the end, and returns all further deltas."""
        deltas: list[CompletionDelta] = []
        while some := await self.next():
            deltas += some
        return deltas

    async def answers(self) -> list[Answer]:
        """Waits for the end, and returns all answers. No deltas may have been fetched."""
        return join_answers(await self.rest(), self._num_answers)

    async def follow(self, run: EngineRun | ApiRun) -> None:
        """Runs one request to its end."""
        try:
            await run.run()
        except Exception as error:
            self._failure = self._failure or first_error(error)
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
