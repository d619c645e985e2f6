"""Times of servers that are learned from their requests."""

from __future__ import annotations

import math
import random

import pytest

from agentflow.cluster.routing.learned_cost import LearnedCost, mean_cost


def observed(fixed_s: float, unit_s: float, output_s: float, count: int, noise: float = 0.0) -> LearnedCost:
    """A server with these costs, after requests of many lengths, streamed and whole."""
    rng, learned = random.Random(1), LearnedCost()
    for _ in range(count):
        units, output = rng.randrange(10, 5000), rng.choice([0, rng.randrange(1, 400)])
        exact_s = fixed_s + unit_s * units + output_s * output
        learned.observe(units, output, exact_s * math.exp(rng.gauss(0, noise)))
    return learned


@pytest.mark.parametrize("costs", [(0.05, 2e-5, 8e-3), (0.2, 3e-3, 0.1), (1.0, 1e-4, 1e-3)])
def test_the_costs_of_a_server_are_found(costs: tuple[float, float, float]) -> None:
    learned = observed(*costs, count=300)
    assert learned.costs() == pytest.approx(costs, rel=0.05)


def test_noise_and_a_server_that_becomes_slower() -> None:
    learned = observed(0.05, 2e-5, 8e-3, count=200, noise=0.2)
    assert learned.costs().output_s == pytest.approx(8e-3, rel=0.3)
    for units in range(100, 4100, 20):
        learned.observe(units, units // 20, 0.05 + 2e-4 * units + 0.08 * (units // 20))
    _, unit_s, output_s = learned.costs()
    expected_s = 1000 * 2e-4 + 50 * 0.08
    assert 1000 * unit_s + 50 * output_s == pytest.approx(expected_s, rel=0.2)


@pytest.mark.parametrize("times", [[(0, 0, 0.0)] * 50, [(1000, 10, 1e-9)] * 50, [(4, 0, 1e6)] * 50])
def test_no_request_makes_a_cost_that_is_not_positive_and_finite(times: list[tuple[int, int, float]]) -> None:
    learned = LearnedCost()
    for one in times:
        learned.observe(*one)
        assert all(0 < part < math.inf for part in learned.costs())


def test_an_engine_like_the_mean_of_the_servers() -> None:
    slow, fast = observed(0.1, 4e-5, 0.03, count=300), observed(0.1, 2e-5, 0.01, count=300)
    cost = mean_cost([slow.costs(), fast.costs()])
    assert (cost.row_s, cost.base_s) == pytest.approx((3e-5, 0.02), rel=0.05)
