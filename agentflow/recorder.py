"""From expressions to ops: text is merged, variables become references, turns get their marks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from agentflow import ops
from agentflow.errors import BadArgument, ForeignState, StateClosed
from agentflow.expression import Appendable, GenExpression, RoleExpression, SelectExpression, Sequence_
from agentflow.variable import Variable

if TYPE_CHECKING:
    from agentflow.state import State


class Recorder:
    """Collects the ops of what is appended in one go; the state is untouched until it submits them."""

    def __init__(self, state: State) -> None:
        self.ops: list[ops.Op] = []
        # With each variable, how many of the ops are done when it is.
        self.declared: list[tuple[Variable, int]] = []
        self._state = state
        self._text: list[str | ops.Ref] = []

    def add(self, item: Appendable, *, in_role: bool) -> None:
        """Records one item."""
        state_id = self._state.id
        match item:
            case str():
                for piece in self._state.session.markers.split(item):
                    self._text.append(piece if isinstance(piece, str) else self._reference(piece))
            case Variable():
                self._text.append(self._reference(item))
            case Sequence_():
                for part in item.parts:
                    self.add(part, in_role=in_role)
            case GenExpression():
                params = item.params
                if params.seed is None:
                    params = msgspec.structs.replace(
                        params, seed=self._state.derived_seed(len(self.declared))
                    )
                self._put(ops.Gen(state_id, self._new(item.name), item.name, params))
            case SelectExpression():
                self._put(ops.Select(state_id, self._new(item.name), item.name, item.choices, item.method))
            case RoleExpression():
                if in_role:
                    raise BadArgument(f"a {item.role} turn cannot stand inside another turn")
                self._put(ops.Begin(state_id, item.role))
                for part in item.parts:
                    self.add(part, in_role=True)
                self._put_end()
            case _:
                raise BadArgument(
                    f"cannot append {type(item).__name__} {item!r}: "
                    "append a string, a variable, gen, select or a role"
                )

    def flush(self) -> None:
        """Ends the run of text."""
        if self._text:
            parts, self._text = tuple(self._text), []
            self.ops.append(ops.Text(self._state.id, parts))

    def _put(self, op: ops.Op) -> None:
        self.flush()
        self.ops.append(op)

    def _put_end(self) -> None:
        self._put(ops.End(self._state.id))
        # The end of a turn neither waits nor fails: it is done with the variable before it.
        if self.declared and self.declared[-1][1] == len(self.ops) - 1:
            self.declared[-1] = (self.declared[-1][0], len(self.ops))

    def _new(self, name: str) -> int:
        self.flush()
        variable = self._state.new_variable(name)
        self.declared.append((variable, len(self.ops) + 1))
        return variable.id

    def _reference(self, variable: Variable) -> str | ops.Ref:
        if variable.state.session is not self._state.session:
            raise ForeignState(
                f"variable {variable.name!r} belongs to another session: await it and append its value"
            )
        if self._state.session.is_open(variable.state):
            return ops.Ref(variable.id)
        if variable.has_value:
            return variable.text
        variable.raise_failure()
        raise StateClosed(f"the state of variable {variable.name!r} has ended: await it before its run ends")
