"""A graph that was submitted whole, on the side that runs it: expanded into ops, and ended as one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic

import msgspec

from agentflow.errors import Cancelled, ProtocolError
from agentflow.protocol import ops
from agentflow.protocol.op_table import ROOT, moved
from agentflow.protocol.ops import derived_seed
from agentflow.runtime.generator import ContextT
from agentflow.runtime.state_tree import StateRecord

MAX_GRAPH_OPS = 10_000
TICKET = 1
"""The root has reached this ticket when all states of the graph have ended."""

_ALLOWED = (
    ops.Text
    | ops.Image
    | ops.Converse
    | ops.Begin
    | ops.End
    | ops.Gen
    | ops.Select
    | ops.Set
    | ops.Read
    | ops.Expect
    | ops.Hint
    | ops.Limit
    | ops.Fork
    | ops.TaskGroup
    | ops.Seal
)


def expanded(graph: ops.Submit) -> Iterator[ops.Op]:
    """The ops of a submitted graph with the session's numbers: its own, and a seal for each state that
    has none. ``ProtocolError`` where it is no graph."""
    base = graph.state - ROOT
    if not 0 < len(graph.ops) <= MAX_GRAPH_OPS:
        raise ProtocolError(f"a graph has 1 to {MAX_GRAPH_OPS} ops, not {len(graph.ops)}")
    if not isinstance(graph.ops[0], ops.Open) or graph.ops[0].state != ROOT:
        raise ProtocolError(f"a graph begins with the opening of state {ROOT}")
    unsealed: dict[int, None] = {ROOT: None}
    yield moved(graph.ops[0], base)
    for op in graph.ops[1:]:
        if not isinstance(op, _ALLOWED):
            raise ProtocolError(f"a {type(op).__name__.lower()} cannot stand in a graph")
        if isinstance(op, ops.Fork):
            unsealed |= dict.fromkeys(op.children)
        elif isinstance(op, ops.Seal):
            unsealed.pop(op.state, None)
        elif isinstance(op, ops.Gen) and op.var in graph.places:
            seed = derived_seed(graph.seeds, graph.places[op.var])
            op = msgspec.structs.replace(op, params=msgspec.structs.replace(op.params, seed=seed))
        yield moved(op, base)
    for state in unsealed:
        yield ops.Seal(state + base)


class GraphExecution(Generic[ContextT]):
    """The states of one submitted graph. The root says when all have ended, or what failed first."""

    def __init__(self, root: StateRecord[ContextT]) -> None:
        self.states: list[StateRecord[ContextT]] = []
        self._root = root
        self._num_left = 0

    def add(self, state: StateRecord[ContextT]) -> None:
        """One more state of the graph; of those only the root speaks."""
        self.states.append(state)
        self._num_left += 1
        state.graph = self
        state.is_silent = state is not self._root

    def ended(self) -> None:
        """One of the states has nothing more to do."""
        self._num_left -= 1
        if self._num_left:
            return
        errors = [state.error for state in self.states if state.error is not None]
        failures = [error for error in errors if not isinstance(error, Cancelled)]
        if self._root.error is None and failures:
            self._root.error = failures[0]
            self._root.mark()
        elif self._root.error is None:
            self._root.reach(TICKET)
