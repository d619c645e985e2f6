"""Ends the parts of a JSON value that a model would continue forever.

A schema may not limit strings and lists, and llguidance does not limit numbers; a DFA with a counter would
have thousands of states. ``LengthMatcher`` wraps the matcher of such a schema. It follows quotes, brackets,
commas and fractions. Once a part is long enough, it forbids the tokens that continue the part, as long as the
grammar allows it to end there. So tokens of one character reach a bound exactly, and longer ones exceed it by
at most one token.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Final, NamedTuple

from agentflow.engine.grammar.compiler.messages import Lengths
from agentflow.engine.grammar.grammar import Matcher, TokenWords
from agentflow.engine.grammar.json_scalars import MOST_FRACTION
from agentflow.engine.grammar.token_dfa import Vocabulary

_QUOTE, _BACKSLASH, _COMMA, _POINT = b'"\\,.'
_DIGITS: Final = frozenset(b"0123456789")
_SPACES: Final = b" \t\n\r"
_MOST_LEVELS: Final = 4
"""The number of lists around the innermost one whose commas are found. One token rarely closes more."""


class Nesting(NamedTuple):
    """An open list or object."""

    outer: Nesting | None  # the list or object that contains it
    num_commas: int  # so far


class Position(NamedTuple):
    """A place in a JSON text."""

    is_in_string: bool = False
    is_escaped: bool = False
    num_chars: int = 0  # of the open string
    num_digits: int | None = None  # of the current fraction; None outside a fraction
    container: Nesting | None = None  # the innermost open one


def after(position: Position, data: bytes) -> Position:
    """Returns the position after more bytes of a JSON text.

    >>> after(Position(), b'["ab').num_chars
    2
    """
    in_string, escaped, num_chars, num_digits, container = position
    for byte in data:
        if in_string:
            if escaped:
                escaped = False
            elif byte == _QUOTE:
                in_string = False
            else:
                escaped = byte == _BACKSLASH
                num_chars += not 0x80 <= byte < 0xC0  # the first byte of a character
            continue
        num_digits = num_digits + 1 if num_digits is not None and byte in _DIGITS else None
        if byte == _QUOTE:
            in_string, num_chars = True, 0
        elif byte == _POINT:
            num_digits = 0
        elif byte in b"[{":
            container = Nesting(container, 0)
        elif byte in b"]}" and container is not None:
            container = container.outer
        elif byte == _COMMA and container is not None:
            container = Nesting(container.outer, container.num_commas + 1)
    return Position(in_string, escaped, num_chars, num_digits, container)


class LengthMasks:
    """The tokens of a vocabulary that continue strings, lists and fractions. Built in some ten
    milliseconds."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.token_bytes = vocabulary.token_bytes
        self.closing = vocabulary.beginning_with(b'"')
        digits: dict[int, list[int]] = defaultdict(list)
        commas: dict[tuple[bool, int], list[int]] = defaultdict(list)
        separators: list[int] = []
        ends: list[int] = []
        for token, data in enumerate(vocabulary.token_bytes):
            if data[:1].isdigit():
                digits[len(data) - len(data.lstrip(b"0123456789"))].append(token)
            first = data.lstrip(_SPACES)[:1]
            if first and first in b"]}":
                ends.append(token)
            elif first == b"," and list(_levels_of_commas(data, False)).count(0) == 1:
                separators.append(token)
            if b"," in data:
                for is_in_string in (False, True):
                    for level in set(_levels_of_commas(data, is_in_string)):
                        commas[is_in_string, level].append(token)
        self._commas = {place: ~vocabulary.only(tokens) for place, tokens in commas.items()}
        self._all = ~vocabulary.only([])
        self._separators = vocabulary.only(separators)
        self._ends = vocabulary.only(ends)
        longest = max(digits, default=0)
        # For each number of digits that still fit: the tokens that do not begin with more digits.
        self._fractions = [
            ~vocabulary.only(
                [token for length, tokens in digits.items() if length > most for token in tokens]
            )
            for most in range(longest)
        ]

    def without_commas(self, is_in_string: bool, level: int) -> TokenWords:
        """Returns the tokens that have no comma in the list that is ``level`` containers further out."""
        return self._commas.get((is_in_string, level), self._all)

    def without_needless_commas(self, words: TokenWords) -> TokenWords:
        """Returns ``without_commas`` of the innermost list, outside a string, for a place where the grammar
        allows the tokens ``words``. If the list may not end there, the comma that comes next is required."""
        without = self.without_commas(False, 0)
        return without if (words & self._ends).any() else without | self._separators

    def with_digits(self, most: int) -> TokenWords:
        """Returns the tokens that do not begin with more than ``most`` digits."""
        return self._fractions[most] if most < len(self._fractions) else self._all


def _levels_of_commas(data: bytes, is_in_string: bool) -> Iterator[int]:
    """Yields a number for each comma that separates members: how many containers further out its list is than
    the one in which ``data`` begins. Commas of inner containers are left out."""
    position = Position(is_in_string, container=_nested(_MOST_LEVELS))
    levels = {_MOST_LEVELS - level: level for level in range(_MOST_LEVELS)}
    for index in range(len(data)):
        byte = data[index : index + 1]
        if byte == b"," and not position.is_in_string:
            depth = _depth(position.container)
            if depth in levels:
                yield levels[depth]
        position = after(position, byte)


def _nested(depth: int) -> Nesting | None:
    container: Nesting | None = None
    for _ in range(depth):
        container = Nesting(container, 0)
    return container


def _depth(container: Nesting | None) -> int:
    depth = 0
    while container is not None:
        depth, container = depth + 1, container.outer
    return depth


class LengthMatcher:
    """A ``Matcher`` of JSON that narrows the masks of ``inner`` when a part has reached its limit in
    ``lengths``."""

    __slots__ = ("_inner", "_lengths", "_masks", "_positions", "forced", "may_end")

    def __init__(self, inner: Matcher, masks: LengthMasks, lengths: Lengths) -> None:
        self._inner = inner
        self._masks = masks
        self._lengths = lengths
        self._positions = [Position()]
        self.may_end = inner.may_end
        self.forced = inner.forced

    def mask(self) -> TokenWords:
        """See ``Matcher.mask``."""
        words = self._inner.mask()
        for narrower in self._narrower(words):
            narrowed = words & narrower
            # The grammar may require the part to be longer, or its last character to be completed.
            if narrowed.any() or self._inner.may_end():
                words = narrowed
        return words

    def must_end(self) -> bool:
        """See ``Matcher.must_end``."""
        return self._inner.must_end() or (self._inner.may_end() and not self.mask().any())

    def accept(self, token_id: int) -> bool:
        """See ``Matcher.accept``. Accepts all tokens that ``inner`` allows, such as forced text."""
        self._inner.accept(token_id)
        self._positions.append(after(self._positions[-1], self._masks.token_bytes[token_id]))
        return False

    def roll_back(self, num_tokens: int) -> None:
        """See ``Matcher.roll_back``."""
        self._inner.roll_back(num_tokens)
        del self._positions[len(self._positions) - num_tokens :]

    def _narrower(self, allowed: TokenWords) -> Iterator[TokenWords]:
        position, lengths, masks = self._positions[-1], self._lengths, self._masks
        if position.num_digits is not None:
            yield masks.with_digits(max(0, MOST_FRACTION - position.num_digits))
        if lengths.list_items is not None:
            container = position.container
            for level in range(_MOST_LEVELS):
                if container is None:
                    break
                if container.num_commas + 1 < lengths.list_items:
                    pass
                elif level == 0 and not position.is_in_string:
                    # A number, or free white space, could go on instead of a comma that is required.
                    yield masks.without_needless_commas(allowed)
                else:
                    yield masks.without_commas(position.is_in_string, level)
                container = container.outer
        # After a backslash, a quote is a character of the string.
        is_whole = position.is_in_string and not position.is_escaped
        is_long = is_whole and lengths.string_chars is not None
        if is_long and position.num_chars >= lengths.string_chars:  # type: ignore[operator]
            yield masks.closing
