"""Loads and unloads adapters (LoRA) of running models. The paths and fields are vLLM's.

Only tenants with ``manages_adapters`` may load and unload adapters: paths are on the server's disk, and an
adapter changes the answers of a model.
"""

from __future__ import annotations

from typing import Annotated

import anyio.to_thread
import msgspec
from msgspec import Meta

from agentflow.engine.store.adapter_folder import check_adapter_name, resolve_adapter
from agentflow.errors import BadArgument, BadModelFolder, UnknownModel, listed
from agentflow.server.errors import ApiError, invalid_field
from agentflow.server.http.call import ApiCall
from agentflow.server.models.models import EngineModel
from agentflow.server.openai.models import make_card

MAX_ADAPTERS = 1_000
"""The limit of adapters of a model: each is an entry in every list of models."""

_Name = Annotated[str, Meta(min_length=1, max_length=500)]


class LoadAdapterRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``lora_path``: a folder on the server, or ``OWNER/NAME`` in its cache of the hub. ``model``: the base
    model; by default the first. ``load_inplace``: replaces a loaded adapter of the same name."""

    lora_name: _Name
    lora_path: _Name
    model: str | None = None
    load_inplace: bool = False


class UnloadAdapterRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``model``: as for loading."""

    lora_name: _Name
    model: str | None = None


class AdapterUnloaded(msgspec.Struct):
    """``id``: the name of the model that no longer exists."""

    id: str
    deleted: bool = True


async def load_adapter(call: ApiCall) -> None:
    """Loads an adapter and describes the model with it."""
    body = await call.process(call.read, LoadAdapterRequest)
    model = _managed_model(call, body.model)
    try:
        check_adapter_name(body.lora_name)
        folder = await anyio.to_thread.run_sync(resolve_adapter, body.lora_path)
        _check_new(body, model)  # until the load begins, no other one can
        await model.client.load_adapter(body.lora_name, folder)
    except (BadModelFolder, UnknownModel) as error:
        raise invalid_field("lora_path", str(error)) from error
    except BadArgument as error:
        if error.param == "lora":  # the name of the field in an engine's options
            error.param = "lora_path"
        raise
    name = f"{model.name}:{body.lora_name}"
    cards = [make_card(call, one) for one in model.adapted() if one.name == name]
    if not cards:
        raise UnknownModel(
            f"{name[:200]!r} was unloaded while it was loaded: load it again", param="lora_name"
        )
    await call.reply(cards[0])


async def unload_adapter(call: ApiCall) -> None:
    """Unloads an adapter. Requests that use it finish first."""
    body = await call.process(call.read, UnloadAdapterRequest)
    model = _managed_model(call, body.model)
    if body.lora_name not in model.client.adapters:
        known = listed(model.client.adapters)
        raise UnknownModel(
            f"{model.name} has no adapter {body.lora_name[:100]!r} (there are: {known})",
            param="lora_name",
        )
    model.unload_adapter(body.lora_name)
    await call.reply(AdapterUnloaded(f"{model.name}:{body.lora_name}"))


def _check_new(body: LoadAdapterRequest, model: EngineModel) -> None:
    """Raises ``ApiError`` if the name is taken, or the model has too many adapters. An adapter that is being
    loaded counts like a loaded one."""
    names = model.client.loading_adapters.union(model.client.adapters)
    if body.lora_name in names and not body.load_inplace:
        taken = f"{model.name}:{body.lora_name} is loaded, or is being loaded"
        raise invalid_field("lora_name", f"{taken}: unload it, or set load_inplace")
    if body.lora_name not in names and len(names) >= MAX_ADAPTERS:
        raise invalid_field("lora_name", f"{model.name} has {MAX_ADAPTERS:,} adapters: unload one first")


def _managed_model(call: ApiCall, name: str | None) -> EngineModel:
    if not call.tenant.manages_adapters:
        raise ApiError(
            403,
            "adapters_forbidden",
            "only tenants with manages_adapters may load and unload adapters",
        )
    model = call.service.models.find(name, call.tenant)
    if not isinstance(model, EngineModel):
        raise BadArgument(f"{model.name} cannot have adapters: use a base model", param="model")
    return model
