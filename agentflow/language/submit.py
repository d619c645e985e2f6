"""A graph goes to the backend in one op, and its result comes back: for ``flow.submit``, and where a graph is
mapped over inputs or streamed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from agentflow.errors import BadArgument
from agentflow.language.graph import Graph, filled
from agentflow.language.run import Run
from agentflow.language.state import State
from agentflow.language.variable import Variable
from agentflow.protocol import ops
from agentflow.protocol.op_table import ROOT
from agentflow.protocol.ops import run_of

if TYPE_CHECKING:
    from agentflow.language.session import Session


class GraphRun:
    """A graph that has been sent with the texts of its arguments. ``index``, ``objective``: of its run.
    ``is_streamed``: all that it generates and selects is reported, not only what its result needs."""

    def __init__(
        self,
        session: Session,
        graph: Graph,
        arguments: Mapping[str, str],
        *,
        index: int | None = None,
        objective: ops.Objective | None = None,
        is_streamed: bool = False,
    ) -> None:
        values = graph.inputs(arguments)
        session.markers.refuse(values.values(), f"an argument of graph {graph.name!r}")
        base = session.reserve_ids(graph.num_ids)
        index = session.next_run_index() if index is None else index
        op = ops.Submit(
            base + ROOT,
            _with_objective(graph.ops, objective),
            inputs=values,
            outputs=tuple(graph.generated if is_streamed else graph.outputs),
            seeds=run_of(session.seed, index),
            places=dict(graph.places),
        )
        session.send([op])  # what raises here has begun nothing
        self.run = Run(session, index=index, root_id=op.state)
        self._graph = graph
        states = self._states(base)
        self.run.root.await_graph()
        places = {part.var: part.state for part in graph.ops if isinstance(part, ops.Declaring)}
        self._variables: dict[int, Variable[Any]] = {
            number: states[places[number]].output(base + number, graph, number) for number in op.outputs
        }

    def _states(self, base: int) -> dict[int, State]:
        """By their numbers in the graph. Only the root is one that the session knows."""
        states = {ROOT: self.run.root}
        num_children: Counter[int] = Counter()
        for part in self._graph.ops:
            if isinstance(part, ops.Fork):
                for child in part.children:
                    states[child] = states[part.state].branch_of_graph(base + child, num_children[part.state])
                    num_children[part.state] += 1
        return states

    async def result(self) -> Any:
        """What the program returned when it was traced, with values for its outputs."""
        root = self.run.root
        try:
            await root.settled()
            if root.error is not None:
                raise self.run.told(root.error)
            values = {number: await self._variables[number] for number in self._graph.outputs}
            return filled(self._graph.result, values)
        except BaseException:
            root.cancel()
            raise
        finally:
            self.run.close()


async def submit(session: Session, graph: Graph, inputs: Mapping[str, str]) -> Any:
    """Runs the graph and gives its result."""
    if not isinstance(graph, Graph):
        raise BadArgument(f"submit: give a graph, which program.trace(...) makes, not {graph!r}")
    return await GraphRun(session, graph, inputs).result()


def _with_objective(graph_ops: tuple[ops.Op, ...], objective: ops.Objective | None) -> tuple[ops.Op, ...]:
    if objective is None or not isinstance(graph_ops[0], ops.Open):
        return graph_ops
    return (msgspec.structs.replace(graph_ops[0], objective=objective), *graph_ops[1:])
