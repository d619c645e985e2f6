"""Models behind the APIs of vendors and other servers.

``ApiModel`` is one of a server's models. Its requests go to the API with the server's key. Each tenant has a
``TenantGenerator``, which applies the tenant's limits and counts its tokens and costs: the model's generator
itself serves all tenants.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import re
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Protocol

import anyio
import msgspec

from agentflow.engine.tenant import ANONYMOUS, AdmittedRequest, Tenant
from agentflow.errors import (
    AgentflowError,
    BadArgument,
    EngineDown,
    EngineFailed,
    InvalidValue,
    NotAuthorized,
    NotSupported,
    Overloaded,
    RateLimited,
    RequestRefused,
    ServerError,
    ServerLost,
    ServerUnreachable,
    UnknownModel,
)
from agentflow.protocol.constraint import Constraint
from agentflow.protocol.decisions import Question, question_text
from agentflow.protocol.events import Stats, Usage
from agentflow.protocol.sampling import GenParams
from agentflow.runtime.generator import (
    Decided,
    EmbeddingOptions,
    Embeddings,
    Generated,
    Generator,
    OnText,
    Scored,
    StateHint,
    Upcoming,
)
from agentflow.runtime.payer import PAYER, Settle
from agentflow.server.models.alias import AliasModel
from agentflow.server.tenants.rate_limit import COST_PARAM, TenantGate

logger = logging.getLogger(__name__)

CHARS_PER_TOKEN = 4
"""An estimate: the API reports tokens at the end of a call."""
# The addresses of other servers, in messages of their backends.
_ADDRESS = re.compile(r" (?:at|of) https?://\S+?(?=:?\s|:?$)")

_FIRST_ADDRESS = re.compile(r"^https?://\S+")


class CallObserver(Protocol):
    """Observes the calls of an ``ApiModel``. Must not raise."""

    def call_begun(self, call_id: int, tenant: str, *, generates: bool = True) -> None:
        """A call was admitted. ``generates``: it generates text; otherwise it makes embeddings."""

    def call_has_text(self, call_id: int) -> None:
        """The first text of the call has arrived."""

    def call_ended(self, call_id: int, usage: Usage) -> None:
        """The call is complete. Its usage has no costs: ``charged`` receives the costs of its requests."""

    def call_failed(self, call_id: int, code: str) -> None:
        """The call failed, or was cancelled (``cancelled``)."""

    def charged(self, tenant: str, usage: Usage) -> None:
        """A call that did not complete used these tokens, by estimate, or a request had this cost."""


class ApiModel:
    """A model behind an API.

    Args:
        name: its name on the server.
        generator: generates with it, for all tenants.
        gate: the rate limits of its tenants.
        aliases: its other names.
    """

    def __init__(
        self,
        name: str,
        generator: Generator[Any],
        *,
        gate: TenantGate | None = None,
        aliases: Sequence[str] = (),
    ) -> None:
        self.name = name
        self.created_s = int(time.time())
        self.inner = generator
        self.gate = gate
        self.observers: list[CallObserver] = []
        self._aliases = tuple(AliasModel(self, alias) for alias in aliases)
        self._generators: dict[tuple[str, str], TenantGenerator] = {}  # by tenant and name
        self._tenants: dict[str, Tenant] = {}
        self._call_ids = itertools.count(1)
        self._running: set[int] = set()
        self._is_idle = anyio.Event()

    @property
    def makes_embeddings(self) -> bool:
        return not self.inner.capabilities.generates

    @property
    def num_running(self) -> int:
        """The number of running calls."""
        return len(self._running)

    def aliases(self) -> Sequence[AliasModel[TenantGenerator]]:
        return self._aliases

    def adapted(self) -> tuple[()]:
        return ()

    def generator(self, tenant: Tenant, name: str = "") -> TenantGenerator:
        """The generator of the tenant. ``name``: the alias that answers show."""
        name = name or self.name
        generator = self._generators.get((tenant.name, name))
        if generator is None:
            known = self._tenants.get(tenant.name, tenant)
            generator = self._generators[tenant.name, name] = TenantGenerator(self, known, name)
        return generator

    def observe(self, observer: CallObserver) -> None:
        """Registers an observer of all calls."""
        self.observers.append(observer)

    def keep_tenants(self, tenants: Iterable[Tenant]) -> None:
        self._tenants = {tenant.name: tenant for tenant in (ANONYMOUS, *tenants)}
        self._generators = {key: one for key, one in self._generators.items() if key[0] in self._tenants}
        for (name, _), generator in self._generators.items():
            generator.tenant = self._tenants[name]

    def check_admission(self, tenant: Tenant, priority: int = 0) -> None:
        """``RateLimited`` if the tenant may not send a request now. Calls are not queued here, so there is no
        ``Overloaded``."""
        if self.gate is not None:
            self.gate.check(tenant)

    async def until_idle(self) -> None:
        while self._running:
            await self._is_idle.wait()

    @contextmanager
    def calling(self) -> Iterator[int]:
        """The scope of a call. Yields its number."""
        call_id = next(self._call_ids)
        self._running.add(call_id)
        try:
            yield call_id
        finally:
            self._running.remove(call_id)
            if not self._running:
                self._is_idle.set()
                self._is_idle = anyio.Event()


class TenantGenerator:
    """A tenant's generator on a model behind an API, which counts tokens and costs.

    Args:
        model: the model.
        tenant: the tenant, whose limits apply, and whose name is part of the cache salt.
        name: the name of the model in answers.
    """

    def __init__(self, model: ApiModel, tenant: Tenant, name: str) -> None:
        self.model = model
        self.tenant = tenant
        embedding_models = (name,) if model.makes_embeddings else ()
        self.capabilities = msgspec.structs.replace(
            model.inner.capabilities, model=name, embedding_models=embedding_models
        )
        self._inner = inner = model.inner
        self._own = Usage()
        # The methods that count nothing.
        self.fill, self.begin_role, self.end_role = inner.fill, inner.begin_role, inner.end_role
        self.image, self.video = inner.image, inner.video
        self.converse, self.offer_tools = inner.converse, inner.offer_tools
        self.fork, self.free, self.watching = inner.fork, inner.free, inner.watching
        self.text, self.token_ids, self.token_texts = inner.text, inner.token_ids, inner.token_texts

    def check_gate(self, num_requests: int) -> None:
        """``RateLimited`` if the tenant may not send this many requests now."""
        if self.model.gate is not None:
            self.model.gate.check(self.tenant, num_requests)

    def open(self, cache_salt: str, *, program: str = "", label: str = "") -> Any:
        """Opens an empty context, with a salt that other tenants do not have."""
        if self.tenant.name:  # hashed, because it is sent to other servers
            cache_salt = hashlib.sha256(f"{self.tenant.name}\n{cache_salt}".encode()).hexdigest()
        return self._inner.open(cache_salt, program=program, label=label)

    def expect(self, context: Any, upcoming: Sequence[Upcoming]) -> None:
        """Announces the text and gens that follow the next gen in its turn."""
        expect = getattr(self._inner, "expect", None)
        if expect is not None:
            expect(context, upcoming)

    async def generate(
        self,
        context: Any,
        params: GenParams,
        on_text: OnText,
        constraint: Constraint | None = None,
        on_reasoning: OnText | None = None,
    ) -> Generated:
        """Generates a continuation. The arguments are as in ``Generator.generate``."""
        await self._until_ready()
        with self._call(self._num_chars(context)) as call:
            generated = await self._inner.generate(
                context, params, call.counting(on_text), constraint, call.counting_or_none(on_reasoning)
            )
            call.end(generated.usage)
        return generated

    async def reply(
        self,
        context: Any,
        params: GenParams,
        on_text: OnText,
        constraint: Constraint | None = None,
        on_reasoning: OnText | None = None,
    ) -> Generated:
        """Like ``generate``, but the model may call the context's tools."""
        await self._until_ready()
        with self._call(self._num_chars(context)) as call:
            generated = await self._inner.reply(
                context, params, call.counting(on_text), constraint, call.counting_or_none(on_reasoning)
            )
            call.end(generated.usage)
        return generated

    async def score(self, context: Any, choices: Sequence[str], method: str) -> Scored:
        """Appends the choice with the highest score."""
        await self._until_ready()
        with self._call(self._num_chars(context)) as call:
            scored = await self._inner.score(context, choices, method)
            call.end(scored.usage)
        return scored

    async def decide(self, context: Any, questions: Sequence[Question]) -> Decided:
        """Answers questions about the context."""
        num_chars = sum([len(question_text(question)) for question in questions])
        await self._until_ready()
        with self._call(self._num_chars(context) + num_chars) as call:
            decided = await self._inner.decide(context, questions)
            call.end(decided.usage)
        return decided

    async def embed(self, texts: Sequence[str], options: EmbeddingOptions) -> Embeddings:
        """Makes embeddings, if the model can."""
        self.capabilities.require_embeddings()
        await self._until_ready()
        with self._call(sum(map(len, texts)), generates=False) as call:
            made = await self._inner.embed(texts, options)
            call.end(made.usage)
        return made

    def hint(self, context: Any, hint: StateHint) -> None:
        """Passes on advice about the context's next ops."""
        token = PAYER.set(_TenantPayer(self, None))
        try:
            self._inner.hint(context, hint)
        finally:
            PAYER.reset(token)

    async def stats(self) -> Stats:
        """The counters of the tenant. If it sees the metrics, they also have the numbers of all running
        calls, failed speculations and repeated requests. The counters of an engine are None."""
        own, inner = self._own, await self._inner.stats()
        may_see = self.tenant.sees_metrics
        return msgspec.structs.replace(
            inner,
            model=self.capabilities.model,
            prompt_tokens=own.prompt_tokens,
            cached_tokens=own.cached_tokens,
            generated_tokens=own.output_tokens,
            running=self.model.num_running if may_see else None,
            cost=own.cost,
            saved_calls=own.saved_calls,
            saved_tokens=own.saved_tokens,
            failed_speculations=inner.failed_speculations if may_see else None,
            hedged_calls=inner.hedged_calls if may_see else None,
        )

    @asynccontextmanager
    async def metered(self) -> AsyncIterator[None]:
        """The scope of work that counts as a request of the tenant but generates nothing. ``RateLimited``."""
        await self._until_ready()
        with self._admitted(0):
            yield

    @contextmanager
    def _call(self, num_chars: int, *, generates: bool = True) -> Iterator[_Call]:
        """The scope of one call, which is counted at its end. Errors of the API become errors of a model of
        this server, since clients do not know the API."""
        with self._admitted(num_chars // CHARS_PER_TOKEN) as admitted, self.model.calling() as call_id:
            call = _Call(call_id, admitted, self.model.observers)
            call.begin(self.tenant.name, generates)
            token = PAYER.set(_TenantPayer(self, call))
            try:
                yield call
            except AgentflowError as error:
                shown = self._shown(error)
                call.fail(shown.code)
                if admitted.output_tokens or call.is_paid:
                    self.charge(call.estimate())
                if shown is error:
                    raise
                raise shown from error
            except BaseException:
                call.fail("cancelled")
                self.charge(call.estimate())
                raise
            finally:
                PAYER.reset(token)
            self._own += _unpaid(call.usage)

    def charge(self, usage: Usage) -> None:
        """Counts the usage of a call that did not complete, or the cost of a request."""
        self._own += usage
        for observer in self.model.observers:
            observer.charged(self.tenant.name, usage)

    def _num_chars(self, context: Any) -> int:
        return len(self._inner.text(context))

    async def _until_ready(self) -> None:
        """Prepares the gate for ``_admitted``, which must follow immediately."""
        if self.model.gate is not None and (leasing := self.model.gate.ready(self.tenant)) is not None:
            await leasing

    @contextmanager
    def _admitted(self, prompt_tokens: int) -> Iterator[AdmittedRequest]:
        if self.model.gate is None:
            yield AdmittedRequest(prompt_tokens)
            return
        with self.model.gate.request(self.tenant, prompt_tokens) as admitted:
            yield admitted

    def _shown(self, error: AgentflowError) -> AgentflowError:
        """The error for the server's clients. Errors about the server's key, its limits or its connection to
        the API are logged for the operator, without their details for clients."""
        name, shown = self.capabilities.model, error
        match error:
            case NotAuthorized():
                shown = EngineFailed(
                    f"the API of {name} rejected the server's key: ask the server's operator"
                )
            case UnknownModel():
                shown = EngineFailed(f"the API of {name} does not have its model: ask the server's operator")
            case RateLimited() if error.param == COST_PARAM:
                pass  # the tenant's own limit
            case RateLimited():
                limited = Overloaded(f"the API of {name} limits the server's requests: try again later")
                limited.retry_after_s = error.retry_after_s
                shown = limited
            case Overloaded():  # its message has the address of the API
                busy = Overloaded(f"the API of {name} is overloaded: try again later")
                busy.retry_after_s = error.retry_after_s
                shown = busy
            case ServerUnreachable() | ServerLost() | EngineDown():
                shown = EngineDown(f"the API of {name} cannot be reached: try again later")
            case RequestRefused() | InvalidValue():
                text = _ADDRESS.sub("", _FIRST_ADDRESS.sub("the API", str(error)))
                shown = type(error)(text, param=error.param)
                if isinstance(error, InvalidValue) and isinstance(shown, InvalidValue):
                    shown.text, shown.usage = error.text, error.usage
            case BadArgument() if error.param == "url":  # the operator's address of the API is wrong
                shown = EngineFailed(f"the API of {name} failed: the server's log has the reason")
            case ServerError() | EngineFailed():
                shown = EngineFailed(f"the API of {name} failed: the server's log has the reason")
        if not isinstance(shown, RequestRefused) and shown is not error:
            logger.warning("a call to the API of %s failed: %s", name, error)
        return shown


class _Call:
    """One call, and its usage so far."""

    def __init__(self, call_id: int, admitted: AdmittedRequest, observers: Sequence[CallObserver]) -> None:
        self.usage = Usage()
        self.is_paid = False
        """Whether one of the call's requests had a cost."""
        self._id = call_id
        self._admitted = admitted
        self._observers = observers
        self._num_chars = 0

    def begin(self, tenant: str, generates: bool) -> None:
        for observer in self._observers:
            observer.call_begun(self._id, tenant, generates=generates)

    def counting(self, on_text: OnText) -> OnText:
        """Wraps ``on_text``: until the end, the tokens are estimated from its characters."""

        def count(text: str) -> None:
            if not self._num_chars and text:
                for observer in self._observers:
                    observer.call_has_text(self._id)
            self._num_chars += len(text)
            self._admitted.output_tokens = -(-self._num_chars // CHARS_PER_TOKEN)
            on_text(text)

        return count

    def counting_or_none(self, on_text: OnText | None) -> OnText | None:
        """Like ``counting``, for a callback that may be None."""
        return None if on_text is None else self.counting(on_text)

    def end(self, usage: Usage) -> None:
        """Records the usage that the API reported."""
        self.usage = usage
        self._admitted.prompt_tokens, self._admitted.cached_tokens = usage.prompt_tokens, usage.cached_tokens
        self._admitted.output_tokens = usage.output_tokens
        for observer in self._observers:
            observer.call_ended(self._id, _unpaid(usage))

    def fail(self, code: str) -> None:
        for observer in self._observers:
            observer.call_failed(self._id, code)

    def estimate(self) -> Usage:
        """The usage of a call that did not complete: the tokens that were charged to the tenant."""
        return Usage(self._admitted.prompt_tokens, 0, self._admitted.output_tokens)


def _unpaid(usage: Usage) -> Usage:
    """The usage without costs. A cost is counted when its request is paid (``_TenantPayer``): the usage that
    shows it may belong to another call, or to none."""
    return msgspec.structs.replace(usage, cost=0.0)


class _TenantPayer:
    """Pays for requests within the limits of a tenant, and counts each cost once. Some requests outlive the
    call that began them (speculation).

    Args:
        generator: the tenant's generator.
        call: the call that sends the requests; None: they only prepare calls.
    """

    def __init__(self, generator: TenantGenerator, call: _Call | None) -> None:
        self._generator = generator
        self._call = call

    async def until_ready(self, highest: float) -> None:
        """Prepares the gate for ``reserve``."""
        gate, tenant = self._generator.model.gate, self._generator.tenant
        if gate is not None and (leasing := gate.ready_to_pay(tenant, highest)) is not None:
            await leasing

    def reserve(self, highest: float | None) -> Settle:
        """Takes the highest cost of a request from the tenant's limit."""
        model, tenant = self._generator.model, self._generator.tenant
        if highest is None:
            if model.gate is not None and model.gate.limits_cost(tenant):
                raise NotSupported(
                    f"the price of {self._generator.capabilities.model} is unknown, and this API key's "
                    "tenant has a limit of costs: use another model, or ask the operator for a price",
                    param="model",
                )
            return lambda cost: None
        settle = None if model.gate is None else model.gate.reserve_cost(tenant, highest)

        def end(cost: float | None) -> None:
            if settle is not None:
                settle(cost)
            paid = highest if cost is None else cost  # the amount that stays charged to the limit
            if paid:
                self._generator.charge(Usage(cost=paid))
                if self._call is not None:
                    self._call.is_paid = True

        return end

    def waste(self, usage: Usage) -> None:
        """Counts tokens that are not in the usage of any value."""
        self._generator.charge(_unpaid(usage))
