"""Which characters a set in a regular expression means, asked of Python's own ``re``.

So categories and ignored case mean what they mean to Python, of whichever version.
"""

from __future__ import annotations

import re
from functools import cache, lru_cache

import numpy as np

from agentflow.server.core.regex_tree import MAX_CODE_POINT, Ranges, all_but, merged

_BLOCK = 256


@cache
def category(name: str, ascii_only: bool) -> Ranges:
    r"""The characters of a category, by its escape.

    >>> category(r"\d", True)
    ((48, 57),)
    """
    if name[-1].isupper():
        return all_but(category(name.lower(), ascii_only))
    pattern = re.compile(f"{name}+", re.ASCII if ascii_only else 0)
    return tuple([(found.start(), found.end() - 1) for found in pattern.finditer(_all_chars())])


@lru_cache(maxsize=4096)
def without_case(pattern: str, ascii_only: bool, ranges: Ranges) -> Ranges:
    """What the pattern of one character matches when case is ignored. ``ranges``: when it is not."""
    reader = re.compile(pattern, re.IGNORECASE | (re.ASCII if ascii_only else 0))
    matched = [(ord(char), ord(char)) for char in reader.findall(_cased_chars())]
    return merged([*matched, *_uncased(ranges)])


def _uncased(ranges: Ranges) -> list[tuple[int, int]]:
    """Of these ranges, the characters that have no case."""
    left: list[tuple[int, int]] = []
    cased = _cased_code_points()
    for first, last in ranges:
        start = first
        for at in range(int(np.searchsorted(cased, first)), int(np.searchsorted(cased, last, "right"))):
            point = int(cased[at])
            if start < point:
                left.append((start, point - 1))
            start = point + 1
        if start <= last:
            left.append((start, last))
    return left


@cache
def _cased_chars() -> str:
    """Every character that has another form in the other case, or is such a form."""
    every = _all_chars()
    found: set[str] = set()
    for start in range(0, len(every), _BLOCK):
        block = every[start : start + _BLOCK]
        if block.lower() != block or block.upper() != block:
            for char in block:
                forms = {char, *char.lower(), *char.upper(), *char.lower().upper(), *char.upper().lower()}
                if len(forms) > 1:
                    found |= forms
    return "".join(sorted(found))


@cache
def _cased_code_points() -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    return np.array([ord(char) for char in _cased_chars()], dtype=np.int64)


@cache
def _all_chars() -> str:
    """Every code point, at its own index: also those that no text can have."""
    code_points = np.arange(MAX_CODE_POINT + 1, dtype="<u4")
    return code_points.tobytes().decode("utf-32-le", "surrogatepass")
