"""Opens a server's models behind an API: the only module in which a server uses the backends."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from agentflow.errors import NotAuthorized
from agentflow.server.config.api_address import ApiAddress
from agentflow.server.config.schema import ModelConfig

if TYPE_CHECKING:
    from agentflow.backends.apis.anthropic import Anthropic
    from agentflow.backends.apis.compatible import OpenAICompatible
    from agentflow.backends.apis.openai import OpenAI
    from agentflow.protocol.backend import Backend
    from agentflow.runtime.generator import Generator


def configured_backend(model: ModelConfig) -> Backend:
    """The backend of a model behind an API. ``NotAuthorized`` if the environment has no key for it."""
    address = model.api
    assert address is not None, "the model has an engine"
    key = None
    if model.api_key_variable is not None:
        key = os.environ.get(model.api_key_variable)
        if not key:
            raise NotAuthorized(
                f"models.{model.name}: the environment variable {model.api_key_variable} is not set",
                param="api_key_variable",
            )
    backend = _backend_at(address, key, model)
    if model.input_price is not None and model.output_price is not None and address.model is not None:
        from agentflow.backends.apis.prices import Costs, Price, Spending

        price = Price(input=model.input_price, output=model.output_price, cached=model.cached_price)
        backend = backend.with_costs(Costs(Spending(), {address.model: price}))
    return backend


def _backend_at(
    address: ApiAddress, key: str | None, model: ModelConfig
) -> OpenAI | Anthropic | OpenAICompatible:
    on_unsupported = model.on_unsupported or "error"
    match address.vendor:
        case "openai":
            from agentflow.backends.apis.openai import OpenAI

            return OpenAI(str(address.model), api_key=key, on_unsupported=on_unsupported)
        case "anthropic":
            from agentflow.backends.apis.anthropic import Anthropic

            return Anthropic(str(address.model), api_key=key, on_unsupported=on_unsupported)
        case _:
            from agentflow.backends.apis.compatible import OpenAICompatible

            key = key or os.environ.get("AGENTFLOW_API_KEY") or None
            return OpenAICompatible(
                str(address.url),
                address.model,
                flavour=model.flavour,
                api_key=key,
                on_unsupported=on_unsupported,
            )


@asynccontextmanager
async def open_api_generator(backend: Backend) -> AsyncIterator[Generator[Any]]:
    """Opens the connections to an API."""
    from agentflow.backends.local import open_backend_generator

    async with open_backend_generator(backend) as generator:
        yield generator
