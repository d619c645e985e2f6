"""Tree of thought: each level continues every kept thought in several ways and keeps the best.

After Yao et al., 2023. The tree of thoughts is the tree of states: a continuation is a fork, so it shares its
whole prefix. Each thought is judged in a copy of its state, which keeps the judgment out of the story. The
score is how much likelier the model finds "good" than "bad". The other branches are cancelled.

    python examples/tree_of_thought.py [--url ws://127.0.0.1:8410]
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass

from example_session import example_parser, run_example
from rich.console import Console
from rich.markup import escape
from rich.tree import Tree

import agentflow as af

TASK = "Write a short story for children about a fox who finds a lost key."
UNKNOWN = 100  # the least score of a word that an API wrote, without probabilities
BEGINNING = "One morning, a young fox found a small golden key in the snow."


@dataclass
class Thought:
    """One sentence. ``state``: the story that ends with it."""

    state: af.State
    text: str
    score: float
    is_kept: bool = False

    @property
    def path(self) -> tuple[int, ...]:
        """The path of its state in the tree of states."""
        return self.state.path


@af.program
async def search(
    s: af.State, task: str, beginning: str, *, depth: int = 3, breadth: int = 3, num_kept: int = 2
) -> list[Thought]:
    """Returns all thoughts, level by level. Of the last level only the best one is kept, which ends the
    story."""
    s += af.user(task)
    async with s.assistant():  # each branch ends the turn for itself
        s += beginning
        return await grow(s, depth, breadth, num_kept)


async def grow(s: af.State, depth: int, breadth: int, num_kept: int) -> list[Thought]:
    """Returns the thoughts that continue the open turn of ``s``."""
    found: list[Thought] = []
    frontier = [s]
    for level in range(depth):
        s.hint(forks=breadth)
        branches = [branch for state in frontier for branch in state.fork(breadth)]
        judges = [propose(branch) for branch in branches]  # the whole level runs before the first await
        level_thoughts = [await scored(branch, judge) for branch, judge in zip(branches, judges, strict=True)]
        level_thoughts.sort(key=lambda thought: -thought.score)
        is_last = level == depth - 1
        for thought in level_thoughts[: 1 if is_last else num_kept]:
            thought.is_kept = True
        frontier = [thought.state for thought in level_thoughts if thought.is_kept]
        for thought in level_thoughts:
            if not thought.is_kept:
                thought.state.cancel()
        found += level_thoughts
    return found


def propose(branch: af.State) -> af.State:
    """Appends a sentence to a story and returns the copy that judges it."""
    branch += af.gen("thought", max_tokens=28, stop=["\n", "."], temperature=0.9, top_p=0.95)
    branch += "."
    judge = branch.copy()
    judge.end()
    judge += af.user("Is the last sentence of this story good or bad?")
    judge += af.assistant(af.select("verdict", ["good", "bad"]))
    return judge


async def scored(branch: af.State, judge: af.State) -> Thought:
    """Returns the thought at the end of ``branch`` with its score; an empty thought gets the lowest."""
    await judge["verdict"]
    chances, text = judge["verdict"].choices, await branch["thought"].strip()
    return Thought(branch, text, chances["good"] - chances["bad"] if text else -math.inf)


def draw(thoughts: list[Thought], title: str) -> Tree:
    """Draws the tree of thoughts, with the kept ones in bold."""
    root = Tree(title)
    nodes: dict[tuple[int, ...], Tree] = {(): root}
    for thought in sorted(thoughts, key=lambda thought: thought.path):
        style = "bold" if thought.is_kept else "dim"
        path = ".".join(map(str, thought.path))
        is_written = abs(thought.score) >= UNKNOWN
        score = ("good" if thought.score > 0 else "bad") if is_written else f"{thought.score:+.2f}"
        label = f"[{style}]{escape(thought.text)}. [cyan]{path}  {score}"
        nodes[thought.path] = nodes[thought.path[:-1]].add(label)
    return root


async def main(flow: af.Session, console: Console) -> None:
    """Prints the tree and the story."""
    thoughts = await flow.run(search, TASK, BEGINNING)
    console.print(draw(thoughts, BEGINNING))
    end = next(thought for thought in reversed(thoughts) if thought.is_kept)
    lines = [thought for thought in thoughts if thought.path == end.path[: len(thought.path)]]
    story = " ".join([BEGINNING, *(f"{thought.text}." for thought in lines)])
    console.print(f"\n{escape(story)}")


if __name__ == "__main__":
    sys.exit(run_example(main, example_parser(__doc__).parse_args()))
