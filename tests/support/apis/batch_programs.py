"""Random programs for maps in batches."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

import agentflow as af


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


def program_of(steps: list[Step]) -> Any:
    """A program that does the steps, and returns the last value."""

    @af.program
    async def program(s: af.State, question: str) -> Any:
        s += af.user(question)
        last = await run_steps(s, steps, question)
        return await last if not isinstance(last, str) else last

    return program
