"""The allowance against a plain account of every moment."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from agentflow.protocol.bounds.cpu_allowance import CpuAllowance

TICK_S = 1 / 64  # a power of two: sums of these are exact


@given(
    burst=st.integers(1, 20),
    steps=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 15)), max_size=30),
)
def test_the_allowance_equals_a_plain_account(burst: int, steps: list[tuple[int, int]]) -> None:
    """Share 1/4: of each four ticks that pass, one comes back."""
    now = [0.0]
    allowance = CpuAllowance(burst * TICK_S, 0.25, lambda: now[0])
    quarters = 4 * burst  # of a tick
    for passed, spent in steps:
        for _ in range(passed):
            now[0] += TICK_S
            quarters = min(4 * burst, quarters + 1)
        assert allowance.left_s == quarters * TICK_S / 4
        wait_s = allowance.wait_s(TICK_S)
        assert wait_s == max(0, 4 - quarters) * TICK_S
        allowance.spend(spent * TICK_S)
        quarters -= 4 * spent


def test_a_wait_for_more_than_a_burst_is_one_for_a_burst() -> None:
    now = [0.0]
    allowance = CpuAllowance(1.0, 0.5, lambda: now[0])
    allowance.spend(1.0)
    assert allowance.wait_s(5.0) == 2.0
