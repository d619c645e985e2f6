"""Writes grammars for llguidance, in its dialect of Lark.

``write_pattern`` writes the tree of a regular expression as a pattern of Rust's regex. Because it starts from
the tree and not from the pattern, the result has the meaning of Python's ``re``. The other functions write
grammars of tags (such as tool calls) in free text and in rows.

In free text, the text up to the end is one terminal that contains no tag's ``begin``; text before a tag is
another terminal and ends lazily, with the first ``begin``. So a mark cannot pass as free text, however its
characters are divided into tokens. Tags in a row have no free text between them: if all their bodies are
expressions, so is the row.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from agentflow.engine.grammar.llguidance import ALL_TOKENS_ALLOWED
from agentflow.engine.grammar.regex import (
    Alternation,
    CharSet,
    Concatenation,
    LookAhead,
    LookBehind,
    Regex,
    Repeat,
    literal,
)
from agentflow.errors import BadArgument
from agentflow.protocol.constraint import TagRule
from agentflow.protocol.grammars.char_ranges import Ranges, without_surrogates

_PLAIN: Final = frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 _")
_NO_TEXT: Final = r"[^\x{0}-\x{10FFFF}]"


def write_pattern(regex: Regex) -> str:
    r"""Returns the tree as a pattern for a Lark terminal, to be put between slashes. Raises ``BadArgument``
    for look-arounds (including anchors and word boundaries), which only a DFA can match.

    >>> write_pattern(parse_regex("a{2}|[^b]"))
    '(?:(?:a){2}|[\\x{0}-a\\x{63}-\\x{10ffff}])'  # or equivalent
    """
    if isinstance(regex, CharSet):
        return _char_set(regex.ranges)
    if isinstance(regex, Concatenation):
        return "".join([write_pattern(part) for part in regex.parts])
    if isinstance(regex, Alternation):
        return (
            f"(?:{'|'.join([write_pattern(option) for option in regex.options])})"
            if regex.options
            else _NO_TEXT
        )
    if isinstance(regex, LookAhead | LookBehind):
        raise BadArgument(
            "regex: look-arounds, word boundaries \\b and inner anchors are not supported in a pattern this "
            "large, or in a tag"
        )
    most = "" if regex.most is None else regex.most
    return f"(?:{write_pattern(regex.part)}){{{regex.least},{most}}}"


def literal_pattern(text: str) -> str:
    """Returns a pattern that matches exactly this text."""
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


@dataclass(frozen=True, slots=True)
class WithEnd:
    """A Lark grammar of a tag's body and its ``end``. ``regex``: the body alone, if it is regular."""

    grammar: str
    regex: Regex | None = None


TagBody: TypeAlias = "Regex | WithEnd | str"
"""A regular expression, or a Lark grammar that has a ``start``."""


def tag_grammar(tags: Sequence[TagRule], bodies: Sequence[TagBody], max_tags: int | None = None) -> str:
    """Returns the grammar of free text with at most ``max_tags`` of these tags (None: any number). The text
    ends after the last allowed tag: a model that may not call another tool has nothing to add. ``bodies``:
    the compiled ``TagRule.source`` of each tag.

    A body that is an expression ends at the first ``end``. A body that is a grammar ends with the grammar: an
    ``end`` inside one of its JSON strings is text.
    """
    some_begin = "|".join([_text(tag.begin) for tag in tags])
    start = "tag* FREE_TEXT?"
    if max_tags is not None:
        fewer = f"tag{{0,{max_tags - 1}}} " if max_tags > 1 else ""
        start = f"tag{{{max_tags}}} | {fewer}FREE_TEXT?"
    lines = [
        f"start: {start}",
        f"FREE_TEXT: /(?s:.+)/ & ~(/(?s:.*)/ ({some_begin}) /(?s:.*)/)",
        "tag: " + " | ".join([f"tag_{n}" for n in range(len(tags))]),
    ]
    grammars: list[dict[str, str]] = []
    for n, (tag, body) in enumerate(zip(tags, bodies, strict=True)):
        lines.append(_until(n, tags, some_begin))
        lines.append(f"tag_{n}: until_{n} body_{n}")
        lines += _body_lines(n, tag, body, grammars)
    return _joined(lines, grammars)


def _until(n: int, tags: Sequence[TagRule], some_begin: str) -> str:
    """Returns the rule of the text up to the first begin of a tag, including it."""
    text = f"/(?s:.*){literal_pattern(tags[n].begin)}/"
    if all(len(tag.begin.encode()) > 1 for tag in tags):
        return f"until_{n}[lazy]: {text}"
    # llguidance 1.9 misses the end of a lazy terminal at the byte that also ends the terminal before it.
    return f"until_{n}: UNTIL_{n}\nUNTIL_{n}: {text} & ~(/(?s:.*)/ ({some_begin}) /(?s:.+)/)"


def row_grammar(
    tags: Sequence[TagRule], bodies: Sequence[TagBody], between: str, max_tags: int | None
) -> str:
    """Returns the grammar of 1 to ``max_tags`` of these tags (None: any number), separated by ``between``."""
    most = "" if max_tags is None else max_tags - 1
    next_one = f"({_text(between)} tag)" if between else "(tag)"
    lines = [
        "start: tag" + ("" if most == 0 else f" {next_one}{{0,{most}}}"),
        "tag: " + " | ".join([f"tag_{n}" for n in range(len(tags))]),
    ]
    grammars: list[dict[str, str]] = []
    for n, (tag, body) in enumerate(zip(tags, bodies, strict=True)):
        lines.append(f"tag_{n}: {_text(tag.begin)} body_{n}")
        lines += _body_lines(n, tag, body, grammars)
    return _joined(lines, grammars)


def row_regex(tags: Sequence[TagRule], bodies: Sequence[Regex], between: str, max_tags: int | None) -> Regex:
    """Returns ``row_grammar`` as an expression."""
    options = [
        Concatenation((literal(tag.begin + tag.lead), body, literal(tag.end)))
        for tag, body in zip(tags, bodies, strict=True)
    ]
    one = options[0] if len(options) == 1 else Alternation(tuple(options))
    if max_tags == 1:
        return one
    most = None if max_tags is None else max_tags - 1
    return Concatenation((one, Repeat(Concatenation((literal(between), one)), 0, most)))


def tag_alone(tag: TagRule, body: TagBody) -> str:
    """Returns the grammar of the text after the tag's ``begin``, including its ``lead`` and ``end``."""
    grammars: list[dict[str, str]] = []
    return _joined(["start: body_0", *_body_lines(0, tag, body, grammars)], grammars)


def _body_lines(n: int, tag: TagRule, body: TagBody, grammars: list[dict[str, str]]) -> list[str]:
    """Returns the rule ``body_n``. Appends the grammars that it uses to ``grammars``."""
    lead, end = [_text(mark) if mark else "" for mark in (tag.lead, tag.end)]
    if isinstance(body, WithEnd):
        body, end = body.grammar, ""
    if isinstance(body, str):
        grammars.append({"name": f"inner_{n}", "lark_grammar": body})
        return [f"body_{n}: {lead} @inner_{n} {end}"]
    return [f"body_{n}: {lead} BODY_{n}", f"BODY_{n}: {_up_to(write_pattern(body), tag.end)}"]


def pattern_with_end(pattern: str, end: str) -> WithEnd:
    """Returns the grammar of the texts of a pattern up to the first ``end``."""
    return WithEnd(f"start: BODY\nBODY: {_up_to(pattern, end)}\n{ALL_TOKENS_ALLOWED}")


def regex_with_end(regex: Regex, end: str) -> WithEnd:
    """Returns the grammar of the texts of an expression, each up to the first ``end`` after a whole text."""
    ended = f"/{write_pattern(regex)}/ {_text(end)}"
    lines = ["start: BODY", f"BODY: ({ended}) & ~({ended} /(?s:.+)/)", ALL_TOKENS_ALLOWED]
    return WithEnd("\n".join(lines), regex)


def _up_to(pattern: str, end: str) -> str:
    mark = _text(end)
    return f"(/{pattern}/ {mark}) & ~(/(?s:.*)/ {mark} /(?s:.+)/)" if end else f"/{pattern}/"


def either_grammar(first: str, second: str) -> str:
    """Returns the union of two grammars, each in Lark's notation; ``first`` may also be a grammar of tags."""
    lines = ["start: @first | @second", ALL_TOKENS_ALLOWED]
    main, *inner = json.loads(first)["grammars"] if first.startswith("{") else [{"lark_grammar": first}]
    either = [
        {"name": "text", "lark_grammar": "\n".join(lines)},
        {**main, "name": "first"},
        {"name": "second", "lark_grammar": second},
    ]
    return json.dumps({"grammars": [*either, *inner]})


def text_apart(pattern: str, begins: Sequence[str]) -> str:
    """Returns the grammar of texts that match the pattern and do not begin with any of ``begins``."""
    some_begin = "|".join([_text(begin) for begin in begins])
    apart = f" & ~(({some_begin}) /(?s:.*)/)" if begins else ""
    return f"start: TEXT\nTEXT: /{pattern}/{apart}\n{ALL_TOKENS_ALLOWED}"


def _joined(lines: list[str], grammars: list[dict[str, str]]) -> str:
    main = {"name": "text", "lark_grammar": "\n".join([*lines, ALL_TOKENS_ALLOWED])}
    return json.dumps({"grammars": [main, *grammars]})


def _text(text: str) -> str:
    return f"/{literal_pattern(text)}/"
