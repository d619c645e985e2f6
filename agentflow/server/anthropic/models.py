"""``GET /v1/models`` in the form of Anthropic's API, for clients that send ``anthropic-version``."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Literal

import msgspec

from agentflow.server.http.call import ApiCall
from agentflow.server.models.models import Model


class AnthropicModel(msgspec.Struct, kw_only=True):
    """A model. ``created_at``: when the server loaded it. ``max_input_tokens``: the limit of prompt and
    output together. ``lifecycle``: every served model is available."""

    id: str
    display_name: str
    created_at: datetime
    max_input_tokens: int | None
    lifecycle: Literal["active"] = "active"
    type: Literal["model"] = "model"


class AnthropicModelList(msgspec.Struct, kw_only=True):
    """The models that the tenant may use, all on one page."""

    data: list[AnthropicModel]
    first_id: str | None
    last_id: str | None
    has_more: Literal[False] = False


async def list_anthropic_models(call: ApiCall) -> None:
    """Lists the models that the tenant may use."""
    models = [_shown(call, model) for model in call.service.models.seen_by(call.tenant)]
    first, last = (models[0].id, models[-1].id) if models else (None, None)
    await call.reply(AnthropicModelList(data=models, first_id=first, last_id=last))


async def get_anthropic_model(call: ApiCall) -> None:
    """Describes one model."""
    await call.reply(_shown(call, call.service.models.find(call.path_params["name"], call.tenant)))


def _shown(call: ApiCall, model: Model) -> AnthropicModel:
    return AnthropicModel(
        id=model.name,
        display_name=model.name,
        created_at=datetime.fromtimestamp(model.created_s, UTC),
        max_input_tokens=call.service.context_length(model.generator(call.tenant)),
    )
