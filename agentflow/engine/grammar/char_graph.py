"""The graph through which the texts of a regular expression walk, character by character. Many ways may
lead through it for one text; ``char_machine`` makes one of them.
"""

from __future__ import annotations

from typing import TypeAlias

from agentflow.engine.grammar.regex_tree import (
    CharSet,
    Choice,
    LookAhead,
    LookBehind,
    Ranges,
    Regex,
    Repeat,
    Sequence,
    TooMuchForFsm,
    without_surrogates,
)

END = 0
"""The node where a text may end."""
NOWHERE = -1
"""Instead of a node: the end cannot be reached."""

_LOOKS_AHEAD = -2
_LOOKS_BEHIND = -3
"""In the keys of nodes, instead of the index of a set."""

MAX_NODES = 50_000
MAX_DEPTH = 250

Arcs: TypeAlias = "tuple[tuple[int, frozenset[int]], ...]"
"""What may be read, as bits of character classes, and the places where that leads to."""


class WorkLimit:
    """Counts the steps of a construction, so that what is too large is known early. Not a time: the same
    expression always fails at the same step."""

    def __init__(self, max_steps: int) -> None:
        self.left = max_steps

    def spend(self, num_steps: int) -> None:
        """``TooMuchForFsm`` where that is more than is left."""
        self.left -= num_steps
        if self.left < 0:
            raise TooMuchForFsm("its machine takes too long to build")


class CharGraph:
    """A node reads one character of a set and goes on, or goes on to several nodes at once. Built from the
    end of the text to its start, and equal nodes are one, so that equal ends of texts are shared.

    ``look_aheads``: nodes that go on only where what follows is as said: where that begins, and whether it
    is wanted. ``look_behinds``: those that go on only after a character of a set (-1: of none), by its
    index, or, where so said, at the start of the text."""

    def __init__(self, limit: WorkLimit) -> None:
        self.sets: list[Ranges] = []
        self.set_of: list[int] = [-1]
        self.after: list[int] = [NOWHERE]
        self.branches: list[tuple[int, ...]] = [()]
        self.look_aheads: dict[int, tuple[int, bool]] = {}
        self.look_behinds: dict[int, tuple[int, bool]] = {}
        self._limit = limit
        self._index_of_set: dict[Ranges, int] = {}
        self._index_of_char: dict[int, int] = {}
        self._node_of: dict[tuple[int, ...], int] = {}
        self._places: dict[int, frozenset[int]] = {END: frozenset([END])}

    def add(self, regex: Regex, after: int) -> int:
        """The node where the expression's texts begin that go on at ``after``. The expression is kept by
        the caller as long as the graph grows."""
        if after == NOWHERE:
            return NOWHERE
        if isinstance(regex, CharSet):
            return self._char(regex, after)
        if isinstance(regex, Sequence):
            for part in reversed(regex.parts):
                after = self.add(part, after)
            return after
        if isinstance(regex, Choice):
            return self._split([self.add(option, after) for option in regex.options])
        if isinstance(regex, Repeat):
            return self._repeat(regex, after)
        if isinstance(regex, LookAhead):
            return self._look_ahead(regex, after)
        return self._look_behind(regex, after)

    def places(self, node: int) -> frozenset[int]:
        """Where a text stands that has come to a node: at nodes that read a character, or at the end."""
        known = self._places.get(node)
        if known is not None:
            return known
        if self.set_of[node] >= 0:
            found = frozenset([node])
        else:
            seen = {node}
            waiting = [node]
            places: set[int] = set()
            while waiting:
                for branch in self.branches[waiting.pop()]:
                    below = self._places.get(branch)
                    if below is not None:
                        places |= below
                        self._limit.spend(len(below))
                    elif self.set_of[branch] >= 0:
                        places.add(branch)
                    elif branch not in seen:
                        seen.add(branch)
                        waiting.append(branch)
                self._limit.spend(1)
            found = frozenset(places)
        self._places[node] = found
        return found

    def _char(self, chars: CharSet, after: int) -> int:
        index = self._index_of_char.get(id(chars))
        if index is None:
            index = self._index_of_char[id(chars)] = self._set_index(chars.ranges)
        return self._node(index, (after,)) if index >= 0 else NOWHERE

    def _set_index(self, ranges: Ranges) -> int:
        """Of a set of characters; -1 for one without any. Surrogates are no characters of a text."""
        self._limit.spend(len(ranges))
        kept = without_surrogates(ranges)
        if not kept:
            return -1
        index = self._index_of_set.setdefault(kept, len(self.sets))
        if index == len(self.sets):
            self.sets.append(kept)
        return index

    def _split(self, nodes: list[int]) -> int:
        kept = tuple(dict.fromkeys([node for node in nodes if node != NOWHERE]))
        if len(kept) < 2:
            return kept[0] if kept else NOWHERE
        return self._node(-1, kept)

    def _repeat(self, repeat: Repeat, after: int) -> int:
        node = after
        if repeat.most is None:
            node = self._node(-1, (-len(self.set_of), after))  # like no other: what it leads to is not known
            body = self.add(repeat.part, node)
            self.branches[node] = (after,) if body in (node, NOWHERE) else (body, after)
        else:
            for _ in range(repeat.most - repeat.least):
                node = self._split([self.add(repeat.part, node), after])
        for _ in range(repeat.least):
            node = self.add(repeat.part, node)
        return node

    def _look_ahead(self, look_ahead: LookAhead, after: int) -> int:
        start = self.add(look_ahead.rest, END)
        if start == NOWHERE:
            return NOWHERE if look_ahead.wanted else after
        node = self._gate(_LOOKS_AHEAD, (after, start, look_ahead.wanted))
        self.look_aheads[node] = (start, look_ahead.wanted)
        return node

    def _look_behind(self, look_behind: LookBehind, after: int) -> int:
        index = self._set_index(look_behind.ranges)
        if index < 0 and not look_behind.at_start:
            return NOWHERE
        node = self._gate(_LOOKS_BEHIND, (after, index, look_behind.at_start))
        self.look_behinds[node] = (index, look_behind.at_start)
        return node

    def _gate(self, kind: int, key: tuple[int, ...]) -> int:
        """A node that reads nothing, and goes on to the key's first one under a condition."""
        node = self._node(kind, key)
        self.set_of[node], self.branches[node] = -1, key[:1]
        return node

    def _node(self, set_index: int, follows: tuple[int, ...]) -> int:
        key = (set_index, *follows)
        node = self._node_of.get(key)
        if node is None:
            node = self._node_of[key] = len(self.set_of)
            self.set_of.append(set_index)
            self.after.append(follows[0])
            self.branches.append(follows)
        return node


def check_size(regex: Regex) -> None:
    """``TooMuchForFsm`` where the graph would have more than ``MAX_NODES`` nodes, or the tree is too deep:
    told before any node is made. A subtree that stands in several places is counted in each."""
    if _size(regex, {}, 0)[0] > MAX_NODES:
        raise TooMuchForFsm(f"its repeats and choices come to more than {MAX_NODES} characters")


def _size(regex: Regex, known: dict[int, tuple[int, int]], depth: int) -> tuple[int, int]:
    """The number of nodes, and of the tree's levels."""
    counted = known.get(id(regex))
    if depth + (counted[1] if counted else 1) > MAX_DEPTH:
        raise TooMuchForFsm(f"it nests deeper than {MAX_DEPTH}")
    if counted is not None:
        return counted
    parts: tuple[Regex, ...] = ()
    times = 1
    if isinstance(regex, Sequence):
        parts = regex.parts
    elif isinstance(regex, Choice):
        parts = regex.options
    elif isinstance(regex, Repeat):
        parts = (regex.part,)
        times = regex.least + 1 if regex.most is None else regex.most
    elif isinstance(regex, LookAhead):
        parts = (regex.rest,)
    sizes = [_size(part, known, depth + 1) for part in parts]
    counted = (
        1 + times * (1 + sum([size for size, _ in sizes])),
        1 + max([levels for _, levels in sizes], default=0),
    )
    known[id(regex)] = counted
    return counted
