"""JSON's values as regular expressions: what a schema's leaves become.

Narrower than JSON where readers differ: a string has no lone half of a surrogate pair, an integer fits
64 bits, a number has no exponent.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from agentflow.engine.grammar.regex_tree import EMPTY, CharSet, Choice, Regex, Repeat, Sequence, literal

Whitespace: TypeAlias = Literal["compact", "tight", "free"]
"""Between the parts of a value: ``", "`` and ``": "`` as Python writes it, none at all, or what the model
likes."""

FREE_WHITESPACE_CHARS: Final = 16
"""The most in one place, so that a model cannot go on with it for ever."""

MOST_INTEGERS: Final = 400
"""The widest range of integers that is written as its members."""

MOST_INTEGER: Final = 10**18 - 1
"""18 digits: 64 bits hold it, whoever reads it."""

MOST_NUMBER: Final = 10**15
"""Numbers are below it: their digits before the point are all exact."""

_DIGIT: Final = CharSet(((0x30, 0x39),))
_NONZERO: Final = CharSet(((0x31, 0x39),))
_MINUS: Final = Repeat(literal("-"), 0, 1)
_HEX: Final = CharSet(((0x30, 0x39), (0x41, 0x46), (0x61, 0x66)))
_HEX_BUT_D: Final = CharSet(((0x30, 0x39), (0x41, 0x43), (0x45, 0x46), (0x61, 0x63), (0x65, 0x66)))
_HEX_D: Final = CharSet(((0x44, 0x44), (0x64, 0x64)))
_HEX_89AB: Final = CharSet(((0x38, 0x39), (0x41, 0x42), (0x61, 0x62)))
_HEX_CDEF: Final = CharSet(((0x43, 0x46), (0x63, 0x66)))

_PLAIN_CHAR: Final = CharSet(
    ((0x20, 0x21), (0x23, 0x5B), (0x5D, 0xD7FF), (0xE000, 0x10FFFF))  # no control, no quote, no backslash
)
_ESCAPES: Final = CharSet(tuple([(ord(letter), ord(letter)) for letter in '"/\\bfnrt']))
_HIGH_HALF: Final = Sequence((literal("u"), _HEX_D, _HEX_89AB, _HEX, _HEX))
_LOW_HALF: Final = Sequence((literal("\\u"), _HEX_D, _HEX_CDEF, _HEX, _HEX))
_ESCAPED_UNIT: Final = Choice(
    (
        Sequence((literal("u"), _HEX_BUT_D, _HEX, _HEX, _HEX)),
        Sequence((literal("u"), _HEX_D, CharSet(((0x30, 0x37),)), _HEX, _HEX)),
    )
)
_STRING_CHAR: Final = Choice(
    (
        _PLAIN_CHAR,
        Sequence((literal("\\"), Choice((_ESCAPES, _ESCAPED_UNIT, Sequence((_HIGH_HALF, _LOW_HALF)))))),
    )
)

BOOLEAN: Final[Regex] = Choice((literal("true"), literal("false")))
NULL: Final[Regex] = literal("null")
_FRACTION: Final = Repeat(Sequence((literal("."), Repeat(_DIGIT, 1, 17))), 0, 1)
_SIZE: Final = Sequence((Choice((literal("0"), Sequence((_NONZERO, Repeat(_DIGIT, 0, 14))))), _FRACTION))
_SHARE: Final = Choice(
    (
        Sequence((literal("0"), _FRACTION)),
        Sequence((literal("1"), Repeat(Sequence((literal("."), Repeat(literal("0"), 1, 17))), 0, 1))),
    )
)


def string(least: int = 0, most: int | None = None) -> Regex:
    """A string of so many characters (code points; an escape is one)."""
    return Sequence((literal('"'), Repeat(_STRING_CHAR, least, most), literal('"')))


def integer(least: int = -MOST_INTEGER, most: int = MOST_INTEGER) -> Regex | None:
    """An integer from ``least`` to ``most``, both inclusive; None where the range is too wide to be written
    out, and is none that follows from the sign alone."""
    positive = Sequence((_NONZERO, Repeat(_DIGIT, 0, 17)))
    if most >= MOST_INTEGER and least <= -MOST_INTEGER:
        return Choice((literal("0"), Sequence((_MINUS, positive))))
    if most >= MOST_INTEGER and least in (0, 1):
        return positive if least == 1 else Choice((literal("0"), positive))
    if most - least < MOST_INTEGERS:
        return Choice(tuple([literal(str(value)) for value in range(least, most + 1)]))
    return None


def number(least: float = -MOST_NUMBER, most: float = MOST_NUMBER) -> Regex | None:
    """A number with or without a fraction, and without an exponent; None where the limits are others than
    zero, one and the widest."""
    if most >= MOST_NUMBER and least <= -MOST_NUMBER:
        return Sequence((_MINUS, _SIZE))
    if least == 0 and (most >= MOST_NUMBER or most == 1):
        return _SHARE if most == 1 else _SIZE
    return None


@dataclass(frozen=True, slots=True)
class Layout:
    """Where whitespace stands: around a list's or an object's members, and between them."""

    inside: Regex
    comma: Regex
    colon: Regex

    def enclosed(self, opening: str, members: Regex, closing: str) -> Regex:
        """Members that are there, in their brackets."""
        return Sequence((literal(opening), self.inside, members, self.inside, literal(closing)))

    def empty(self, opening: str, closing: str) -> Regex:
        """The brackets, and nothing in them."""
        return Sequence((literal(opening), self.inside, literal(closing)))

    def listed(self, members: list[Regex]) -> Regex:
        """One after the other, with commas."""
        parts: list[Regex] = []
        for member in members:
            parts += [self.comma, member] if parts else [member]
        return Sequence(tuple(parts))

    def named(self, name: str, value: Regex) -> Regex:
        """A member of an object."""
        return Sequence((literal(json.dumps(name, ensure_ascii=False)), self.colon, value))


def layout(whitespace: Whitespace) -> Layout:
    """A policy's."""
    if whitespace == "free":
        space = CharSet(((0x09, 0x0A), (0x0D, 0x0D), (0x20, 0x20)))
        any_space = Repeat(space, 0, FREE_WHITESPACE_CHARS)
        return Layout(
            any_space,
            Sequence((any_space, literal(","), any_space)),
            Sequence((any_space, literal(":"), any_space)),
        )
    gap = " " if whitespace == "compact" else ""
    return Layout(EMPTY, literal("," + gap), literal(":" + gap))


def exactly(value: object, spaces: Layout) -> Regex | None:
    """The one value that a ``const`` asks for; None where no JSON text stands for it."""
    if isinstance(value, dict):
        members = {str(name): exactly(member, spaces) for name, member in value.items()}
        if not members:
            return spaces.empty("{", "}")
        named = [spaces.named(name, part) for name, part in members.items() if part is not None]
        return spaces.enclosed("{", spaces.listed(named), "}") if len(named) == len(members) else None
    if isinstance(value, list):
        if not value:
            return spaces.empty("[", "]")
        parts = [part for member in value if (part := exactly(member, spaces)) is not None]
        return spaces.enclosed("[", spaces.listed(parts), "]") if len(parts) == len(value) else None
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return literal(json.dumps(value, ensure_ascii=False))
