"""``flow.submit``: a graph goes to the backend in one op, and its result comes back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from agentflow import ops
from agentflow.errors import BadArgument
from agentflow.graph import ROOT, Graph, filled
from agentflow.run import Run
from agentflow.seeds import run_of

if TYPE_CHECKING:
    from agentflow.session import Session


async def submit(session: Session, graph: Graph, inputs: Mapping[str, str]) -> Any:
    """Runs the graph; what the program returned when it was traced, with values for its outputs."""
    if not isinstance(graph, Graph):
        raise BadArgument(f"submit: give a graph, which program.trace(...) makes, not {graph!r}")
    values = graph.inputs(inputs)
    session.markers.refuse(values.values(), f"an argument of graph {graph.name!r}")
    base, index = session.reserve_ids(graph.num_ids), session.next_run_index()
    op = ops.Submit(
        base + ROOT,
        graph.ops,
        inputs=values,
        outputs=tuple(graph.outputs),
        seeds=run_of(session.seed, index),
        places=dict(graph.places),
    )
    session.send([op])  # what raises here has begun nothing
    run = Run(session, index=index, root_id=op.state)
    root = run.root
    variables = {number: root.output(base + number, graph, number) for number in graph.outputs}
    try:
        await root.settled()
        if root.error is not None:
            raise run.told(root.error)
        return filled(graph.result, {number: await variable for number, variable in variables.items()})
    except BaseException:
        root.cancel()
        raise
    finally:
        run.close()
