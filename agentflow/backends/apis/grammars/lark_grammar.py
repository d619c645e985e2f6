"""Grammars in Lark's notation as GBNF, where both have the same texts.

A grammar of Lark has terminals, which a lexer reads: each is as long as possible. GBNF has none. So a grammar
is only translated if no terminal can be longer than a place where the next one begins. The parts of the
notation that this module reads: rules, terminals, strings, patterns without flags, ranges, brackets and
repeats. All others are refused.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from agentflow.backends.apis.grammars.gbnf import (
    EMPTY,
    MAX_CHARS,
    MAX_DEPTH,
    Alternation,
    Chars,
    Concatenation,
    GrammarPart,
    Named,
    Ranges,
    Repeat,
    cannot_express,
    literal,
    read_pattern,
    remembered,
    repeated,
    written_part,
)

MAX_POSITIONS: Final = 2_000
"""The characters of a terminal, with repeats written out."""
MAX_STEPS: Final = 25_000
"""The steps of the check of one grammar, which take some hundredths of a second."""

_GBNF_RULE: Final = re.compile(r"^[ \t]*<?[\w-]+>?[ \t]*::=", re.MULTILINE)
_TOKEN: Final = re.compile(
    r"(?P<space>[ \t\r\n]+|//[^\n]*)"
    r'|(?P<string>"(?:\\.|[^"\\\n])*"i?)'
    r"|(?P<pattern>/(?:\\.|[^/\\\n])+/[a-z]*)"
    r"|(?P<name>_*[a-z][a-z0-9_]*|_*[A-Z][A-Z0-9_]*)"
    r"|(?P<times>\{[0-9]{1,9}(?:,[0-9]{0,9})?\}|~[ ]*[0-9]{1,9}(?:\.\.[0-9]{1,9})?)"
    r"|(?P<sign>\.\.|[:|()\[\]*+?])"
)
# Patterns that Rust reads differently from Python, or that lexers do not read as a set of texts.
_OTHER_IN_RUST: Final = re.compile(r"\\[0-9wWsSDbBzZAXpPGN<>]|[*+?}]\?|\(\?|&&|--|~~|\[\^?\]")
# The same, and anchors, in patterns whose escaped characters are replaced by letters.
_NESTED_CLASS: Final = re.compile(r"\[[^\]]*\[")
_CLASS: Final = re.compile(r"\[[^\]]*\]")
_BRACE: Final = re.compile(r"\{(?![0-9]+(?:,[0-9]*)?\})")
_ANCHOR: Final = re.compile(r"(?<!\[)\^|\$")


@remembered
def gbnf_of_grammar(source: str) -> str:
    """Returns a grammar in GBNF with the same texts; one in GBNF unchanged.

    >>> print(gbnf_of_grammar('start: NUMBER ("+" NUMBER)*\\nNUMBER: /[0-9]+/'))
    root ::= rule1 ("+" rule1)*
    rule1 ::= [0-9]+

    Raises:
        NotSupported: There is none, or the grammar has parts that are not translated.
    """
    if _GBNF_RULE.search(source):
        return source
    try:
        rules = _Reader(source).rules()
        lexer = _Lexer(rules)
        lexer.refuse_left_recursion()
        lexer.check()
    except RecursionError:
        raise cannot_express("it is nested too deeply") from None
    names = {"start": "root"}
    for name in rules:
        names.setdefault(name, f"rule{len(names)}")
    return "\n".join([f"{names[name]} ::= {_written(part, names)}" for name, part in rules.items()])


def read_grammar(source: str) -> dict[str, GrammarPart]:
    """The rules of a grammar by name, and its terminals. Without a lexer, they have all of the grammar's
    texts, and more only where a terminal may be read on where the next one begins.

    Raises:
        NotSupported: The grammar is in GBNF, or has parts that are not read.
    """
    if _GBNF_RULE.search(source):
        raise cannot_express("it is in that notation already")
    try:
        rules = _Reader(source).rules()
    except RecursionError:
        raise cannot_express("it is nested too deeply") from None
    _refuse_unknown_names(rules)
    return rules


def _refuse_unknown_names(rules: Mapping[str, GrammarPart]) -> None:
    unknown = {used for part in rules.values() for used in _names_in(part)} - set(rules)
    if unknown:
        raise cannot_express(f"{min(unknown)} is not defined")


def _written(part: GrammarPart, names: Mapping[str, str]) -> str:
    return written_part(_renamed(part, names))


def _renamed(part: GrammarPart, names: Mapping[str, str]) -> GrammarPart:
    if isinstance(part, Named):
        return Named(names[part.name])
    if isinstance(part, Concatenation):
        return Concatenation(tuple([_renamed(one, names) for one in part.parts]))
    if isinstance(part, Alternation):
        return Alternation(tuple([_renamed(one, names) for one in part.options]))
    if isinstance(part, Repeat):
        return Repeat(_renamed(part.part, names), part.least, part.most)
    return part


def _is_terminal(name: str) -> bool:
    return name.upper() == name


class _Reader:
    """Reads a grammar. Strings and patterns in rules become terminals with names."""

    def __init__(self, source: str) -> None:
        if len(source) > MAX_CHARS:
            raise cannot_express(f"a grammar has at most {MAX_CHARS:,} characters")
        self._tokens: deque[tuple[str, str]] = deque()
        at = 0
        while at < len(source):
            found = _TOKEN.match(source, at)
            if found is None:
                raise cannot_express(f"{source[at : at + 20]!r} in a grammar is not translated")
            if found.lastgroup != "space":
                self._tokens.append((str(found.lastgroup), found[0]))
            at = found.end()
        self._rules: dict[str, GrammarPart] = {}
        self._names: dict[GrammarPart, str] = {}
        self._in_terminal = False
        self._depth = 0

    def rules(self) -> dict[str, GrammarPart]:
        """The rules by name. The names of terminals are in capitals."""
        while self._tokens:
            name = self._take("name")
            self._take("sign", ":")
            if name in self._rules:
                raise cannot_express(f"{name} is defined twice")
            self._in_terminal = _is_terminal(name)
            self._rules[name] = EMPTY  # before the terminals in it
            self._rules[name] = self._either()
        if "start" not in self._rules:
            raise cannot_express("it has no rule named start")
        return self._rules

    def _either(self) -> GrammarPart:
        options = [self._row()]
        while self._next_is("|"):
            self._tokens.popleft()
            options.append(self._row())
        return options[0] if len(options) == 1 else Alternation(tuple(options))

    def _row(self) -> GrammarPart:
        parts: list[GrammarPart] = []
        while self._tokens and not self._next_is("|", ")", "]") and not self._begins_rule():
            parts.append(self._repeated())
        return parts[0] if len(parts) == 1 else Concatenation(tuple(parts))

    def _repeated(self) -> GrammarPart:
        part = self._atom()
        while self._tokens and (self._next_is("*", "+", "?") or self._tokens[0][0] == "times"):
            kind, sign = self._tokens.popleft()
            if kind == "times":
                first, comma, last = sign.strip("{}~ ").replace("..", ",").partition(",")
                least = int(first)
                part = repeated(part, least, (int(last) if last else None) if comma else least)
            else:
                part = repeated(part, sign == "+", 1 if sign == "?" else None)
        return part

    def _atom(self) -> GrammarPart:
        kind, text = self._tokens.popleft()
        if kind == "name":
            if self._in_terminal and not _is_terminal(text):
                raise cannot_express(f"a terminal contains the rule {text}")
            return Named(text)
        if kind == "string":
            text = self._string(text)
            if not self._next_is(".."):
                return self._terminal(literal(text))
            self._tokens.popleft()
            last = self._string(self._take("string"))
            if len(text) != 1 or len(last) != 1 or text > last:
                raise cannot_express(f"{text!r}..{last!r} is no range of characters")
            return self._terminal(Chars(((ord(text), ord(last)),)))
        if kind == "pattern":
            return self._terminal(self._pattern(text))
        if text in ("(", "["):
            self._depth += 1
            if self._depth > MAX_DEPTH:
                raise cannot_express("it is nested too deeply")
            inside = self._either()
            self._take("sign", ")" if text == "(" else "]")
            self._depth -= 1
            return inside if text == "(" else repeated(inside, 0, 1)
        raise cannot_express(f"{text!r} is in the wrong place")

    def _string(self, token: str) -> str:
        if token.endswith("i"):
            raise cannot_express("case is ignored in a string")
        try:
            text = json.loads(token)
        except ValueError:
            text = ""
        if not isinstance(text, str) or not text:
            raise cannot_express(f"the string {token} is not translated")
        return text

    def _pattern(self, token: str) -> GrammarPart:
        source, _, flags = token[1:].rpartition("/")
        plain = re.sub(r"\\.", "a", source)
        is_other = _OTHER_IN_RUST.search(source) or _NESTED_CLASS.search(plain) or _ANCHOR.search(plain)
        if flags or is_other or _BRACE.search(_CLASS.sub("a", plain)):
            raise cannot_express(f"the pattern {token} is not translated")
        return read_pattern(source)

    def _terminal(self, part: GrammarPart) -> GrammarPart:
        """The part itself in a terminal, and in a rule the name of a terminal that it becomes."""
        if self._in_terminal:
            return part
        name = self._names.setdefault(part, f"%{len(self._names)}")  # no name that a grammar may have
        self._rules[name] = part
        return Named(name)

    def _begins_rule(self) -> bool:
        return len(self._tokens) > 1 and self._tokens[0][0] == "name" and self._tokens[1][1] == ":"

    def _next_is(self, *signs: str) -> bool:
        return bool(self._tokens) and self._tokens[0][0] == "sign" and self._tokens[0][1] in signs

    def _take(self, kind: str, text: str | None = None) -> str:
        if not self._tokens or self._tokens[0][0] != kind or text not in (None, self._tokens[0][1]):
            found = self._tokens[0][1] if self._tokens else "the end"
            raise cannot_express(f"{found!r} is in the wrong place")
        return self._tokens.popleft()[1]


@dataclass(slots=True)
class _Positions:
    """The positions of the characters of one terminal (Glushkov): the characters of each, which may come
    first and last, and which after one another."""

    chars: list[Chars] = field(default_factory=list)
    after: list[set[int]] = field(default_factory=list)
    first: set[int] = field(default_factory=set)
    last: set[int] = field(default_factory=set)
    is_nullable: bool = False


class _Lexer:
    """The terminals of a grammar and their possible successors."""

    def __init__(self, rules: Mapping[str, GrammarPart]) -> None:
        self.rules = rules
        self._steps_left = MAX_STEPS
        _refuse_unknown_names(rules)
        self.nullable: set[str] = set()
        self._first: dict[str, set[str]] = {name: set() for name in rules}
        self._follow: dict[str, set[str]] = {name: set() for name in rules}
        self._has_changed = True
        while self._has_changed:
            self._has_changed = False
            for name, part in rules.items():
                if not _is_terminal(name):
                    first, is_nullable = self.starts(part)
                    self._add(self._first[name], first)
                    self._add(self.nullable, {name} if is_nullable else set())
        self._has_changed = True
        while self._has_changed:
            self._has_changed = False
            for name, part in rules.items():
                if not _is_terminal(name):
                    self._walk(part, self._follow[name])

    def starts(self, part: GrammarPart) -> tuple[set[str], bool]:
        """The terminals with which a part of a rule may begin, and whether it may be empty."""
        self._spend(1)
        if isinstance(part, Named):
            if _is_terminal(part.name):
                return {part.name}, False
            return self._first[part.name], part.name in self.nullable
        if isinstance(part, Concatenation):
            found: set[str] = set()
            for one in part.parts:
                first, is_nullable = self.starts(one)
                found |= first
                if not is_nullable:
                    return found, False
            return found, True
        if isinstance(part, Alternation):
            options = [self.starts(option) for option in part.options]
            return set().union(*[first for first, _ in options]), any(empty for _, empty in options)
        assert isinstance(part, Repeat)
        first, is_nullable = self.starts(part.part)
        return first, is_nullable or part.least == 0

    def _walk(self, part: GrammarPart, follow: set[str]) -> None:
        """Notes the successors of each name in a part of a rule."""
        self._spend(1 + len(follow) // 8)
        if isinstance(part, Named):
            self._add(self._follow[part.name], follow)
        elif isinstance(part, Concatenation):
            for one in reversed(part.parts):
                self._walk(one, follow)
                first, is_nullable = self.starts(one)
                follow = first | (follow if is_nullable else set())
        elif isinstance(part, Alternation):
            for option in part.options:
                self._walk(option, follow)
        elif isinstance(part, Repeat):
            self._walk(part.part, follow | (set() if part.most == 1 else self.starts(part.part)[0]))

    def _add(self, known: set[str], new: set[str]) -> None:
        if not new <= known:
            known |= new
            self._has_changed = True

    def check(self) -> None:
        """``NotSupported`` if a lexer may read a terminal on where the next one begins."""
        used = {name for follow in self._follow.values() for name in follow} | self._first["start"]
        read = {name: self._positions(name) for name in sorted(used)}
        for name, positions in read.items():
            if positions.is_nullable:
                raise cannot_express(f"the terminal {self._shown(name)} may be empty")
            followed = [
                read[after].chars[place] for after in self._follow[name] for place in read[after].first
            ]
            for other in read.values() if followed else ():
                going_on = [other.chars[place] for place in self._going_on(positions, other)]
                if any(self._overlap(one, two) for one in going_on for two in followed):
                    raise cannot_express(
                        f"the terminal {self._shown(name)} may be read on where the next one begins"
                    )

    def _going_on(self, one: _Positions, other: _Positions) -> set[int]:
        """The positions of ``other`` that may come after a whole text of ``one``."""
        found: set[int] = set()
        waiting: list[tuple[int, int]] = []
        seen: set[tuple[int, int]] = set()

        def add(first: set[int], second: set[int]) -> None:
            self._spend(len(first) * len(second))
            for pair in [(a, b) for a in first for b in second]:
                if pair not in seen and self._overlap(one.chars[pair[0]], other.chars[pair[1]]):
                    seen.add(pair)
                    waiting.append(pair)

        add(one.first, other.first)
        while waiting:
            a, b = waiting.pop()
            if a in one.last:
                found |= other.after[b]
            add(one.after[a], other.after[b])
        return found

    def _overlap(self, one: Chars, two: Chars) -> bool:
        self._spend(1 + len(one.ranges) * len(two.ranges))
        return _overlap(one, two)

    def _spend(self, num_steps: int) -> None:
        self._steps_left -= num_steps
        if self._steps_left < 0:
            raise cannot_express("the grammar is too large")

    def refuse_left_recursion(self) -> None:
        """``NotSupported`` for a rule that may begin with itself, which llama.cpp refuses."""
        starts = {name: _leading(part, self.nullable) for name, part in self.rules.items()}
        for name in starts:
            seen: set[str] = set()
            waiting = [*starts[name]]
            while waiting:
                at = waiting.pop()
                if at == name:
                    raise cannot_express(f"the rule {name} may begin with itself")
                if at not in seen:
                    seen.add(at)
                    waiting += starts[at]
                    self._spend(1 + len(starts[at]))

    def _shown(self, name: str) -> str:
        return written_part(self.rules[name]) if name[0] == "%" else name

    def _positions(self, name: str) -> _Positions:
        found = _Positions()
        found.first, found.last, found.is_nullable = self._place(self.rules[name], found, (name,))
        return found

    def _place(
        self, part: GrammarPart, found: _Positions, within: tuple[str, ...]
    ) -> tuple[set[int], set[int], bool]:
        """Adds the positions of a part of a terminal. Returns its first and last ones, and whether it may be
        empty."""
        self._spend(1)
        if isinstance(part, Chars):
            if len(found.chars) >= MAX_POSITIONS:
                raise cannot_express("its terminals are too large")
            found.chars.append(part)
            found.after.append(set())
            return {len(found.chars) - 1}, {len(found.chars) - 1}, False
        if isinstance(part, Named):
            if part.name in within:
                raise cannot_express(f"the terminal {part.name} contains itself")
            return self._place(self.rules[part.name], found, (*within, part.name))
        if isinstance(part, Alternation):
            options = [self._place(option, found, within) for option in part.options]
            return (
                set().union(*[first for first, _, _ in options]),
                set().union(*[last for _, last, _ in options]),
                any(is_nullable for _, _, is_nullable in options),
            )
        if isinstance(part, Concatenation):
            return self._place_row(part.parts, found, within)
        is_endless = part.most is None
        times = max(1, part.least) if is_endless else part.most or 0
        first, last, is_nullable = set[int](), set[int](), True
        for number in range(times):
            one_first, one_last, one_nullable = self._place(part.part, found, within)
            if is_endless and number == times - 1:
                self._put_after(found, one_last, one_first)
            self._put_after(found, last, one_first)
            first |= one_first if is_nullable else set()
            may_end = one_nullable or number >= part.least
            last = one_last | (last if may_end else set())
            is_nullable = is_nullable and may_end
        return first, last, is_nullable

    def _place_row(
        self, parts: Sequence[GrammarPart], found: _Positions, within: tuple[str, ...]
    ) -> tuple[set[int], set[int], bool]:
        first, last, is_nullable = set[int](), set[int](), True
        for part in parts:
            one_first, one_last, one_nullable = self._place(part, found, within)
            self._put_after(found, last, one_first)
            first |= one_first if is_nullable else set()
            last = one_last | (last if one_nullable else set())
            is_nullable = is_nullable and one_nullable
        return first, last, is_nullable

    def _put_after(self, found: _Positions, places: set[int], after: set[int]) -> None:
        self._spend(len(places) * len(after))
        for place in places:
            found.after[place] |= after


def _overlap(one: Chars, two: Chars) -> bool:
    """Whether a character may be in both."""
    if one.is_negated and two.is_negated:
        return True  # there are far more characters than a class excludes
    if one.is_negated or two.is_negated:
        plain, negated = (two, one) if one.is_negated else (one, two)
        return any(not _covers(negated.ranges, first, last) for first, last in plain.ranges)
    return any(a <= d and c <= b for a, b in one.ranges for c, d in two.ranges)


def _covers(ranges: Ranges, first: int, last: int) -> bool:
    """Whether the ranges contain all characters from ``first`` to ``last``."""
    for low, high in sorted(ranges):
        if low <= first <= high:
            first = high + 1
    return first > last


def _names_in(part: GrammarPart) -> list[str]:
    if isinstance(part, Named):
        return [part.name]
    if isinstance(part, Chars):
        return []
    inner = (
        part.parts
        if isinstance(part, Concatenation)
        else part.options
        if isinstance(part, Alternation)
        else (part.part,)
    )
    return [name for one in inner for name in _names_in(one)]


def _leading(part: GrammarPart, nullable: set[str]) -> set[str]:
    """The names with which a part may begin."""
    if isinstance(part, Named):
        return {part.name}
    if isinstance(part, Alternation):
        return set().union(*[_leading(option, nullable) for option in part.options])
    if isinstance(part, Repeat):
        return _leading(part.part, nullable)
    found: set[str] = set()
    for one in part.parts if isinstance(part, Concatenation) else ():
        found |= _leading(one, nullable)
        if not _may_be_empty(one, nullable):
            break
    return found


def _may_be_empty(part: GrammarPart, nullable: set[str]) -> bool:
    if isinstance(part, Named):
        return part.name in nullable
    if isinstance(part, Concatenation):
        return all(_may_be_empty(one, nullable) for one in part.parts)
    if isinstance(part, Alternation):
        return any(_may_be_empty(one, nullable) for one in part.options)
    return isinstance(part, Repeat) and (part.least == 0 or _may_be_empty(part.part, nullable))
