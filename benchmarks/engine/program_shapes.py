"""The programs of the ablation: few-shot questions, trees of thought, and conversations, in made-up words."""

from __future__ import annotations

import random
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import agentflow as af

# Each is about one token.
_WORDS = [
    *("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school"),
    *("state", "family", "student", "group", "country", "problem", "hand", "part", "place", "case", "week"),
    *("company", "system", "program", "question", "work", "government", "number", "night", "point", "home"),
    *("water", "room", "mother", "area", "money", "story", "fact", "month", "lot", "right", "study", "book"),
]


def words(count: int, seed: str) -> str:
    """Returns this many words, about one token each; the same for the same seed."""
    chosen = random.Random(seed)
    return " ".join(chosen.choice(_WORDS) for _ in range(count))


@dataclass(frozen=True)
class Shape:
    """A workload."""

    name: str
    num_programs: int
    # Called with (state, number, is_parallel), for each number below ``num_programs``.
    program: Callable[..., Coroutine[Any, Any, object]]


@af.program
async def few_shot(s: af.State, number: int, is_parallel: bool) -> str:
    """One of six tasks, its examples, and an individual question."""
    task = number * 7 % 6
    s += f"{words(400, f'examples {task}')}\nQuestion: {words(24, f'question {number}')}\nAnswer:"
    answer = af.gen("answer", max_tokens=8, ignore_eos=True)
    s += answer
    return await s[answer]


@af.program
async def tree_of_thought(s: af.State, number: int, is_parallel: bool) -> None:
    """Three thoughts on a problem, three more on each of them, and so on."""
    s += f"Problem {number}: {words(200, f'problem {number}')}\n"

    async def expand(state: af.State, depth: int) -> None:
        if not depth:
            return
        branches = state.fork(3)
        for i, branch in enumerate(branches):
            branch += f"Thought {i}: "
            branch += af.gen("thought", max_tokens=12, ignore_eos=True)
            if not is_parallel:
                await branch
        for branch in branches:
            await expand(branch, depth - 1)
        for branch in branches:
            await branch

    await expand(s, 2)


@af.program
async def chat(s: af.State, number: int, is_parallel: bool) -> None:
    """Three turns under a system message that all conversations share."""
    s += words(150, "system")
    for turn in range(3):
        s += f"\nUser: {words(40, f'{number} {turn}')}\nAssistant:"
        s += af.gen(f"reply {turn}", max_tokens=8, ignore_eos=True)
        await s


@af.program
async def unshared(s: af.State, number: int, is_parallel: bool) -> str:
    """A prompt that shares nothing."""
    s += f"{number} {words(300, f'unshared {number}')}"
    answer = af.gen("answer", max_tokens=16, ignore_eos=True)
    s += answer
    return await s[answer]


SHAPES = [
    Shape("few-shot", 36, few_shot),
    Shape("tree-of-thought", 4, tree_of_thought),
    Shape("chat", 24, chat),
]
UNSHARED = Shape("unshared", 24, unshared)
