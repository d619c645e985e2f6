"""The table of ops: the properties by which checks, memory estimates, graphs, recordings and drawings treat
each op.

``OPS`` has one ``OpSpec`` for each class in ``ops.Op``; the functions below derive the rest from it. A new op
needs its class in ``ops``, its row here, its execution in the interpreter, and a test.

Fields of these names hold numbers that the client chose: ``state`` (the op's own state), ``var`` (a
variable), ``children`` (states) and ``ticket``. A field ``parts`` may hold references to variables. All other
fields are content, which two runs of a program have in common.

An op is checked once on each side of a connection. The frontend checks values where the program writes them,
and ``StateModels.admit`` the rest before the op is sent, so that errors point at the program's line. A server
checks the ops that it receives (``CheckingInterpreter``), because a client may send anything. Checks that
need the session's states and variables are the interpreter's own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from agentflow.errors import (
    AgentflowError,
    BadArgument,
    NotSupported,
    ProtocolError,
    UnknownModel,
    no_chat_template,
)
from agentflow.protocol import ops
from agentflow.protocol.chat import Conversation
from agentflow.protocol.decisions import check_questions
from agentflow.protocol.events import USE_ANOTHER, Capabilities
from agentflow.protocol.images import FILE, Video, check_frames, check_source, max_file_bytes
from agentflow.protocol.sampling import derived_seed
from agentflow.protocol.text.transform import check_written

ROOT: Final = 1
"""The number of the root state in every graph."""
GRAPH_TICKET: Final = 1
"""The root of a submitted graph reaches this ticket when all states of the graph have ended."""
MAX_GRAPH_OPS: Final = 10_000

OP_BYTES: Final = 600
"""The memory of a waiting op in bytes, without the op itself."""


# Functions of the table's rows, by op.


def _check_open(op: ops.Open) -> None:
    for name in ("cache_salt", "program", "label", "model", "group"):
        _check_name(name, getattr(op, name))


def _check_name(name: str, text: str) -> None:
    if len(text) > ops.MAX_SALT_CHARS:
        raise BadArgument(f"{name}: {ops.MAX_SALT_CHARS} characters at most, not {len(text):,}")


def _check_parts(op: ops.Text | ops.Set) -> None:
    for part in op.parts:
        if isinstance(part, ops.Ref):
            check_written(part.transforms)


def _parts_label(op: ops.Text | ops.Set, names: Mapping[int, str]) -> str:
    pieces = [part if isinstance(part, str) else f"{{{names[part.var]}}}" for part in op.parts]
    return " ".join("".join(pieces).split())


def _check_upload(op: ops.Upload) -> None:
    most = max_file_bytes(op.kind)
    if not 0 < op.size <= most:
        raise BadArgument(f"upload: the file of one {op.kind} has 1 to {most:,} bytes, not {op.size:,}")
    if not 0 <= op.at <= op.size - len(op.data):
        raise BadArgument(f"upload: {len(op.data):,} bytes at {op.at:,} of {op.size:,}")
    if not FILE.fullmatch(op.source):
        raise BadArgument(f"upload: {op.source[:100]!r} is no digest of a file")


def _check_video(op: ops.Video) -> None:
    check_source(op.source, "source")
    check_frames(op.num_frames)


def _require_converse(op: ops.Converse, capabilities: Capabilities) -> None:
    capabilities.require_conversations()
    for medium in op.conversation.media:
        if isinstance(medium, Video):
            capabilities.require_videos(medium.num_frames)
        else:
            capabilities.require_images()


def _check_begin(op: ops.Begin) -> None:
    if op.role != "tool" and (op.tool_call_id is not None or op.name is not None):
        raise BadArgument(f"begin: a {op.role} turn answers no tool call, only a tool turn does")


def _check_trace(trace: str) -> None:
    """Raises ``BadArgument`` for a ``trace`` that is too long. A server ignores one that it cannot read."""
    if len(trace) > ops.MAX_TRACE_CHARS:
        raise BadArgument(f"trace: {ops.MAX_TRACE_CHARS} characters at most, not {len(trace):,}")


def _check_gen(op: ops.Gen) -> None:
    op.params.check()
    if op.constraint is not None:
        op.constraint.check()
    _check_trace(op.trace)


def _require_gen(op: ops.Gen, capabilities: Capabilities) -> None:
    capabilities.require_generation()
    if op.reply:
        capabilities.require_conversations()
    capabilities.require_params(op.params)
    if op.constraint is not None:
        capabilities.require(op.constraint)


def _require_roles(op: ops.Begin | ops.End, capabilities: Capabilities) -> None:
    if not capabilities.roles:
        raise no_chat_template(capabilities.model)


def _check_select(op: ops.Select) -> None:
    ops.check_choices(op.name, op.choices)
    _check_trace(op.trace)


def _require_select(op: ops.Select, capabilities: Capabilities) -> None:
    capabilities.require_generation()
    if not capabilities.select:
        raise NotSupported(f"{capabilities.model} cannot select: {USE_ANOTHER}")


def _check_decide(op: ops.Decide) -> None:
    check_questions(op.questions)
    _check_trace(op.trace)


def _require_decide(op: ops.Decide, capabilities: Capabilities) -> None:
    capabilities.require_generation()
    if not capabilities.decisions:
        raise NotSupported(f"{capabilities.model} cannot decide: {USE_ANOTHER}")


def _require_read(op: ops.Read, capabilities: Capabilities) -> None:
    if op.what != "text" and not capabilities.token_ids:
        raise NotSupported(f"{capabilities.model} does not report tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class OpSpec:
    """One row of the table."""

    is_content: bool = False  # part of its state's stream; a replay compares it with the recorded op
    is_numbered: bool = False  # counted in ``ErrorInfo.op``
    in_graph: bool = False  # allowed in a ``SubmitGraph`` (``Open`` only as its first op)
    is_instant: bool = False  # neither waits nor fails, so it is done together with the op before it
    opens: str = ""  # the field with the states that the op creates
    outcome: str = "set"  # the participle for the error if the op never ran: "x was not *generated*"
    # Raises ``BadArgument`` for an invalid value that the frontend checks when it sends the op.
    check: Callable[[Any], object] = field(default=lambda op: None)
    # The same for a value that it checks earlier, where the program writes it, such as ``gen``'s parameters.
    check_received: Callable[[Any], object] = field(default=lambda op: None)
    # Raises ``NotSupported`` if the model cannot run the op.
    require: Callable[[Any, Capabilities], None] = field(default=lambda op, capabilities: None)
    # Its text in a drawing of a graph, given the names of variables; an op without one is not drawn.
    label: Callable[[Any, Mapping[int, str]], str] = field(default=lambda op, names: "")
    box: tuple[str, str] = ("[", "]")  # the marks of its Mermaid node


_step = functools.partial(OpSpec, is_content=True, is_numbered=True, in_graph=True)

OPS: Final[Mapping[type[ops.Op], OpSpec]] = {
    ops.Open: OpSpec(is_content=True, opens="state", check=_check_open),
    ops.SubmitGraph: OpSpec(is_content=True, opens="state"),
    ops.Text: _step(check_received=_check_parts, label=_parts_label),
    ops.Upload: OpSpec(check_received=_check_upload),
    ops.Release: OpSpec(),
    ops.Image: _step(
        check_received=lambda op: check_source(op.source, "source"),
        require=lambda op, capabilities: capabilities.require_images(),
        label=lambda op, names: "image",
    ),
    ops.Video: _step(
        check_received=_check_video,
        require=lambda op, capabilities: capabilities.require_videos(op.num_frames),
        label=lambda op, names: "video",
    ),
    ops.Converse: _step(
        check_received=lambda op: op.conversation.check(),
        require=_require_converse,
        label=lambda op, names: f"conversation of {len(op.conversation.messages)} messages",
    ),
    ops.Tools: _step(
        check_received=lambda op: Conversation((), op.tools, op.choice).check(),
        require=lambda op, capabilities: capabilities.require_conversations(),
        label=lambda op, names: f"tools {', '.join([tool.name for tool in op.tools])}",
    ),
    ops.Begin: _step(
        check_received=_check_begin,
        require=_require_roles,
        label=lambda op, names: f"{op.role}:",
    ),
    ops.End: _step(is_instant=True, require=_require_roles),
    ops.Gen: _step(
        outcome="generated",
        check_received=_check_gen,
        require=_require_gen,
        label=lambda op, names: f"gen {op.name}",
        box=("([", "])"),
    ),
    ops.Select: _step(
        outcome="generated",
        check_received=_check_select,
        require=_require_select,
        label=lambda op, names: f"select {op.name}: {' | '.join(op.choices)}",
        box=("{{", "}}"),
    ),
    ops.Decide: _step(
        outcome="decided",
        check_received=_check_decide,
        require=_require_decide,
        label=lambda op, names: f"decide {', '.join([question.name for question in op.questions])}",
    ),
    ops.Set: _step(
        check_received=_check_parts,
        label=lambda op, names: f"{op.name} = {_parts_label(op, names)}",
    ),
    ops.Read: _step(outcome="read", require=_require_read),
    ops.Embed: _step(
        outcome="computed",
        check=ops.check_embed,
        require=lambda op, capabilities: capabilities.require_embeddings(op.model),
        label=lambda op, names: f"embed {len(op.texts)} texts",
    ),
    ops.Done: OpSpec(is_content=True, in_graph=True, outcome="reached"),
    ops.Expect: OpSpec(is_content=True, in_graph=True, outcome="provided"),
    ops.Provide: OpSpec(),
    ops.Want: OpSpec(check_received=lambda op: ops.check_want(op.ttft_s, op.tpot_s)),
    ops.Hint: _step(check_received=lambda op: ops.check_hint(op.output_tokens, op.forks, op.deadline_s)),
    ops.Limit: OpSpec(
        in_graph=True, check_received=lambda op: ops.check_limit(op.deadline_s, op.output_tokens)
    ),
    ops.Fork: _step(
        opens="children",
        check=lambda op: _check_name("model", op.model),
        check_received=lambda op: ops.check_branches(len(op.children)),
        label=lambda op, names: f"fork {len(op.children)}",
        box=("{", "}"),
    ),
    ops.TaskGroup: OpSpec(in_graph=True),
    ops.Seal: OpSpec(in_graph=True),
    ops.Await: OpSpec(),
    ops.Cancel: OpSpec(
        check_received=lambda op: None if op.failure is None else op.failure.check(),
    ),
    ops.Close: OpSpec(),
    ops.GetStats: OpSpec(),
    ops.GetGraph: OpSpec(),
    ops.Watch: OpSpec(check=lambda op: ops.check_watch(op.interval_s, op.max_nodes)),
    ops.Unwatch: OpSpec(),
    ops.Peek: OpSpec(),
}


def op_spec(op: ops.Op) -> OpSpec:
    """The op's row."""
    return OPS[type(op)]


def op_kind(op: ops.Op | ops.Rejected) -> str:
    """The value of the op's ``op`` field on the wire."""
    return op.kind if isinstance(op, ops.Rejected) else str(type(op).__struct_config__.tag)


def num_done_with(sequence: Sequence[ops.Op], index: int) -> int:
    """The number of ops in a state's stream that are done once the op at ``index`` is."""
    is_followed = index + 1 < len(sequence) and op_spec(sequence[index + 1]).is_instant
    return index + (2 if is_followed else 1)


# The frontend's checks before it sends an op.

_encoder = msgspec.msgpack.Encoder()


class StateModels:
    """The models of a session, and the model on which each of its states runs.

    Args:
        models: The capabilities of each model by name, the default first.
    """

    def __init__(self, models: Mapping[str, Capabilities]) -> None:
        self.models = models
        self._of_state: dict[int, str] = {}  # without the states on the default model

    @property
    def default(self) -> Capabilities:
        """The capabilities of the default model."""
        return next(iter(self.models.values()))

    def named(self, name: str) -> Capabilities:
        """The capabilities of a model, or of the default one for "". ``UnknownModel``."""
        if not name:
            return self.default
        if name not in self.models:
            known = ", ".join(self.models)
            raise UnknownModel(f"the session has no model {name[:200]!r} (it has: {known})", param="model")
        return self.models[name]

    def of(self, state: int) -> Capabilities:
        """The capabilities of the state's model."""
        return self.named(self._of_state.get(state, ""))

    def admit(self, op: ops.Op) -> None:
        """Checks an op before it is sent (``check_sent``), and that the models of its state, or of the states
        of a graph, can run it: ``NotSupported``, ``UnknownModel``. The values in a graph were checked when it
        was traced. Records the models of the states that the op opens."""
        check_sent(op)
        if isinstance(op, ops.SubmitGraph):
            of_graph = StateModels(self.models)
            for part in op.ops:
                of_graph._require(part)
        self._require(op)

    def _require(self, op: ops.Op) -> None:
        if isinstance(op, ops.Open | ops.Fork):
            self.named(op.model)
        require(op, self.of(getattr(op, "state", 0)))
        self._follow(op)

    def _follow(self, op: ops.Op) -> None:
        """Records the models of the states that the op opens, and forgets a state that it closes."""
        match op:
            case ops.Open(state=state, model=model) if model:
                self._of_state[state] = model
            case ops.Fork(state=state, children=children, model=model):
                if inherited := model or self._of_state.get(state, ""):
                    self._of_state |= dict.fromkeys(children, inherited)
            case ops.SubmitGraph():  # nothing can be appended to its other states
                self._follow(shift_numbers(op.ops[0], op.state - ROOT))
            case ops.Close(state=state):
                self._of_state.pop(state, None)
            case _:
                pass


def check_sent(op: ops.Op) -> None:
    """Raises ``BadArgument`` for a wrong type in an op of the frontend, or an invalid value that was not
    checked where the program wrote it."""
    if not isinstance(op, ops.Converse | ops.Tools):  # the program wrote a record that was checked
        # The ops of a graph were checked when it was traced; a run may change the fields of the first.
        check_types(replace(op, ops=op.ops[:1]) if isinstance(op, ops.SubmitGraph) else op)
    op_spec(op).check(op)


def check_received_op(op: ops.Op) -> None:
    """Raises ``BadArgument`` for an invalid value in an op from a client, except in the ops of a graph."""
    spec = op_spec(op)
    spec.check(op)
    spec.check_received(op)


def require(op: ops.Op, capabilities: Capabilities) -> None:
    """Raises ``NotSupported`` if the model, or one that may replace it, cannot run the op."""
    spec = op_spec(op)
    for one in (*capabilities.candidates, capabilities):
        spec.require(op, one)


def check_types(value: msgspec.Struct) -> None:
    """Raises ``BadArgument`` if a field of ``value``, or of a struct in it, has the wrong type, or a text is
    not valid Unicode: neither could be sent."""
    name = type(value).__struct_config__.tag or type(value).__name__.lower()
    try:
        _make_decoder(type(value)).decode(_encoder.encode(value))
    except UnicodeEncodeError as error:
        raise BadArgument(f"{name}: a text holds half a surrogate pair: {error}") from None
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise BadArgument(f"{name}: {error}") from None


@functools.cache
def _make_decoder(kind: type) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(kind)


# The numbers in an op.


def _refs(op: ops.Op) -> list[ops.Ref]:
    return [part for part in getattr(op, "parts", ()) if isinstance(part, ops.Ref)]


def references(op: ops.Op) -> list[int]:
    """The variables that the op's text refers to, in their order."""
    return [ref.var for ref in _refs(op)]


def opened(op: ops.Op) -> tuple[int, ...]:
    """The states that the op creates."""
    match op_spec(op).opens:
        case "":
            return ()
        case "state":
            return (op.state,)  # type: ignore[union-attr]  # ops that open have one
        case name:
            return tuple(getattr(op, name))


def declared(op: ops.Op) -> list[tuple[int, str]]:
    """The numbers and names of the variables that the op declares, or that a graph reports."""
    if isinstance(op, ops.SubmitGraph):
        names = {one.var: one.name for one in op.ops if isinstance(one, ops.Declaring)}
        return [(op.session_number(number), names.get(number, "")) for number in op.outputs]
    return [(op.var, op.name)] if isinstance(op, ops.Declaring) else []


def numbers(op: ops.Op) -> list[int]:
    """The numbers of all states and variables in the op."""
    own = [getattr(op, name) for name in ("state", "var") if hasattr(op, name)]
    return [*own, *getattr(op, "children", ()), *references(op)]


def shift_numbers(op: ops.Op, base: int) -> ops.Op:
    """The op with ``base`` added to all its numbers."""
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
    return replace(op, **changes)


def expanded(graph: ops.SubmitGraph) -> Iterator[ops.Op]:
    """The ops of a submitted graph with the session's numbers, and a ``Seal`` for each state without one.
    ``ProtocolError`` if it is not a valid graph."""
    base = graph.state - ROOT
    if not 0 < len(graph.ops) <= MAX_GRAPH_OPS:
        raise ProtocolError(f"a graph has 1 to {MAX_GRAPH_OPS} ops, not {len(graph.ops)}")
    if not isinstance(graph.ops[0], ops.Open) or graph.ops[0].state != ROOT:
        raise ProtocolError(f"a graph must begin with the opening of state {ROOT}")
    unsealed: dict[int, None] = {ROOT: None}
    yield shift_numbers(graph.ops[0], base)
    for op in graph.ops[1:]:
        if not op_spec(op).in_graph:
            raise ProtocolError(f"the op {op_kind(op)!r} cannot stand in a graph")
        unsealed |= dict.fromkeys(opened(op))
        if isinstance(op, ops.Seal):
            unsealed.pop(op.state, None)
        elif isinstance(op, ops.Gen) and op.var in graph.places:
            seed = derived_seed(graph.seeds, graph.places[op.var])
            op = replace(op, params=replace(op.params, seed=seed))
        yield shift_numbers(op, base)
    for state in unsealed:
        yield ops.Seal(state + base)


def rejected(op: ops.Op, error: AgentflowError) -> ops.Rejected:
    """The stand-in for ``op``, which failed with ``error``."""
    names = {op.var: ""} if isinstance(op, ops.Provide) else dict(declared(op))
    children = op.children if isinstance(op, ops.Fork) else ()
    return ops.Rejected(getattr(op, "state", 0), error, op_kind(op), names, children)
