"""Programs made of random steps, so that two ways to run one can be compared."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

import agentflow as af
from agentflow.language.states.state import state_node

WORDS = ["one", "two ", " three", "\n", "4"]


@dataclass
class Step:
    """One thing that a program does. ``kind``: see ``run_steps``."""

    kind: str
    word: str = ""
    number: int = 0
    inner: list[list[Step]] = field(default_factory=list)


plain_steps = st.builds(
    Step,
    st.sampled_from(["text", "argument", "wire", "strip", "gen", "sampled", "select", "set", "turn", "read"]),
    st.sampled_from(WORDS),
    st.integers(0, 7),
)
kinds_of_fork = st.sampled_from(["fork", "group"])
steps = st.recursive(
    st.lists(plain_steps, max_size=6),
    lambda inner: st.lists(
        plain_steps
        | st.builds(Step, st.sampled_from(["fork", "group"]), inner=st.lists(inner, min_size=1, max_size=3)),
        max_size=6,
    ),
    max_leaves=12,
)


def answer(prompt: str) -> str:
    """The script's answer, which depends on the whole prompt."""
    return f" {hashlib.sha256(prompt.encode()).hexdigest()[:6]} "


async def run_steps(s: af.State, todo: list[Step], argument: Any, known: list[Any]) -> None:
    """Does the steps on ``s``. ``known``: variables that may be wired, of any state of the run."""
    for step in todo:
        name = f"v{step.number}"
        match step.kind:
            case "text":
                s += step.word
            case "argument":
                s += f"<{argument}>{step.word}"
            case "wire" if known:
                s += step.word + known[step.number % len(known)]
            case "strip" if known:
                s += f"{known[step.number % len(known)].strip()}"
            case "gen":
                s += in_turn(s, af.gen(name, max_tokens=4))
            case "sampled":
                s += in_turn(s, af.gen(name, temperature=1.0, stop="f"))
            case "select":
                s += in_turn(s, af.gen(name))
            case "set":
                s.set(name, step.word + (known[-1] if known else ""))
            case "turn":
                s += af.user(step.word, af.gen(name))
            case "read":
                known.append(s.text())
            case "fork" | "group":
                await run_fork(s, step, argument, known)
        if name in s and step.kind in ("gen", "sampled", "select", "set", "turn"):
            known.append(s[name])


def in_turn(s: af.State, generation: Any) -> Any:
    """The generation: in a turn, if text stands after the turns of the state, or an assistant's turn."""
    position = state_node(s).transcript.position
    is_outside = position.last_role is not None and (position.has_text or position.last_role == "assistant")
    return af.assistant(generation) if is_outside else generation


async def run_fork(s: af.State, step: Step, argument: Any, known: list[Any]) -> None:
    """A fork whose branches do further steps, and see the variables made before them."""
    branches = s.fork(len(step.inner))
    if step.kind == "group":
        async with branches:
            for branch, inner in zip(branches, step.inner, strict=True):
                await run_steps(branch, inner, argument, known)
    else:
        for branch, inner in zip(branches, step.inner, strict=True):
            await run_steps(branch, inner, argument, known)


@af.program
async def whole(s: af.State, argument: str, todo: list[Step]) -> list[str]:
    """All values that came up, in order."""
    known: list[Any] = []
    await run_steps(s, todo, argument, known)
    return [await variable for variable in known]
