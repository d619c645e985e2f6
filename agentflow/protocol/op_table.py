"""What each class of op is to a recording: which of its fields name states and variables, and what a
replay does with it. The one place where a new op is listed; a test fails while it is not.

What an op must hold, whichever backend takes it, and what a backend must be able to do for it.

The one list of these checks. The frontend makes them before it sends an op, so that an argument that makes no
sense is refused in the line that has it; the interpreter makes them when the op's turn comes, and then the op
fails its state. What needs a session's other states and variables is the interpreter's own.
"""

from __future__ import annotations

import enum
import functools
from dataclasses import dataclass
from typing import Any

import msgspec

from agentflow.errors import BadArgument, NotSupported
from agentflow.protocol import ops
from agentflow.protocol.events import Capabilities
from agentflow.protocol.transform import check_transforms, check_written

_encoder = msgspec.msgpack.Encoder()


def check_sendable(op: ops.Op, capabilities: Capabilities) -> None:
    """Before anything of ``op`` is sent: its types, all values in it, and what it asks of the backend, for a
    graph of each of its ops. ``BadArgument``, ``NotSupported``."""
    check_types(op)
    for one in op.ops if isinstance(op, ops.Submit) else (op,):
        check_values(one)
        if isinstance(one, ops.Text | ops.Set):
            for part in one.parts:
                if isinstance(part, ops.Ref):
                    check_transforms(part.transforms)
        check_supported(one, capabilities)


def check_types(value: msgspec.Struct) -> None:
    """``BadArgument`` where a field of ``value``, or of what is in it, is not what its class says, or where a
    text is not Unicode: what could not go over the wire."""
    name = type(value).__name__.lower()
    try:
        _decoder_of(type(value)).decode(_encoder.encode(value))
    except UnicodeEncodeError as error:
        raise BadArgument(f"{name}: half a character (a lone surrogate) is no text: {error}") from None
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise BadArgument(f"{name}: {error}") from None


@functools.cache
def _decoder_of(kind: type) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(kind)


def check_values(op: ops.Op) -> None:
    """``BadArgument`` where a value in the op makes no sense. Compiles no pattern of a transform."""
    match op:
        case ops.Open():
            for name, text in (("cache_salt", op.cache_salt), ("program", op.program)):
                if len(text) > ops.MAX_SALT_CHARS:
                    raise BadArgument(f"{name}: {ops.MAX_SALT_CHARS} characters at most, not {len(text):,}")
        case ops.Text() | ops.Set():
            for part in op.parts:
                if isinstance(part, ops.Ref):
                    check_written(part.transforms)
        case ops.Converse():
            op.conversation.check()
        case ops.Gen():
            op.params.check()
            if op.constraint is not None:
                op.constraint.check()
            ops.check_timeout(op.timeout_s)
        case ops.Select():
            ops.check_choices(op.name, op.choices)
        case ops.Hint():
            ops.check_hint(op.output_tokens, op.forks, op.deadline_s)
        case ops.Limit():
            ops.check_limit(op.deadline_s, op.output_tokens)
        case _:
            pass


def check_supported(op: ops.Op, capabilities: Capabilities) -> None:
    """``NotSupported`` where a backend of these capabilities cannot do what the op asks."""
    match op:
        case ops.Begin() | ops.End() if not capabilities.roles:
            raise NotSupported(f"{capabilities.model} has no chat template: use plain text instead of roles")
        case ops.Converse() | ops.Gen(reply=True) if not capabilities.conversations:
            raise NotSupported(
                f"{capabilities.model} takes no whole conversations: append its turns one by one"
            )
        case ops.Gen():
            if op.params.wants_logprobs and not capabilities.logprobs:
                raise NotSupported(f"{capabilities.model} has no log-probabilities: ask an engine for them")
            capabilities.require(op.constraint)
        case ops.Select() if not capabilities.select:
            raise NotSupported(f"{capabilities.model} cannot select: it scores no choices")
        case ops.Image():
            capabilities.require_images()
        case ops.Read(what="token_ids") if not capabilities.token_ids:
            raise NotSupported(f"{capabilities.model} does not tell its token ids")
        case _:
            pass


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


ROOT = 1
"""The number of the root state in every graph."""


def needs_of(op: ops.Op) -> list[int]:
    """The variables that an op's text refers to."""
    parts = op.parts if isinstance(op, ops.Text | ops.Set) else ()
    return [part.var for part in parts if isinstance(part, ops.Ref)]


def moved(op: ops.Op, base: int) -> ops.Op:
    """The op with all its numbers moved up by ``base``."""
    changes: dict[str, Any] = {
        name: getattr(op, name) + base for name in ("state", "var") if hasattr(op, name)
    }
    if isinstance(op, ops.Fork | ops.TaskGroup):
        changes["children"] = tuple([child + base for child in op.children])
    if isinstance(op, ops.Text | ops.Set):
        changes["parts"] = tuple(
            [
                part if isinstance(part, str) else ops.Ref(part.var + base, part.transforms)
                for part in op.parts
            ]
        )
    return msgspec.structs.replace(op, **changes)
