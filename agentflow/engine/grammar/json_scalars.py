"""JSON strings, numbers and literals as regular expressions.

Values are narrower than JSON where parsers differ: strings have no lone surrogates, integers fit 64 bits, and
numbers have no exponent. Numbers have bounded length, so that a model cannot generate digits forever. Ranges
are exact: every text of ``number(0.5, 9)`` is parsed as a value in that range.
"""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Final

from agentflow.engine.grammar.regex import (
    Alternation,
    CharSet,
    Concatenation,
    Regex,
    Repeat,
    literal,
    parse_regex,
)
from agentflow.protocol.schemas.decimals import MOST_DIGITS, Endpoint, decimal_pattern, natural_patterns
from agentflow.protocol.schemas.walk import PATTERN_OF_FORMAT

MOST_INTEGER: Final = 10**18 - 1
"""18 digits: fits 64 bits."""

MOST_NUMBER: Final = 10**MOST_DIGITS
"""Numbers are smaller, so that all digits before the point are exact."""

MOST_FRACTION: Final = 17
"""Digits after the point."""

EXACT_DIGITS: Final = 15
"""Different decimals with this many digits are different 64-bit floats."""


_HEX: Final = CharSet(((0x30, 0x39), (0x41, 0x46), (0x61, 0x66)))
_OCTAL: Final = CharSet(((0x30, 0x37),))
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
        Concatenation((literal("u"), _HEX_D, _OCTAL, _HEX, _HEX)),
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
    options = natural_patterns(max(least, 0), most)
    options += [f"-{size}" for size in natural_patterns(max(-most, 1), -least)]
    return parse_regex("|".join(options)) if options else None


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
    limits = (least, most, above, below)
    if not all(math.isfinite(limit) for limit in limits if isinstance(limit, float)):
        return None
    # Zero may have a sign if no limit is stricter than the number of digits.
    lows = [low for low in _endpoints(least, above) if low.value > -_TOP]
    highs = [high for high in _endpoints(most, below) if high.value < _TOP]
    # A text close to an open limit must not be rounded to it.
    exact = [EXACT_DIGITS - len(str(int(abs(x)))) for x in (above, below) if x is not None]
    places = max(min([MOST_FRACTION, *exact]), 1)
    try:
        pattern = decimal_pattern(lows, highs, places=places)
    except ValueError:
        return None
    return parse_regex(pattern)


_TOP = Decimal(10) ** MOST_DIGITS


def _endpoints(closed: float | None, opened: float | None) -> list[Endpoint]:
    limits = ((closed, False), (opened, True))
    return [Endpoint(Decimal(repr(limit)), is_open) for limit, is_open in limits if limit is not None]


def text_of_format(name: str) -> Regex | None:
    """Returns the strings of a ``format``. None for a format that is not in ``PATTERN_OF_FORMAT``."""
    pattern = PATTERN_OF_FORMAT.get(name)
    return None if pattern is None else Concatenation((literal('"'), parse_regex(pattern), literal('"')))
