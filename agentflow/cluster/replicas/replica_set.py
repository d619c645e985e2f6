"""Several engine processes that serve one model behind one ``EngineClient``.

A ``ReplicaSet`` is the client's link. It places each request on a replica by the ``Router``: all requests
that come in one turn of the event loop together, so that the members of a task group meet, and with those for
other models of the server (``placing_turn``). Each replica has a supervisor, which keeps its process alive
and knows its unfinished requests. A replica is in one of these states:

- ``loading``: it has no process that runs requests.
- ``serving``: the router places requests on it.
- ``trial``: it runs requests that may crash it, alone, and gets no others.
- ``draining``: it gets no requests, and its process is replaced when those that it has have ended.
- ``down``: its process died several times in a row. New ones are started at growing intervals.

When a process dies or hangs, its requests continue on other replicas, from the ids that were generated. Those
that were running at two deaths without progress between them stay with the replica, for a trial (see
``request_journal``): a request that crashes engines takes two replicas with it at most. Requests wait while
no replica serves, and fail when all are down.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import anyio
import anyio.lowlevel

from agentflow.cluster.replicas.charge_exchange import ChargeExchange
from agentflow.cluster.replicas.placing_turn import PlacingTurn
from agentflow.cluster.replicas.replica_queries import ReplicaQueries
from agentflow.cluster.replicas.requests import router_call
from agentflow.cluster.routing.feed import Update
from agentflow.cluster.routing.load import RoutedRequest
from agentflow.cluster.routing.router import RoutingPolicy
from agentflow.engine.client import EngineClient
from agentflow.engine.messages import (
    Abort,
    AdapterLoaded,
    BlocksRequest,
    BlocksUpdate,
    Charges,
    EngineSnapshot,
    EngineStats,
    Failed,
    Finished,
    FromEngine,
    KeepMedium,
    LoadAdapter,
    Loaded,
    NodeTokens,
    PeekRequest,
    Progress,
    SnapshotRequest,
    StatsRequest,
    Stop,
    ToEngine,
    UnloadAdapter,
    UpdateHint,
)
from agentflow.engine.process.request_journal import StateIndex, Unfinished, aborted, without_adapter
from agentflow.engine.process.supervisor import EngineSupervisor
from agentflow.engine.request import Submit
from agentflow.errors import BadArgument, BadModelFolder, EngineDown, EngineFailed, Overloaded
from agentflow.runtime.task_group import open_task_group

logger = logging.getLogger(__name__)

MAX_LEFT = 512
"""Requests of a lost replica that the router forgets in one turn of the event loop."""
CHARGES_EVERY_S = 0.1
DRAIN_S = 30.0
"""How long a replica that is drained may finish its requests. The others continue on other replicas."""
STATS_S = 0.5
"""How long ``ReplicaSet.refreshed`` waits. An engine answers between two steps."""

ReplicaState = Literal["loading", "serving", "trial", "draining", "down"]


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """A replica at one moment."""

    number: int
    state: ReplicaState
    device: str  # with the address of its node, if it is on another one
    pid: int | None  # of its process; None: there is none, or it is unknown
    requests: int  # that it has not ended
    restarts: int  # how often its process was replaced
    stats: EngineStats | None  # the last known ones of its process
    is_silent: bool  # it has not answered the last ``refreshed``
    problem: str  # why it is down


@dataclass(slots=True, eq=False)
class Replica:
    """One engine of the model."""

    number: int
    supervisor: EngineSupervisor
    device: str
    # Its unfinished requests, by id. None: the router no longer counts it.
    requests: dict[int, RoutedRequest | None] = field(default_factory=dict)
    is_in_router: bool = False
    epoch: int = 0  # how often it has left the router, which ignores late reports
    is_draining: bool = False
    has_asked: bool = False  # for its blocks, since it is in the router
    changed: anyio.Event = field(default_factory=anyio.Event)  # its state, or it has no more requests

    @property
    def state(self) -> ReplicaState:
        """Its present state."""
        if self.supervisor.down_because is not None:
            return "down"
        if self.is_draining:
            return "draining"
        if self.is_in_router:
            return "serving"
        return "trial" if self.supervisor.is_ready else "loading"

    def notify(self) -> None:
        """Wakes those who wait for a change."""
        self.changed.set()
        self.changed = anyio.Event()


class ReplicaSet:
    """The ``EngineLink`` to the replicas of one model. All methods run in the event loop's thread.

    Args:
        supervisors: One for each replica. ``run`` runs them.
        devices: Where each replica runs, for people.
        exits_when_down: ``run`` raises ``EngineFailed`` when all replicas are down.
        turn: Places the requests of all models of the server.
    """

    def __init__(
        self,
        supervisors: Sequence[EngineSupervisor],
        devices: Sequence[str],
        *,
        exits_when_down: bool,
        turn: PlacingTurn,
    ) -> None:
        self._replicas = [
            Replica(number, supervisor, device)
            for number, (supervisor, device) in enumerate(zip(supervisors, devices, strict=True))
        ]
        self._exits_when_down = exits_when_down
        self._turn = turn
        self._router: RoutingPolicy | None = None
        self._client: EngineClient | None = None
        self._queries = ReplicaQueries(dict(enumerate(supervisors)), anyio.current_time)
        self._charges = ChargeExchange()
        self._waiting: dict[int, Unfinished] = {}  # requests without a replica
        self._waiting_of_state = StateIndex()
        self._left: deque[RoutedRequest] = deque()  # the router still counts these on lost replicas
        self._of_request: dict[int, Replica] = {}
        self._adapter_of: dict[int, str] = {}  # the identities of the adapters of unfinished requests, by id
        self._unneeded: list[str] = []  # the identities of adapters to unload after their last request
        self._has_work = anyio.Event()  # requests to place
        self._has_charges = anyio.Event()
        self._all_down = anyio.Event()
        self._drains: list[tuple[Replica, float]] = []
        self._has_drains = anyio.Event()

    # Opening.

    async def loaded(self) -> Loaded:
        """Waits until all replicas have loaded the same model. Raises the first error of a load, and
        ``BadModelFolder`` if the models differ."""
        infos: dict[int, Loaded] = {}

        async def wait(replica: Replica) -> None:
            infos[replica.number] = await replica.supervisor.loaded()

        async with open_task_group() as group:
            for replica in self._replicas:
                group.start_soon(wait, replica)
        first = infos[0]
        for number, other in sorted(infos.items()):
            if other != first:
                what = "model" if other.info != first.info else "tokenizer"
                raise BadModelFolder(f"replica {number} has loaded another {what} than replica 0")
        return first

    def begin(self, client: EngineClient, router: RoutingPolicy) -> None:
        """Places requests from now on. ``client`` gets the answers."""
        self._client, self._router = client, router
        self._turn.sets.append(self)
        for replica in self._replicas:
            replica.supervisor.receiver = _Receiver(self, replica)
            replica.supervisor.on_change = partial(self._changed, replica)
            replica.supervisor.on_adapter_gone = partial(self._adapter_gone, replica)
            self._changed(replica)

    async def run(self) -> None:
        """Runs until cancelled. Raises ``EngineFailed`` if all replicas are down and ``exits_when_down``."""
        try:
            async with open_task_group() as group:
                for replica in self._replicas:
                    group.start_soon(replica.supervisor.run)
                group.start_soon(self._place_forever)
                group.start_soon(self._exchange_charges)
                group.start_soon(self._drain_forever)
                await self._all_down.wait()
                raise EngineFailed("all replicas are down: see the log")
        finally:
            if self._client is not None:
                self._turn.sets.remove(self)
                self._client.end_all("the engine has stopped")

    # Messages of the client.

    def send(self, message: ToEngine | KeepMedium) -> None:
        """Accepts a message. Raises ``EngineDown`` for a ``Submit`` while all replicas are down, and for a
        query while none has a process."""
        match message:
            case Submit():
                if (why := self._down_because()) is not None:
                    raise EngineDown(why)
                if message.adapter:
                    self._adapter_of[message.request_id] = message.adapter
                self._wait(Unfinished(message, time.monotonic()))
            case Abort():
                self._abort(message)
            case StatsRequest() | SnapshotRequest() | PeekRequest() | LoadAdapter():
                self._queries.send(message)
            case UnloadAdapter():
                self._unneeded.append(message.identity)
                self._unload_adapters()
            case Stop():
                pass  # the scope ends the processes
            case _:
                if isinstance(message, UpdateHint):
                    self._waiting_of_state.update_hint(message, time.monotonic())
                for replica in self._replicas:
                    replica.supervisor.send(message)

    def _abort(self, message: Abort) -> None:
        if (waiting := self._waiting.pop(message.request_id, None)) is not None:
            self._waiting_of_state.remove(waiting)
            self._hand_over([aborted(message.request_id)])
        elif (replica := self._of_request.get(message.request_id)) is not None:
            replica.supervisor.send(message)

    def _unload_adapters(self) -> None:
        """Unloads adapters without a name after the last request that uses them: until then, the request may
        continue on any replica."""
        needed = set(self._adapter_of.values())
        for identity in [one for one in self._unneeded if one not in needed]:
            self._unneeded.remove(identity)
            for replica in self._replicas:
                replica.supervisor.send(UnloadAdapter(identity))

    # Placing.

    def _wait(self, request: Unfinished) -> None:
        self._waiting[request.submit.request_id] = request
        self._waiting_of_state.add(request)
        self._has_work.set()

    async def _place_forever(self) -> None:
        while True:
            await self._has_work.wait()
            self._has_work = anyio.Event()
            while self._left or self.can_place:
                self._end_left()
                if self.can_place:
                    self._turn.place()
                await anyio.lowlevel.checkpoint()

    @property
    def router(self) -> RoutingPolicy:
        """Places the requests. There is one after ``begin``."""
        assert self._router is not None
        return self._router

    @property
    def can_place(self) -> bool:
        """Whether requests wait, and a replica may have them."""
        return bool(self._waiting) and any(replica.is_in_router for replica in self._replicas)

    def _end_left(self) -> None:
        """Reports requests whose replica lost its process to the router, at most ``MAX_LEFT`` in a turn of
        the event loop."""
        now_s = anyio.current_time()
        for _ in range(min(len(self._left), MAX_LEFT)):
            try:
                self.router.ended(self._left.popleft(), 0, now_s)
            except Exception:
                logger.exception("the router cannot end a request")

    def take(self, max_requests: int, max_tokens: int) -> list[tuple[Unfinished, RoutedRequest]]:
        """Removes and returns the requests that have waited longest: at least one, and no more than fit
        the limits. A request that cannot be read fails alone."""
        taken: list[Unfinished] = []
        num_tokens = 0
        for request in self._waiting.values():
            num_tokens += len(request.submit.token_ids) + len(request.ids)
            if taken and (num_tokens > max_tokens or len(taken) == max_requests):
                break
            taken.append(request)
        calls: list[tuple[Unfinished, RoutedRequest]] = []
        for request in taken:
            del self._waiting[request.submit.request_id]
            self._waiting_of_state.remove(request)
            try:
                call = router_call(request.as_submitted(time.monotonic()))
            except Exception:
                logger.exception("cannot read a request")
                why = "cannot read the request: see the server's log"
                self._hand_over([Failed(request.submit.request_id, EngineFailed.code, why)])
                continue
            if call.adapter and not self._bar(call):
                self._hold(request)
            else:
                calls.append((request, call))
        return calls

    def _bar(self, call: RoutedRequest) -> bool:
        """Bars the replicas that could not load the adapter of a request again. Returns whether another one
        serves."""
        serving = [replica for replica in self._replicas if replica.is_in_router]
        call.barred = [one.number for one in serving if one.supervisor.lacks(call.adapter)]
        if call.barred and call.task_group is not None:
            call.task_group = call.task_group, call.adapter  # the members of a group bar the same replicas
        return len(call.barred) < len(serving)

    def _hold(self, request: Unfinished) -> None:
        """Sends a request whose adapter no serving replica has to one that drains or starts, where it may be.
        It fails if there is none."""
        adapter, request_id = request.submit.adapter, request.submit.request_id
        able = [
            replica
            for replica in self._replicas
            if replica.supervisor.down_because is None and not replica.supervisor.lacks(adapter)
        ]
        if not able:
            self._hand_over([without_adapter(request)])
            return
        replica = min(able, key=lambda replica: len(replica.requests))
        replica.requests[request_id] = None
        self._of_request[request_id] = replica
        replica.supervisor.adopt([request])

    def send_placed(self, calls: Sequence[tuple[Unfinished, RoutedRequest]]) -> None:
        """Sends requests to the replicas on which they were placed."""
        parts: dict[int, list[Unfinished]] = {}
        for request, call in calls:
            is_placed = self._is_in_router(call.replica)
            replica = self._replicas[call.replica] if is_placed else self._least_busy(call.barred)
            replica.requests[call.id] = call if is_placed else None
            self._of_request[call.id] = replica
            parts.setdefault(replica.number, []).append(request)
        for number, part in parts.items():
            replica = self._replicas[number]
            replica.supervisor.adopt(part)
            if replica.supervisor.has_suspects:  # of a replica that is down
                self._leave(replica)

    def _is_in_router(self, number: int) -> bool:
        return 0 <= number < len(self._replicas) and self._replicas[number].is_in_router

    def _least_busy(self, barred: Sequence[int]) -> Replica:
        serving = [one for one in self._replicas if one.is_in_router and one.number not in barred]
        return min(serving, key=lambda replica: len(replica.requests))

    # Messages of a replica.

    def received(self, replica: Replica, messages: Sequence[FromEngine]) -> None:
        """Reads the messages of one step of a replica, and hands them to the client."""
        handed: list[FromEngine] = []
        for message in messages:
            try:
                answer = self._read(replica, message)
            except Exception:  # a fault of the router must not cost an answer
                logger.exception("cannot read a message of replica %d", replica.number)
                answer = None if isinstance(message, BlocksUpdate | Charges) else message
            if answer is not None:
                handed.append(answer)
        self._hand_over(handed)
        self._join(replica)  # a trial may be over

    def _read(self, replica: Replica, message: FromEngine) -> FromEngine | None:
        """Returns the client's part of a message."""
        match message:
            case Progress():
                self._progressed(replica, message.request_id)
            case Finished():
                self._ended(replica, message.request_id, message.output_tokens)
            case Failed() if message.request_id in replica.requests:
                self._ended(replica, message.request_id, 0)
            case Failed() | EngineStats() | EngineSnapshot() | NodeTokens() | AdapterLoaded():
                return self._queries.received(replica.number, message)
            case BlocksUpdate():
                self._read_blocks(replica, message)
                return None
            case Charges():
                if len(self._replicas) > 1:
                    self._charges.received(replica.number, message)
                    self._has_charges.set()
                return None
        return message

    def _progressed(self, replica: Replica, request_id: int) -> None:
        call = replica.requests.get(request_id)
        if call is not None and not call.has_started:
            self.router.started(call, anyio.current_time())

    def _ended(self, replica: Replica | None, request_id: int, num_output: int) -> None:
        self._of_request.pop(request_id, None)
        if replica is None:
            return
        call = replica.requests.pop(request_id, None)
        if not replica.requests:
            replica.notify()
        if call is not None:
            self.router.ended(call, num_output, anyio.current_time())

    def _read_blocks(self, replica: Replica, message: BlocksUpdate) -> None:
        if not replica.is_in_router:
            return
        update = Update(replica.number, replica.epoch, message.number, message.changes, message.is_snapshot)
        if self.router.receive(update):
            replica.has_asked = False
        elif not replica.has_asked or message.is_snapshot:
            replica.has_asked = True
            replica.supervisor.send(BlocksRequest())

    # Changes of replicas.

    def _changed(self, replica: Replica) -> None:
        """A replica has a process that runs requests, or has lost it, or is down."""
        supervisor = replica.supervisor
        if supervisor.is_ready:
            self._join(replica)
            return
        self._queries.lost(replica.number)
        self._leave(replica)
        replica.is_draining = False
        is_down = supervisor.down_because is not None
        if self._down_because() is None:
            # A request that waits for its trial goes elsewhere only if there will be none here.
            self._move(replica, supervisor.give_up(suspects=is_down))
        else:
            self._fail_waiting()
        replica.notify()
        self._end_drain_if_needed()

    def _adapter_gone(self, replica: Replica, adapter: str) -> None:
        """The process of a replica could not load an adapter again. Others may have it."""
        self._move(replica, replica.supervisor.give_up(adapter=adapter))

    def _move(self, replica: Replica, requests: Sequence[Unfinished]) -> None:
        """Places requests of a replica again."""
        for request in requests:
            self._ended(replica, request.submit.request_id, 0)
            self._wait(request)
        if requests:
            logger.info("replica %d: requests that continue elsewhere: %d", replica.number, len(requests))

    def _end_drain_if_needed(self) -> None:
        """Places requests on a replica that is being drained if no other one serves."""
        if any(replica.is_in_router for replica in self._replicas):
            return
        for replica in self._replicas:
            if replica.is_draining and replica.supervisor.is_ready:
                logger.error("replica %d is not drained: no other replica serves", replica.number)
                replica.is_draining = False
                self._join(replica)

    def _join(self, replica: Replica) -> None:
        """Places requests on a replica from now on, if it may have any."""
        supervisor = replica.supervisor
        if replica.is_in_router or replica.is_draining or not supervisor.is_ready or supervisor.has_suspects:
            return
        replica.is_in_router, replica.has_asked = True, False
        self.router.add(replica.number)
        replica.notify()
        self._has_work.set()

    def _leave(self, replica: Replica) -> None:
        """Places no more requests on a replica."""
        self._left += [call for call in replica.requests.values() if call is not None]
        replica.requests = dict.fromkeys(replica.requests)
        self._has_work.set()
        if replica.is_in_router:
            replica.is_in_router = False
            replica.epoch += 1
            self.router.lose(replica.number)

    def _down_because(self) -> str | None:
        """Why all replicas are down; None if they are not."""
        reasons = [replica.supervisor.down_because for replica in self._replicas]
        return reasons[0] if all(reason is not None for reason in reasons) else None

    def _fail_waiting(self) -> None:
        why = self._down_because()
        assert why is not None
        failed = [Failed(number, EngineDown.code, why) for number in self._waiting]
        self._waiting.clear()
        self._waiting_of_state = StateIndex()
        self._hand_over(failed)
        if self._exits_when_down:
            self._all_down.set()

    # Draining.

    @property
    def replicas(self) -> list[ReplicaStatus]:
        """All replicas now."""
        return [
            ReplicaStatus(
                replica.number,
                replica.state,
                shown_device(replica.device, replica.supervisor),
                replica.supervisor.pid,
                len(replica.requests),
                replica.supervisor.restarts,
                self._queries.stats.get(replica.number),
                self._queries.is_silent(replica.number),
                replica.supervisor.down_because or "",
            )
            for replica in self._replicas
        ]

    def find_replica(self, request_id: int) -> int | None:
        """The number of the replica of an unfinished request; None while it waits for one, or if there is
        only one."""
        replica = self._of_request.get(request_id)
        return None if replica is None or len(self._replicas) == 1 else replica.number

    async def refreshed(self) -> list[ReplicaStatus]:
        """All replicas, with the stats that they have sent within ``STATS_S``."""
        with anyio.move_on_after(STATS_S):
            await self._queries.refresh()
        return self.replicas

    def drain(self, number: int, patience_s: float = DRAIN_S) -> None:
        """Replaces the process of a replica without losing its requests: they end there within
        ``patience_s``, or continue on other replicas. Returns immediately. Replicas are drained one after
        the other, so draining each one is a rolling restart.

        Raises:
            BadArgument: There is no such replica, or it is being drained.
            Overloaded: No other replica serves.
        """
        if not 0 <= number < len(self._replicas):
            raise BadArgument(f"there is no replica {number}: they are 0 to {len(self._replicas) - 1}")
        replica = self._replicas[number]
        if replica.is_draining or any(one is replica for one, _ in self._drains):
            raise BadArgument(f"replica {number} is being drained already")
        if not self._others_serve(replica) and not self._drains:
            raise Overloaded(f"replica {number} cannot be drained: no other replica serves")
        self._drains.append((replica, patience_s))
        self._has_drains.set()

    def _others_serve(self, replica: Replica) -> bool:
        return any(other.is_in_router for other in self._replicas if other is not replica)

    async def _drain_forever(self) -> None:
        while True:
            await self._has_drains.wait()
            self._has_drains = anyio.Event()
            while self._drains:
                is_fine = await self._drain(*self._drains[0])
                del self._drains[0]
                if not is_fine:
                    self._drains.clear()

    async def _drain(self, replica: Replica, patience_s: float) -> bool:
        """Returns whether the replica serves with a new process."""
        if replica.supervisor.is_ready:  # otherwise its process is being replaced in any case
            if not self._others_serve(replica):
                logger.error("replica %d is not drained: no other replica serves", replica.number)
                return False
            logger.info("replica %d is drained: %d requests", replica.number, len(replica.requests))
            replica.is_draining = True
            self._leave(replica)
            replica.notify()
            with anyio.move_on_after(patience_s):
                while replica.requests and replica.is_draining:
                    await replica.changed.wait()
            if replica.is_draining:  # it has not died meanwhile
                replica.supervisor.replace()
        while replica.state not in ("serving", "down"):
            await replica.changed.wait()
        if replica.state == "down":
            logger.error("replica %d does not serve after its drain", replica.number)
        return replica.state == "serving"

    async def _exchange_charges(self) -> None:
        while True:
            await self._has_charges.wait()
            self._has_charges = anyio.Event()
            serving = [replica.number for replica in self._replicas if replica.supervisor.is_ready]
            for number, message in self._charges.take(serving).items():
                self._replicas[number].supervisor.send(message)
            await anyio.sleep(CHARGES_EVERY_S)  # noqa: TID251  later charges go with the next message

    def _hand_over(self, messages: Sequence[FromEngine]) -> None:
        assert self._client is not None
        for message in messages if self._adapter_of else ():
            if isinstance(message, Finished | Failed):
                self._adapter_of.pop(message.request_id, None)
        self._client.receive(messages)
        if self._unneeded:
            self._unload_adapters()


def shown_device(device: str, supervisor: EngineSupervisor) -> str:
    """Returns where an engine runs, for people: ``cpu at 10.0.0.2`` on another machine."""
    return f"{device} at {supervisor.node}".strip() if supervisor.node else device


class _Receiver:
    """Delivers the messages of one replica to the set."""

    def __init__(self, replicas: ReplicaSet, replica: Replica) -> None:
        self._replicas = replicas
        self._replica = replica

    def receive(self, messages: Sequence[FromEngine]) -> None:
        self._replicas.received(self._replica, messages)

    def end_all(self, why: str) -> None:
        """Has no effect: the set ends its client."""
