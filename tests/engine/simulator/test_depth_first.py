"""``dfs-weight``: the order of requests. ``test_prefix_policies`` tests its hit rate."""

import random

import numpy as np
from support.engine.requests import request_of

from agentflow.engine.runner import run_batch
from agentflow.engine.scheduling.policies import waiting_tree
from agentflow.engine.scheduling.scheduler import Scheduler, SchedulerConfig
from agentflow.engine.simulator.depth_first import SIMULATED_POLICIES
from agentflow.engine.simulator.fake_runner import FakeRunner
from agentflow.protocol.sampling import SamplingParams


def depth_first(num_slots: int, max_running: int) -> Scheduler:
    config = SchedulerConfig(max_running=max_running, policy="dfs-weight")
    return Scheduler(num_slots=num_slots, max_context=num_slots, config=config, policies=SIMULATED_POLICIES)


def run_all(scheduler: Scheduler, prompts: list[list[int]], num_slots: int) -> list[int]:
    """Runs requests of one token each. Returns the indices of their prompts in the order of their ends."""
    runner = FakeRunner(num_slots=num_slots, max_context=num_slots)
    for number, prompt in enumerate(prompts):
        scheduler.add(request_of(number, np.array(prompt, dtype=np.int32), 1, SamplingParams()))
    order = []
    while (batch := scheduler.schedule()) is not None:
        for result in scheduler.complete(run_batch(runner, batch)):
            order.append(result.request.id)
            scheduler.release(result.request)
    return order


def test_depth_first_enters_the_heaviest_branch_and_stays_there():
    prompts = [[1, 100], [2, 2, 101], [2, 2, 102], [2, 3, 103], [1, 104]]
    assert run_all(depth_first(num_slots=64, max_running=1), prompts, 64) == [1, 2, 3, 0, 4]


def test_prompts_nested_thousands_deep_do_not_exhaust_the_stack():
    """Each prompt goes on where the one before ends: the waiting tree is as deep as there are prompts."""
    scheduler = depth_first(num_slots=10_000, max_running=2)
    tokens = np.arange(1, 3_001, dtype=np.int32)
    for number in range(1, 1_501):
        scheduler.add(request_of(number, tokens[: 2 * number], 1, SamplingParams()))
    batch = scheduler.schedule()
    assert batch is not None
    assert batch.token_ids[0] == 1
    policy = scheduler.waiting
    assert policy.next([], lambda request, match: True) is None  # every one of them is looked at


def test_joined_edges_do_not_change_the_order(monkeypatch):
    """Each of the prompts that run first leaves a node behind."""
    orders = []
    for spare_nodes in (1000, 0):
        monkeypatch.setattr(waiting_tree, "SPARE_NODES", spare_nodes)
        monkeypatch.setattr(waiting_tree, "NODES_PER_REQUEST", min(4, spare_nodes))
        numbers = random.Random(3)
        prompts = [[numbers.randrange(2) for _ in range(numbers.randint(1, 12))] + [9] for _ in range(80)]
        scheduler = depth_first(num_slots=512, max_running=2)
        orders.append(run_all(scheduler, prompts, 512))
        scheduler.check_idle()
        assert not scheduler.waiting._num_waiting
    assert sorted(orders[0]) == [*range(80)]
    assert orders[0] == orders[1]
