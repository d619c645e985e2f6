"""The models, as Ollama's API describes them: ``/api/tags``, ``/api/show``, ``/api/ps``, ``/api/version``.

All models of the server are loaded and stay loaded. The server's operator chooses them: there are no requests
to pull, copy or delete models.
"""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from typing import Any

from agentflow.engine.generator.generator import EngineGenerator
from agentflow.engine.text.reasoning import reasoning_marks
from agentflow.server.errors import ApiError
from agentflow.server.http.call import ApiCall
from agentflow.server.models.models import Model
from agentflow.server.ollama.request import LATEST, resolve_name
from agentflow.server.ollama.types import (
    Capability,
    ModelDetails,
    OllamaModel,
    OllamaModelList,
    OllamaShowAnswer,
    OllamaShowRequest,
    OllamaVersion,
    RunningModel,
    RunningModelList,
)

# Clients choose the fields of their requests by the version: this one has the fields that the server accepts.
API_VERSION = "0.13.0"
MANAGEMENT = ("/api/pull", "/api/push", "/api/create", "/api/copy", "/api/delete", "/api/blobs")
"""Paths of Ollama that the server does not have, including everything below them."""
WHY_NOT_MANAGED = "the server's operator chooses its models, with `agentflow pull` and its settings"
# When models are unloaded. Clients convert it to their time zone, so it is not the latest possible date.
_NEVER = datetime(2200, 1, 1, tzinfo=UTC)


async def list_tags(call: ApiCall) -> None:
    """Lists the models that the tenant may use."""
    await call.reply(OllamaModelList(models=[_listed(*one) for one in _seen(call)]))


async def list_running(call: ApiCall) -> None:
    """Lists the models that are loaded."""
    running = []
    for model, generator in _seen(call):
        listed = _listed(model, generator)
        running.append(
            RunningModel(
                name=listed.name,
                model=listed.model,
                size=listed.size,
                digest=listed.digest,
                details=listed.details,
                expires_at=_NEVER,
                context_length=call.service.context_length(generator) or generator.info.max_context,
            )
        )
    await call.reply(RunningModelList(models=running))


async def show_model(call: ApiCall) -> None:
    """Describes one model."""
    body = await call.process(call.read, OllamaShowRequest)
    name = body.model or body.name
    if name is None:
        raise ApiError(400, "invalid_request", "the required parameter 'model' is missing", "model")
    found = call.service.models.find(resolve_name(call, name), call.tenant)
    generator = call.generator(found.name, to_generate=False)
    info, details = generator.info, _details(generator)
    family = details.family or "model"
    facts: dict[str, Any] = {
        "general.architecture": family,
        "general.basename": info.model,
        f"{family}.context_length": call.service.context_length(generator),
        f"{family}.vocab_size": info.vocab_size,
    }
    capabilities: list[Capability] = ["completion"]
    if info.embedding_size:
        facts[f"{family}.embedding_length"] = info.embedding_size
        capabilities = ["embedding"]
    elif generator.capabilities.conversations:
        capabilities.append("tools")
    if reasoning_marks(generator.template.source) is not None and not info.embedding_size:
        capabilities.append("thinking")
    template = generator.template.source if generator.template.has_template else ""
    await call.reply(
        OllamaShowAnswer(
            modelfile="",
            parameters="",
            template=template or "",
            details=details,
            model_info=facts,
            capabilities=capabilities,
            modified_at=_loaded_at(found),
        )
    )


async def show_version(call: ApiCall) -> None:
    """Returns the version of Ollama whose API this is."""
    await call.reply(OllamaVersion(API_VERSION))


def _seen(call: ApiCall) -> list[tuple[Model, EngineGenerator]]:
    """The models with an engine."""
    seen = [(model, model.generator(call.tenant)) for model in call.service.models.seen_by(call.tenant)]
    return [(model, generator) for model, generator in seen if isinstance(generator, EngineGenerator)]


def _listed(model: Model, generator: EngineGenerator) -> OllamaModel:
    name = model.name if ":" in model.name else f"{model.name}{LATEST}"
    info = generator.info
    return OllamaModel(
        name=name,
        model=name,
        modified_at=_loaded_at(model),
        size=info.weight_bytes,
        digest=hashlib.sha256(f"{name} {info.model} {info.weights}".encode()).hexdigest(),
        details=_details(generator),
    )


def _details(generator: EngineGenerator) -> ModelDetails:
    family = generator.info.architecture.removesuffix("ForCausalLM").lower()
    return ModelDetails(
        family=family,
        families=[family] if family else [],
        quantization_level=generator.info.weights,
    )


def _loaded_at(model: Model) -> datetime:
    return datetime.fromtimestamp(model.created_s, UTC)
