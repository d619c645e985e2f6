"""Decides which parts of a grammar a lexer may read as whole words without changing the grammar's texts.

Lark's notation has a lexer, and GBNF has none. It reads terminals: each is as long as possible, and a lexer
does not go back. So a grammar has the same texts with and without it only if no terminal can be read on where
the next one begins: in ``word "s"`` with ``word ::= [a-z]+``, the word would take the ``s``. ``Lexer`` finds
such terminals. ``Lexemes`` leaves them to the parser, which reads them character by character. That is
slower, so all other parts stay terminals.
"""

from __future__ import annotations

import bisect
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from agentflow.protocol.grammars.char_ranges import Ranges
from agentflow.protocol.grammars.parts import (
    Chars,
    Fixed,
    GrammarPart,
    Named,
    OneOf,
    Repeated,
    Series,
    characters,
    names_in,
)

MAX_PLACES: Final = 1_000
"""The characters of a terminal, with the rules that it contains. Larger rules are left to the parser."""
MAX_COPIED: Final = 8
MAX_STEPS: Final = 200_000
"""They take some tenths of a second at most. In larger grammars, all is left to the parser."""

Lexeme: TypeAlias = "Named | Fixed | Chars"
"""A terminal: a rule, a literal or a character class."""


@dataclass(slots=True)
class _Places:
    """The characters of a terminal (Glushkov), numbered: the characters of each, and sets, as bits, of the
    ones that may follow it, come first and come last."""

    chars: list[int] = field(default_factory=list)
    """As bits: the classes of characters (``_Alphabet``)."""
    leads: list[int] = field(default_factory=list)
    """As bits: their first bytes in UTF-8. A lexer reads bytes, so it goes on if only these are alike."""
    after: list[int] = field(default_factory=list)
    first: int = 0
    last: int = 0
    may_be_empty: bool = True


class TooLarge(Exception):
    """There are too many steps."""


class Lexer:
    """The terminals of a grammar.

    Args:
        rules: The rules by name.
        start: The rule whose texts are the grammar's.
        max_steps: The steps of the comparison.
        max_copied: The characters of a counted repeat that are compared one by one. Of a larger one, any
            number is assumed.
        max_places: The characters of a terminal, with the rules that it contains.

    Attributes:
        recursive: The rules that contain themselves, or a rule that does.
        too_large: The other rules that are larger than ``max_places``, or for which no steps are left.
        regular: All other rules, which may be terminals, except the ones without characters.
        whole: The rules that are terminals where other rules contain them.
        divided: The literals that are not terminals. Their characters are.
        alphabet: The characters that the grammar distinguishes.
    """

    def __init__(
        self,
        rules: Mapping[str, GrammarPart],
        start: str,
        *,
        max_steps: int = MAX_STEPS,
        max_copied: int = MAX_COPIED,
        max_places: int = MAX_PLACES,
    ) -> None:
        self.rules = rules
        self.start = start
        self.max_copied = max_copied
        self.max_places = max_places
        self.recursive: set[str] = set()
        self.too_large: set[str] = set()
        self.whole: set[str] = set()
        self.divided: set[str] = set()
        self.alphabet = _Alphabet(rules)
        self._places: dict[Lexeme, _Places] = {}
        self._readings: dict[tuple[Lexeme, Lexeme], tuple[bool, int]] = {}
        self._steps_left = max_steps
        self.regular = self._regular_rules()

    def _regular_rules(self) -> set[str]:
        """Numbers the characters of all literals, classes and rules. Returns the ``regular`` rules."""
        users: dict[str, list[str]] = defaultdict(list)
        missing: dict[str, int] = {}
        for name, part in self.rules.items():
            used = set(names_in(part))
            missing[name] = len(used)
            for other in used:
                users[other].append(name)
            for lexeme in _leaves(part):
                if isinstance(lexeme, Fixed) and len(lexeme.text) > self.max_places:
                    self.divided.add(lexeme.text)
                elif lexeme not in self._places:
                    self._places[lexeme] = _Placing(self).whole(lexeme)
        waiting = deque([name for name, count in missing.items() if not count])
        found: set[str] = set()
        while waiting:
            name = waiting.popleft()
            part = self.rules[name]
            try:
                if not self.too_large.isdisjoint(names_in(part)):
                    raise TooLarge
                places = self._places[Named(name)] = _Placing(self).whole(part)
                if places.chars:
                    found.add(name)
            except TooLarge:
                self.too_large.add(name)
            for user in users[name]:
                missing[user] -= 1
                if not missing[user]:
                    waiting.append(user)
        self.recursive = {name for name, count in missing.items() if count}
        return found

    def placed(self, lexeme: Lexeme) -> _Places:
        """Returns the places of a lexeme, or of a rule that is neither recursive nor too large."""
        return self._places[lexeme]

    def spend(self, num_steps: int) -> None:
        """Counts steps of the comparison. Raises ``TooLarge`` if there have been too many."""
        self._steps_left -= num_steps
        if self._steps_left < 0:
            raise TooLarge

    def misread(self) -> set[Lexeme]:
        """Returns the terminals that a lexer may read on where another one ends and the next one begins.
        Raises ``TooLarge`` if that takes too many steps."""
        order = _Order(self)
        by_number = order.lexemes
        places = [self._places[lexeme] for lexeme in by_number]
        firsts = [_union(place.leads, place.first) for place in places]
        first_chars = [_union(place.chars, place.first) for place in places]
        # A lexer knows which terminals may come at a place, unless the text before may be two of them.
        # Only terminals that may come at the same place can be taken for one another.
        may_follow = list(order.after)
        together = [0] * len(by_number)
        has_changed = True
        while has_changed:
            has_changed = False
            for group in {order.first, *may_follow}:
                self.spend(1 + group.bit_count() // 8)
                for number in _bits(group):
                    together[number] |= group
            for a, one in enumerate(by_number):
                self.spend(1 + together[a].bit_count() // 8)
                for b in _bits(together[a]):
                    is_new = order.after[b] & ~may_follow[a] and first_chars[a] & first_chars[b]
                    if is_new and self._reading(one, by_number[b])[0]:
                        may_follow[a] |= order.after[b]
                        has_changed = True
        found: set[Lexeme] = set()
        for a, one in enumerate(by_number):
            next_bytes = _union(firsts, may_follow[a])
            if not next_bytes:
                continue
            # A terminal such as ``/ */`` may take the text of another one after it, which is then empty.
            own = 1 << a
            is_taken = self._is_star(one) and not any(
                order.after[b] & own and self._reading(one, by_number[b])[0]
                for b in _bits(together[a] & ~own)
            )
            for b in _bits(together[a]):
                other = by_number[b]
                if other in found or isinstance(other, Chars) or not first_chars[a] & first_chars[b]:
                    continue
                is_own = is_taken and a == b
                if self._reading(one, other)[1] & (
                    _union(firsts, may_follow[a] & ~own) if is_own else next_bytes
                ):
                    found.add(other)
        return found

    def _is_star(self, lexeme: Lexeme) -> bool:
        """Whether any number of its texts are one, as known from its form."""
        part: GrammarPart = lexeme
        while isinstance(part, Named):
            part = self.rules[part.name]
        return isinstance(part, Repeated) and part.least == 0 and part.most is None

    def _reading(self, one: Lexeme, other: Lexeme) -> tuple[bool, int]:
        """Whether a text may be both, and the bytes with which ``other`` may go on after a whole text of
        ``one``."""
        known = self._readings.get((one, other))
        if known is not None:
            return known
        mine, others = self._places[one], self._places[other]
        is_both, going_on = False, 0
        # For each place of one: the places of the other that the same text may reach.
        reached = [0] * len(mine.chars)
        alike: dict[int, int] = {}  # by the characters of a place of one: the places of the other
        waiting = [(mine.first, others.first)]
        while waiting:
            first, second = waiting.pop()
            for a in _bits(first):
                chars = mine.chars[a]
                if chars not in alike:
                    self.spend(len(others.chars))
                    alike[chars] = sum([1 << b for b, found in enumerate(others.chars) if found & chars])
                new = second & alike[chars] & ~reached[a]
                self.spend(1 + new.bit_count())
                if not new:
                    continue
                reached[a] |= new
                after = _union(others.after, new)
                waiting.append((mine.after[a], after))
                if mine.last >> a & 1:
                    is_both |= bool(new & others.last)
                    going_on |= _union(others.leads, after)
        self._readings[one, other] = is_both, going_on
        return is_both, going_on


class Lexemes(Lexer):
    """The terminals of a grammar in GBNF, as many and as large as possible."""

    def __init__(self, rules: Mapping[str, GrammarPart], start: str = "root") -> None:
        super().__init__(rules, start)
        self.whole = self.regular - {start}
        try:
            while longer := self.misread():
                self.whole -= {one.name for one in longer if isinstance(one, Named)}
                self.divided |= {one.text for one in longer if isinstance(one, Fixed)}
        except TooLarge:
            self.whole = set()
            self.divided |= {one.text for one in self._places if isinstance(one, Fixed)}


class _Alphabet:
    """The classes of characters that a grammar does not distinguish."""

    def __init__(self, rules: Mapping[str, GrammarPart]) -> None:
        edges = {0}
        for part in rules.values():
            for lexeme in _leaves(part):
                for first, last in lexeme.ranges if isinstance(lexeme, Chars) else ():
                    edges |= {first, last + 1}
        self._edges = sorted(edges)

    def class_bits(self, ranges: Ranges) -> int:
        """Returns the classes of characters as bits."""
        found = 0
        for first, last in ranges:
            low, high = bisect.bisect_left(self._edges, first), bisect.bisect_left(self._edges, last + 1)
            found |= (1 << high) - (1 << low)
        return found

    def lead_bits(self, ranges: Ranges) -> int:
        """Returns the first bytes of characters as bits."""
        found = 0
        for first, last in ranges:
            found |= (2 << chr(last).encode()[0]) - (1 << chr(first).encode()[0])
        return found


class _Placing:
    """Numbers the characters of one part."""

    def __init__(self, lexer: Lexer) -> None:
        self._lexer = lexer
        self._found = _Places()

    def whole(self, part: GrammarPart) -> _Places:
        found = self._found
        found.first, found.last, found.may_be_empty = self._place(part)
        return found

    def _place(self, part: GrammarPart) -> tuple[int, int, bool]:
        """Adds the characters of a part. Returns the first and the last ones, and whether it may be empty."""
        match part:
            case Chars(ranges):
                return self._char(ranges)
            case Fixed(text):
                return self._place(characters(text))
            case Series(parts):
                return self._row(parts)
            case OneOf(options):
                first = last = 0
                may_be_empty = False
                for option in options:
                    one_first, one_last, one_empty = self._place(option)
                    first, last, may_be_empty = first | one_first, last | one_last, may_be_empty or one_empty
                return first, last, may_be_empty
            case Repeated():
                return self._times(part)
            case Named():
                return self._copy(self._lexer.placed(part))

    def _char(self, ranges: Ranges) -> tuple[int, int, bool]:
        found = self._found
        if len(found.chars) >= self._lexer.max_places:
            raise TooLarge
        found.chars.append(self._lexer.alphabet.class_bits(ranges))
        found.leads.append(self._lexer.alphabet.lead_bits(ranges))
        found.after.append(0)
        bit = 1 << (len(found.chars) - 1)
        return bit, bit, False

    def _copy(self, places: _Places) -> tuple[int, int, bool]:
        found = self._found
        offset = len(found.chars)
        if offset + len(places.chars) > self._lexer.max_places:
            raise TooLarge
        self._lexer.spend(len(places.chars) // 8)
        found.chars += places.chars
        found.leads += places.leads
        found.after += [bits << offset for bits in places.after]
        return places.first << offset, places.last << offset, places.may_be_empty

    def _row(self, parts: tuple[GrammarPart, ...]) -> tuple[int, int, bool]:
        first, last, may_be_empty = 0, 0, True
        for part in parts:
            one = self._place(part)
            first, last, may_be_empty = self._joined((first, last, may_be_empty), one)
        return first, last, may_be_empty

    def _joined(self, left: tuple[int, int, bool], right: tuple[int, int, bool]) -> tuple[int, int, bool]:
        (first, last, left_empty), (next_first, next_last, right_empty) = left, right
        self._follow(last, next_first)
        return (
            first | (next_first if left_empty else 0),
            next_last | (last if right_empty else 0),
            left_empty and right_empty,
        )

    def _times(self, part: Repeated) -> tuple[int, int, bool]:
        before = len(self._found.chars)
        one = self._place(part.part)
        size = len(self._found.chars) - before
        copies = max(part.least, part.most or 0)
        self._lexer.spend(min(size * copies, self._lexer.max_copied))
        if part.most is None or size * copies > self._lexer.max_copied:
            self._follow(one[1], one[0])
            if part.least * size <= self._lexer.max_copied and part.most is None:
                row = one
                for _ in range(part.least - 1):  # the first copy is the one that repeats
                    row = self._joined(row, self._place(part.part))
                one = row
            return one[0], one[1], one[2] or part.least == 0
        first, last, may_be_empty = one
        ends = last if part.least <= 1 or may_be_empty else 0
        for number in range(2, copies + 1):
            next_first, next_last, _ = self._place(part.part)
            self._follow(last, next_first)
            last = next_last
            if number >= part.least or may_be_empty:
                ends |= last
        return first, ends, may_be_empty or part.least == 0

    def _follow(self, places: int, after: int) -> None:
        self._lexer.spend(places.bit_count() // 8)
        for place in _bits(places):
            self._found.after[place] |= after


class _Order:
    """The terminals by number, and which of them may follow one another, as bits."""

    def __init__(self, lexer: Lexer) -> None:
        self._whole, self._divided = lexer.whole, lexer.divided
        self._spend = lexer.spend
        self._may_be_empty = {one: lexer.placed(one).may_be_empty for one in map(Named, lexer.whole)}
        self.lexemes: list[Lexeme] = []
        self._numbers: dict[Lexeme, int] = {}
        # A rule that is whole, or that only a whole one contains, has no part that the parser reads.
        self._rules: dict[str, GrammarPart] = {}
        waiting = [lexer.start]
        while waiting:
            name = waiting.pop()
            if name not in self._rules:
                self._rules[name] = lexer.rules[name]
                waiting += [other for other in names_in(self._rules[name]) if other not in self._whole]
        self._starts: dict[str, tuple[int, bool]] = dict.fromkeys(self._rules, (0, False))
        self._ends: dict[str, int] = dict.fromkeys(self._rules, 0)
        self._has_changed = True
        while self._has_changed:
            self._has_changed = False
            for name, part in reversed(self._rules.items()):  # the rules that others contain come first
                starts = self._start(part)
                self._has_changed |= starts != self._starts[name]
                self._starts[name] = starts
        self.first = self._starts[lexer.start][0]
        self.after = [0] * len(self.lexemes)
        self._has_changed = True
        while self._has_changed:
            self._has_changed = False
            for name, part in self._rules.items():
                self._walk(part, self._ends[name])

    def _number(self, lexeme: Lexeme) -> int:
        number = self._numbers.setdefault(lexeme, len(self.lexemes))
        if number == len(self.lexemes):
            self.lexemes.append(lexeme)
        return number

    def _start(self, part: GrammarPart) -> tuple[int, bool]:
        """The terminals with which a part may begin, and whether it may be empty. Numbers all terminals."""
        self._spend(1)
        match part:
            case Chars():
                return 1 << self._number(part), False
            case Fixed(text) if text in self._divided:
                return self._start(characters(text))
            case Fixed():
                return 1 << self._number(part), False
            case Named(name) if name in self._whole:
                return 1 << self._number(part), self._may_be_empty[part]
            case Named(name):
                return self._starts[name]
            case Series(parts):
                found, may_be_empty = 0, True
                for one in parts:
                    first, is_empty = self._start(one)
                    found |= first if may_be_empty else 0
                    may_be_empty &= is_empty
                return found, may_be_empty
            case OneOf(options):
                starts = [self._start(option) for option in options]
                found = 0
                for first, _ in starts:
                    found |= first
                return found, any(is_empty for _, is_empty in starts)
            case Repeated(inner, least):
                first, is_empty = self._start(inner)
                return first, is_empty or least == 0

    def _walk(self, part: GrammarPart, follow: int) -> None:
        """Notes which terminals may follow the terminals and the rules of a part."""
        self._spend(1)
        match part:
            case Fixed(text) if text in self._divided:
                self._walk(characters(text), follow)
            case Named(name) if name not in self._whole:
                self._has_changed |= bool(follow & ~self._ends[name])
                self._ends[name] |= follow
            case Chars() | Fixed() | Named():
                number = self._numbers[part]
                self._has_changed |= bool(follow & ~self.after[number])
                self.after[number] |= follow
            case Series(parts):
                for one in reversed(parts):
                    self._walk(one, follow)
                    first, is_empty = self._start(one)
                    follow = first | (follow if is_empty else 0)
            case OneOf(options):
                for option in options:
                    self._walk(option, follow)
            case Repeated(inner, _, most):
                self._walk(inner, follow if most == 1 else follow | self._start(inner)[0])


def _leaves(part: GrammarPart) -> Iterator[Fixed | Chars]:
    waiting = [part]
    while waiting:
        match waiting.pop():
            case Series(parts) | OneOf(parts):
                waiting += parts
            case Repeated(inner):
                waiting.append(inner)
            case Fixed(text) as leaf:
                yield leaf
                waiting += characters(text).parts
            case Chars() as leaf:
                yield leaf


def _union(sets: list[int], places: int) -> int:
    found = 0
    for place in _bits(places):
        found |= sets[place]
    return found


def _bits(bits: int) -> Iterator[int]:
    while bits:
        low = bits & -bits
        yield low.bit_length() - 1
        bits ^= low
