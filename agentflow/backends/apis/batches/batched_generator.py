"""The generator of a map in batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from anyio.abc import TaskGroup

from agentflow.backends.apis.answers.verification import OnUnsupported
from agentflow.backends.apis.api_format import ApiFormat, Request
from agentflow.backends.apis.batches.collector import Collector
from agentflow.backends.apis.conversation import ApiContext
from agentflow.backends.apis.generator import ApiGenerator
from agentflow.backends.apis.http.transport import ApiTransport, EventSink
from agentflow.backends.apis.prices import Billing
from agentflow.protocol.decisions import Question
from agentflow.protocol.events import Capabilities
from agentflow.runtime.generator import Decided, StateHint


class BatchedGenerator(ApiGenerator):
    """Generates in batches. It sends nothing itself.

    Args:
        collector: Answers the calls.
        transport: As for ``ApiGenerator``, as are the other arguments. Nothing is sent over it.
    """

    max_questions = math.inf  # a question that waited for another one would have to wait for a batch

    def __init__(
        self,
        collector: Collector,
        transport: ApiTransport,
        api: ApiFormat,
        capabilities: Capabilities,
        tasks: TaskGroup,
        *,
        on_unsupported: OnUnsupported,
        billing: Billing,
    ) -> None:
        super().__init__(
            transport,
            api,
            capabilities,
            tasks,
            on_unsupported=on_unsupported,
            speculates=False,
            billing=billing,
        )
        self._collector = collector
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

    async def _send(
        self,
        request: Request,
        new_sink: Callable[[], EventSink],
        headers: Mapping[str, str],
        context: ApiContext,
    ) -> None:
        await self._collector.answer(request.path, request.body, new_sink, request.images)
