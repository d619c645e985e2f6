"""Free text with tags: which parts of a text are prose, and which stand in a tag.

What stands in a tag may hold the tag's end as well (in a JSON string, say): a tag ends at the first
``end`` before which its content is complete.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

import regex

from agentflow.errors import BadArgument
from agentflow.protocol.constraint import TagRule
from agentflow.protocol.transform import REGEX_TIMEOUT_S

_SPACE = " \t\n\r"
_JSON = json.JSONDecoder()


@dataclass(frozen=True, slots=True)
class InTag:
    """What stood between ``begin`` and ``end`` of the rule with this index."""

    index: int
    text: str


def split_at_tags(text: str, rules: tuple[TagRule, ...]) -> list[str | InTag]:
    """The prose and the contents of tags, in their order; empty prose is left out. ``ValueError`` where a
    tag is not closed, or holds what it must not (of a grammar, nothing is checked)."""
    index_of = {rule.begin: index for index, rule in enumerate(rules)}
    begins = re.compile("|".join([re.escape(begin) for begin in index_of]))
    pieces: list[str | InTag] = []
    at = 0
    while (begin := begins.search(text, at)) is not None:
        index = index_of[begin.group()]
        rule = rules[index]
        end = _end_of(text, begin.end(), rule)
        if end is None:
            raise ValueError(f"{rule.begin!r} is not followed by a valid {rule.kind} and {rule.end!r}")
        pieces += [text[at : begin.start()], InTag(index, text[begin.end() : end])]
        at = end + len(rule.end)
    pieces.append(text[at:])
    return [piece for piece in pieces if piece]


def matches_whole(pattern: str, text: str) -> bool:
    """Whether all of ``text`` matches. ``BadArgument`` where the pattern is none, ``ValueError`` where
    finding out takes too long."""
    try:
        return regex.fullmatch(pattern, text, timeout=REGEX_TIMEOUT_S) is not None
    except regex.error as error:
        raise BadArgument(f"{pattern!r:.200} is no regular expression: {error}") from None
    except (TimeoutError, RecursionError):
        raise ValueError(f"to match {pattern!r:.200} takes too long") from None


def _end_of(text: str, start: int, rule: TagRule) -> int | None:
    """Where the rule's ``end`` stands that closes the tag whose content begins at ``start``."""
    match rule.kind:
        case "schema":
            return _end_of_json(text, start, rule.end)
        case "regex":
            end = text.find(rule.end, start)
            while end >= 0 and not matches_whole(rule.source, text[start:end]):
                end = text.find(rule.end, end + 1)
        case "grammar":
            end = text.find(rule.end, start)
    return end if end >= 0 else None


def _end_of_json(text: str, start: int, end_mark: str) -> int | None:
    while start < len(text) and text[start] in _SPACE:
        start += 1
    try:
        _, value_end = _JSON.raw_decode(text, start)
    except (ValueError, RecursionError):
        return None
    end = text.find(end_mark, value_end)
    return end if end >= 0 and not text[value_end:end].strip(_SPACE) else None
