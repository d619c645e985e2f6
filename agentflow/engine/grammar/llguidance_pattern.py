"""A regular expression's tree written out for llguidance, in the syntax of Rust's regex.

Written from the tree, and not from the pattern, so that it means what Python's ``re`` means by it.
"""

from __future__ import annotations

from typing import Final

from agentflow.engine.grammar.regex_tree import (
    CharSet,
    Choice,
    LookAhead,
    LookBehind,
    Ranges,
    Regex,
    Sequence,
    without_surrogates,
)
from agentflow.errors import BadArgument

_PLAIN: Final = frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 _")
_NO_TEXT: Final = r"[^\x{0}-\x{10FFFF}]"


def pattern_of(regex: Regex) -> str:
    r"""The tree as a pattern that may stand between the slashes of a Lark terminal.

    >>> pattern_of(parse_regex("a{2}|[^b]"))
    '(?:(?:a){2}|[\\x{0}-a\\x{63}-\\x{10ffff}])'  # or alike

    ``BadArgument`` for look-arounds (also anchors and word boundaries), which only a DFA can keep.
    """
    if isinstance(regex, CharSet):
        return _char_set(regex.ranges)
    if isinstance(regex, Sequence):
        return "".join([pattern_of(part) for part in regex.parts])
    if isinstance(regex, Choice):
        return (
            f"(?:{'|'.join([pattern_of(option) for option in regex.options])})" if regex.options else _NO_TEXT
        )
    if isinstance(regex, LookAhead | LookBehind):
        raise BadArgument(
            "regex: a look-around, a word boundary \\b or an anchor inside cannot be kept in a pattern this "
            "large, or in a tag"
        )
    most = "" if regex.most is None else regex.most
    return f"(?:{pattern_of(regex.part)}){{{regex.least},{most}}}"


def literal_pattern(text: str) -> str:
    """Exactly this text."""
    return "".join([_char(ord(char)) for char in text])


def _char_set(ranges: Ranges) -> str:
    if not ranges:
        return _NO_TEXT
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
        return _char(ranges[0][0])
    return (
        "[" + "".join([f"{_char(first)}-{_char(last)}" for first, last in without_surrogates(ranges)]) + "]"
    )


def _char(code_point: int) -> str:
    return chr(code_point) if code_point in _PLAIN else f"\\x{{{code_point:x}}}"
