"""Several endpoints that answer in the place of one another.

A call goes to the first endpoint whose circuit is closed. If that fails before anything of its answer is
visible, and another endpoint could answer, the call goes to the next one immediately. So the text of a
variable always comes from one model.

The endpoints read the same messages, which a context has once.
"""

from __future__ import annotations

import copy
import logging
import os
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec

from agentflow.backends.apis.addresses.api_address import api_backend
from agentflow.backends.apis.addresses.asked_server import AskedServer
from agentflow.backends.apis.generation.context_operations import ContextOperations
from agentflow.backends.apis.generation.conversation import ApiContext
from agentflow.backends.apis.http.api_errors import is_endpoint_fault, is_transient
from agentflow.backends.apis.prices import Costs
from agentflow.backends.apis.serving import ApiBackend
from agentflow.backends.local import interpreted
from agentflow.errors import AgentflowError, BadArgument, NotSupported, Overloaded, short_repr
from agentflow.protocol.backend import Backend, Connection, Deliver, Lost
from agentflow.protocol.constraint import Constraint
from agentflow.protocol.decisions import Question
from agentflow.protocol.events import Capabilities, EndpointStats, ErrorInfo, PassedOver, Stats, summed
from agentflow.protocol.sampling import GenParams
from agentflow.runtime.circuit import no_alternative
from agentflow.runtime.generator import (
    Decided,
    EmbeddingOptions,
    Embeddings,
    Generated,
    OnText,
    Scored,
    StateHint,
)

if TYPE_CHECKING:  # it imports httpx2
    from agentflow.backends.apis.generation.generator import ApiGenerator

logger = logging.getLogger(__name__)

ResultT = TypeVar("ResultT", Generated, Scored, Decided)


class _PaidBackend(Backend, Protocol):
    @property
    def source(self) -> str:
        """The address and the model."""

    def with_costs(self, costs: Costs) -> _PaidBackend:
        """The backend with the prices and the cap of the session."""


class Fallback:
    """Several models behind APIs, of which the first that can answers each call.

    Args:
        backends: The models in the order in which they are asked: addresses as for ``af.session``
            (``openai:MODEL``, ``anthropic:MODEL``, ``http://host:8000/v1``), or backends such as
            ``af.OpenAI``. Sessions of one object share its knowledge of failures.

    Raises:
        BadArgument: There are fewer than two, or one is not behind an API.

    >>> af.Fallback(af.OpenAI("gpt-4.1-mini", api_key="sk-..."), "http://127.0.0.1:8000/v1")
    Fallback(OpenAI('gpt-4.1-mini'), OpenAICompatible('http://127.0.0.1:8000/v1'))
    """

    def __init__(self, *backends: str | os.PathLike[str] | Backend) -> None:
        if len(backends) < 2:
            raise BadArgument("Fallback: give at least two models", param="fallback")
        self._backends: list[_PaidBackend] = []
        first = backends[0] if isinstance(backends[0], str) else None
        for backend in backends:
            if isinstance(backend, Fallback):
                self._backends += backend._backends
            else:
                self._backends.append(_api_backend(backend, first))

    def __repr__(self) -> str:
        return f"Fallback({', '.join(map(repr, self._backends))})"

    @property
    def source(self) -> str:
        """The sources of all models. For the keys of caches."""
        return repr([backend.source for backend in self._backends])

    def with_costs(self, costs: Costs) -> Fallback:
        """All models with the prices and the cap of the session. For the session."""
        fallback = copy.copy(self)
        fallback._backends = [backend.with_costs(costs) for backend in self._backends]
        return fallback

    @asynccontextmanager
    async def connect(self, deliver: Deliver, lost: Lost) -> AsyncIterator[Connection]:
        """Opens all models. A server that must be asked for its model and does not answer is left out.
        For the session."""
        async with AsyncExitStack() as stack:
            found: list[ApiGenerator] = []
            failures: list[AgentflowError] = []
            for backend in self._backends:
                try:
                    connection = await stack.enter_async_context(backend.connect(_ignore, lost))
                except AgentflowError as error:
                    if not is_transient(error):
                        raise
                    logger.warning("%r is left out of the session: %s", backend, error)
                    failures.append(error)
                    continue
                found.append(_generator(backend, connection))
            if not found:
                raise failures[0]
            yield await stack.enter_async_context(interpreted(FallbackGenerator(found), deliver))


def _api_backend(given: Any, first: str | None) -> _PaidBackend:
    found: Any = api_backend(given, first=first) if isinstance(given, str) else given
    backend: _PaidBackend = found
    if not isinstance(found, ApiBackend | AskedServer):
        raise BadArgument(
            f"fallback: {short_repr(given)} is not behind an API: give an address such as openai:MODEL or "
            "http://host:8000/v1, or a backend such as af.OpenAI(…)",
            param="fallback",
        )
    return backend


def _ignore(events: Iterable[Any]) -> None:
    """Takes the events of a candidate's own interpreter, which runs nothing."""


def _generator(backend: object, connection: Connection) -> ApiGenerator:
    from agentflow.backends.apis.generation.generator import ApiGenerator

    generator = getattr(connection, "generator", None)
    if not isinstance(generator, ApiGenerator):
        raise BadArgument(
            f"fallback: {backend!r:.200} is an agentflow server: give the address of its API, which ends in "
            "/v1",
            param="fallback",
        )
    return generator


class FallbackGenerator(ContextOperations):
    """Generates with the first of several models that can.

    Args:
        candidates: The generators, in the order in which they are asked.
    """

    def __init__(self, candidates: Sequence[ApiGenerator]) -> None:
        self._candidates = list(candidates)
        self._first = candidates[0]
        self.capabilities = common_capabilities([one.capabilities for one in candidates])
        counts = Counter(one.capabilities.model for one in candidates)
        self._names = {
            one: one.capabilities.model if counts[one.capabilities.model] == 1 else one.endpoint
            for one in candidates
        }

    async def generate(
        self,
        context: ApiContext,
        params: GenParams,
        on_text: OnText,
        constraint: Constraint | None = None,
        on_reasoning: OnText | None = None,
    ) -> Generated:
        """Like ``ApiGenerator.generate``, with the first model that can."""
        seen = _Seen(on_text, on_reasoning)
        return await self._ask(
            context,
            seen,
            lambda one: one.generate(context, params, seen.text, constraint, seen.on_reasoning),
        )

    async def reply(
        self,
        context: ApiContext,
        params: GenParams,
        on_text: OnText,
        constraint: Constraint | None = None,
        on_reasoning: OnText | None = None,
    ) -> Generated:
        """Like ``ApiGenerator.reply``, with the first model that can."""
        seen = _Seen(on_text, on_reasoning)
        return await self._ask(
            context, seen, lambda one: one.reply(context, params, seen.text, constraint, seen.on_reasoning)
        )

    async def score(self, context: ApiContext, choices: Sequence[str], method: str) -> Scored:
        """Like ``ApiGenerator.score``, with the first model that can."""
        return await self._ask(context, _Seen(), lambda one: one.score(context, choices, method))

    async def decide(self, context: ApiContext, questions: Sequence[Question]) -> Decided:
        """Like ``ApiGenerator.decide``, with the first model that can."""
        return await self._ask(context, _Seen(), lambda one: one.decide(context, questions))

    async def _ask(
        self, context: ApiContext, seen: _Seen, call: Callable[[ApiGenerator], Awaitable[ResultT]]
    ) -> ResultT:
        untried = list(self._candidates)
        passed: dict[ApiGenerator, AgentflowError] = {}
        upcoming, trace = context.upcoming, context.trace

        def has_alternative() -> bool:
            return any(one.circuit.is_ready for one in untried)

        chosen = self._begin(context, passed)
        while True:
            untried.remove(chosen)
            passed.pop(chosen, None)
            context.model, context.has_alternative = chosen, has_alternative
            context.upcoming, context.trace = upcoming, trace
            try:
                result = await call(chosen)
            except AgentflowError as error:
                if seen.is_visible or not is_endpoint_fault(error):
                    raise
                passed[chosen] = error
                context.leave_ahead()
                if not has_alternative():
                    if len(passed) == 1:
                        raise
                    raise self._failure(passed, error) from None
            else:
                over = [PassedOver(self._names[one], ErrorInfo.of(error)) for one, error in passed.items()]
                return msgspec.structs.replace(result, model=self._names[chosen], passed_over=tuple(over))
            finally:
                context.has_alternative = no_alternative
            chosen = next(one for one in untried if one.circuit.is_ready)

    def _begin(self, context: ApiContext, passed: dict[ApiGenerator, AgentflowError]) -> ApiGenerator:
        """The first candidate of a call: the candidate whose earlier call has the text already, else the
        first whose circuit is closed; if all circuits are open, the candidate that is tried again first."""
        if context.ahead is not None:
            return next(one for one in self._candidates if one is context.ahead.model)
        for one in self._candidates:
            if one.circuit.is_ready:
                return one
            passed[one] = one.circuit_open()
        chosen = min(self._candidates, key=lambda one: one.circuit.left_s)
        del passed[chosen]
        return chosen

    def _failure(self, passed: dict[ApiGenerator, AgentflowError], last: AgentflowError) -> AgentflowError:
        """The error of a call that several candidates did not answer."""
        said = "; ".join(f"{self._names[one]}: {error}" for one, error in passed.items())
        # An error that another attempt may cure has precedence, so that a map tries again.
        kind = type(next((error for error in passed.values() if is_transient(error)), last))
        error = kind(f"no model answered: {said}")
        if isinstance(error, Overloaded):
            waits = [getattr(one, "retry_after_s", None) for one in passed.values()]
            error.retry_after_s = min([wait_s for wait_s in waits if wait_s is not None], default=None)
        return error

    async def stats(self) -> Stats:
        """The counters of the session, over all candidates."""
        parts = [await one.stats() for one in self._candidates]
        endpoints = [
            EndpointStats(
                name,
                one.circuit.status,
                one.circuit.num_answered,
                one.circuit.num_failures,
                one.circuit.left_s or None,
            )
            for one, name in self._names.items()
        ]
        return msgspec.structs.replace(summed(parts), endpoints=tuple(endpoints))

    def open(self, cache_salt: str, *, program: str = "", label: str = "") -> ApiContext:
        """An empty context."""
        return self._first.open(cache_salt, program=program, label=label)

    def hint(self, context: ApiContext, hint: StateHint) -> None:
        """Like ``ApiGenerator.hint``, for the model that is asked next. A scheduling hint, and the end of
        a state, come at any time, also while another model answers, and have no effect on APIs."""
        if hint == StateHint(scheduling=hint.scheduling, is_dropped=hint.is_dropped):
            return
        ready = next((one for one in self._candidates if one.circuit.is_ready), None)
        if ready is None and hint.forks is not None:
            hint = msgspec.structs.replace(hint, forks=None)
        asked = ready or self._first
        context.model = asked
        asked.hint(context, hint)

    async def embed(self, texts: Sequence[str], options: EmbeddingOptions) -> Embeddings:
        """``NotSupported``: the vectors of two models cannot be compared."""
        raise NotSupported("a session with a fallback makes no embeddings: open one for the embedding model")


class _Seen:
    """Notes whether something of an answer has become visible."""

    def __init__(self, on_text: OnText | None = None, on_reasoning: OnText | None = None) -> None:
        self._on_text = on_text
        self._on_reasoning = on_reasoning
        self.is_visible = False

    def text(self, delta: str) -> None:
        """More text."""
        self.is_visible = True
        if self._on_text is not None:
            self._on_text(delta)

    @property
    def on_reasoning(self) -> OnText | None:
        """Receives reasoning, if the program wants it."""
        return None if self._on_reasoning is None else self._reasoning

    def _reasoning(self, delta: str) -> None:
        self.is_visible = True
        if self._on_reasoning is not None:
            self._on_reasoning(delta)


def common_capabilities(candidates: Sequence[Capabilities]) -> Capabilities:
    """The features that all models have, under the name of the first."""
    first = candidates[0]

    switches: dict[str, Any] = {name: all(getattr(one, name) for one in candidates) for name in _SWITCHES}
    lengths = [one.max_context for one in candidates if one.max_context is not None]
    outputs = [one.default_max_tokens for one in candidates if one.default_max_tokens is not None]
    known = [one.sampling for one in candidates if one.sampling is not None]
    return Capabilities(
        first.model,
        **switches,
        max_context=min(lengths, default=None),
        constraints=tuple(
            [kind for kind in first.constraints if all(kind in one.constraints for one in candidates)]
        ),
        sampling=tuple([name for name in known[0] if all(name in one for one in known)]) if known else None,
        default_max_tokens=max(outputs) if len(outputs) == len(candidates) else None,
        reasons=any(one.reasons for one in candidates) or None,
        candidates=tuple(candidates),
    )


_SWITCHES = (
    "roles",
    "select",
    "logprobs",
    "seeds",
    "images",
    "videos",
    "video_frames",
    "token_ids",
    "conversations",
    "continuation",
    "plain_text",
    "decisions",
    "generates",
)
