"""Look-arounds: what a text promises about all that follows, kept beside the place where it stands, and what
the character before must be.

Each look-ahead is a DFA of its own, over the rest of the text; where it forbids, its complement. A place is
then a node of the graph together with the promises under way: for each its DFA and its state. A look-behind
sees one character, and is decided where it is reached: what reads a character knows which it was, as far as
look-behinds ask (its *context*).
"""

from __future__ import annotations

from typing import TypeAlias

from agentflow.engine.grammar.char_graph import END, Arcs, CharGraph, WorkLimit
from agentflow.engine.grammar.char_machine import CharClasses, CharMachine, determinised, trimmed

Promises: TypeAlias = "frozenset[tuple[int, int]]"
"""Numbers of look-aheads' DFAs, each with its state."""

TEXT_START = -1
"""The context where no character was read before."""

_KEPT = -1
"""Instead of a state: whatever follows, the promise is kept."""

_NOTHING_READ = CharMachine([(), ()], [(), ()], [False, False])


class PromisedPlaces:
    """Numbers for places with promises, and what leads on from them."""

    def __init__(self, graph: CharGraph, classes: CharClasses, limit: WorkLimit) -> None:
        self._graph = graph
        self._classes = classes
        self._limit = limit
        self._contexts = _contexts(graph, classes)
        self._looks_back: dict[int, bool] = {}
        self._machines: list[CharMachine] = []
        self._machine_numbers: dict[tuple[int, bool, int], int] = {}
        self._known: dict[int, Arcs] = {}
        self._places: list[tuple[int, Promises]] = [(END, frozenset())]
        self._numbers: dict[tuple[int, Promises], int] = {}

    def machine(self, start: int, context: int) -> CharMachine:
        """The DFA of what begins at a node of the graph, in a context; with only a dead end where nothing
        does."""
        found = determinised(self._enter(start, frozenset(), context), self._arcs, self._limit, self._known)
        return trimmed(found) or _NOTHING_READ

    def _enter(self, node: int, promises: Promises, context: int) -> frozenset[int]:
        """The places of a text that has come to a node: each way there may add promises of its own."""
        graph = self._graph
        places: set[int] = set()
        seen = {(node, promises)}
        waiting = [(node, promises)]
        while waiting:
            at, made = waiting.pop()
            self._limit.spend(4 + len(made))
            if at == END:
                if all(self._machines[number].accepting[state] for number, state in made):
                    places.add(END)
                continue
            if graph.set_of[at] >= 0:
                places.add(self._number(at, made))
                continue
            if at in graph.look_behinds and not self._is_after(*graph.look_behinds[at], context):
                continue
            if at in graph.look_aheads:
                made = made | {(self._promise(*graph.look_aheads[at], context), 1)}
            for branch in graph.branches[at]:
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
        for number, state in promises:
            machine = self._machines[number]
            onward: list[tuple[int, Promises]] = []
            self._limit.spend(3 * len(ways) * (1 + len(machine.masks[state])))
            for mask, made in ways:
                for read, target in zip(machine.masks[state], machine.targets[state], strict=True):
                    if mask & read:
                        onward.append((mask & read, made if target == _KEPT else made | {(number, target)}))
            ways = onward
        after = self._graph.after[node]
        contexts = self._contexts if self._depends_on_context(after) else [self._classes.all]
        return tuple(
            [
                (mask & chars, self._enter(after, made, context))
                for mask, made in ways
                for context, chars in enumerate(contexts)
                if mask & chars
            ]
        )

    def _is_after(self, set_index: int, at_start: bool, context: int) -> bool:
        """Whether a look-behind allows a context: all of its characters are in the set, or none is."""
        if context == TEXT_START:
            return at_start
        return set_index >= 0 and bool(self._classes.sets[set_index] & self._contexts[context])

    def _depends_on_context(self, node: int) -> bool:
        """Whether there is a look-behind before the next character is read."""
        if not self._graph.look_behinds:
            return False
        known = self._looks_back.get(node)
        if known is None:
            graph, seen, waiting = self._graph, {node}, [node]
            while waiting and waiting[-1] not in graph.look_behinds:
                at = waiting.pop()
                self._limit.spend(1)
                if graph.set_of[at] < 0:
                    starts = (graph.look_aheads[at][0],) if at in graph.look_aheads else ()
                    new = [branch for branch in (*graph.branches[at], *starts) if branch not in seen]
                    seen.update(new)
                    waiting.extend(new)
            known = self._looks_back[node] = bool(waiting)
        return known

    def _promise(self, start: int, wanted: bool, context: int) -> int:
        """The number of a look-ahead's DFA, which is built where it is not known yet."""
        key = (start, wanted, context if self._depends_on_context(start) else TEXT_START)
        number = self._machine_numbers.get(key)
        if number is None:
            machine, every = self.machine(start, context), self._classes.all
            number = self._machine_numbers[key] = len(self._machines)
            self._machines.append(_shortened(machine if wanted else _complement(machine, every), every))
        return number


def _contexts(graph: CharGraph, classes: CharClasses) -> list[int]:
    """Sets of characters that no look-behind tells apart."""
    contexts = [classes.all]
    for index in sorted({index for index, _ in graph.look_behinds.values() if index >= 0}):
        chars = classes.sets[index]
        contexts = [part for old in contexts for part in (old & chars, old & ~chars) if part]
    return contexts


def _complement(machine: CharMachine, every: int) -> CharMachine:
    """What accepts all that the DFA does not."""
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
