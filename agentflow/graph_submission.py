"""``flow.submit``: a graph goes to the backend in one op, and its result comes back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from agentflow import ops
from agentflow.errors import BadArgument
from agentflow.graph import ROOT, Graph, filled
from agentflow.run import Run

if TYPE_CHECKING:
    from agentflow.session import Session


async def submit(session: Session, graph: Graph, inputs: Mapping[str, str]) -> Any:
    """Runs the graph; what the program returned when it was traced, with values for its outputs."""
    if not isinstance(graph, Graph):
        raise BadArgument(f"submit: give a graph, which program.trace(...) makes, not {graph!r}")
    values = graph.inputs(inputs)
    session.markers.refuse(values.values(), f"an argument of graph {graph.name!r}")
    _check_supported(session, graph)
    base = session.reserve_ids(graph.num_ids)
    run = Run(session, root_id=base + ROOT)
    root = run.root
    variables = {number: root.output(base + number, graph, number) for number in graph.outputs}
    try:
        session.send(
            [
                ops.Submit(
                    root.id,
                    graph.ops,
                    inputs=values,
                    outputs=tuple(variables),
                    seeds=run.seed_prefix,
                    places=dict(graph.places),
                )
            ]
        )
        await root.settled()
        if root.error is not None:
            raise run.told(root.error)
        return filled(graph.result, {number: await variable for number, variable in variables.items()})
    except BaseException:
        root.cancel()
        raise
    finally:
        run.close()


def _check_supported(session: Session, graph: Graph) -> None:
    """``NotSupported`` before anything is sent."""
    for op in graph.ops:
        if isinstance(op, ops.Gen):
            session.capabilities.require(op.constraint)
        elif isinstance(op, ops.Image):
            session.capabilities.require_images()
