"""Tags: places in free text that a gen constrains. ``split_at_tags`` finds them in the generated text."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Final

import msgspec

from agentflow.errors import BadArgument, error_param
from agentflow.language.typed.json_form import JsonRecord, as_plain
from agentflow.language.typed.values import (
    ValueType,
    refuse_several,
    value_type,
    warn_of_length,
    with_lengths,
)
from agentflow.protocol.bounds.client_pattern import CannotCheck
from agentflow.protocol.constraint import Constraint, TagRule
from agentflow.protocol.grammars.gbnf import read_gbnf, rule_names
from agentflow.protocol.grammars.recognition import Recognizer
from agentflow.protocol.text.transform import REGEX_TIMEOUT_S


class Tag:
    """A place in the text of ``gen(tags=[...])`` whose content is constrained. The text around tags is free,
    and there may be no tags.

    The value of the gen is a list of pieces in order: a string for free text and an ``af.Tagged`` for each
    tag. Exactly one of ``schema``, ``regex`` and ``grammar`` must be given.

    Args:
        begin: The text that begins the tag.
        end: The text that ends the tag.
        schema: The type or JSON schema of the content, as in ``gen``.
        regex: A regular expression that the content matches.
        grammar: A grammar of the content, in Lark's notation or in GBNF. In Lark's, no terminal may take the
            beginning of ``end``.

    Raises:
        BadArgument: An argument is invalid.

    >>> verdict = af.gen("verdict", tags=[af.Tag("<score>", schema=int, end="</score>")])
    >>> s += af.user("Judge it in a sentence, with a score.") + af.assistant(verdict)
    >>> [piece if isinstance(piece, str) else piece.value for piece in await s[verdict]]
    ['It is clear, ', 8, ' of 10.']
    """

    def __init__(
        self,
        begin: str,
        *,
        end: str,
        schema: Any = None,
        regex: str | None = None,
        grammar: str | None = None,
    ) -> None:
        self.begin = begin
        self.end = end
        refuse_several({"schema": schema, "regex": regex, "grammar": grammar}, where="Tag")
        self._type = value_type(schema=schema, regex=regex, grammar=grammar)
        constraint = self._type.constraint
        if constraint is None:
            raise BadArgument(f"Tag({begin!r}): give a schema, a regex or a grammar", param="schema")
        assert constraint.kind == "schema" or constraint.kind == "regex" or constraint.kind == "grammar"
        self._rule = TagRule(begin, constraint.kind, with_lengths(constraint), end)
        self._rule.check()
        if not end:
            raise BadArgument(f"Tag({begin!r}): end must not be empty, because it ends the tag", param="end")

    def __repr__(self) -> str:
        return f"<Tag {self.begin!r} … {self.end!r}: {self._type.shown}>"


class Tagged(JsonRecord, msgspec.Struct, frozen=True):
    """The content of a tag: its ``text``, without ``begin`` and ``end``, and its ``value``: the typed value
    for a schema, the text for a regex or a grammar.

    >>> verdict = af.gen("verdict", tags=[af.Tag("<score>", schema=int, end="</score>")])
    >>> s += af.user("Judge it in a sentence, with a score.") + af.assistant(verdict)
    >>> before, score, after = await s[verdict]
    >>> score.tag.begin, score.text, score.value
    ('<score>', '8', 8)
    """

    tag: Tag
    text: str
    value: Any

    def to_dict(self) -> dict[str, Any]:
        """The content as a dict of JSON values, with ``begin`` of its tag as ``tag``.

        >>> verdict = af.gen("verdict", tags=[af.Tag("<score>", schema=int, end="</score>")])
        >>> s += af.user("Judge it in a sentence, with a score.") + af.assistant(verdict)
        >>> before, score, after = await s[verdict]
        >>> score.to_dict()
        {'tag': '<score>', 'text': '8', 'value': 8}
        """
        return {"tag": self.tag.begin, "text": self.text, "value": as_plain(self.value, is_read_back=False)}


def tagged_type(tags: Sequence[Tag]) -> ValueType:
    """The type of ``gen(tags=...)``."""
    if isinstance(tags, str) or not isinstance(tags, Sequence) or not all(isinstance(t, Tag) for t in tags):
        raise BadArgument(f"gen: tags must be a list of af.Tag, not {tags!r}", param="tags")
    rules = tuple([tag._rule for tag in tags])
    source = msgspec.json.encode(rules).decode()
    with error_param("tags"):
        constraint = Constraint("tags", source).check()
    return ValueType("text with tags", constraint, partial(_read_tags, tags, rules))


def _read_tags(tags: Sequence[Tag], rules: tuple[TagRule, ...], text: str) -> list[str | Tagged]:
    return [
        piece if isinstance(piece, str) else _tagged(tags[piece.index], piece.text)
        for piece in split_at_tags(text, rules)
    ]


def _tagged(tag: Tag, text: str) -> Tagged:
    value = tag._type.read(text)
    warn_of_length(tag.begin, text, tag._type.constraint)
    return Tagged(tag, text, value)


_SPACE = " \t\n\r"
_JSON = json.JSONDecoder()


@dataclass(frozen=True, slots=True)
class InTag:
    """The text between ``begin`` and ``end`` of the rule with this index."""

    index: int
    text: str


def split_at_tags(text: str, rules: tuple[TagRule, ...]) -> list[str | InTag]:
    """The free text and the contents of tags, in order, without empty free text. ``ValueError`` if a tag is
    not closed or its content is invalid; grammars in Lark's notation are not checked.

    The content may contain the tag's end, for example in a JSON string. A tag ends at the first ``end``
    before which its content is complete; with a grammar in Lark's notation, at the first ``end``."""
    index_of = {rule.begin: index for index, rule in enumerate(rules)}
    begins = re.compile("|".join([re.escape(begin) for begin in index_of]))
    pieces: list[str | InTag] = []
    at = 0
    while (begin := begins.search(text, at)) is not None:
        index = index_of[begin.group()]
        rule = rules[index]
        end = _find_end(text, begin.end(), rule)
        if end is None:
            raise ValueError(f"{rule.begin!r} is not followed by a valid {rule.kind} and {rule.end!r}")
        pieces += [text[at : begin.start()], InTag(index, text[begin.end() : end])]
        at = end + len(rule.end)
    pieces.append(text[at:])
    return [piece for piece in pieces if piece]


def matches_whole(pattern: str, text: str) -> bool:
    """Whether all of ``text`` matches. ``BadArgument`` if the pattern is invalid, ``ValueError`` if matching
    takes too long."""
    import regex  # slow to load, and few programs need it

    try:
        return regex.fullmatch(pattern, text, timeout=REGEX_TIMEOUT_S) is not None
    except regex.error as error:
        raise BadArgument(f"{pattern!r:.200} is not a regular expression: {error}") from None
    except (TimeoutError, RecursionError):
        raise ValueError(f"matching {pattern!r:.200} takes too long") from None


def _find_end(text: str, start: int, rule: TagRule) -> int | None:
    """The position of the ``end`` of the tag whose content begins at ``start``; None if it has no end."""
    match rule.kind:
        case "schema":
            return _end_of_json(text, start, rule.end)
        case "regex":
            end = text.find(rule.end, start)
            while end >= 0 and not matches_whole(rule.source, text[start:end]):
                end = text.find(rule.end, end + 1)
        case "grammar":
            return _end_of_grammar(text, start, rule)
    return end if end >= 0 else None


MOST_STEPS: Final = 500_000
"""The steps that reading the content of a tag may take, some tenths of a second."""


def _end_of_grammar(text: str, start: int, rule: TagRule) -> int | None:
    recognizer = _recognizer(rule.source)
    at = start
    try:
        if recognizer is not None:
            for is_whole in recognizer.beginnings(text[start:], most_steps=MOST_STEPS):
                if is_whole and text.startswith(rule.end, at):
                    return at
                at += 1
            return None
    except CannotCheck:
        pass
    end = text.find(rule.end, at)
    return end if end >= 0 else None


@lru_cache(maxsize=32)
def _recognizer(source: str) -> Recognizer | None:
    """The recognizer of a grammar; None if it is too large, or not in GBNF: then any text is whole."""
    try:
        return Recognizer(read_gbnf(source), "root") if rule_names(source) else None
    except (BadArgument, CannotCheck, RecursionError):
        return None


def _end_of_json(text: str, start: int, end_mark: str) -> int | None:
    while start < len(text) and text[start] in _SPACE:
        start += 1
    try:
        _, value_end = _JSON.raw_decode(text, start)
    except (ValueError, RecursionError):
        return None
    end = text.find(end_mark, value_end)
    return end if end >= 0 and not text[value_end:end].strip(_SPACE) else None
