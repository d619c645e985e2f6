"""Look-aheads: what a text promises about all that follows, kept beside the place where it stands.

Each look-ahead is a machine of its own, over the rest of the text; where it forbids, its complement. A
place is then a node of the graph together with the promises under way: for each its machine and its state.
"""

from __future__ import annotations

from typing import TypeAlias

from agentflow.server.core.char_graph import END, Arcs, CharGraph, WorkLimit
from agentflow.server.core.char_machine import CharClasses, CharMachine, determinised, trimmed

Promises: TypeAlias = "frozenset[tuple[int, int]]"
"""Nodes of look-aheads, each with the state of its machine."""

_KEPT = -1
"""Instead of a state: whatever follows, the promise is kept."""

_NOTHING_READ = CharMachine([(), ()], [(), ()], [False, False])


class PromisedPlaces:
    """Numbers for places with promises, and what leads on from them."""

    def __init__(self, graph: CharGraph, classes: CharClasses, limit: WorkLimit) -> None:
        self._graph = graph
        self._classes = classes
        self._limit = limit
        self._machines: dict[int, CharMachine] = {}
        self._known: dict[int, Arcs] = {}
        self._places: list[tuple[int, Promises]] = [(END, frozenset())]
        self._numbers: dict[tuple[int, Promises], int] = {}

    def machine(self, start: int) -> CharMachine:
        """The machine of what begins at a node of the graph; with only a dead end where nothing does."""
        found = determinised(self._enter(start, frozenset()), self._arcs, self._limit, self._known)
        return trimmed(found) or _NOTHING_READ

    def _enter(self, node: int, promises: Promises) -> frozenset[int]:
        """The places of a text that has come to a node: each way there may add promises of its own."""
        places: set[int] = set()
        seen = {(node, promises)}
        waiting = [(node, promises)]
        while waiting:
            at, made = waiting.pop()
            self._limit.spend(4 + len(made))
            if at == END:
                if all(self._machines[maker].accepting[state] for maker, state in made):
                    places.add(END)
                continue
            if self._graph.set_of[at] >= 0:
                places.add(self._number(at, made))
                continue
            if at in self._graph.look_aheads:
                self._prepare(at)
                made = made | {(at, 1)}
            for branch in self._graph.branches[at]:
                if (branch, made) not in seen:
                    seen.add((branch, made))
                    waiting.append((branch, made))
        return frozenset(places)

    def _number(self, node: int, promises: Promises) -> int:
        number = self._numbers.setdefault((node, promises), len(self._places))
        if number == len(self._places):
            self._places.append((node, promises))
        return number

    def _arcs(self, place: int) -> Arcs:
        node, promises = self._places[place]
        ways: list[tuple[int, Promises]] = [(self._classes.sets[self._graph.set_of[node]], frozenset())]
        for maker, state in promises:
            machine = self._machines[maker]
            onward: list[tuple[int, Promises]] = []
            self._limit.spend(3 * len(ways) * (1 + len(machine.masks[state])))
            for mask, made in ways:
                for read, target in zip(machine.masks[state], machine.targets[state], strict=True):
                    if mask & read:
                        onward.append((mask & read, made if target == _KEPT else made | {(maker, target)}))
            ways = onward
        return tuple([(mask, self._enter(self._graph.after[node], made)) for mask, made in ways])

    def _prepare(self, node: int) -> None:
        """Builds the machine of a look-ahead."""
        if node not in self._machines:
            start, wanted = self._graph.look_aheads[node]
            machine = self.machine(start)
            self._machines[node] = _shortened(
                machine if wanted else _complement(machine, self._classes.all), self._classes.all
            )


def _complement(machine: CharMachine, every: int) -> CharMachine:
    """What accepts all that the machine does not."""
    masks: list[tuple[int, ...]] = [()]
    targets: list[tuple[int, ...]] = [()]
    for row, row_targets in zip(machine.masks[1:], machine.targets[1:], strict=True):
        rest = every & ~sum(row)  # they are disjoint
        masks.append((*row, rest) if rest else row)
        targets.append((*row_targets, _KEPT) if rest else row_targets)
    return CharMachine(masks, targets, [not accepts for accepts in machine.accepting])


def _shortened(machine: CharMachine, every: int) -> CharMachine:
    """With the states known where a promise is kept, or broken, whatever follows."""
    end_of: dict[int, int] = {_KEPT: _KEPT}
    for state in range(1, len(machine.masks)):
        goes_on = [target for target in machine.targets[state] if target != state]
        if not goes_on and machine.accepting[state] and sum(machine.masks[state]) == every:
            end_of[state] = _KEPT
        elif not goes_on and not machine.accepting[state]:
            end_of[state] = 0
    masks: list[tuple[int, ...]] = []
    targets: list[tuple[int, ...]] = []
    for row, row_targets in zip(machine.masks, machine.targets, strict=True):
        pairs = [(mask, end_of.get(target, target)) for mask, target in zip(row, row_targets, strict=True)]
        masks.append(tuple([mask for mask, target in pairs if target]))
        targets.append(tuple([target for _, target in pairs if target]))
    return CharMachine(masks, targets, machine.accepting)
