"""Several simulated models on devices that they share.

Each model has engines, a router and a cost model. The engines on one device run their steps at the same time,
each at an equal share of its speed, as processes on one GPU do that share it by time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from agentflow.cluster.routing.devices import SharedDevices
from agentflow.cluster.routing.feed import Update
from agentflow.cluster.routing.load import RoutedRequest
from agentflow.cluster.routing.placement import place_together
from agentflow.cluster.routing.prefix_tree import ReplicaNumber
from agentflow.cluster.routing.router import Router
from agentflow.cluster.simulated.simulation import STEP_ENDS, Live, SimulatedCluster, SimulatedEngine
from agentflow.engine.scheduling.scheduler import SchedulerConfig
from agentflow.engine.simulator.cost_model import CostModel
from agentflow.engine.simulator.workload import Workload

_DONE_S = 1e-12


@dataclass(frozen=True, slots=True)
class SimulatedModel:
    """One model.

    Args:
        router: Places its requests.
        cost: The time of its steps on a device that it has alone.
        config: The options of its schedulers.
        kv_tokens: The pool of each engine.
        devices: The devices of each of its engines.
    """

    router: Router
    cost: CostModel
    config: SchedulerConfig
    kv_tokens: int
    devices: Sequence[str]


@dataclass(slots=True, eq=False)
class _Device:
    """A device with the step that runs on it. ``turn`` counts changes: an older event is void."""

    # The time that each engine's step would still take alone, and when it began.
    left_s: dict[ReplicaNumber, float] = field(default_factory=dict)
    began_s: dict[ReplicaNumber, float] = field(default_factory=dict)
    updated_s: float = 0.0
    turn: int = 0


class SimulatedModels(SimulatedCluster):
    """One replay on several models. The requests of the workload have the names of their models.

    Args:
        workload: The requests.
        models: The models, by their names. Their engines are numbered one after the other.
        max_context: The longest sequence in tokens.
        shared: The routers' knowledge of each other; None: none.
    """

    def __init__(
        self,
        workload: Workload,
        models: Mapping[str, SimulatedModel],
        *,
        max_context: int,
        shared: SharedDevices | None = None,
    ) -> None:
        self._models = [model for model in models.values() for _ in model.devices]  # of each engine
        self._router_of = {name: model.router for name, model in models.items()}
        names = [device for model in models.values() for device in model.devices]
        devices = {name: _Device() for name in names}
        self._device_of = [devices[name] for name in names]
        first = 0
        for model in models.values():
            if shared is not None:
                shared.add_replicas(model.router.loads, [(device,) for device in model.devices], first)
            first += len(model.devices)
        config, cost = self._models[0].config, self._models[0].cost
        routers = _Routers([model.router for model in self._models])
        super().__init__(
            workload, config, routers, num_engines=len(names), cost=cost, max_context=max_context
        )

    def _shape(self, number: ReplicaNumber) -> tuple[SchedulerConfig, int]:
        return self._models[number].config, self._models[number].kv_tokens

    def _cost(self, engine: SimulatedEngine) -> CostModel:
        return self._models[engine.number].cost

    def _place(self, lives: Sequence[Live]) -> None:
        waiting: dict[str, list[RoutedRequest]] = {}
        for live in lives:
            assert live.call is not None
            waiting.setdefault(live.served.arrival.model, []).append(live.call)
        place_together([(self._router_of[name], its) for name, its in waiting.items()], self.now_s)

    def _run_step(self, engine: SimulatedEngine) -> None:
        device = self._device_of[engine.number]
        self._advance_device(device)
        device.left_s[engine.number], device.began_s[engine.number] = engine.took_s, self.now_s
        self._plan(device)

    def _step_ends(self, what: object) -> None:
        assert isinstance(what, tuple)
        device, turn = what
        if turn != device.turn:
            return
        self._advance_device(device)
        least_s = min(device.left_s.values())
        ended = [number for number, left_s in device.left_s.items() if left_s <= least_s + _DONE_S]
        for number in ended:
            del device.left_s[number]
        self._plan(device)
        for number in ended:
            engine = self._engines[number]
            engine.took_s = self.now_s - device.began_s[number]
            self._end_step(engine)

    def _advance_device(self, device: _Device) -> None:
        """All engines have computed since the last change."""
        if device.left_s:
            passed_s = (self.now_s - device.updated_s) / len(device.left_s)
            for number in device.left_s:
                device.left_s[number] -= passed_s
        device.updated_s = self.now_s

    def _plan(self, device: _Device) -> None:
        """The next step ends when the shortest one has had its time."""
        device.turn += 1
        if device.left_s:
            ends_s = self.now_s + max(0.0, min(device.left_s.values())) * len(device.left_s)
            self._push(ends_s, STEP_ENDS, (device, device.turn))


class _Routers:
    """The routers of all models as one ``RoutingPolicy``, by the number of the replica."""

    reads_feed = True

    def __init__(self, routers: Sequence[Router]) -> None:
        self._routers = routers

    def add(self, replica: ReplicaNumber) -> None:
        self._routers[replica].add(replica)

    def lose(self, replica: ReplicaNumber) -> None:
        self._routers[replica].lose(replica)

    def receive(self, update: Update) -> bool:
        return self._routers[update.replica].receive(update)

    def place(self, calls: Sequence[RoutedRequest], now_s: float) -> None:
        raise NotImplementedError("requests are placed by the router of their model")

    def started(self, call: RoutedRequest, now_s: float) -> None:
        self._routers[call.replica].started(call, now_s)

    def ended(self, call: RoutedRequest, num_output: int, now_s: float) -> None:
        self._routers[call.replica].ended(call, num_output, now_s)
