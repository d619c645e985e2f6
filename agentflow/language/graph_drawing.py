"""A graph as a Mermaid flowchart: a box for each state, an arrow for each stream, dashed ones for data."""

from __future__ import annotations

from agentflow.language.graph import ROOT, Graph
from agentflow.language.mermaid_text import escaped
from agentflow.protocol import ops

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
