"""Random programs, run by a map and by a map in batches."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import anyio
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.apis.batch_sessions import VENDORS, session_on

import agentflow as af
from agentflow.backends.apis.batches import collector


@dataclass
class Step:
    """One thing that a program does: ``gen`` or ``select`` in a turn, ``wire`` a text with the last value, or
    ``fork`` into branches, whose last values are joined."""

    kind: str
    branches: list[list[Step]] = field(default_factory=list)


plain = st.builds(Step, st.sampled_from(["gen", "wire", "select", "typed"]))
programs = st.recursive(
    st.lists(plain, max_size=3),
    lambda inner: st.lists(
        plain | st.builds(Step, st.just("fork"), st.lists(inner, min_size=1, max_size=3)), max_size=3
    ),
    max_leaves=8,
)


async def run_steps(s: af.State, steps: list[Step], last: Any) -> Any:
    """Does the steps; returns the last value, or the text, which may be wired."""
    for number, step in enumerate(steps):
        match step.kind:
            case "gen":
                s += af.user(f"Step {number}.") + af.assistant(af.gen(f"v{number}", max_tokens=8))
                last = s[f"v{number}"]
            case "typed":
                s += af.user("How many?") + af.assistant(af.gen(f"v{number}", schema=int))
                last = s[f"v{number}"]
            case "select":
                s += af.user("Which?") + af.assistant(af.select(f"v{number}", ["red", "green", "blue"]))
                last = s[f"v{number}"]
            case "wire":
                s += af.user("Read: " + last)
            case "fork":
                branches = s.fork(len(step.branches))
                pairs = zip(branches, step.branches, strict=True)
                found = [await run_steps(branch, inner, last) for branch, inner in pairs]
                for value in found:
                    s += af.user("Joined: " + value)
    return last


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
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=programs)
def test_batches_give_the_values_of_a_map(
    name: str, steps: list[Step], monkeypatch: pytest.MonkeyPatch
) -> None:
    for constant in ("FIRST_POLL_S", "MAX_POLL_S", "FIRST_LOOK_S"):
        monkeypatch.setattr(collector, constant, 0.001)

    @af.program
    async def program(s: af.State, question: str) -> Any:
        s += af.user(question)
        last = await run_steps(s, steps, question)
        return await last if not isinstance(last, str) else last

    async def main() -> None:
        vendor = VENDORS[name]()
        async with session_on(vendor) as place:
            expected = await place.flow.map(program, ["a", "b"])
            assert vendor.num_batches == 0
            assert await place.flow.map(program, ["a", "b"], batch=True) == expected
        if name == "anthropic":  # for OpenAI, a select may be two requests
            assert vendor.num_batches == depth_after(steps, 0, 0)[2]

    anyio.run(main)
