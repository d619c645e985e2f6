"""The live graph as a client sees it, in at most ``MAX_SHOWN`` states and nodes, and
``MAX_SHOWN_EDGES`` edges between them, in all graphs of one answer.

Programs and task groups are numbered from 1 in each graph, because numbers that are unique in the process
would reveal the activity of other tenants.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from weakref import WeakValueDictionary

from agentflow.protocol.events import LiveGraph, LiveNode, LiveState
from agentflow.runtime.programs.deduction import Node
from agentflow.runtime.programs.graph import ProgramGraph

MAX_SHOWN = 1_000
"""The states, and the nodes, of one answer."""
MAX_SHOWN_EDGES = 10_000
"""The edges of one answer. A node that has more than are left is left out."""


class TenantGraphs(dict[ProgramGraph, None]):
    """The graphs of one tenant's open sessions, in the order in which they were opened."""


class OpenGraphs:
    """The graphs of all tenants."""

    def __init__(self) -> None:
        self._of: WeakValueDictionary[str, TenantGraphs] = WeakValueDictionary()  # their sessions hold them

    def of(self, tenant: str) -> TenantGraphs:
        """The graphs of the tenant, to which sessions add theirs."""
        return self._of.setdefault(tenant, TenantGraphs())


@dataclass
class Room:
    """The numbers of states, nodes and edges that still fit into an answer."""

    num_states: int = MAX_SHOWN
    num_nodes: int = MAX_SHOWN
    num_edges: int = MAX_SHOWN_EDGES


def live_graph(graph: ProgramGraph, room: Room) -> LiveGraph:
    """The unfinished part of a session. Takes its parts from ``room``."""
    programs: dict[int, int] = {}
    groups: dict[int, int] = {0: 0}
    states: list[LiveState] = []
    nodes: list[LiveNode] = []
    done: dict[Node, None] = {}  # ended nodes that unfinished ones depend on
    num_nodes = 0

    def add(node: Node, group: int = 0) -> None:
        if room.num_nodes > 0 and len(node.preds) <= room.num_edges:
            room.num_nodes -= 1
            room.num_edges -= len(node.preds)
            runs = node.is_request and node.is_running and not node.has_ended
            replica = graph.replica_of(node.state) if runs else None
            nodes.append(_live_node(node, group, groups, replica))

    for state in islice(graph.states(), room.num_states):
        place = graph.place_of(state)
        states.append(
            LiveState(
                state.number,
                programs.setdefault(place.program, len(programs) + 1),
                state.label,
                place.objective,
                groups.setdefault(place.group, len(groups)),
                place.steps,
                state.is_stopped,
                *state.miss,
            )
        )
        if state.failed is not None:
            num_nodes += 1
            if room.num_nodes > 0:
                room.num_nodes -= 1
                nodes.append(state.failed)
        num_nodes += len(state.nodes)
        for node in islice(state.nodes, room.num_nodes):
            add(node, state.group)
            done |= dict.fromkeys([pred for pred in node.preds if pred.has_ended])
    room.num_states -= len(states)
    num_nodes += len(done)
    for node in done:
        add(node)
    nodes.sort(key=lambda node: node.id)
    return LiveGraph(tuple(states), tuple(nodes), graph.num_states - len(states), num_nodes - len(nodes))


def _live_node(node: Node, group: int, groups: dict[int, int], replica: int | None) -> LiveNode:
    """The node as clients see it. ``group``: the group of its state. ``groups``: maps groups to their numbers
    in the answer. ``replica``: where it runs."""
    if node.stage is not None and len(node.stage.members) > 1:
        group = node.stage.number
    if not node.is_request:
        group = 0
    return LiveNode(
        node.number,
        node.state,
        node.kind,
        0 if node.kind == "fork" else node.var,
        node.name,
        "done" if node.has_ended else "running" if node.is_running else "waiting",
        tuple([pred.number for pred in node.preds]),
        node.objective,
        groups.setdefault(group, len(groups)),
        node.want or "",
        node.media,
        node.num_media,
        replica,
    )
