"""Patterns of decimals within limits, exact to the last digit, and without an exponent."""

from __future__ import annotations

from decimal import Decimal
from typing import Final, NamedTuple

MOST_DIGITS: Final = 15
"""The most digits before the point, and after it."""


class Endpoint(NamedTuple):
    """``is_open``: the value itself is outside."""

    value: Decimal
    is_open: bool = False


class _Fraction(NamedTuple):
    """A limit of the digits after the point that are still to come, without zeros at its end."""

    digits: str
    is_open: bool

    @property
    def first(self) -> int:
        return int(self.digits[:1] or "0")

    @property
    def rest(self) -> _Fraction:
        return _Fraction(self.digits[1:], self.is_open)


def decimal_pattern(
    lows: list[Endpoint] | None = None,
    highs: list[Endpoint] | None = None,
    *,
    whole_digits: int = MOST_DIGITS,
    places: int = MOST_DIGITS,
) -> str:
    """The pattern of a decimal above all ``lows`` and below all ``highs``. ``ValueError`` if there is none.
    Only without limits, zero may have a sign.

    >>> decimal_pattern([Endpoint(Decimal(1))], [Endpoint(Decimal(2), is_open=True)], places=2)
    '^(?:1(?:\\\\.[0-9]{1,2})?)$'
    """
    top = Endpoint(Decimal(10) ** whole_digits, is_open=True)
    low = max([_negated(top), *(lows or [])])
    high = _negated(max([_negated(limit) for limit in [top, *(highs or [])]]))
    if not lows and not highs:
        whole = "0" if whole_digits < 1 else f"(0|[1-9][0-9]{{0,{whole_digits - 1}}})"
        return f"^-?{whole}" + (rf"(\.[0-9]{{1,{places}}})?$" if places else "$")
    options = _sizes(max(low, Endpoint(Decimal(0))), high, places)
    negative = _sizes(max(_negated(high), Endpoint(Decimal(0), is_open=True)), _negated(low), places)
    if not options and not negative:
        raise ValueError("no decimal is within its limits")
    return f"^(?:{'|'.join([*options, *[f'-(?:{one})' for one in negative]])})$"


def _negated(limit: Endpoint) -> Endpoint:
    return Endpoint(-limit.value, limit.is_open)


def _sizes(low: Endpoint, high: Endpoint, places: int) -> list[str]:
    """The decimals between two limits that are not negative."""
    if low.value > high.value:
        return []
    first, last = int(low.value), int(high.value)
    wholes: list[tuple[str, _Fraction | None, _Fraction | None]]
    if first == last:
        wholes = [(str(first), _fraction(low), _fraction(high))]
    else:
        wholes = [(str(first), _fraction(low), None)]
        wholes += [(one, None, None) for one in natural_patterns(first + 1, last - 1)]
        wholes.append((str(last), None, _fraction(high)))
    found = []
    for whole, at_least, at_most in wholes:
        digits = _more_digits(at_least, at_most, places)
        fraction = None if digits is None else rf"\.{digits}"
        found += [whole + tail for tail in _tail(fraction, _may_end(at_least, at_most))]
    return found


def _fraction(limit: Endpoint) -> _Fraction:
    return _Fraction(f"{limit.value:f}".partition(".")[2].rstrip("0"), limit.is_open)


def natural_patterns(least: int, most: int) -> list[str]:
    """The patterns that together match the integers from ``least``, which is not negative, to ``most``."""
    found = []
    while least <= most:
        length = len(str(least))
        longest = len(str(most + 1)) - 1  # all numbers of this many digits are at most ``most``
        if least == 10 ** (length - 1) and length <= longest:
            found.append(f"[1-9][0-9]{{{length - 1},{longest - 1}}}")
            least = 10**longest
        else:
            last = min(most, 10**length - 1)
            found.append(_same_length(str(least), str(last)))
            least = last + 1
    return found


def _same_length(low: str, high: str) -> str:
    """The strings of digits from ``low`` to ``high``, which have the same length."""
    if low == high:
        return low
    rest = len(low) - 1
    if low[0] == high[0]:
        return low[0] + _same_length(low[1:], high[1:])
    first, last, options = int(low[0]), int(high[0]), []
    if low[1:] != "0" * rest:
        options.append(low[0] + _same_length(low[1:], "9" * rest))
        first += 1
    if high[1:] != "9" * rest:
        options.append(high[0] + _same_length("0" * rest, high[1:]))
        last -= 1
    if first <= last:
        options.append(f"[{first}-{last}]" + (f"[0-9]{{{rest}}}" if rest else ""))
    return options[0] if len(options) == 1 else f"(?:{'|'.join(options)})"


def _more_digits(low: _Fraction | None, high: _Fraction | None, room: int) -> str | None:
    """One to ``room`` digits with which the fraction stays within its limits. None if there are none."""
    if room < 1:
        return None
    if low is not None and not low.digits and not low.is_open:
        low = None
    if low is None and high is None:
        return f"[0-9]{{1,{room}}}"
    if low is None and high is not None and not high.digits:
        return None if high.is_open else f"0{{1,{room}}}"
    groups: dict[tuple[_Fraction | None, _Fraction | None], list[str]] = {}
    for digit in range(low.first if low else 0, (high.first if high else 9) + 1):
        next_low = low.rest if low and digit == low.first else None
        next_high = high.rest if high and digit == high.first else None
        groups.setdefault((next_low, next_high), []).append(str(digit))
    options = []
    for (next_low, next_high), digits in groups.items():
        one = digits[0] if len(digits) == 1 else f"[{digits[0]}-{digits[-1]}]"
        more = _more_digits(next_low, next_high, room - 1)
        options += [one + tail for tail in _tail(more, _may_end(next_low, next_high))]
    return f"(?:{'|'.join(options)})" if options else None


def _may_end(low: _Fraction | None, high: _Fraction | None) -> bool:
    """Whether a fraction without further digits keeps within its limits."""
    is_high_enough = low is None or not (low.digits or low.is_open)
    return is_high_enough and (high is None or bool(high.digits) or not high.is_open)


def _tail(more: str | None, may_end: bool) -> list[str]:
    """The rest of the pattern: ``more``, nothing, or either. Empty if neither is possible."""
    if more is None:
        return [""] if may_end else []
    return [f"(?:{more})?" if may_end else more]
