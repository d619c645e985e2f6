"""The models of a server, by name.

``Models`` finds the model that a request names. Each ``EngineModel`` has its own engine, KV pool, prefix
cache and ``WaitLimit``.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Protocol, TypeAlias

from agentflow.engine.client import EngineClient
from agentflow.engine.generator.generator import EngineGenerator
from agentflow.engine.grammar.compiler.compiler import CompileCounts, ConstraintCompiler
from agentflow.engine.media.reader import MediaReader
from agentflow.engine.store.embedding_folder import EmbeddingFolder
from agentflow.engine.tenant import ANONYMOUS, Tenant
from agentflow.engine.text.chat_template import ChatTemplate
from agentflow.errors import UnknownModel, listed
from agentflow.runtime.generator import Generator, SessionModels
from agentflow.server.models.alias import AliasModel
from agentflow.server.models.api_model import TenantGenerator
from agentflow.server.models.request_spans import request_spans
from agentflow.server.models.wait_limit import WaitLimit
from agentflow.server.tenants.rate_limit import TenantGate

TextGenerator: TypeAlias = EngineGenerator | TenantGenerator
"""A generator that the HTTP APIs can use: of an engine, or of a model behind an API."""


class Model(Protocol):
    """One model. ``created_s``: when the server loaded it (Unix time)."""

    name: str
    created_s: int

    @property
    def makes_embeddings(self) -> bool:
        """Whether it makes embeddings and generates nothing."""

    def generator(self, tenant: Tenant) -> Generator[Any]:
        """The tenant's generator, the same for each call."""

    def aliases(self) -> Sequence[Model]:
        """The model under each of its other names."""

    def adapted(self) -> Sequence[Model]:
        """The model with each of its adapters (LoRA)."""

    def keep_tenants(self, tenants: Iterable[Tenant]) -> None:
        """Applies the settings of these tenants and removes all others."""

    def check_admission(self, tenant: Tenant, priority: int = 0) -> None:
        """``Overloaded`` if a new request would wait too long."""

    async def until_idle(self) -> None:
        """Waits until all of the model's requests have ended."""


class EngineModel:
    """A model on an engine.

    Args:
        name: its name on the server.
        client: its engine.
        template: its chat template.
        compiler: compiles constraints.
        gate: the rate limits of its tenants.
        max_wait_s: the longest expected wait of a request over HTTP; None: any.
        embedding: its embedding settings, as for ``EngineGenerator``.
        aliases: its other names.
        reader: reads images for it; None: it reads none.
    """

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
        reader: MediaReader | None = None,
    ) -> None:
        self.name = name
        self.reader = reader
        self._embedding = embedding
        self.created_s = int(time.time())
        self.client = client
        self._template = template
        self._compiler = compiler
        self._gate = gate
        self._max_wait_s = max_wait_s
        self._admission = WaitLimit(max_wait_s)
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

    def aliases(self) -> Sequence[AliasModel[EngineGenerator]]:
        return self._aliases

    def adapted(self) -> Sequence[AdaptedModel]:
        loaded = self.client.adapters
        self._adapted = {name: self._adapted.get(name) or AdaptedModel(self, name) for name in loaded}
        return tuple(self._adapted.values())

    def generator(self, tenant: Tenant, adapter: str = "", name: str = "") -> EngineGenerator:
        """The generator of the tenant for the model, or for the model with an adapter. ``name``: the alias
        that answers show."""
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
                reader=self.reader,
            )
        return generator

    def keep_tenants(self, tenants: Iterable[Tenant]) -> None:
        """Applies changed tenants to states that are opened from now on, also in open sessions, and drops the
        generators of removed tenants."""
        self._tenants = {tenant.name: tenant for tenant in (ANONYMOUS, *tenants)}
        self._generators = {key: one for key, one in self._generators.items() if key[0] in self._tenants}
        for (name, _, _), generator in self._generators.items():
            generator.tenant = self._tenants[name]

    def unload_adapter(self, name: str) -> None:
        """Unloads an adapter. Running requests keep it; later requests get ``UnknownModel``."""
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


class AdaptedModel(AliasModel[EngineGenerator]):
    """A model with one of its adapters. ``parent``: the model's name."""

    def __init__(self, base: EngineModel, adapter: str) -> None:
        super().__init__(base, f"{base.name}:{adapter}")
        self.created_s = int(time.time())
        self.parent = base.name
        self._model = base
        self._adapter = adapter

    @property
    def makes_embeddings(self) -> bool:
        return False

    def generator(self, tenant: Tenant) -> EngineGenerator:
        return self._model.generator(tenant, self._adapter)


class OneGenerator:
    """A model on any generator, which all tenants share."""

    def __init__(self, generator: Generator[Any]) -> None:
        self.name = generator.capabilities.model
        self.created_s = int(time.time())
        self._generator = generator

    @property
    def makes_embeddings(self) -> bool:
        return False

    def aliases(self) -> Sequence[Model]:
        return ()

    def adapted(self) -> Sequence[Model]:
        return ()

    def generator(self, tenant: Tenant) -> Generator[Any]:
        return self._generator

    def keep_tenants(self, tenants: Iterable[Tenant]) -> None:
        """Does nothing: all tenants share the generator."""

    def check_admission(self, tenant: Tenant, priority: int = 0) -> None:
        """Admits every request."""

    async def until_idle(self) -> None:
        """Returns immediately: the generator does not report whether it is busy."""


class Models:
    """At least one model; the first is the default. Iterating gives the models without their adapters.

    Args:
        models: the models, whose names differ.
        compiler: compiles the constraints of all models.
        gate: the rate limits of all tenants.
    """

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
        """The model of this name, or the tenant's first model for None. ``UnknownModel`` if it does not
        exist, or the tenant may not use it."""
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

    def of_session(self, name: str | None, tenant: Tenant) -> SessionModels:
        """The models of a session of the tenant. The default is the model of this name, or the tenant's first
        model for None. ``UnknownModel`` as for ``find``."""
        found = self.find(name, tenant)
        default = found.generator(tenant)
        generators: dict[bool, dict[str, Generator[Any]]] = {True: {}, False: {}}
        for one in self.seen_by(tenant):
            generators[one.makes_embeddings][one.name] = one.generator(tenant)
        counted = self._counted(found, tenant)
        return SessionModels(default, generators[False], generators[True], counted)

    def _counted(self, default: Model, tenant: Tenant) -> list[Generator[Any]]:
        """The generators whose counters add up to the counters of the tenant's models, the default's first.
        For a tenant that sees the metrics, one generator has the counters of its whole engine."""
        found: list[Generator[Any]] = []
        for model in self:
            names = [model, *model.aliases(), *model.adapted()]
            seen = [one for one in names if one is default or tenant.may_use(one.name)]
            if tenant.sees_metrics and isinstance(model, EngineModel):
                seen = [default] if default in seen else seen[:1]
            generators = [one.generator(tenant) for one in seen]
            found = [*generators, *found] if default in seen else [*found, *generators]
        return found

    def seen_by(self, tenant: Tenant) -> list[Model]:
        """The models that the tenant may use, under all of their names. Models with adapters
        (``MODEL:ADAPTER``) are the last."""
        named = (one for model in self for one in (model, *model.aliases()))
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
OpenGenerator: TypeAlias = Callable[[], AbstractAsyncContextManager[Generator[Any]]]


def one_model(open_generator: OpenGenerator) -> OpenModels:
    """The models of a server that has a single generator.

    >>> app = create_app(one_model(open_generator))
    """

    @asynccontextmanager
    async def open_models() -> AsyncIterator[Models]:
        async with open_generator() as generator:
            yield Models([OneGenerator(generator)])

    return open_models
