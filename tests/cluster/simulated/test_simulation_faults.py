"""Programs on replicas that die or are cut off, with reports that are lost or overtake each other: every
request ends with the same tokens as alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples

from agentflow.cluster.routing.load import EngineShape
from agentflow.cluster.routing.router import Router, RoutingPolicy
from agentflow.cluster.simulated.published import PUBLISHED_ROUTERS
from agentflow.cluster.simulated.simulation import MODEL, Loss, MakePrompt, Network, SimulatedCluster
from agentflow.engine.scheduling.scheduler import SchedulerConfig
from agentflow.engine.simulator.cost_model import CostModel
from agentflow.engine.simulator.fake_runner import FakeRunner
from agentflow.engine.simulator.workload import Arrival, Workload

COST = CostModel(base_s=5e-3, row_s=2e-5, logits_s=0.0, read_s=2e-8, pair_s=1e-9)
CONFIG = SchedulerConfig(max_running=4, token_budget=128)
KV_TOKENS, MAX_CONTEXT, NUM_REPLICAS = 1200, 700, 3


def programs(count: int, width: int) -> Workload:
    """Programs that begin, fork into a task group, and join it."""
    arrivals: list[Arrival] = []
    nothing = np.zeros(1, dtype=np.int32)
    for number in range(count):
        first = len(arrivals)

        def add(tokens: int, name: str = f"program {number}", **rest: object) -> None:
            output = np.zeros(tokens, dtype=np.int32)
            arrivals.append(Arrival(nothing, output, program=name, **rest))  # type: ignore[arg-type]

        add(70, at_s=0.02 * number, state=f"state {number}")
        for _ in range(width):
            add(9, after=first, task_group=f"group {number}")
        add(6, after=first + 1, joins=range(first + 2, first + width + 1), state=f"state {number}")
    return Workload("programs", arrivals, KV_TOKENS)


def prompt_maker(width: int) -> MakePrompt:
    """Makes prompts that continue the outputs of the requests before them. Half of the programs share their
    beginning."""

    def make(index: int, outputs: Mapping[int, Sequence[int]]) -> np.ndarray:
        number, place = divmod(index, width + 2)
        begin = [*range(100, 190), number % 2, *range(90)]
        first = index - place
        if place == 0:
            return np.array(begin, dtype=np.int32)
        if place <= width:
            return np.array([*begin, *outputs[first], place], dtype=np.int32)
        joined = [token for one in range(first + 1, index) for token in outputs[one]]
        return np.array([*begin, *outputs[first], *joined, 7], dtype=np.int32)

    return make


def router() -> Router:
    return Router(EngineShape(COST, CONFIG.max_running, KV_TOKENS), MODEL)


def run(
    workload: Workload,
    width: int,
    policy: RoutingPolicy,
    *,
    num_engines: int = NUM_REPLICAS,
    network: Network | None = None,
    losses: Sequence[Loss] = (),
) -> SimulatedCluster:
    cluster = SimulatedCluster(
        workload,
        CONFIG,
        policy,
        num_engines=num_engines,
        cost=COST,
        max_context=MAX_CONTEXT,
        network=network,
        losses=losses,
        new_runner=lambda: FakeRunner(num_slots=KV_TOKENS, max_context=MAX_CONTEXT, vocab_size=1000),
        make_prompt=prompt_maker(width),
    )
    cluster.run()
    return cluster


def texts_alone(workload: Workload, width: int) -> dict[int, list[int]]:
    """The output of each request, on one engine where nothing goes wrong."""
    return run(workload, width, router(), num_engines=1).outputs


losses = st.builds(
    Loss,
    at_s=st.floats(0, 1.5),
    replica=st.integers(0, NUM_REPLICAS - 1),
    away_s=st.floats(0.001, 0.5),
    dies=st.booleans(),
)
networks = st.builds(
    Network,
    delay_s=st.sampled_from([0.0, 0.01]),
    jitter_s=st.sampled_from([0.0, 0.05]),
    lost=st.sampled_from([0.0, 0.3, 1.0]),
    seed=st.integers(0, 3),
)


@examples(60)
@given(
    width=st.integers(1, 4),
    count=st.integers(1, 5),
    lost=st.lists(losses, max_size=6),
    network=networks,
)
def test_programs_end_with_the_same_texts_as_alone(
    width: int, count: int, lost: list[Loss], network: Network
) -> None:
    workload, policy = programs(count, width), router()
    cluster = run(workload, width, policy, network=network, losses=lost)
    assert cluster.outputs == texts_alone(workload, width)
    policy.tree.check()
    assert not any(edge.running for edge in policy.tree.edges())


@pytest.mark.parametrize("name", PUBLISHED_ROUTERS)
def test_other_routers_lose_nothing_either(name: str) -> None:
    workload = programs(4, 3)
    lost = [Loss(0.2, 0, 0.3), Loss(0.3, 1, 0.2, dies=False), Loss(0.35, 2, 0.1)]
    cluster = run(workload, 3, PUBLISHED_ROUTERS[name](), losses=lost)
    assert cluster.num_moved > 0
    assert cluster.outputs == texts_alone(workload, 3)


def test_the_requests_of_a_dead_replica_move() -> None:
    workload, policy = programs(1, 4), router()
    cluster = run(workload, 4, policy, losses=[Loss(0.1, 0, 1000.0)])
    assert cluster.num_moved == 1
    assert cluster.outputs == texts_alone(workload, 4)
    assert policy.loads._present == {0, 1, 2}


def test_equal_parameters_give_equal_simulations() -> None:
    workload = programs(5, 4)
    network = Network(delay_s=0.01, jitter_s=0.05, lost=0.2, seed=1)

    def times() -> list[tuple[float, float, int]]:
        cluster = run(workload, 4, router(), network=network, losses=[Loss(0.2, 1, 0.1)])
        return [(one.first_s, one.ended_s, one.num_cached) for one in cluster.served]

    assert times() == times()
