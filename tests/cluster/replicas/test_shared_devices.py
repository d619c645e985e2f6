"""Models whose engines share GPUs."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentflow.cluster.replicas.shared_devices import BusyObserver, list_gpus
from agentflow.cluster.routing.devices import SharedDevices
from agentflow.cluster.routing.load import THROUGHPUT, EngineShape, RoutedRequest
from agentflow.cluster.routing.router import Router
from agentflow.engine.messages import Failed
from agentflow.engine.options import EngineOptions
from agentflow.engine.request import Submit
from agentflow.engine.simulator.cost_model import CostModel
from agentflow.protocol.sampling import SamplingParams

COST = CostModel(base_s=5e-3, row_s=2e-5, logits_s=0.0, read_s=2e-8, pair_s=0.0)
SHAPE = EngineShape(COST, max_running=8, kv_tokens=20_000)


def options(*devices: str, tensor_parallel: int = 1) -> list[EngineOptions]:
    return [EngineOptions(device=device, tensor_parallel=tensor_parallel) for device in devices]


def call(number: int, **rest: object) -> RoutedRequest:
    return RoutedRequest(number, "key", np.full(400, number, dtype=np.int32).tobytes(), **rest)  # type: ignore[arg-type]


class Model:
    """The router of a model with a replica on each device."""

    def __init__(self, shared: SharedDevices, *devices: str, tensor_parallel: int = 1) -> None:
        self.router = Router(SHAPE, "m")
        gpus = [list_gpus(one) for one in options(*devices, tensor_parallel=tensor_parallel)]
        self.engines = shared.add_replicas(self.router.loads, gpus)
        for number in range(len(devices)):
            self.router.add(number)
        self.requests: list[RoutedRequest] = []
        self.ends_s: list[list[float]] = [[] for _ in devices]  # since each replica had no requests
        self.num_calls = 0

    def send(self, replica: int | None = None, objective: str = "latency") -> RoutedRequest:
        self.num_calls += 1
        barred = () if replica is None else [one for one in self.present if one != replica]
        one = call(self.num_calls, barred=barred, objective=objective)
        self.router.place([one], 0.0)
        loads = self.router.loads
        end_s = loads._ready[one.replica] + one.expected_tokens * loads._step_s[one.replica]
        self.ends_s[one.replica].append(float(end_s))
        self.requests.append(one)
        return one

    def end(self, one: RoutedRequest) -> None:
        self.requests.remove(one)
        self.router.ended(one, 5, 0.0)
        if one.replica in self.present and not self.weight(one.replica):
            self.ends_s[one.replica].clear()

    def weight(self, replica: int) -> float:
        mine = [one for one in self.requests if one.replica == replica and one.load is self.load(replica)]
        return sum(1.0 if one.objective == "latency" else THROUGHPUT for one in mine)

    def load(self, replica: int) -> object:
        return self.router.loads._loads[replica]

    @property
    def present(self) -> list[int]:
        return sorted(self.router.loads._present)


def test_a_request_avoids_a_device_on_which_another_model_works() -> None:
    shared = SharedDevices()
    large, small = Model(shared, "cuda:0", "cuda:1"), Model(shared, "cuda:0")
    busy = small.send()
    first = large.send()
    assert first.replica == 1
    large.end(first)
    small.end(busy)
    assert large.send().replica == 0


def test_a_group_of_gpus_is_as_slow_as_its_slowest() -> None:
    shared = SharedDevices()
    group = Model(shared, "cuda:0", "cuda:2", tensor_parallel=2)
    for device in ("cuda:1", "cuda:1", "cuda:3"):
        Model(shared, device).send()
    assert list_gpus(options("cuda:2", tensor_parallel=2)[0]) == ["cuda:2", "cuda:3"]
    assert group.send().replica == 1


def test_engines_on_processors_share_no_device() -> None:
    assert list_gpus(options("cpu")[0]) == ()
    assert list_gpus(EngineOptions()) == ["cuda:0"]


def test_a_model_without_a_router_counts_while_it_has_requests() -> None:
    shared = SharedDevices()
    large = Model(shared, "cuda:0", "cuda:1")
    engine = shared.add(["cuda:0"])
    observer = BusyObserver(shared, engine)
    for number in (1, 2):
        observer.sent(Submit(number, [1], SamplingParams()))
    large.send(0)
    assert large.send().replica == 1
    observer.received([Failed(1, "aborted", "")])
    assert (engine.until_s, engine.weight) == (math.inf, 1)
    observer.received([Failed(2, "aborted", "")])
    assert (engine.until_s, engine.weight) == (0, 0)
    shared.remove(engine)


DEVICES = [("cuda:0", "cuda:1", "cuda:2"), ("cuda:0", "cuda:1"), ("cuda:1", "cuda:3")]
steps = st.lists(
    st.tuples(st.sampled_from(["send", "background", "end", "lose"]), st.integers(0, 2), st.integers(0, 9)),
    max_size=40,
)


@given(steps=steps)
def test_each_router_knows_the_requests_of_others_on_its_devices(steps: list[tuple[str, int, int]]) -> None:
    shared = SharedDevices()
    models = [Model(shared, *devices) for devices in DEVICES]
    for what, which, number in steps:
        model = models[which]
        replica = number % len(model.ends_s)
        if what == "send":
            model.send(replica)
        elif what == "background":
            model.send(replica, "throughput")
        elif what == "end" and model.requests:
            model.end(model.requests[number % len(model.requests)])
        elif what == "lose":  # and it joins again; its requests end later
            model.router.lose(replica)
            model.ends_s[replica].clear()
            model.router.add(replica)
            for one in [one for one in model.requests if one.replica == replica]:
                model.end(one)
        for mine, devices in zip(models, DEVICES, strict=True):
            for place, device in enumerate(devices):
                told = mine.router.loads
                known = sorted([(until[place], weight[place]) for until, weight in told._others_on_devices])
                expected = sorted(
                    (max(other.ends_s[number], default=0.0), other.weight(number))
                    for other in models
                    if other is not mine
                    for number, engine in enumerate(other.engines)
                    if engine.devices == [device]
                )
                known = known[len(known) - len(expected) :]
                assert np.array(known) == pytest.approx(np.array(expected))


def test_an_engine_that_stops_leaves_room_for_another_one() -> None:
    shared = SharedDevices()
    model = Model(shared, "cuda:0", "cuda:1")
    for _ in range(3):
        engine = shared.add(["cuda:0", "cuda:1"])
        shared.set_busy(engine, 2)
        others = model.router.loads._others_on_devices
        assert [weight[:2].tolist() for _, weight in others] == [[2, 2]]
        shared.remove(engine)
        assert not any(weight.any() for _, weight in others)
