"""Regular expressions for vLLM and SGLang, as their default backend (xgrammar 0.2.8) reads them.

It takes ``[\\^…]`` for a negated class, and lets ``.`` match a line break. Patterns are rewritten so that
they mean the same there and to Python.
"""

from __future__ import annotations

import re

_PART = re.compile(
    r"(?P<caret>\[(?:\\\^|\\x5[eE]|\\u005[eE])(?!-[^\]])(?P<rest>(?:\\.|[^\]\\])*)\])"
    r"|(?P<other>\[\^?\]?(?:\\.|[^\]\\])*\]|\\.)"
    r"|(?P<dot>\.)",
    re.DOTALL,
)


def xgrammar_pattern(pattern: str) -> str:
    r"""The pattern with the same meaning.

    >>> xgrammar_pattern(r"[\^\]]{2}."), xgrammar_pattern(r"[\^]"), xgrammar_pattern(r"\.[.a]")
    ('(?:[\\]]|\\^){2}[^\\n]', '\\^', '\\.[.a]')
    """
    return _PART.sub(_written, pattern)


def _written(found: re.Match[str]) -> str:
    if found["dot"]:
        return r"[^\n]"
    if found["other"]:
        return found["other"]
    rest = found["rest"]
    if not rest:
        return r"\^"
    rest = rest.lstrip("^") or r"\^"
    return rf"(?:{xgrammar_pattern(f'[{rest}]')}|\^)"
