"""JSON strings, numbers and literals as regular expressions.

Values are narrower than JSON where parsers differ: strings have no lone surrogates, integers fit 64 bits, and
numbers have no exponent. Numbers have bounded length, so that a model cannot generate digits forever. Ranges
are exact: every text of ``number(0.5, 9)`` is parsed as a value in that range.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import Decimal
from typing import Final

from agentflow.engine.grammar.regex import (
    EMPTY,
    Alternation,
    CharSet,
    Concatenation,
    Regex,
    Repeat,
    literal,
    parse_regex,
)
from agentflow.protocol.schema_walk import PATTERN_OF_FORMAT

MOST_INTEGER: Final = 10**18 - 1
"""18 digits: fits 64 bits."""

MOST_NUMBER: Final = 10**15
"""Numbers are smaller, so that all digits before the point are exact."""

MOST_FRACTION: Final = 17
"""Digits after the point."""

EXACT_DIGITS: Final = 15
"""Different decimals with this many digits are different 64-bit floats."""


def characters(first: str, last: str) -> CharSet:
    """Returns the set of the characters from ``first`` to ``last``, both inclusive."""
    return CharSet(((ord(first), ord(last)),))


def make_union(options: list[Regex]) -> Regex:
    """Returns the union of one or more options."""
    return options[0] if len(options) == 1 else Alternation(tuple(options))


_DIGIT: Final = characters("0", "9")
_NONZERO: Final = characters("1", "9")
_HEX: Final = CharSet(((0x30, 0x39), (0x41, 0x46), (0x61, 0x66)))
_HEX_BUT_D: Final = CharSet(((0x30, 0x39), (0x41, 0x43), (0x45, 0x46), (0x61, 0x63), (0x65, 0x66)))
_HEX_D: Final = CharSet(((0x44, 0x44), (0x64, 0x64)))
_HEX_89AB: Final = CharSet(((0x38, 0x39), (0x41, 0x42), (0x61, 0x62)))
_HEX_CDEF: Final = CharSet(((0x43, 0x46), (0x63, 0x66)))

_PLAIN_CHAR: Final = CharSet(
    ((0x20, 0x21), (0x23, 0x5B), (0x5D, 0xD7FF), (0xE000, 0x10FFFF))  # no control, no quote, no backslash
)
_ESCAPES: Final = CharSet(tuple([(ord(letter), ord(letter)) for letter in '"/\\bfnrt']))
_HIGH_HALF: Final = Concatenation((literal("u"), _HEX_D, _HEX_89AB, _HEX, _HEX))
_LOW_HALF: Final = Concatenation((literal("\\u"), _HEX_D, _HEX_CDEF, _HEX, _HEX))
_ESCAPED_UNIT: Final = Alternation(
    (
        Concatenation((literal("u"), _HEX_BUT_D, _HEX, _HEX, _HEX)),
        Concatenation((literal("u"), _HEX_D, characters("0", "7"), _HEX, _HEX)),
    )
)
_STRING_CHAR: Final = Alternation(
    (
        _PLAIN_CHAR,
        Concatenation(
            (literal("\\"), Alternation((_ESCAPES, _ESCAPED_UNIT, Concatenation((_HIGH_HALF, _LOW_HALF)))))
        ),
    )
)

BOOLEAN: Final[Regex] = Alternation((literal("true"), literal("false")))
NULL: Final[Regex] = literal("null")


def string(least: int = 0, most: int | None = None) -> Regex:
    """Returns strings of ``least`` to ``most`` characters (code points; an escape counts as one)."""
    return Concatenation((literal('"'), Repeat(_STRING_CHAR, least, most), literal('"')))


def integer(least: int = -MOST_INTEGER, most: int = MOST_INTEGER) -> Regex | None:
    """Returns the integers from ``least`` to ``most``, both inclusive, without leading zeros. None if there
    is none."""
    least, most = max(least, -MOST_INTEGER), min(most, MOST_INTEGER)
    options = _naturals(max(least, 0), most)
    options += [Concatenation((literal("-"), size)) for size in _naturals(max(-most, 1), -least)]
    return make_union(options) if options else None


def _naturals(least: int, most: int) -> list[Regex]:
    """Returns the integers from ``least``, which is not negative, to ``most``."""
    found: list[Regex] = []
    while least <= most:
        length = len(str(least))
        longest = len(str(most + 1)) - 1  # all integers with this number of digits are at most ``most``
        if least == 10 ** (length - 1) and length <= longest:
            found.append(Concatenation((_NONZERO, Repeat(_DIGIT, length - 1, longest - 1))))
            least = 10**longest
        else:
            last = min(most, 10**length - 1)
            found.append(_same_length(str(least), str(last)))
            least = last + 1
    return found


def _same_length(low: str, high: str) -> Regex:
    """The strings of digits from ``low`` to ``high``, which have the same length."""
    if low == high:
        return literal(low)
    rest = len(low) - 1
    if low[0] == high[0]:
        return Concatenation((literal(low[0]), _same_length(low[1:], high[1:])))
    first, last = int(low[0]), int(high[0])
    options: list[Regex] = []
    if low[1:] != "0" * rest:
        options.append(Concatenation((literal(low[0]), _same_length(low[1:], "9" * rest))))
        first += 1
    if high[1:] != "9" * rest:
        options.append(Concatenation((literal(high[0]), _same_length("0" * rest, high[1:]))))
        last -= 1
    if first <= last:
        options.append(Concatenation((characters(str(first), str(last)), Repeat(_DIGIT, rest, rest))))
    return make_union(options)


@dataclass(frozen=True, slots=True)
class _Limit:
    """A limit of a range."""

    value: Decimal
    is_open: bool = False  # the value itself is outside the range

    def negated(self) -> _Limit:
        return _Limit(-self.value, self.is_open)

    @property
    def fraction(self) -> _Fraction:
        return _Fraction(f"{self.value:f}".partition(".")[2].rstrip("0"), self.is_open)


@dataclass(frozen=True, slots=True)
class _Fraction:
    """A limit of the remaining digits after the point, without zeros at its end."""

    digits: str
    is_open: bool

    @property
    def first(self) -> int:
        return int(self.digits[:1] or "0")

    @property
    def rest(self) -> _Fraction:
        return _Fraction(self.digits[1:], self.is_open)


def number(
    least: float | None = None,
    most: float | None = None,
    *,
    above: float | None = None,
    below: float | None = None,
) -> Regex | None:
    """Returns the numbers with or without a fraction, without an exponent, from ``least`` to ``most``, both
    inclusive, greater than ``above`` and less than ``below``. None if there is none, or a limit is not
    finite."""
    if not all(math.isfinite(limit) for limit in (least, most, above, below) if limit is not None):
        return None
    top = _Limit(Decimal(MOST_NUMBER), is_open=True)
    lower, upper = [top.negated()], [top]
    lower += [_Limit(_exact(least))] if least is not None else []
    lower += [_Limit(_exact(above), is_open=True)] if above is not None else []
    upper += [_Limit(_exact(most))] if most is not None else []
    upper += [_Limit(_exact(below), is_open=True)] if below is not None else []
    low = _highest(lower)
    high = _highest([limit.negated() for limit in upper]).negated()
    # A text close to an open limit must not be rounded to it.
    room = min(
        [MOST_FRACTION, *(EXACT_DIGITS - len(str(int(abs(x)))) for x in (above, below) if x is not None)]
    )
    room = max(room, 1)
    zero, above_zero = _Limit(Decimal(0)), _Limit(Decimal(0), is_open=True)
    options = _sizes(_highest([low, zero]), high, room)
    negative = _sizes(_highest([high.negated(), above_zero]), low.negated(), room)
    if low == top.negated() and high == top:
        return Concatenation((Repeat(literal("-"), 0, 1), make_union(options)))
    options += [Concatenation((literal("-"), size)) for size in negative]
    return make_union(options) if options else None


def _exact(limit: float) -> Decimal:
    return Decimal(repr(limit))


def _highest(limits: list[_Limit]) -> _Limit:
    """The strictest of several lower limits."""
    return max(limits, key=lambda limit: (limit.value, limit.is_open))


def _sizes(low: _Limit, high: _Limit, room: int) -> list[Regex]:
    """Returns the decimals between two limits that are not negative, with at most ``room`` digits after the
    point."""
    if low.value > high.value:
        return []
    first, last = int(low.value), int(high.value)
    wholes: list[tuple[Regex, _Fraction | None, _Fraction | None]]
    if first == last:
        wholes = [(literal(str(first)), low.fraction, high.fraction)]
    else:
        wholes = [(literal(str(first)), low.fraction, None)]
        wholes += [(whole, None, None) for whole in _naturals(first + 1, last - 1)]
        wholes += [(literal(str(last)), None, high.fraction)]
    found: list[Regex] = []
    for whole, at_least, at_most in wholes:
        digits = _more_digits(at_least, at_most, room)
        fraction = None if digits is None else Concatenation((literal("."), digits))
        found += [Concatenation((whole, tail)) for tail in _tail(fraction, _may_end(at_least, at_most))]
    return found


def _more_digits(low: _Fraction | None, high: _Fraction | None, room: int) -> Regex | None:
    """Returns one to ``room`` digits that keep the fraction within its limits. None if there are none."""
    if low is None and high is None:
        return Repeat(_DIGIT, 1, room) if room else None
    groups: dict[tuple[_Fraction | None, _Fraction | None], list[str]] = {}
    for digit in range(low.first if low else 0, (high.first if high else 9) + 1):
        next_low = low.rest if low and digit == low.first else None
        next_high = high.rest if high and digit == high.first else None
        groups.setdefault((next_low, next_high), []).append(str(digit))
    options: list[Regex] = []
    for (next_low, next_high), digits in groups.items() if room else ():
        one = characters(digits[0], digits[-1])
        more = _more_digits(next_low, next_high, room - 1)
        options += [Concatenation((one, tail)) for tail in _tail(more, _may_end(next_low, next_high))]
    return make_union(options) if options else None


def _may_end(low: _Fraction | None, high: _Fraction | None) -> bool:
    """Whether a fraction without further digits is within its limits."""
    is_high_enough = low is None or not (low.digits or low.is_open)
    return is_high_enough and (high is None or bool(high.digits) or not high.is_open)


def _tail(more: Regex | None, may_end: bool) -> list[Regex]:
    """Returns the possible continuations: ``more``, the empty text, both, or none."""
    if more is None:
        return [EMPTY] if may_end else []
    return [Repeat(more, 0, 1) if may_end else more]


def text_of_format(name: str) -> Regex | None:
    """Returns the strings of a ``format``. None for a format that is not in ``PATTERN_OF_FORMAT``."""
    pattern = PATTERN_OF_FORMAT.get(name)
    return None if pattern is None else Concatenation((literal('"'), parse_regex(pattern), literal('"')))
