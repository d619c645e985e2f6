"""The live graph of one session: its unfinished requests and variables, with their dependents.

The graph is updated by each op, in time linear in the op's size. Finished and cancelled parts are removed,
so its memory is bounded by the unfinished ops and the open states. It runs nothing, and reads no clock.

An op depends on earlier ops of its state, on the variables that its text refers to, and on the
ops of the parent before the fork. ``deduction`` has the rules for objectives and task groups. The result is
the ``SchedulingHint`` of each state, which ``take_hints`` reports when it has changed.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Protocol

from agentflow.protocol import ops
from agentflow.protocol.events import LiveMedium, LiveNode, Usage
from agentflow.protocol.images import Medium, Video, medium_kind
from agentflow.protocol.op_table import references
from agentflow.protocol.ops import Objective
from agentflow.runtime.programs.deduction import (
    BLOCKED,
    MAX_VISITS,
    REQUESTS,
    Deduction,
    GraphNode,
    How,
    NodeKind,
)
from agentflow.runtime.programs.scheduling_hint import SchedulingHint

_numbers = itertools.count(1)
"""Numbers of programs and task groups, unique in the process."""
_KINDS: Final[dict[type[ops.Op], NodeKind]] = {
    ops.Select: "select",
    ops.Decide: "decide",
    ops.Embed: "embed",
    ops.Set: "set",
    ops.Read: "read",
    ops.Done: "done",
    ops.Expect: "expect",
}
FOLLOWED: Final[frozenset[type]] = frozenset({ops.Gen, ops.Fork, ops.Hint, *_KINDS})
"""The ops that update the graph, in addition to texts that refer to variables."""
_MIN_FRONTIER = 16
MAX_MEDIA = 4
"""The maximum number of a request's images and videos that are listed; all of them are counted."""
_MAX_SOURCE_CHARS = 200
MAX_LABELS = 256
"""The maximum number of program labels whose return times are kept."""
_WEIGHT_OF_LAST = 0.25
"""The weight of the last return time in the average."""


class StateInGraph:
    """One open state.

    Args:
        number: The state's number in the session.
        program: The number of its program.
        label: The name of its program.
        objective: The objective of its next requests, if the program gives one.
        group: The number of its group, of whose results the client waits for all; 0: none.
    """

    __slots__ = (
        "failed",
        "frontier",
        "frontier_limit",
        "group",
        "is_stopped",
        "label",
        "media",
        "miss",
        "nodes",
        "num_media",
        "number",
        "objective",
        "program",
        "reported",
        "requests",
        "waits_since",
    )

    def __init__(
        self, number: int, program: int, label: str, objective: Objective | None, group: int = 0
    ) -> None:
        self.number = number
        self.program = program
        self.label = label
        self.objective = objective
        self.group = group
        self.frontier: list[GraphNode] = []  # its next op depends on these; some may have ended
        self.frontier_limit = _MIN_FRONTIER
        self.nodes: dict[GraphNode, None] = {}  # its unfinished nodes
        self.requests: deque[GraphNode] = deque()  # the requests, in their order; some may have ended
        self.media: tuple[LiveMedium, ...] = ()  # those before the next request, as in ``LiveNode``
        self.num_media = 0
        self.is_stopped = False
        self.failed: LiveNode | None = None  # the node with which it failed
        self.miss = ("", 0)  # of its last request, why tokens were not cached, and how many
        self.reported = SchedulingHint(steps=None)  # the last one that was reported
        self.waits_since: float | None = None  # the end of its last request, while it waits for the client

    def next_request(self) -> GraphNode | None:
        """The unfinished request that is next."""
        requests = self.requests
        while requests:
            if not requests[0].has_ended:
                return requests[0]
            requests.popleft()
        return None


class _Named:
    """Assigns numbers to names. A name keeps its number while a state with this name is open."""

    __slots__ = ("_names", "_next_number", "_numbers")

    def __init__(self, next_number: Callable[[], int]) -> None:
        self._next_number = next_number
        self._numbers: dict[str, tuple[int, int]] = {}  # with the number of open states
        self._names: dict[int, str] = {}

    def open(self, state: int, name: str) -> int:
        """Returns the number of the name. The state has this name until ``close``."""
        number, num_states = self._numbers.get(name) or (self._next_number(), 0)
        self._numbers[name] = number, num_states + 1
        self._names[state] = name
        return number

    def close(self, state: int) -> None:
        """Records that the state, which may have no name, is closed."""
        name = self._names.pop(state, None)
        if name is not None:
            number, num_states = self._numbers.pop(name)
            if num_states > 1:
                self._numbers[name] = number, num_states - 1


class Watcher(Protocol):
    """Is notified of changes in the visible parts of graphs."""

    def note(self, graph: ProgramGraph, part: StateInGraph | GraphNode) -> None:
        """The state or the node is new, looks different, or is gone."""

    def removed(self, graph: ProgramGraph) -> None:
        """The session of the graph has ended."""


class ProgramGraph:
    """The graph of one session.

    Args:
        numbers: The numbers of new programs and task groups; by default unique in the process.
        program: The program of states without their own; empty: each of their trees is a program.
        find_replica: Returns the replica of a state's running request, as in ``LiveNode``.
        max_visits: The approximate maximum number of nodes and edges that one op updates.
    """

    def __init__(
        self,
        numbers: Callable[[], int] | None = None,
        *,
        program: str = "",
        find_replica: Callable[[int], int | None] = lambda state: None,
        max_visits: int = MAX_VISITS,
    ) -> None:
        self._max_visits = max_visits
        self._program = program
        self.find_replica = find_replica
        self._next_number = _numbers.__next__ if numbers is None else numbers
        self._node_numbers = itertools.count(1)
        self._states: dict[int, StateInGraph] = {}
        self._programs = _Named(self._next_number)
        self._groups = _Named(self._next_number)
        self._variables: dict[int, GraphNode] = {}  # the unfinished ones
        self._forks: dict[int, GraphNode] = {}  # unfinished forks, by their first child
        self._changed: dict[StateInGraph, None] = {}
        self.has_changes = False
        """Whether ``take_hints`` may have something to report."""
        self.is_settled = True
        """Whether the hints have taken all ops into account."""
        self.watchers: dict[Watcher, None] = {}
        """The watchers of the tenant."""
        self._deduction = Deduction(self._next_number, self._note, self._tell)
        self._returns_s: dict[str, float] = {}  # by the labels of programs, the least recently used first

    # Ops.

    def submit(self, op: ops.Op, now_s: float = 0.0) -> None:
        """An op was accepted. ``now_s``: the time on any monotonic clock."""
        match op:
            case ops.Text():
                self._refer(op)
            case ops.Gen():
                self._declare(op, "reply" if op.reply else "gen", now_s)
            case ops.Fork():
                self._fork(op)
            case ops.Open():
                self._open(op)
            case ops.Hint():
                state = self._states.get(op.state)
                if state is not None and op.objective is not None:
                    state.objective = op.objective
                    self._tell(state)
            case _ if isinstance(op, ops.Declaring):
                self._declare(op, _KINDS[type(op)], now_s)
            case _:
                pass

    def attach(self, number: int, media: Sequence[Medium]) -> None:
        """These images and videos are appended to a state, before its next request."""
        state = self._states.get(number)
        if state is None or state.is_stopped:
            return
        room = MAX_MEDIA - len(state.media)
        state.media += tuple([_live_medium(medium) for medium in media[: max(room, 0)]])
        state.num_media += len(media)

    def begin(self, op: ops.Op | ops.Rejected) -> None:
        """The op begins to run, because all its dependencies have ended."""
        if (node := self._find_node(op)) is not None:
            node.is_running = True
            self._tell(node)

    def end(self, op: ops.Op | ops.Rejected, now_s: float = 0.0, usage: Usage | None = None) -> None:
        """The op has run. The value of an expected variable follows later, in ``provide``."""
        node = self._find_node(op)
        if node is None or node.kind == "expect":
            return
        if usage is not None and node.is_request and (state := self._states.get(node.state)) is not None:
            missed = usage.prompt_tokens - usage.cached_tokens if usage.miss_reason else 0
            state.miss = usage.miss_reason, missed
        self._end(node, now_s)

    def provide(self, variable: int) -> None:
        """The client has provided the value of an expected variable, or its error."""
        node = self._variables.get(variable)
        if node is not None and node.kind == "expect":
            self._end(node, 0.0)

    def gather(self, root: int, numbers: Iterable[int]) -> None:
        """Adds a consumer for those nodes of these states that no other node needs, because the client waits
        for all of them and adds no ops. The consumer is removed with the state ``root``."""
        states = [state for number in numbers if (state := self._states.get(number)) is not None]
        nodes = [node for state in states for node in state.nodes if node.kind != "expect"]
        last = [node for node in nodes if not node.succs]
        state = self._states.get(root)
        if len(last) < 2 or state is None or state.is_stopped:
            return
        node = GraphNode(next(self._node_numbers), "gather", False, root, 0, "", state.objective)
        state.nodes[node] = None
        self._tell(node)
        self._deduction.add(node, last)
        self.is_settled = False
        self._settle()

    def want(
        self,
        variable: int,
        how: How = "value",
        objective: Objective | None = None,
        ttft_s: float | None = None,
        tpot_s: float | None = None,
    ) -> None:
        """The client awaits the variable, or reads its text while it grows.

        Args:
            variable: Its number.
            how: Whether its value is awaited, or its text is read.
            objective: The reader's objective; None: derived from ``how``.
            ttft_s: The reader's target for the time to the first token.
            tpot_s: The reader's target for the time between tokens.
        """
        node = self._variables.get(variable)
        if node is None:
            return
        if node.want != "stream":
            node.want = how
        node.explicit = objective or node.explicit
        node.ttft_s = node.ttft_s if ttft_s is None else ttft_s
        node.tpot_s = node.tpot_s if tpot_s is None else tpot_s
        self._note(node)
        self._update(node)

    def stop(self, number: int, *, has_failed: bool = False) -> None:
        """The state has failed or was cancelled: later ops are ignored. Unfinished ops are removed during the
        next ops or calls of ``take_hints``, because many states may stop in one turn of the event loop."""
        state = self._states.get(number)
        if state is None or state.is_stopped:
            return
        state.is_stopped = True
        if has_failed and state.nodes:
            node = next((node for node in state.nodes if node.is_running), None) or next(iter(state.nodes))
            var = 0 if node.kind == "fork" else node.var
            state.failed = LiveNode(node.number, number, node.kind, var, node.name, "failed")
        for node in state.nodes:
            self._forget(node)
        if state.nodes:
            self._deduction.remove(state.nodes)
            self.is_settled = False
        state.nodes.clear()
        state.requests.clear()
        state.frontier.clear()
        self._mark(state)

    def close(self, number: int) -> None:
        """The state is closed."""
        state = self._states.get(number)
        if state is None:
            return
        self.stop(number)
        del self._states[number]
        self._changed.pop(state, None)
        self._tell(state)
        self._programs.close(number)
        self._groups.close(number)

    # Results.

    def take_hints(self) -> list[tuple[int, SchedulingHint]]:
        """The hints of the states, by number, that have changed since the last call. ``has_changes`` tells
        whether another call may have more."""
        self._settle()
        changed, self._changed = self._changed, {}
        self.has_changes = not self.is_settled
        found: list[tuple[int, SchedulingHint]] = []
        for state in changed:
            hint = self.find_hint(state)
            if hint != state.reported:
                state.reported = hint
                found.append((state.number, hint))
        return found

    def hint(self, number: int) -> SchedulingHint | None:
        """The present hint for the state with this number."""
        self._settle()
        state = self._states.get(number)
        return None if state is None else self.find_hint(state)

    def nodes(self) -> Sequence[GraphNode]:
        """The unfinished nodes, in the order of the states."""
        return [node for state in self._states.values() for node in state.nodes]

    def find_hint(self, state: StateInGraph) -> SchedulingHint:
        """The present hint of a state."""
        node = state.next_request()
        if node is None:
            expected = self._returns_s.get(state.label) if state.waits_since is not None else None
            return SchedulingHint(state.program, 0, state.objective or "latency", None, expected)
        group = state.group
        group_objective: Objective = "throughput" if group else "latency"
        if (stage := node.stage) is not None and len(stage.members) > 1:
            group = stage.number
            group_objective = "throughput" if node.explicit == "throughput" else node.gate
        return SchedulingHint(
            state.program,
            group,
            node.objective,
            None if node.depth == BLOCKED else node.depth,
            None,
            node.want == "stream",
            node.ttft_s,
            node.tpot_s,
            group_objective,
        )

    @property
    def num_states(self) -> int:
        """The number of open states."""
        return len(self._states)

    def states(self) -> Iterable[StateInGraph]:
        """The open states."""
        return self._states.values()

    def state(self, number: int) -> StateInGraph | None:
        """The open state with this number, or None."""
        return self._states.get(number)

    @property
    def num_held(self) -> int:
        """The number of nodes and edges in the graph, for tests of its memory."""
        seen: dict[GraphNode, None] = {}
        pending = [*self.nodes()]
        for state in self._states.values():
            pending += state.frontier
            pending += state.requests
        num_edges = 0
        while pending:
            node = pending.pop()
            if node in seen:
                continue
            seen[node] = None
            num_edges += len(node.preds) + len(node.succs)
            pending += [*node.preds, *node.succs]
        return len(seen) + num_edges + len(self._variables) + len(self._forks)

    # Details.

    def _open(self, op: ops.Open) -> None:
        name = op.program or self._program
        program = self._programs.open(op.state, name) if name else self._next_number()
        group = self._groups.open(op.state, op.group) if op.group else 0
        self._add_state(StateInGraph(op.state, program, op.label or op.program, op.objective, group))

    def _add_state(self, state: StateInGraph) -> None:
        self._states[state.number] = state
        self._mark(state)

    def _mark(self, state: StateInGraph) -> None:
        """The hint of the state may have changed."""
        self._changed[state] = None
        self.has_changes = True
        self._tell(state)

    def _tell(self, part: StateInGraph | GraphNode) -> None:
        """The state or the node may look different to a client."""
        for watcher in self.watchers:
            watcher.note(self, part)

    def _settle(self) -> None:
        if not self.is_settled:
            self.is_settled = self._deduction.settle(self._max_visits)
            self.has_changes = self.has_changes or not self.is_settled

    def _refer(self, op: ops.Text) -> None:
        state = self._states.get(op.state)
        if state is None or state.is_stopped:
            return
        self._extend_frontier(state, references(op))

    def _extend_frontier(self, state: StateInGraph, variables: Iterable[int]) -> None:
        known = self._variables
        frontier = state.frontier
        for var in variables:
            if (node := known.get(var)) is not None:
                frontier.append(node)
        if len(frontier) > state.frontier_limit:
            state.frontier = [node for node in dict.fromkeys(frontier) if not node.has_ended]
            state.frontier_limit = max(_MIN_FRONTIER, 2 * len(state.frontier))

    def _fork(self, op: ops.Fork) -> None:
        state = self._states.get(op.state)
        if state is None:
            return
        inherited = [node for node in dict.fromkeys(state.frontier) if not node.has_ended]
        if len(inherited) > 1:  # one node, so that each child does not repeat the edges
            node = self._forks[op.children[0]] = self._add(state, "fork", op.children[0], "")
            inherited = [node]
        group = state.group if len(op.children) == 1 else 0  # branches are siblings of each other first
        for number in op.children:
            child = StateInGraph(number, state.program, state.label, state.objective, group)
            child.frontier = [*inherited]
            child.is_stopped = state.is_stopped
            child.media, child.num_media = state.media, state.num_media
            self._add_state(child)

    def _declare(self, op: ops.Declaring, kind: NodeKind, now_s: float) -> None:
        state = self._states.get(op.state)
        if state is None or state.is_stopped:
            return
        if isinstance(op, ops.Set):
            self._extend_frontier(state, references(op))
        node = self._add(state, kind, op.var, op.name)
        self._variables[op.var] = node
        if node.is_request:
            node.media, node.num_media = state.media, state.num_media
            state.media, state.num_media = (), 0
            state.requests.append(node)
            if state.waits_since is not None:
                self._note_return(state.label, now_s - state.waits_since)
                state.waits_since = None
            if state.next_request() is node:
                self._mark(state)

    def _add(self, state: StateInGraph, kind: NodeKind, var: int, name: str) -> GraphNode:
        is_request = kind in REQUESTS
        node = GraphNode(next(self._node_numbers), kind, is_request, state.number, var, name, state.objective)
        state.nodes[node] = None
        self._tell(node)
        if kind == "expect":  # runs nothing: the ops behind it do not wait for its value
            return node
        preds = [pred for pred in state.frontier if not pred.has_ended]
        state.frontier = [node]
        state.frontier_limit = _MIN_FRONTIER
        if preds or node.explicit is not None:
            self._deduction.add(node, preds)
            self.is_settled = False
        self._settle()
        return node

    def _find_node(self, op: ops.Op | ops.Rejected) -> GraphNode | None:
        if isinstance(op, ops.Fork):
            return self._forks.get(op.children[0])
        return self._variables.get(getattr(op, "var", 0))

    def _end(self, node: GraphNode, now_s: float) -> None:
        self._forget(node)
        self._tell(node)
        state = self._states.get(node.state)
        if state is not None:
            state.nodes.pop(node, None)
        if not node.preds and not node.succs and node.stage is None:
            node.has_ended = node.is_gone = True
        else:
            self._deduction.end(node)
            self.is_settled = False
            for succ in node.succs:
                if succ.kind == "gather" and not succ.levels:
                    self._end(succ, now_s)
                    break  # a node has at most one
        self._settle()
        if state is not None and node.is_request:
            if state.next_request() is None:
                state.waits_since = now_s
            self._mark(state)

    def _forget(self, node: GraphNode) -> None:
        if node.kind == "fork":
            self._forks.pop(node.var, None)
        elif self._variables.get(node.var) is node:
            del self._variables[node.var]

    def _note(self, node: GraphNode) -> None:
        """The deduction of the node has changed."""
        self._tell(node)
        state = self._states.get(node.state)
        if state is not None and state.next_request() is node:
            self._mark(state)

    def _update(self, node: GraphNode) -> None:
        self._deduction.update(node)
        self.is_settled = False
        self._settle()

    def _note_return(self, label: str, seconds: float) -> None:
        before = self._returns_s.pop(label, None)
        if before is None and len(self._returns_s) >= MAX_LABELS:
            del self._returns_s[next(iter(self._returns_s))]
        seconds = max(0.0, seconds)
        self._returns_s[label] = seconds if before is None else before + _WEIGHT_OF_LAST * (seconds - before)


def _live_medium(medium: Medium) -> LiveMedium:
    file = medium.file if isinstance(medium, Video) else medium
    return LiveMedium(file.source[:_MAX_SOURCE_CHARS], medium_kind(medium), file.media_type, len(file.data))
