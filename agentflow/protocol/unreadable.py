"""The errors of msgspec for data that it cannot decode, and their reason for the sender."""

from __future__ import annotations

import re
from typing import Final

import msgspec

UNREADABLE: Final = (msgspec.DecodeError, UnicodeError, RecursionError)
"""Invalid data or another type, invalid UTF-8, and deep nesting."""
HALF_PAIR: Final = "a text in it has half a surrogate pair"
_HALF_PAIR: Final = re.compile(rb"\\ud[89ab]..(?!\\ud[c-f])", re.IGNORECASE | re.DOTALL)
_HALF_PAIR_BYTES: Final = 16


def json_fault(data: bytes | bytearray, error: Exception) -> str:
    """Explains why msgspec cannot decode this text. If the escape of a first half of a surrogate pair is near
    the end, msgspec reports truncated data instead.

    >>> json_fault(b'{"a": "\\\\ud800"}', msgspec.DecodeError("Input data was truncated"))
    'a text in it has half a surrogate pair'
    """
    text = str(error)
    is_half = "surrogate" in text or ("truncated" in text and _HALF_PAIR.search(data[-_HALF_PAIR_BYTES:]))
    return HALF_PAIR if is_half else text
