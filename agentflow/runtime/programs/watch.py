"""The part of a tenant's live graphs that one watch has not sent yet.

The graphs notify a watch of changed parts (``graph.Watcher``), so the time of a look is linear in their
number and in the number of running requests, which may move to another replica. A client has at most as many
parts as one answer with whole graphs (``live.Room``). While more are open, or more have changed, each look
lists the shown parts and compares them with the parts that were sent.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from msgspec.structs import replace

from agentflow.protocol.events import GraphDelta, GraphsDelta, LiveNode, LiveState
from agentflow.runtime.programs.deduction import REQUESTS, GraphNode
from agentflow.runtime.programs.graph import ProgramGraph, StateInGraph
from agentflow.runtime.programs.live import (
    Room,
    ShownNumbers,
    TenantGraphs,
    live_graph,
    live_node,
    live_state,
)

MAX_CHANGED = 1_000
"""If more parts have changed, the next look lists all parts."""
MAX_NUMBERS = 10_000
"""A watch that has numbered this many programs or task groups of one graph starts over."""

_Part = StateInGraph | GraphNode
_LiveT = TypeVar("_LiveT", LiveState, LiveNode)


@dataclass(slots=True)
class _Sent:
    """The parts of one graph that were sent to the client."""

    id: int
    numbers: ShownNumbers = field(default_factory=ShownNumbers)
    states: dict[int, LiveState] = field(default_factory=dict)
    nodes: dict[int, LiveNode] = field(default_factory=dict)
    running: dict[int, LiveNode] = field(default_factory=dict)  # of the nodes, the requests that run
    num_edges: int = 0
    num_left_out: tuple[int, int] = (0, 0)  # states and nodes

    def send(
        self,
        states: Mapping[int, LiveState | None],
        nodes: Mapping[int, LiveNode | None],
        num_left_out: tuple[int, int] = (0, 0),
    ) -> GraphDelta | None:
        """Brings the parts up to date. Returns the difference, or None if there is none. ``states`` and
        ``nodes``: by their ids, with None for those that are not shown."""
        self.num_edges -= self._count_edges(nodes)
        new_states, states_gone = _difference(self.states, states)
        new_nodes, nodes_gone = _difference(self.nodes, nodes)
        self.num_edges += self._count_edges(nodes)
        for node_id in nodes_gone:
            self.running.pop(node_id, None)
        for node in new_nodes:
            if node.status == "running" and node.kind in REQUESTS:
                self.running[node.id] = node
            else:
                self.running.pop(node.id, None)
        before, self.num_left_out = self.num_left_out, num_left_out
        if not (new_states or new_nodes or states_gone or nodes_gone) and before == num_left_out:
            return None
        new_nodes.sort(key=lambda node: node.id)
        return GraphDelta(
            self.id, tuple(new_states), tuple(new_nodes), tuple(states_gone), tuple(nodes_gone), *num_left_out
        )

    def moved(self, graph: ProgramGraph) -> dict[int, LiveNode | None]:
        """The running requests that are on another replica now, by the ids of their nodes."""
        return {
            node.id: replace(node, replica=replica)
            for node in self.running.values()
            if (replica := graph.find_replica(node.state)) != node.replica
        }

    def _count_edges(self, node_ids: Iterable[int]) -> int:
        return sum([len(self.nodes[one].needs) for one in node_ids if one in self.nodes])


def _difference(
    sent: dict[int, _LiveT], parts: Mapping[int, _LiveT | None]
) -> tuple[list[_LiveT], list[int]]:
    """Brings ``sent`` up to date. Returns the parts that are new or differ, and the ids of removed ones."""
    new: list[_LiveT] = []
    gone: list[int] = []
    for part_id, part in parts.items():
        if part is None:
            if sent.pop(part_id, None) is not None:
                gone.append(part_id)
        elif sent.get(part_id) != part:
            sent[part_id] = part
            new.append(part)
    return new, gone


class GraphsWatch:
    """The changes of the graphs of one tenant, for one watch. Ends with ``close``.

    Args:
        own: The graph of the watching session, which is shown first, even without states.
        graphs: The graphs of the tenant.
        new_room: Returns the room for all shown parts.
    """

    def __init__(self, own: ProgramGraph, graphs: TenantGraphs, new_room: Callable[[], Room] = Room) -> None:
        self._own = own
        self._graphs = graphs
        self._new_room = new_room
        self._ids = itertools.count(1)
        self._sent: dict[ProgramGraph, _Sent] = {}
        self._gone: list[int] = []  # the ids of graphs that were sent, and are not shown any more
        self._changed: dict[ProgramGraph, dict[_Part, None]] = {}
        self._num_changed = 0
        self._room = new_room()  # that the sent parts leave
        self._is_reset = True  # the client forgets the earlier looks
        self._lists_all = True  # in the next look
        self._num_graphs_left_out = 0
        graphs.watchers[self] = None

    def close(self) -> None:
        """Ends the watch."""
        self._graphs.watchers.pop(self, None)

    def reset(self) -> None:
        """Makes the next look complete, because earlier ones may have been lost."""
        self._ids = itertools.count(1)
        self._sent.clear()
        self._gone.clear()
        self._is_reset = True
        self._list_all()

    def note(self, graph: ProgramGraph, part: _Part) -> None:
        """Like ``graph.Watcher.note``."""
        if self._lists_all:
            return
        changed = self._changed.setdefault(graph, {})
        if part not in changed:
            changed[part] = None
            self._num_changed += 1
            if self._num_changed > MAX_CHANGED:
                self._list_all()

    def removed(self, graph: ProgramGraph) -> None:
        """Like ``graph.Watcher.removed``."""
        self._num_changed -= len(self._changed.pop(graph, ()))
        self._drop(graph)

    def has_news(self) -> bool:
        """Whether the client may lack something."""
        if self._lists_all or self._changed or self._gone:
            return True
        return any(sent.moved(graph) for graph, sent in self._sent.items() if sent.running)

    def look(self) -> GraphsDelta:
        """The changes since the last look."""
        if any(sent.numbers.largest > MAX_NUMBERS for sent in self._sent.values()):
            self.reset()
        is_reset, self._is_reset = self._is_reset, False
        deltas = self._listed() if self._lists_all or not self._fits() else self._updated()
        gone, self._gone = self._gone, []
        return GraphsDelta(is_reset, tuple(deltas), tuple(gone), self._num_graphs_left_out)

    # Details.

    def _list_all(self) -> None:
        self._lists_all = True
        self._changed.clear()
        self._num_changed = 0

    def _fits(self) -> bool:
        """Whether everything that has changed can be shown."""
        if self._num_changed > min(self._room.num_states, self._room.num_nodes):
            return False
        parts = itertools.chain.from_iterable(self._changed.values())
        return sum([len(part.preds) for part in parts if isinstance(part, GraphNode)]) <= self._room.num_edges

    def _listed(self) -> list[GraphDelta]:
        """The differences between the parts that are shown and those that were sent."""
        self._list_all()
        room = self._new_room()
        deltas: list[GraphDelta] = []
        others = [graph for graph in self._graphs if graph is not self._own and graph.num_states]
        shown: dict[ProgramGraph, None] = {}
        is_whole = True
        for graph in (self._own, *others):
            if shown and room.num_states <= 0:
                break
            shown[graph] = None
            sent = self._find_sent(graph)
            live = live_graph(graph, room, sent.numbers)
            num_left_out = live.num_states_left_out, live.num_nodes_left_out
            is_whole = is_whole and not any(num_left_out)
            delta = sent.send(
                dict.fromkeys(sent.states) | {state.id: state for state in live.states},
                dict.fromkeys(sent.nodes) | {node.id: node for node in live.nodes},
                num_left_out,
            )
            if delta is not None:
                deltas.append(delta)
        for graph in [graph for graph in self._sent if graph not in shown]:
            self._drop(graph)
        self._num_graphs_left_out = len(others) + 1 - len(shown)
        self._room = room
        self._lists_all = not is_whole or self._num_graphs_left_out > 0
        return deltas

    def _updated(self) -> list[GraphDelta]:
        """The differences in the parts that have changed."""
        changed, self._changed, self._num_changed = self._changed, {}, 0
        for graph, sent in self._sent.items():
            if sent.running:
                changed.setdefault(graph, {})
        deltas: list[GraphDelta] = []
        for graph, parts in changed.items():
            if graph is not self._own and not graph.num_states:
                self._drop(graph)
            elif (delta := self._updated_graph(graph, parts)) is not None:
                deltas.append(delta)
        return deltas

    def _updated_graph(self, graph: ProgramGraph, parts: Iterable[_Part]) -> GraphDelta | None:
        sent = self._find_sent(graph)
        states: dict[int, LiveState | None] = {}
        nodes = sent.moved(graph)
        for part in parts:
            if isinstance(part, GraphNode):
                nodes[part.number] = live_node(graph, part, sent.numbers)
                continue
            states[part.number] = state = live_state(graph, part, sent.numbers)
            if part.failed is not None:
                nodes[part.failed.id] = None if state is None else part.failed
        self._take_room(sent, -1)
        delta = sent.send(states, nodes)
        self._take_room(sent, 1)
        return delta

    def _find_sent(self, graph: ProgramGraph) -> _Sent:
        sent = self._sent.get(graph)
        if sent is None:
            sent = self._sent[graph] = _Sent(next(self._ids))
        return sent

    def _drop(self, graph: ProgramGraph) -> None:
        """The client no longer sees the graph."""
        sent = self._sent.pop(graph, None)
        if sent is not None:
            self._take_room(sent, -1)
            self._gone.append(sent.id)

    def _take_room(self, sent: _Sent, sign: int) -> None:
        self._room.num_states -= sign * len(sent.states)
        self._room.num_nodes -= sign * len(sent.nodes)
        self._room.num_edges -= sign * sent.num_edges
