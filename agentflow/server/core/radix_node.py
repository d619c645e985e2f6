"""The nodes of the radix cache's trees, and what a match in them is."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from agentflow.server.core.token_run import TokenRun

TokenArray: TypeAlias = NDArray[np.int32]
SlotArray: TypeAlias = NDArray[np.int32]


class Node:
    """One edge of the tree: ``run`` and the ``slots`` of its tokens, below ``parent``.

    ``num_prompt``: of the tokens, so many at the front were part of a prompt when they were first
    computed; the others were generated.
    ``keeps``: how many live states end here. ``moved_to``: of a removed node, its parent then.
    """

    __slots__ = (
        "children",
        "extra_key",
        "keeps",
        "last_access",
        "locks",
        "moved_to",
        "num_prompt",
        "parent",
        "run",
        "slots",
    )

    def __init__(self, run: TokenRun, slots: SlotArray, parent: Node | None, last_access: int) -> None:
        self.run = run
        self.slots = slots
        self.parent = parent
        self.children: dict[TokenRun, Node] = {}  # by their first token
        self.extra_key: Hashable = None  # of a root
        self.num_prompt = len(slots)
        self.locks = 0
        self.keeps = 0
        self.last_access = last_access
        self.moved_to: Node | None = None

    @property
    def is_evictable(self) -> bool:
        return self.locks == 0 and not self.children and self.parent is not None


class PrefixMatch(NamedTuple):
    """A matched prefix: its last node (to lock or keep), its length in tokens, and how many of them
    were generated rather than prompts when they were first computed."""

    node: Node
    num_tokens: int
    num_output: int = 0
