"""Which regular expressions may end a text: the check that every ``stop_regex`` passes, on both sides.

The frontend compiles a pattern with Python's ``re``; the engine searches with the package ``regex``, which
can match a text that still grows. What the two read differently is refused here, and so is what would
take much time or memory to compile: ``regex`` writes out what is repeated a counted number of times.
"""

from __future__ import annotations

import functools
import math
import re
import warnings

from agentflow.errors import BadArgument

MAX_STOP_REGEX_CHARS = 512
# The pattern's length times all its repeat counts: its size if each repeat stood within another. At this
# limit compiling takes a tenth of a second and 100 MB; a UUID written with its five counts has 400,000.
MAX_WRITTEN_OUT_CHARS = 500_000

_COUNTED = re.compile(r"\{(\d*,?\d*)\}")
# What stands in braces and is text to ``re``, but approximate matching to ``regex``, as in ``(?:end){e<=1}``.
_APPROXIMATE = re.compile(r"(?<!\\)\{[\s\d<=]*[deis]\s*[<,}+:]")
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
        shown = repr(pattern) if len(repr(pattern)) <= 100 else f"{pattern[:80]!r}…"
        raise BadArgument(f"gen: stop_regex {wrong}, not {shown}")


@functools.lru_cache(maxsize=256)
def _what_is_wrong(pattern: str) -> str:
    if _APPROXIMATE.search(pattern):
        return "must not have braces that ask for approximate matching (a literal brace is \\{)"
    if _VERBOSE.search(pattern):
        return "must not use the verbose flag x"
    counts = [number for found in _COUNTED.findall(pattern) for number in found.split(",") if number]
    # No count of a pattern so short has a number of digits that Python refuses to read.
    if math.prod(max(1, int(number)) for number in counts) * len(pattern) > MAX_WRITTEN_OUT_CHARS:
        return "must have smaller repeat counts (it is written out in memory)"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # a set that will mean something else some day
            compiled = re.compile(pattern)
    except (re.error, Warning, OverflowError, RecursionError) as error:
        return f"must be a regular expression that Python's re takes ({error})"
    return "must not match the empty text, or it would end every text at once" if compiled.match("") else ""
