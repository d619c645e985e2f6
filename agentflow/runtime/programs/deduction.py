"""The deduction of objectives, task groups and steps in the graph of unfinished requests.

It follows Parrot (Lin et al., OSDI 2024, section 5.2), in reverse topological order:

- A request with an explicit objective keeps it. A request whose value the client awaits, or that no other
  request needs, has the objective latency.
- The requests of one stage below one consumer are a ``Stage``, a task group. If there are two or more, they
  have the objective throughput, because the consumer waits for the last one. Requests with several consumers,
  all of one stage, form the stage before it: the last consumer of the group waits for them.
- A request with one consumer has the consumer's objective. A request with several consumers delays all of
  them, so it has the objective of the consumer of their task group.

A node's deduction depends only on the nodes that depend on it, directly or indirectly. A change therefore
propagates along the edges, and stops at nodes that do not change. Nodes are numbered in topological order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Final, Literal, NamedTuple, TypeVar

from agentflow.protocol.events import LiveMedium
from agentflow.protocol.ops import Objective

NodeKind = Literal[
    "gen", "reply", "select", "decide", "embed", "score", "set", "read", "done", "expect", "fork", "gather"
]  # fmt: skip
How = Literal["value", "stream"]

REQUESTS: Final = frozenset({"gen", "reply", "select", "decide", "embed", "score"})
"""The kinds of nodes that are requests to a model. Other nodes take no time."""
MAX_STEPS = 8
"""Larger numbers of steps are reduced to this one, so that the end of a request changes few later ones."""
MAX_STAGES = 8
"""The maximum number of stages below one consumer that are task groups."""
BLOCKED = 1 << 30
"""The steps of a node that waits for the client."""
MAX_VISITS = 4_096
"""The maximum number of nodes and edges that one op updates. Other nodes keep their previous deduction until
the next op, or until the next call of ``settle``."""


_KeyT = TypeVar("_KeyT")


class Stage:
    """The requests at one distance below a consumer."""

    __slots__ = ("consumer", "depth", "members", "number")

    def __init__(self, number: int, consumer: GraphNode, depth: int) -> None:
        self.number = number
        self.consumer = consumer
        self.depth = depth
        self.members: dict[GraphNode, None] = {}  # only requests


@dataclass(slots=True, eq=False, repr=False)
class GraphNode:
    """A request, another variable, or a fork.

    A node stays in the graph while it is unfinished, or while an unfinished node depends on it."""

    number: int
    kind: NodeKind
    is_request: bool  # to a model; all others take no time
    state: int
    var: int  # of a fork its first child
    name: str
    explicit: Objective | None  # the objective, if the program gives one
    media: tuple[LiveMedium, ...] = ()  # as in ``LiveNode``
    num_media: int = 0
    preds: dict[GraphNode, None] = field(default_factory=dict)
    succs: dict[GraphNode, None] = field(default_factory=dict)
    num_preds: int = 0  # that were unfinished when it was submitted, without the cancelled ones
    num_open: int = 0  # of ``succs``, the unfinished ones
    is_running: bool = False
    has_ended: bool = False
    is_gone: bool = False  # no longer in the graph
    want: How | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None
    # The deduction. Its first values belong to a node without edges.
    objective: Objective = "latency"
    gate: Objective = "latency"  # of the consumer of its stage
    stage: Stage | None = None
    stages: dict[int, Stage] | None = None  # of which it is the consumer, by their depth
    # Votes of its successors: the stage of their predecessors, and how many of them count by latency.
    votes: dict[Stage | None, int] = field(default_factory=dict)
    wide_votes: dict[Stage | None, int] = field(default_factory=dict)  # the same, if it has several
    num_urgent: int = 0
    num_urgent_gates: int = 0
    num_urgent_wide: int = 0
    vote: _Vote | None = None  # its vote at its predecessors
    is_queued: bool = False
    levels: dict[int, int] = field(default_factory=dict)  # the steps of its unfinished predecessors, counted
    depth: int = 0

    @property
    def level(self) -> int:
        """The steps before a node that depends on this one."""
        if self.depth == BLOCKED or self.kind == "expect":
            return BLOCKED
        level = self.depth + self.is_request
        return level if level < MAX_STEPS else MAX_STEPS


class _Vote(NamedTuple):
    """The vote of a node at its predecessors.

    Args:
        stage: In which stage they are if it is their only successor.
        wide_stage: The same if it is one of several.
        objective: Of the node.
        gate: Of the consumer of ``stage``.
        wide_gate: Of the consumer of its task group.
    """

    stage: Stage | None
    wide_stage: Stage | None
    objective: Objective
    gate: Objective
    wide_gate: Objective


def _count(counts: dict[_KeyT, int], key: _KeyT) -> None:
    counts[key] = counts.get(key, 0) + 1


class Deduction:
    """Keeps the deduction of all nodes up to date.

    Args:
        next_number: Returns the number of a new stage.
        changed: Receives each node whose deduction has changed.
        moved: Receives each node that has left the graph, or lost a node on which it depends.
    """

    def __init__(
        self,
        next_number: Callable[[], int],
        changed: Callable[[GraphNode], None],
        moved: Callable[[GraphNode], None] = lambda node: None,
    ) -> None:
        self._next_number = next_number
        self._changed = changed
        self._moved = moved
        self._upstream: list[
            tuple[int, GraphNode]
        ] = []  # with the negative numbers, so that later ones come first
        self._downstream: list[tuple[int, GraphNode]] = []
        self._removed: list[GraphNode] = []  # an empty deque takes 600 bytes, in each session
        self._prunable: list[GraphNode] = []  # ended ones that no unfinished node depends on

    def add(self, node: GraphNode, preds: Iterable[GraphNode]) -> None:
        """Adds a node with the unfinished nodes on which it depends (possibly repeated). A node without any,
        and without an explicit objective, needs no deduction before another node depends on it."""
        for pred in dict.fromkeys(preds):
            node.preds[pred] = None
            pred.succs[node] = None
            pred.num_open += 1
            _count(node.levels, pred.level)
        node.num_preds = len(node.preds)
        node.depth = max(node.levels, default=0)
        self.update(node)

    def end(self, node: GraphNode) -> None:
        """The node has its value."""
        level = node.level
        node.has_ended = True
        for succ in node.succs:
            self._drop_level(succ, level)
        for pred in node.preds:
            pred.num_open -= 1
            self._prune_later(pred)
        self._prune_later(node)

    def remove(self, nodes: Iterable[GraphNode]) -> None:
        """The nodes were cancelled or have failed. They leave in the next calls of ``settle``."""
        self._removed += nodes

    def _remove(self, node: GraphNode) -> None:
        if node.is_gone:
            return
        level, is_open = node.level, not node.has_ended
        node.has_ended = node.is_gone = True
        for succ in node.succs:
            del succ.preds[node]
            succ.num_preds -= 1
            if is_open:
                self._drop_level(succ, level)
            self.update(succ)
            self._moved(succ)
        for pred in node.preds:
            if is_open:
                pred.num_open -= 1
            self._disconnect(pred, node)
        self._leave(node)
        for pred in node.preds:
            self._prune_later(pred)
        node.succs, node.preds = {}, {}
        self._moved(node)

    def update(self, node: GraphNode) -> None:
        """Schedules another deduction of the node."""
        if not node.is_queued and not node.is_gone:
            node.is_queued = True
            heappush(self._upstream, (-node.number, node))

    def settle(self, max_visits: int = MAX_VISITS) -> bool:
        """Runs pending deductions, visiting about ``max_visits`` nodes and edges: the last node may have more
        edges. Returns whether the deduction of all nodes is up to date."""
        num_left = max_visits
        while self._removed and num_left > 0:
            node = self._removed.pop()
            num_left -= 1 + len(node.preds) + len(node.succs)
            self._remove(node)
        while self._prunable and num_left > 0:
            num_left -= self._prune(self._prunable.pop())
        while self._downstream and num_left > 0:
            num_left -= self._descend(heappop(self._downstream)[1])
        while self._upstream and num_left > 0:
            node = heappop(self._upstream)[1]
            node.is_queued = False
            num_left -= 1 if node.is_gone else self._deduce(node)
        return not (self._upstream or self._downstream or self._removed or self._prunable)

    # Steps.

    def _drop_level(self, node: GraphNode, level: int) -> None:
        levels = node.levels
        levels[level] -= 1
        if not levels[level]:
            del levels[level]
            if level == node.depth and not node.has_ended:
                heappush(self._downstream, (node.number, node))

    def _descend(self, node: GraphNode) -> int:
        """Returns the number of visited nodes and edges."""
        levels = node.levels
        depth = max(levels) if levels else 0
        if depth == node.depth or node.has_ended:
            return 1
        before = node.level
        node.depth = depth
        self._changed(node)
        after = node.level
        if after == before:
            return 1
        for succ in node.succs:
            levels = succ.levels
            levels[after] = levels.get(after, 0) + 1
            self._drop_level(succ, before)
        return 1 + len(node.succs)

    # Stages and objectives.

    def _deduce(self, node: GraphNode) -> int:
        """Returns the number of visited nodes and edges."""
        votes = node.votes if len(node.votes) == 1 else node.wide_votes
        stage = next(iter(votes)) if len(votes) == 1 else None
        has_changed = stage is not node.stage
        if has_changed:
            self._leave(node)
            self._join(node, stage)
        objective = self._deduce_objective(node)
        if objective != node.objective:
            node.objective = objective
            has_changed = True
        gate: Objective = objective
        if stage is not None:
            num_urgent = node.num_urgent_gates if len(node.succs) == 1 else node.num_urgent_wide
            gate = "latency" if num_urgent else "throughput"
        if gate != node.gate:
            node.gate = gate
            has_changed = True
        if has_changed:
            self._changed(node)
        if not node.preds:
            return 1
        before = None
        if stage is not None:
            before = self._stage_below(stage.consumer, stage.depth + node.is_request)
        below = self._stage_below(node, 1) if node.num_preds > 1 else before
        vote = _Vote(below, before, objective, objective if node.num_preds > 1 else gate, gate)
        if vote == node.vote:
            return 1
        for pred in node.preds:
            self._disconnect(pred, node)
            pred.succs[node] = None
            _count(pred.votes, vote.stage)
            _count(pred.wide_votes, vote.wide_stage)
            pred.num_urgent += vote.objective == "latency"
            pred.num_urgent_gates += vote.gate == "latency"
            pred.num_urgent_wide += vote.wide_gate == "latency"
        node.vote = vote
        return 1 + len(node.preds)

    def _deduce_objective(self, node: GraphNode) -> Objective:
        if node.explicit is not None:
            return node.explicit
        if node.want is not None or not node.succs:
            return "latency"
        if node.is_request and node.stage is not None and len(node.stage.members) > 1:
            return "throughput"
        num_urgent = node.num_urgent if len(node.succs) == 1 else node.num_urgent_wide
        return "latency" if num_urgent else "throughput"

    def _stage_below(self, consumer: GraphNode, depth: int) -> Stage | None:
        if depth > MAX_STAGES:
            return None
        if consumer.stages is None:
            consumer.stages = {}
        stage = consumer.stages.get(depth)
        if stage is None:
            stage = consumer.stages[depth] = Stage(self._next_number(), consumer, depth)
        return stage

    def _join(self, node: GraphNode, stage: Stage | None) -> None:
        node.stage = stage
        if stage is not None and node.is_request:
            if len(stage.members) == 1:
                self._count_again(stage)
            stage.members[node] = None

    def _leave(self, node: GraphNode) -> None:
        stage, node.stage = node.stage, None
        if stage is not None and node.is_request:
            del stage.members[node]
            if len(stage.members) == 1:
                self._count_again(stage)

    def _count_again(self, stage: Stage) -> None:
        """The number of members becomes more than one, or one."""
        (member,) = stage.members
        self._changed(member)
        self.update(member)

    def _disconnect(self, pred: GraphNode, node: GraphNode) -> None:
        """Drops the edge from ``pred`` to ``node``, with the vote of ``node``."""
        del pred.succs[node]
        if node.vote is not None:
            for votes, stage in ((pred.votes, node.vote.stage), (pred.wide_votes, node.vote.wide_stage)):
                votes[stage] -= 1
                if not votes[stage]:
                    del votes[stage]
            pred.num_urgent -= node.vote.objective == "latency"
            pred.num_urgent_gates -= node.vote.gate == "latency"
            pred.num_urgent_wide -= node.vote.wide_gate == "latency"
        self.update(pred)

    def _prune_later(self, node: GraphNode) -> None:
        if node.has_ended and not node.num_open:
            self._prunable.append(node)

    def _prune(self, node: GraphNode) -> int:
        """Drops an ended node on which nothing unfinished depends. Returns the number of visited nodes and
        edges."""
        if node.is_gone:
            return 1
        num_visits = 1 + len(node.preds) + len(node.succs)
        node.is_gone = True
        for succ in node.succs:
            del succ.preds[node]
            self._moved(succ)
        for pred in node.preds:
            self._disconnect(pred, node)
        self._leave(node)
        node.succs, node.preds = {}, {}
        self._moved(node)
        return num_visits
