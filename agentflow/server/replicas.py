"""Endpoints for the replicas of models: their states, and draining them for updates."""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated, Literal

import anyio
import msgspec
from msgspec import Meta

from agentflow.cluster.replicas.replica_set import (
    DRAIN_S,
    STATS_S,
    ReplicaSet,
    ReplicaState,
    ReplicaStatus,
    shown_device,
)
from agentflow.engine.messages import EngineStats
from agentflow.engine.process.supervisor import EngineSupervisor
from agentflow.engine.tenant import ANONYMOUS
from agentflow.errors import BadArgument, EngineDown
from agentflow.runtime.task_group import open_task_group
from agentflow.server.compatible.error_format import OPENAI
from agentflow.server.errors import ApiError
from agentflow.server.http.call import ApiCall
from agentflow.server.http.route import ApiRoute
from agentflow.server.models.models import EngineModel


class ReplicaCard(msgspec.Struct):
    """One engine process of a model."""

    model: str
    number: int
    state: ReplicaState
    device: str
    pid: int | None
    requests: int  # unfinished requests
    # The next three are None without a process. If an engine does not answer within half a second, they are
    # the last known values.
    running: int | None  # the requests in the batch
    cached_tokens: int | None
    total_tokens: int | None  # the size of the KV pool
    restarts: int  # how often its process was replaced
    problem: str = ""  # why it is down


class ReplicaList(msgspec.Struct):
    """All replicas of all models."""

    data: list[ReplicaCard]
    may_drain: bool  # the key may drain them
    object: Literal["list"] = "list"


class DrainQuery(msgspec.Struct, forbid_unknown_fields=True):
    """``model``: by default the first that the key may use. ``patience_s``: time for requests to finish."""

    model: str | None = None
    patience_s: Annotated[float, Meta(ge=0, le=3600)] = DRAIN_S


async def list_replicas(call: ApiCall) -> None:
    """Lists the replicas of all models."""
    if not call.tenant.sees_metrics:
        raise ApiError(403, "replicas_forbidden", "only tenants with sees_metrics may see the replicas")
    models = [model for model in call.service.models if isinstance(model, EngineModel)]
    found: dict[str, list[ReplicaCard]] = {model.name: [] for model in models}

    async def look(model: EngineModel) -> None:
        found[model.name] = await replica_cards(model)

    async with open_task_group() as group:
        for model in models:
            group.start_soon(look, model)
    cards = [card for model_cards in found.values() for card in model_cards]
    await call.reply(ReplicaList(cards, _may_drain(call)))


async def drain_replica(call: ApiCall) -> None:
    """Replaces the process of a replica without losing its requests. Drains run one after the other."""
    query = call.read_query(DrainQuery)
    if not _may_drain(call):
        raise ApiError(403, "drain_forbidden", "only tenants with manages_adapters may drain replicas")
    model = call.service.models.find(query.model, call.tenant)
    number = call.path_params["number"]
    engine = model.client.engine if isinstance(model, EngineModel) else None
    if not isinstance(engine, ReplicaSet):
        raise BadArgument(f"{model.name} has no replicas: serve it with --replicas", param="model")
    engine.drain(int(number) if number.isdecimal() and len(number) < 7 else -1, query.patience_s)
    assert isinstance(model, EngineModel)
    await call.reply(ReplicaList(await replica_cards(model), may_drain=True), status=202)


def _may_drain(call: ApiCall) -> bool:
    return call.tenant is ANONYMOUS or call.tenant.manages_adapters


async def replica_cards(model: EngineModel) -> list[ReplicaCard]:
    """Returns the replicas of a model, with current counters if they answer within ``STATS_S``. An engine
    without a router counts as one replica."""
    engine = model.client.engine
    if isinstance(engine, ReplicaSet):
        return [_card(model.name, replica) for replica in await engine.refreshed()]
    if not isinstance(engine, EngineSupervisor):
        return []
    why = engine.down_because
    state: ReplicaState = "down" if why is not None else "serving" if engine.is_ready else "loading"
    stats: EngineStats | None = None
    with anyio.move_on_after(STATS_S), suppress(EngineDown):
        stats = await model.client.stats()
    status = ReplicaStatus(
        0,
        state,
        shown_device("", engine),
        engine.pid,
        engine.num_unfinished,
        engine.restarts,
        stats,
        is_silent=stats is None,
        problem=why or "",
    )
    return [_card(model.name, status)]


def _card(model: str, replica: ReplicaStatus) -> ReplicaCard:
    stats = replica.stats
    return ReplicaCard(
        model,
        replica.number,
        replica.state,
        replica.device,
        replica.pid,
        replica.requests,
        None if stats is None else stats.running,
        None if stats is None else stats.cached_slots,
        None if stats is None else stats.total_slots,
        replica.restarts,
        replica.problem,
    )


ROUTES = (
    ApiRoute("GET", "/v1/replicas", list_replicas, OPENAI, response=ReplicaList, statuses=(403,)),
    ApiRoute(
        "POST",
        "/v1/replicas/{number}/drain",
        drain_replica,
        OPENAI,
        response=ReplicaList,
        query=DrainQuery,
        statuses=(403, 503),
    ),
)
