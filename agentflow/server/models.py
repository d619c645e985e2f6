"""The models that a server has, by name; each with an engine, a KV pool and a radix tree of its own.

Refuses what would wait too long, before it waits: a queue that only grows helps nobody.

How long a new request will wait is foreseen from how fast those of its tenant start, as long as some wait:
the time that a place takes, on average of the latest starts, times the places before it. In which order they
start does not matter to that. Before it are those that wait with its priority or a higher one. Other tenants
count by themselves: the more of them there are, the longer a place takes.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from agentflow.engine.client import EngineClient
from agentflow.engine.generator import EngineGenerator
from agentflow.engine.grammar.compiler.compiler import CompileCounts, ConstraintCompiler
from agentflow.engine.process.ipc import Failed, Finished, FromEngine, Started, Submit
from agentflow.engine.tenant import ANONYMOUS, Tenant
from agentflow.engine.text.chat_template import ChatTemplate
from agentflow.errors import Overloaded, UnknownModel
from agentflow.runtime.generator import Generator
from agentflow.server.tenants.rate_limit import TenantGate

# So many starts count, the latest.
NUM_REMEMBERED = 32
# Of tenants that have nothing waiting so many are remembered.
MAX_IDLE_TENANTS = 1_000


@dataclass(slots=True)
class _Line:
    """The waiting requests of one tenant, each with its priority. ``busy_s``: how long the latest
    ``num_started`` took to start, not counting when none waited. ``moved_s``: when the last one started, or
    the first one came."""

    waiting: dict[int, int] = field(default_factory=dict)
    num_waiting: Counter[int] = field(default_factory=Counter)  # of each priority
    busy_s: float = 0.0
    num_started: float = 0.0
    moved_s: float = 0.0

    def expected_wait_s(self, priority: int, now_s: float) -> float:
        num_before = sum(num for other, num in self.num_waiting.items() if other >= priority)
        if not num_before:
            return 0.0
        since_s = now_s - self.moved_s  # nothing starts: it takes at least that long
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
        """These started in one step. Where they leave none behind, the engine had room for more: a place
        takes no longer than they say, and maybe less."""
        for request_id in request_ids:
            self.remove(request_id)
        num, took_s = len(request_ids), now_s - self.moved_s
        if self.waiting or took_s * self.num_started < num * self.busy_s:
            kept = max(0.0, 1 - num / NUM_REMEMBERED)
            self.busy_s = self.busy_s * kept + took_s
            self.num_started = self.num_started * kept + num
        self.moved_s = now_s


class Admission:
    """A ``RequestObserver`` of one engine. ``max_wait_s``: what a request may expect to wait; None: any time.
    ``clock``: seconds."""

    def __init__(self, max_wait_s: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_wait_s = max_wait_s
        self._clock = clock
        self._lines: OrderedDict[str, _Line] = OrderedDict()
        self._tenant_of: dict[int, str] = {}

    def expected_wait_s(self, tenant: str, priority: int = 0) -> float:
        """How long a request of this tenant would wait that came now."""
        line = self._lines.get(tenant)
        return 0.0 if line is None else line.expected_wait_s(priority, self._clock())

    def check(self, tenant: str, priority: int = 0) -> None:
        """``Overloaded``, with a time after which it makes sense to try again."""
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
        """It waits from now on."""
        tenant = submit.origin.tenant
        line = self._lines.get(tenant)
        if line is None:
            line = self._lines[tenant] = _Line()
        self._lines.move_to_end(tenant)
        line.add(submit.request_id, submit.origin.priority, self._clock())
        self._tenant_of[submit.request_id] = tenant
        self._forget_the_idle()

    def received(self, messages: Sequence[FromEngine]) -> None:
        """Starts, and ends of what never started."""
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
            if tenant is not None:  # otherwise it had started before, and lost its slots
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
    """One model. ``created_s``: since when it is served (Unix time)."""

    name: str
    created_s: int

    def generator(self, tenant: Tenant) -> Generator[Any]:
        """The tenant's. The same name gets the same one each time."""

    def keep_tenants(self, tenants: Iterable[Tenant]) -> None:
        """These are all there are now, and what they may do: others are forgotten."""

    def check_admission(self, tenant: Tenant, priority: int = 0) -> None:
        """``Overloaded`` where a request that came now would wait too long."""

    async def until_idle(self) -> None:
        """Returns when nobody waits for anything that it generates."""


class EngineModel:
    """A model on an engine. ``gate``: what its tenants' requests pass through. ``max_wait_s``: what a request
    over HTTP may expect to wait; None: any time."""

    def __init__(
        self,
        name: str,
        client: EngineClient,
        template: ChatTemplate,
        *,
        compiler: ConstraintCompiler | None = None,
        gate: TenantGate | None = None,
        max_wait_s: float | None = None,
    ) -> None:
        self.name = name
        self.created_s = int(time.time())
        self.client = client
        self._template = template
        self._compiler = compiler
        self._gate = gate
        self._max_wait_s = max_wait_s
        self._admission = Admission(max_wait_s)
        client.observe(self._admission)
        self._generators: dict[str, EngineGenerator] = {}
        self._tenants: dict[str, Tenant] = {}

    def generator(self, tenant: Tenant) -> EngineGenerator:
        generator = self._generators.get(tenant.name)
        if generator is None:
            generator = self._generators[tenant.name] = EngineGenerator(
                self.client,
                self._template,
                name=self.name,
                # A request that came before a change may ask after it.
                tenant=self._tenants.get(tenant.name, tenant),
                gate=self._gate,
                compiler=self._compiler,
                patience_s=self._max_wait_s,
            )
        return generator

    def keep_tenants(self, tenants: Iterable[Tenant]) -> None:
        """States that are opened from now on have the new shares, also in sessions that are open; what is
        remembered of tenants that are gone is dropped."""
        self._tenants = {tenant.name: tenant for tenant in (ANONYMOUS, *tenants)}
        self._generators = {name: one for name, one in self._generators.items() if name in self._tenants}
        for name, generator in self._generators.items():
            generator.tenant = self._tenants[name]

    def check_admission(self, tenant: Tenant, priority: int = 0) -> None:
        """``RateLimited`` where the tenant may not send a request now, and ``Overloaded`` where one that came
        now would wait too long."""
        if self._gate is not None:
            self._gate.check(tenant)
        self._admission.check(tenant.name, priority)

    async def until_idle(self) -> None:
        await self.client.until_idle()


class OneGenerator:
    """A model that is a generator of any kind, the same for all tenants."""

    def __init__(self, generator: Generator[Any]) -> None:
        self.name = generator.capabilities.model
        self.created_s = int(time.time())
        self._generator = generator

    def generator(self, tenant: Tenant) -> Generator[Any]:
        return self._generator

    def keep_tenants(self, tenants: Iterable[Tenant]) -> None:
        """Keeps nothing of any tenant."""

    def check_admission(self, tenant: Tenant, priority: int = 0) -> None:
        """Takes anything."""

    async def until_idle(self) -> None:
        """At once: it does not say whether it is busy."""


class Models:
    """At least one; the first is the default. ``compiler``: of the constraints of all. ``gate``: what the
    requests of all tenants pass through."""

    def __init__(
        self,
        models: Sequence[Model],
        compiler: ConstraintCompiler | None = None,
        gate: TenantGate | None = None,
    ) -> None:
        self.gate = gate or TenantGate()
        self._models = {model.name: model for model in models}
        self._compiler = compiler

    def __iter__(self) -> Iterator[Model]:
        return iter(self._models.values())

    def find(self, name: str | None, tenant: Tenant) -> Model:
        """The model of this name, or the tenant's first one. ``UnknownModel``, also where the tenant may not
        use it."""
        seen = self.seen_by(tenant)
        if name is None:
            if not seen:
                raise UnknownModel("this API key allows no model")
            return seen[0]
        for model in seen:
            if model.name == name:
                return model
        known = ", ".join(model.name for model in seen) or "none"
        raise UnknownModel(f"there is no model {name[:200]!r} here (there are: {known})")

    def seen_by(self, tenant: Tenant) -> list[Model]:
        """Those that the tenant may use."""
        return [model for model in self if tenant.may_use(model.name)]

    def keep_tenants(self, tenants: Iterable[Tenant]) -> None:
        """To be called when the tenants are others than before."""
        known = tuple(tenants)
        for model in self:
            model.keep_tenants(known)

    @property
    def compile_counts(self) -> CompileCounts:
        """Of the compiler."""
        return CompileCounts() if self._compiler is None else self._compiler.counts

    async def until_idle(self) -> None:
        """Returns when no model is asked for anything."""
        for model in self:
            await model.until_idle()


OpenModels: TypeAlias = Callable[[], AbstractAsyncContextManager[Models]]


def one_model(open_generator: Callable[[], AbstractAsyncContextManager[Generator[Any]]]) -> OpenModels:
    """A server's models where there is one, of any kind.

    >>> app = create_app(one_model(open_generator))
    """

    @asynccontextmanager
    async def open_models() -> AsyncIterator[Models]:
        async with open_generator() as generator:
            yield Models([OneGenerator(generator)])

    return open_models
