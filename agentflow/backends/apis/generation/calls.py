"""Makes the calls of an ``ApiGenerator``: sends a request, perhaps a second time, reads its answer, and
charges it. Answers are checked against their constraints. If the API cannot enforce a constraint, an answer
that violates it is asked for again, with the reason.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import replace

import anyio.to_thread
import msgspec

from agentflow.backends.apis.answers.answer import CHARS_PER_TOKEN, AnswerCollector
from agentflow.backends.apis.answers.verification import found_fault, going_on, requirement
from agentflow.backends.apis.answers.visible_text import StopFilter
from agentflow.backends.apis.generation.api_format import ApiFormat, ApiRequest, Call
from agentflow.backends.apis.generation.conversation import ApiContext
from agentflow.backends.apis.generation.hedging import Lane, Race
from agentflow.backends.apis.http.event_stream import EventSink
from agentflow.backends.apis.http.rate_limits import Demand
from agentflow.backends.apis.http.transport import ApiTransport
from agentflow.backends.apis.prices import FREE, Billing
from agentflow.backends.apis.strict_schema import relaxations
from agentflow.errors import AgentflowError, BadArgument, InvalidValue, NotSupported, RunFailed, ServerLost
from agentflow.protocol.bounds.client_pattern import CannotCheck
from agentflow.protocol.bounds.json_bounds import check_schemas
from agentflow.protocol.constraint import Constraint
from agentflow.protocol.events import Capabilities, Usage
from agentflow.runtime.generator import OnText

logger = logging.getLogger(__name__)

MAX_ANSWERS = 3
"""The answers that are asked for until one satisfies a constraint."""
LONG_CONSTRAINT = 2_000
"""Constraints with at least as many characters may take a tenth of a second to translate."""
MAX_UNCHECKED = 1_000
"""The constraints that cannot be checked of which the log has each once."""


class ApiCalls:
    """The calls of one model.

    Args:
        transport: Sends the requests.
        api: The format of the API.
        capabilities: The model's capabilities.
        billing: The costs of the calls.
        hedge_after_s: The seconds until a call whose answer has not begun is made a second time.

    Attributes:
        total: The usage of all calls.
        num_running: The calls that run.
        num_hedged: The calls that were made a second time.
    """

    def __init__(
        self,
        transport: ApiTransport,
        api: ApiFormat,
        capabilities: Capabilities,
        *,
        billing: Billing = FREE,
        hedge_after_s: float | None = None,
    ) -> None:
        self.transport = transport
        self.api = api
        self.billing = billing
        self._model = capabilities.model
        self._default_max_tokens = capabilities.default_max_tokens
        self._hedge_after_s = hedge_after_s
        self.total = Usage()
        self.num_running = 0
        self.num_hedged = 0
        self._unchecked: set[int] = set()  # hashes of constraints that cannot be checked

    def count(self, usage: Usage) -> None:
        """Adds the usage of a call that is made elsewhere."""
        self.total += usage

    async def request(self, context: ApiContext, call: Call) -> ApiRequest:
        """The request for a call, made in a thread if its constraint takes long to translate."""
        try:
            if call.constraint is None or len(call.constraint.source) < LONG_CONSTRAINT:
                return self._request(context, call)
            return await anyio.to_thread.run_sync(self._request, context, call)
        except NotSupported as error:
            if self._model in str(error):
                raise
            raise NotSupported(f"{self._model}: {error}", param=error.param) from None

    def _request(self, context: ApiContext, call: Call) -> ApiRequest:
        if call.constraint is not None:
            check_schemas(call.constraint)
        return self.api.request(context, call)

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
        """Sends a request, and returns its answer.

        Args:
            context: The prompt.
            request: The request that was made for the call.
            call: The call.
            on_text: Receives each delta of the text, except the end of the answer.
            on_reasoning: Receives each delta of reasoning.
            is_held: No delta is delivered.
        """
        params, unwrap = call.params, request.unwrap
        written = params if unwrap is None else msgspec.structs.replace(params, stop=(), stop_regex=None)

        def new_answer() -> AnswerCollector:
            answer = AnswerCollector(
                written,
                on_text,
                on_reasoning,
                is_reply=call.is_reply,
                is_held=is_held or unwrap is not None,
            )
            answer.on_begin = has_begun
            return answer

        headers = {"traceparent": context.trace} if context.trace else {}
        context.trace = ""
        gate = request.gate
        async with nullcontext(_no_gate) if gate is None else gate.of(self).passed() as has_begun:

            async def exchange(lane: Lane[AnswerCollector] | None) -> AnswerCollector:
                return await self._exchange(context, request, call, headers, new_answer, lane)

            if self._hedge_after_s is None:
                answer = await exchange(None)
            else:
                race = Race(exchange, self._hedge_after_s)
                try:
                    answer = await race.result()
                finally:
                    self.num_hedged += race.is_hedged
        self.total += answer.usage
        if request.gate is not None:
            answer.usage += request.gate.take_usage()
        if unwrap is not None and not answer.calls:
            stops = StopFilter(params.stop, params.stop_regex)
            text = stops.push(unwrap(answer.text)) + stops.finish()
            answer.replace_text(text)
            if stops.is_stopped:
                answer.finish_reason = "stop"
        return answer

    async def _exchange(
        self,
        context: ApiContext,
        request: ApiRequest,
        call: Call,
        headers: Mapping[str, str],
        new_answer: Callable[[], AnswerCollector],
        lane: Lane[AnswerCollector] | None,
    ) -> AnswerCollector:
        """The answer to one request, with its cost. ``lane``: of two equal requests."""
        answers: list[AnswerCollector] = []
        most = call.params.max_tokens or self._default_max_tokens
        await self.billing.until_ready(request.most_tokens, most)
        with ExitStack() as scopes:
            charged = scopes.enter_context(self.billing.charged(request.most_tokens, most))

            def new_sink() -> EventSink:
                nonlocal charged
                if answers and answers[-1].num_deltas:  # the answer was lost, and another one is paid
                    answers[-1].take_back()
                    charge_left(is_lost=True)
                    charged = scopes.enter_context(self.billing.charged(request.most_tokens, most))
                answers.append(new_answer())
                sink = self.api.sink(request, answers[-1])
                return sink if lane is None else lane.sink(sink)

            def charge_left(*, is_lost: bool = False) -> None:
                # The provider stops when the connection ends, and charges the tokens read and written so far.
                num_deltas = answers[-1].num_deltas if answers else 0
                num_read = request.num_chars // CHARS_PER_TOKEN if answers else 0
                self.total += charged(Usage(num_read, 0, num_deltas), is_lost=is_lost)

            self.num_running += 1
            try:
                demand = Demand(request.num_chars, call.params.max_tokens, lambda: _counted(answers))
                is_new = await self.send(request, new_sink, headers, context, demand)
            except AgentflowError as error:
                if answers:
                    answers[-1].take_back()
                if answers and (answers[-1].num_deltas or isinstance(error, RunFailed)):
                    charge_left(is_lost=isinstance(error, ServerLost))
                else:
                    charged(Usage())  # refused, or lost before the answer began
                raise
            except BaseException:  # cancelled, or a fault
                charge_left()
                raise
            finally:
                self.num_running -= 1
            answer = answers[-1]
            if lane is not None and lane.is_lost:  # the cancellation has not come yet
                charge_left()
                return answer
            usage = msgspec.structs.replace(answer.usage, written_tokens=answer.written_tokens)
            if not is_new:
                usage = Usage(saved_calls=1, saved_tokens=usage.prompt_tokens)
            answer.usage = charged(usage)
        return answer

    async def send(
        self,
        request: ApiRequest,
        new_sink: Callable[[], EventSink],
        headers: Mapping[str, str],
        context: ApiContext,
        demand: Demand,
    ) -> bool:
        """Sends a request and reads its answer into a sink.

        Args:
            request: The request.
            new_sink: Makes a sink for each attempt.
            headers: In addition to the transport's.
            context: The state of the request.
            demand: The request's use of the provider's limits.

        Returns:
            False if an earlier call was charged for it.
        """
        await self.transport.stream(
            request.path, request.body, new_sink, headers, context.has_alternative, demand
        )
        return True

    async def verified(
        self,
        context: ApiContext,
        call: Call,
        constraint: Constraint,
        on_text: OnText,
        on_reasoning: OnText | None,
    ) -> AnswerCollector:
        """Returns an answer that satisfies a constraint of which the API enforces a part or nothing. Asks for
        it at most ``MAX_ANSWERS`` times, with the fault of the answer before.

        Args:
            context: The prompt.
            call: The call.
            constraint: The call's constraint.
            on_text: As in ``answer``.
            on_reasoning: As in ``answer``.

        Raises:
            InvalidValue: No answer satisfies the constraint.
            NotSupported: Answers cannot be checked against the constraint.
        """
        sent = self._enforced(context, call, constraint)
        asked = context.forked()
        usage, fault, text = Usage(), "", ""
        requests: list[ApiRequest] = []
        for _ in range(MAX_ANSWERS):
            request = self.api.request(asked, sent)
            requests.append(request)
            answer = await self.answer(asked, request, sent, on_text, on_reasoning, is_held=True)
            usage += answer.usage
            answer.usage = usage
            text = answer.text
            try:
                found = await _fault(constraint, call, answer)
            except CannotCheck as error:
                raise NotSupported(
                    f"answers cannot be checked against this {constraint.kind} ({error}): write it more "
                    "simply, or use a server that enforces it"
                ) from None
            if found is None:
                return answer
            fault = found
            usage += Usage(rejected_answers=1)
            asked = _asked_again(context, text, constraint, fault)
        await self.reject(context, requests)
        invalid = InvalidValue(
            f"{MAX_ANSWERS} answers of {self._model} violate the {constraint.kind} constraint: say in the "
            f"prompt what you need, or use another model; the last one: {text!r:.200} ({fault})"
        )
        invalid.text, invalid.usage = text, usage
        raise invalid

    def _enforced(self, context: ApiContext, call: Call, constraint: Constraint) -> Call:
        """The call with the part of its constraint that the API enforces."""
        if constraint.kind == "schema":
            for source in relaxations(constraint.source):
                relaxed = replace(call, constraint=Constraint("schema", source))
                with suppress(NotSupported):
                    self.api.request(context, relaxed)
                    return relaxed
        return replace(call, constraint=None)

    async def require_kept(
        self,
        context: ApiContext,
        request: ApiRequest,
        call: Call,
        constraint: Constraint,
        answer: AnswerCollector,
    ) -> None:
        """Checks an answer of an API that should enforce the constraint.

        Args:
            context: The prompt.
            request: The request, which contains the constraint.
            call: The call for which it was made.
            constraint: The call's constraint.
            answer: The whole answer.

        Raises:
            InvalidValue: The answer violates the constraint.
        """
        try:
            found = await _fault(constraint, call, answer)
        except (CannotCheck, BadArgument) as error:  # a pattern of a notation that is unknown here
            self._warn_unchecked(constraint, error)
            return
        if found is None:
            return
        await self.reject(context, [request])
        source = constraint.source or ", ".join(map(repr, constraint.choices))
        invalid = InvalidValue(
            f"{self.transport.endpoint} was sent the {constraint.kind} constraint {source:.200}, and its "
            f"answer {answer.text!r:.200} violates it ({found:.500}): the server ignores it or reads it "
            'differently; write it more simply, have values generated again (on_invalid="retry"), or use '
            "another server"
        )
        invalid.text, invalid.usage = answer.text, answer.usage + Usage(rejected_answers=1)
        raise invalid

    def _warn_unchecked(self, constraint: Constraint, why: Exception) -> None:
        key = hash(constraint)
        if key in self._unchecked or len(self._unchecked) >= MAX_UNCHECKED:
            return
        self._unchecked.add(key)
        logger.warning(
            "%s was sent a %s constraint that answers cannot be checked against (%s): they are taken as they "
            "come",
            self.transport.endpoint,
            constraint.kind,
            why,
        )

    async def reject(self, context: ApiContext, requests: Sequence[ApiRequest]) -> None:
        """No answer to these requests satisfies their constraint. For generators that keep answers."""


def _counted(answers: Sequence[AnswerCollector]) -> Usage | None:
    """The usage of the latest answer; None if it is not complete."""
    usage = answers[-1].usage if answers else Usage()
    return usage if usage.prompt_tokens else None


async def _fault(constraint: Constraint, call: Call, answer: AnswerCollector) -> str | None:
    """How an answer violates the constraint; None if it does not, or if it is no whole text.

    Raises:
        CannotCheck: The check takes too long, or is impossible.
        BadArgument: The constraint is invalid.
    """
    if answer.calls or answer.finish_reason == "length":
        return None
    cut_by = going_on(call.params) if answer.finish_reason == "stop" else ()
    return await found_fault(constraint, answer.text, cut_by)


def _no_gate() -> None:
    """The answer to a request begins that no other one waits for."""


def _asked_again(context: ApiContext, text: str, constraint: Constraint, fault: str) -> ApiContext:
    """The conversation with a wrong answer and the request for another one. A plain text has no place for
    the request: it is only continued again."""
    asked = context.forked()
    if context.is_plain:
        return asked
    asked.answer(text)
    asked.end_role()
    asked.begin_role("user")
    asked.fill(
        f"That answer is not valid: {fault}. {requirement(constraint)} Answer again, with nothing else."
    )
    asked.end_role()
    asked.open_answer()
    return asked
