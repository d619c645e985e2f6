"""The places of ops, and the content of ops with places instead of numbers.

A client numbers states and variables in the order in which they are created, which may differ between two
runs of a program with concurrent branches. A *place* does not differ: it is the run, the state's path in the
fork tree, and the position in the state's stream. ``ForkTree`` tracks the ops of a session and returns their
``OpContent``, by which a replay compares ops with recorded ones, without fields that only observers see.
``describe`` and ``difference`` describe contents in error messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from agentflow.errors import ProtocolError
from agentflow.protocol import ops
from agentflow.protocol.op_table import declared, op_kind, opened
from agentflow.protocol.sampling import GenParams, derived_seed, seed_place, seed_run
from agentflow.protocol.text.transform import Transform

StatePath = tuple[int, ...]

DERIVED = "derived"
"""Replaces a seed that is derived from the session's seed and the gen's place."""


_FOR_OBSERVERS = ("label", "trace", "group")
"""Fields that have no effect on a backend's answers."""


def _unnamed(op: ops.Op) -> ops.Op:
    changes = {name: "" for name in _FOR_OBSERVERS if getattr(op, name, "")}
    return msgspec.structs.replace(op, **changes) if changes else op


class OpContent(NamedTuple):
    """The kind of an op, and its fields without numbers."""

    kind: str
    fields: tuple[tuple[str, Any], ...]


class _VariablePlace(NamedTuple):
    """A variable in the content of an op. ``run``: None for the run of the op itself."""

    run: int | None
    path: StatePath
    ordinal: int
    name: str
    transforms: tuple[Transform, ...] = ()


class StateInTree:
    """A state: its run (numbered from 0 in the order of opening), its path, and its forks. ``id``: its number
    in the session."""

    def __init__(self, run: int, path: StatePath, parent: StateInTree | None) -> None:
        self.id = 0
        self.run = run
        self.path = path
        self.parent = parent
        self.forks: list[StateInTree] = []
        self.num_variables = 0
        self.num_gens = 0
        self.is_cancelled = False

    def cancel(self) -> None:
        """Marks the state and all its forks."""
        pending: list[StateInTree] = [self]
        while pending:  # a chain of forks may be deeper than Python's stack
            node = pending.pop()
            node.is_cancelled = True
            pending += node.forks


NodeT = TypeVar("NodeT", bound=StateInTree)


class ForkTree(Generic[NodeT]):
    """The states of one session. ``run_name``: returns the number of a run, by which contents of other runs'
    ops refer to it. ``resolves_params``: contents have the parameters of gens with the defaults of
    ``SamplingParams``."""

    def __init__(
        self,
        make_node: Callable[[int, StatePath, NodeT | None], NodeT],
        seed: int,
        run_name: Callable[[int], int] = lambda run: run,
        *,
        resolves_params: bool = False,
    ) -> None:
        self.num_runs = 0
        self._make_node = make_node
        self._seed = seed
        self._run_name = run_name
        self._resolves_params = resolves_params
        self._nodes: dict[int, NodeT] = {}
        self._variables: dict[int, tuple[NodeT, int, str]] = {}
        self._declared: dict[int, list[int]] = {}

    def open(self, op: ops.Open | ops.SubmitGraph) -> NodeT:
        """Adds the root of a new run."""
        self.num_runs += 1
        return self._add(op.state, self._make_node(self.num_runs - 1, (), None))

    def _add(self, state_id: int, node: NodeT) -> NodeT:
        if state_id in self._nodes:
            raise ProtocolError(f"state {state_id} exists already")
        node.id = state_id
        self._nodes[state_id] = node
        return node

    def node(self, state_id: int) -> NodeT:
        """The state with this number, or ``ProtocolError``."""
        if state_id not in self._nodes:
            raise ProtocolError(f"there is no state {state_id}")
        return self._nodes[state_id]

    def variable(self, var_id: int) -> tuple[NodeT, int]:
        """The state that declared the variable, and the variable's index there."""
        if var_id not in self._variables:
            raise ProtocolError(f"there is no variable {var_id}")
        return self._variables[var_id][:2]

    def content(self, op: ops.Op, node: NodeT) -> OpContent:
        """The op's content, with places instead of numbers. A graph keeps its own numbers, because they do
        not vary."""
        if isinstance(op, ops.SubmitGraph):
            graph = msgspec.json.encode(([_unnamed(one) for one in op.ops], op.outputs, op.places)).decode()
            return OpContent("submit", (("ops", graph), ("inputs", tuple(op.inputs.items()))))
        fields: list[tuple[str, Any]] = []
        for name in op.__struct_fields__:
            value = getattr(op, name)
            if name == "children":
                is_new = bool(opened(op))
                fields.append(
                    (name, len(value) if is_new else tuple(self.node(child).path for child in value))
                )
            elif name not in ("state", "var", *_FOR_OBSERVERS):
                fields.append((name, self._plain(value, node)))
        return OpContent(op_kind(op), tuple(fields))

    def enter(self, op: ops.Op, node: NodeT) -> list[NodeT]:
        """Adds the variables and states that the op declares, and returns the states."""
        for var_id, name in declared(op):
            if var_id in self._variables:
                raise ProtocolError(f"variable {var_id} exists already")
            self._variables[var_id] = (node, node.num_variables, name)
            self._declared.setdefault(op.state, []).append(var_id)  # type: ignore[union-attr]
            node.num_variables += 1
        node.num_gens += isinstance(op, ops.Gen)
        children = op.children if isinstance(op, ops.Fork) else ()
        first = len(node.forks)
        forks = [
            self._add(child, self._make_node(node.run, (*node.path, first + i), node))
            for i, child in enumerate(children)
        ]
        node.forks += forks
        return forks

    def forget(self, state_id: int) -> None:
        """Removes a state that the client has closed."""
        self._nodes.pop(state_id, None)
        for var_id in self._declared.pop(state_id, ()):
            del self._variables[var_id]

    def _place(self, var_id: int, reader: NodeT) -> _VariablePlace:
        node, ordinal = self.variable(var_id)
        run = None if node.run == reader.run else self._run_name(node.run)
        return _VariablePlace(run, node.path, ordinal, self._variables[var_id][2])

    def _plain(self, value: Any, node: NodeT) -> Any:
        match value:
            case ops.Ref():
                return self._place(value.var, node)._replace(transforms=value.transforms)
            case GenParams():
                is_derived = value.seed is not None and value.seed == self._derived_seed(node)
                params = value.resolved() if self._resolves_params else value
                return self._plain_struct(params, node, **({"seed": DERIVED} if is_derived else {}))
            case msgspec.Struct():
                return self._plain_struct(value, node)
            case tuple() | list():
                return tuple(self._plain(part, node) for part in value)
            case dict():
                return tuple(sorted((key, self._plain(part, node)) for key, part in value.items()))
        return value

    def _plain_struct(self, value: msgspec.Struct, node: NodeT, **instead: Any) -> OpContent:
        fields = (
            (name, instead.get(name, self._plain(getattr(value, name), node)))
            for name in value.__struct_fields__
        )
        return OpContent(type(value).__name__.lower(), tuple(fields))

    def _derived_seed(self, node: NodeT) -> int:
        return derived_seed(seed_run(self._seed, node.run), seed_place(node.path, node.num_gens))


_MAX_CHARS = 60
_CHARS_BEFORE = 20


def quote_text(text: str, around: int = 0) -> str:
    """``text`` in quotes, on one line; if it is long, only the part around the character ``around``."""
    start = max(0, around - _CHARS_BEFORE) if len(text) > _MAX_CHARS else 0
    part = text[start : start + _MAX_CHARS]
    return repr(("…" if start else "") + part + ("…" if start + _MAX_CHARS < len(text) else ""))


def describe(content: OpContent) -> str:
    """A short description: ``gen 'answer'``, ``text 'Is it about…'``."""
    fields = dict(content.fields)
    match content.kind:
        case "text":
            return f"text {quote_text(_text(fields['parts']))}"
        case "fork":
            return f"a fork of {fields['children']}"
        case "taskgroup":
            return f"a task group of the states {', '.join(map(str, fields['children']))}"
    words = [content.kind]
    words += [quote_text(value) for value in fields.values() if isinstance(value, str)][:1]
    return " ".join(words)


def difference(recorded: OpContent, sent: OpContent) -> tuple[str, str]:
    """Descriptions of both contents that show where they differ."""
    if recorded.kind != sent.kind:
        return describe(recorded), describe(sent)
    one, other = dict(recorded.fields), dict(sent.fields)
    if recorded.kind == "text":
        texts = _text(one["parts"]), _text(other["parts"])
        at = _first_difference(*texts)
        if texts[0] != texts[1]:
            return f"text {quote_text(texts[0], at)}", f"text {quote_text(texts[1], at)}"
    left, right = _flat(one), _flat(other)
    names = [name for name in left | right if left.get(name) != right.get(name)]
    if recorded.kind == "embed" and "texts" in names:
        at = _first_difference(left["texts"], right["texts"])
        left["texts"], right["texts"] = left["texts"][at:], right["texts"][at:]
    if not names or set(names) & {"children", "name", "role"}:
        return describe(recorded), describe(sent)
    return _with(recorded, left, names), _with(sent, right, names)


def _with(content: OpContent, fields: dict[str, Any], names: list[str]) -> str:
    listed = ", ".join(f"{name.replace('.', ' ')} {_value(fields.get(name))}" for name in names)
    return f"{describe(content)} with {listed}"


def _flat(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields, in which nested structs are replaced by their fields."""
    flat: dict[str, Any] = {}
    for name, value in fields.items():
        flat |= _flat(dict(value.fields)) if isinstance(value, OpContent) else {name: value}
    return flat


def _text(parts: tuple[str | _VariablePlace, ...]) -> str:
    return "".join(part if isinstance(part, str) else _variable(part) for part in parts)


def _variable(place: _VariablePlace) -> str:
    run = "" if place.run is None else f" of run {place.run}"
    return f"{{{place.name!r} of {place.path}{run}}}"


def _value(value: Any) -> str:
    if value == DERIVED:
        return "from the session"
    if isinstance(value, _VariablePlace):
        return _variable(value)
    return quote_text(value) if isinstance(value, str) else quote_text(repr(value))[1:-1]


def _first_difference(one: Sequence[str], other: Sequence[str]) -> int:
    pairs = zip(one, other, strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
