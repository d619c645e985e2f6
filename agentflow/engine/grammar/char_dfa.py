"""From the tree of a regular expression to a DFA over characters.

``CharGraph`` is a nondeterministic graph: many paths may read the same text. ``char_classes`` groups
characters that all sets of the expression treat alike, so that a set is an integer with one bit for each
class. ``determinised`` makes the DFA by the subset construction.

``LookAheadStates`` handles look-arounds. Each look-ahead is a separate DFA over the rest of the text; a
negative one is its complement. An NFA state is then a node of the graph together with the pending
look-aheads, each with the state of its DFA. A look-behind reads one character and is decided when it is
reached: the NFA state stores the properties of the last character that look-behinds can distinguish (its
*context*).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from agentflow.engine.grammar.regex import (
    Alternation,
    CharSet,
    Concatenation,
    LookAhead,
    LookBehind,
    Regex,
    Repeat,
    TooLargeForDfa,
)
from agentflow.protocol.grammars.char_ranges import MAX_CODE_POINT, Ranges, without_surrogates

END = 0
"""The node where a text may end."""
NOWHERE = -1
"""Replaces a node from which the end cannot be reached."""

_LOOKS_AHEAD = -2
_LOOKS_BEHIND = -3
"""Replace the index of a set in the keys of nodes."""

MAX_NODES = 50_000
MAX_DEPTH = 250

Arcs: TypeAlias = "tuple[tuple[int, frozenset[int]], ...]"
"""Character classes that may be read, as bits, and the NFA states to which they lead."""


class WorkLimit:
    """Counts the steps of a construction, so that an expression that is too large fails early. It counts
    steps instead of time, so that the same expression always fails at the same step."""

    def __init__(self, max_steps: int) -> None:
        self.left = max_steps

    def spend(self, num_steps: int) -> None:
        """Raises ``TooLargeForDfa`` if fewer steps are left."""
        self.left -= num_steps
        if self.left < 0:
            raise TooLargeForDfa("its DFA takes too many steps to build")


class CharGraph:
    """A nondeterministic graph. A node reads one character of a set and leads to the next node, or branches
    to several nodes. The graph is built from the end of the text to its start; equal nodes are merged, so
    that equal suffixes are shared.

    ``look_aheads``: nodes passed only if a look-ahead holds: its start node, and whether it is positive.
    ``look_behinds``: nodes passed only after a character of a set (its index; -1 for none) or, if the flag is
    set, at the start of the text.
    """

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
        self._loop_of: dict[tuple[int, int], int] = {}
        self._closures: dict[int, frozenset[int]] = {END: frozenset([END])}

    def add(self, regex: Regex, after: int) -> int:
        """Returns the node where the texts of the expression begin if they continue at ``after``. The caller
        keeps the expression alive while the graph grows."""
        if after == NOWHERE:
            return NOWHERE
        if isinstance(regex, CharSet):
            return self._char(regex, after)
        if isinstance(regex, Concatenation):
            for part in reversed(regex.parts):
                after = self.add(part, after)
            return after
        if isinstance(regex, Alternation):
            return self._split([self.add(option, after) for option in regex.options])
        if isinstance(regex, Repeat):
            return self._repeat(regex, after)
        if isinstance(regex, LookAhead):
            return self._look_ahead(regex, after)
        return self._look_behind(regex, after)

    def closure(self, node: int) -> frozenset[int]:
        """Returns the nodes that read a character, and the end, among the nodes reachable from a node without
        reading (its epsilon closure)."""
        known = self._closures.get(node)
        if known is not None:
            return known
        if self.set_of[node] >= 0:
            found = frozenset([node])
        else:
            seen = {node}
            waiting = [node]
            found_nodes: set[int] = set()
            while waiting:
                for branch in self.branches[waiting.pop()]:
                    below = self._closures.get(branch)
                    if below is not None:
                        found_nodes |= below
                        self._limit.spend(len(below))
                    elif self.set_of[branch] >= 0:
                        found_nodes.add(branch)
                    elif branch not in seen:
                        seen.add(branch)
                        waiting.append(branch)
                self._limit.spend(1)
            found = frozenset(found_nodes)
        self._closures[node] = found
        return found

    def _char(self, chars: CharSet, after: int) -> int:
        index = self._index_of_char.get(id(chars))
        if index is None:
            index = self._index_of_char[id(chars)] = self._set_index(chars.ranges)
        return self._node(index, (after,)) if index >= 0 else NOWHERE

    def _set_index(self, ranges: Ranges) -> int:
        """Returns the index of a character set; -1 if it is empty without surrogates, which no text
        contains."""
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
            node = self._loop(repeat.part, after)
        else:
            for _ in range(repeat.most - repeat.least):
                node = self._split([self.add(repeat.part, node), after])
        for _ in range(repeat.least):
            node = self.add(repeat.part, node)
        return node

    def _loop(self, part: Regex, after: int) -> int:
        key = (id(part), after)
        node = self._loop_of.get(key)
        if node is None:
            node = self._node(-1, (-len(self.set_of), after))  # unique: its targets are not known yet
            self._loop_of[key] = node
            body = self.add(part, node)
            self.branches[node] = (after,) if body in (node, NOWHERE) else (body, after)
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
        """Returns a node that reads nothing and leads to the first node of its key under a condition."""
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


def check_graph_size(regex: Regex) -> None:
    """Raises ``TooLargeForDfa`` if the graph would have more than ``MAX_NODES`` nodes or the tree is too
    deep. Checked before any node is made. A subtree that occurs several times counts each time."""
    if _size(regex, {}, 0)[0] > MAX_NODES:
        raise TooLargeForDfa(f"its repeats and choices come to more than {MAX_NODES} characters")


def _size(regex: Regex, known: dict[int, tuple[int, int]], depth: int) -> tuple[int, int]:
    """Returns the number of nodes and the depth of the tree."""
    counted = known.get(id(regex))
    if depth + (counted[1] if counted else 1) > MAX_DEPTH:
        raise TooLargeForDfa(f"it nests deeper than {MAX_DEPTH}")
    if counted is not None:
        return counted
    parts: tuple[Regex, ...] = ()
    times = 1
    if isinstance(regex, Concatenation):
        parts = regex.parts
    elif isinstance(regex, Alternation):
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


_STEPS_PER_STATE = 10


@dataclass(frozen=True, slots=True)
class CharClasses:
    """Classes of characters that all sets of an expression treat alike."""

    sets: list[int]  # the classes of each set, as bits
    ranges: list[list[tuple[int, int]]]  # the characters of each class
    all: int  # the classes that have a character other than surrogates, as bits


@dataclass(slots=True)
class CharDfa:
    """A DFA over characters. State 0 is dead, 1 is the start. A state allows no characters outside its
    masks."""

    masks: list[tuple[int, ...]]  # for each state: disjoint sets of character classes
    targets: list[tuple[int, ...]]  # for each state: the state to which each of its sets leads
    accepting: list[bool]  # for each state: whether the text may end


def char_classes(sets: list[Ranges], limit: WorkLimit) -> CharClasses:
    """Returns the classes that distinguish these sets. The last class has the characters that are in no
    set."""
    changes: dict[int, int] = {0: 0, MAX_CODE_POINT + 1: 0}
    for index, ranges in enumerate(sets):
        bit = 1 << index
        for first, last in ranges:
            changes[first] = changes.get(first, 0) ^ bit
            changes[last + 1] = changes.get(last + 1, 0) ^ bit
    limit.spend(len(changes) * (1 + len(sets) // 64))
    class_of: dict[int, int] = {}
    class_ranges: list[list[tuple[int, int]]] = []
    points = sorted(changes)
    members = 0
    for at in range(len(points) - 1):
        members ^= changes[points[at]]
        index = class_of.setdefault(members, len(class_of))
        if index == len(class_ranges):
            class_ranges.append([])
        class_ranges[index].append((points[at], points[at + 1] - 1))
    masks = [0] * len(sets)
    for members, index in class_of.items():
        limit.spend(members.bit_count() * (1 + len(class_of) // 64))
        while members:
            low = members & -members
            masks[low.bit_length() - 1] |= 1 << index
            members ^= low
    written = 0  # the classes that have more than surrogates, which UTF-8 text cannot contain
    for index, own_ranges in enumerate(class_ranges):
        if any(first < 0xD800 or last > 0xDFFF for first, last in own_ranges):
            written |= 1 << index
    return CharClasses(masks, class_ranges, written)


def determinised(
    start: frozenset[int], arcs: Callable[[int], Arcs], limit: WorkLimit, known: dict[int, Arcs]
) -> CharDfa:
    """Returns the DFA whose states are sets of NFA states (subset construction).

    Args:
        start: the NFA states where the text begins.
        arcs: returns the arcs that leave an NFA state.
        limit: of steps.
        known: a cache of ``arcs``.
    """
    dfa = CharDfa([(), ()], [(), ()], [False, END in start])
    numbers: dict[frozenset[int], int] = {start: 1}
    waiting = [start]
    for members in waiting:  # the loop appends to it
        pairs: list[tuple[int, frozenset[int]]] = []
        for member in members:
            if member == END:
                continue
            leads = known.get(member)
            if leads is None:
                leads = known[member] = arcs(member)
            pairs.extend(leads)
        if len(pairs) > 1:
            pairs = _disjoint(pairs, limit)
        limit.spend(_STEPS_PER_STATE + len(members) + len(pairs))
        row = []
        for _, reached in pairs:
            number = numbers.get(reached)
            if number is None:
                number = numbers[reached] = len(numbers) + 1
                waiting.append(reached)
                dfa.accepting.append(END in reached)
                dfa.masks.append(())
                dfa.targets.append(())
            row.append(number)
        state = numbers[members]
        dfa.masks[state] = tuple([mask for mask, _ in pairs])
        dfa.targets[state] = tuple(row)
    return dfa


def trimmed(dfa: CharDfa) -> CharDfa | None:
    """Removes the states from which the end cannot be reached. Returns None if the start is one of them."""
    sources: list[list[int]] = [[] for _ in dfa.targets]
    for state, targets in enumerate(dfa.targets):
        for target in targets:
            sources[target].append(state)
    alive = [state for state, accepts in enumerate(dfa.accepting) if accepts]
    seen = set(alive)
    for state in alive:  # the loop appends to it
        new = [source for source in sources[state] if source not in seen]
        seen.update(new)
        alive.extend(dict.fromkeys(new))
    if 1 not in seen:
        return None
    kept = sorted(seen)
    numbers = {state: index + 1 for index, state in enumerate(kept)}
    masks: list[tuple[int, ...]] = [()]
    targets_of: list[tuple[int, ...]] = [()]
    for state in kept:
        pairs = list(zip(dfa.masks[state], dfa.targets[state], strict=True))
        masks.append(tuple([mask for mask, target in pairs if target in seen]))
        targets_of.append(tuple([numbers[target] for _, target in pairs if target in seen]))
    return CharDfa(masks, targets_of, [False, *[dfa.accepting[state] for state in kept]])


def _disjoint(pairs: list[tuple[int, frozenset[int]]], limit: WorkLimit) -> list[tuple[int, frozenset[int]]]:
    """Returns equivalent arcs, sorted: no character is in two of them, and each set of NFA states has one
    arc."""
    by_mask: dict[int, list[frozenset[int]]] = {}
    for mask, reached in pairs:
        by_mask.setdefault(mask, []).append(reached)
        limit.left -= len(reached)
    limit.spend(len(pairs))
    parts: list[tuple[int, frozenset[int]]] = []
    covered = 0
    for mask, several in by_mask.items():
        reached = several[0] if len(several) == 1 else several[0].union(*several[1:])
        if mask & covered:
            split: list[tuple[int, frozenset[int]]] = []
            rest = mask
            for part, part_reached in parts:
                common = part & mask
                if common:
                    split.append((common, part_reached | reached))
                    limit.left -= len(part_reached) + len(reached)
                    part ^= common
                    rest &= ~common
                if part:
                    split.append((part, part_reached))
            parts = split
            limit.spend(len(parts))
            mask = rest
        if mask:
            parts.append((mask, reached))
            covered |= mask
    masks: dict[frozenset[int], int] = {}
    for mask, reached in parts:
        masks[reached] = masks.get(reached, 0) | mask
    return sorted([(mask, reached) for reached, mask in masks.items()], key=_mask)


def _mask(pair: tuple[int, frozenset[int]]) -> int:
    return pair[0]


Promises: TypeAlias = "frozenset[tuple[int, int]]"
"""The indices of pending look-aheads' DFAs, each with its state."""

TEXT_START = -1
"""The context at the start of the text."""

_KEPT = -1
"""Replaces a state in which the look-ahead holds for every continuation."""

_NOTHING_READ = CharDfa([(), ()], [(), ()], [False, False])


class LookAheadStates:
    """Numbers NFA states that have pending look-aheads, and finds their arcs."""

    def __init__(self, graph: CharGraph, classes: CharClasses, limit: WorkLimit) -> None:
        self._graph = graph
        self._classes = classes
        self._limit = limit
        self._contexts = _contexts(graph, classes)
        self._looks_back: dict[int, bool] = {}
        self._dfas: list[CharDfa] = []
        self._dfa_numbers: dict[tuple[int, bool, int], int] = {}
        self._known: dict[int, Arcs] = {}
        self._states: list[tuple[int, Promises]] = [(END, frozenset())]
        self._numbers: dict[tuple[int, Promises], int] = {}

    def dfa(self, start: int, context: int) -> CharDfa:
        """Returns the DFA of the texts that begin at a node in a context. It accepts nothing if there are
        none."""
        found = determinised(self._enter(start, frozenset(), context), self._arcs, self._limit, self._known)
        return trimmed(found) or _NOTHING_READ

    def _enter(self, node: int, promises: Promises, context: int) -> frozenset[int]:
        """Returns the NFA states reachable from a node without reading; each path may add look-aheads."""
        graph = self._graph
        found: set[int] = set()
        seen = {(node, promises)}
        waiting = [(node, promises)]
        while waiting:
            at, made = waiting.pop()
            self._limit.spend(4 + len(made))
            if at == END:
                if all(self._dfas[number].accepting[state] for number, state in made):
                    found.add(END)
                continue
            if graph.set_of[at] >= 0:
                found.add(self._number(at, made))
                continue
            if at in graph.look_behinds and not self._is_after(*graph.look_behinds[at], context):
                continue
            if at in graph.look_aheads:
                made = made | {(self._promise(*graph.look_aheads[at], context), 1)}
            for branch in graph.branches[at]:
                if (branch, made) not in seen:
                    seen.add((branch, made))
                    waiting.append((branch, made))
        return frozenset(found)

    def _number(self, node: int, promises: Promises) -> int:
        number = self._numbers.setdefault((node, promises), len(self._states))
        if number == len(self._states):
            self._states.append((node, promises))
        return number

    def _arcs(self, nfa_state: int) -> Arcs:
        node, promises = self._states[nfa_state]
        ways: list[tuple[int, Promises]] = [(self._classes.sets[self._graph.set_of[node]], frozenset())]
        for number, state in promises:
            dfa = self._dfas[number]
            onward: list[tuple[int, Promises]] = []
            self._limit.spend(3 * len(ways) * (1 + len(dfa.masks[state])))
            for mask, made in ways:
                for read, target in zip(dfa.masks[state], dfa.targets[state], strict=True):
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
        """Whether a look-behind holds in a context, whose characters are all in the set or all outside it."""
        if context == TEXT_START:
            return at_start
        return set_index >= 0 and bool(self._classes.sets[set_index] & self._contexts[context])

    def _depends_on_context(self, node: int) -> bool:
        """Whether a look-behind may be evaluated before the next character is read."""
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
        """Returns the index of a look-ahead's DFA, and builds it if it is new."""
        key = (start, wanted, context if self._depends_on_context(start) else TEXT_START)
        number = self._dfa_numbers.get(key)
        if number is None:
            dfa, every = self.dfa(start, context), self._classes.all
            number = self._dfa_numbers[key] = len(self._dfas)
            self._dfas.append(_shortened(dfa if wanted else _complement(dfa, every), every))
        return number


def _contexts(graph: CharGraph, classes: CharClasses) -> list[int]:
    """Returns sets of characters that no look-behind distinguishes."""
    contexts = [classes.all]
    for index in sorted({index for index, _ in graph.look_behinds.values() if index >= 0}):
        chars = classes.sets[index]
        contexts = [part for old in contexts for part in (old & chars, old & ~chars) if part]
    return contexts


def _complement(dfa: CharDfa, every: int) -> CharDfa:
    """Returns the DFA that accepts every text that ``dfa`` does not."""
    masks: list[tuple[int, ...]] = [()]
    targets: list[tuple[int, ...]] = [()]
    for row, row_targets in zip(dfa.masks[1:], dfa.targets[1:], strict=True):
        rest = every & ~sum(row)  # they are disjoint
        masks.append((*row, rest) if rest else row)
        targets.append((*row_targets, _KEPT) if rest else row_targets)
    return CharDfa(masks, targets, [not accepts for accepts in dfa.accepting])


def _shortened(dfa: CharDfa, every: int) -> CharDfa:
    """Marks the states from which a look-ahead holds, or fails, for every continuation."""
    end_of: dict[int, int] = {_KEPT: _KEPT}
    for state in range(1, len(dfa.masks)):
        goes_on = [target for target in dfa.targets[state] if target != state]
        if not goes_on and dfa.accepting[state] and sum(dfa.masks[state]) == every:
            end_of[state] = _KEPT
        elif not goes_on and not dfa.accepting[state]:
            end_of[state] = 0
    masks: list[tuple[int, ...]] = []
    targets: list[tuple[int, ...]] = []
    for row, row_targets in zip(dfa.masks, dfa.targets, strict=True):
        pairs = [(mask, end_of.get(target, target)) for mask, target in zip(row, row_targets, strict=True)]
        masks.append(tuple([mask for mask, target in pairs if target]))
        targets.append(tuple([target for _, target in pairs if target]))
    return CharDfa(masks, targets, dfa.accepting)
