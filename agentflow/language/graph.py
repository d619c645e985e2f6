"""A program's compiled form: its ops with their places, before anything has run.

Made by ``program.trace(...)``. States and variables are numbered from 1 inside the graph; whoever runs
it moves them to numbers of its own. ``graph_passes`` looks for what can be done better,
``graph_drawing`` draws it, ``flow.submit`` runs it.

What can be done for a graph before it runs: constants are folded.

There is no pass for the prefix that all runs of a graph share, nor for its task groups: the engine computes
what waiting requests share once, and knows the branches of every fork as a group.

A graph as a Mermaid flowchart: a box for each state, an arrow for each stream, dashed ones for data.

Text inside the quotes of a Mermaid label.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import msgspec

from agentflow.errors import BadArgument
from agentflow.language.values import TEXT, ValueType
from agentflow.protocol import ops
from agentflow.protocol.op_table import ROOT, needs_of
from agentflow.protocol.transform import apply_transforms


def escaped(text: str) -> str:
    """Inside quotes Mermaid reads such entities; the first one makes room for the others."""
    for char, entity in (("#", "#35;"), ('"', "#quot;"), ("<", "#lt;"), (">", "#gt;"), ("`", "#96;")):
        text = text.replace(char, entity)
    return text


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


def fold_constants(graph: Graph) -> Graph:
    """The graph without variables that are constants: their texts stand where they were referred to, and
    runs of text are one op each. Results stay what they were."""
    constants: dict[int, str] = {}
    folded: list[ops.Op] = []
    for op in graph.ops:
        if isinstance(op, ops.Text | ops.Set):
            op = msgspec.structs.replace(op, parts=_folded(op.parts, constants))
        # An empty one says that its state has got there; see State.ending.
        if isinstance(op, ops.Set) and op.parts and not needs_of(op):
            constants[op.var] = "".join([part for part in op.parts if isinstance(part, str)])
        folded.append(op)
    outputs = set(graph.outputs)
    needed = [op for op in folded if not (isinstance(op, ops.Set) and op.var in constants.keys() - outputs)]
    return replace(graph, ops=tuple(_merged(needed)))


def _folded(parts: ops.Parts, constants: dict[int, str]) -> ops.Parts:
    found: list[str | ops.Ref] = []
    for part in parts:
        if isinstance(part, ops.Ref) and part.var in constants:
            part = apply_transforms(constants[part.var], part.transforms)
        if isinstance(part, str) and found and isinstance(found[-1], str):
            found[-1] += part
        elif part != "":
            found.append(part)
    return tuple(found)


def _merged(sequence: list[ops.Op]) -> list[ops.Op]:
    """Texts of a state that follow each other in its stream become one, where the first stands, unless
    the later one refers to a variable that is declared in between."""
    found: list[ops.Op | None] = []
    last_text: dict[int, int] = {}  # state → index of the text that its stream ends with
    declared_at: dict[int, int] = {}
    for op in sequence:
        state = getattr(op, "state", None)
        at = last_text.get(state) if state is not None else None
        if isinstance(op, ops.Text) and at is not None and all(declared_at[v] < at for v in needs_of(op)):
            earlier = found[at]
            assert isinstance(earlier, ops.Text)
            found[at] = ops.Text(op.state, _folded((*earlier.parts, *op.parts), {}))
            continue
        if isinstance(op, ops.Text):
            last_text[op.state] = len(found)
        elif state is not None:
            last_text.pop(state, None)
        if isinstance(op, ops.Declaring):
            declared_at[op.var] = len(found)
        found.append(op)
    return [op for op in found if op is not None]


_ARROWS = {"stream": "-->", "fork": "==>", "data": "-.->"}
_MAX_LABEL = 40


def draw(graph: Graph) -> str:
    """The flowchart's source."""
    shown = [index for index, op in enumerate(graph.ops) if _label(op, graph)]
    lines = ["flowchart TD"]
    for name, variable in graph.arguments.items():
        lines.append(f'    a{variable}[/"{escaped(name)}"/]')
    for state in dict.fromkeys([getattr(graph.ops[index], "state", ROOT) for index in shown]):
        lines.append(f'    subgraph s{state}["{"root" if state == ROOT else f"state {state}"}"]')
        for index in shown:
            if getattr(graph.ops[index], "state", ROOT) == state:
                lines.append(f"        {_node(index, graph)}")
        lines.append("    end")
    lines += [f"    {line}" for line in _arrows(graph, set(shown))]
    return "\n".join(lines)


def _arrows(graph: Graph, shown: set[int]) -> list[str]:
    """The edges between the ops that are shown; those that are not are passed through."""
    before: dict[int, list[tuple[int, str]]] = {}
    lines: list[str] = []
    for edge in graph.edges():
        source = graph.ops[edge.source]
        if edge.kind == "data" and isinstance(source, ops.Expect):
            lines.append(f"a{source.var} {_ARROWS['data']} n{edge.target}")
        elif edge.kind == "data" and edge.target in shown:
            lines.append(f"n{edge.source} {_ARROWS['data']} n{edge.target}")
        elif edge.kind != "data":
            reached = [(edge.source, edge.kind)] if edge.source in shown else before.get(edge.source, [])
            kept = [(at, edge.kind if at == edge.source else kind) for at, kind in reached]
            before.setdefault(edge.target, []).extend(kept)
            if edge.target in shown:
                lines += [f"n{at} {_ARROWS[kind]} n{edge.target}" for at, kind in kept]
    return list(dict.fromkeys(lines))


def _node(index: int, graph: Graph) -> str:
    op = graph.ops[index]
    label = f'"{escaped(_label(op, graph))}"'
    match op:
        case ops.Gen():
            return f"n{index}([{label}])"
        case ops.Select():
            return f"n{index}{{{{{label}}}}}"
        case ops.Fork():
            return f"n{index}{{{label}}}"
        case _:
            return f"n{index}[{label}]"


def _label(op: ops.Op, graph: Graph) -> str:
    """What is written into an op's box; nothing for ops that are not drawn."""
    names = graph.names
    match op:
        case ops.Text() | ops.Set():
            pieces = [part if isinstance(part, str) else f"{{{names[part.var]}}}" for part in op.parts]
            text = " ".join("".join(pieces).split())
            shown = text if len(text) <= _MAX_LABEL else f"{text[: _MAX_LABEL - 1]}…"
            return f"{op.name} = {shown}" if isinstance(op, ops.Set) else shown
        case ops.Gen():
            return f"gen {op.name}"
        case ops.Select():
            return f"select {op.name}: {' | '.join(op.choices)}"[:_MAX_LABEL]
        case ops.Begin():
            return f"{op.role}:"
        case ops.Fork():
            return f"fork {len(op.children)}"
        case ops.Image():
            return "image"
        case ops.Converse():
            return f"conversation of {len(op.conversation.messages)} messages"
        case _:
            return ""
