"""The models that a server has, by name; each with an engine, a KV pool and a radix tree of its own."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Protocol, TypeAlias

from agentflow.engine.client import EngineClient
from agentflow.engine.generator import EngineGenerator
from agentflow.engine.grammar.compiler.compiler import CompileCounts, ConstraintCompiler
from agentflow.engine.text.chat_template import ChatTemplate
from agentflow.errors import UnknownModel
from agentflow.runtime.generator import Generator
from agentflow.server.admission import Admission
from agentflow.server.tenants.rate_limit import TenantGate
from agentflow.server.tenants.tenant import NOBODY_ELSE, Tenant


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
        self._tenants = {tenant.name: tenant for tenant in (NOBODY_ELSE, *tenants)}
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
