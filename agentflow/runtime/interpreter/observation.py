"""Lets a client observe the backend: its counters, and a watch of its scheduler, radix trees and programs.

Like all events, the events of a watch are made when the client reads: each is the difference between the
newest snapshot and the last one that was sent. A snapshot is taken when the client has read the previous one,
so a slow reader costs nothing and skips intermediate states."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Generic

import anyio
import msgspec
from anyio.abc import TaskGroup

from agentflow.errors import AgentflowError, BadArgument, EngineDown, Overloaded
from agentflow.protocol import ops
from agentflow.protocol.events import (
    ErrorInfo,
    Event,
    GraphReply,
    Peeked,
    StatsReply,
    TreeDelta,
    TreeNode,
    Watched,
    WatchedRequest,
    summed,
)
from agentflow.protocol.op_table import op_spec
from agentflow.runtime.generator import ContextT, Generator, NodeText, Snapshot, SnapshotNode, View
from agentflow.runtime.interpreter.variables import EventCursor, check_number
from agentflow.runtime.limits import MemoryBudget, MemoryReservation
from agentflow.runtime.programs.graph import ProgramGraph
from agentflow.runtime.programs.live import Room, TenantGraphs, live_graph
from agentflow.runtime.programs.watch import GraphsWatch

MAX_PEEKS = 100
"""Per session: peeks without an answer, and answers that it has not received."""
MAX_TENANTS = 1000
"""When a watch has seen this many, it starts over: names of removed nodes must not accumulate."""
WATCH_BYTES = 200_000
NODE_BYTES = 1_000
"""Estimated memory of a watch, and of each of its nodes."""
GRAPHS_BYTES = 1_500_000
"""Estimated memory of the graphs of a watch."""
MAX_GRAPH_WATCHES = 32
"""The maximum number of a tenant's watches with graphs."""
MAX_TICKETS = 1_000


class StatsAnswers(Generic[ContextT]):
    """Answers ``GetStats`` with the sums of the generators. Concurrent requests share one query of each
    generator."""

    __slots__ = ("_events", "_generators", "_replies", "_tasks", "_tickets")

    def __init__(
        self, generators: Sequence[Generator[ContextT]], tasks: TaskGroup, events: EventCursor
    ) -> None:
        self._generators = generators
        self._tasks = tasks
        self._events = events
        self._tickets: list[int] = []
        self._replies: list[Event] = []

    def ask(self, ticket: int) -> None:
        """Requests an answer with this ticket. ``Overloaded`` if too many are waiting."""
        check_number(ticket)
        if len(self._tickets) + len(self._replies) >= MAX_TICKETS:
            raise Overloaded(
                f"{MAX_TICKETS} requests for statistics are unanswered: receive some answers first"
            )
        self._tickets.append(ticket)
        if len(self._tickets) == 1:
            self._tasks.start_soon(self._answer)

    async def _answer(self) -> None:
        try:
            reply = StatsReply(0, summed([await one.stats() for one in self._generators]))
        except AgentflowError as error:  # such as an engine that restarts
            reply = StatsReply(0, error=ErrorInfo.of(error))
        tickets, self._tickets = self._tickets, []
        self._replies += [msgspec.structs.replace(reply, ticket=ticket) for ticket in tickets]
        self._events.mark(self)

    def take_events(self) -> list[Event]:
        """The replies since the last call."""
        replies, self._replies = self._replies, []
        return replies


class GraphAnswers:
    """Answers ``GetGraph``, when the client reads its events: one at a time, because an answer may be large.
    ``graphs``: the tenant's graphs. ``later`` calls a function in another turn of the event loop."""

    __slots__ = ("_events", "_graph", "_graphs", "_later", "_tickets")

    def __init__(
        self,
        graph: ProgramGraph,
        graphs: TenantGraphs,
        events: EventCursor,
        later: Callable[[Callable[[], object]], None],
    ) -> None:
        self._graph = graph
        self._graphs = graphs
        self._events = events
        self._later = later
        self._tickets: list[tuple[int, bool]] = []

    def ask(self, ticket: int, *, of_tenant: bool = False) -> None:
        """Requests an answer with this ticket. ``Overloaded`` if the client has not received too many."""
        check_number(ticket)
        if len(self._tickets) >= MAX_PEEKS:
            raise Overloaded(f"{MAX_PEEKS} requests for the graph are unanswered: receive some answers first")
        self._tickets.append((ticket, of_tenant))
        self._events.mark(self)

    def take_events(self) -> list[Event]:
        """The next reply."""
        if not self._tickets:
            return []
        ticket, of_tenant = self._tickets.pop(0)
        if self._tickets:
            self._later(partial(self._events.mark, self))
        room = Room()
        own = live_graph(self._graph, room)
        others = [graph for graph in self._graphs if graph is not self._graph and graph.num_states]
        shown = [live_graph(graph, room) for graph in others] if of_tenant else []
        return [GraphReply(ticket, own, others=tuple(shown))]


class WatchedTree:
    """The part of the radix tree that one watch has sent. In each watch, ids of nodes and requests count from
    1, because the backend's numbers would reveal the activity of other tenants."""

    def __init__(self) -> None:
        self._epoch: int | None = None
        self._sent: dict[int, SnapshotNode] = {}
        self._ids: dict[int, int] = {}  # of the nodes that were sent, by the backend's numbers
        self._numbers: dict[int, int] = {}
        self._tenants: dict[str, int] = {}
        self._next_ids = itertools.count(1)

    def reset(self) -> None:
        """The next delta has all nodes."""
        self._epoch = None

    def find_number(self, node_id: int) -> int | None:
        """The backend's number of a node that was sent and is not gone."""
        return self._numbers.get(node_id)

    def delta(self, snapshot: Snapshot) -> TreeDelta:
        """The changes since the last delta."""
        is_reset = snapshot.epoch != self._epoch or len(self._tenants) > MAX_TENANTS
        if is_reset:
            self._epoch = snapshot.epoch
            for known in (self._sent, self._ids, self._numbers, self._tenants):
                known.clear()
        before, self._sent = self._sent, {node.number: node for node in snapshot.nodes}
        gone = [self._forget(number) for number in before.keys() - self._sent.keys()]
        nodes = [
            self._shown(node, snapshot.time_s) for node in snapshot.nodes if before.get(node.number) != node
        ]
        return TreeDelta(
            reset=is_reset,
            nodes=tuple(nodes),
            gone=tuple(sorted(gone)),
            tenants=tuple(self._tenants),
            num_nodes_left_out=snapshot.num_nodes - len(snapshot.nodes),
        )

    def _forget(self, number: int) -> int:
        node_id = self._ids.pop(number)
        del self._numbers[node_id]
        return node_id

    def _shown(self, node: SnapshotNode, now_s: float) -> TreeNode:
        node_id = self._ids.get(node.number)
        if node_id is None:
            node_id = self._ids[node.number] = next(self._next_ids)
            self._numbers[node_id] = node.number
        return TreeNode(
            node_id,
            self._ids[node.parent] if node.parent else 0,
            node.num_tokens,
            node.num_generated,
            node.locks,
            node.keeps,
            round(max(0.0, now_s - node.used_s), 3),
            self._tenants.setdefault(node.tenant, len(self._tenants)),
        )


class _Watch:
    """One watch, and the position of its client. ``is_due``: the client gets an event when it reads.
    ``pending``: the newest snapshot, which has not been sent; no other one is taken meanwhile. ``graphs``:
    the changes of the graphs, if the watch has them."""

    def __init__(self, op: ops.Watch, reservation: MemoryReservation, graphs: GraphsWatch | None) -> None:
        self.op = op
        self.scope = anyio.CancelScope()
        self.view: View | None = None
        self.tree = WatchedTree()
        self.graphs = graphs
        self.is_due = False
        self.pending: Snapshot | None = None
        self.has_read = anyio.Event()
        self._epoch: int | None = None
        self._last_step: int | None = None
        self._request_ids: dict[int, int] = {}
        self._next_ids = itertools.count(1)
        self._reservation = reservation

    @property
    def steps_after(self) -> int:
        """The number of the last step that is known."""
        return self._last_step or 0

    @property
    def needs_engine(self) -> bool:
        """Whether the events have more than graphs."""
        return self.op.steps or self.op.tree or not self.op.graphs

    def end(self) -> None:
        """Ends the watch: no more events are sent."""
        self.scope.cancel()
        if self.graphs is not None:
            self.graphs.close()

    def take_event(self) -> Watched:
        """The event that brings the client up to date."""
        snapshot, self.pending, self.is_due = self.pending, None, False
        self.has_read.set()
        if snapshot is None:
            assert self.graphs is not None
            return Watched(self.op.ticket, graphs=self.graphs.look())
        began_s = time.thread_time()
        if snapshot.epoch != self._epoch:
            self._epoch, self._last_step = snapshot.epoch, None
            self._request_ids.clear()
        last, steps, num_skipped = self._last_step, [*snapshot.steps], 0
        if last is None:
            steps = []
            self._last_step = snapshot.steps[-1].number if snapshot.steps else 0
        else:
            steps = [step for step in steps if step.number > last]
            if steps:
                num_skipped = steps[0].number - last - 1
                self._last_step = steps[-1].number
        event = Watched(
            self.op.ticket,
            round(snapshot.time_s, 3),
            steps=tuple(steps) if self.op.steps else (),
            steps_skipped=num_skipped if self.op.steps else 0,
            requests=self._requests(snapshot.requests),
            stats=snapshot.stats,
            tree=self.tree.delta(snapshot) if self.op.tree else None,
            graphs=None if self.graphs is None else self.graphs.look(),
        )
        if self.view is not None:
            self.view.spent(time.thread_time() - began_s)
        return event

    def _requests(self, requests: Sequence[WatchedRequest]) -> tuple[WatchedRequest, ...]:
        known = self._request_ids
        self._request_ids = {one.id: known.get(one.id) or next(self._next_ids) for one in requests}
        return tuple(
            [
                msgspec.structs.replace(one, id=self._request_ids[one.id], age_s=round(one.age_s, 3))
                for one in requests
            ]
        )


class WatchAnswers(Generic[ContextT]):
    """Answers ``Watch`` and ``Peek``. A session has one watch.

    Args:
        generator: The generator to watch.
        tasks: Owns the tasks.
        events: Receives the answers.
        memory: Counts the memory of the watch.
        graph: The graph of the session.
        graphs: The graphs of the tenant.
    """

    __slots__ = (
        "_events",
        "_generator",
        "_graph",
        "_graphs",
        "_memory",
        "_peeks",
        "_replies",
        "_tasks",
        "_watch",
    )

    def __init__(
        self,
        generator: Generator[ContextT],
        tasks: TaskGroup,
        events: EventCursor,
        memory: MemoryBudget,
        graph: ProgramGraph,
        graphs: TenantGraphs,
    ) -> None:
        self._generator = generator
        self._graph = graph
        self._graphs = graphs
        self._tasks = tasks
        self._events = events
        self._memory = memory
        self._watch: _Watch | None = None
        self._peeks: list[ops.Peek] = []
        self._replies: list[Event] = []

    def watch(self, op: ops.Watch) -> None:
        """Begins a watch, in place of an earlier one. ``Overloaded`` if too many answers are not received."""
        check_number(op.ticket)
        self._check_room()
        self.unwatch()
        try:
            op_spec(op).check(op)
            if op.graphs and len(self._graphs.watchers) >= MAX_GRAPH_WATCHES:
                raise Overloaded("too many sessions of this tenant watch its programs: end another watch")
            num_nodes = op.max_nodes if op.tree else 0
            num_bytes = WATCH_BYTES + NODE_BYTES * num_nodes + (GRAPHS_BYTES if op.graphs else 0)
            reservation = MemoryReservation(self._memory, num_bytes)
        except AgentflowError as error:
            self._reply(Watched(op.ticket, error=ErrorInfo.of(error)))
            return
        graphs = GraphsWatch(self._graph, self._graphs) if op.graphs else None
        self._watch = _Watch(op, reservation, graphs)
        self._tasks.start_soon(self._run, self._watch)

    def unwatch(self) -> None:
        """Ends the watch, if there is one."""
        if self._watch is not None:
            self._watch.end()
            self._watch = None

    def peek(self, op: ops.Peek) -> None:
        """Requests the text of a node. ``Overloaded`` if too many are waiting or not received."""
        check_number(op.ticket)
        self._check_room()
        self._peeks.append(op)
        if len(self._peeks) == 1:
            self._tasks.start_soon(self._answer_peeks)

    def rewind(self) -> None:
        """Events may have been lost with a connection: the next one has the whole tree and all graphs."""
        if self._watch is not None:
            self._watch.tree.reset()
            if self._watch.graphs is not None:
                self._watch.graphs.reset()

    def take_events(self) -> list[Event]:
        """The answers since the last call."""
        replies, self._replies = self._replies, []
        watch = self._watch
        if watch is not None and watch.is_due:
            began_s = time.thread_time()
            replies.append(watch.take_event())
            if not watch.needs_engine:
                self._graphs.pace.spent(time.thread_time() - began_s, anyio.current_time())
        return replies

    async def _run(self, watch: _Watch) -> None:
        with watch.scope:
            try:
                if watch.needs_engine:
                    with self._generator.watching() as watch.view:
                        await self._observe(watch, watch.view)
                elif watch.graphs is not None:
                    await self._observe_graphs(watch, watch.graphs)
            except AgentflowError as error:
                self._reply(Watched(watch.op.ticket, error=ErrorInfo.of(error)))
        watch.end()
        watch.view = None

    async def _observe_graphs(self, watch: _Watch, graphs: GraphsWatch) -> None:
        """Observes graphs without the engine: events are sent only for changes."""
        while True:
            if graphs.has_news():
                await self._show(watch)
            pause_s = max(watch.op.interval_s, self._graphs.pace.next_s - anyio.current_time())
            await anyio.sleep(pause_s)  # noqa: TID251  # the interval that the client asked for

    async def _show(self, watch: _Watch) -> None:
        """Waits until the client has read an event."""
        watch.has_read, watch.is_due = anyio.Event(), True
        self._events.mark(self)
        await watch.has_read.wait()

    async def _observe(self, watch: _Watch, view: View) -> None:
        is_down = False
        max_nodes = watch.op.max_nodes if watch.op.tree else 0
        while True:
            try:
                watch.pending = await view.snapshot(max_nodes, watch.steps_after)
                is_down = False
                await self._show(watch)
            except EngineDown as error:
                if not is_down:
                    self._reply(Watched(watch.op.ticket, error=ErrorInfo.of(error)))
                is_down = True
            await anyio.sleep(watch.op.interval_s)  # noqa: TID251  # the interval that the client asked for

    async def _answer_peeks(self) -> None:
        while self._peeks:
            op = self._peeks[0]
            try:
                text, num_tokens = await self._read_text(op.node)
                self._reply(Peeked(op.ticket, text, num_tokens))
            except AgentflowError as error:
                self._reply(Peeked(op.ticket, error=ErrorInfo.of(error)))
            del self._peeks[0]

    async def _read_text(self, node_id: int) -> NodeText:
        watch = self._watch
        number = None if watch is None else watch.tree.find_number(node_id)
        if watch is None or watch.view is None or number is None:
            raise BadArgument("peek: the watch of this session has no such node", param="node")
        return await watch.view.read_text(number)

    def _check_room(self) -> None:
        if len(self._peeks) + len(self._replies) >= MAX_PEEKS:
            raise Overloaded(f"{MAX_PEEKS} answers to peeks are not received: receive some first")

    def _reply(self, event: Event) -> None:
        self._replies.append(event)
        self._events.mark(self)
