"""Where the router sends requests."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from agentflow.cluster.routing.feed import Update
from agentflow.cluster.routing.load import EngineShape, Loads, RoutedRequest
from agentflow.cluster.routing.router import Router
from agentflow.engine.cache.blocks import BlocksStored, chain_digests, root_digest
from agentflow.engine.simulator.cost_model import CostModel
from agentflow.errors import Overloaded

COST = CostModel(base_s=5e-3, row_s=2e-5, logits_s=0.0, read_s=2e-8, pair_s=0.0)
SHAPE = EngineShape(COST, max_running=8, kv_tokens=20_000)


def tokens(value: int, length: int) -> bytes:
    return np.full(length, value, dtype=np.int32).tobytes()


def call(number: int, run: bytes, **rest: object) -> RoutedRequest:
    return RoutedRequest(number, "key", run, **rest)  # type: ignore[arg-type]


def router_of(num_replicas: int, shape: EngineShape = SHAPE, **rest: bool) -> Router:
    router = Router(shape, "m", **rest)
    for replica in range(num_replicas):
        router.add(replica)
    return router


def place(router: Router, *calls: RoutedRequest, now_s: float = 0.0) -> list[int]:
    router.place(calls, now_s)
    return [one.replica for one in calls]


def report(router: Router, replica: int, run: bytes, number: int = 1) -> None:
    root = root_digest("m", "key")
    assert router.receive(
        Update(replica, 0, number, [BlocksStored("key", root, chain_digests(root, run), run)])
    )


def run_on(router: Router, replica: int, count: int, **rest: object) -> list[RoutedRequest]:
    """Requests that share nothing and have their first token on the replica."""
    calls = [call(1000 * replica + i, tokens(1000 * (replica + 1) + i, 500), **rest) for i in range(count)]
    for one in calls:
        router.loads.placed(one, replica, 0, 0.0)
        router.tree.begin(replica, "key", one.run)
        router.started(one, 0.0)
    return calls


def test_a_request_follows_a_reported_prefix() -> None:
    router = router_of(3)
    report(router, 1, tokens(1, 640))
    assert place(router, call(1, tokens(1, 640) + tokens(2, 50))) == [1]


def test_requests_that_come_together_follow_each_other_before_any_report() -> None:
    router = router_of(3)
    shared = tokens(1, 1000)
    run_on(router, 0, 1)
    assert place(router, *[call(i, shared + tokens(2 + i, 20)) for i in range(2)]) == [1, 1]


def test_requests_without_a_common_prefix_are_spread() -> None:
    assert sorted(place(router_of(4), *[call(i, tokens(i, 500)) for i in range(4)])) == [0, 1, 2, 3]


def test_forks_leave_a_full_replica_when_computing_the_prefix_again_is_cheaper() -> None:
    router = router_of(2)
    shared = tokens(1, 640)
    report(router, 0, shared)
    run_on(router, 0, 2 * SHAPE.max_running)
    assert place(router, call(1, shared + tokens(2, 20))) == [1]
    # With a longer prefix waiting is cheaper.
    long = tokens(3, 64_000)
    report(router, 0, long, number=2)
    assert place(router, call(2, long + tokens(2, 20))) == [0]


def test_a_prompt_avoids_a_replica_whose_requests_waited_for_many_prompts_lately() -> None:
    router = router_of(2, EngineShape(COST, max_running=64, kv_tokens=200_000))
    run_on(router, 1, 4)
    earlier = run_on(router, 0, 30)
    for one in earlier[4:]:
        router.ended(one, 0, 0.0)
    probe = call(9, tokens(9, 1000))
    own, others = router.loads.terms(probe, {}, 0.0)
    assert own[0] == pytest.approx(own[1])
    assert others[0] > others[1]
    assert place(router, probe) == [1]


def test_an_ended_request_no_longer_counts() -> None:
    router = router_of(2)
    one = call(1, tokens(1, 500))
    place(router, one)
    router.started(one, 0.1)
    router.ended(one, 10, 0.2)
    assert router.tree.match("key", one.run).hits == {}
    assert place(router, call(2, tokens(2, 500)), now_s=0.2) == [0]


def test_outputs_are_expected_as_long_as_others_after_the_same_beginning() -> None:
    router = router_of(2)
    short, long = tokens(1, 500), tokens(2, 500)
    for number, (begin, output) in enumerate([(short, 10), (long, 700)] * 20):
        one = call(number, begin + tokens(100 + number, 8))
        place(router, one)
        router.started(one, 0.0)
        router.ended(one, output, 0.0)
    expected = [router.loads.expected_output(call(99, run)) for run in (short, long, tokens(3, 500))]
    assert expected[:2] == [10, 700]
    assert expected[0] < expected[2] < expected[1]
    assert router.loads.expected_output(call(99, short, output_tokens=33)) == 33


def test_the_queue_shrinks_with_time() -> None:
    loads = Loads(SHAPE)
    loads.add(0)
    loads.placed(call(1, tokens(1, 5000)), 0, 0, 0.0)
    at_first, later, much_later = (loads.terms(call(2, tokens(2, 1)), {}, now).own[0] for now in (0, 0.05, 9))
    assert at_first - later == pytest.approx(0.05)
    assert at_first - much_later == pytest.approx(5000 * COST.row_s)


@pytest.mark.parametrize(("count", "parts"), [(2, 1), (32, 4)])
def test_a_task_group_is_divided_where_that_ends_it_sooner(count: int, parts: int) -> None:
    router = router_of(4, EngineShape(COST, max_running=64, kv_tokens=200_000))
    shared = tokens(1, 2000)
    members = [
        call(i, shared + tokens(2 + i, 500 if parts > 1 else 20), task_group="g", output_tokens=20)
        for i in range(count)
    ]
    placed = place(router, *members)
    assert len(set(placed)) == parts
    assert placed == sorted(placed, key=placed.index)  # neighbours stay together


def test_a_task_group_is_placed_whole_as_in_the_paper() -> None:
    router = router_of(4, EngineShape(COST, 64, 200_000), divides_groups=False)
    members = [call(i, tokens(2 + i, 2000), task_group="g") for i in range(32)]
    assert len(set(place(router, *members))) == 1


def test_requests_are_placed_in_topological_order() -> None:
    router = router_of(2)
    late, early = call(1, tokens(1, 5000), rank=1), call(2, tokens(2, 10), rank=0)
    assert place(router, late, early) == [1, 0]


PARROT = EngineShape(
    CostModel(base_s=5e-3, row_s=2e-5, logits_s=0.0, read_s=0.0, pair_s=0.0),
    max_running=256,
    kv_tokens=64_000,
    latency_tokens=2_000,
)
"""The capacities of the paper: 64,000 tokens for throughput, 2,000 next to a reader."""


def test_a_reader_avoids_an_engine_that_serves_throughput() -> None:
    router = router_of(2, PARROT)
    run_on(router, 0, 40, objective="throughput")
    run_on(router, 1, 20)
    assert place(router, call(1, tokens(1, 100))) == [1]


def test_a_reader_costs_almost_nothing_more_where_readers_are_served() -> None:
    without, with_reader = router_of(1, PARROT), router_of(1, PARROT)
    run_on(without, 0, 40, objective="throughput")
    run_on(with_reader, 0, 40, objective="throughput")
    place(with_reader, call(9, tokens(9, 1)))
    one = call(1, tokens(1, 100), output_tokens=100)
    lost = [
        float(terms.own[0] + terms.others[0])
        for terms in (router.loads.terms(one, {}, 1.0) for router in (without, with_reader))
    ]
    assert lost[0] > 5 * lost[1]


def test_throughput_avoids_engines_without_room_beside_readers() -> None:
    router = router_of(2, PARROT)
    run_on(router, 0, 4)
    run_on(router, 1, 30, objective="throughput")
    assert place(router, call(1, tokens(1, 100), objective="throughput")) == [1]


KEPT = EngineShape(COST, max_running=64, kv_tokens=400_000, tpot_s=0.010, keeps_tpot=True)


def test_readers_share_replicas_with_a_kept_bound_while_there_is_work_for_throughput() -> None:
    router = router_of(4, KEPT)
    document = call(0, tokens(1, 1000), objective="throughput", output_tokens=50)
    work = place(router, document)
    readers = [place(router, call(i, tokens(i, 100), output_tokens=300))[0] for i in range(1, 41)]
    assert len({*readers}) == 1
    assert not {*readers} & {*work}
    later = [place(router, call(i, tokens(i, 100), output_tokens=300), now_s=11.0)[0] for i in range(50, 65)]
    assert len({*later}) == 3


def test_readers_that_would_wait_long_open_another_replica() -> None:
    router = router_of(2, replace(KEPT, max_running=8))
    place(router, call(0, tokens(1, 1000), objective="throughput", output_tokens=50))
    run_on(router, 1, 8)
    placed = [place(router, call(i, tokens(i, 100)))[0] for i in range(1, 40)]
    assert placed[:8] == [1] * 8
    assert 0 in placed


def test_work_for_throughput_uses_replicas_without_readers_at_their_full_speed() -> None:
    router = router_of(2, KEPT)
    run_on(router, 0, 10, objective="throughput")
    run_on(router, 1, 10)
    documents = [call(i, tokens(i, 2000), objective="throughput", output_tokens=50) for i in range(1, 5)]
    assert {*place(router, *documents)} == {0}


@pytest.mark.parametrize("objective", ["latency", "throughput"])
def test_a_replica_whose_requests_have_ended_costs_as_a_new_one(objective: str) -> None:
    router = router_of(2, KEPT)
    for one in run_on(router, 0, 5, objective=objective):
        router.ended(one, 0, 0.0)
    terms = router.loads.terms(call(9, tokens(9, 100)), {}, 1.0)
    assert terms.own[0] == pytest.approx(terms.own[1])
    assert terms.others[0] == pytest.approx(terms.others[1])


def test_a_tenant_waits_at_most_for_its_part_of_a_queue() -> None:
    loads = Loads(SHAPE)
    loads.add(0)
    for number in range(10):
        loads.placed(call(number, tokens(number, 5000), tenant="busy"), 0, 0, 0.0)
    loads.placed(call(10, tokens(10, 10), tenant="other"), 0, 0, 0.0)
    busy, quiet = (
        loads.terms(call(11, tokens(11, 10), tenant=tenant), {}, 0.0).own[0] for tenant in ("busy", "quiet")
    )
    assert busy - quiet > 0.9 * 10 * 5000 * COST.row_s


def test_an_adapter_draws_requests_to_where_it_is_loaded() -> None:
    router = router_of(2)
    router.loads.set_adapters({"a": {0: 0.5}})
    assert place(router, call(1, tokens(1, 100), adapter="a"), call(2, tokens(2, 100))) == [1, 0]


def test_a_full_cache_counts_for_requests_that_bring_new_tokens() -> None:
    router = router_of(2)
    report(router, 0, tokens(7, 64 * 300))
    assert place(router, call(1, tokens(1, 500))) == [1]


def test_a_lost_replica_gets_nothing_and_its_late_reports_change_nothing() -> None:
    router = router_of(2)
    report(router, 0, tokens(1, 640))
    router.lose(0)
    assert router.tree.match("key", tokens(1, 640)).hits == {}
    router.receive(Update(0, 0, 2, []))
    assert place(router, *[call(i, tokens(1, 640)) for i in range(3)]) == [1, 1, 1]
    router.lose(1)
    with pytest.raises(Overloaded):
        place(router, call(9, tokens(1, 10)))
    router.add(0)
    assert place(router, call(10, tokens(1, 640))) == [0]


def test_requests_of_a_lost_replica_may_end_after_it_has_joined_again() -> None:
    router, fresh = router_of(2), router_of(2)
    early = [*run_on(router, 0, 5), call(7, tokens(7, 500), tenant="waits")]
    router.loads.placed(early[-1], 0, 0, 0.0)
    router.tree.begin(0, "key", early[-1].run)
    router.lose(0)
    router.add(0)
    for one in early:
        router.ended(one, 0, 1.0)
    probe = call(8, tokens(8, 100))
    for found, expected in zip(
        router.loads.terms(probe, {}, 1.0), fresh.loads.terms(probe, {}, 1.0), strict=True
    ):
        assert found.tolist() == pytest.approx(expected.tolist())
    assert not list(router.tree.edges())


def test_any_number_of_replicas_may_join() -> None:
    router = router_of(40)
    assert sorted(place(router, *[call(i, tokens(i, 300)) for i in range(40)])) == list(range(40))


def test_tenants_in_several_queues_are_placed_on_replicas_that_exist() -> None:
    """A tenant's bounded wait is finite, but not where there is no replica."""
    router = router_of(2)
    router.lose(1)
    calls = [call(number, tokens(number, 500), tenant=str(number % 3)) for number in range(1, 20)]
    assert {place(router, one)[0] for one in calls} == {0}
