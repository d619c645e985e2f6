"""From expressions to ops: text is merged, variables become references, turns get their marks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from agentflow.errors import BadArgument, ForeignState, StateClosed
from agentflow.language.expressions import (
    Appendable,
    ConversationExpression,
    GenExpression,
    ImageExpression,
    RoleExpression,
    SelectExpression,
    Sequence_,
    not_appendable,
)
from agentflow.language.reference import Reference
from agentflow.language.transcript import Entry, ToolCalls, TurnBegins, TurnEnds
from agentflow.language.values import TEXT, ValueType
from agentflow.language.variable import Variable
from agentflow.protocol import ops
from agentflow.protocol.chat import Conversation
from agentflow.protocol.transform import apply_transforms

if TYPE_CHECKING:
    from agentflow.language.appending import Appending


class Declared(NamedTuple):
    """A new variable, the expression it comes from, and how many of the ops are done when it is."""

    variable: Variable[Any]
    expression: object
    num_ops: int


class Recorder:
    """Collects the ops of what is appended in one go; the state is untouched until it submits them."""

    def __init__(self, state: Appending) -> None:
        self.ops: list[ops.Op] = []
        self.declared: list[Declared] = []
        self.entries: list[Entry] = []
        self.open_role = state.transcript.open_role
        self._state = state
        self._num_gens = 0
        self._text: list[str | ops.Ref] = []

    def add(self, item: Appendable) -> None:
        """Records one item."""
        state_id = self._state.id
        match item:
            case str() | Reference():
                for piece in self._pieces(item):
                    self.entries.append(piece)
                    self._text.append(self._part(piece))
            case Sequence_():
                for part in item.parts:
                    self.add(part)
            case GenExpression():
                self._generate(item)
            case SelectExpression():
                self._refuse_markers(item.choices, f"select({item.name!r}): a choice")
                var_id = self._new(item.name, item, TEXT).id
                self._put(ops.Select(state_id, var_id, item.name, item.choices, item.method))
            case RoleExpression():
                self.begin(item.role)
                for part in item.parts:
                    self.add(part)
                self.end()
            case ConversationExpression():
                self._converse(item.conversation)
            case ImageExpression():
                self._refuse_markers([item.source], "image: its source")
                self.entries.append(item)
                self._put(ops.Image(state_id, item.source))
            case _:
                raise not_appendable(item)

    def _converse(self, conversation: Conversation) -> None:
        """Turns as they stand, and the assistant's, which stays open."""
        if self.open_role is not None or self.entries or not self._state.transcript.is_empty:
            raise BadArgument("a conversation begins a state: append it first, and nothing before it")
        for message in conversation.messages:
            arguments = [call.arguments for call in message.tool_calls]
            self._refuse_markers([message.content, *arguments], "conversation: a message")
            self.entries += [TurnBegins(message.role, message.tool_call_id, message.name), message.content]
            self.entries += [ToolCalls(message.tool_calls)] if message.tool_calls else []
            self.entries.append(TurnEnds())
        last = conversation.messages[-1].role if conversation.messages else ""
        self.entries[-1:] = [] if last == "assistant" else [TurnEnds(), TurnBegins("assistant")]
        self.open_role = "assistant"
        self._put(ops.Converse(self._state.id, conversation))

    def _refuse_markers(self, texts: Iterable[object], where: str) -> None:
        self._state.session.markers.refuse(texts, where)

    def begin(self, role: ops.Role) -> None:
        """A turn begins."""
        if self.open_role is not None:
            raise BadArgument(
                f"a {role} turn cannot stand inside another turn: the {self.open_role} turn is open"
            )
        self.open_role = role
        self.entries.append(TurnBegins(role))
        self._put(ops.Begin(self._state.id, role))

    def end(self) -> None:
        """The open turn ends."""
        if self.open_role is None:
            raise BadArgument("no turn is open here: a turn ends that never began")
        self.open_role = None
        self.entries.append(TurnEnds())
        self._put(ops.End(self._state.id))
        # The end of a turn neither waits nor fails: it is done with the variable before it.
        if self.declared and self.declared[-1].num_ops == len(self.ops) - 1:
            self.declared[-1] = self.declared[-1]._replace(num_ops=len(self.ops))

    def set(self, name: str, values: Sequence[str | Reference[Any]]) -> None:
        """A variable that takes a text which is not the state's."""
        parts = tuple([self._part(piece) for value in values for piece in self._pieces(value)])
        parts = parts or ("",)  # one without parts is the end of a branch
        variable = self._declare(name, None, TEXT)
        self.ops.append(ops.Set(self._state.id, variable.id, name, parts))

    def read(self, what: ops.ReadWhat, value_type: ValueType) -> Variable[Any]:
        """A variable that takes what the state holds here; the program does not see it as one of its own."""
        variable = self._declare(f"{what}()", None, value_type, is_shown=False)
        self.ops.append(ops.Read(self._state.id, variable.id, variable.name, what))
        return variable

    def flush(self) -> None:
        """Ends the run of text."""
        if self._text:
            parts, self._text = tuple(self._text), []
            self.ops.append(ops.Text(self._state.id, parts))

    def _generate(self, item: GenExpression[Any]) -> None:
        constraint = item.value_type.constraint
        fixed = [*item.params.stop, item.params.stop_regex, *(constraint.texts() if constraint else ())]
        self._refuse_markers(fixed, f"gen({item.name!r}): what says where it ends, and what it may be,")
        variable = self._new(item.name, item, item.value_type)
        is_reply = item.value_type.is_reply
        if is_reply:
            self.entries.append(ToolCalls(variable))
        var_id, params = variable.id, item.params
        if params.seed is None:
            seed = self._state.run.seed_at(var_id, self._state.seed_place(self._num_gens))
            params = msgspec.structs.replace(params, seed=seed)
        self._num_gens += 1
        self._put(ops.Gen(self._state.id, var_id, item.name, params, constraint, item.timeout_s, is_reply))

    def _put(self, op: ops.Op) -> None:
        self.flush()
        self.ops.append(op)

    def _new(self, name: str, expression: object, value_type: ValueType) -> Variable[Any]:
        """A variable whose value is appended to the state."""
        self.flush()
        variable = self._declare(name, expression, value_type)
        self.entries.append(variable)
        return variable

    def _declare(
        self, name: str, expression: object, value_type: ValueType, *, is_shown: bool = True
    ) -> Variable[Any]:
        variable = self._state.new_variable(name, value_type, is_shown=is_shown)
        self.declared.append(Declared(variable, expression, len(self.ops) + 1))
        return variable

    def _pieces(self, item: str | Reference[Any]) -> list[str | Reference[Any]]:
        return self._state.session.markers.split(item) if isinstance(item, str) else [item]

    def _part(self, piece: str | Reference[Any]) -> str | ops.Ref:
        if isinstance(piece, str):
            return piece
        variable, session = piece.source, self._state.session
        if variable.state.session is not session:
            raise ForeignState(
                f"{piece.shown_name} belongs to another session: await it and append its value"
            )
        if session.is_open(variable.state):
            return ops.Ref(variable.id, piece.transforms)
        if variable.has_value:
            return apply_transforms(variable.text, piece.transforms)
        variable.raise_failure()
        raise StateClosed(f"the state of {piece.shown_name} has ended: await it before its run ends")
