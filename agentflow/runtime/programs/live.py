"""The live graph as a client sees it, in at most ``MAX_SHOWN`` states and nodes, and
``MAX_SHOWN_EDGES`` edges between them, in all graphs of one answer.

Programs and task groups are numbered from 1 in each graph, because numbers that are unique in the process
would reveal the activity of other tenants.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice
from weakref import WeakValueDictionary

from agentflow.protocol.events import LiveGraph, LiveNode, LiveState
from agentflow.runtime.programs.deduction import GraphNode
from agentflow.runtime.programs.graph import ProgramGraph, StateInGraph, Watcher

MAX_SHOWN = 1_000
"""The maximum number of states, and of nodes, in one answer."""
MAX_SHOWN_EDGES = 10_000
"""The maximum number of edges in one answer. A node whose edges exceed it is omitted."""


@dataclass
class Room:
    """The numbers of states, nodes and edges that still fit into an answer."""

    num_states: int = MAX_SHOWN
    num_nodes: int = MAX_SHOWN
    num_edges: int = MAX_SHOWN_EDGES


@dataclass(slots=True)
class ShownNumbers:
    """The client's numbers for the programs and task groups of one graph."""

    programs: dict[int, int] = field(default_factory=dict)
    groups: dict[int, int] = field(default_factory=lambda: {0: 0})

    @property
    def largest(self) -> int:
        """The largest number."""
        return max(len(self.programs), len(self.groups))

    def program(self, number: int) -> int:
        """The client's number of a program."""
        return self.programs.setdefault(number, len(self.programs) + 1)

    def group(self, number: int) -> int:
        """The client's number of a task group; 0: none."""
        return self.groups.setdefault(number, len(self.groups))


def live_graph(graph: ProgramGraph, room: Room, numbers: ShownNumbers | None = None) -> LiveGraph:
    """The unfinished part of a session. Its size is subtracted from ``room``."""
    numbers = ShownNumbers() if numbers is None else numbers
    states: list[LiveState] = []
    nodes: list[LiveNode] = []
    done: dict[GraphNode, None] = {}  # ended nodes that unfinished ones depend on
    num_nodes = 0

    def add(node: GraphNode, state: StateInGraph | None = None) -> None:
        if room.num_nodes > 0 and len(node.preds) <= room.num_edges:
            room.num_nodes -= 1
            room.num_edges -= len(node.preds)
            nodes.append(_shown_node(graph, node, state, numbers))

    for state in islice(graph.states(), room.num_states):
        states.append(_shown_state(graph, state, numbers))
        if state.failed is not None:
            num_nodes += 1
            if room.num_nodes > 0:
                room.num_nodes -= 1
                nodes.append(state.failed)
        num_nodes += len(state.nodes)
        for node in islice(state.nodes, room.num_nodes):
            add(node, state)
            done |= dict.fromkeys([pred for pred in node.preds if pred.has_ended])
    room.num_states -= len(states)
    num_nodes += len(done)
    for node in done:
        add(node)
    nodes.sort(key=lambda node: node.id)
    return LiveGraph(tuple(states), tuple(nodes), graph.num_states - len(states), num_nodes - len(nodes))


def live_state(graph: ProgramGraph, state: StateInGraph, numbers: ShownNumbers) -> LiveState | None:
    """The state as clients see it, or None if it is closed."""
    return _shown_state(graph, state, numbers) if graph.state(state.number) is state else None


def live_node(graph: ProgramGraph, node: GraphNode, numbers: ShownNumbers) -> LiveNode | None:
    """The node as clients see it, or None if it has left the graph."""
    state = graph.state(node.state)
    if state is not None and state.failed is not None and state.failed.id == node.number:
        return state.failed
    if node.has_ended:
        return _shown_node(graph, node, None, numbers) if node.num_open and not node.is_gone else None
    is_unfinished = state is not None and node in state.nodes
    return _shown_node(graph, node, state, numbers) if is_unfinished else None


def _shown_state(graph: ProgramGraph, state: StateInGraph, numbers: ShownNumbers) -> LiveState:
    hint = graph.find_hint(state)
    return LiveState(
        state.number,
        numbers.program(hint.program),
        state.label,
        hint.objective,
        numbers.group(hint.group),
        hint.steps,
        state.is_stopped,
        *state.miss,
    )


def _shown_node(
    graph: ProgramGraph, node: GraphNode, state: StateInGraph | None, numbers: ShownNumbers
) -> LiveNode:
    """``state``: the state of an unfinished node."""
    group = 0 if state is None else state.group
    if node.stage is not None and len(node.stage.members) > 1:
        group = node.stage.number
    if not node.is_request:
        group = 0
    runs = node.is_request and node.is_running and not node.has_ended
    return LiveNode(
        node.number,
        node.state,
        node.kind,
        0 if node.kind == "fork" else node.var,
        node.name,
        "done" if node.has_ended else "running" if node.is_running else "waiting",
        tuple([pred.number for pred in node.preds]),
        node.objective,
        numbers.group(group),
        node.want or "",
        node.media,
        node.num_media,
        graph.find_replica(node.state) if runs else None,
    )


class WatchPace:
    """The earliest time of the next look of a watch at graphs. It limits all watches together to
    ``LOOP_PART`` of the event loop's time."""

    LOOP_PART = 0.02

    def __init__(self) -> None:
        self.next_s = 0.0

    def spent(self, loop_s: float, now_s: float) -> None:
        """A look took ``loop_s`` seconds of processor time, until ``now_s``."""
        self.next_s = max(self.next_s, now_s) + loop_s / self.LOOP_PART


class TenantGraphs(dict[ProgramGraph, None]):
    """The graphs of one tenant's open sessions, in the order in which they were opened.

    Args:
        pace: Of the watches of all tenants.
    """

    def __init__(self, pace: WatchPace | None = None) -> None:
        super().__init__()
        self.watchers: dict[Watcher, None] = {}
        self.pace = WatchPace() if pace is None else pace

    def add(self, graph: ProgramGraph) -> None:
        """A session begins."""
        self[graph] = None
        graph.watchers = self.watchers

    def remove(self, graph: ProgramGraph) -> None:
        """A session has ended."""
        if graph in self:
            del self[graph]
            graph.watchers = {}
            for watcher in self.watchers:
                watcher.removed(graph)


class OpenGraphs:
    """The graphs of all tenants."""

    def __init__(self) -> None:
        self._of: WeakValueDictionary[str, TenantGraphs] = WeakValueDictionary()  # their sessions hold them
        self._pace = WatchPace()

    def of(self, tenant: str) -> TenantGraphs:
        """The graphs of the tenant, to which sessions add theirs."""
        found = self._of.get(tenant)
        if found is None:
            found = self._of[tenant] = TenantGraphs(self._pace)
        return found
