"""A real server whose models are behind the scripted APIs of a fake vendor."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypedDict

from support.apis.fake_server import FakeServer, Script, fake_server

from agentflow.backends.apis.answers.verification import OnUnsupported
from agentflow.backends.apis.anthropic import Anthropic
from agentflow.backends.apis.compatible import OpenAICompatible
from agentflow.backends.apis.openai import OpenAI
from agentflow.backends.apis.prices import Costs, Price, Spending
from agentflow.backends.apis.serving import ApiBackend
from agentflow.backends.local import open_backend_generator
from agentflow.server.app import Access
from agentflow.server.config.limits import HttpLimits
from agentflow.server.models.open_models import open_models
from agentflow.server.serve import RunningServer, running_server
from agentflow.server.tenants.keys import Tenants
from agentflow.server.tenants.rate_limit import TenantGate

SECRET = "sk-of-the-operator"
"""The key of the server at the vendor."""
PRICE = Price(input=1.0, output=10.0, cached=0.1)
"""The price of all models."""


class Options(TypedDict):
    """The options of all backends."""

    api_key: str
    max_retries: int
    on_unsupported: OnUnsupported


@dataclass
class Served:
    """The server, and the vendor behind it."""

    server: RunningServer
    vendor: FakeServer

    @property
    def url(self) -> str:
        """The address for HTTP requests."""
        return self.server.http_url

    @property
    def ws_url(self) -> str:
        """The address for sessions."""
        return self.server.url


def backend_of(
    vendor: FakeServer, address: str, on_unsupported: OnUnsupported, prices: Mapping[str, Price] | None = None
) -> ApiBackend:
    """The backend for the model of an address, at the fake vendor. ``prices``: by model; None: ``PRICE``."""
    kind, _, model = address.partition(":")
    url, options = f"{vendor.url}/v1", Options(api_key=SECRET, max_retries=0, on_unsupported=on_unsupported)
    backend: OpenAI | Anthropic | OpenAICompatible
    match kind:
        case "openai":
            backend = OpenAI(model, base_url=url, **options)
        case "anthropic":
            backend = Anthropic(model, base_url=vendor.url, **options)
        case _:
            flavour: Any = "vllm" if kind == "compatible" else kind
            backend = OpenAICompatible(url, model, flavour=flavour, **options)
    return backend.with_costs(Costs(Spending(), {model: PRICE} if prices is None else prices))


@asynccontextmanager
async def served_apis(
    script: Script,
    models: Mapping[str, str] | None = None,
    *,
    tenants: Tenants | None = None,
    aliases: Mapping[str, Sequence[str]] | None = None,
    http_limits: HttpLimits | None = None,
    on_unsupported: OnUnsupported = "error",
    prices: Mapping[str, Price] | None = None,
) -> AsyncIterator[Served]:
    """A server with these models (a name, and ``openai:…``, ``anthropic:…``, ``compatible:…`` for
    vLLM, or another flavour of compatible servers)."""
    tenants = tenants or Tenants()
    async with fake_server(script) as vendor:
        opening = {
            name: partial(open_backend_generator, backend_of(vendor, address, on_unsupported, prices))
            for name, address in (models or {"gpt": "openai:gpt-4.1-mini"}).items()
        }
        gate = TenantGate(current=tenants.current)
        async with running_server(
            lambda: open_models(opening, gate=gate, aliases=aliases),
            access=Access(tenants),
            http_limits=http_limits,
        ) as server:
            yield Served(server, vendor)
            await server.service.models.until_idle()
