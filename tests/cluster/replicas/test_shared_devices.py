"""Models whose engines share GPUs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentflow.cluster.replicas.shared_devices import BusyObserver, SharedDevices, gpus_of
from agentflow.cluster.routing.load import Call, EngineShape
from agentflow.cluster.routing.router import Router
from agentflow.engine.messages import Failed
from agentflow.engine.options import EngineOptions
from agentflow.engine.simulator.cost_model import CostModel
from agentflow.engine.submit import Submit
from agentflow.protocol.sampling import SamplingParams

COST = CostModel(base_s=5e-3, row_s=2e-5, logits_s=0.0, read_s=2e-8, pair_s=0.0)
SHAPE = EngineShape(COST, max_running=8, kv_tokens=20_000)


def options(*devices: str, tensor_parallel: int = 1) -> list[EngineOptions]:
    return [EngineOptions(device=device, tensor_parallel=tensor_parallel) for device in devices]


def call(number: int, **rest: object) -> Call:
    return Call(number, "key", np.full(400, number, dtype=np.int32).tobytes(), **rest)  # type: ignore[arg-type]


class Model:
    """The router of a model with a replica on each device."""

    def __init__(self, shared: SharedDevices, *devices: str, tensor_parallel: int = 1) -> None:
        self.router = Router(SHAPE, "m")
        replicas = options(*devices, tensor_parallel=tensor_parallel)
        self.engines = shared.add_replicas(self.router.loads, replicas)
        for number in range(len(devices)):
            self.router.add(number)
        self.slowness = [1.0] * len(devices)
        self.requests: list[Call] = []
        self.num_calls = 0

    def send(self, replica: int | None = None) -> Call:
        self.num_calls += 1
        barred = () if replica is None else [one for one in self.present if one != replica]
        one = call(self.num_calls, barred=barred)
        self.router.place([one], 0.0)
        self.requests.append(one)
        return one

    def end(self, one: Call) -> None:
        self.requests.remove(one)
        self.router.ended(one, 5, 0.0)

    @property
    def present(self) -> list[int]:
        return self.router.loads.replicas


def test_a_request_avoids_a_device_on_which_another_model_works() -> None:
    shared = SharedDevices()
    large, small = Model(shared, "cuda:0", "cuda:1"), Model(shared, "cuda:0")
    busy = small.send()
    assert large.send().replica == 1
    small.end(busy)
    assert large.send().replica == 0


def test_a_group_of_gpus_is_as_slow_as_its_slowest() -> None:
    shared = SharedDevices()
    group = Model(shared, "cuda:0", "cuda:2", tensor_parallel=2)
    for device in ("cuda:1", "cuda:1", "cuda:3"):
        Model(shared, device).send()
    assert gpus_of(options("cuda:2", tensor_parallel=2)[0]) == ["cuda:2", "cuda:3"]
    assert group.send().replica == 1


def test_engines_on_processors_share_no_device() -> None:
    assert gpus_of(options("cpu")[0]) == ()
    assert gpus_of(EngineOptions()) == ["cuda:0"]


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
    assert engine.is_busy
    observer.received([Failed(2, "aborted", "")])
    assert not engine.is_busy
    shared.remove(engine)


DEVICES = [("cuda:0", "cuda:1", "cuda:2"), ("cuda:0", "cuda:1"), ("cuda:1", "cuda:3")]
steps = st.lists(
    st.tuples(st.sampled_from(["send", "end", "lose"]), st.integers(0, 2), st.integers(0, 9)), max_size=40
)


@given(steps=steps)
def test_each_router_knows_the_engines_of_others_that_have_requests(
    steps: list[tuple[str, int, int]],
) -> None:
    shared = SharedDevices()
    models = [Model(shared, *devices) for devices in DEVICES]
    for model in models:
        for number, engine in enumerate(model.engines):
            engine.on_shared = lambda factor, model=model, number=number: model.slowness.__setitem__(
                number, factor
            )
    for what, which, number in steps:
        model = models[which]
        if what == "send":
            model.send(number % len(model.slowness))
        elif what == "end" and model.requests:
            model.end(model.requests[number % len(model.requests)])
        elif what == "lose":  # and it joins again; its requests end later
            replica = number % len(model.slowness)
            model.router.lose(replica)
            model.router.add(replica)
            for one in [one for one in model.requests if one.replica == replica]:
                model.end(one)
        for index, (mine, devices) in enumerate(zip(models, DEVICES, strict=True)):
            for number, device in enumerate(devices):
                busy = [
                    other_device == device and any(one.replica == place for one in other.requests)
                    for other_index, other in enumerate(models)
                    if other_index != index
                    for place, other_device in enumerate(DEVICES[other_index])
                ]
                assert mine.slowness[number] == pytest.approx(1 + sum(busy))
