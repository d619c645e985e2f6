"""Requests of several models, placed together on devices that they share."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples

from agentflow.cluster.routing.devices import SharedDevices
from agentflow.cluster.routing.load import EngineShape, RoutedRequest
from agentflow.cluster.routing.placement import place_together
from agentflow.cluster.routing.router import Router
from agentflow.engine.simulator.cost_model import CostModel

COSTS = (
    CostModel(base_s=5e-3, row_s=2e-5, logits_s=0.0, read_s=2e-8, pair_s=1e-9),
    CostModel(base_s=2e-3, row_s=5e-6, logits_s=0.0, read_s=1e-8, pair_s=0.0),
)
DEVICES = [("a", "b", "c"), ("b", "c", "d")]


def request(number: int, length: int, **rest: object) -> RoutedRequest:
    return RoutedRequest(number, "key", np.full(length, number, dtype=np.int32).tobytes(), **rest)  # type: ignore[arg-type]


def routers(shared: SharedDevices | None) -> list[Router]:
    """The routers of two models, each with a replica on three devices."""
    found = []
    for cost, devices in zip(COSTS, DEVICES, strict=True):
        router = Router(EngineShape(cost, max_running=4, kv_tokens=20_000), "m")
        if shared is not None:
            shared.add_replicas(router.loads, [(device,) for device in devices])
        for replica in range(3):
            router.add(replica)
        found.append(router)
    return found


begun = st.tuples(st.integers(0, 1), st.integers(0, 2), st.integers(1, 2000), st.booleans())
"""A request: its model, its replica, its tokens, and whether it has its first token."""


@examples(60)
@given(
    earlier=st.lists(begun, max_size=12),
    which=st.integers(0, 1),
    length=st.integers(1, 2000),
    now_s=st.sampled_from([0.0, 0.05, 1.0]),
)
def test_a_request_goes_where_it_costs_least_over_all_models(
    earlier: list[tuple[int, int, int, bool]], which: int, length: int, now_s: float
) -> None:
    """The reference counts the other models' requests one by one; the cost on a device that a model has alone
    is tested elsewhere."""
    together, alone = routers(SharedDevices()), routers(None)
    placed: list[tuple[int, RoutedRequest, float]] = []  # the model, the request, and when it ends
    for number, (model, replica, tokens, has_started) in enumerate(earlier):
        for group in (alone, together):
            one = request(number, tokens, barred=[other for other in range(3) if other != replica])
            group[model].place([one], 0.0)
            loads = group[model].loads
            ends_s = float(loads._ready[replica] + one.expected_tokens * loads._step_s[replica])
            if has_started:
                group[model].started(one, 0.0)
        placed.append((model, one, ends_s))
    one = request(99, length)
    own, others = alone[which].loads.terms(one, {}, now_s)
    expected = []
    for replica, device in enumerate(DEVICES[which]):
        mine = [ends_s for model, call, ends_s in placed if (model, call.replica) == (which, replica)]
        longer_s = max(0.0, own[replica] - max(0.0, max(mine, default=0.0) - now_s))
        cost = own[replica] + others[replica]
        for model, devices in enumerate(DEVICES):
            if model == which or device not in devices:
                continue
            place = model, devices.index(device)
            its = [ends_s for number, call, ends_s in placed if (number, call.replica) == place]
            left_s = max(0.0, max(its, default=0.0) - now_s)
            cost += min(own[replica], left_s) + len(its) * min(longer_s, left_s)
        expected.append(cost)
    place_together([(together[which], [one])], now_s)
    assert expected[one.replica] == pytest.approx(min(expected))


class Recorder(Router):
    """Records the requests that it places."""

    def __init__(self, name: str, log: list[tuple[str, list[int]]]) -> None:
        super().__init__(EngineShape(COSTS[0], 4, 20_000), name)
        self._name, self._log = name, log
        self.add(0)

    def place(self, calls: Sequence[RoutedRequest], now_s: float) -> None:
        self._log.append((self._name, [call.id for call in calls]))
        if any(call.id == 13 for call in calls):
            raise ValueError
        super().place(calls, now_s)


def test_requests_are_placed_in_topological_order_over_models_and_groups_whole() -> None:
    log: list[tuple[str, list[int]]] = []
    small, large = Recorder("small", log), Recorder("large", log)
    drafts = [request(number, 9, task_group="drafts", rank=1) for number in (1, 2, 3)]
    judged = [request(number, 9, task_group="drafts", rank=1) for number in (4, 5)]
    first, last = request(6, 9), request(7, 9, rank=2)
    waiting = [(small, [drafts[0], last, *drafts[1:]]), (large, [judged[0], first, judged[1]])]
    place_together(waiting, 0.0)
    assert log == [("large", [6]), ("small", [1, 2, 3]), ("large", [4, 5]), ("small", [7])]


def test_a_fault_of_one_request_leaves_the_others_placed() -> None:
    log: list[tuple[str, list[int]]] = []
    small, large = Recorder("small", log), Recorder("large", log)
    calls = [request(number, 9) for number in (12, 13, 14, 15)]
    place_together([(small, calls[:3]), (large, calls[3:])], 0.0)
    assert [call.replica for call in calls] == [0, -1, 0, 0]
