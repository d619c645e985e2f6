"""The replicas of models over HTTP: their states, and their drains for updates."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from agentflow.cluster.replicas.replica_set import DRAIN_S, ReplicaSet, ReplicaStatus, State
from agentflow.engine.process.supervisor import EngineSupervisor
from agentflow.engine.tenant import ANONYMOUS
from agentflow.errors import BadArgument
from agentflow.server.compatible.error_format import OPENAI
from agentflow.server.errors import ApiError
from agentflow.server.http.call import ApiCall
from agentflow.server.http.route import ApiRoute
from agentflow.server.models.models import EngineModel


class ReplicaCard(msgspec.Struct):
    """One engine process of a model."""

    model: str
    number: int
    state: State
    device: str
    pid: int | None
    requests: int  # that it has not ended
    running: int | None  # of these, in the batch; this and the next: when the engine was last asked
    cached_tokens: int | None
    total_tokens: int | None  # of its KV pool
    restarts: int  # how often its process was replaced
    problem: str = ""  # why it is down


class ReplicaList(msgspec.Struct):
    """All replicas of all models."""

    data: list[ReplicaCard]
    object: Literal["list"] = "list"


class DrainQuery(msgspec.Struct, forbid_unknown_fields=True):
    """``model``: default: the first that the key may use. ``patience_s``: how long requests may finish."""

    model: str | None = None
    patience_s: Annotated[float, Meta(ge=0, le=3600)] = DRAIN_S


async def list_replicas(call: ApiCall) -> None:
    """Lists the replicas of all models."""
    if not call.tenant.sees_metrics:
        raise ApiError(403, "replicas_forbidden", "only tenants with sees_metrics may see the replicas")
    models = [model for model in call.service.models if isinstance(model, EngineModel)]
    await call.reply(ReplicaList([card for model in models for card in replica_cards(model)]))


async def drain_replica(call: ApiCall) -> None:
    """Replaces the process of a replica without losing its requests. Drains run one after the other."""
    query = call.read_query(DrainQuery)
    if not (call.tenant is ANONYMOUS or call.tenant.manages_adapters):
        raise ApiError(403, "drain_forbidden", "only tenants with manages_adapters may drain replicas")
    model = call.service.models.find(query.model, call.tenant)
    number = call.path_params["number"]
    engine = model.client.engine if isinstance(model, EngineModel) else None
    if not isinstance(engine, ReplicaSet):
        raise BadArgument(f"{model.name} has no replicas: serve it with --replicas", param="model")
    engine.drain(int(number) if number.isdecimal() and len(number) < 7 else -1, query.patience_s)
    assert isinstance(model, EngineModel)
    await call.reply(ReplicaList(replica_cards(model)), status=202)


def replica_cards(model: EngineModel) -> list[ReplicaCard]:
    """Returns the replicas of a model. An engine without a router counts as one."""
    engine = model.client.engine
    if isinstance(engine, ReplicaSet):
        return [_card(model.name, replica) for replica in engine.replicas]
    if not isinstance(engine, EngineSupervisor):
        return []
    why = engine.down_because
    state: State = "down" if why is not None else "serving" if engine.is_ready else "loading"
    one = ReplicaStatus(0, state, "", engine.pid, engine.num_unfinished, engine.restarts, None, why or "")
    return [_card(model.name, one)]


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
