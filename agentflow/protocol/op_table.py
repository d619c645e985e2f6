"""What each class of op is to a recording: which of its fields name states and variables, and what a
replay does with it. The one place where a new op is listed; a test fails while it is not.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from agentflow.errors import NotSupported
from agentflow.protocol import ops


class OpKind(enum.Enum):
    """How a replay treats an op."""

    CONTENT = enum.auto()  # stands in its state's stream, and is compared with what stood there
    GROUP = enum.auto()  # acts at once: compared as a member of its state's set
    CANCEL = enum.auto()  # acts at once: when, and whether, may differ with the timing
    SEAL = enum.auto()  # not compared: what is appended is
    AWAIT = enum.auto()  # not compared: it changes nothing, and timing decides whether one is needed
    CLOSE = enum.auto()  # the state must have got all that was recorded
    ASIDE = enum.auto()  # acts at once, and is not compared: the text that a client provides, a limit
    STATS = enum.auto()  # of the session, not of a state


@dataclass(frozen=True)
class OpShape:
    """``state`` (of every op but those of the session) and the fields named here hold numbers that the
    client gave; a recording and its replay may number differently. References (``ops.Ref``) are found
    wherever they stand. All other fields are content.

    ``var``: declares a variable. ``children``: declares states. ``states``, ``reads``: tuples of numbers
    of states and variables that exist. ``ticket``: a number that only the answer repeats.
    """

    kind: OpKind
    var: str | None = None
    children: str | None = None
    states: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    ticket: str | None = None

    @property
    def numbers(self) -> set[str]:
        """The fields that hold numbers of states, variables or tickets."""
        named = {"state", self.var, self.children, self.ticket, *self.states, *self.reads}
        return {name for name in named if name is not None}


SHAPES: dict[type, OpShape] = {
    ops.Open: OpShape(OpKind.CONTENT),
    ops.Submit: OpShape(OpKind.CONTENT),
    ops.Text: OpShape(OpKind.CONTENT),
    ops.Image: OpShape(OpKind.CONTENT),
    ops.Converse: OpShape(OpKind.CONTENT),
    ops.Begin: OpShape(OpKind.CONTENT),
    ops.End: OpShape(OpKind.CONTENT),
    ops.Gen: OpShape(OpKind.CONTENT, var="var"),
    ops.Select: OpShape(OpKind.CONTENT, var="var"),
    ops.Set: OpShape(OpKind.CONTENT, var="var"),
    ops.Read: OpShape(OpKind.CONTENT, var="var"),
    ops.Expect: OpShape(OpKind.CONTENT, var="var"),
    ops.Provide: OpShape(OpKind.ASIDE, var="var"),
    ops.Hint: OpShape(OpKind.CONTENT),
    ops.Limit: OpShape(OpKind.ASIDE),
    ops.Fork: OpShape(OpKind.CONTENT, children="children"),
    ops.TaskGroup: OpShape(OpKind.GROUP, states=("children",)),
    ops.Seal: OpShape(OpKind.SEAL),
    ops.Await: OpShape(OpKind.AWAIT, ticket="ticket"),
    ops.Cancel: OpShape(OpKind.CANCEL),
    ops.Close: OpShape(OpKind.CLOSE),
    ops.GetStats: OpShape(OpKind.STATS, ticket="ticket"),
}


def declared(op: ops.Op) -> list[tuple[int, str]]:
    """The variables that the op declares and that are told: their numbers and names."""
    if isinstance(op, ops.Submit):
        names = {one.var: one.name for one in op.ops if isinstance(one, ops.Declaring)}
        return [(op.session_number(number), names.get(number, "")) for number in op.outputs]
    shape = shape_of(op)
    return [] if shape.var is None else [(getattr(op, shape.var), getattr(op, "name", ""))]


def shape_of(op: ops.Op) -> OpShape:
    """The shape of an op. ``NotSupported`` where none is listed."""
    shape = SHAPES.get(type(op))
    if shape is None:
        raise NotSupported(f"recordings do not know the op {type(op).__name__.lower()!r} yet")
    return shape
