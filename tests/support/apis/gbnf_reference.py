"""A small reader of GBNF, written from llama.cpp's description: the reference for translated grammars."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

_TOKEN = re.compile(
    r"\s*(?:(?P<rule>[a-zA-Z][a-zA-Z0-9-]*)\s*::=|(?P<name>[a-zA-Z][a-zA-Z0-9-]*)|(?P<string>\"(?:\\.|[^\"\\])*\")"
    r"|(?P<chars>\[(?:\\.|[^\]\\])*\])|(?P<times>\{\d+(?:,\d*)?\})|(?P<sign>[|()*+?.]))"
)
_CHAR = re.compile(r"\\(?:x(..)|u(....)|U(........)|(.))|(.)", re.DOTALL)
_SHORT = {"n": "\n", "r": "\r", "t": "\t"}


class Gbnf:
    """A grammar.

    >>> Gbnf('root ::= "a"+ [^b]').matches("aac")
    True
    """

    def __init__(self, source: str) -> None:
        self._tokens: list[tuple[str, str]] = []
        at = 0
        while source[at:].strip():
            found = _TOKEN.match(source, at)
            assert found is not None, source[at:]
            kind = str(found.lastgroup)
            self._tokens.append((kind, found[kind]))
            at = found.end()
        self._rules: dict[str, Any] = {}
        while self._tokens:
            kind, name = self._tokens.pop(0)
            assert kind == "rule"
            assert name not in self._rules
            self._rules[name] = self._either()

    def matches(self, text: str) -> bool:
        """Whether the whole text is in the language of ``root``."""

        @cache
        def ends_of_rule(name: str, start: int) -> frozenset[int]:
            return ends(self._rules[name], start)

        def ends(part: Any, start: int) -> frozenset[int]:
            match part:
                case ("name", name):
                    return ends_of_rule(name, start)
                case ("char", members, is_negated):
                    if start == len(text):
                        return frozenset()
                    is_in = any(first <= text[start] <= last for first, last in members)
                    return frozenset([start + 1]) if is_in != is_negated else frozenset()
                case ("row", parts):
                    found = frozenset([start])
                    for one in parts:
                        found = frozenset(end for at in found for end in ends(one, at))
                    return found
                case ("either", options):
                    return frozenset(end for option in options for end in ends(option, start))
            _, inner, least, most = part
            reached, found = frozenset([start]), frozenset([start] if least == 0 else [])
            for count in range(1, (least + len(text) + 1 if most is None else most) + 1):
                reached = frozenset(end for at in reached for end in ends(inner, at))
                found |= reached if count >= least else frozenset()
            return found

        return len(text) in ends(("name", "root"), 0)

    def _either(self) -> Any:
        options = [self._row()]
        while self._tokens and self._tokens[0] == ("sign", "|"):
            self._tokens.pop(0)
            options.append(self._row())
        return ("either", options)

    def _row(self) -> Any:
        parts: list[Any] = []
        while self._tokens and self._tokens[0][0] != "rule" and self._tokens[0][1] not in ("|", ")"):
            kind, token = self._tokens.pop(0)
            if kind == "times" or token in ("*", "+", "?"):
                least, most = {"*": (0, None), "+": (1, None), "?": (0, 1)}.get(token) or _counts(token)
                parts[-1] = ("repeat", parts[-1], least, most)
            elif kind == "string":
                chars = [("char", [(char, char)], False) for char in _chars(token[1:-1])]
                parts.append(("row", chars))
            elif kind == "chars":
                parts.append(_char_class(token[1:-1]))
            elif kind == "name":
                parts.append(("name", token))
            else:
                assert token == "("
                parts.append(self._either())
                assert self._tokens.pop(0) == ("sign", ")")
        return ("row", parts)


def _counts(token: str) -> tuple[int, int | None]:
    first, comma, last = token[1:-1].partition(",")
    return int(first), (int(last) if last else None) if comma else int(first)


def _chars(written: str) -> list[str]:
    return [_char(found) for found in _CHAR.finditer(written)]


def _char(found: re.Match[str]) -> str:
    if digits := found[1] or found[2] or found[3]:
        return chr(int(digits, 16))
    return found[5] or _SHORT.get(found[4], found[4])


def _char_class(written: str) -> Any:
    is_negated = written.startswith("^")
    found = [*_CHAR.finditer(written[is_negated:])]
    members: list[tuple[str, str]] = []
    while found:
        first = _char(found.pop(0))
        if len(found) > 1 and found[0][0] == "-":
            found.pop(0)
            members.append((first, _char(found.pop(0))))
        else:
            members.append((first, first))
    return ("char", members, is_negated)
