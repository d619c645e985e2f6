"""The models of a server, by name, and the admission of their requests.

``Models`` finds the model that a request names. Each ``EngineModel`` has its own engine, KV pool and prefix
cache, and an ``Admission`` that rejects requests that would wait too long, before they wait.

The expected wait is estimated for each tenant from how fast its requests start while some wait: the average
time between the latest starts, times the number of requests with the same or a higher priority that wait. It
does not depend on the order of their start. Requests of other tenants count through the time between starts.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from agentflow.engine.client import EngineClient
from agentflow.engine.generator.generator import EngineGenerator
from agentflow.engine.grammar.compiler.compiler import CompileCounts, ConstraintCompiler
from agentflow.engine.process.ipc import Failed, Finished, FromEngine, Started, Submit
from agentflow.engine.store.embedding_folder import EmbeddingFolder
from agentflow.engine.tenant import ANONYMOUS, Tenant
from agentflow.engine.text.chat_template import ChatTemplate
from agentflow.errors import Overloaded, UnknownModel, listed
from agentflow.runtime.generator import Embedder, Generator
from agentflow.server.models.request_spans import request_spans
from agentflow.server.tenants.rate_limit import TenantGate

# The number of latest starts that the average covers.
NUM_REMEMBERED = 32
# Tenants without waiting requests whose averages are kept.
MAX_IDLE_TENANTS = 1_000


@dataclass(slots=True)
class _Line:
    """The waiting requests of one tenant with their priorities. ``busy_s``: the time in which the latest
    ``num_started`` started, without times when none waited. ``moved_s``: when the last one started, or the
    first one arrived."""

    waiting: dict[int, int] = field(default_factory=dict)
    num_waiting: Counter[int] = field(default_factory=Counter)  # by priority
    busy_s: float = 0.0
    num_started: float = 0.0
    moved_s: float = 0.0

    def expected_wait_s(self, priority: int, now_s: float) -> float:
        num_before = sum(num for other, num in self.num_waiting.items() if other >= priority)
        if not num_before:
            return 0.0
        since_s = now_s - self.moved_s  # if nothing starts, it takes at least that long
        if not self.num_started:
            return since_s
        return max(since_s, num_before * (self.busy_s + since_s) / self.num_started)

    def add(self, request_id: int, priority: int, now_s: float) -> None:
        if not self.waiting:
            self.moved_s = now_s
        self.waiting[request_id] = priority
        self.num_waiting[priority] += 1

    def remove(self, request_id: int) -> None:
        priority = self.waiting.pop(request_id)
        self.num_waiting[priority] -= 1
        if not self.num_waiting[priority]:
            del self.num_waiting[priority]

    def start(self, request_ids: Sequence[int], now_s: float) -> None:
        """Records that these started in one step. If none is left waiting, the engine had room for more, so
        the measured time is an upper bound."""
        for request_id in request_ids:
            self.remove(request_id)
        num, took_s = len(request_ids), now_s - self.moved_s
        if self.waiting or took_s * self.num_started < num * self.busy_s:
            kept = max(0.0, 1 - num / NUM_REMEMBERED)
            self.busy_s = self.busy_s * kept + took_s
            self.num_started = self.num_started * kept + num
        self.moved_s = now_s


class Admission:
    """A ``RequestObserver`` of one engine. ``max_wait_s``: the longest accepted expected wait; None: any.
    ``clock``: seconds."""

    def __init__(self, max_wait_s: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_wait_s = max_wait_s
        self._clock = clock
        self._lines: OrderedDict[str, _Line] = OrderedDict()
        self._tenant_of: dict[int, str] = {}

    def expected_wait_s(self, tenant: str, priority: int = 0) -> float:
        """The expected wait of a new request of this tenant."""
        line = self._lines.get(tenant)
        return 0.0 if line is None else line.expected_wait_s(priority, self._clock())

    def check(self, tenant: str, priority: int = 0) -> None:
        """``Overloaded`` with ``retry_after_s``, if a new request would wait too long."""
        if self._max_wait_s is None:
            return
        wait_s = self.expected_wait_s(tenant, priority)
        if wait_s > self._max_wait_s:
            error = Overloaded(
                f"the server is busy: a request would wait about {wait_s:.0f} s, and {self._max_wait_s:g} s "
                "are the limit; try again later"
            )
            error.retry_after_s = max(1.0, wait_s - self._max_wait_s)
            raise error

    def sent(self, submit: Submit) -> None:
        """Adds a request that waits from now on."""
        tenant = submit.origin.tenant
        line = self._lines.get(tenant)
        if line is None:
            line = self._lines[tenant] = _Line()
        self._lines.move_to_end(tenant)
        line.add(submit.request_id, submit.origin.priority, self._clock())
        self._tenant_of[submit.request_id] = tenant
        self._forget_the_idle()

    def received(self, messages: Sequence[FromEngine]) -> None:
        """Removes requests that started, or ended before that."""
        for message in messages:
            match message:
                case Started():
                    self._start(message.request_ids)
                case Finished() | Failed():
                    tenant = self._tenant_of.pop(message.request_id, None)
                    if tenant is not None:  # otherwise it had started
                        self._lines[tenant].remove(message.request_id)

    def _start(self, request_ids: Sequence[int]) -> None:
        started: defaultdict[str, list[int]] = defaultdict(list)
        for request_id in request_ids:
            tenant = self._tenant_of.pop(request_id, None)
            if tenant is not None:  # otherwise it had started before, and was preempted
                started[tenant].append(request_id)
        now_s = self._clock()
        for tenant, ids in started.items():
            self._lines[tenant].start(ids, now_s)

    def _forget_the_idle(self) -> None:
        while len(self._lines) > MAX_IDLE_TENANTS:
            tenant, line = next(iter(self._lines.items()))
            if line.waiting:
                return
            del self._lines[tenant]


class Model(Protocol):
    """One model. ``created_s``: when the server loaded it (Unix time)."""

    name: str
    created_s: int

    @property
    def makes_embeddings(self) -> bool:
        """Whether it makes embeddings and generates nothing."""

    def generator(self, tenant: Tenant) -> Generator[Any]:
        """The generator of the tenant, the same for each call."""

    def named(self) -> Sequence[Model]:
        """The model under each of its other names."""

    def adapted(self) -> Sequence[Model]:
        """The model with each of its adapters (LoRA)."""

    def keep_tenants(self, tenants: Iterable[Tenant]) -> None:
        """Applies the settings of these tenants and removes all others."""

    def check_admission(self, tenant: Tenant, priority: int = 0) -> None:
        """``Overloaded`` if a new request would wait too long."""

    async def until_idle(self) -> None:
        """Waits until all of its requests have ended."""


class EngineModel:
    """A model on an engine. ``gate``: the rate limits of its tenants. ``max_wait_s``: the longest expected
    wait of a request over HTTP; None: any. ``embedding``: as of ``EngineGenerator``. ``aliases``: its other
    names."""

    def __init__(
        self,
        name: str,
        client: EngineClient,
        template: ChatTemplate,
        *,
        compiler: ConstraintCompiler | None = None,
        gate: TenantGate | None = None,
        max_wait_s: float | None = None,
        embedding: EmbeddingFolder | None = None,
        aliases: Sequence[str] = (),
    ) -> None:
        self.name = name
        self._embedding = embedding
        self.created_s = int(time.time())
        self.client = client
        self._template = template
        self._compiler = compiler
        self._gate = gate
        self._max_wait_s = max_wait_s
        self._admission = Admission(max_wait_s)
        client.observe(self._admission)
        if (spans := request_spans(name)) is not None:
            client.observe(spans)
        self._generators: dict[tuple[str, str, str], EngineGenerator] = {}  # by tenant, name and adapter
        self._adapted: dict[str, AdaptedModel] = {}
        self._aliases = tuple(AliasModel(self, alias) for alias in aliases)
        self._tenants: dict[str, Tenant] = {}

    @property
    def makes_embeddings(self) -> bool:
        return self.client.info.embedding_size > 0

    def named(self) -> Sequence[AliasModel]:
        return self._aliases

    def adapted(self) -> Sequence[AdaptedModel]:
        loaded = self.client.adapters
        self._adapted = {name: self._adapted.get(name) or AdaptedModel(self, name) for name in loaded}
        return tuple(self._adapted.values())

    def generator(self, tenant: Tenant, adapter: str = "", name: str = "") -> EngineGenerator:
        """The generator of the tenant for the model, or with the adapter of that name. ``name``: the one that
        answers show, if it is an alias."""
        name = name or self.name
        generator = self._generators.get((tenant.name, name, adapter))
        if generator is None:
            generator = self._generators[tenant.name, name, adapter] = EngineGenerator(
                self.client,
                self._template,
                name=f"{name}:{adapter}" if adapter else name,
                adapter=adapter,
                # A request may have the settings from before a reload.
                tenant=self._tenants.get(tenant.name, tenant),
                gate=self._gate,
                compiler=self._compiler,
                patience_s=self._max_wait_s,
                embedding=self._embedding,
            )
        return generator

    def keep_tenants(self, tenants: Iterable[Tenant]) -> None:
        """Applies new weights to states that are opened from now on, also in open sessions, and drops what is
        kept for removed tenants."""
        self._tenants = {tenant.name: tenant for tenant in (ANONYMOUS, *tenants)}
        self._generators = {key: one for key, one in self._generators.items() if key[0] in self._tenants}
        for (name, _, _), generator in self._generators.items():
            generator.tenant = self._tenants[name]

    def unload_adapter(self, name: str) -> None:
        """Requests that were sent keep the adapter until they end; later ones get ``UnknownModel``."""
        self.client.unload_adapter(name)
        self._generators = {key: one for key, one in self._generators.items() if key[2] != name}

    def check_admission(self, tenant: Tenant, priority: int = 0) -> None:
        """``RateLimited`` if the tenant may not send a request now, ``Overloaded`` if it would wait too
        long."""
        if self._gate is not None:
            self._gate.check(tenant)
        self._admission.check(tenant.name, priority)

    async def until_idle(self) -> None:
        await self.client.until_idle()


class _SharedModel:
    """A model on the engine, cache and admission of another one."""

    def __init__(self, base: EngineModel, name: str) -> None:
        self.name = name
        self.created_s = int(time.time())
        self._base = base

    def named(self) -> Sequence[Model]:
        return ()

    def adapted(self) -> Sequence[Model]:
        return ()

    def keep_tenants(self, tenants: Iterable[Tenant]) -> None:
        """Has no effect: the model does it."""

    def check_admission(self, tenant: Tenant, priority: int = 0) -> None:
        self._base.check_admission(tenant, priority)

    async def until_idle(self) -> None:
        await self._base.until_idle()


class AliasModel(_SharedModel):
    """A model under another name."""

    @property
    def makes_embeddings(self) -> bool:
        return self._base.makes_embeddings

    def generator(self, tenant: Tenant) -> EngineGenerator:
        return self._base.generator(tenant, name=self.name)


class AdaptedModel(_SharedModel):
    """A model with one of its adapters. ``parent``: the model's name."""

    def __init__(self, base: EngineModel, adapter: str) -> None:
        super().__init__(base, f"{base.name}:{adapter}")
        self.parent = base.name
        self._adapter = adapter

    @property
    def makes_embeddings(self) -> bool:
        return False

    def generator(self, tenant: Tenant) -> EngineGenerator:
        return self._base.generator(tenant, self._adapter)


class OneGenerator:
    """A model on any generator, which all tenants share."""

    def __init__(self, generator: Generator[Any]) -> None:
        self.name = generator.capabilities.model
        self.created_s = int(time.time())
        self._generator = generator

    @property
    def makes_embeddings(self) -> bool:
        return False

    def named(self) -> Sequence[Model]:
        return ()

    def adapted(self) -> Sequence[Model]:
        return ()

    def generator(self, tenant: Tenant) -> Generator[Any]:
        return self._generator

    def keep_tenants(self, tenants: Iterable[Tenant]) -> None:
        """Has no effect."""

    def check_admission(self, tenant: Tenant, priority: int = 0) -> None:
        """Admits every request."""

    async def until_idle(self) -> None:
        """Returns at once: the generator does not report whether it is busy."""


class Models:
    """At least one model; the first is the default. Iterating gives the models without their adapters.
    ``compiler``: compiles the constraints of all models.
    ``gate``: the rate limits of all tenants."""

    def __init__(
        self,
        models: Sequence[Model],
        compiler: ConstraintCompiler | None = None,
        gate: TenantGate | None = None,
    ) -> None:
        self.gate = TenantGate() if gate is None else gate  # an unused one has no accounts, so is falsy
        self._models = {model.name: model for model in models}
        self._compiler = compiler

    def __iter__(self) -> Iterator[Model]:
        return iter(self._models.values())

    def find(self, name: str | None, tenant: Tenant) -> Model:
        """The model of this name, or the tenant's first one for None. ``UnknownModel``, also if the tenant
        may not use it."""
        seen = self.seen_by(tenant)
        if name is None:
            if not seen:
                raise UnknownModel("this API key allows no model")
            return seen[0]
        for model in seen:
            if model.name == name:
                return model
        known = listed(model.name for model in seen)
        raise UnknownModel(f"there is no model {name[:200]!r} here (there are: {known})")

    def find_embedder(self, name: str | None, tenant: Tenant) -> Model | None:
        """As ``find``, but for None the tenant's first model that makes embeddings, or None."""
        if name is not None:
            return self.find(name, tenant)
        return next((model for model in self.seen_by(tenant) if model.makes_embeddings), None)

    def embedders(self, tenant: Tenant) -> dict[str, Embedder]:
        """The tenant's models that make embeddings, by name."""
        return {one.name: one.generator(tenant) for one in self.seen_by(tenant) if one.makes_embeddings}

    def seen_by(self, tenant: Tenant) -> list[Model]:
        """The models that the tenant may use, under all of their names; those with adapters
        (``MODEL:ADAPTER``) last."""
        named = (one for model in self for one in (model, *model.named()))
        adapted = (one for model in self for one in model.adapted())
        return [model for model in (*named, *adapted) if tenant.may_use(model.name)]

    def keep_tenants(self, tenants: Iterable[Tenant]) -> None:
        """Applies changed tenants to all models."""
        known = tuple(tenants)
        for model in self:
            model.keep_tenants(known)

    @property
    def compile_counts(self) -> CompileCounts:
        """The counters of the compiler."""
        return CompileCounts() if self._compiler is None else self._compiler.counts

    async def until_idle(self) -> None:
        """Waits until all models are idle."""
        for model in self:
            await model.until_idle()


OpenModels: TypeAlias = Callable[[], AbstractAsyncContextManager[Models]]


def one_model(open_generator: Callable[[], AbstractAsyncContextManager[Generator[Any]]]) -> OpenModels:
    """The models of a server that has a single generator.

    >>> app = create_app(one_model(open_generator))
    """

    @asynccontextmanager
    async def open_models() -> AsyncIterator[Models]:
        async with open_generator() as generator:
            yield Models([OneGenerator(generator)])

    return open_models
