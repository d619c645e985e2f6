"""Which regular expressions may end a text: the check that every ``stop_regex`` passes, on both sides.

The frontend compiles a pattern with Python's ``re``; the engine searches with the package ``regex``, which
can match a text that still grows. What the two read differently is refused here, and so is what would
take much time or memory to compile: ``regex`` writes out what is repeated a counted number of times.
"""

from __future__ import annotations

import functools
import re
import warnings

from agentflow.errors import BadArgument

MAX_STOP_REGEX_CHARS = 512
# Characters, classes and groups with all counted repeats written out. At this limit compiling takes some
# milliseconds and 4 MB.
MAX_WRITTEN_OUT = 20_000

_PIECE = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\{(\d*),?(\d*)\}|.", re.DOTALL)
# What stands in braces and is text to ``re``, but approximate matching to ``regex``, as in ``(?:end){e<=1}``.
_APPROXIMATE = re.compile(r"(?<!\\)(?:\\\\)*\{[\s\d<=]*[deis]\s*[<,}+:]")
# The one flag under which the two read braces differently.
_VERBOSE = re.compile(r"\(\?[a-zA-Z]*x[a-zA-Z]*[-:)]")


def check_stop_regex(pattern: str) -> None:
    """Returns if ``pattern`` may be a ``stop_regex``; ``BadArgument`` says why not.

    >>> check_stop_regex(r"\\n(Question|Answer):")
    """
    if isinstance(pattern, str) and 0 < len(pattern) <= MAX_STOP_REGEX_CHARS:
        wrong = _what_is_wrong(pattern)
    else:
        wrong = f"must be a regular expression of 1 to {MAX_STOP_REGEX_CHARS} characters"
    if wrong:
        raise refused(wrong, pattern)


def refused(wrong: str, pattern: str) -> BadArgument:
    """The error about a pattern; ``wrong`` says what it must be."""
    shown = repr(pattern) if len(repr(pattern)) <= 100 else f"{pattern[:80]!r}…"
    return BadArgument(f"gen: stop_regex {wrong}, not {shown}")


MATCHES_NOTHING = "must not match the empty text, or it would end every text at once"
"""What is wrong with ``a*``. Who searches finds out: the check runs no pattern, for that can take long."""


@functools.lru_cache(maxsize=256)
def _what_is_wrong(pattern: str) -> str:
    if _APPROXIMATE.search(pattern):
        return "must not have braces that ask for approximate matching (a literal brace is \\{)"
    if _VERBOSE.search(pattern):
        return "must not use the verbose flag x"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # a set that will mean something else some day
            re.compile(pattern)
    except (re.error, Warning, OverflowError, RecursionError) as error:
        return f"must be a regular expression that Python's re takes ({error})"
    if _written_out(pattern) > MAX_WRITTEN_OUT:
        return "must have smaller repeat counts (they are written out in memory)"
    return ""


def _written_out(pattern: str) -> int:
    """How large a pattern that ``re`` takes is once each counted repeat stands there as often as it may."""
    sizes = [0]  # of the groups that are open, the outermost first
    last = 0  # what a repeat would repeat
    for piece in _PIECE.finditer(pattern):
        text = piece[0]
        if text == "(":
            sizes.append(1)
            continue
        if piece[1] or piece[2]:
            times = max(1, int(piece[1] or 0), int(piece[2] or 0))
            sizes[-1] += last * (times - 1)
            last *= times
            continue
        last = sizes.pop() if text == ")" and len(sizes) > 1 else 1
        sizes[-1] += last
    return sum(sizes)
