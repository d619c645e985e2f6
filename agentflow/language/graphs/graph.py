"""A graph: a program's ops, compiled by ``program.trace(...)``.

Numbers of states and variables begin at 1 in each graph; ``trace.GraphRun`` moves them to numbers of the
session. ``Graph.optimised`` folds constants. It does nothing about the prefix that all runs share or about
task groups, because the scheduler handles both. ``Graph.draw`` makes a Mermaid flowchart, with a box for each
state, an arrow for each stream of ops, and a dashed arrow for data.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import msgspec

from agentflow.language.display.svg import Arrow, Box, BoxKind, ForkMark, graph_svg
from agentflow.language.typed.values import ValueType
from agentflow.protocol import ops
from agentflow.protocol.images import Image
from agentflow.protocol.op_table import ROOT, opened, references, spec_of
from agentflow.protocol.transform import apply_transforms

EdgeKind = Literal["stream", "fork", "data"]


class Edge(NamedTuple):
    """Op ``target`` (an index into ``Graph.ops``) comes after op ``source``: in the stream of the same state,
    as the first op of a fork, or because it needs a variable."""

    source: int
    target: int
    kind: EdgeKind


class Output(NamedTuple):
    """Represents the value of this variable in a graph's result."""

    variable: int


@dataclass(frozen=True)
class Graph:
    """``arguments``: maps the names of the texts that ``flow.submit`` provides to variables. ``result``: the
    program's return value, with an ``Output`` for each value. ``places``: maps each variable to its place,
    from which the seed of a gen without a seed is derived. ``value_types``: the types of variables whose
    value is not text. ``images``: the files that the ops refer to.

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
    images: tuple[Image, ...] = field(default=(), repr=False, compare=False)

    def __repr__(self) -> str:
        return f"<Graph {self.name} of {len(self.ops)} ops, arguments: {', '.join(self.arguments) or 'none'}>"

    @property
    def names(self) -> dict[int, str]:
        """The names of the variables by number.

        >>> sorted(set(judge.trace().names.values()))
        ['essay', 'grade', 'judgment']
        """
        return {op.var: op.name for op in self.ops if isinstance(op, ops.Declaring)}

    @property
    def outputs(self) -> list[int]:
        """The variables that the result needs.

        >>> graph = judge.trace()
        >>> [graph.names[variable] for variable in graph.outputs]
        ['grade']
        """
        return list(dict.fromkeys(_outputs_in(self.result)))

    @property
    def generated(self) -> list[int]:
        """The variables of gens, selects and decides, then the others that the result needs.

        >>> graph = judge.trace()
        >>> [graph.names[variable] for variable in graph.generated]
        ['judgment', 'judgment', 'grade']
        """
        written = [op.var for op in self.ops if isinstance(op, ops.Gen | ops.Select | ops.Decide)]
        return list(dict.fromkeys([*written, *self.outputs]))

    def edges(self) -> list[Edge]:
        """The order of the ops, and its reasons.

        >>> sorted({edge.kind for edge in judge.trace().edges()})
        ['data', 'fork', 'stream']
        """
        last: dict[int, int] = {}  # state → its last op so far
        forked: dict[int, int] = {}  # state without ops so far → its fork
        declared: dict[int, int] = {}
        found: list[Edge] = []
        for index, op in enumerate(self.ops):
            for needed in references(op):
                found.append(Edge(declared[needed], index, "data"))
            state = getattr(op, "state", None)
            if state in last:
                found.append(Edge(last[state], index, "stream"))
            elif state in forked:
                found.append(Edge(forked[state], index, "fork"))
            if state is not None:
                last[state] = index
            forked |= dict.fromkeys(set(opened(op)) - {state}, index)
            if isinstance(op, ops.Declaring):
                declared[op.var] = index
        return found

    def draw(self) -> str:
        """The source of a Mermaid flowchart of the graph.

        >>> print(judge.trace().draw())
        flowchart TD
        ...
        """
        return _draw(self)

    def _repr_svg_(self) -> str:
        """For notebooks."""
        return _svg(self)

    def optimised(self) -> Graph:
        """The graph with constants folded. Its results are the same.

        >>> @af.program
        ... async def greet(s: af.State, name: str) -> str:
        ...     tone = s.set("tone", "kind")
        ...     s += af.user(f"Greet {name}.", " Be ", tone, ".") + af.assistant(af.gen("greeting"))
        ...     return await s["greeting"]
        >>> graph = greet.trace()
        >>> len(graph.ops) - len(graph.optimised().ops)  # the set is gone
        1
        """
        return _fold_constants(self)


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


def _fold_constants(graph: Graph) -> Graph:
    """The graph without constant variables: references to them become text, and consecutive texts one op."""
    constants: dict[int, str] = {}
    folded: list[ops.Op] = []
    for op in graph.ops:
        if isinstance(op, ops.Text | ops.Set):
            op = msgspec.structs.replace(op, parts=_folded(op.parts, constants))
        if isinstance(op, ops.Set) and not references(op):
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
    """The ops with consecutive texts of a state merged into the first, unless the later one refers to a
    variable that is declared in between."""
    found: list[ops.Op | None] = []
    last_text: dict[int, int] = {}  # state → index of the text that its stream ends with
    declared_at: dict[int, int] = {}
    for op in sequence:
        state = getattr(op, "state", None)
        at = last_text.get(state) if state is not None else None
        if isinstance(op, ops.Text) and at is not None and all(declared_at[v] < at for v in references(op)):
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


def _draw(graph: Graph) -> str:
    """The source of the flowchart."""
    shown = [index for index, op in enumerate(graph.ops) if _label(op, graph)]
    lines = ["flowchart TD"]
    for name, variable in graph.arguments.items():
        lines.append(f'    a{variable}[/"{_escaped(name)}"/]')
    for state in dict.fromkeys([getattr(graph.ops[index], "state", ROOT) for index in shown]):
        lines.append(f'    subgraph s{state}["{"root" if state == ROOT else f"state {state}"}"]')
        for index in shown:
            if getattr(graph.ops[index], "state", ROOT) == state:
                lines.append(f"        {_node(index, graph)}")
        lines.append("    end")
    for arrow in _arrows(graph, set(shown)):
        lines.append(f"    {arrow.source} {_ARROWS[arrow.kind]} {arrow.target}")
    return "\n".join(lines)


def _svg(graph: Graph) -> str:
    """The drawing. The beginning of a turn is drawn with the first op in it."""
    items: list[Box | ForkMark] = [
        Box(f"a{variable}", name, "argument", None) for name, variable in graph.arguments.items()
    ]
    shown: set[int] = set()
    begun: dict[int, int] = {}  # state → index of the beginning of its turn
    drawn_as: dict[str, str] = {}
    for index, op in enumerate(graph.ops):
        state, label = getattr(op, "state", ROOT), _label(op, graph)
        if state in begun and (label or isinstance(op, ops.Fork)):
            before = begun.pop(state)
            role = _label(graph.ops[before], graph)
            if isinstance(op, ops.Fork):
                items.append(Box(f"n{before}", role, "text", state))
            else:
                label = f"{role} {label}"
                drawn_as[f"n{before}"] = f"n{index}"
        if isinstance(op, ops.Fork):
            items.append(ForkMark(op.state, op.children))
        elif label:
            shown.add(index)
            if isinstance(op, ops.Begin):
                begun[state] = index
            else:
                kind: BoxKind = "gen" if isinstance(op, ops.Gen | ops.Select | ops.Decide) else "text"
                items.append(Box(f"n{index}", _shortened(label), kind, state))
    arrows = [
        Arrow(drawn_as.get(arrow.source, arrow.source), drawn_as.get(arrow.target, arrow.target), arrow.kind)
        for arrow in _arrows(graph, shown)
    ]
    return graph_svg(graph.name, ROOT, items, [arrow for arrow in arrows if arrow.source != arrow.target])


def _arrows(graph: Graph, shown: set[int]) -> list[Arrow]:
    """The edges between ops that are shown; an edge passes through ops that are not."""
    before: dict[int, list[tuple[int, EdgeKind]]] = {}
    found: list[Arrow] = []
    for edge in graph.edges():
        source = graph.ops[edge.source]
        if edge.kind == "data" and isinstance(source, ops.Expect):
            found.append(Arrow(f"a{source.var}", f"n{edge.target}", "data"))
        elif edge.kind == "data" and edge.target in shown:
            found.append(Arrow(f"n{edge.source}", f"n{edge.target}", "data"))
        elif edge.kind != "data":
            reached = [(edge.source, edge.kind)] if edge.source in shown else before.get(edge.source, [])
            kept = [(at, edge.kind if at == edge.source else kind) for at, kind in reached]
            before.setdefault(edge.target, []).extend(kept)
            if edge.target in shown:
                found += [Arrow(f"n{at}", f"n{edge.target}", kind) for at, kind in kept]
    return list(dict.fromkeys(found))


def _node(index: int, graph: Graph) -> str:
    op = graph.ops[index]
    begin, end = spec_of(op).box
    return f'n{index}{begin}"{_escaped(_label(op, graph))}"{end}'


def _label(op: ops.Op, graph: Graph) -> str:
    """The label of an op; empty for ops that are not drawn."""
    return _shortened(spec_of(op).label(op, graph.names))


def _shortened(label: str) -> str:
    return label if len(label) <= _MAX_LABEL else f"{label[: _MAX_LABEL - 1]}…"


def _escaped(text: str) -> str:
    """``text`` for a quoted Mermaid label; Mermaid has special entities. The first replacement must come
    first."""
    for char, entity in (("#", "#35;"), ('"', "#quot;"), ("<", "#lt;"), (">", "#gt;"), ("`", "#96;")):
        text = text.replace(char, entity)
    return text
