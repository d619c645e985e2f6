"""``GET /v1/models`` and ``GET /v1/models/{name}``, as OpenAI's API has them."""

from __future__ import annotations

import msgspec

from agentflow.server.http.call import ApiCall
from agentflow.server.models import Model


class ModelCard(msgspec.Struct):
    """One model. ``created``: since when it is served (Unix time). ``max_model_len``: tokens of prompt and
    output together."""

    id: str
    created: int
    max_model_len: int | None
    object: str = "model"
    owned_by: str = "agentflow"


class ModelList(msgspec.Struct):
    """All that the tenant may use; the first is the default of sessions."""

    data: list[ModelCard]
    object: str = "list"


async def list_models(call: ApiCall) -> None:
    """The tenant's models."""
    seen = call.service.models.seen_by(call.tenant)
    await call.reply(ModelList([_card(call, model) for model in seen]))


async def get_model(call: ApiCall) -> None:
    """One of them. ``UnknownModel``."""
    await call.reply(_card(call, call.service.models.find(call.path_params["name"], call.tenant)))


def _card(call: ApiCall, model: Model) -> ModelCard:
    capabilities = model.generator(call.tenant).capabilities
    return ModelCard(model.name, model.created_s, capabilities.max_context)
