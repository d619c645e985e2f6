"""Tags: places in free text where what is written must be valid, as tool calls in prose are.

Free text with tags: which parts of a text are prose, and which stand in a tag.

What stands in a tag may hold the tag's end as well (in a JSON string, say): a tag ends at the first
``end`` before which its content is complete.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import regex

from agentflow.errors import BadArgument
from agentflow.language.values import Tool, Toolbox, ValueType, of_json_schema, refuse_several, value_type
from agentflow.protocol.constraint import Constraint, TagRule
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


class Tag:
    """What stands between ``begin`` and ``end`` in the text of a ``gen(tags=[…])`` keeps a ``schema``, a
    ``regex`` or a ``grammar`` (as ``gen`` has them), or is one call of one of these ``tools``. The text
    around tags is free, and it may have none.

    The gen's value is a list of pieces in their order: strings, and an ``af.Tagged`` for each tag.
    ``BadArgument`` where the arguments make no sense.

    >>> call = af.Tag("<call>", tools=[weather], end="</call>")
    >>> reply = af.gen("reply", tags=[call])
    >>> s += af.user("Should I take an umbrella in Oslo?") + af.assistant(reply)
    >>> for piece in await s[reply]:
    ...     print(piece if isinstance(piece, str) else piece.value())
    Let me look.
    rain in Oslo
    """

    def __init__(
        self,
        begin: str,
        *,
        end: str,
        schema: Any = None,
        regex: str | None = None,
        grammar: str | None = None,
        tools: Sequence[Tool] | None = None,
    ) -> None:
        self.begin = begin
        self.end = end
        refuse_several({"schema": schema, "regex": regex, "grammar": grammar, "tools": tools}, where="Tag")
        if tools is not None:
            self._type = _one_call(Toolbox(tools))
        else:
            self._type = value_type(schema=schema, regex=regex, grammar=grammar)
        constraint = self._type.constraint
        if constraint is None:
            raise BadArgument(f"Tag({begin!r}): say what stands in it: a schema, a regex, a grammar or tools")
        assert constraint.kind == "schema" or constraint.kind == "regex" or constraint.kind == "grammar"
        self.rule = TagRule(begin, constraint.kind, constraint.source, end)
        """As the backend is told. For the gen."""
        self.rule.check()
        if not end:
            raise BadArgument(f"Tag({begin!r}): end must not be empty: it is where the tag is cut off")

    def __repr__(self) -> str:
        return f"<Tag {self.begin!r} … {self.end!r}: {self._type.shown}>"

    @property
    def read(self) -> Callable[[str], Any]:
        """Makes the value of a text that stood in the tag. For the gen."""
        return self._type.read


@dataclass(frozen=True, slots=True)
class Tagged:
    """What stood in a tag: its ``text``, without the marks, and its ``value`` (of a schema the typed value,
    of tools an ``af.ToolCall``, of a regex or a grammar the text).

    >>> reply = af.gen("reply", tags=[af.Tag("<call>", tools=[weather], end="</call>")])
    >>> s += af.user("Should I take an umbrella in Oslo?") + af.assistant(reply)
    >>> prose, call = await s[reply]
    >>> call.tag.begin, call.text, call.value.arguments
    ('<call>', '{"name": "weather", "arguments": {"city": "Oslo"}}', {'city': 'Oslo'})
    """

    tag: Tag
    text: str
    value: Any


def tagged_type(tags: Sequence[Tag]) -> ValueType:
    """What ``gen(tags=…)`` asks for, and how its value is made of the text."""
    if isinstance(tags, str) or not isinstance(tags, Sequence) or not all(isinstance(t, Tag) for t in tags):
        raise BadArgument(f"gen: tags must be a list of af.Tag, not {tags!r}")
    rules = tuple([tag.rule for tag in tags])
    source = msgspec.json.encode(rules).decode()

    def read(text: str) -> list[str | Tagged]:
        return [
            piece if isinstance(piece, str) else _tagged(tags[piece.index], piece.text)
            for piece in split_at_tags(text, rules)
        ]

    return ValueType("text with valid tags", Constraint("tags", source).check(), read)


def _tagged(tag: Tag, text: str) -> Tagged:
    return Tagged(tag, text, tag.read(text))


def _one_call(toolbox: Toolbox) -> ValueType:
    return of_json_schema(toolbox.call_schema(), toolbox.read_call, "tool call")
