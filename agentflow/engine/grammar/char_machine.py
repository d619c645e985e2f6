"""A deterministic machine over characters, made of a graph in which many ways may lead through a text.

Characters that all sets of an expression treat alike are one class, and a set of characters is a whole
number with a bit for each of its classes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from agentflow.engine.grammar.char_graph import END, Arcs, WorkLimit
from agentflow.engine.grammar.regex_tree import MAX_CODE_POINT, Ranges, without_surrogates

_STEPS_PER_STATE = 10


@dataclass(frozen=True, slots=True)
class CharClasses:
    """``sets``: each set's classes, as bits. ``ranges``: each class's characters. ``all``: every class that
    has some: one may hold nothing but surrogates."""

    sets: list[int]
    ranges: list[list[tuple[int, int]]]
    all: int


@dataclass(slots=True)
class CharMachine:
    """State 0 is dead, 1 is the start. ``masks``: for each state, disjoint sets of characters, and at the
    same place in ``targets`` the state that each leads to. All other characters are not allowed there."""

    masks: list[tuple[int, ...]]
    targets: list[tuple[int, ...]]
    accepting: list[bool]


def char_classes(sets: list[Ranges], limit: WorkLimit) -> CharClasses:
    """The classes of characters that these sets need. A last class holds those that are in none of them."""
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
    written = [index for index, ranges in enumerate(class_ranges) if without_surrogates(tuple(ranges))]
    return CharClasses(masks, class_ranges, sum([1 << index for index in written]))


def determinised(
    start: frozenset[int], arcs: Callable[[int], Arcs], limit: WorkLimit, known: dict[int, Arcs]
) -> CharMachine:
    """The machine whose states are the sets of places where a text may stand. ``arcs``: what leads on from
    a place; ``known``: those that were asked for before."""
    machine = CharMachine([(), ()], [(), ()], [False, END in start])
    numbers: dict[frozenset[int], int] = {start: 1}
    waiting = [start]
    for places in waiting:  # grows as it is read
        pairs: list[tuple[int, frozenset[int]]] = []
        for place in places:
            if place == END:
                continue
            leads = known.get(place)
            if leads is None:
                leads = known[place] = arcs(place)
            pairs.extend(leads)
        if len(pairs) > 1:
            pairs = _disjoint(pairs, limit)
        limit.spend(_STEPS_PER_STATE + len(places) + len(pairs))
        row = []
        for _, reached in pairs:
            number = numbers.get(reached)
            if number is None:
                number = numbers[reached] = len(numbers) + 1
                waiting.append(reached)
                machine.accepting.append(END in reached)
                machine.masks.append(())
                machine.targets.append(())
            row.append(number)
        state = numbers[places]
        machine.masks[state] = tuple([mask for mask, _ in pairs])
        machine.targets[state] = tuple(row)
    return machine


def trimmed(machine: CharMachine) -> CharMachine | None:
    """Without the states from which the end cannot be reached; None where the start is one of them."""
    sources: list[list[int]] = [[] for _ in machine.targets]
    for state, targets in enumerate(machine.targets):
        for target in targets:
            sources[target].append(state)
    alive = [state for state, accepts in enumerate(machine.accepting) if accepts]
    seen = set(alive)
    for state in alive:  # grows as it is read
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
        pairs = list(zip(machine.masks[state], machine.targets[state], strict=True))
        masks.append(tuple([mask for mask, target in pairs if target in seen]))
        targets_of.append(tuple([numbers[target] for _, target in pairs if target in seen]))
    return CharMachine(masks, targets_of, [False, *[machine.accepting[state] for state in kept]])


def _disjoint(pairs: list[tuple[int, frozenset[int]]], limit: WorkLimit) -> list[tuple[int, frozenset[int]]]:
    """The same arcs with no character in two of them, and one arc for each set of places, sorted."""
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
    return sorted([(mask, reached) for reached, mask in masks.items()], key=_mask_of)


def _mask_of(pair: tuple[int, frozenset[int]]) -> int:
    return pair[0]
