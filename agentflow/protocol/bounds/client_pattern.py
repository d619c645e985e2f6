"""Regular expressions of clients: their size, and a cache of the compiled ones that is bounded in bytes.

The package ``regex`` writes repeated groups out in memory: ``(?:(?:ab|c){300}){300}`` takes 100 MB. The
caches of ``re`` and ``regex`` are bounded by count, not by bytes, so these patterns stay out of them.
"""

from __future__ import annotations

import math
import re
import sys
import threading
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from re import _parser  # type: ignore[attr-defined]
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import regex

MAX_WRITTEN_OUT = 20_000
"""Characters, classes and groups after all counted repeats are expanded. At this limit compiling takes some
milliseconds and 4 MB."""
CACHE_BYTES = 16_000_000
"""The memory for compiled patterns that a process keeps, the most recently used ones."""

_ENTRY_BYTES = 500
_REPEATS = (_parser.MAX_REPEAT, _parser.MIN_REPEAT, _parser.POSSESSIVE_REPEAT)
_ESCAPE = re.compile(r"\\(?:[pP]\{[^}]*\}|.)", re.DOTALL)
# Under this flag, ``regex`` allows white space and comments inside braces.
_VERBOSE = re.compile(r"\(\?[a-zA-Z0-9]*x[a-zA-Z0-9]*[-:)]")
_SET_SIGNS = {"-": "difference", "&": "intersection", "~": "symmetric difference", "|": "union"}
_filters = threading.Lock()


class InvalidPattern(ValueError):
    """The pattern is not a regular expression, or it would be too large. The message has the reason."""


class CannotCheck(Exception):
    """A check of a client's text exceeds its limits, or is not possible. The message has the reason."""


def is_verbose(pattern: str) -> bool:
    """Whether a part of the pattern has the flag x."""
    return _VERBOSE.search(pattern) is not None


def doubtful_set(pattern: str) -> str:
    r"""The name of a construct in a set of characters that may change its meaning in a future Python, about
    which ``re`` warns. Empty if there is none.

    >>> doubtful_set("[[a]b]"), doubtful_set("[a-z--b]"), doubtful_set(r"[\[a&]")
    ('nested set', 'set difference', '')
    """
    at = 0
    while at < len(pattern):
        if pattern.startswith("(?#", at):
            at = pattern.find(")", at) + 1 or len(pattern)
        elif pattern[at] == "\\":
            at += 2
        elif pattern[at] == "[":
            if pattern.startswith("[", at + 1):
                return "nested set"
            at += 2 if pattern.startswith("^", at + 1) else 1
            is_first = True
            while at < len(pattern) and (is_first or pattern[at] != "]"):
                sign = pattern[at]
                if not is_first and sign in _SET_SIGNS and pattern.startswith(sign, at + 1):
                    return f"set {_SET_SIGNS[sign]}"
                at += 2 if sign == "\\" else 1
                is_first = False
                if pattern.startswith("-", at) and not pattern.startswith("-]", at):
                    if pattern.startswith("--", at):
                        return f"set {_SET_SIGNS['-']}"
                    at += 3 if pattern.startswith("-\\", at) else 2  # to the end of a range
            at += 1
        else:
            at += 1
    return ""


def parsed(pattern: str) -> Any:
    """The tree of a pattern, as ``re`` parses it, without warnings about doubtful sets. Raises the errors of
    ``re``.

    Warning filters belong to the whole process: if two threads change them concurrently, they may remain
    changed. They are therefore changed only if there is a warning.
    """
    if not is_verbose(pattern) and not doubtful_set(pattern):
        return _parser.parse(pattern)
    with _filters, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _parser.parse(pattern)


def written_out(pattern: str) -> float:
    """An upper bound of the size of a pattern after all counted repeats are expanded. Infinite if braces may
    be repeats for ``regex`` only.

    >>> written_out("(?:ab|c){300}"), written_out(r"[0-9]{3}")
    (1200, 3)
    """
    if is_verbose(pattern) and "{" in pattern:
        return math.inf
    # A class of characters stands for properties, which ``re`` does not know.
    known = _ESCAPE.sub(lambda found: r"\w" if found[0][1] in "pP" else found[0], pattern)
    try:
        return _size(parsed(known))
    except (re.error, OverflowError, RecursionError):
        # Syntax of ``regex`` alone: as if each number repeated all.
        return len(pattern) * math.prod([max(1, int(number)) for number in re.findall("[0-9]+", pattern)])


class PatternCache:
    """A cache of compiled patterns, which take ``num_bytes`` of memory, at most ``most_bytes``. Thread-safe.

    >>> cache = PatternCache(10_000)
    >>> cache.compiled("a+") is cache.compiled("a+")
    True
    """

    def __init__(self, most_bytes: int) -> None:
        self.num_bytes = 0
        self._most_bytes = most_bytes
        self._patterns: OrderedDict[str, regex.Pattern[str]] = OrderedDict()
        self._lock = threading.Lock()

    def compiled(self, source: str) -> regex.Pattern[str]:
        """The compiled pattern. ``InvalidPattern``."""
        with self._lock:
            found = self._patterns.get(source)
            if found is not None:
                self._patterns.move_to_end(source)
                return found
        made = _compile(source)
        with self._lock:
            if source not in self._patterns:
                self._patterns[source] = made
                self.num_bytes += _num_bytes(source, made)
            while self.num_bytes > self._most_bytes:
                self.num_bytes -= _num_bytes(*self._patterns.popitem(last=False))
        return made


compiled = PatternCache(CACHE_BYTES).compiled
"""Compiles a pattern, or finds it in the process's cache. Raises ``InvalidPattern``."""


def _compile(source: str) -> regex.Pattern[str]:
    if len(source) > MAX_WRITTEN_OUT or written_out(source) > MAX_WRITTEN_OUT:
        raise InvalidPattern("its repeat counts are too large: they are written out in memory")
    import regex  # slow to load, and few programs need it

    try:
        return regex.compile(source, cache_pattern=False)
    except (RecursionError, MemoryError):
        raise InvalidPattern("it is nested too deeply") from None
    except (regex.error, OverflowError) as error:
        raise InvalidPattern(str(error)) from None
    finally:
        # The package remembers the source of every pattern, cached or not, until its cache is cleared.
        regex.purge()


def _num_bytes(source: str, pattern: regex.Pattern[str]) -> int:
    return _ENTRY_BYTES + sys.getsizeof(source) + sys.getsizeof(pattern)


def _size(sequence: Any) -> int:
    """The size of a sequence that ``re`` parsed."""
    total = 0
    for operator, argument in sequence:
        if operator in _REPEATS:
            least, most, repeated = argument
            times = least if most is _parser.MAXREPEAT else most
            total += max(1, int(times)) * max(1, _size(repeated))
        elif operator is _parser.IN:
            total += 1 + len(argument) // 8
        else:
            total += 1 + sum([_size(part) for part in _sequences_in(argument)])
    return total


def _sequences_in(argument: Any) -> Iterator[Any]:
    """The sequences in the argument of an operator: the alternatives of a branch, the content of a group."""
    if isinstance(argument, _parser.SubPattern):
        yield argument
    elif isinstance(argument, tuple | list):
        for part in argument:
            yield from _sequences_in(part)
