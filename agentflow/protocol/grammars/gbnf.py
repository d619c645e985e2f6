"""Grammars in GBNF, the notation of llama.cpp, as trees.

Such a grammar has no lexer: its texts are the sequences of characters that the rules derive from ``root``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from agentflow.errors import BadArgument
from agentflow.protocol.grammars.char_ranges import MAX_CODE_POINT, all_but, merge_ranges, without_surrogates
from agentflow.protocol.grammars.parts import (
    EMPTY,
    Chars,
    Fixed,
    GrammarPart,
    Named,
    OneOf,
    Repeated,
    Series,
    names_in,
)

MAX_DEPTH: Final = 100
"""The deepest nesting of brackets in a rule."""
MAX_REPEATS: Final = 1_000_000_000

_RULE: Final = re.compile(r"^[ \t]*(<?[\w-]+>?)[ \t]*::=", re.MULTILINE)
_SPACE: Final = re.compile(r"(?:[ \t]|#[^\r\n]*)*")
_SPACE_AND_LINES: Final = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")
_NAME: Final = re.compile(r"[\w-]+")
_CHAR: Final = re.compile(
    r'[^\\]|\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([nrt"\\\[\]-]))', re.DOTALL
)
_TIMES: Final = re.compile(r"\{\s*([0-9]{1,9})\s*(,?)\s*([0-9]{0,9})\s*\}", re.ASCII)
_NAMED_ESCAPES: Final = {"n": "\n", "r": "\r", "t": "\t"}


def rule_names(source: str) -> list[str]:
    """Returns the names before ``::=``. Empty for grammars in other notations.

    >>> rule_names('root ::= "a" b\\nb ::= "c"'), rule_names('start: "root ::="')
    (['root', 'b'], [])
    """
    return _RULE.findall(source)


def read_gbnf(source: str) -> dict[str, GrammarPart]:
    """Returns the rules by name. Raises ``BadArgument`` if the grammar is not valid.

    >>> read_gbnf('root ::= "a" | [b-d]*')
    {'root': OneOf(options=(Fixed(text='a'), Repeated(part=Chars(ranges=((98, 100),)), least=0, most=None)))}
    """
    rules = dict(_Reader(source).rules())
    if "root" not in rules:
        raise BadArgument("No 'root' rule found")
    for part in rules.values():
        for name in names_in(part):
            if name not in rules:
                raise BadArgument(f"Rule {name!r} not found")
    return rules


class _Reader:
    def __init__(self, source: str) -> None:
        self._source = source
        self._at = 0
        self._depth = 0

    def rules(self) -> Iterator[tuple[str, GrammarPart]]:
        self._skip(_SPACE_AND_LINES)
        while self._at < len(self._source):
            name = self._take(_NAME, "a name")[0]
            self._skip(_SPACE)
            if not self._source.startswith("::=", self._at):
                raise self._error("Expected ::=")
            self._at += 3
            self._skip(_SPACE_AND_LINES)
            yield name, self._choice(_SPACE)
            if self._at < len(self._source) and self._source[self._at] not in "\r\n":
                raise self._error("Expected the end of the line")
            self._skip(_SPACE_AND_LINES)

    def _choice(self, space: re.Pattern[str]) -> GrammarPart:
        options = [self._row(space)]
        while self._next() == "|":
            self._at += 1
            self._skip(_SPACE_AND_LINES)
            options.append(self._row(space))
        return options[0] if len(options) == 1 else OneOf(tuple(options))

    def _row(self, space: re.Pattern[str]) -> GrammarPart:
        parts: list[GrammarPart] = []
        while (part := self._atom()) is not None:
            self._skip(space)
            while (sign := self._next()) and sign in "*+?{":
                part = self._repeated(part)
                self._skip(space)
            if part != EMPTY:
                parts.append(part)
        return parts[0] if len(parts) == 1 else Series(tuple(parts))

    def _atom(self) -> GrammarPart | None:
        sign = self._next()
        if sign == '"':
            self._at += 1
            chars = []
            while self._next() != '"':
                chars.append(self._char())
            self._at += 1
            return Fixed("".join(chars)) if chars else EMPTY
        if sign == "[":
            return self._char_class()
        if sign == ".":
            self._at += 1
            return Chars(((0, MAX_CODE_POINT),))
        if sign == "(":
            return self._group()
        if sign and _NAME.match(sign):
            return Named(self._take(_NAME, "a name")[0])
        return None

    def _group(self) -> GrammarPart:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise self._error("The grammar nests too deeply")
        self._at += 1
        self._skip(_SPACE_AND_LINES)
        inside = self._choice(_SPACE_AND_LINES)
        if self._next() != ")":
            raise self._error("Expected ')'")
        self._at += 1
        self._depth -= 1
        return inside

    def _char_class(self) -> GrammarPart:
        self._at += 1
        is_negated = self._next() == "^"
        self._at += is_negated
        ranges: list[tuple[int, int]] = []
        while self._next() != "]":
            first = last = ord(self._char())
            if self._next() == "-" and not self._source.startswith("-]", self._at):
                self._at += 1
                last = ord(self._char())
                if last < first:
                    raise self._error("The range is empty")
            ranges.append((first, last))
        merged = merge_ranges(ranges)
        found = without_surrogates(all_but(merged) if is_negated else merged)
        if not found:
            raise self._error("The class has no characters")
        self._at += 1
        return Chars(tuple(found))

    def _char(self) -> str:
        found = self._take(_CHAR, "a character or an escape such as \\n")
        if digits := found[1] or found[2] or found[3]:
            point = int(digits, 16)
            if point > MAX_CODE_POINT or 0xD800 <= point <= 0xDFFF:
                raise self._error("No such character")
            return chr(point)
        return _NAMED_ESCAPES.get(found[4], found[4]) if found[4] else found[0]

    def _repeated(self, part: GrammarPart) -> GrammarPart:
        sign = self._next()
        if sign == "{":
            found = self._take(_TIMES, "{least,most}")
            least = int(found[1])
            most = (int(found[3]) if found[3] else None) if found[2] else least
            if (found[3] and not found[2]) or (most is not None and most < least):
                raise self._error("Expected {least,most}")
        else:
            self._at += 1
            least, most = int(sign == "+"), 1 if sign == "?" else None
        return EMPTY if part == EMPTY or most == 0 else Repeated(part, least, most)

    def _next(self) -> str:
        return self._source[self._at : self._at + 1]

    def _skip(self, space: re.Pattern[str]) -> None:
        found = space.match(self._source, self._at)
        assert found is not None
        self._at = found.end()

    def _take(self, expected: re.Pattern[str], meaning: str) -> re.Match[str]:
        found = expected.match(self._source, self._at)
        if found is None:
            raise self._error(f"Expected {meaning}")
        self._at = found.end()
        return found

    def _error(self, reason: str) -> BadArgument:
        line = self._source.count("\n", 0, self._at) + 1
        before, after = self._source[max(0, self._at - 20) : self._at], self._source[self._at : self._at + 20]
        return BadArgument(f"{reason} at line {line}, {before!r} ^ {after!r}")
