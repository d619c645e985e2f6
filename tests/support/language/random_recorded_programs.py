"""Random programs for the frontend: branches that run side by side, and a backend that takes its time.

``play`` runs one and gives the values that every branch has read, by the branch's path, except for branches
that are cancelled: how far these get is a matter of timing.
"""

from __future__ import annotations

import random
import zlib
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any

import anyio
import anyio.lowlevel
from hypothesis import strategies as st

import agentflow as af
from agentflow.backends.local import interpreted
from agentflow.backends.scripted_generator import ScriptedContext, ScriptedGenerator
from agentflow.protocol.backend import Connection, Deliver, Lost
from agentflow.runtime.generator import Generated

CHOICES = ["yes", "no"]
ASIDE = "an aside "
"""Begins branches that will be cancelled: nothing fails there, for whether it would before that is chance."""


class Clumsy:
    """Lets the event loop turn a random number of times."""

    def __init__(self, seed: int, at_most: int = 8) -> None:
        self._random = random.Random(seed)
        self._at_most = at_most

    async def __call__(self) -> None:
        for _ in range(self._random.randint(0, self._at_most)):
            await anyio.lowlevel.checkpoint()


def answer(prompt: str) -> str | Exception:
    """Follows from the prompt alone. Some prompts fail."""
    number = zlib.crc32(prompt.encode())
    if prompt.endswith("?"):
        return CHOICES[number % 2]
    if number % 13 == 0 and ASIDE not in prompt:
        return af.errors.EngineFailed(f"failure {number}")
    return f"answer {number % 97} to that"


def _answer_all(prompt: str) -> str | Exception:
    return answer(prompt + ("" if prompt.endswith("?") else ASIDE))


class ClumsyGenerator(ScriptedGenerator):
    """Answers late, by a different number of turns each time."""

    def __init__(self, seed: int, *, fails: bool) -> None:
        super().__init__(answer if fails else _answer_all)
        self._pause = Clumsy(seed)

    async def generate(self, context: ScriptedContext, *rest: Any, **options: Any) -> Generated:
        await self._pause()
        return await super().generate(context, *rest, **options)


class ClumsyBackend:
    """The scripted backend with answers that come late."""

    def __init__(self, seed: int, *, fails: bool = True) -> None:
        self._seed = seed
        self._fails = fails

    def connect(self, deliver: Deliver, lost: Lost) -> AbstractAsyncContextManager[Connection]:
        return interpreted(ClumsyGenerator(self._seed, fails=self._fails), deliver)


@dataclass
class Branch:
    """The steps of one state in order: ``(kind, number)``, or a fork."""

    steps: list[tuple[str, int] | Fork] = field(default_factory=list)


@dataclass
class Fork:
    """``kind``: a task group, one whose branches are joined and read when they are sealed, plain branches
    next to the parent, or such that it cancels again."""

    kind: str
    branches: list[Branch]


KINDS = ["text", "user", "gen", "gen", "select", "wire", "await", "await state", "stats"]


def branches(depth: int = 2) -> st.SearchStrategy[Branch]:
    """Branches with forks of forks."""
    step = st.tuples(st.sampled_from(KINDS), st.integers(0, 5))
    if depth > 0:
        kinds = st.sampled_from(["group", "group", "joined", "plain", "plain", "cancelled"])
        inner = st.lists(branches(depth - 1), min_size=1, max_size=3)
        step = st.one_of(step, step, step, st.builds(Fork, kinds, inner))
    return st.builds(Branch, st.lists(step, max_size=7))


Outcomes = dict[tuple[int, ...], list[str]]


class _Player:
    def __init__(self, flow: af.Session, pause: Clumsy) -> None:
        self.flow = flow
        self.pause = pause
        self.outcomes: Outcomes = {}
        self.group: anyio.abc.TaskGroup
        # States that the failure of another may end. Whether one that waits there fails before or
        # after it got to where it waited for is chance: they do not wait.
        self.coupled: set[tuple[int, ...]] = set()

    async def play(self, s: af.State, branch: Branch) -> None:
        seen = self.outcomes[s.path] = []
        try:
            for step in branch.steps:
                await self.pause()
                if isinstance(step, Fork):
                    await self._fork(s, step)
                else:
                    await self._do(s, *step, seen)
        except af.errors.ReplayDiffers:
            raise
        except af.AgentflowError as error:
            seen.append(repr(error))

    async def _do(self, s: af.State, kind: str, number: int, seen: list[str]) -> None:
        names = sorted(name for name in ("x", "y") if name in s)
        match kind:
            case "text":
                s += f"text {number} "
            case "user":
                s += af.user(f"question {number}", *(s[name] for name in names[: number % 2]))
            case "gen":
                s += af.gen("xy"[number % 2], max_tokens=20, temperature=number / 10)
            case "select":
                s += "really?" + af.select("y", CHOICES)
            case "wire" if names:
                s += f"said {s[names[number % len(names)]]} "
            case "await" if names:
                seen.append(await s[names[number % len(names)]])
            case "await state" if s.path not in self.coupled:
                s += "and "  # with nothing to wait for, it is chance whether a failure is known already
                await s
            case "stats":
                seen.append((await self.flow.stats()).model)

    async def _fork(self, s: af.State, fork: Fork) -> None:
        if fork.kind == "cancelled":
            s += ASIDE
        states = s.fork(len(fork.branches))
        pairs = list(zip(states, fork.branches, strict=True))
        if fork.kind in ("group", "joined"):
            self.coupled.add(s.path)
        if s.path in self.coupled:
            self.coupled |= {state.path for state in states}
        if fork.kind in ("group", "joined"):
            async with states, anyio.create_task_group() as group:
                for state, branch in pairs:
                    group.start_soon(self.play, state, branch)
            if fork.kind == "joined":
                s.join(states, separator=" and ")
                s += states[-1].text()
                return
            for state in states:
                if "x" in state:
                    s += state["x"]
        elif fork.kind == "plain":
            for state, branch in pairs:
                self.group.start_soon(self.play, state, branch)
        else:
            aside = _Player(self.flow, self.pause)
            aside.coupled = self.coupled
            async with anyio.create_task_group() as aside.group:
                for state, branch in pairs:
                    aside.group.start_soon(aside.play, state, branch)
                await self.pause()
                for state in states:
                    state.cancel()


async def play(flow: af.Session, branch: Branch, pause: Clumsy) -> list[object]:
    """Runs the program; the values that its branches read, and whether it failed (by which of many failures
    depends on which branch was forked first)."""
    player = _Player(flow, pause)

    async def program(s: af.State) -> None:
        async with anyio.create_task_group() as player.group:
            await player.play(s, branch)

    try:
        await flow.run(program)
    except af.errors.ReplayDiffers:
        raise
    except af.AgentflowError:
        return [player.outcomes, "failed"]
    return [player.outcomes]
