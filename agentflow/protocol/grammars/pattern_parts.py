"""Regular expressions in parts, to write them for readers that take some of them otherwise."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

_ESCAPE: Final = r"\\(?:[pPux]\{[^}]*\}|u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|.)"
# A bracket that comes first is part of the set.
_PART: Final = re.compile(rf"{_ESCAPE}|\[\^?\]?(?:\\.|[^\]\\])*\]|.", re.DOTALL)
_MEMBERS: Final = re.compile(rf"({_ESCAPE}|.)(?:-({_ESCAPE}|.))?", re.DOTALL)
_NO_REPEAT: Final = re.compile(r"\{(?![0-9,])")


def pattern_parts(pattern: str) -> Iterator[re.Match[str]]:
    r"""Yields the escapes, the sets and the other characters of a pattern.

    >>> [part[0] for part in pattern_parts(r"\.[.\]]+")]
    ['\\.', '[.\\]]', '+']
    """
    return _PART.finditer(pattern)


def rust_pattern(pattern: str) -> str:
    r"""Returns the pattern for Rust's ``regex``, where it has the meaning that Python and ECMAScript share:
    Rust reads sets in sets, differences of sets, and ``\<`` as a word boundary.

    >>> print(rust_pattern(r"[[&&-]\<{"))
    [\[\&\&\-]<\{
    """
    return "".join([_rust_part(part[0], pattern, part.start()) for part in pattern_parts(pattern)])


def _rust_part(part: str, pattern: str, at: int) -> str:
    if part in (r"\<", r"\>"):
        return part[1]
    if _NO_REPEAT.match(pattern, at):
        return r"\{"
    if part[0] != "[" or part in ("[", "[]", "[^]"):  # the latter are refused: only ECMAScript has them
        return part
    begin = 2 if part.startswith("[^") else 1
    return part[:begin] + _MEMBERS.sub(_rust_members, part[begin:-1]) + "]"


def _rust_members(found: re.Match[str]) -> str:
    return "-".join([rf"\{char}" if char in "[]&~-" else char for char in found.groups() if char])
