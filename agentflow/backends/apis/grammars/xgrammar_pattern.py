"""Regular expressions for vLLM and SGLang, as their default backend (xgrammar 0.2.8) reads them.

It takes ``[\\^…]`` for a negated class, and lets ``.`` match a line break. Patterns are rewritten so that
they mean the same there and to Python.
"""

from __future__ import annotations

import re

from agentflow.protocol.grammars.pattern_parts import pattern_parts

_WITH_CARET = re.compile(r"\[(?:\\\^|\\x5[eE]|\\u005[eE])(?!-[^\]])(?P<rest>(?:\\.|[^\]\\])*)\]", re.DOTALL)


def xgrammar_pattern(pattern: str) -> str:
    r"""The pattern with the same meaning.

    >>> xgrammar_pattern(r"[\^\]]{2}."), xgrammar_pattern(r"[\^]"), xgrammar_pattern(r"\.[.a]")
    ('(?:[\\]]|\\^){2}[^\\n]', '\\^', '\\.[.a]')
    """
    return "".join([_written(part[0]) for part in pattern_parts(pattern)])


def _written(part: str) -> str:
    if part == ".":
        return r"[^\n]"
    found = _WITH_CARET.fullmatch(part)
    if found is None:
        return part
    rest = found["rest"].lstrip("^")
    return rf"(?:{xgrammar_pattern(f'[{rest}]')}|\^)" if rest else r"\^"
