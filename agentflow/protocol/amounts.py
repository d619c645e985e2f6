"""What counts as a number where a program gives an amount: a bool does not, nor does what is not a number."""

from __future__ import annotations


def is_whole(value: object, low: float, high: float) -> bool:
    """Whether it is a whole number from ``low`` to ``high``."""
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def is_number(value: object, low: float, high: float) -> bool:
    """Whether it is a number from ``low`` to ``high``; NaN is in no range."""
    return isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high
