"""Random programs, run by a map and by a map in batches."""

from __future__ import annotations

import anyio
import pytest
from hypothesis import HealthCheck, given, settings
from support.apis.batch_programs import Step, program_of, programs
from support.apis.batch_sessions import VENDORS, session_on
from support.examples import times

from agentflow.backends.apis.batches import collector


def depth_after(steps: list[Step], own: int, last: int) -> tuple[int, int, int]:
    """The stages at which a state and the last value are complete after these steps, and the latest stage of
    all.

    Args:
        steps: The steps.
        own: The stage after which the state continues.
        last: The stage after which the last value is known.
    """
    most = own
    for step in steps:
        if step.kind == "wire":
            own = max(own, last)
        elif step.kind == "fork":
            ends = [depth_after(inner, own, last) for inner in step.branches]
            own = max([own, *[end[1] for end in ends]])
            most = max([most, *[end[2] for end in ends]])
        else:
            own = last = own + 1
        most = max(most, own)
    return own, last, most


@pytest.mark.parametrize("name", VENDORS)
@settings(max_examples=times(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=programs)
def test_batches_give_the_values_of_a_map(
    name: str, steps: list[Step], monkeypatch: pytest.MonkeyPatch
) -> None:
    for constant in ("FIRST_POLL_S", "MAX_POLL_S", "FIRST_LOOK_S"):
        monkeypatch.setattr(collector, constant, 0.001)

    program = program_of(steps)

    async def main() -> None:
        vendor = VENDORS[name]()
        async with session_on(vendor) as place:
            expected = await place.flow.map(program, ["a", "b"])
            assert vendor.num_batches == 0
            assert await place.flow.map(program, ["a", "b"], batch=True) == expected
        if name == "anthropic":  # for OpenAI, a select may be two requests
            assert vendor.num_batches == depth_after(steps, 0, 0)[2]

    anyio.run(main)
