"""Regular expressions as trees, parsed from patterns of Python's ``re``.

A tree defines which whole texts match, as with ``re.fullmatch``, without groups or an order of preference.
Anchors and word boundaries become look-arounds. JSON schemas become trees, too (``json_schema``). Character
categories and case-insensitive sets are looked up in Python's ``re``, so they follow the Unicode version of
the running interpreter.

>>> parse_regex(r"^a{2}|b$")
Alternation(options=(Repeat(part=CharSet(ranges=((97, 97),)), least=2, most=2), CharSet(ranges=((98, 98),))))
>>> answer = Alternation((literal("yes"), literal("no")))
>>> digits = Repeat(CharSet(((0x30, 0x39),)), 1, 3)
>>> record = Concatenation((answer, literal(", "), digits))  # "yes, 42"
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache, lru_cache
from re import _parser  # type: ignore[attr-defined]
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from agentflow.errors import BadArgument
from agentflow.protocol.bounds.client_pattern import parsed
from agentflow.protocol.grammars.char_ranges import MAX_CODE_POINT, Ranges, all_but, merge_ranges


@dataclass(frozen=True, slots=True)
class CharSet:
    """One character of these ranges. Raises ``ValueError`` if they are not sorted and disjoint
    (``merge_ranges``)."""

    ranges: Ranges

    def __post_init__(self) -> None:
        after = -1
        for first, last in self.ranges:
            if not after < first <= last <= MAX_CODE_POINT:
                raise ValueError(
                    f"the ranges of a CharSet must be sorted and disjoint: {first:#x} to {last:#x}"
                )
            after = last


@dataclass(frozen=True, slots=True)
class Concatenation:
    """One part after the other. Without parts, the empty text."""

    parts: tuple[Regex, ...]


@dataclass(frozen=True, slots=True)
class Alternation:
    """Any one of the options. Without options, no text at all."""

    options: tuple[Regex, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """The part, ``least`` to ``most`` times, both inclusive; ``most`` None: unlimited."""

    part: Regex
    least: int
    most: int | None


@dataclass(frozen=True, slots=True)
class LookAhead:
    """Matches the empty text if ``rest`` matches the whole rest of the text or, without ``wanted``, if it
    does not."""

    rest: Regex
    wanted: bool


@dataclass(frozen=True, slots=True)
class LookBehind:
    """Matches the empty text if the previous character is in these ranges or, with ``at_start``, the text
    begins here."""

    ranges: Ranges
    at_start: bool


Regex: TypeAlias = "CharSet | Concatenation | Alternation | Repeat | LookAhead | LookBehind"

EMPTY = Concatenation(())
"""The empty text."""


class TooLargeForDfa(Exception):
    """No DFA can be built for the expression, or it would be too large; the message contains the
    reason. Then the compiler uses llguidance instead."""


ANY_CHAR = CharSet(((0, MAX_CODE_POINT),))


def literal(text: str) -> Regex:
    """Returns the tree of exactly this text."""
    if len(text) == 1:
        return one_char(ord(text))
    return Concatenation(tuple([one_char(ord(char)) for char in text]))


@lru_cache(maxsize=1024)
def one_char(code_point: int) -> CharSet:
    """Returns the set of exactly this character."""
    return CharSet(((code_point, code_point),))


CodePoints: TypeAlias = NDArray[np.int64]

_BLOCK = 256
_LAST_LETTER = 0x3FFFF
"""No version of Unicode has a letter, digit or space beyond this code point; a test checks this."""

LAST_OF_PLANE = 0xFFFF
"""Up to this code point, Python reads the members of a case-insensitive set one by one."""


@cache
def category(name: str, ascii_only: bool) -> Ranges:
    r"""Returns the characters of a category, by its escape.

    >>> category(r"\d", True)
    ((48, 57),)
    """
    if name[-1].isupper():
        return all_but(category(name.lower(), ascii_only))
    pattern = re.compile(f"{name}+", re.ASCII if ascii_only else 0)
    return tuple([(found.start(), found.end() - 1) for found in pattern.finditer(_all_chars())])


def set_ranges(
    literals: str, members: Ranges, escapes: tuple[str, ...], negated: bool, ascii_only: bool
) -> Ranges:
    """Returns the characters of a set.

    Args:
        literals: single characters.
        members: ranges of characters, in any order.
        escapes: categories.
        negated: return all other characters instead.
        ascii_only: categories contain ASCII characters only.
    """
    every = [(ord(char), ord(char)) for char in literals]
    every += [pair for escape in escapes for pair in category(escape, ascii_only)]
    ranges = merge_ranges([*every, *members])
    return all_but(ranges) if negated else ranges


@lru_cache(maxsize=4096)
def set_without_case(
    literals: str, members: Ranges, escapes: tuple[str, ...], negated: bool, ascii_only: bool
) -> Ranges:
    """Returns the characters of a case-insensitive set. The arguments are as for ``set_ranges``.

    Only characters that have a case are looked up in Python, and the pattern contains only these characters
    of a range, because Python takes long to read large case-insensitive ranges. Beyond the first 65,536
    characters, Python treats ranges and literals differently, so ranges there are unchanged."""
    ranges = set_ranges(literals, members, escapes, negated, ascii_only)
    beyond = [f"\\U{first:08x}-\\U{last:08x}" for first, last in members if last > LAST_OF_PLANE]
    within = merge_ranges([pair for pair in members if pair[1] <= LAST_OF_PLANE])
    written = "".join([re.escape(char) for char in _find_cased_chars(within) + literals])
    written += "".join([*beyond, *escapes])
    if not written:
        return ranges
    reader = re.compile(
        f"[{'^' if negated else ''}{written}]", re.IGNORECASE | (re.ASCII if ascii_only else re.UNICODE)
    )
    matched = [(ord(char), ord(char)) for char in reader.findall(_cased_chars())]
    return merge_ranges([*matched, *_without_cased(ranges)])


def _find_cased_chars(ranges: Ranges) -> str:
    """Returns the characters of the ranges that have a case."""
    edges: CodePoints = np.array(ranges, dtype=np.int64).reshape(-1, 2) + np.array([0, 1])
    places: CodePoints = np.searchsorted(_cased_code_points(), edges)
    return "".join([_cased_chars()[int(first) : int(after)] for first, after in places])


def _without_cased(ranges: Ranges) -> list[tuple[int, int]]:
    """Returns the characters of the ranges that have no case."""
    left: list[tuple[int, int]] = []
    for first, last in ranges:
        start = first
        for char in _find_cased_chars(((first, last),)):
            if start < ord(char):
                left.append((start, ord(char) - 1))
            start = ord(char) + 1
        if start <= last:
            left.append((start, last))
    return left


@cache
def _cased_chars() -> str:
    """Returns every character that changes under lower or upper case, and every result of such a change."""
    every = _all_chars()
    found: set[str] = set()
    for start in range(0, len(every), _BLOCK):
        block = every[start : start + _BLOCK]
        if block.lower() != block or block.upper() != block:
            for char in block:
                forms = {char, *char.lower(), *char.upper(), *char.lower().upper(), *char.upper().lower()}
                if len(forms) > 1:
                    found |= forms
    return "".join(sorted(found))


@cache
def _cased_code_points() -> CodePoints:
    return np.array([ord(char) for char in _cased_chars()], dtype=np.int64)


@cache
def _all_chars() -> str:
    """Returns every code point up to the last letter, surrogates included: character i is code point i."""
    code_points: CodePoints = np.arange(_LAST_LETTER + 1, dtype=np.int64)
    return code_points.astype("<u4").tobytes().decode("utf-32-le", "surrogatepass")


MAX_DEPTH = 100
MAX_RANGES = 200_000
"""The limit for all sets of a pattern together."""
_RANGES_PER_QUESTION = 200  # the cost of looking up a small case-insensitive set
_RANGES_PER_PLANE = 20_000  # the cost of a range that Python reads one by one
_MOST_GAPS = 4  # optional parts after a repeated word; the rewritten form grows with their square
_MAX_CASED = 3000  # about the number of characters that have a case

_IGNORE_CASE = int(re.IGNORECASE)
_MULTILINE = int(re.MULTILINE)
_DOT_ALL = int(re.DOTALL)
_ASCII = int(re.ASCII)
_ALPHABETS = int(re.ASCII | re.UNICODE | re.LOCALE)

_ANY_TEXT = Repeat(ANY_CHAR, 0, None)
_NEWLINE = one_char(0x0A)
_ALL_BUT_NEWLINE = CharSet(all_but(_NEWLINE.ranges))

_CATEGORIES = {
    "CATEGORY_DIGIT": r"\d",
    "CATEGORY_NOT_DIGIT": r"\D",
    "CATEGORY_SPACE": r"\s",
    "CATEGORY_NOT_SPACE": r"\S",
    "CATEGORY_WORD": r"\w",
    "CATEGORY_NOT_WORD": r"\W",
}
_STARTS = ("AT_BEGINNING", "AT_BEGINNING_STRING")
_ENDS = ("AT_END", "AT_END_STRING")
_AT_START = LookBehind((), at_start=True)
_AT_LINE_START = LookBehind(_NEWLINE.ranges, at_start=True)
_AT_END = LookAhead(EMPTY, wanted=True)
_AT_LAST_LINE_END = LookAhead(Repeat(_NEWLINE, 0, 1), wanted=True)
_AT_LINE_END = LookAhead(Alternation((EMPTY, Concatenation((_NEWLINE, _ANY_TEXT)))), wanted=True)
_NO_BOUNDARY_IN_NOTHING = re.fullmatch(r"\B", "") is not None  # true from Python 3.14 on
_TOO_DEEP = f"regex: groups and repeats nest deeper than {MAX_DEPTH}"
_REFUSED = {
    "POSSESSIVE_REPEAT": "possessive repeats (a*+) are not supported: write a plain repeat (a*)",
    "ATOMIC_GROUP": "atomic groups (?>…) are not supported: write a plain group (?:…)",
    "GROUPREF": "back-references are not supported: write out the possible texts",
    "GROUPREF_EXISTS": "conditionals (?(1)…|…) are not supported: write both cases as a choice (?:…|…)",
}


def parse_regex(pattern: str) -> Regex:
    r"""Returns the tree of a pattern. Raises ``BadArgument`` if Python cannot parse it or no DFA can match
    it, and ``TooLargeForDfa`` for ``\p{…}``, which Python does not know, and for patterns that are too
    large."""
    try:
        tree = parsed(pattern)
    except re.error as error:
        if error.msg.lower().startswith("bad escape \\p"):
            raise TooLargeForDfa("Python does not know \\p{…}") from None
        raise BadArgument(f"regex: not a valid Python pattern: {error}") from None
    except OverflowError:
        raise TooLargeForDfa("a repeat count is too large") from None
    except ValueError as error:
        raise BadArgument(f"regex: not a valid Python pattern: {error}") from None
    except RecursionError:
        raise BadArgument(_TOO_DEEP) from None
    return _Reader().sequence(list(tree), tree.state.flags, True, True, 0)


class _Reader:
    """Converts the output of Python's pattern parser to a tree."""

    def __init__(self) -> None:
        self._ranges_left = MAX_RANGES
        self._without_case: dict[tuple[str, Ranges, tuple[str, ...], bool, bool], Ranges] = {}
        self._boundaries: dict[tuple[bool, bool], Regex] = {}

    def sequence(self, items: list[Any], flags: int, at_start: bool, at_end: bool, depth: int) -> Regex:
        """Converts a sequence.

        Args:
            items: the parser's output.
            flags: of ``re``, in force here.
            at_start: the sequence begins the text.
            at_end: the sequence ends the text.
            depth: the number of enclosing groups.
        """
        if depth > MAX_DEPTH:
            raise BadArgument(_TOO_DEEP)
        first = 0
        while first < len(items) and _is_empty(items[first]):
            first += 1
        last = len(items) - 1
        while last >= 0 and _is_empty(items[last]):
            last -= 1
        parts = [
            self._item(op, value, flags, at_start and index <= first, at_end and index >= last, depth)
            for index, (op, value) in enumerate(items)
        ]
        kept = tuple([part for part in parts if part is not EMPTY])
        if len(kept) == 1:
            return kept[0]
        return Concatenation(kept) if kept else EMPTY

    def _item(self, op: Any, value: Any, flags: int, at_start: bool, at_end: bool, depth: int) -> Regex:
        name = str(op)
        if name in ("LITERAL", "NOT_LITERAL", "IN", "ANY"):
            return self._char_set(name, value, flags)
        if name in ("MAX_REPEAT", "MIN_REPEAT"):
            least, most, part = value
            inner = self.sequence(list(part), flags, False, False, depth + 1)
            return _repeat(inner, int(least), None if most is _parser.MAXREPEAT else int(most))
        if name == "SUBPATTERN":
            return self.sequence(list(value[3]), _inner_flags(flags, value), at_start, at_end, depth + 1)
        if name == "BRANCH":
            options = [self.sequence(list(option), flags, at_start, at_end, depth + 1) for option in value[1]]
            return Alternation(tuple(options))
        if name == "AT":
            return self._anchor(str(value), flags, at_start, at_end)
        if name in ("ASSERT", "ASSERT_NOT", "FAILURE"):
            direction, part = value or (1, ())  # FAILURE, from Python 3.13 on, is an empty ASSERT_NOT
            inner = self.sequence(list(part), flags, False, False, depth + 1)
            if direction < 0:
                return _look_behind(inner, name == "ASSERT")
            return LookAhead(Concatenation((inner, _ANY_TEXT)), name == "ASSERT")
        raise BadArgument(f"regex: {_REFUSED.get(name, f'{name} is not supported')}")

    def _anchor(self, name: str, flags: int, at_start: bool, at_end: bool) -> Regex:
        """Converts an anchor or a word boundary. A full match begins at the start and ends at the end, so an
        anchor there has no effect."""
        if (name in _STARTS and at_start) or (name in _ENDS and at_end):
            return EMPTY
        if name in _STARTS:
            return _AT_LINE_START if name == "AT_BEGINNING" and flags & _MULTILINE else _AT_START
        if name in _ENDS:
            if name == "AT_END_STRING":
                return _AT_END
            return _AT_LINE_END if flags & _MULTILINE else _AT_LAST_LINE_END
        key = (name == "AT_BOUNDARY", bool(flags & _ASCII))
        if key not in self._boundaries:
            word = set_ranges("", (), (r"\w",), False, key[1])
            self._spend(len(word))
            self._boundaries[key] = _word_boundary(word) if key[0] else _no_word_boundary(word)
        return self._boundaries[key]

    def _char_set(self, name: str, value: Any, flags: int) -> CharSet:
        if name == "ANY":
            return ANY_CHAR if flags & _DOT_ALL else _ALL_BUT_NEWLINE
        if name == "LITERAL" and not flags & _IGNORE_CASE:
            return one_char(value)
        found = list(value) if name == "IN" else [(name.removeprefix("NOT_"), value)]
        literals = "".join([chr(member) for op, member in found if str(op) == "LITERAL"])
        members = tuple([(int(member[0]), int(member[1])) for op, member in found if str(op) == "RANGE"])
        escapes = tuple([_CATEGORIES[str(member)] for op, member in found if str(op) == "CATEGORY"])
        negated = name == "NOT_LITERAL" or str(found[0][0]) == "NEGATE"
        ascii_only = bool(flags & _ASCII)
        if flags & _IGNORE_CASE:
            ranges = self._ask(literals, members, escapes, negated, ascii_only)
        else:
            ranges = set_ranges(literals, members, escapes, negated, ascii_only)
        self._spend(len(ranges) + len(found))
        return CharSet(ranges)

    def _ask(
        self, literals: str, members: Ranges, escapes: tuple[str, ...], negated: bool, ascii_only: bool
    ) -> Ranges:
        """Returns a case-insensitive set. Its cost counts when it is first looked up."""
        question = (literals, members, escapes, negated, ascii_only)
        known = self._without_case.get(question)
        if known is None:
            self._spend(_RANGES_PER_QUESTION)
            for first, last in members:
                is_long = first <= LAST_OF_PLANE < last
                self._spend(_RANGES_PER_PLANE if is_long else min(last - first, _MAX_CASED))
            known = self._without_case[question] = set_without_case(*question)
        return known

    def _spend(self, num_ranges: int) -> None:
        self._ranges_left -= num_ranges
        if self._ranges_left < 0:
            raise TooLargeForDfa("its character sets are too large")


def _inner_flags(flags: int, group: Any) -> int:
    """Returns the flags inside a group."""
    _, added, removed, _ = group
    return ((flags & ~_ALPHABETS if added & _ALPHABETS else flags) | int(added)) & ~int(removed)


def _repeat(part: Regex, least: int, most: int | None) -> Regex:
    """Returns a repeat. Nested repeats are merged if every count in between is possible, too: a text has very
    many parses under ``(a{1,50}){1,50}`` and one under ``a{1,2500}``."""
    if isinstance(part, Repeat):
        inner_most = part.most
        # From ``least`` repetitions on, the ranges of total counts overlap or touch.
        is_joined = inner_most is None and least > 0
        is_joined |= (least + 1) * part.least <= (0 if inner_most is None else least * inner_most) + 1
        if least == most or is_joined:
            is_endless = (most is None and inner_most != 0) or (inner_most is None and most != 0)
            total = None if is_endless else (most or 0) * (inner_most or 0)
            return Repeat(part.part, least * part.least, total)
    if most is not None and least <= 1 < most and isinstance(part, Concatenation):
        words = _words(part, most)
        if words is not None:
            return words if least else Repeat(words, 0, 1)
    return Repeat(part, least, most)


def _words(part: Concatenation, most: int) -> Regex | None:
    """Rewrites ``(A+ B?){1,most}`` as ``A+ (B A+){0,most-1} B?``, which matches the same texts: groups
    without a ``B`` between them are one. The first form gives a text exponentially many parses. Several gaps
    are treated alike."""
    match part.parts:
        case (Repeat(least=1, most=None) as word, *rest) if 0 < len(rest) <= _MOST_GAPS:
            gaps = [gap for gap in rest if isinstance(gap, Repeat) and gap.least == 0 and gap.most != 0]
            if len(gaps) == len(rest):
                # The gap without the empty text: one alternative for each part that may be its first.
                firsts = [
                    Concatenation((Repeat(g.part, 1, g.most), *gaps[at + 1 :])) for at, g in enumerate(gaps)
                ]
                more = Concatenation((Alternation(tuple(firsts)), word))
                return Concatenation((word, Repeat(more, 0, most - 1), *gaps))
    return None


def _is_empty(item: Any) -> bool:
    """Whether the item is an anchor or a look-around, which read nothing."""
    return str(item[0]) in ("AT", "ASSERT", "ASSERT_NOT", "FAILURE")


def _word_boundary(word: Ranges) -> Regex:
    r"""``\b``: exactly one of the characters before and after is a word character. The ends of the text count
    as none."""
    before_word = LookAhead(Concatenation((CharSet(word), _ANY_TEXT)), wanted=True)
    before_none = LookAhead(Concatenation((CharSet(word), _ANY_TEXT)), wanted=False)
    after_word, after_none = LookBehind(word, at_start=False), LookBehind(all_but(word), at_start=True)
    return Alternation((Concatenation((after_word, before_none)), Concatenation((after_none, before_word))))


def _no_word_boundary(word: Ranges) -> Regex:
    r"""``\B``: both are word characters or neither is; before Python 3.14, never in an empty text."""
    before_word = LookAhead(Concatenation((CharSet(word), _ANY_TEXT)), wanted=True)
    before_none = LookAhead(Concatenation((CharSet(word), _ANY_TEXT)), wanted=False)
    before_other = LookAhead(Concatenation((CharSet(all_but(word)), _ANY_TEXT)), wanted=True)
    return Alternation(
        (
            Concatenation((LookBehind(word, at_start=False), before_word)),
            Concatenation((LookBehind(all_but(word), at_start=False), before_none)),
            Concatenation((_AT_START, before_none if _NO_BOUNDARY_IN_NOTHING else before_other)),
        )
    )


def _look_behind(part: Regex, wanted: bool) -> Regex:
    """Returns a look-behind of one character. Raises ``BadArgument`` for others: a DFA cannot read
    backwards."""
    options = part.options if isinstance(part, Alternation) else (part,)
    ranges = merge_ranges(
        [pair for option in options if isinstance(option, CharSet) for pair in option.ranges]
    )
    if not all(isinstance(option, CharSet) for option in options):
        raise BadArgument("regex: a look-behind (?<…) must match one character")
    return LookBehind(ranges, at_start=False) if wanted else LookBehind(all_but(ranges), at_start=True)
