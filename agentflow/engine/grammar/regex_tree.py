"""A regular expression as a tree: what a pattern or a JSON schema is turned into before a machine is built.

A tree says what whole texts match, and nothing else: no groups, no order of preference. Anchors and word
boundaries are look-arounds in it.

>>> answer = Choice((literal("yes"), literal("no")))
>>> digits = Repeat(CharSet(((0x30, 0x39),)), 1, 3)
>>> record = Sequence((answer, literal(", "), digits))  # "yes, 42"
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

Ranges: TypeAlias = "tuple[tuple[int, int], ...]"
"""Code points, each pair from its first to its last one inclusive: sorted, disjoint, not touching."""

MAX_CODE_POINT = 0x10FFFF


@dataclass(frozen=True, slots=True)
class CharSet:
    """One character of these ranges. ``ValueError`` where the ranges are not sorted and disjoint:
    ``merged`` makes them so."""

    ranges: Ranges

    def __post_init__(self) -> None:
        after = -1
        for first, last in self.ranges:
            if not after < first <= last <= MAX_CODE_POINT:
                raise ValueError(f"the ranges of a CharSet are sorted and disjoint: {first:#x} to {last:#x}")
            after = last


@dataclass(frozen=True, slots=True)
class Sequence:
    """One part after the other; without parts, the empty text."""

    parts: tuple[Regex, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """Any one of the options; without options, no text at all."""

    options: tuple[Regex, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """The part ``least`` to ``most`` times, both inclusive; ``most`` None: without limit."""

    part: Regex
    least: int
    most: int | None


@dataclass(frozen=True, slots=True)
class LookAhead:
    """Nothing by itself, but all the text that follows, to its very end, matches ``rest``; or, where it is
    not ``wanted``, does not."""

    rest: Regex
    wanted: bool


@dataclass(frozen=True, slots=True)
class LookBehind:
    """Nothing by itself, but the character before is one of these ranges, or, where ``at_start``, there is
    none: the text begins here."""

    ranges: Ranges
    at_start: bool


Regex: TypeAlias = "CharSet | Sequence | Choice | Repeat | LookAhead | LookBehind"

EMPTY = Sequence(())
"""The empty text."""

NOTHING = Choice(())
"""No text, not even the empty one."""


class TooMuchForFsm(Exception):
    """The message says what: a machine cannot be built of it, or would be too large. Nobody's fault yet:
    what is raised here goes to llguidance."""


ANY_CHAR = CharSet(((0, MAX_CODE_POINT),))


def literal(text: str) -> Regex:
    """Exactly this text."""
    if len(text) == 1:
        return one_char(ord(text))
    return Sequence(tuple([one_char(ord(char)) for char in text]))


@lru_cache(maxsize=1024)
def one_char(code_point: int) -> CharSet:
    """Exactly this character."""
    return CharSet(((code_point, code_point),))


def merged(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Any ranges as a ``CharSet`` takes them: in order, with those that overlap or touch made one.

    >>> merged([(0x61, 0x66), (0x30, 0x39), (0x67, 0x7A)])
    ((48, 57), (97, 122))
    """
    kept: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if kept and first <= kept[-1][1] + 1:
            kept[-1] = (kept[-1][0], max(last, kept[-1][1]))
        else:
            kept.append((first, last))
    return tuple(kept)


def all_but(ranges: Ranges) -> Ranges:
    """The code points that are not in the ranges.

    >>> all_but(((0, 0x1F), (0x22, 0x22), (0x5C, 0x5C)))
    ((32, 33), (35, 91), (93, 1114111))
    """
    edges = [-1, *itertools.chain.from_iterable(ranges), MAX_CODE_POINT + 1]
    gaps = [(edges[at] + 1, edges[at + 1] - 1) for at in range(0, len(edges), 2)]
    return tuple([(first, last) for first, last in gaps if first <= last])


def without_surrogates(ranges: Ranges) -> Ranges:
    """The characters among the code points: no text in UTF-8 holds half of a pair.

    >>> without_surrogates(((0xD000, 0xE000),))
    ((53248, 55295), (57344, 57344))
    """
    kept: list[tuple[int, int]] = []
    for first, last in ranges:
        below, above = (first, min(last, 0xD7FF)), (max(first, 0xE000), last)
        kept += [part for part in (below, above) if part[0] <= part[1]]
    return tuple(kept)
