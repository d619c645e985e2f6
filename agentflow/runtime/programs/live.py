"""The live graph as a client sees it, in at most ``MAX_SHOWN`` states and nodes, and
``MAX_SHOWN_EDGES`` edges between them.

Programs and task groups are numbered from 1 in each answer, because numbers that are unique in the process
would reveal the activity of other tenants.
"""

from __future__ import annotations

from itertools import islice

from agentflow.protocol.events import LiveGraph, LiveNode, LiveState
from agentflow.runtime.programs.graph import ProgramGraph

MAX_SHOWN = 1_000
"""The states, and the nodes, of one answer."""
MAX_SHOWN_EDGES = 10_000
"""The edges of one answer. A node that has more than are left is left out."""


def live_graph(graph: ProgramGraph) -> LiveGraph:
    """The unfinished part of the session."""
    programs: dict[int, int] = {}
    groups: dict[int, int] = {0: 0}
    states: list[LiveState] = []
    nodes: list[LiveNode] = []
    num_nodes, num_edges_left = 0, MAX_SHOWN_EDGES
    for state in islice(graph.states(), MAX_SHOWN):
        place = graph.place_of(state)
        states.append(
            LiveState(
                state.number,
                programs.setdefault(place.program, len(programs) + 1),
                state.label,
                place.objective,
                groups.setdefault(place.group, len(groups)),
                place.steps,
            )
        )
        num_nodes += len(state.nodes)
        for node in islice(state.nodes, MAX_SHOWN - len(nodes)):
            if len(node.preds) > num_edges_left:
                continue
            num_edges_left -= len(node.preds)
            nodes.append(
                LiveNode(
                    node.number,
                    node.state,
                    node.kind,
                    0 if node.kind == "fork" else node.var,
                    node.name,
                    "running" if node.is_running else "waiting",
                    tuple([pred.number for pred in node.preds if not pred.has_ended]),
                    node.objective,
                )
            )
    nodes.sort(key=lambda node: node.id)
    return LiveGraph(tuple(states), tuple(nodes), graph.num_states - len(states), num_nodes - len(nodes))
