"""The generator of a map in batches, and its calls."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from anyio.abc import TaskGroup

from agentflow.backends.apis.answers.answer import AnswerCollector
from agentflow.backends.apis.answers.verification import OnUnsupported
from agentflow.backends.apis.batches.collector import Collector
from agentflow.backends.apis.generation.api_format import ApiFormat, ApiRequest, Call
from agentflow.backends.apis.generation.calls import ApiCalls
from agentflow.backends.apis.generation.conversation import ApiContext
from agentflow.backends.apis.generation.generator import ApiGenerator
from agentflow.backends.apis.http.event_stream import EventSink
from agentflow.backends.apis.http.rate_limits import Demand
from agentflow.backends.apis.http.transport import ApiTransport
from agentflow.backends.apis.prices import Billing
from agentflow.protocol.decisions import Question
from agentflow.protocol.events import Capabilities
from agentflow.runtime.generator import Decided, OnText, StateHint


class BatchedCalls(ApiCalls):
    """Calls that are requests of batches.

    Args:
        collector: Answers the calls.
        transport: As for ``ApiCalls``, as are the other arguments. Nothing is sent over it.
    """

    def __init__(
        self,
        collector: Collector,
        transport: ApiTransport,
        api: ApiFormat,
        capabilities: Capabilities,
        *,
        billing: Billing,
    ) -> None:
        super().__init__(transport, api, capabilities, billing=billing)
        self._collector = collector

    async def answer(
        self,
        context: ApiContext,
        request: ApiRequest,
        call: Call,
        on_text: OnText,
        on_reasoning: OnText | None,
        *,
        is_held: bool = False,
    ) -> AnswerCollector:
        """Like ``ApiCalls.answer``."""
        answer = await super().answer(context, request, call, on_text, on_reasoning, is_held=is_held)
        self._collector.note_text(context.label, request.path, answer.text)
        return answer

    async def send(
        self,
        request: ApiRequest,
        new_sink: Callable[[], EventSink],
        headers: Mapping[str, str],
        context: ApiContext,
        demand: Demand,
    ) -> bool:
        """Like ``ApiCalls.send``, by the collector."""
        return await self._collector.answer(
            context.label, request.path, request.body, new_sink, request.images
        )

    async def reject(self, context: ApiContext, requests: Sequence[ApiRequest]) -> None:
        """No later attempt at the input takes the answers to these requests."""
        await self._collector.reject_requests(context.label, [request.path for request in requests])


class BatchedGenerator(ApiGenerator):
    """Generates in batches.

    Args:
        calls: Makes the calls.
        capabilities: As for ``ApiGenerator``, as are the other arguments.
    """

    max_questions = math.inf  # a question that waited for another one would have to wait for a batch

    def __init__(
        self,
        calls: BatchedCalls,
        capabilities: Capabilities,
        tasks: TaskGroup,
        *,
        on_unsupported: OnUnsupported,
    ) -> None:
        super().__init__(calls, capabilities, tasks, on_unsupported=on_unsupported, speculates=False)
        self._num_open: dict[ApiContext, int] = {}  # the undecided questions of each decide

    @property
    def num_more_calls(self) -> int:
        """The number of calls that states wait for beyond one for each state."""
        return sum([max(0, num_open - 1) for num_open in self._num_open.values()])

    async def decide(self, context: ApiContext, questions: Sequence[Question]) -> Decided:
        """Decides all questions in one stage, each by a separate call."""
        self._num_open[context] = len(questions)
        try:
            return await super().decide(context, questions)
        finally:
            del self._num_open[context]

    async def _decided(self, context: ApiContext, question: Question) -> Decided:
        try:
            return await super()._decided(context, question)
        finally:
            self._num_open[context] -= 1

    def hint(self, context: ApiContext, hint: StateHint) -> None:
        """Takes no hint: the answer to a request of a batch comes as a whole, so no call goes on for later
        gens, no prefix is warmed, and a request has no trace."""
