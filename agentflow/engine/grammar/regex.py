r"""Patterns as Python's ``re`` reads them, turned into trees. What matches is what ``re.fullmatch`` matches.

>>> parse_regex(r"^a{2}|b$")
Choice(options=(Repeat(part=CharSet(ranges=((97, 97),)), least=2, most=2), CharSet(ranges=((98, 98),))))
"""

from __future__ import annotations

import re
import warnings
from re import _parser  # type: ignore[attr-defined]
from typing import Any

from agentflow.engine.grammar.regex_tree import (
    ANY_CHAR,
    EMPTY,
    CharSet,
    Choice,
    LookAhead,
    LookBehind,
    Ranges,
    Regex,
    Repeat,
    Sequence,
    TooMuchForFsm,
    all_but,
    merged,
    one_char,
)
from agentflow.engine.grammar.unicode_sets import LAST_OF_PLANE, set_ranges, set_without_case
from agentflow.errors import BadArgument

MAX_DEPTH = 100
MAX_RANGES = 200_000
"""Of all sets of a pattern together."""
_RANGES_PER_QUESTION = 200  # what takes as long as asking what a small set means without case
_RANGES_PER_PLANE = 20_000  # the same for a range that Python reads one by one
_MAX_CASED = 3000  # about as many characters have a case

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
_AT_LINE_END = LookAhead(Choice((EMPTY, Sequence((_NEWLINE, _ANY_TEXT)))), wanted=True)
_NO_BOUNDARY_IN_NOTHING = re.fullmatch(r"\B", "") is not None  # as Python has it from 3.14 on
_TOO_DEEP = f"regex: groups and repeats nest deeper than {MAX_DEPTH}: write a flatter pattern"
_REFUSED = {
    "POSSESSIVE_REPEAT": "a possessive repeat (a*+) cannot be kept: write the plain one (a*)",
    "ATOMIC_GROUP": "an atomic group (?>…) cannot be kept: write a plain one (?:…)",
    "GROUPREF": "a back-reference cannot be kept: write out what may stand there",
    "GROUPREF_EXISTS": "a conditional (?(1)…|…) cannot be kept: write both cases as a choice (?:…|…)",
}


def parse_regex(pattern: str) -> Regex:
    """The tree of a pattern. ``BadArgument`` where Python cannot read it, or for what no DFA can do;
    ``TooMuchForFsm`` for ``\\p{…}``, which is not Python's, and for what is too large."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            parsed = _parser.parse(pattern)
    except re.error as error:
        if error.msg.lower().startswith("bad escape \\p"):
            raise TooMuchForFsm("\\p{…} is not Python's") from None
        raise BadArgument(f"regex: not a pattern of Python's re: {error}") from None
    except OverflowError:
        raise TooMuchForFsm("a repeat's number is too large") from None
    except ValueError as error:
        raise BadArgument(f"regex: not a pattern of Python's re: {error}") from None
    except RecursionError:
        raise BadArgument(_TOO_DEEP) from None
    return _Reader().sequence(list(parsed), parsed.state.flags, True, True, 0)


class _Reader:
    """Turns what Python's parser says into a tree."""

    def __init__(self) -> None:
        self._ranges_left = MAX_RANGES
        self._without_case: dict[tuple[str, Ranges, tuple[str, ...], bool, bool], Ranges] = {}
        self._boundaries: dict[tuple[bool, bool], Regex] = {}

    def sequence(self, items: list[Any], flags: int, at_start: bool, at_end: bool, depth: int) -> Regex:
        """``at_start``, ``at_end``: whether nothing comes before, or after, in the text."""
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
        return Sequence(kept) if kept else EMPTY

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
            return Choice(tuple(options))
        if name == "AT":
            return self._place(str(value), flags, at_start, at_end)
        if name in ("ASSERT", "ASSERT_NOT"):
            direction, part = value
            inner = self.sequence(list(part), flags, False, False, depth + 1)
            if direction < 0:
                return _look_behind(inner, name == "ASSERT")
            return LookAhead(Sequence((inner, _ANY_TEXT)), name == "ASSERT")
        raise BadArgument(f"regex: {_REFUSED.get(name, f'{name} cannot be kept: write it another way')}")

    def _place(self, name: str, flags: int, at_start: bool, at_end: bool) -> Regex:
        """An anchor, or a word boundary. A full match begins at the start and ends at the end: an anchor
        there says nothing."""
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
        """A set without case, counted when it is asked for the first time."""
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
            raise TooMuchForFsm("its sets of characters are too many")


def _inner_flags(flags: int, group: Any) -> int:
    """Those inside a group."""
    _, added, removed, _ = group
    return ((flags & ~_ALPHABETS if added & _ALPHABETS else flags) | int(added)) & ~int(removed)


def _repeat(part: Regex, least: int, most: int | None) -> Regex:
    """Repeats of repeats are one repeat where every number of times between is possible, too: a text under
    ``(a{1,50}){1,50}`` can be read in very many ways, and under ``a{1,2500}`` in one."""
    if isinstance(part, Repeat):
        inner_most = part.most
        # From ``least`` times on, the next number of times begins no later than where this one ends.
        is_joined = inner_most is None and least > 0
        is_joined |= (least + 1) * part.least <= (0 if inner_most is None else least * inner_most) + 1
        if least == most or is_joined:
            is_endless = (most is None and inner_most != 0) or (inner_most is None and most != 0)
            total = None if is_endless else (most or 0) * (inner_most or 0)
            return Repeat(part.part, least * part.least, total)
    return Repeat(part, least, most)


def _is_empty(item: Any) -> bool:
    """Whether it is no text, but a place in it."""
    return str(item[0]) in ("AT", "ASSERT", "ASSERT_NOT")


def _word_boundary(word: Ranges) -> Regex:
    r"""``\b``: of the characters before and after, one is of a word. The ends of the text count as none."""
    before_word = LookAhead(Sequence((CharSet(word), _ANY_TEXT)), wanted=True)
    before_none = LookAhead(Sequence((CharSet(word), _ANY_TEXT)), wanted=False)
    after_word, after_none = LookBehind(word, at_start=False), LookBehind(all_but(word), at_start=True)
    return Choice((Sequence((after_word, before_none)), Sequence((after_none, before_word))))


def _no_word_boundary(word: Ranges) -> Regex:
    r"""``\B``: both are, or neither; but before Python 3.14 not in an empty text."""
    before_word = LookAhead(Sequence((CharSet(word), _ANY_TEXT)), wanted=True)
    before_none = LookAhead(Sequence((CharSet(word), _ANY_TEXT)), wanted=False)
    before_other = LookAhead(Sequence((CharSet(all_but(word)), _ANY_TEXT)), wanted=True)
    return Choice(
        (
            Sequence((LookBehind(word, at_start=False), before_word)),
            Sequence((LookBehind(all_but(word), at_start=False), before_none)),
            Sequence((_AT_START, before_none if _NO_BOUNDARY_IN_NOTHING else before_other)),
        )
    )


def _look_behind(part: Regex, wanted: bool) -> Regex:
    """A look-behind of one character. ``BadArgument`` for another: a DFA would have to read backwards."""
    options = part.options if isinstance(part, Choice) else (part,)
    ranges = merged([pair for option in options if isinstance(option, CharSet) for pair in option.ranges])
    if not all(isinstance(option, CharSet) for option in options):
        raise BadArgument("regex: a look-behind (?<…) must be of one character: write what precedes")
    return LookBehind(ranges, at_start=False) if wanted else LookBehind(all_but(ranges), at_start=True)
