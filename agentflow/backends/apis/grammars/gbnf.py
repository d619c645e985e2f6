"""Patterns as grammars in GBNF, the notation of llama.cpp, which SGLang reads as EBNF.

``read_pattern`` makes the tree of a rule from a pattern of Python's ``re``, and ``written_part`` writes it in
the part of the notation that both servers have. Parts of a pattern that the notation cannot express exactly
are refused.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Mapping, Sequence, Set
from functools import cache, lru_cache, wraps
from re import _constants  # type: ignore[attr-defined]
from typing import Any, Final

from agentflow.errors import NotSupported
from agentflow.protocol.bounds.client_pattern import parsed
from agentflow.protocol.grammars.char_ranges import (
    MAX_CODE_POINT,
    Ranges,
    all_but,
    merge_ranges,
    without_surrogates,
)
from agentflow.protocol.grammars.parts import EMPTY, Chars, Fixed, GrammarPart, Named, OneOf, Repeated, Series

MAX_REPEATS: Final = 2_000
"""The limit of llama.cpp for one repeat."""
MAX_CHARS: Final = 20_000
"""The longest pattern or grammar, which takes some tenths of a second."""
MAX_DEPTH: Final = 100
MAX_CATEGORIES: Final = 50
r"""The most ``\w`` and the like in a pattern: each has up to 10,000 characters in GBNF."""
_CATEGORY: Final = re.compile(r"\\[dDsSwW]")
_PARTS_WITH_CATEGORIES: Final = ((0, 0xD7FF), (0xE000, 0x3FFFF))
"""Later planes have no letters, digits and spaces."""
MAX_REMEMBERED: Final = 32

ANY_CHAR: Final = Chars(without_surrogates(((0, MAX_CODE_POINT),)))


def remembered(translate: Callable[[str], str]) -> Callable[[str], str]:
    """Keeps the latest results and refusals: translations may take a tenth of a second of the event loop, and
    the gens of a program have the same constraint."""

    @lru_cache(maxsize=MAX_REMEMBERED)
    def outcome(source: str) -> tuple[str, str | None]:
        try:
            return translate(source), None
        except NotSupported as error:
            return "", str(error)

    @wraps(translate)
    def remember(source: str) -> str:
        written, refusal = outcome(source)
        if refusal is not None:
            raise NotSupported(refusal)
        return written

    return remember


@remembered
def gbnf_of_pattern(pattern: str) -> str:
    r"""Returns a grammar of the texts that match all of a pattern.

    >>> gbnf_of_pattern("[a-c]+|x{2}")
    'root ::= [a-c]+ | "x"{2,2}'

    Raises:
        NotSupported: The notation cannot express it.
    """
    return f"root ::= {written_part(without_empty_rounds(read_pattern(pattern), {}, set()))}"


def read_pattern(pattern: str) -> GrammarPart:
    """Returns the tree of a pattern. ``NotSupported`` for parts that GBNF cannot express."""
    if len(pattern) > MAX_CHARS:
        raise cannot_express(f"it has more than {MAX_CHARS:,} characters")
    if len(_CATEGORY.findall(pattern)) > MAX_CATEGORIES:
        raise cannot_express(rf"it has more than {MAX_CATEGORIES} of \w, \d and \s")
    try:
        tree = parsed(pattern)
        return _row(list(tree), tree.state.flags, at_start=True, at_end=True, depth=0)
    except (re.error, OverflowError, ValueError) as error:
        raise cannot_express(f"not a valid Python pattern: {error}") from None
    except RecursionError:
        raise cannot_express("it is nested too deeply") from None


def cannot_express(what: str) -> NotSupported:
    """The error for a constraint that has no equal grammar in GBNF."""
    return NotSupported(
        f"the constraint cannot be written in GBNF, the notation of the server's grammars: {what}"
    )


def _row(items: Sequence[Any], flags: int, *, at_start: bool, at_end: bool, depth: int) -> GrammarPart:
    if flags & re.IGNORECASE:
        raise cannot_express("case is ignored; write both cases, as in [Yy]es")
    if depth > MAX_DEPTH:
        raise cannot_express("it is nested too deeply")
    last = len(items) - 1
    parts = [
        _part(op, value, flags, at_start=at_start and n == 0, at_end=at_end and n == last, depth=depth)
        for n, (op, value) in enumerate(items)
    ]
    kept = tuple([part for part in parts if part != EMPTY])
    return kept[0] if len(kept) == 1 else Series(kept)


def _part(op: Any, value: Any, flags: int, *, at_start: bool, at_end: bool, depth: int) -> GrammarPart:
    if op is _constants.LITERAL:
        return Chars(((value, value),))
    if op is _constants.NOT_LITERAL:
        return _all_but(((value, value),))
    if op is _constants.ANY:
        return ANY_CHAR if flags & re.DOTALL else _all_but(((10, 10),))
    if op is _constants.IN:
        return _char_class(value, is_ascii=bool(flags & re.ASCII))
    if op is _constants.BRANCH:
        rows = [
            _row(list(option), flags, at_start=at_start, at_end=at_end, depth=depth + 1)
            for option in value[1]
        ]
        return OneOf(tuple(rows))
    if op is _constants.SUBPATTERN:
        _, added, removed, inside = value
        inner = (flags | added) & ~removed
        return _row(list(inside), inner, at_start=at_start, at_end=at_end, depth=depth + 1)
    if op in (_constants.MAX_REPEAT, _constants.MIN_REPEAT):
        least, most, inside = value
        part = _row(list(inside), flags, at_start=False, at_end=False, depth=depth + 1)
        return repeated(part, int(least), None if most is _constants.MAXREPEAT else int(most))
    if op is _constants.AT and ((at_start and value in _STARTS) or (at_end and value in _ENDS)):
        return EMPTY
    raise cannot_express(f"it has {str(op).lower().replace('_', ' ')}")


_STARTS: Final = (_constants.AT_BEGINNING, _constants.AT_BEGINNING_STRING)
_ENDS: Final = (_constants.AT_END, _constants.AT_END_STRING)
_CATEGORIES: Final = {
    _constants.CATEGORY_DIGIT: r"\d",
    _constants.CATEGORY_NOT_DIGIT: r"\D",
    _constants.CATEGORY_SPACE: r"\s",
    _constants.CATEGORY_NOT_SPACE: r"\S",
    _constants.CATEGORY_WORD: r"\w",
    _constants.CATEGORY_NOT_WORD: r"\W",
}


def repeated(part: GrammarPart, least: int, most: int | None) -> GrammarPart:
    """The part ``least`` to ``most`` times. ``NotSupported`` for more than the servers accept."""
    if max(least, most or 0) > MAX_REPEATS:
        raise cannot_express(f"it repeats a part more than {MAX_REPEATS:,} times")
    if most is not None and least > most:
        raise cannot_express(f"it repeats a part at least {least} and at most {most} times")
    return EMPTY if most == 0 or part == EMPTY else Repeated(part, least, most)


def _char_class(members: Sequence[Any], *, is_ascii: bool) -> Chars:
    is_negated = members[0][0] is _constants.NEGATE
    ranges: list[tuple[int, int]] = []
    for op, value in members[1:] if is_negated else members:
        if op is _constants.LITERAL:
            ranges.append((value, value))
        elif op is _constants.RANGE:
            ranges.append((value[0], value[1]))
        else:
            ranges += _category_ranges(_CATEGORIES[value], is_ascii)
    merged = merge_ranges(ranges)
    found = _all_but(merged) if is_negated else Chars(without_surrogates(merged))
    if not found.ranges:
        raise cannot_express("it has a class without characters")
    return found


def _all_but(ranges: Ranges) -> Chars:
    return Chars(without_surrogates(all_but(ranges)))


@cache
def _category_ranges(escape: str, is_ascii: bool) -> Ranges:
    r"""The characters of ``\d`` and its like, as Python has them, without surrogates."""
    if escape.isupper():
        return _all_but(_category_ranges(escape.lower(), is_ascii)).ranges
    found = re.compile(f"{escape}+", re.ASCII if is_ascii else 0).finditer
    return tuple(
        [
            (first + run.start(), first + run.end() - 1)
            for first, last in _PARTS_WITH_CATEGORIES
            for run in found(array("I", range(first, last + 1)).tobytes().decode("utf-32"))
        ]
    )


NOT_EMPTY: Final = "'"
"""Follows the name of a rule in the name of its texts without the empty one."""


def without_empty_rounds(
    part: GrammarPart, terminals: Mapping[str, GrammarPart], nullable: Set[str]
) -> GrammarPart:
    """Returns a part with the same texts in which no part that is repeated without limit may be empty:
    llama.cpp takes such a repeat for left recursion. It may contain rules with ``NOT_EMPTY``.

    Args:
        part: The part.
        terminals: The terminals by name.
        nullable: The rules and terminals that may be empty.
    """

    def rounds(one: GrammarPart) -> list[GrammarPart]:
        """The options of a part, without the empty text, that together repeat to the same texts."""
        if not may_be_empty(one, nullable):
            return [rewritten(one)]
        match one:
            case Named(name) if name in terminals:
                return rounds(terminals[name])
            case Named(name):
                return [Named(name + NOT_EMPTY)]
            case Repeated(inner):
                return rounds(inner)
            case Series(parts) | OneOf(parts):
                return [option for inner in parts for option in rounds(inner)]
        return []

    def rewritten(one: GrammarPart) -> GrammarPart:
        match one:
            case Repeated(inner, _, None) if may_be_empty(inner, nullable):
                options = rounds(inner)
                whole = options[0] if len(options) == 1 else OneOf(tuple(options))
                return Repeated(whole, 0, None) if options else EMPTY
            case Repeated(inner, least, most):
                return Repeated(rewritten(inner), least, most)
            case Series(parts):
                return Series(tuple([rewritten(inner) for inner in parts]))
            case OneOf(options):
                return OneOf(tuple([rewritten(inner) for inner in options]))
        return one

    return rewritten(part)


def may_be_empty(part: GrammarPart, nullable: Set[str]) -> bool:
    """Whether the empty text is a text of the part. ``nullable``: the rules that may be empty."""
    match part:
        case Named(name):
            return name in nullable
        case Series(parts):
            return all(may_be_empty(one, nullable) for one in parts)
        case OneOf(options):
            return any(may_be_empty(option, nullable) for option in options)
        case Repeated(inner, least):
            return least == 0 or may_be_empty(inner, nullable)
        case _:
            return False


def written_part(part: GrammarPart, *, is_inner: bool = False) -> str:
    """Returns a part as the right side of a rule; ``is_inner``: as an operand of another part."""
    match part:
        case Named(name):
            return name
        case Fixed(text):
            return _written_text(text)
        case Chars(ranges):
            return _written_chars(ranges)
        case Repeated(inner, least, most):
            return _written_operand(inner) + _written_times(least, most)
        case Series(parts):
            if not parts:
                return '""'
            written = _written_row(parts)
            return f"({written})" if is_inner and len(parts) > 1 else written
        case OneOf(options):
            written = " | ".join([written_part(option) for option in options])
            return f"({written})" if is_inner else written


def _written_operand(part: GrammarPart) -> str:
    """A part that is repeated. Two repetitions in a row need brackets, and so do two characters."""
    written = written_part(part, is_inner=True)
    is_single = isinstance(part, Chars | Named | OneOf) or (isinstance(part, Series) and len(part.parts) > 1)
    return written if is_single else f"({written})"


def _written_row(parts: Sequence[GrammarPart]) -> str:
    """The parts of a series; characters after one another are a string."""
    found: list[str] = []
    text = ""
    for part in parts:
        match part:
            case Fixed(more):
                text += more
            case Chars(((first, last),)) if first == last:
                text += chr(first)
            case _:
                found += [_written_text(text)] if text else []
                text = ""
                found.append(written_part(part, is_inner=True))
    return " ".join([*found, _written_text(text)] if text else found)


def _written_text(text: str) -> str:
    return '"' + "".join([_escaped(ord(char), in_class=False) for char in text]) + '"'


def _written_chars(ranges: Ranges) -> str:
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
        return _written_text(chr(ranges[0][0]))
    if ranges[0][0] > 0:
        return f"[{_written_ranges(ranges)}]"
    # GBNF has no NUL, but its negated classes contain it.
    others = without_surrogates(all_but(ranges))
    return f"[^{_written_ranges(others)}]" if others else r'("\u000a" | [^\u000a])'


def _written_ranges(ranges: Ranges) -> str:
    return "".join(
        [
            _escaped(first, in_class=True) + (f"-{_escaped(last, in_class=True)}" if last > first else "")
            for first, last in ranges
        ]
    )


def _escaped(point: int, *, in_class: bool) -> str:
    """A character of a string or of a class. All servers read these escapes alike, unlike those with fewer
    digits."""
    if point == 0:
        raise cannot_express("it has the character NUL")
    char = chr(point)
    if char.isascii() and (char.isalnum() or (char in " .,:;!?/+*=_<>(){}'&%#@~|$`" and not in_class)):
        return char
    return f"\\u{point:04x}" if point <= 0xFFFF else f"\\U{point:08x}"


def _written_times(least: int, most: int | None) -> str:
    times = {(0, None): "*", (1, None): "+", (0, 1): "?"}
    return times.get((least, most)) or f"{{{least},{'' if most is None else most}}}"
