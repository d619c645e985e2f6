"""Finds names and strings that no text can spell, but that the library would begin to write.

llguidance checks whether a schema has a value, but not whether a pattern allows any name for a member, nor
whether a string can be written with the allowed escapes. Then its grammar has a dead end: a text that no
token can continue. This module drops such patterns if the schema means the same without them, or rejects
them.
"""

from __future__ import annotations

import functools
from typing import Any, Final

from agentflow.engine.grammar.dfa import build_dfa
from agentflow.engine.grammar.regex import (
    Alternation,
    CharSet,
    Concatenation,
    LookAhead,
    Regex,
    Repeat,
    TooLargeForDfa,
    literal,
    parse_regex,
)
from agentflow.errors import BadArgument
from agentflow.protocol.grammars.char_ranges import MAX_CODE_POINT, merge_ranges
from agentflow.protocol.grammars.pattern_parts import pattern_parts

_MOST_STEPS: Final = 300_000

_WRITABLE: Final = CharSet(merge_ranges([(0x08, 0x0A), (0x0C, 0x0D), (0x20, 0x7E), (0x80, MAX_CODE_POINT)]))
"""The characters that a parser writes, directly or as an escape of one letter."""

_NAME: Final = Repeat(_WRITABLE, 0, None)


def drop_names_without_text(schema: dict[str, Any]) -> None:
    """Drops the ``patternProperties`` that match no name except declared ones. Closes an object if no name is
    left for its ``additionalProperties``. The meaning of the schema does not change.

    >>> schema = {"properties": {"a": {"type": "null"}}, "patternProperties": {"^a$": {"type": "null"}}}
    >>> drop_names_without_text(schema), schema
    (None, {'properties': {'a': {'type': 'null'}}, 'additionalProperties': True})
    """
    patterns, members = schema.get("patternProperties"), schema.get("properties", {})
    if not isinstance(patterns, dict) or not isinstance(members, dict):
        return
    declared = Alternation(tuple([literal(name) for name in members]))
    found = {pattern: _found_by(pattern) for pattern in patterns}
    for pattern, names in found.items():
        if names is None or _has_text(names, without=[declared]):
            continue
        value = patterns.pop(pattern)
        dfa = build_dfa(names) if members and _has_text(names) else None
        for name in members:
            if dfa is not None and dfa.matches(name.encode()) and members[name] != value:
                members[name] = {"allOf": [members[name], value]}
        schema.setdefault("additionalProperties", True)
    known = [names for names in found.values() if names is not None]
    is_open = schema.get("additionalProperties", True) is not False and len(known) == len(found)
    if is_open and not _has_text(_NAME, without=[declared, *known]):
        schema["additionalProperties"] = False
    if not patterns:
        del schema["patternProperties"]


def check_writable(schema: dict[str, Any], path: str) -> None:
    """Raises ``BadArgument``, with the path, for a pattern all of whose texts have characters that a string
    can only contain as an escape ``\\u``."""
    pattern = schema.get("pattern")
    if isinstance(pattern, str) and not _is_writable(pattern):
        where = f"{path}: " if path else ""
        raise BadArgument(f"schema: {where}no string that can be written matches the pattern {pattern!r}")


@functools.lru_cache(maxsize=64)  # the members of a schema often share a pattern
def _is_writable(pattern: str) -> bool:
    names = _found_by(pattern)
    return names is None or _has_text(names)


def _found_by(pattern: str) -> Regex | None:
    """Returns the texts that contain a match of the pattern. None if it cannot be parsed here."""
    # In Python alone, ``$`` also matches before a last newline.
    strict = "".join([r"\Z" if part[0] == "$" else part[0] for part in pattern_parts(pattern)])
    try:
        return parse_regex(f"(?s:.*)(?:{strict})(?s:.*)")
    except (BadArgument, TooLargeForDfa):
        return None


def _has_text(names: Regex, without: list[Regex] | None = None) -> bool:
    """Whether one of the texts can be written and is not among the others. In doubt, True."""
    apart = [LookAhead(other, wanted=False) for other in without or []]
    try:
        build_dfa(Concatenation((LookAhead(_NAME, wanted=True), *apart, names)), max_steps=_MOST_STEPS)
    except BadArgument:
        return False
    except TooLargeForDfa:
        return True
    return True
