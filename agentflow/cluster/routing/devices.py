"""Devices that engines of several models share.

Each model has a router, which knows the requests of its model only: two models may have different tokenizers
and KV layouts, so only their times can be compared, and the output of one reaches the other as text. But
engines on one device take turns on it. ``SharedDevices`` tells the router of each model how long the other
engines on the devices of its replicas have work, and for how many requests (``load``). So a request avoids
devices on which others work for longer than its prefix takes, and devices on which more requests would wait
for it than on others.

Engines on the processors of one machine share all of them, which makes no difference between replicas.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial

from agentflow.cluster.routing.load import Loads

OtherListener = Callable[[int, float, float], None]
"""Called with the number of another engine on the devices, the time until which it has requests, and how many
they are, by their weight."""


class SharedEngine:
    """One engine on its devices. ``on_other``: of its router; None: it has none."""

    def __init__(self, devices: Sequence[str], on_other: OtherListener | None) -> None:
        self.devices = devices
        self.on_other = on_other
        self.until_s = self.weight = 0.0
        self.others: dict[SharedEngine, int] = {}  # the engines on these devices, with their numbers


class SharedDevices:
    """The engines on all devices."""

    def __init__(self) -> None:
        self._engines: list[SharedEngine] = []

    def add(self, devices: Sequence[str], on_other: OtherListener | None = None) -> SharedEngine:
        """An engine uses these devices from now on."""
        engine = SharedEngine(devices, on_other)
        for other in self._engines:
            if not set(devices).isdisjoint(other.devices):
                for one, its in ((engine, other), (other, engine)):
                    taken = set(one.others.values())
                    one.others[its] = next(number for number in itertools.count() if number not in taken)
                    _tell(one, its)
        self._engines.append(engine)
        return engine

    def add_replicas(
        self, loads: Loads, devices: Sequence[Sequence[str]], first: int = 0
    ) -> Sequence[SharedEngine]:
        """The replicas of one model, which its router numbers in this order from ``first`` on, use these
        devices."""
        engines = [
            self.add(one, partial(loads.set_other, number)) for number, one in enumerate(devices, start=first)
        ]
        if any(engine.devices for engine in engines):
            loads.on_load = lambda number, *load: self.set_load(engines[number - first], *load)
        return engines

    def remove(self, engine: SharedEngine) -> None:
        """The engine has stopped."""
        self.set_load(engine, 0.0, 0.0)
        self._engines.remove(engine)
        for other in engine.others:
            del other.others[engine]

    def set_load(self, engine: SharedEngine, until_s: float, weight: float) -> None:
        """The engine has requests until this time, this many by their weight."""
        engine.until_s, engine.weight = until_s, weight
        for other in engine.others:
            _tell(other, engine)

    def set_busy(self, engine: SharedEngine, num_requests: int) -> None:
        """The engine has this many requests, and it is unknown how long they take."""
        self.set_load(engine, math.inf if num_requests else 0.0, num_requests)


def _tell(engine: SharedEngine, other: SharedEngine) -> None:
    if engine.on_other is not None:
        engine.on_other(engine.others[other], other.until_s, other.weight)
