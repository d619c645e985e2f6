"""Grammars in Lark's notation as GBNF, where both have the same texts.

A grammar of Lark has terminals, which a lexer reads: each is as long as possible. GBNF has none. So a grammar
is only translated if no terminal can be longer than a place where the next one begins. The parts of the
notation that this module reads: rules, terminals, strings, patterns without flags, ranges, brackets, repeats,
comments, and aliases and signs of Lark's trees. All others are refused.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Mapping
from typing import Final

from agentflow.backends.apis.grammars.gbnf import (
    MAX_CHARS,
    MAX_DEPTH,
    MAX_REPEATS,
    cannot_express,
    read_pattern,
    remembered,
    repeated,
    written_part,
)
from agentflow.backends.apis.grammars.left_recursion import MAX_STEPS, is_terminal, without_left_recursion
from agentflow.protocol.grammars.gbnf import rule_names
from agentflow.protocol.grammars.lexemes import Lexer, TooLarge
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

MAX_TERMINAL_CHARS: Final = 2_000
MAX_SHOWN_CHARS: Final = 60
"""The length of a terminal in an error."""

_TOKEN: Final = re.compile(
    r"(?P<space>[ \t\r\n]+|(?://|#)[^\n]*)"
    r'|(?P<string>"(?:\\.|[^"\\\n])*"i?)'
    r"|(?P<pattern>/(?:\\.|[^/\\\n])+/[a-z]*)"
    r"|(?P<name>_*[a-z](?:[a-z0-9_]|-(?!>))*|_*[A-Z](?:[A-Z0-9_]|-(?!>))*)"
    r"|(?P<times>\{(?:[0-9]{1,9}(?:,[0-9]{0,9})?|,[0-9]{1,9})\}|~[ ]*[0-9]{1,9}(?:\.\.[0-9]{1,9})?)"
    r"|(?P<sign>\.\.|->|[:|()\[\]*+?])"
)
_TREE_SIGNS: Final = re.compile(r"^([ \t]*)(?:!?\?|!)(?=[a-z_][\w-]*[ \t]*:)", re.MULTILINE)
"""Signs before the name of a rule that shape Lark's trees, not the texts."""
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
    root ::= rule2 (rule1 rule2)*
    rule1 ::= "+"
    rule2 ::= [0-9]+

    Raises:
        NotSupported: There is none, or the grammar has parts that are not translated.
    """
    if rule_names(source):
        return source
    try:
        rules = _Reader(source).rules()
        _refuse_unknown_names(rules)
        rules = _needed(rules)
        _refuse_misread_terminals(rules)
        rules = without_left_recursion(rules)
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
    if rule_names(source):
        raise cannot_express("it is in that notation already")
    try:
        rules = _Reader(source).rules()
    except RecursionError:
        raise cannot_express("it is nested too deeply") from None
    _refuse_unknown_names(rules)
    return rules


def _refuse_unknown_names(rules: Mapping[str, GrammarPart]) -> None:
    unknown = {used for part in rules.values() for used in names_in(part)} - set(rules)
    if unknown:
        raise cannot_express(f"{min(unknown)} is not defined")


def _written(part: GrammarPart, names: Mapping[str, str]) -> str:
    return written_part(_renamed(part, names))


def _renamed(part: GrammarPart, names: Mapping[str, str]) -> GrammarPart:
    match part:
        case Named(name):
            return Named(names[name])
        case Series(parts):
            return Series(tuple([_renamed(one, names) for one in parts]))
        case OneOf(options):
            return OneOf(tuple([_renamed(one, names) for one in options]))
        case Repeated(inner, least, most):
            return Repeated(_renamed(inner, names), least, most)
        case _:
            return part


class _Reader:
    """Reads a grammar. Strings and patterns in rules become terminals with names."""

    def __init__(self, source: str) -> None:
        if len(source) > MAX_CHARS:
            raise cannot_express(f"a grammar has at most {MAX_CHARS:,} characters")
        source = _TREE_SIGNS.sub(r"\1", source)
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
            self._in_terminal = is_terminal(name)
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
        return options[0] if len(options) == 1 else OneOf(tuple(options))

    def _row(self) -> GrammarPart:
        parts: list[GrammarPart] = []
        while self._tokens and not self._next_is("|", ")", "]", "->") and not self._begins_rule():
            parts.append(self._repeated())
        if self._next_is("->"):  # a name in Lark's tree
            self._tokens.popleft()
            self._take("name")
        return parts[0] if len(parts) == 1 else Series(tuple(parts))

    def _repeated(self) -> GrammarPart:
        part = self._atom()
        while self._tokens and (self._next_is("*", "+", "?") or self._tokens[0][0] == "times"):
            kind, sign = self._tokens.popleft()
            if kind == "times":
                first, comma, last = sign.strip("{}~ ").replace("..", ",").partition(",")
                least = int(first or 0)
                part = repeated(part, least, (int(last) if last else None) if comma else least)
            else:
                part = repeated(part, sign == "+", 1 if sign == "?" else None)
        return part

    def _atom(self) -> GrammarPart:
        kind, text = self._tokens.popleft()
        if kind == "name":
            if self._in_terminal and not is_terminal(text):
                raise cannot_express(f"a terminal contains the rule {text}")
            return Named(text)
        if kind == "string":
            text = self._string(text)
            if not self._next_is(".."):
                return self._terminal(Fixed(text))
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


def _needed(rules: Mapping[str, GrammarPart]) -> dict[str, GrammarPart]:
    """Returns the rules that the start contains. A lexer reads no terminals of others."""
    found: set[str] = set()
    waiting = ["start"]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += names_in(rules[name])
    return {name: part for name, part in rules.items() if name in found}


def _refuse_misread_terminals(rules: Mapping[str, GrammarPart]) -> None:
    """``NotSupported`` if a lexer may read a terminal on where the next one begins."""
    lexer = Lexer(rules, "start", max_steps=MAX_STEPS, max_copied=MAX_REPEATS, max_places=MAX_TERMINAL_CHARS)
    lexer.whole = {
        name
        for rule, part in rules.items()
        if not is_terminal(rule)
        for name in names_in(part)
        if is_terminal(name)
    }
    for name in sorted(lexer.whole):
        if name in lexer.recursive:
            raise cannot_express(f"the terminal {name} contains itself")
        if name in lexer.too_large:
            raise cannot_express(f"the terminal {_shown(name, rules)} is too large")
        if not lexer.placed(Named(name)).chars:
            raise cannot_express(f"the terminal {_shown(name, rules)} is empty")
    try:
        misread = [one.name for one in lexer.misread() if isinstance(one, Named)]
    except TooLarge:
        raise cannot_express("the grammar is too large") from None
    if misread:
        shown = _shown(min(misread), rules)
        raise cannot_express(f"the terminal {shown} may be read on where the next one begins")


def _shown(name: str, rules: Mapping[str, GrammarPart]) -> str:
    if name[0] != "%":
        return name
    written = written_part(rules[name])
    return written if len(written) <= MAX_SHOWN_CHARS else f"{written[: MAX_SHOWN_CHARS - 1]}…"
