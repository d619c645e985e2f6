"""Opens the replicas of a model: their processes, the router, and the client."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import anyio.to_thread

from agentflow.cluster.replicas.measured_cost import measured_shape
from agentflow.cluster.replicas.placing_turn import PlacingTurn
from agentflow.cluster.replicas.replica_set import ReplicaSet
from agentflow.cluster.replicas.shared_devices import BusyObserver, list_gpus
from agentflow.cluster.routing.devices import SharedEngine
from agentflow.cluster.routing.load import EngineShape
from agentflow.cluster.routing.router import Router, RoutingPolicy
from agentflow.engine.client import EngineClient
from agentflow.engine.local_engine import (
    engine_start,
    find_model,
    make_deadlines,
    open_engine,
    open_tokenizer,
)
from agentflow.engine.messages import Loaded, Start
from agentflow.engine.options import EngineOptions
from agentflow.engine.process.child import StartChild, start_child_process
from agentflow.engine.process.deadlines import Deadlines
from agentflow.engine.process.shutdown_budget import ShutdownBudget
from agentflow.engine.process.supervisor import EngineSupervisor, check_tokenizer, prepared
from agentflow.engine.scheduling.defaults import MAX_RUNNING
from agentflow.engine.text.tokenizer import Tokenizer
from agentflow.errors import BadArgument
from agentflow.runtime.task_group import open_task_group

NewRouter = Callable[[EngineShape, Loaded], RoutingPolicy]


def new_router(shape: EngineShape, loaded: Loaded) -> RoutingPolicy:
    """Returns the ``Router`` for a model."""
    return Router(shape, loaded.info.identity)


@asynccontextmanager
async def open_replicas(
    replicas: Sequence[EngineOptions],
    shutdown: ShutdownBudget | None,
    start_child: StartChild,
    turn: PlacingTurn | None,
) -> AsyncIterator[EngineClient]:
    """Loads a model in several processes and serves it within the scope.

    Args:
        replicas: The options of each, which differ in their devices, threads and memory. A single one is
            opened without a router.
        shutdown: Limits the time to end the processes.
        start_child: Starts a process.
        turn: The turn of a server whose models share devices; None: no other model uses them.
    """
    options = replicas[0]
    turn = turn or PlacingTurn()
    shared = turn.devices
    if len(replicas) == 1:
        async with open_engine(options, shutdown, start_child) as client:
            engine = shared.add(list_gpus(options))
            client.observe(BusyObserver(shared, engine))
            try:
                yield client
            finally:
                shared.remove(engine)
        return
    engines: list[SharedEngine] = []

    def router(shape: EngineShape, loaded: Loaded) -> RoutingPolicy:
        policy = Router(shape, loaded.info.identity)
        engines.extend(shared.add_replicas(policy.loads, [list_gpus(one) for one in replicas]))
        return policy

    folder, adapters = find_model(options)
    opening = replicated_engine(
        [engine_start(one, folder, reports=True) for one in replicas],
        lambda: open_tokenizer(options, folder),
        devices=[one.device or "" for one in replicas],
        max_running=options.max_running,
        tpot_target_ms=options.tpot_target_ms,
        max_unfinished=options.max_unfinished,
        deadlines=make_deadlines(options, folder),
        exits_when_down=options.exit_on_engine_failure,
        shutdown=shutdown,
        start_child=start_child,
        router=router,
        turn=turn,
    )
    async with opening as client:
        try:
            for name, adapter in adapters.items():
                await client.load_adapter(name, adapter)
            yield client
        finally:
            for engine in engines:
                shared.remove(engine)


@asynccontextmanager
async def replicated_engine(
    starts: Sequence[Start],
    load_tokenizer: Callable[[], Tokenizer],
    *,
    devices: Sequence[str] | None = None,
    max_running: int = MAX_RUNNING,
    tpot_target_ms: int | None = None,
    max_unfinished: int | None = None,
    deadlines: Deadlines | None = None,
    exits_when_down: bool = False,
    shutdown: ShutdownBudget | None = None,
    start_child: StartChild = start_child_process,
    router: NewRouter = new_router,
    turn: PlacingTurn | None = None,
) -> AsyncIterator[EngineClient]:
    """Runs several engines of one model in processes within the scope, behind one client. All have loaded, or
    none is left.

    Args:
        starts: How to load each replica. They ask for reports.
        load_tokenizer: Runs in a thread while the processes load the model.
        devices: Where each replica runs, for people.
        max_running: Requests in a batch of one replica.
        tpot_target_ms: As in ``SchedulerConfig``.
        max_unfinished: The most unfinished requests of all; None: no limit.
        deadlines: The time limits of each process; None: the defaults.
        exits_when_down: Raise ``EngineFailed`` when all replicas are down.
        shutdown: Limits the time to end the processes.
        start_child: Starts a process.
        router: Makes the router.
        turn: As in ``open_replicas``.

    Raises:
        BadArgument: There are no replicas.
        BadModelFolder: The replicas have loaded different models.
        EngineFailed: A process died several times before it has loaded once.
    """
    if not starts:
        raise BadArgument("a model needs at least one replica", param="replicas")
    supervisors = [
        EngineSupervisor(
            start,
            deadlines=deadlines or Deadlines(),
            exits_when_down=False,
            shutdown=shutdown or ShutdownBudget(0.0),
            start_child=start_child,
            name=f"replica {number}",
        )
        for number, start in enumerate(starts)
    ]
    replicas = ReplicaSet(
        supervisors,
        devices or [""] * len(starts),
        exits_when_down=exits_when_down,
        turn=turn or PlacingTurn(),
    )
    async with open_task_group() as group:
        group.start_soon(replicas.run)
        try:
            tokenizer = await anyio.to_thread.run_sync(prepared, load_tokenizer)
            loaded = await replicas.loaded()
            check_tokenizer(loaded, tokenizer)
            # Measured before the router is there, on the first replica.
            single = EngineClient(supervisors[0], loaded.info, tokenizer)
            supervisors[0].receiver = single
            shape = await measured_shape(single, max_running=max_running, tpot_target_ms=tpot_target_ms)
            client = EngineClient(replicas, loaded.info, tokenizer, max_unfinished=max_unfinished)
            replicas.begin(client, router(shape, loaded))
            yield client
        finally:
            group.cancel_scope.cancel()
