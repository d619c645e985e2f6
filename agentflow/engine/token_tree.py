"""The tree of the choices of a select: each token once, however many choices begin with it.

The tree hangs below a prefix that all choices share. A token's log-probability comes from the logits
of the token before it, so only *nodes* need to be computed: tokens after which some choice goes on. What
a choice ends with is a *target* only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from agentflow.errors import BadArgument

Numbers: TypeAlias = NDArray[np.int64]

MAX_CHOICE_TOKENS = 65_536
"""A thousand long sentences. The tree is made between two steps, while everybody waits."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenTree:
    """``token_ids``, ``parents``, ``depths`` [N]: the nodes, breadth first; a node's parent is another, or
    -1 for the prefix's last token, after which depth 0 comes.

    ``targets`` [M]: the tokens whose log-probabilities are wanted, by the row whose logits give them. Row 0
    is the prefix's last token and row 1 + n is node n; row r gives ``targets[first_targets[r] :
    first_targets[r + 1]]``, at least one. ``choice_targets``: for each choice the target of each of its
    tokens. ``longest``: tokens of the longest choice.
    """

    token_ids: Numbers
    parents: Numbers
    depths: Numbers
    targets: Numbers
    first_targets: Numbers
    choice_targets: list[list[int]]
    longest: int

    @property
    def num_nodes(self) -> int:
        return len(self.token_ids)

    def paths(self, first: int, end: int) -> Numbers:
        """For the nodes from ``first`` up to ``end`` the nodes above each and itself, from depth 0 on. All
        are as long as the longest: a node repeats itself at the end."""
        current: Numbers = np.arange(first, end)
        depths = self.depths[first:end]
        paths: Numbers = np.empty((end - first, int(depths.max()) + 1), dtype=np.int64)
        for depth in range(paths.shape[1] - 1, -1, -1):
            current = np.where(depths > depth, self.parents[current], current)
            paths[:, depth] = current
        return paths

    def by_choice(self, logprobs: Sequence[float]) -> list[list[float]]:
        """Of each choice the log-probability of each token; ``logprobs``: those of the targets."""
        return [[logprobs[target] for target in targets] for targets in self.choice_targets]


def token_tree(choices: Sequence[Sequence[int]]) -> TokenTree:
    """The tree of ``choices``, which may begin alike, be each other's beginnings, or be equal. BadArgument
    where one has no token, or where they have more than ``MAX_CHOICE_TOKENS`` together."""
    if not choices or not all(choices):
        raise BadArgument("a choice without a single token cannot be scored")
    num_tokens = sum([len(choice) for choice in choices])
    if num_tokens > MAX_CHOICE_TOKENS:
        raise BadArgument(
            f"the choices of a select have {num_tokens} tokens together, and at most {MAX_CHOICE_TOKENS} "
            "can be scored at once: offer fewer or shorter ones"
        )
    growth = _Growth(choices)
    going_on = list(range(len(choices)))
    depth = 0
    while going_on:
        going_on = growth.add_level(going_on, depth)
        depth += 1
    first_targets = np.searchsorted(growth.rows, np.arange(len(growth.token_ids) + 2))
    return TokenTree(
        np.array(growth.token_ids, dtype=np.int64),
        np.array(growth.parents, dtype=np.int64),
        np.array(growth.depths, dtype=np.int64),
        np.array(growth.targets, dtype=np.int64),
        first_targets.astype(np.int64),
        growth.choice_targets,
        depth,
    )


class _Growth:
    """A tree in the making, level by level. ``rows``: of the targets, ascending."""

    def __init__(self, choices: Sequence[Sequence[int]]) -> None:
        self.token_ids: list[int] = []
        self.parents: list[int] = []
        self.depths: list[int] = []
        self.targets: list[int] = []
        self.rows: list[int] = []
        self.choice_targets: list[list[int]] = [[] for _ in choices]
        self._choices = choices
        self._row_of = [0] * len(choices)  # the row after which each choice goes on

    def add_level(self, going_on: list[int], depth: int) -> list[int]:
        """The tokens at ``depth`` of the choices that are so long. Returns those that are longer."""
        edges: dict[tuple[int, int], list[int]] = {}
        for choice in going_on:
            edges.setdefault((self._row_of[choice], self._choices[choice][depth]), []).append(choice)
        longer: list[int] = []
        for row, token in sorted(edges):
            members = edges[row, token]
            for choice in members:
                self.choice_targets[choice].append(len(self.targets))
            self.targets.append(token)
            self.rows.append(row)
            below = [choice for choice in members if len(self._choices[choice]) > depth + 1]
            if below:
                self.token_ids.append(token)
                self.parents.append(row - 1)
                self.depths.append(depth)
                for choice in below:
                    self._row_of[choice] = len(self.token_ids)
                longer += below
        return longer
