"""What can be done for a graph before it runs: constants are folded.

There is no pass for the prefix that all runs of a graph share, nor for its task groups: the engine computes
what waiting requests share once, and knows the branches of every fork as a group.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec

from agentflow.language.graph import Graph, needs_of
from agentflow.protocol import ops
from agentflow.protocol.transform import apply_transforms


def fold_constants(graph: Graph) -> Graph:
    """The graph without variables that are constants: their texts stand where they were referred to, and
    runs of text are one op each. Results stay what they were."""
    constants: dict[int, str] = {}
    folded: list[ops.Op] = []
    for op in graph.ops:
        if isinstance(op, ops.Text | ops.Set):
            op = msgspec.structs.replace(op, parts=_folded(op.parts, constants))
        # An empty one says that its state has got there; see State.ending.
        if isinstance(op, ops.Set) and op.parts and not needs_of(op):
            constants[op.var] = "".join([part for part in op.parts if isinstance(part, str)])
        folded.append(op)
    outputs = set(graph.outputs)
    needed = [op for op in folded if not (isinstance(op, ops.Set) and op.var in constants.keys() - outputs)]
    return replace(graph, ops=tuple(_merged(needed)))


def _folded(parts: ops.Parts, constants: dict[int, str]) -> ops.Parts:
    found: list[str | ops.Ref] = []
    for part in parts:
        if isinstance(part, ops.Ref) and part.var in constants:
            part = apply_transforms(constants[part.var], part.transforms)
        if isinstance(part, str) and found and isinstance(found[-1], str):
            found[-1] += part
        elif part != "":
            found.append(part)
    return tuple(found)


def _merged(sequence: list[ops.Op]) -> list[ops.Op]:
    """Texts of a state that follow each other in its stream become one, where the first stands, unless
    the later one refers to a variable that is declared in between."""
    found: list[ops.Op | None] = []
    last_text: dict[int, int] = {}  # state → index of the text that its stream ends with
    declared_at: dict[int, int] = {}
    for op in sequence:
        state = getattr(op, "state", None)
        at = last_text.get(state) if state is not None else None
        if isinstance(op, ops.Text) and at is not None and all(declared_at[v] < at for v in needs_of(op)):
            earlier = found[at]
            assert isinstance(earlier, ops.Text)
            found[at] = ops.Text(op.state, _folded((*earlier.parts, *op.parts), {}))
            continue
        if isinstance(op, ops.Text):
            last_text[op.state] = len(found)
        elif state is not None:
            last_text.pop(state, None)
        if isinstance(op, ops.Declaring):
            declared_at[op.var] = len(found)
        found.append(op)
    return [op for op in found if op is not None]
