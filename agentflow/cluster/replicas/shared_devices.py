"""Devices that several models of a server share.

Each model has a router, which sees the requests of its model only: two models may have different tokenizers
and KV layouts, so none of their costs but time is comparable, and what one generates reaches the other as
text. But if their engines share a GPU, they take turns on it. ``SharedDevices`` tells each router how many
engines of other models have requests on the device of each replica: while k do, everything there takes k + 1
times as long. So a model's requests go to replicas on devices that other models leave alone, and come back
when these are idle.

Engines on the processors of one machine share all of them, which makes no difference between replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from agentflow.cluster.routing.load import Loads
from agentflow.engine.machine import devices_from, gpu_number
from agentflow.engine.messages import Failed, Finished, FromEngine
from agentflow.engine.options import EngineOptions
from agentflow.engine.submit import Submit

OnShared = Callable[[float], None]
"""Called with how many times as long everything takes on an engine."""


class SharedEngine:
    """One engine on its devices. ``on_shared``: of its router; None: it has none."""

    def __init__(self, devices: Sequence[str], on_shared: OnShared | None) -> None:
        self.devices = devices
        self.is_busy = False
        self.on_shared = on_shared


class SharedDevices:
    """The engines on each device."""

    def __init__(self) -> None:
        self._engines: dict[str, list[SharedEngine]] = {}

    def add(self, devices: Sequence[str], on_shared: OnShared | None = None) -> SharedEngine:
        """An engine uses these devices from now on."""
        engine = SharedEngine(devices, on_shared)
        for device in devices:
            self._engines.setdefault(device, []).append(engine)
        self._tell(engine)
        return engine

    def remove(self, engine: SharedEngine) -> None:
        """The engine has stopped."""
        self.set_busy(engine, False)
        for device in engine.devices:
            self._engines[device].remove(engine)

    def set_busy(self, engine: SharedEngine, is_busy: bool) -> None:
        """Whether the engine has requests."""
        if is_busy is not engine.is_busy:
            engine.is_busy = is_busy
            for other in {one for device in engine.devices for one in self._engines[device]} - {engine}:
                self._tell(other)

    def _tell(self, engine: SharedEngine) -> None:
        if engine.on_shared is not None:
            counts = [
                sum(one.is_busy and one is not engine for one in self._engines[device])
                for device in engine.devices
            ]
            engine.on_shared(1.0 + max(counts, default=0))

    def add_replicas(self, loads: Loads, replicas: Sequence[EngineOptions]) -> Sequence[SharedEngine]:
        """The replicas of one model, which its router numbers in this order, use their GPUs."""
        engines = [
            self.add(gpus_of(options), partial(loads.set_slowness, number))
            for number, options in enumerate(replicas)
        ]
        loads.on_busy = lambda number, is_busy: self.set_busy(engines[number], is_busy)
        return engines


class BusyObserver:
    """A ``RequestObserver`` of a model with a single engine, which has no router."""

    def __init__(self, devices: SharedDevices, engine: SharedEngine) -> None:
        self._devices = devices
        self._engine = engine
        self._unfinished: set[int] = set()

    def sent(self, submit: Submit) -> None:
        """A request was sent to the engine."""
        self._unfinished.add(submit.request_id)
        self._devices.set_busy(self._engine, True)

    def received(self, messages: Sequence[FromEngine]) -> None:
        """Requests may have ended."""
        ended = [one.request_id for one in messages if isinstance(one, Finished | Failed)]
        if ended:
            self._unfinished.difference_update(ended)
            self._devices.set_busy(self._engine, bool(self._unfinished))


def gpus_of(options: EngineOptions) -> Sequence[str]:
    """The GPUs of an engine, by number; none if it runs on processors. Without a device it has the first one,
    if there are any."""
    if options.device == "cpu":
        return ()
    first = f"cuda:{gpu_number(options.device)}"
    return [device for device in devices_from(first, options.tensor_parallel) if device is not None]
