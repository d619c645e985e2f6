"""Regular expressions in parts, to write them for readers that take some of them otherwise."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import partial
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


# Python and ECMAScript have different members of these classes. The first table has the characters that are
# members in both, and the second one, for negated sets, the characters that are members in either. The third
# one has ECMAScript's members. llguidance reads ``\d`` and ``\w`` as ECMAScript does.
_WORD: Final = "0-9A-Za-z_"
_SPACE: Final = r"\t-\r \u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
_ANY_WORD: Final = r"\p{L}\p{N}_"
_ANY_SPACE: Final = r"\s\x1c-\x1f\ufeff"
_IN_BOTH: Final = {
    r"\d": "[0-9]",
    r"\D": r"\P{Nd}",
    r"\w": f"[{_WORD}]",
    r"\W": f"[^{_ANY_WORD}]",
    r"\s": f"[{_SPACE}]",
    r"\S": f"[^{_ANY_SPACE}]",
}
_IN_EITHER: Final = {
    r"\d": r"\p{Nd}",
    r"\D": "[^0-9]",
    r"\w": f"[{_ANY_WORD}]",
    r"\W": f"[^{_WORD}]",
    r"\s": f"[{_ANY_SPACE}]",
    r"\S": f"[^{_SPACE}]",
}
_IN_ECMASCRIPT: Final = {
    r"\d": "[0-9]",
    r"\D": "[^0-9]",
    r"\w": f"[{_WORD}]",
    r"\W": f"[^{_WORD}]",
    r"\s": rf"[{_SPACE}\ufeff]",
    r"\S": rf"[^{_SPACE}\ufeff]",
}
_DOT: Final = r"[^\n\r\u2028\u2029]"
_DOT_FLAG: Final = re.compile(r"\(\?[a-zA-Z]*s")


def rust_pattern(pattern: str, *, is_ecmascript: bool = False) -> str:
    r"""Returns the pattern for Rust's ``regex``, where it matches texts that it matches both in Python and in
    ECMAScript, or with ``is_ecmascript`` in the latter. Rust reads sets in sets, differences of sets, and
    ``\<`` as a word boundary.

    >>> print(rust_pattern(r"[[&&-]\<{\d[\w-.]"))
    [\[\&\&\-]<\{[0-9][[0-9A-Za-z_]\-.]
    """
    has_flag = any(
        part[0] == "(" and _DOT_FLAG.match(pattern, part.start()) for part in pattern_parts(pattern)
    )
    dot = "." if has_flag else _DOT
    in_set, in_negated = (_IN_ECMASCRIPT, _IN_ECMASCRIPT) if is_ecmascript else (_IN_BOTH, _IN_EITHER)

    def written(found: re.Match[str]) -> str:
        part = found[0]
        if part == ".":
            return dot
        if part in (r"\<", r"\>"):
            return part[1]
        if _NO_REPEAT.match(pattern, found.start()):
            return r"\{"
        if part[0] != "[" or part in ("[", "[]", "[^]"):  # the latter are refused: only ECMAScript has them
            return in_set.get(part, part)
        begin, classes = (2, in_negated) if part.startswith("[^") else (1, in_set)
        return part[:begin] + _MEMBERS.sub(partial(_rust_members, classes), part[begin:-1]) + "]"

    return "".join(map(written, pattern_parts(pattern)))


def _rust_members(classes: Mapping[str, str], found: re.Match[str]) -> str:
    """Returns one or two members of a set. A class is no end of a range: the hyphen before it is a member."""
    members = [char for char in found.groups() if char]
    written = [classes.get(char) or (rf"\{char}" if char in "[]&~-" else char) for char in members]
    return (r"\-" if any(char in classes for char in members) else "-").join(written)
