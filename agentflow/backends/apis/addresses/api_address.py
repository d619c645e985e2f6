"""The addresses of models behind APIs, as ``af.session`` and ``af.Fallback`` take them."""

from __future__ import annotations

from agentflow.backends.apis.addresses.asked_server import AskedServer
from agentflow.backends.apis.addresses.environment_key import VENDOR_PREFIXES, environment_key
from agentflow.backends.apis.anthropic import Anthropic
from agentflow.backends.apis.openai import OpenAI
from agentflow.errors import BadArgument


def vendor_backend(
    address: str, api_key: str | None = None, embed_model: str | None = None
) -> OpenAI | Anthropic:
    """A model of a vendor, such as ``openai:gpt-4.1-mini``. ``BadArgument`` if the address has no model, or
    the vendor none for embeddings."""
    vendor, _, model = address.partition(":")
    if not model:
        raise BadArgument(f"{address!r:.200} names no model: write {vendor}:MODEL", param="url")
    if vendor == "openai":
        return OpenAI(model, api_key=api_key, embed_model=embed_model)
    if embed_model is not None:
        raise BadArgument(
            f"session: {vendor} has no models for embeddings: give one of another vendor in models=",
            param="embed_model",
        )
    return Anthropic(model, api_key=api_key)


def api_backend(
    address: str, api_key: str | None = None, first: str | None = None
) -> OpenAI | Anthropic | AskedServer | None:
    """The backend of an API's address; None for other addresses. ``first``: as in ``environment_key``."""
    if address.startswith(VENDOR_PREFIXES):
        return vendor_backend(address, api_key)
    if address.startswith(("http://", "https://")):
        return AskedServer(address, api_key=api_key or environment_key(address, first))
    return None
