"""Which characters a set in a regular expression means, asked of Python's own ``re``.

So categories and ignored case mean what they mean to Python, of whichever version.
"""

from __future__ import annotations

import re
from functools import cache, lru_cache
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from agentflow.engine.grammar.regex_tree import Ranges, all_but, merged

CodePoints: TypeAlias = NDArray[np.int64]

_BLOCK = 256
_LAST_LETTER = 0x3FFFF
"""No version of Unicode has a letter, a digit or a space beyond; the tests look whether that still holds."""

LAST_OF_PLANE = 0xFFFF
"""Up to here Python reads the members of a set one by one where case is ignored."""


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


def set_ranges(
    literals: str, members: Ranges, escapes: tuple[str, ...], negated: bool, ascii_only: bool
) -> Ranges:
    """The characters of a set: of these literals, ranges (in any order) and categories, or all but those."""
    every = [(ord(char), ord(char)) for char in literals]
    every += [pair for escape in escapes for pair in category(escape, ascii_only)]
    ranges = merged([*every, *members])
    return all_but(ranges) if negated else ranges


@lru_cache(maxsize=4096)
def set_without_case(
    literals: str, members: Ranges, escapes: tuple[str, ...], negated: bool, ascii_only: bool
) -> Ranges:
    """The same where case is ignored. Only characters that have a case are asked about, and of a range only
    they are written into the question: Python takes long to read large ranges where case is ignored. But
    beyond the first 65,536 characters it treats ranges and literals differently."""
    ranges = set_ranges(literals, members, escapes, negated, ascii_only)
    beyond = [f"\\U{first:08x}-\\U{last:08x}" for first, last in members if last > LAST_OF_PLANE]
    within = merged([pair for pair in members if pair[1] <= LAST_OF_PLANE])
    written = "".join([re.escape(char) for char in _cased_chars_of(within) + literals])
    written += "".join([*beyond, *escapes])
    if not written:
        return ranges
    reader = re.compile(
        f"[{'^' if negated else ''}{written}]", re.IGNORECASE | (re.ASCII if ascii_only else re.UNICODE)
    )
    matched = [(ord(char), ord(char)) for char in reader.findall(_cased_chars())]
    return merged([*matched, *_without_cased(ranges)])


def _cased_chars_of(ranges: Ranges) -> str:
    """Of these characters, those that have a case."""
    edges: CodePoints = np.array(ranges, dtype=np.int64).reshape(-1, 2) + np.array([0, 1])
    places: CodePoints = np.searchsorted(_cased_code_points(), edges)
    return "".join([_cased_chars()[int(first) : int(after)] for first, after in places])


def _without_cased(ranges: Ranges) -> list[tuple[int, int]]:
    """Of these characters, those that have no case."""
    left: list[tuple[int, int]] = []
    for first, last in ranges:
        start = first
        for char in _cased_chars_of(((first, last),)):
            if start < ord(char):
                left.append((start, ord(char) - 1))
            start = ord(char) + 1
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
def _cased_code_points() -> CodePoints:
    return np.array([ord(char) for char in _cased_chars()], dtype=np.int64)


@cache
def _all_chars() -> str:
    """Every code point up to the last letter, at its own index: also those that no text can have."""
    code_points: CodePoints = np.arange(_LAST_LETTER + 1, dtype=np.int64)
    return code_points.astype("<u4").tobytes().decode("utf-32-le", "surrogatepass")
