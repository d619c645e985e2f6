"""The choices of a select as a tree, in which shared prefixes of choices occur once.

The tree hangs below the prompt. The log-probability of a token comes from the logits of the token before it,
so only *nodes* are computed: tokens that some choice continues after. The last token of a choice is only a
*target*.

The choices of several questions about one prompt form one tree, too. Each question is a *head*: nodes that
its choices continue after and that are not targets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from agentflow.errors import BadArgument

Numbers = NDArray[np.int64]

MAX_CHOICE_TOKENS = 65_536
"""About a thousand long sentences. The tree is built between two steps, while all requests wait."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenTree:
    """``token_ids``, ``parents``, ``depths`` [N]: the nodes, breadth first. A parent is another node, or -1
    for the prompt's last token, which depth 0 follows.

    ``targets`` [M]: the tokens whose log-probabilities are wanted, by the row whose logits give them. Row 0
    is the prompt's last token and row 1 + n is node n; row r gives ``targets[first_targets[r] :
    first_targets[r + 1]]``. ``scored_rows`` [R]: the rows with targets, ascending; the other rows belong to
    heads. ``choice_targets``: for each choice the targets of its tokens. ``longest``: length of the longest
    choice with its head, in tokens.
    """

    token_ids: Numbers
    parents: Numbers
    depths: Numbers
    targets: Numbers
    first_targets: Numbers
    scored_rows: Numbers
    choice_targets: list[list[int]]
    longest: int

    @property
    def num_nodes(self) -> int:
        return len(self.token_ids)

    def paths(self, first: int, end: int) -> Numbers:
        """For each node from ``first`` up to ``end``, the nodes above it from depth 0 on and itself [N,
        depth]. Shorter paths repeat the node at the end."""
        current: Numbers = np.arange(first, end)
        depths = self.depths[first:end]
        paths: Numbers = np.empty((end - first, int(depths.max()) + 1), dtype=np.int64)
        for depth in range(paths.shape[1] - 1, -1, -1):
            current = np.where(depths > depth, self.parents[current], current)
            paths[:, depth] = current
        return paths

    def scored_between(self, first: int, end: int) -> Numbers:
        """The rows from ``first`` up to ``end`` that have targets."""
        low, high = np.searchsorted(self.scored_rows, (first, end))
        return self.scored_rows[low:high]

    def by_choice(self, logprobs: Sequence[float]) -> list[list[float]]:
        """The log-probabilities of each choice's tokens, from the log-probabilities of the targets."""
        return [[logprobs[target] for target in targets] for targets in self.choice_targets]


def token_tree(
    choices: Sequence[Sequence[int]], heads: Sequence[Sequence[int]] = (), head_of: Sequence[int] = ()
) -> TokenTree:
    """Builds the tree of ``choices``, which may share prefixes, be prefixes of each other, or be equal.

    Args:
        choices: The tokens of each choice.
        heads: The tokens of each head, perhaps none; without heads, all choices follow the prompt.
        head_of: The head of each choice, if there are heads.

    Raises:
        BadArgument: As in ``check_choice_tokens``.
    """
    check_choice_tokens(choices, heads)
    growth = _Growth(choices)
    if heads:
        growth.add_heads(heads, head_of)
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
        np.flatnonzero(np.diff(first_targets)).astype(np.int64),
        growth.choice_targets,
        growth.longest,
    )


def check_choice_tokens(choices: Sequence[Sequence[int]], heads: Sequence[Sequence[int]] = ()) -> None:
    """``BadArgument`` if a choice has no token, or if choices and heads have more than ``MAX_CHOICE_TOKENS``
    in total."""
    if not choices or not all(choices):
        raise BadArgument("a choice needs at least one token to be scored", param="choices")
    num_tokens = sum(map(len, choices)) + sum(map(len, heads))
    if num_tokens > MAX_CHOICE_TOKENS:
        raise BadArgument(
            f"the choices of a select have {num_tokens} tokens in total; the limit is {MAX_CHOICE_TOKENS}: "
            "offer fewer or shorter ones",
            param="choices",
        )


class _Growth:
    """Builds a tree level by level. ``rows``: the row of each target, ascending."""

    def __init__(self, choices: Sequence[Sequence[int]]) -> None:
        self.token_ids: list[int] = []
        self.parents: list[int] = []
        self.depths: list[int] = []
        self.targets: list[int] = []
        self.rows: list[int] = []
        self.choice_targets: list[list[int]] = [[] for _ in choices]
        self.longest = 0
        self._choices = choices
        self._row_of = [0] * len(choices)  # the row that each choice continues after

    def add_heads(self, heads: Sequence[Sequence[int]], head_of: Sequence[int]) -> None:
        """Adds the tokens of all heads, before any level of choices."""
        row_of = [0] * len(heads)
        for depth in range(max(map(len, heads))):
            nodes: dict[tuple[int, int], list[int]] = {}
            for number, head in enumerate(heads):
                if len(head) > depth:
                    nodes.setdefault((row_of[number], head[depth]), []).append(number)
            for (row, token), members in nodes.items():
                self._add_node(row, token, members, row_of)
        self._row_of = [row_of[number] for number in head_of]

    def _add_node(self, row: int, token: int, members: Sequence[int], row_of: list[int]) -> None:
        """Adds a node after ``row``, which the ``members`` continue after."""
        self.token_ids.append(token)
        self.parents.append(row - 1)
        self.depths.append(0 if row == 0 else self.depths[row - 1] + 1)
        for member in members:
            row_of[member] = len(self.token_ids)

    def add_level(self, going_on: list[int], depth: int) -> list[int]:
        """Adds the tokens at ``depth`` of the choices ``going_on``. Returns the choices that are longer."""
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
            self.longest = max(self.longest, 1 if row == 0 else self.depths[row - 1] + 2)
            below = [choice for choice in members if len(self._choices[choice]) > depth + 1]
            if below:
                self._add_node(row, token, below, self._row_of)
                longer += below
        return longer
