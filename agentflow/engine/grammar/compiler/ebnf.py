"""Translates grammars in EBNF (GBNF, as in llama.cpp, vLLM and SGLang) into expressions or Lark's notation.

The texts stay the same, although llguidance reads Lark's terminals with a lexer: ``lexemes`` decides which
parts become terminals.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter
from typing import Final

from agentflow.engine.grammar.regex import Alternation, CharSet, Concatenation, Regex, Repeat, literal
from agentflow.errors import BadArgument
from agentflow.protocol.grammars.char_ranges import MAX_CODE_POINT, Ranges, all_but, without_surrogates
from agentflow.protocol.grammars.gbnf import read_gbnf
from agentflow.protocol.grammars.lexemes import Lexemes
from agentflow.protocol.grammars.parts import (
    EMPTY,
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

_ENDED: Final = "root and its end"
"""No name that a rule of a grammar may have."""
_ANY_TEXT: Final = Repeated(Chars(((0, MAX_CODE_POINT),)), 0, None)
_SIGNS: Final = {(0, None): "*", (1, None): "+", (0, 1): "?"}


def lark_of_gbnf(source: str, end: str = "") -> str:
    """Returns the grammar in llguidance's dialect of Lark, without directives. Raises ``BadArgument`` if it
    is not valid. ``end``: a text that each of its texts ends with in addition, and that any text may follow.

    >>> print(lark_of_gbnf('root ::= word "s"\\nword ::= [a-z]+'), end="")
    start: word "s"
    word: /[a-z]/+
    """
    try:
        rules = read_gbnf(source)
        if not end:
            return _Writer(rules, Lexemes(rules)).written()
        whole = (Named("root"), Fixed(end))
        followed = Lexemes({**rules, _ENDED: Series((*whole, _ANY_TEXT))}, _ENDED)
        return _Writer({_ENDED: Series(whole), **rules}, followed).written()
    except RecursionError:
        raise BadArgument("the grammar nests too deeply") from None


def regex_of_gbnf(source: str) -> Regex | None:
    """Returns the grammar as an expression; None if a rule contains itself. Raises ``BadArgument`` if it is
    not valid.

    >>> regex_of_gbnf('root ::= "y" | [n-n]') == parse_regex("y|n")
    True
    """
    rules = read_gbnf(source)
    needed: dict[str, set[str]] = {}
    waiting = ["root"]
    while waiting:
        name = waiting.pop()
        if name not in needed:
            needed[name] = set(names_in(rules[name]))
            waiting += needed[name]
    found: dict[str, Regex] = {}
    try:
        for name in TopologicalSorter(needed).static_order():
            found[name] = _regex(rules[name], found)
    except CycleError:
        return None
    except RecursionError:
        raise BadArgument("the grammar nests too deeply") from None
    return found["root"]


def _regex(part: GrammarPart, known: Mapping[str, Regex]) -> Regex:
    match part:
        case Named(name):
            return known[name]
        case Fixed(text):
            return literal(text)
        case Chars(ranges):
            return CharSet(ranges)
        case Repeated(inner, least, most):
            return Repeat(_regex(inner, known), least, most)
        case Series(parts):
            return Concatenation(tuple([_regex(one, known) for one in parts]))
        case OneOf(options):
            return Alternation(tuple([_regex(option, known) for option in options]))


class _Writer:
    def __init__(self, rules: Mapping[str, GrammarPart], lexemes: Lexemes) -> None:
        self._rules = rules
        self._lexemes = lexemes
        self._names: dict[str, str] = {lexemes.start: "start"}
        taken = {"start"}
        for name in rules:
            new = re.sub(r"([a-z])([A-Z])", r"\1_\2", name).lower()
            new = re.sub("[^a-z0-9_]", "_", new)
            new = new if new[0].isalpha() else f"r{new}"
            number = 1
            while name != lexemes.start and (unique := new if number == 1 else f"{new}_{number}") in taken:
                number += 1
            if name != lexemes.start:
                taken.add(unique)
                self._names[name] = unique

    def written(self) -> str:
        """Returns the lines of the rules and terminals that the start needs, in their order in the source."""
        needed = {(self._lexemes.start, False)}
        waiting = [*needed]
        while waiting:
            name, is_terminal = waiting.pop()
            for other in names_in(self._rules[name]):
                place = (other, is_terminal or other in self._lexemes.whole)
                if place not in needed:
                    needed.add(place)
                    waiting.append(place)
        lines = []
        for name, part in self._rules.items():
            for is_terminal in (False, True):
                if (name, is_terminal) in needed:
                    body = self._part(part, is_terminal, is_inner=False)
                    lines.append(f"{self._name(name, is_terminal)}: {body}\n")
        return "".join(lines)

    def _name(self, name: str, is_terminal: bool) -> str:
        return self._names[name].upper() if is_terminal else self._names[name]

    def _part(self, part: GrammarPart, is_terminal: bool, *, is_inner: bool = True) -> str:
        """Returns a part of a terminal or of a rule; ``is_inner``: as an operand of another part."""
        match part:
            case Named(name):
                return self._name(name, is_terminal or name in self._lexemes.whole)
            case Fixed(text) if not is_terminal and len(text) > 1 and text in self._lexemes.divided:
                return self._part(characters(text), is_terminal, is_inner=is_inner)
            case Fixed(text):
                return json.dumps(text, ensure_ascii=False)
            case Chars(((first, last),)) if first == last:
                return json.dumps(chr(first), ensure_ascii=False)
            case Chars(ranges):
                return f"/{_char_class(ranges)}/"
            case Repeated(inner, least, most):
                operand = self._part(inner, is_terminal)
                operand = f"({operand})" if isinstance(inner, Repeated) else operand
                return operand + (_SIGNS.get((least, most)) or _counted(least, most))
            case Series(parts):
                if not parts:
                    return '""'
                written = " ".join([self._part(one, is_terminal) for one in parts])
                return f"({written})" if is_inner else written
            case OneOf(options):
                present = [option for option in options if option != EMPTY]
                rows = [self._part(option, is_terminal, is_inner=False) for option in present]
                if len(rows) == len(options):
                    return f"({' | '.join(rows)})" if is_inner else " | ".join(rows)
                optional = f"({' | '.join(rows)})?" if rows else '""'
                return f"({optional})" if is_inner else optional


def _counted(least: int, most: int | None) -> str:
    return f"{{{least}}}" if least == most else f"{{{least},{'' if most is None else most}}}"


def _char_class(ranges: Ranges) -> str:
    others = without_surrogates(all_but(ranges))
    if 0 < len(others) < len(ranges):
        return f"[^{_char_ranges(others)}]"
    return f"[{_char_ranges(ranges)}]"


def _char_ranges(ranges: Ranges) -> str:
    return "".join([_char(first) + (f"-{_char(last)}" if last > first else "") for first, last in ranges])


def _char(code_point: int) -> str:
    char = chr(code_point)
    if char.isascii() and char.isalnum():
        return char
    if code_point <= 0xFF:
        return f"\\x{code_point:02x}"
    return f"\\u{code_point:04x}" if code_point <= 0xFFFF else f"\\U{code_point:08x}"
