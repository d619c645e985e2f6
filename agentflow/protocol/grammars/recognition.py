"""Recognizes the texts of a grammar (Earley, "An efficient context-free parsing algorithm", 1970, on networks
of states instead of dotted rules, as in Woods, "Transition network grammars", 1970).

A text is read in linear time for a regular expression, and mostly for an unambiguous grammar. Steps are
counted, and a text that needs too many is abandoned.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from agentflow.protocol.bounds.client_pattern import CannotCheck
from agentflow.protocol.grammars.parts import (
    Chars,
    Fixed,
    GrammarPart,
    Named,
    OneOf,
    Repeated,
    Series,
    characters,
)

START: Final = "start"
MAX_STATES: Final = 10_000
"""The states of a network, with repeats written out."""

Recognized = Literal["whole", "beginning", "none"]


@dataclass(slots=True)
class _State:
    """A state, which the next character, a rule or nothing leads to the states after it.

    Attributes:
        chars: Reads one of these characters; None: reads nothing.
        rule: Reads a text of this rule; empty: of none.
        after: The next states.
        ends: The rule whose text ends here; empty: none.
    """

    chars: _Class | None = None
    rule: str = ""
    after: list[int] = field(default_factory=list)
    ends: str = ""


class _Class:
    """A class of characters."""

    __slots__ = ("_ends", "_starts")

    def __init__(self, chars: Chars) -> None:
        self._starts = [first for first, _ in chars.ranges]
        self._ends = [last for _, last in chars.ranges]

    def has(self, point: int) -> bool:
        """Whether a code point is in the class."""
        at = bisect_right(self._starts, point) - 1
        return at >= 0 and point <= self._ends[at]


class Recognizer:
    """Recognizes the texts of one grammar. May be used in several threads.

    Args:
        rules: The rules by name.
        start: The rule whose texts are the grammar's.

    Raises:
        CannotCheck: The grammar is too large.

    >>> from agentflow.protocol.grammars.gbnf import read_gbnf
    >>> numbers = Recognizer(read_gbnf('root ::= [0-9]+ ("," [0-9]+)*'), "root")
    >>> [numbers.recognize(text, most_steps=100) for text in ("1,2", "1,", "1;")]
    ['whole', 'beginning', 'none']
    """

    def __init__(self, rules: Mapping[str, GrammarPart], start: str = START) -> None:
        self._start = start
        self._states: list[_State] = []
        self._classes: dict[Chars, _Class] = {}
        self._starts: dict[str, int] = {}
        for name, part in rules.items():
            end = self._state(_State(ends=name))
            self._starts[name] = self._network(part, end)

    def recognize(self, text: str, *, most_steps: int) -> Recognized:
        """Whether the grammar has the text, or at least one that begins with it.

        Args:
            text: The text.
            most_steps: The steps that this may take, each a fraction of a microsecond.

        Raises:
            CannotCheck: It takes more.
        """
        found = [*self.beginnings(text, most_steps=most_steps)]
        if len(found) <= len(text):
            return "none"
        return "whole" if found[-1] else "beginning"

    def beginnings(self, text: str, *, most_steps: int) -> Iterator[bool]:
        """Yields for each beginning of the text, from the empty one on, whether the grammar has it. Ends
        before the first one with which no text of the grammar begins. Arguments and errors: ``recognize``.
        """
        # The rules that are read from each position on, and where reading goes on after them: the next state,
        # and the position where the rule around it began.
        waiting: list[dict[str, list[tuple[int, int]]]] = []
        items = [(self._starts[self._start], 0)]
        steps_left = most_steps
        for at in range(len(text) + 1):
            here: dict[str, list[tuple[int, int]]] = {}
            waiting.append(here)
            empty: set[str] = set()  # the rules that have the empty text here
            seen = set(items)
            reading: list[tuple[_Class, int, int]] = []
            is_whole = False
            while items:
                number, began = items.pop()
                state = self._states[number]
                found: list[tuple[int, int]] = []
                if state.chars is not None:
                    reading.append((state.chars, state.after[0], began))
                elif state.ends:
                    if began == at:
                        empty.add(state.ends)
                    found = waiting[began].get(state.ends, [])
                    is_whole = is_whole or (state.ends == self._start and began == 0)
                elif state.rule:
                    if state.rule not in here:
                        here[state.rule] = []
                        found = [(self._starts[state.rule], at)]
                    here[state.rule].append((state.after[0], began))
                    if state.rule in empty:
                        found = [*found, (state.after[0], began)]
                else:
                    found = [(after, began) for after in state.after]
                steps_left -= 1 + len(found)
                if steps_left < 0:
                    raise CannotCheck("the text takes too many steps")
                for item in found:
                    if item not in seen:
                        seen.add(item)
                        items.append(item)
            yield is_whole
            if at == len(text):
                return
            point = ord(text[at])
            steps_left -= len(reading)
            items = [*{(after, began) for chars, after, began in reading if chars.has(point)}]
            if not items:
                return

    def _state(self, state: _State) -> int:
        if len(self._states) >= MAX_STATES:
            raise CannotCheck("the grammar is too large")
        self._states.append(state)
        return len(self._states) - 1

    def _network(self, part: GrammarPart, after: int) -> int:
        """Adds the states that read a part. Returns the first one; the last one leads to ``after``."""
        match part:
            case Chars():
                chars = self._classes.setdefault(part, _Class(part))
                return self._state(_State(chars, after=[after]))
            case Fixed(text):
                return self._network(characters(text), after)
            case Named(name):
                return self._state(_State(rule=name, after=[after]))
            case Series(parts):
                for one in reversed(parts):
                    after = self._network(one, after)
                return after
            case OneOf(options):
                return self._state(_State(after=[self._network(option, after) for option in options]))
            case Repeated(inner, least, most):
                first = after
                if most is None:
                    first = self._state(_State(after=[after]))
                    self._states[first].after.append(self._network(inner, first))
                for _ in range((most or least) - least):
                    first = self._state(_State(after=[self._network(inner, first), after]))
                for _ in range(least):
                    first = self._network(inner, first)
                return first
