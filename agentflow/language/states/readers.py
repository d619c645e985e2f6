"""The value of a variable, and iterators over its text, its reasoning, and the value so far, from the start.

The iterators have no queue, so slow readers get fewer and larger steps, and they are no generators, so that
they may be dropped anywhere.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from typing import Any, Final, TypeAlias

from agentflow.errors import InvalidValue, shown_error
from agentflow.language.failures.user_code import UserCode
from agentflow.language.states.run import VariableNode
from agentflow.language.typed.json_types import NothingYet, NotValid, partial_value
from agentflow.language.typed.replies import Reply, make_reply
from agentflow.language.typed.values import ValueType, warn_of_length
from agentflow.protocol.constraint import Constraint
from agentflow.protocol.growing_text import GrowingText


def complete_value(node: VariableNode) -> Any:
    """The complete value of a variable; raises its failure. ``InvalidValue`` if its text has none. The text
    is read once: a validator may be slow, or count its calls."""
    kind = node.value_type
    if node.end.finish_reason == "length" and not kind.may_be_truncated:
        raise _invalid(node, node.notation, kind)
    if node.read is None:
        node.read = _read(node, node.notation, kind, kind.constraint)
    value, error = node.read
    if error is not None:
        raise _invalid(node, node.notation, kind, error) from (error.__cause__ or error)
    return value


def complete_answer(node: VariableNode, text: str, kind: ValueType) -> Any:
    """The value of type ``kind`` in the text of a complete reply. ``InvalidValue`` if it has none."""
    if node.end.finish_reason == "length":
        raise _invalid(node, text, kind)
    value, error = _read(node, text, kind, None)
    if error is not None:
        raise _invalid(node, text, kind, error) from (error.__cause__ or error)
    return value


def _read(
    node: VariableNode, text: str, kind: ValueType, bounds: Constraint | None
) -> tuple[Any, Exception | None]:
    try:
        with UserCode(f"the validation of {node.name!r}"):
            value = kind.read(text)
        warn_of_length(node.name, text, bounds)
    except (ValueError, RecursionError) as error:
        return None, error
    return value, None


def _invalid(node: VariableNode, text: str, kind: ValueType, why: Exception | None = None) -> InvalidValue:
    end, shown = node.end, kind.shown
    quoted = repr(text if len(text) <= 200 else f"{text[:199]}…")
    if end.finish_reason == "length":
        num = end.usage.output_tokens
        tokens = f"{num} token{'s' * (num != 1)}"
        what = f"was truncated after {tokens} and is not a complete {shown}, raise max_tokens"
    else:
        what = f"ended ({end.finish_reason}) with a text that is not a valid {shown}"
    shown_why = "" if why is None else shown_error(why, str)
    by = f" by {node.state.capabilities.model}"
    error = InvalidValue(f"{node.name!r} {what}: {quoted}{by}{f' ({shown_why})' if shown_why else ''}")
    error.text = text
    if why is not None:
        error.errors = why.errors if isinstance(why, NotValid) else ({"loc": (), "msg": shown_why},)
    if node.line is not None:
        error.add_note(f"what failed was appended at {node.line}")
    return error


class _Reader(AsyncIterator[str]):
    def __init__(self, node: VariableNode) -> None:
        self._node = node
        self._num_read = 0  # characters


class TextReader(_Reader):
    """Iterates over the text, delta by delta. Raises the variable's failure."""

    async def __anext__(self) -> str:
        node = self._node
        while not (delta := node.text_from(self._num_read)):
            if node.is_done:
                await node.settled()
                node.raise_failure()
                raise StopAsyncIteration
            node.follow()
            await node.change()
        self._num_read += len(delta)
        return delta


class ReasoningReader(_Reader):
    """Iterates over the reasoning before the text. Ends where the text begins, or with the variable."""

    async def __anext__(self) -> str:
        node = self._node
        while not (delta := node.grown_reasoning.part(self._num_read)):
            if node.grown or node.is_done:
                raise StopAsyncIteration
            node.follow()
            await node.change()
        self._num_read += len(delta)
        return delta


_BLANKS: Final = re.compile(r"[ \t\r\n]*")
_SCALAR: Final = re.compile(r"[^ \t\r\n,\]]*")
_NESTED: Final = re.compile(r'[^"\[\]{}]*')
_STRING: Final = re.compile(r'[^"\\]*(?:\\.[^"\\]*)*', re.DOTALL)
_PIECE_CHARS: Final = 1_024
_Wait: TypeAlias = Generator[None, None, tuple[int, str]]


def find_elements(text: GrowingText) -> Iterator[tuple[int, int] | None]:
    """Yields where each element of a JSON array begins and ends, as soon as the text after it has begun, and
    None where more text is needed. Ends where no further element can begin. Reads the text once, and does not
    check the elements.

    >>> list(find_elements(GrowingText('[1, "a"]')))
    [(1, 2), (4, 7)]
    """

    def after(pattern: re.Pattern[str], at: int) -> _Wait:
        """The place after the characters of the pattern, and the character there."""
        while True:
            piece = text.part(at, _PIECE_CHARS)
            found = pattern.match(piece)
            end = 0 if found is None else found.end()
            at += end
            if end < len(piece) and (piece[end] != "\\" or pattern is not _STRING):
                return at, piece[end]
            if len(piece) < 2 or not end:  # there is no more, or half an escape
                yield

    at, before = 0, "["
    while True:
        at, char = yield from after(_BLANKS, at)
        if char != before:
            return
        start, char = yield from after(_BLANKS, at + 1)
        if char == "]":
            return
        at, depth = start, 0
        while True:
            if char == '"':
                at, char = yield from after(_STRING, at + 1)
                at += 1
            elif char in "[{":
                at, depth = at + 1, depth + 1
            elif char in "]}" and depth:
                at, depth = at + 1, depth - 1
            else:
                at, char = yield from after(_SCALAR, at)
            if not depth:
                break
            at, char = yield from after(_NESTED, at)
        end = at
        at, char = yield from after(_BLANKS, end)
        if char not in ",]":  # a number may go on, also in two texts: "1." and "5"
            return
        yield start, end
        before = ","


class ElementReader(AsyncIterator[Any]):
    """Iterates over a list while it is generated, and returns each element when it is complete. An invalid
    element raises ``InvalidValue`` when the whole text is there."""

    def __init__(self, node: VariableNode, read: Callable[[str], Any]) -> None:
        self._node = node
        self._read = read
        self._places = find_elements(node.grown)
        self._place: tuple[int, int] | None = None  # of the element that is read next

    async def __anext__(self) -> Any:
        node = self._node
        while (place := self._place or next(self._places, None)) is None:
            if node.is_done:
                await node.settled()
                complete_value(node)  # raises for a truncated or invalid text
                raise StopAsyncIteration
            node.follow()
            await node.change()
        self._place, (start, end) = place, place
        try:
            with UserCode(f"the validation of {node.name!r}"):
                element = self._read(node.grown.part(start, end - start))
        except (ValueError, RecursionError) as error:
            await node.settled()
            node.raise_failure()
            raise _invalid(node, node.notation, node.value_type, error) from (error.__cause__ or error)
        self._place = None
        return element


_NOTHING = object()


class PartialReader(AsyncIterator[Any]):
    """Iterates over the value so far, each time longer than before; the last is the complete value."""

    def __init__(self, node: VariableNode) -> None:
        self._node = node
        self._num_read = 0
        self._shown: Any = _NOTHING
        self._is_over = False

    async def __anext__(self) -> Any:
        node = self._node
        while not self._is_over:
            if len(node.grown) > self._num_read:
                self._num_read = len(node.grown)
                try:
                    partial = self._so_far()
                except NothingYet:
                    continue
                if self._is_new(partial):
                    return partial
            elif not node.is_done:
                node.follow()
                await node.change()
            else:
                self._is_over = True
                await node.settled()
                complete_value(node)  # raises for a truncated or invalid text
                if self._is_new(self._so_far(is_whole=True)):
                    return self._shown
        raise StopAsyncIteration

    def _so_far(self, *, is_whole: bool = False) -> Any:
        """The value so far; ``NothingYet`` if there is none."""
        node = self._node
        if node.value_type.comes_in_parts:
            return json.loads(node.notation) if is_whole else partial_value(node.notation)
        if node.reply is None:
            return node.notation
        if (reply := make_reply(node.reply.now())) == Reply("") and not is_whole:
            raise NothingYet("the reply is empty so far")
        return reply

    def _is_new(self, value: Any) -> bool:
        is_new = self._shown is _NOTHING or bool(value != self._shown)
        self._shown = value
        return is_new
