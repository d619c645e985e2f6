"""Rewrites the rules of a grammar so that none begins with itself: llama.cpp refuses left recursion.

The texts stay the same: ``sum: sum "+" term | term`` becomes ``term ("+" term)*`` (Aho and Ullman, "The
theory of parsing, translation, and compiling", 1972, on rules without the empty text).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from typing import Final

from agentflow.backends.apis.grammars.gbnf import (
    NOT_EMPTY,
    cannot_express,
    may_be_empty,
    without_empty_rounds,
)
from agentflow.protocol.grammars.parts import (
    EMPTY,
    GrammarPart,
    Named,
    OneOf,
    Repeated,
    Series,
    names_in,
    parts_in,
)

MAX_STEPS: Final = 25_000
"""The steps of each check of one grammar, which take some hundredths of a second."""


def without_left_recursion(rules: Mapping[str, GrammarPart]) -> dict[str, GrammarPart]:
    """Returns rules with the same texts: none begins with itself, and none repeats a part that may be empty
    without limit.

    >>> from agentflow.protocol.grammars.parts import Fixed
    >>> start = OneOf((Series((Named("start"), Fixed("a"))), Fixed("b")))
    >>> without_left_recursion({"start": start}) == {
    ...     "start": Series((Fixed("b"), Repeated(Fixed("a"), 0, None)))
    ... }
    True

    Raises:
        NotSupported: A rule has no texts, or the rules would be too large.
    """
    return _Rewriter(rules).rewritten()


def is_terminal(name: str) -> bool:
    """Whether the name is that of a terminal."""
    return name.upper() == name


class _Rewriter:
    """Rewrites one rule after the other. Of the rules that are done, none begins with itself by way of others
    that are done."""

    def __init__(self, rules: Mapping[str, GrammarPart]) -> None:
        self._nullable = _nullable_rules(rules)
        self._terminals = {name: part for name, part in rules.items() if is_terminal(name)}
        self._steps_left = MAX_STEPS
        self._sources = rules
        self._rules: dict[str, GrammarPart] = {}
        self._firsts: dict[str, set[str]] = defaultdict(set)
        self._users: dict[str, set[str]] = defaultdict(set)
        """The rules that may begin with a rule, without others between them."""
        self._waiting: list[str] = []
        self._done: set[str] = set()
        for name, part in rules.items():
            self._define(name, part)

    def rewritten(self) -> dict[str, GrammarPart]:
        """Returns the rules."""
        for name in self._waiting:  # grows
            around = self._beginning_with(name)
            if self._firsts[name].isdisjoint(around):
                pass
            elif name in self._nullable:
                self._define(name, Repeated(Named(name + NOT_EMPTY), 0, 1))
                self._waiting.append(name + NOT_EMPTY)
                self._done.discard(name + NOT_EMPTY)
            else:
                self._define(name, self._without_recursion(name, around))
            self._done.add(name)
        return self._rules

    def _define(self, name: str, part: GrammarPart) -> None:
        """Sets the texts of a rule, and defines rules that they need."""
        if name not in self._rules:
            self._waiting.append(name)
        for _ in parts_in(part):
            self._spend(1)
        part = self._rules[name] = without_empty_rounds(part, self._terminals, self._nullable)
        for first in self._firsts[name]:
            self._users[first].discard(name)
        firsts = self._firsts[name] = _leading(part, self._nullable)
        for first in firsts:
            self._users[first].add(name)
        for other in names_in(part):
            if other.endswith(NOT_EMPTY) and other not in self._rules:
                source = self._sources[other.removesuffix(NOT_EMPTY)]
                self._define(other, _one_of(self._not_empty(source), other))

    def _beginning_with(self, name: str) -> set[str]:
        """Returns the rule and the rules that may begin with it."""
        found = {name}
        waiting = [name]
        while waiting:
            new = self._users[waiting.pop()] - found
            self._spend(1 + len(new))
            found |= new
            waiting += new
        return found

    def _without_recursion(self, name: str, around: Set[str]) -> GrammarPart:
        """Returns the texts of a rule. ``around``: the rule, and the rules that may begin with it."""
        tails, others = self._split(self._rules[name], name, around)
        first = _one_of(others, name)
        more = [option for tail in tails for option in self._not_empty(tail)]
        return _series(first, Repeated(_one_of(more), 0, None)) if more else first

    def _split(
        self, part: GrammarPart, name: str, around: Set[str]
    ) -> tuple[list[GrammarPart], list[GrammarPart]]:
        """Divides the texts of a part into the ones that begin with the rule, whose rest it returns, and the
        others."""
        self._spend(len(part.parts) if isinstance(part, Series) else 1)
        if _leading(part, self._nullable).isdisjoint(around):
            return [], [part]
        match part:
            case Named(other) if other == name:
                return [EMPTY], []
            case Named(other):
                return self._split(self._rules[other], name, around) if other in self._done else ([], [part])
            case OneOf(options):
                both = [self._split(option, name, around) for option in options]
                return [one for tails, _ in both for one in tails], [one for _, more in both for one in more]
            case Repeated(inner, least, most):
                again = EMPTY if most == 1 else Repeated(inner, max(least - 1, 0), most and most - 1)
                tails, others = self._split(_series(inner, again), name, around)
                return tails, others if least else [*others, EMPTY]
            case Series((first, *rest)):
                tails, others = self._split(first, name, around)
                empty = [other for other in others if may_be_empty(other, self._nullable)]
                others = [other for other in others if other not in empty]
                for one in [one for other in empty for one in self._not_empty(other)]:
                    more_tails, more = self._split(one, name, around)
                    tails, others = tails + more_tails, others + more
                self._spend(len(tails) + len(others))
                tails, others = [[_series(one, *rest) for one in some] for some in (tails, others)]
                if empty:
                    more_tails, more = self._split(_series(*rest), name, around)
                    return tails + more_tails, others + more
                return tails, others
        raise AssertionError(part)

    def _not_empty(self, part: GrammarPart) -> list[GrammarPart]:
        """Returns options that together have the texts of a part except the empty one."""
        self._spend(1)
        if not may_be_empty(part, self._nullable):
            return [part]
        match part:
            case Named(name):
                return [Named(name + NOT_EMPTY)]
            case OneOf(options):
                return [one for option in options for one in self._not_empty(option)]
            case Repeated(inner, _, most):
                rounds = self._not_empty(inner)
                return [Repeated(_one_of(rounds), 1, most)] if rounds and most != 1 else rounds
            case Series(parts):
                found = [
                    _series(one, *parts[number:])
                    for number, first in enumerate(parts, 1)
                    for one in self._not_empty(first)
                ]
                self._spend(len(parts) * len(found))
                return found
        raise AssertionError(part)

    def _spend(self, num_steps: int) -> None:
        self._steps_left -= num_steps
        if self._steps_left < 0:
            raise cannot_express("the grammar is too large")


def _series(*parts: GrammarPart) -> GrammarPart:
    flat: list[GrammarPart] = []
    for part in parts:
        flat += part.parts if isinstance(part, Series) else [part]
    return flat[0] if len(flat) == 1 else Series(tuple(flat))


def _one_of(options: Sequence[GrammarPart], name: str = "") -> GrammarPart:
    """Returns one of the options. ``name``: the rule that they are for."""
    if not options:
        raise cannot_express(f"the rule {name} has no texts")
    return options[0] if len(options) == 1 else OneOf(tuple(options))


def _nullable_rules(rules: Mapping[str, GrammarPart]) -> Set[str]:
    """The rules and terminals that may be empty."""
    users: dict[str, list[str]] = {name: [] for name in rules}
    sizes = dict.fromkeys(rules, 1)
    for name, part in rules.items():
        for other in names_in(part):
            users[other].append(name)
            sizes[name] += 1
    nullable: set[str] = set()
    num_steps = 0
    waiting = [*rules]
    while waiting and num_steps <= MAX_STEPS:
        name = waiting.pop()
        num_steps += sizes[name]
        if name not in nullable and may_be_empty(rules[name], nullable):
            nullable.add(name)
            waiting += users[name]
    if num_steps > MAX_STEPS:
        raise cannot_express("the grammar is too large")
    return nullable


def _leading(part: GrammarPart, nullable: Set[str]) -> set[str]:
    """The names with which a part may begin."""
    match part:
        case Named(name):
            return {name}
        case OneOf(options):
            return set().union(*[_leading(option, nullable) for option in options])
        case Repeated(inner):
            return _leading(inner, nullable)
        case Series(parts):
            found: set[str] = set()
            for one in parts:
                found |= _leading(one, nullable)
                if not may_be_empty(one, nullable):
                    break
            return found
        case _:
            return set()
