"""Tags in free text as a grammar: anything may be written, but where a tag begins, what follows is of the
tag's kind until it ends.

Free text to the end is one terminal, in which no tag's ``begin`` occurs; free text before a tag is another,
and ends lazily, with the first ``begin``. So the text of a mark cannot be taken for free text, however its
characters are spread over tokens.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TypeAlias

from agentflow.constraint import TagRule
from agentflow.server.core.regex_tree import Regex
from agentflow.server.llguidance_grammar import ALL_TOKENS_ALLOWED
from agentflow.server.llguidance_pattern import literal_pattern, pattern_of

TagBody: TypeAlias = "Regex | str"
"""A regular expression, or a grammar in Lark's notation that has a ``start``."""


def tag_grammar(tags: Sequence[TagRule], bodies: Sequence[TagBody]) -> str:
    """The grammar of free text with these tags; ``bodies`` are what ``TagRule.source`` says, compiled.

    A body that is an expression ends at the first ``end``. One that needs a grammar ends where the grammar
    does: an ``end`` inside one of its JSON strings is text.
    """
    some_begin = "|".join([_text(tag.begin) for tag in tags])
    lines = [
        "start: tag* FREE_TEXT?",
        f"FREE_TEXT: /(?s:.+)/ & ~(/(?s:.*)/ ({some_begin}) /(?s:.*)/)",
        "tag: " + " | ".join([f"tag_{n}" for n in range(len(tags))]),
    ]
    grammars: list[dict[str, str]] = []
    for n, (tag, body) in enumerate(zip(tags, bodies, strict=True)):
        lines.append(f"until_{n}[lazy]: /(?s:.*){literal_pattern(tag.begin)}/")
        if isinstance(body, str):
            grammars.append({"name": f"body_{n}", "lark_grammar": body})
            lines.append(f"tag_{n}: until_{n} @body_{n} {_text(tag.end)}")
        else:
            end = _text(tag.end)
            lines.append(f"tag_{n}: until_{n} BODY_{n}")
            lines.append(f"BODY_{n}: (/{pattern_of(body)}/ {end}) & ~(/(?s:.*)/ {end} /(?s:.+)/)")
    lines.append(ALL_TOKENS_ALLOWED)
    main = {"name": "text", "lark_grammar": "\n".join(lines)}
    return json.dumps({"grammars": [main, *grammars]})


def _text(text: str) -> str:
    return f"/{literal_pattern(text)}/"
