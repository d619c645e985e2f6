"""The router over the text of prompts."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentflow.cluster.routing.feed import Update
from agentflow.cluster.routing.load import EngineShape, RoutedRequest
from agentflow.cluster.routing.router import Router, RoutingPolicy
from agentflow.cluster.routing.text_router import MAX_RUN_BYTES, TextRouter, text_run
from agentflow.cluster.simulated.published import RoundRobin
from agentflow.cluster.simulated.simulation import MODEL, SimulatedCluster
from agentflow.engine.scheduling.scheduler import SchedulerConfig
from agentflow.engine.simulator.cost_model import CostModel
from agentflow.engine.simulator.generators import chat
from agentflow.engine.simulator.workload import Workload
from agentflow.errors import Overloaded

SYSTEM = b"You are a strict judge of essays. " * 200


def call(number: int, text: bytes, **rest: object) -> RoutedRequest:
    return RoutedRequest(number, "m", text_run(text), **rest)  # type: ignore[arg-type]


def served(router: TextRouter, one: RoutedRequest, now_s: float, num_output: int = 20) -> float:
    """The streamed answer to a request that was placed now. Returns its end."""
    started_s = now_s + 0.02 + 1e-4 * (one.num_tokens - one.num_hit)
    router.started(one, started_s)
    router.ended(one, num_output, started_s + 0.01 * num_output)
    return started_s + 0.01 * num_output


@given(st.binary(max_size=40), st.binary(max_size=40))
def test_runs_are_whole_units_and_keep_prefixes(text: bytes, more: bytes) -> None:
    run, longer = text_run(text), text_run(text + more)
    assert len(run) % 4 == 0
    assert len(run) == max(4, -(-len(text) // 4) * 4)
    whole = len(text) // 4 * 4
    assert run[:whole] == longer[:whole] == text[:whole]


def test_a_run_is_bounded() -> None:
    assert len(text_run(b"a" * 3 * MAX_RUN_BYTES)) == MAX_RUN_BYTES


def test_a_conversation_stays_and_others_spread() -> None:
    router = TextRouter(dict.fromkeys(range(4), 100_000))
    places, now_s = [], 0.0
    histories = [SYSTEM[:7] + bytes([65 + number]) * 3000 for number in range(4)]
    calls = [call(number, history) for number, history in enumerate(histories)]
    for one in calls:
        router.place([one], now_s)
    assert sorted(one.replica for one in calls) == [0, 1, 2, 3]
    now_s = max([served(router, one, now_s) for one in calls])
    for turn in range(5):
        for number, history in enumerate(histories):
            histories[number] = history + b" more %d" % turn
            later = call(100 + number, histories[number])
            router.place([later], now_s)
            places.append(later.replica == calls[number].replica)
            assert 4 * later.num_hit > 2700
            now_s = served(router, later, now_s)
    assert all(places)


def test_a_server_that_was_lost_holds_nothing() -> None:
    router = TextRouter(dict.fromkeys(range(2), 100_000))
    first = call(1, SYSTEM)
    router.place([first], 0.0)
    now_s = served(router, first, 0.0)
    router.forget(first.replica)
    router.forget(first.replica)
    again = call(2, SYSTEM)
    router.place([again], now_s)
    assert again.num_hit == 0
    now_s = served(router, again, now_s)
    third = call(3, SYSTEM + b"more")
    router.place([third], now_s)
    assert (third.replica, third.num_hit > 1000) == (again.replica, True)


def test_a_barred_server_is_not_chosen() -> None:
    router = TextRouter(dict.fromkeys(range(3), 100_000))
    first = call(1, SYSTEM)
    router.place([first], 0.0)
    second = call(2, SYSTEM, barred=(first.replica,))
    group = [call(3 + n, SYSTEM + b"%d" % n, task_group="g", barred=(first.replica,)) for n in range(4)]
    router.place([second], 0.0)
    router.place(group, 0.0)
    assert first.replica not in {second.replica, *[one.replica for one in group]}
    with pytest.raises(Overloaded):
        router.place([call(9, SYSTEM, barred=(0, 1, 2))], 0.0)


def test_a_task_group_is_placed_on_one_server() -> None:
    router = TextRouter(dict.fromkeys(range(3), 100_000))
    group = [call(n, SYSTEM * 5 + b"question %d" % n, task_group="g") for n in range(3)]
    router.place(group, 0.0)
    assert len({one.replica for one in group}) == 1


def test_a_slow_server_gets_less() -> None:
    router = TextRouter(dict.fromkeys(range(2), 100_000))
    router.router.loads.set_slowness(1, 1.0)
    rng, now_s = random.Random(3), 0.0
    counts: Counter[int] = Counter()
    for number in range(200):
        calls = [call(2 * number + i, rng.randbytes(2000)) for i in range(2)]
        router.place(calls, now_s)
        for one in calls:
            counts[one.replica] += 1
            slow = 8 if one.replica == 1 else 1
            router.started(one, now_s + 0.05 * slow)
            router.ended(one, 20, now_s + (0.05 + 0.2) * slow)
        now_s += 2.0
    assert counts[0] > 2 * counts[1]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.booleans()), max_size=40))
def test_the_books_are_empty_when_all_requests_ended(steps: Sequence[tuple[int, int, bool]]) -> None:
    router, running, now_s = TextRouter(dict.fromkeys(range(3), 1_000)), [], 0.0
    for number, (kind, which, flag) in enumerate(steps):
        now_s += 0.1
        if kind == 0:
            one = call(number, SYSTEM[: 700 * which], program=which if flag else None)
            router.place([one], now_s)
            running.append(one)
        elif kind == 1 and running:
            one = running[which % len(running)]
            if not one.has_started:
                router.started(one, now_s)
        elif kind == 2 and running:
            one = running.pop(which % len(running))
            router.ended(one, which if flag else None, now_s)
        elif kind == 3 and which < 3:
            router.forget(which)
        router.router.tree.check()
    for one in running:
        router.ended(one, None, now_s)
    router.router.tree.check()
    assert not any(edge.running for edge in router.router.tree.edges())
    assert set(router._waiting_units.values()) == {0}
    assert not router._sent


class TextPolicy:
    """The router in the simulator. It reads no reports, and knows no costs."""

    reads_feed = True  # otherwise the simulator tells it the length of outputs

    def __init__(self, num_engines: int, cache_tokens: int) -> None:
        self.text = TextRouter(dict.fromkeys(range(num_engines), cache_tokens))

    def add(self, replica: int) -> None:
        pass

    def lose(self, replica: int) -> None:
        self.text.forget(replica)

    def receive(self, update: Update) -> bool:
        return True

    def place(self, calls: Sequence[RoutedRequest], now_s: float) -> None:
        self.text.place(calls, now_s)

    def started(self, call: RoutedRequest, now_s: float) -> None:
        call.has_started = False  # the simulator sets it before
        self.text.started(call, now_s)

    def ended(self, call: RoutedRequest, num_output: int, now_s: float) -> None:
        self.text.ended(call, num_output or None, now_s)


def test_real_caches_have_what_the_router_guesses() -> None:
    kv_tokens = 8_000  # some prompts are evicted
    arrivals = chat(num_chats=30, per_s=20.0, turns=4, system=200, message=150, reply=6, pause_s=1.0)
    cost = CostModel(base_s=5e-3, row_s=2e-5, logits_s=0.0, read_s=2e-8, pair_s=0.0)
    workload = Workload("chat", arrivals, kv_tokens)

    def hit_rate(policy: RoutingPolicy) -> float:
        cluster = SimulatedCluster(
            workload, SchedulerConfig(max_running=32), policy, num_engines=3, cost=cost, max_context=4_096
        )
        return cluster.run().hit_rate

    reported = hit_rate(Router(EngineShape(cost, 32, kv_tokens), MODEL))
    guessed = hit_rate(TextPolicy(3, kv_tokens))
    assert guessed > reported - 0.05
    assert guessed > hit_rate(RoundRobin()) + 0.1
