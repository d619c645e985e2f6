"""The result of a graph: the program's return value in its trace, with outputs in the place of values.

``make_result`` finds the values in the return value, also in texts, records and containers, and ``filled``
puts the values of a run there. A value that ``filled`` could not reach is refused.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeAlias

from agentflow.errors import BadArgument, DataDependent
from agentflow.language.expressions import Expression, Sequence_
from agentflow.language.markers import MARKERS
from agentflow.language.records import copy_with, is_record, members
from agentflow.language.states.variable import Reference
from agentflow.protocol.text.transform import Transform


class GraphOutput(NamedTuple):
    """Represents the value of this variable in a graph's result."""

    variable: int


class VariableText(NamedTuple):
    """Represents the text of this variable in a graph's result, after the transforms."""

    variable: int
    transforms: tuple[Transform, ...] = ()


Output: TypeAlias = GraphOutput | VariableText


class GraphText(NamedTuple):
    """Represents a text with the values of these outputs, as ``format`` writes them."""

    parts: tuple[str | Output, ...]


class _Record(NamedTuple):
    """Represents an object like ``original`` with other members."""

    original: Any
    members: dict[str, Any]


class _Items(NamedTuple):
    """Represents a dict of a subclass, like ``original``, with other items."""

    original: dict[Any, Any]
    items: dict[Any, Any]


Place: TypeAlias = Literal["value", "text", "sum"]
"""Where an expression is: alone, formatted into a text, or in a sum of texts."""
OutputOf: TypeAlias = Callable[[Expression, Place], Any]


def make_result(value: Any, name: str, output_of: OutputOf) -> Any:
    """The return value of a program, with outputs in the place of values.

    Args:
        value: The return value.
        name: The program's name in errors.
        output_of: The output of an expression, given its place. It raises if the expression is no value.

    Raises:
        DataDependent: A value is where no run could put it.
    """
    try:
        return _Result(name, output_of).made(value)
    except RecursionError:
        raise DataDependent(
            f"{name} returns values in an object that refers to itself, or is too deep"
        ) from None


class _Result:
    def __init__(self, name: str, output_of: OutputOf) -> None:
        self._name = name
        self._output_of = output_of

    def made(self, value: Any) -> Any:
        kind: Any = type(value)
        if isinstance(value, str):
            return GraphText(self._parts(value)) if MARKERS.is_in(value) else value
        if isinstance(value, Sequence_):
            return GraphText(self._sum(value))
        if isinstance(value, Expression):
            return self._output_of(value, "value")
        if kind in (list, tuple):
            return kind([self.made(item) for item in value])
        if kind in (set, frozenset):
            return kind([self._key(item) for item in value])
        if kind is dict:
            return {self._key(key): self.made(item) for key, item in value.items()}
        if not _holds_value(value):
            return value
        if isinstance(value, tuple) and hasattr(value, "_make"):
            return value._make([self.made(item) for item in value])
        if isinstance(value, dict):
            empty = copy.copy(value)
            empty.clear()
            return _Items(empty, {self._key(key): self.made(item) for key, item in value.items()})
        if is_record(value):
            found = {name: member for name, member in members(value).items() if _holds_value(member)}
            # Without the stand-ins of the trace, which would keep all of it in memory.
            original = copy_with(value, dict.fromkeys(found))
            return _Record(original, {name: self.made(member) for name, member in found.items()})
        raise self._refusal(value)

    def _key(self, value: Any) -> Any:
        """A key of a dict, or a member of a set."""
        made = self.made(value)
        try:
            hash(made)
        except TypeError:
            raise self._refusal(value) from None
        return made

    def _refusal(self, value: Any) -> DataDependent:
        return DataDependent(
            f"{self._name} returns a {type(value).__name__} with the value of a variable in a place that a "
            "graph cannot fill: return it in a list, a dict, a dataclass or a named tuple, or use flow.run"
        )

    def _parts(self, text: str) -> tuple[str | Output, ...]:
        try:
            parts = MARKERS.split(text)
        except BadArgument as error:
            raise DataDependent(
                f"{self._name} returns a text that was changed after a value was formatted into it. A trace "
                f"has no values: use flow.run, or give the value to trace(...) ({error})"
            ) from None
        found: list[str | Output] = []
        for part in parts:
            if isinstance(part, Sequence_):
                found += self._sum(part)
            else:
                found.append(part if isinstance(part, str) else self._output_of(part, "text"))
        return tuple(found)

    def _sum(self, value: Sequence_) -> tuple[str | Output, ...]:
        found: list[str | Output] = []
        for part in value.parts:
            found += self._parts(part) if isinstance(part, str) else [self._output_of(part, "sum")]
        return tuple(found)


def _holds_value(value: Any) -> bool:
    """Whether a reference, or a text with one, is in it."""
    pending, seen = [value], dict[int, Any]()
    while pending:
        one = pending.pop()
        if isinstance(one, str):
            if MARKERS.is_in(one):
                return True
        elif isinstance(one, Reference | Sequence_):
            return True
        elif id(one) not in seen:
            seen[id(one)] = one
            if isinstance(one, dict | MappingProxyType):
                pending += [*one.keys(), *one.values()]
            elif _is_container(one):
                pending += list(one)
            pending += members(one).values()
    return False


def _is_container(value: Any) -> bool:
    return isinstance(value, list | tuple | set | frozenset) or type(value).__module__ == "collections"


def outputs_in(result: Any) -> Iterator[Output]:
    """The outputs in a graph's result."""
    match result:
        case GraphOutput() | VariableText():
            yield result
        case GraphText(parts):
            for part in parts:
                if not isinstance(part, str):
                    yield part
        case _Record(_, found):
            yield from outputs_in(found)
        case _Items(_, items):
            yield from outputs_in(items)
        case list() | tuple() | set() | frozenset():
            for item in result:
                yield from outputs_in(item)
        case dict():
            for key, item in result.items():
                yield from outputs_in(key)
                yield from outputs_in(item)
        case _:
            pass


def filled(result: Any, values: Mapping[Output, Any]) -> Any:
    """A graph's result with values in place of outputs."""
    match result:
        case GraphOutput() | VariableText():
            return values[result]
        case GraphText(parts):
            return "".join([part if isinstance(part, str) else f"{values[part]}" for part in parts])
        case _Record(original, found):
            return copy_with(original, {name: filled(member, values) for name, member in found.items()})
        case _Items(original, items):
            made = copy.copy(original)
            for key, item in items.items():
                made[filled(key, values)] = filled(item, values)
            return made
        case tuple() if hasattr(result, "_make"):
            return result._make([filled(item, values) for item in result])
        case list() | tuple() | set() | frozenset() if type(result) in (list, tuple, set, frozenset):
            return type(result)([filled(item, values) for item in result])
        case dict() if type(result) is dict:
            return {filled(key, values): filled(item, values) for key, item in result.items()}
        case _:
            return result
