"""The live graphs that the events of a watch describe, and the watch of a session that reads them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import anyio

from agentflow.protocol.events import (
    ErrorInfo,
    GraphDelta,
    GraphsDelta,
    LiveGraph,
    LiveNode,
    LiveState,
    Watched,
)


@dataclass(slots=True)
class _Graph:
    states: dict[int, LiveState] = field(default_factory=dict)
    nodes: dict[int, LiveNode] = field(default_factory=dict)
    num_left_out: tuple[int, int] = (0, 0)

    def apply(self, delta: GraphDelta) -> None:
        for state in delta.states_gone:
            self.states.pop(state, None)
        for node in delta.nodes_gone:
            self.nodes.pop(node, None)
        self.states |= {state.id: state for state in delta.states}
        self.nodes |= {node.id: node for node in delta.nodes}
        self.num_left_out = delta.num_states_left_out, delta.num_nodes_left_out

    def live(self) -> LiveGraph:
        states = sorted(self.states.values(), key=lambda state: state.id)
        nodes = sorted(self.nodes.values(), key=lambda node: node.id)
        return LiveGraph(tuple(states), tuple(nodes), *self.num_left_out)


class GraphsView:
    """The live graphs of a tenant, which follow the deltas of a watch."""

    def __init__(self) -> None:
        self._graphs: dict[int, _Graph] = {}

    def apply(self, delta: GraphsDelta) -> None:
        """Brings the graphs up to date."""
        if delta.reset:
            self._graphs.clear()
        for number in delta.gone:
            self._graphs.pop(number, None)
        for one in delta.graphs:
            self._graphs.setdefault(one.id, _Graph()).apply(one)

    def graphs(self) -> list[LiveGraph]:
        """The present graphs, with the states and nodes by their ids. The first one is the graph of the
        session that watches."""
        own = self._graphs.get(1, _Graph())
        return [own.live(), *[graph.live() for number, graph in self._graphs.items() if number != 1]]


class GraphWatch:
    """The watch of a session: iterates over the newest graphs. ``aclose`` ends it; so does another
    watch of the session, and the last reference to it.

    Args:
        ticket: The ticket of its op and events.
        close: Called with the ticket by ``aclose``.
    """

    def __init__(self, ticket: int, close: Callable[[int], None]) -> None:
        self.ticket = ticket
        self._close = close
        self._view = GraphsView()
        self._changed = anyio.Event()
        self._error: ErrorInfo | None = None
        self._has_ended = False

    def receive(self, event: Watched) -> None:
        """Takes an event of this watch."""
        if event.error is not None:
            self.fail(event.error)
        elif event.graphs is not None:
            self._view.apply(event.graphs)
            self._changed.set()

    def fail(self, error: ErrorInfo) -> None:
        """No more events come, because of an error."""
        self._error = error
        self.end()

    def end(self) -> None:
        """No more events come."""
        self._has_ended = True
        self._changed.set()

    def __aiter__(self) -> GraphWatch:
        return self

    async def __anext__(self) -> list[LiveGraph]:
        await self._changed.wait()
        if self._error is not None:
            raise self._error.to_exception()
        if self._has_ended:
            raise StopAsyncIteration
        self._changed = anyio.Event()
        return self._view.graphs()

    async def aclose(self) -> None:
        """Ends the watch."""
        self.end()
        self._close(self.ticket)
