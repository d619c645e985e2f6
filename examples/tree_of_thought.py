"""Tree of thought: at each level every kept thought is continued in several ways, and the best are kept.

After Yao et al., 2023. The tree of thoughts is the tree of states: a continuation is a fork, so it shares
all that came before it. Each thought is judged in a copy of its own, which keeps the judgment out of the
story; the score is how much likelier the model finds "good" than "bad". What is not kept is cancelled.

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
BEGINNING = "One morning, a young fox found a small golden key in the snow."


@dataclass
class Thought:
    """One sentence. ``state`` holds the story up to it."""

    state: af.State
    text: str
    score: float
    is_kept: bool = False

    @property
    def path(self) -> tuple[int, ...]:
        """Its place in the tree of states."""
        return self.state.path


@af.program
async def search(
    s: af.State, task: str, beginning: str, *, depth: int = 3, breadth: int = 3, num_kept: int = 2
) -> list[Thought]:
    """All thoughts, level by level; of the last level the best one alone is kept: the end of the story."""
    s += af.user(task)
    s.begin("assistant")
    s += beginning
    found: list[Thought] = []
    frontier = [s]
    for level in range(depth):
        s.hint(forks=breadth)
        branches = [branch for state in frontier for branch in state.fork(breadth)]
        judges = [propose(branch) for branch in branches]  # the whole level is under way before any await
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
    """Appends a next sentence to a story, and returns the copy that judges it."""
    branch += af.gen("thought", max_tokens=28, stop=["\n", "."], temperature=0.9, top_p=0.95)
    branch += "."
    judge = branch.copy()
    judge.end()
    judge += af.user("Is the last sentence of this story good or bad?")
    judge += af.assistant(af.select("verdict", ["good", "bad"]))
    return judge


async def scored(branch: af.State, judge: af.State) -> Thought:
    """The thought at the end of ``branch``, with its judge's score; an empty one is the worst."""
    await judge["verdict"]
    chances, text = judge["verdict"].choices, await branch["thought"].strip()
    return Thought(branch, text, chances["good"] - chances["bad"] if text else -math.inf)


def drawn(thoughts: list[Thought], title: str) -> Tree:
    """The tree of thoughts; what was kept is in bold."""
    root = Tree(title)
    nodes: dict[tuple[int, ...], Tree] = {(): root}
    for thought in sorted(thoughts, key=lambda thought: thought.path):
        style = "bold" if thought.is_kept else "dim"
        path = ".".join(map(str, thought.path))
        label = f"[{style}]{escape(thought.text)}. [cyan]{path}  {thought.score:+.2f}"
        nodes[thought.path] = nodes[thought.path[:-1]].add(label)
    return root


async def main(flow: af.Session, console: Console) -> None:
    """Shows the tree, and the story that it ends in."""
    thoughts = await flow.run(search, TASK, BEGINNING)
    console.print(drawn(thoughts, BEGINNING))
    end = next(thought for thought in reversed(thoughts) if thought.is_kept)
    lines = [thought for thought in thoughts if thought.path == end.path[: len(thought.path)]]
    story = " ".join([BEGINNING, *(f"{thought.text}." for thought in lines)])
    console.print(f"\n{escape(story)}")


if __name__ == "__main__":
    sys.exit(run_example(main, example_parser(__doc__).parse_args()))
