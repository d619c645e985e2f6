"""Tags in free text as a grammar: anything may be written, but where a tag begins, what follows is of the
tag's kind until it ends.

Free text to the end is one terminal, in which no tag's ``begin`` occurs; free text before a tag is another,
and ends lazily, with the first ``begin``. So the text of a mark cannot be taken for free text, however its
characters are spread over tokens.

Tags in a row, without free text, need no such care: they are an expression where their bodies are.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TypeAlias

from agentflow.engine.grammar.llguidance import ALL_TOKENS_ALLOWED
from agentflow.engine.grammar.llguidance_pattern import literal_pattern, pattern_of
from agentflow.engine.grammar.regex_tree import Choice, Regex, Repeat, literal
from agentflow.engine.grammar.regex_tree import Sequence as RegexSequence
from agentflow.protocol.constraint import TagRule

TagBody: TypeAlias = "Regex | str"
"""A regular expression, or a grammar in Lark's notation that has a ``start``."""


def tag_grammar(tags: Sequence[TagRule], bodies: Sequence[TagBody], max_tags: int | None = None) -> str:
    """The grammar of free text with at most ``max_tags`` of these tags (None: any number); ``bodies`` are
    what ``TagRule.source`` says, compiled.

    A body that is an expression ends at the first ``end``. One that needs a grammar ends where the grammar
    does: an ``end`` inside one of its JSON strings is text.
    """
    some_begin = "|".join([_text(tag.begin) for tag in tags])
    lines = [
        f"start: {'tag*' if max_tags is None else f'tag{{0,{max_tags}}}'} FREE_TEXT?",
        f"FREE_TEXT: /(?s:.+)/ & ~(/(?s:.*)/ ({some_begin}) /(?s:.*)/)",
        "tag: " + " | ".join([f"tag_{n}" for n in range(len(tags))]),
    ]
    grammars: list[dict[str, str]] = []
    for n, (tag, body) in enumerate(zip(tags, bodies, strict=True)):
        lines.append(f"until_{n}[lazy]: /(?s:.*){literal_pattern(tag.begin)}/")
        lines.append(f"tag_{n}: until_{n} body_{n}")
        lines += _body_lines(n, tag, body, grammars)
    return _joined(lines, grammars)


def row_grammar(
    tags: Sequence[TagRule], bodies: Sequence[TagBody], between: str, max_tags: int | None
) -> str:
    """The grammar of 1 to ``max_tags`` of these tags (None: any number) with just ``between`` between two."""
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
    """The same as an expression."""
    options = [
        RegexSequence((literal(tag.begin + tag.lead), body, literal(tag.end)))
        for tag, body in zip(tags, bodies, strict=True)
    ]
    one = options[0] if len(options) == 1 else Choice(tuple(options))
    if max_tags == 1:
        return one
    most = None if max_tags is None else max_tags - 1
    return RegexSequence((one, Repeat(RegexSequence((literal(between), one)), 0, most)))


def tag_alone(tag: TagRule, body: TagBody) -> str:
    """The grammar of what stands behind the tag's ``begin``, its ``lead`` and ``end`` included."""
    grammars: list[dict[str, str]] = []
    return _joined(["start: body_0", *_body_lines(0, tag, body, grammars)], grammars)


def _body_lines(n: int, tag: TagRule, body: TagBody, grammars: list[dict[str, str]]) -> list[str]:
    """The rule ``body_n``; what it refers to is put into ``grammars``."""
    lead, end = [_text(mark) if mark else "" for mark in (tag.lead, tag.end)]
    if isinstance(body, str):
        grammars.append({"name": f"inner_{n}", "lark_grammar": body})
        return [f"body_{n}: {lead} @inner_{n} {end}"]
    first_end = f"BODY_{n}: (/{pattern_of(body)}/ {end})"
    if end:
        first_end += f" & ~(/(?s:.*)/ {end} /(?s:.+)/)"
    return [f"body_{n}: {lead} BODY_{n}", first_end]


def either_grammar(first: str, second: str) -> str:
    """The grammar of what one of two grammars says: each in Lark's notation, or, the ``first``, of tags."""
    lines = ["start: @first | @second", ALL_TOKENS_ALLOWED]
    main, *inner = json.loads(first)["grammars"] if first.startswith("{") else [{"lark_grammar": first}]
    either = [
        {"name": "text", "lark_grammar": "\n".join(lines)},
        {**main, "name": "first"},
        {"name": "second", "lark_grammar": second},
    ]
    return json.dumps({"grammars": [*either, *inner]})


def text_apart(pattern: str, begins: Sequence[str]) -> str:
    """The grammar of texts that match the pattern and begin with none of these."""
    some_begin = "|".join([_text(begin) for begin in begins])
    apart = f" & ~(({some_begin}) /(?s:.*)/)" if begins else ""
    return f"start: TEXT\nTEXT: /{pattern}/{apart}\n{ALL_TOKENS_ALLOWED}"


def _joined(lines: list[str], grammars: list[dict[str, str]]) -> str:
    main = {"name": "text", "lark_grammar": "\n".join([*lines, ALL_TOKENS_ALLOWED])}
    return json.dumps({"grammars": [main, *grammars]})


def _text(text: str) -> str:
    return f"/{literal_pattern(text)}/"
