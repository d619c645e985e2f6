"""A program's compiled form: its ops with their places, before anything has run.

Made by ``program.trace(...)``. States and variables are numbered from 1 inside the graph; whoever runs
it moves them to numbers of its own. ``graph_passes`` looks for what can be done better,
``graph_drawing`` draws it, ``flow.submit`` runs it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import msgspec

from agentflow.errors import BadArgument
from agentflow.language.values import TEXT, ValueType
from agentflow.protocol import ops

ROOT = 1
"""The number of the root state in every graph."""

EdgeKind = Literal["stream", "fork", "data"]


class Edge(NamedTuple):
    """Op number ``target`` (an index into ``Graph.ops``) comes after ``source``: in the same state's stream,
    as the first of a forked state, or because it needs a variable."""

    source: int
    target: int
    kind: EdgeKind


class Output(NamedTuple):
    """In a graph's result: the value of this variable stands here."""

    variable: int


@dataclass(frozen=True)
class Graph:
    """``arguments``: the variables that ``flow.submit`` gives values to, by name. ``result``: what the
    program returned, with an ``Output`` wherever a value will stand. ``places``: of each gen without a
    seed of its own, where its seed is derived from. ``value_types``: of variables whose value is no text.

    >>> graph = judge.trace(dimensions=("clarity", "evidence")).optimised()
    >>> graph
    <Graph judge of ... ops, arguments: essay>
    >>> await flow.submit(graph, {"essay": essay})
    'A'
    """

    name: str
    ops: tuple[ops.Op, ...]
    arguments: Mapping[str, int]
    result: Any = None
    places: Mapping[int, str] = field(default_factory=dict)
    value_types: Mapping[int, ValueType] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"<Graph {self.name} of {len(self.ops)} ops, arguments: {', '.join(self.arguments) or 'none'}>"

    @property
    def num_ids(self) -> int:
        """States and variables are numbered from 1 to this. For ``submit``."""
        return max([max(ids_of(op)) for op in self.ops])

    @property
    def names(self) -> dict[int, str]:
        """The name of each variable, by its number.

        >>> sorted(set(judge.trace().names.values()))
        ['essay', 'grade', 'judgment']
        """
        return {op.var: op.name for op in self.ops if isinstance(op, ops.Declaring)}

    @property
    def outputs(self) -> list[int]:
        """The variables whose values the result needs.

        >>> graph = judge.trace()
        >>> [graph.names[variable] for variable in graph.outputs]
        ['grade']
        """
        return list(dict.fromkeys(_outputs_in(self.result)))

    @property
    def generated(self) -> list[int]:
        """The variables of its gens and selects, and those that the result needs besides.

        >>> graph = judge.trace()
        >>> [graph.names[variable] for variable in graph.generated]
        ['judgment', 'judgment', 'grade']
        """
        written = [op.var for op in self.ops if isinstance(op, ops.Gen | ops.Select)]
        return list(dict.fromkeys([*written, *self.outputs]))

    def type_of(self, variable: int) -> ValueType:
        """What the variable's value is. For ``submit``."""
        return self.value_types.get(variable, TEXT)

    def edges(self) -> list[Edge]:
        """What comes after what, and why.

        >>> sorted({edge.kind for edge in judge.trace().edges()})
        ['data', 'fork', 'stream']
        """
        last: dict[int, int] = {}  # state → its last op so far
        forked: dict[int, int] = {}  # state that has not begun → the fork
        declared: dict[int, int] = {}
        found: list[Edge] = []
        for index, op in enumerate(self.ops):
            for needed in needs_of(op):
                found.append(Edge(declared[needed], index, "data"))
            state = getattr(op, "state", None)
            if state in last:
                found.append(Edge(last[state], index, "stream"))
            elif state in forked:
                found.append(Edge(forked[state], index, "fork"))
            if state is not None:
                last[state] = index
            if isinstance(op, ops.Fork):
                forked |= dict.fromkeys(op.children, index)
            elif isinstance(op, ops.Declaring):
                declared[op.var] = index
        return found

    def draw(self) -> str:
        """The graph as a Mermaid flowchart, for documents and for ``mermaid.live``.

        >>> print(judge.trace().draw())
        flowchart TD
        ...
        """
        from agentflow.language.graph_drawing import draw

        return draw(self)

    def optimised(self) -> Graph:
        """The same results by less: constants folded.

        >>> @af.program
        ... async def greet(s: af.State, name: str) -> str:
        ...     tone = s.set("tone", "kind")
        ...     s += af.user(f"Greet {name}.", " Be ", tone, ".") + af.assistant(af.gen("greeting"))
        ...     return await s["greeting"]
        >>> graph = greet.trace()
        >>> len(graph.ops) - len(graph.optimised().ops)  # the set is gone
        1
        """
        from agentflow.language.graph_passes import fold_constants

        return fold_constants(self)

    def named(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments by name; ``args`` are the first ones. ``BadArgument`` for too many. For ``map``."""
        if len(args) > len(self.arguments) or set(list(self.arguments)[: len(args)]) & set(kwargs):
            known = ", ".join(self.arguments) or "none"
            raise BadArgument(f"graph {self.name!r} has the arguments {known}: each is given once")
        return {**dict(zip(self.arguments, args, strict=False)), **kwargs}

    def inputs(self, values: Mapping[str, str]) -> dict[int, str]:
        """The arguments' values by variable. ``BadArgument`` for a missing or unknown one. For ``submit``."""
        if not isinstance(values, Mapping):
            raise BadArgument(
                f"graph {self.name!r}: the inputs are a dict of texts by name, not {values!r:.200}"
            )
        for name, value in values.items():
            if name not in self.arguments:
                known = ", ".join(self.arguments) or "none"
                raise BadArgument(f"graph {self.name!r} has no argument {name!r} (it has: {known})")
            if not isinstance(value, str):
                raise BadArgument(f"graph {self.name!r}: argument {name!r} is text, not {value!r}")
        missing = [name for name in self.arguments if name not in values]
        if missing:
            raise BadArgument(f"graph {self.name!r} needs the arguments {', '.join(map(repr, missing))}")
        return {self.arguments[name]: value for name, value in values.items()}


def ids_of(op: ops.Op) -> list[int]:
    """The numbers of states and variables that an op names, with a 0 in front."""
    found = [0]
    for name in ("state", "var"):
        if hasattr(op, name):
            found.append(getattr(op, name))
    found += getattr(op, "children", ())
    return found + needs_of(op)


def needs_of(op: ops.Op) -> list[int]:
    """The variables that an op's text refers to."""
    parts = op.parts if isinstance(op, ops.Text | ops.Set) else ()
    return [part.var for part in parts if isinstance(part, ops.Ref)]


def moved(op: ops.Op, base: int) -> ops.Op:
    """The op with all its numbers moved up by ``base``."""
    changes: dict[str, Any] = {
        name: getattr(op, name) + base for name in ("state", "var") if hasattr(op, name)
    }
    if isinstance(op, ops.Fork | ops.TaskGroup):
        changes["children"] = tuple([child + base for child in op.children])
    if isinstance(op, ops.Text | ops.Set):
        changes["parts"] = tuple(
            [
                part if isinstance(part, str) else ops.Ref(part.var + base, part.transforms)
                for part in op.parts
            ]
        )
    return msgspec.structs.replace(op, **changes)


def filled(result: Any, values: Mapping[int, Any]) -> Any:
    """A graph's result with values in place of its outputs."""
    match result:
        case Output(variable):
            return values[variable]
        case list():
            return [filled(item, values) for item in result]
        case tuple():
            return tuple([filled(item, values) for item in result])
        case dict():
            return {key: filled(item, values) for key, item in result.items()}
        case _:
            return result


def _outputs_in(result: Any) -> Iterator[int]:
    match result:
        case Output(variable):
            yield variable
        case list() | tuple():
            for item in result:
                yield from _outputs_in(item)
        case dict():
            for item in result.values():
                yield from _outputs_in(item)
        case _:
            pass
