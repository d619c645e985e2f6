"""The rules of a grammar as trees."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, TypeAlias

from agentflow.protocol.grammars.char_ranges import Ranges


@dataclass(frozen=True, slots=True)
class Fixed:
    """Exactly this text, which is not empty."""

    text: str


@dataclass(frozen=True, slots=True)
class Chars:
    """One character of these ranges."""

    ranges: Ranges


@dataclass(frozen=True, slots=True)
class Series:
    """One part after the other. Without parts, the empty text."""

    parts: tuple[GrammarPart, ...]


@dataclass(frozen=True, slots=True)
class OneOf:
    """One of the options."""

    options: tuple[GrammarPart, ...]


@dataclass(frozen=True, slots=True)
class Repeated:
    """The part ``least`` to ``most`` times, at least once in all; ``most`` None: unlimited."""

    part: GrammarPart
    least: int
    most: int | None


@dataclass(frozen=True, slots=True)
class Named:
    """The texts of a rule."""

    name: str


GrammarPart: TypeAlias = "Fixed | Chars | Series | OneOf | Repeated | Named"

EMPTY: Final = Series(())


def characters(text: str) -> Series:
    """Returns a literal as a series of its characters.

    >>> characters("ab")
    Series(parts=(Chars(ranges=((97, 97),)), Chars(ranges=((98, 98),))))
    """
    return Series(tuple([Chars(((ord(char), ord(char)),)) for char in text]))


def parts_in(part: GrammarPart) -> Iterator[GrammarPart]:
    """Yields the part and all parts inside it, the ones that have several places once for each."""
    waiting = [part]
    while waiting:
        part = waiting.pop()
        yield part
        match part:
            case Series(parts) | OneOf(parts):
                waiting += parts
            case Repeated(inner):
                waiting.append(inner)


def names_in(part: GrammarPart) -> Iterator[str]:
    """Yields the names of the rules that a part contains."""
    return (one.name for one in parts_in(part) if isinstance(one, Named))
