"""A model under another name, which shares the engine or API, the cache and the admission of its base."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, Protocol, TypeVar

from agentflow.engine.tenant import Tenant

GeneratorT = TypeVar("GeneratorT", covariant=True)


class NamedModel(Protocol[GeneratorT]):
    """A model that can answer under several names."""

    created_s: int

    @property
    def makes_embeddings(self) -> bool: ...

    def generator(self, tenant: Tenant, *, name: str) -> GeneratorT: ...

    def check_admission(self, tenant: Tenant, priority: int = 0) -> None: ...

    async def until_idle(self) -> None: ...


class AliasModel(Generic[GeneratorT]):
    """The model ``base`` under the name ``name``."""

    def __init__(self, base: NamedModel[GeneratorT], name: str) -> None:
        self.name = name
        self.created_s = base.created_s
        self._base = base

    @property
    def makes_embeddings(self) -> bool:
        return self._base.makes_embeddings

    def generator(self, tenant: Tenant) -> GeneratorT:
        return self._base.generator(tenant, name=self.name)

    def aliases(self) -> tuple[()]:
        return ()

    def adapted(self) -> tuple[()]:
        return ()

    def keep_tenants(self, tenants: Iterable[Tenant]) -> None:
        """Does nothing: the base model does this."""

    def check_admission(self, tenant: Tenant, priority: int = 0) -> None:
        self._base.check_admission(tenant, priority)

    async def until_idle(self) -> None:
        await self._base.until_idle()
