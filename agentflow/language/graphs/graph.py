"""A graph: a program's ops, compiled by ``program.trace(...)``.

Numbers of states and variables begin at 1 in each graph; ``trace.GraphRun`` moves them to numbers of the
session. ``Graph.optimised`` applies the passes of ``optimise``. Task groups are left to the backend, which
finds them in the submitted graph. ``Graph.draw`` makes a Mermaid flowchart, with a box for each state, an
arrow for each stream of ops, and a dashed arrow for data.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from inspect import isawaitable
from typing import Any, Literal, NamedTuple, overload

from agentflow.errors import BadArgument
from agentflow.language.display.svg import Arrow, Box, BoxKind, ForkMark, graph_svg
from agentflow.language.failures.user_code import UserCode
from agentflow.language.graphs.graph_result import GraphOutput as GraphOutput
from agentflow.language.graphs.graph_result import outputs_in
from agentflow.language.graphs.optimise import Move, constants_first, folded, merge_texts, moves
from agentflow.language.typed.values import ValueType
from agentflow.protocol import ops
from agentflow.protocol.images import Image, MediumKind
from agentflow.protocol.op_table import ROOT, op_spec, opened, references
from agentflow.runtime.task_group import open_task_group

EdgeKind = Literal["stream", "fork", "data"]
Judge = Callable[[str, str], Awaitable[bool]]


class Edge(NamedTuple):
    """Op ``target`` (an index into ``Graph.ops``) comes after op ``source``: in the stream of the same state,
    as the first op of a fork, or because it needs a variable."""

    source: int
    target: int
    kind: EdgeKind


class MediumArgument(NamedTuple):
    """An argument that is an image or a video. ``source``: stands for its own in the ops of the graph."""

    kind: MediumKind
    source: str


@dataclass(frozen=True)
class Graph:
    """``arguments``: maps the names of the texts that ``flow.submit`` provides to variables. ``media``: maps
    the names of the images and videos that it provides to the sources by which the ops refer to them.
    ``order``: the names of all arguments. ``result``: the program's return value, with outputs in the place
    of values (``graph_result``). ``places``: maps each variable to its place, from which the seed of a gen
    without a seed is derived. ``value_types``: the types of variables whose value is not text. ``images``:
    the files that the ops refer to.

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
    media: Mapping[str, MediumArgument] = field(default_factory=dict)
    order: tuple[str, ...] = field(default=(), repr=False)

    def __repr__(self) -> str:
        return (
            f"<Graph {self.name} of {len(self.ops)} ops, arguments: {', '.join(self.parameters) or 'none'}>"
        )

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names of all arguments, in the order of the program's parameters.

        >>> judge.trace().parameters
        ('essay',)
        """
        return self.order or (*self.arguments, *self.media)

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
        return list(dict.fromkeys([output.variable for output in outputs_in(self.result)]))

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

    @overload
    def optimised(self) -> Graph: ...
    @overload
    def optimised(self, *, reorder: Literal[False], judge: None = None) -> Graph: ...
    @overload
    def optimised(self, *, reorder: Literal[True], judge: Judge) -> Awaitable[Graph]: ...
    def optimised(self, *, reorder: bool = False, judge: Judge | None = None) -> Graph | Awaitable[Graph]:
        """The graph with constants folded, and with the constant text of each state before the variables that
        it sets. All texts, and so the results, are the same.

        With ``reorder``, the result must be awaited, and prompts change: in the turns of the system and the
        user, constant passages move before the first one with a variable where ``judge`` allows it, so that
        runs with other values share a longer prefix. The graph has the same variables.

        Args:
            reorder: Also move constant passages.
            judge: An async function of the old and the new text of a turn, or of its part between images,
                with the names of variables in braces. It returns whether the meaning stays, True or False. It
                may ask a model. Its exceptions propagate.

        Raises:
            BadArgument: ``reorder`` without a judge, or a judge without ``reorder``. When it is awaited: the
                judge is no async function, or returns something else than a bool.

        >>> @af.program
        ... async def greet(s: af.State, name: str) -> str:
        ...     tone = s.set("tone", "kind")
        ...     s += af.user(f"Greet {name}.", " Be ", tone, ".") + af.assistant(af.gen("greeting"))
        ...     return await s["greeting"]
        >>> graph = greet.trace()
        >>> len(graph.ops) - len(graph.optimised().ops)  # the set is gone
        1
        >>> async def has_same_meaning(old: str, new: str) -> bool:
        ...     return (old, new) == ("Greet {name}. Be kind.", "Be kind. Greet {name}.")
        >>> moved = await graph.optimised(reorder=True, judge=has_same_meaning)
        >>> moved == graph.optimised()
        False
        """
        if reorder != (judge is not None):
            raise BadArgument(
                "optimised: give both reorder=True and a judge, or neither",
                param="judge" if reorder else "reorder",
            )
        constant = constants_first(folded(self.ops, set(self.outputs)))
        optimised = replace(self, ops=tuple(merge_texts(constant)))
        return optimised if judge is None else _reordered(optimised, judge)


async def _reordered(graph: Graph, judge: Judge) -> Graph:
    """The graph with the moves that the judge allows."""
    found = list(graph.ops)

    async def attempt(move: Move) -> None:
        with UserCode("optimised: the judge"):
            answer = judge(move.old, move.new) if callable(judge) else None
            if not isawaitable(answer):
                raise BadArgument(
                    f"optimised: the judge must be an async function, not {judge!r:.80}", param="judge"
                )
            is_allowed = await answer
        if not isinstance(is_allowed, bool):  # the text "no" would be true
            raise BadArgument(
                f"optimised: the judge must return True or False, not {is_allowed!r:.80}", param="judge"
            )
        if is_allowed:
            found[move.at] = move.op

    async with open_task_group() as group:
        for move in moves(graph.ops, graph.names):
            group.start_soon(attempt, move)
    return replace(graph, ops=tuple(found))


_ARROWS = {"stream": "-->", "fork": "==>", "data": "-.->"}
_MAX_LABEL = 40


def _draw(graph: Graph) -> str:
    """The source of the flowchart."""
    shown = [index for index, op in enumerate(graph.ops) if _label(op, graph)]
    lines = ["flowchart TD"]
    for name, variable in graph.arguments.items():
        lines.append(f'    a{variable}[/"{_escaped(name)}"/]')
    for number, name in enumerate(graph.media):
        lines.append(f'    m{number}[/"{_escaped(name)}"/]')
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
    begin, end = op_spec(op).box
    return f'n{index}{begin}"{_escaped(_label(op, graph))}"{end}'


def _label(op: ops.Op, graph: Graph) -> str:
    """The label of an op; empty for ops that are not drawn."""
    return _shortened(op_spec(op).label(op, graph.names))


def _shortened(label: str) -> str:
    return label if len(label) <= _MAX_LABEL else f"{label[: _MAX_LABEL - 1]}…"


def _escaped(text: str) -> str:
    """``text`` for a quoted Mermaid label; Mermaid has special entities. The first replacement must come
    first."""
    for char, entity in (("#", "#35;"), ('"', "#quot;"), ("<", "#lt;"), (">", "#gt;"), ("`", "#96;")):
        text = text.replace(char, entity)
    return text
