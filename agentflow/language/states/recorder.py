"""Turns the expressions of ``s += ...`` into ops.

``append`` does this for one item. A ``Recorder`` collects the ops of one append and submits them together:
merged text, references to variables, marks of turns. The state does not change before that, so an error
leaves it as it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple, cast

import msgspec

from agentflow.errors import BadArgument, ForeignState, StateClosed
from agentflow.language.expressions import (
    Appendable,
    ConversationExpression,
    Expression,
    MediumExpression,
    Offer,
    RoleExpression,
    Sequence_,
    medium_expression,
    not_appendable,
)
from agentflow.language.gen import GenExpression, SelectExpression
from agentflow.language.markers import MARKERS
from agentflow.language.media import check_is_text
from agentflow.language.op_log import (
    WRITTEN,
    ToolCalls,
    Transcript,
    TranscriptEntry,
    TurnBegins,
    TurnEnds,
    TurnPosition,
)
from agentflow.language.states.run import StateNode, VariableNode
from agentflow.language.states.traced import GenOp, traced
from agentflow.language.states.validation import Attempts
from agentflow.language.states.variable import Reference, Variable, find_target
from agentflow.language.typed.decisions import Decision
from agentflow.language.typed.replies import make_calls
from agentflow.language.typed.tools import ToolCall
from agentflow.language.typed.values import TEXT, ValueType
from agentflow.protocol import ops
from agentflow.protocol.chat import Conversation, ToolChoice
from agentflow.protocol.decisions import Question
from agentflow.protocol.images import Video
from agentflow.protocol.op_table import num_done_with
from agentflow.protocol.text.transform import apply_transforms

_NO_TOOLS: Final = Offer((), ToolChoice())
"""The offer of a state to which none was given."""


class _Declared(NamedTuple):
    """A new variable. ``op_index``: the index of its op among the recorded ops."""

    node: VariableNode
    is_gen: bool
    op_index: int


def append(state: StateNode, item: Appendable) -> None:
    """Appends one item to a state: all of its ops, or none."""
    state.check_appendable()
    recorder = Recorder(state)
    recorder.add(item)
    recorder.submit()


class Recorder:
    """The ops of one append to ``state``."""

    def __init__(self, state: StateNode) -> None:
        self._state = state
        self._ops: list[ops.Op] = []
        self._declared: list[_Declared] = []
        self._entries: list[TranscriptEntry] = []
        self._position = state.transcript.position
        self._offer = state.transcript.offer
        self._num_gens = 0
        self._text: list[str | ops.Ref] = []
        self._sent: list[ops.Op] = []  # with the ops of other states
        self._attempts: list[tuple[Attempts, int]] = []  # and the index of the fork for them

    def submit(self) -> None:
        """Sends the ops and updates the state; if it raises, neither has happened."""
        state = self._state
        self._flush()
        num_before = state.in_flight.num_submitted
        line = state.submit(self._ops, self._sent)
        for written in WRITTEN.get():
            written[id(state)] = state
        state.transcript.extend(self._entries, self._position, self._offer)
        for node, is_gen, index in self._declared:
            num_ops = num_done_with(self._ops, index)
            state.num_gens += is_gen
            node.line = line
            if node.is_shown:
                state.names[node.name] = node
            state.declare(node, num_before + num_ops)
        for attempts, index in self._attempts:
            attempts.adopt(num_before + index + 1)
            state.link.start_soon(attempts.run)

    def check_repeatable(self, content: Transcript) -> None:
        """Raises the error that ``repeat`` would raise in a fork of this state."""
        content.check_portable()
        for entry in content.all():
            if isinstance(entry, Reference):
                self._part(entry)

    def repeat(self, content: Transcript) -> None:
        """Sends the entries that the state has from its parent, for a model that begins empty."""
        if content.offer is not None:
            self.put(ops.Tools(self._state.id, *content.offer))
        for entry in content.all():
            match entry:
                case TurnBegins(role=role):
                    self.put(ops.Begin(self._state.id, cast(ops.Role, role), entry.tool_call_id, entry.name))
                case TurnEnds():
                    self.put(ops.End(self._state.id))
                case MediumExpression():
                    self.put(self._shown(entry))
                case str() | Reference():
                    self._text.append(self._part(entry))
                case _:
                    raise not_appendable(entry)
        self._flush()
        if self._ops:
            self._state.submit(self._ops)

    def _record(self, op: ops.Op) -> None:
        self._ops.append(op)
        self._sent.append(op)

    def add(self, item: Appendable) -> None:
        """Records one item."""
        match item:
            case str():
                for piece in MARKERS.split(item):
                    if isinstance(piece, str | Reference):
                        self._add_text(piece)
                    else:
                        self.add(piece)
            case Reference():
                self._add_text(item)
            case Sequence_():
                for part in item.parts:
                    self.add(part)
            case GenExpression(texts=()):
                self._generate(item)
            case GenExpression():
                self._select(item.name, item.texts, "likelihood", item.value_type)
            case SelectExpression():
                self._select(item.name, item.choices, item.method, TEXT)
            case RoleExpression():
                self.begin(item.role, item.call)
                for part in item.parts:
                    self.add(part)
                self.end()
            case ConversationExpression():
                self._converse(item.conversation)
            case MediumExpression():
                MARKERS.reject([item.file.source], "image: its URL", "image")
                self._append_entry(item)
                self.put(self._shown(item))
            case _:
                raise not_appendable(item)

    def _shown(self, item: MediumExpression) -> ops.Op:
        """The op that shows an image or a video."""
        medium, state = item.medium, self._state.id
        if isinstance(medium, Video):
            return ops.Video(state, medium.file.source, medium.num_frames)
        return ops.Image(state, medium.source)

    def put(self, op: ops.Op) -> None:
        """Records an op that declares nothing."""
        self._flush()
        self._record(op)

    def begin(self, role: ops.Role, call: ToolCall | None = None) -> None:
        """Begins a turn. ``call``: the call that a tool's turn answers. In the turn that a conversation
        opened, the assistant's turn is that one, and other turns end it."""
        position = self._position
        if position.closes_with_reply and role == "assistant" and not position.has_text:
            self._position = position._replace(closes_with_reply=False)
            return
        if position.closes_with_reply and role != "assistant":
            self.end()
        is_open = self._position.open_role
        if is_open is not None:
            raise BadArgument(
                f"a turn of the {role} cannot stand inside another turn: the {is_open} turn is open, and "
                "s.end() ends it"
            )
        self._position = self._position.begun(role)
        answered = (None, None) if call is None else (call.id or None, call.name)
        self._entries.append(TurnBegins(role, *answered))
        self.put(ops.Begin(self._state.id, role, *answered))

    def end(self) -> None:
        """Ends the open turn."""
        if self._position.open_role is None:
            raise BadArgument("there is no open turn to end")
        if self._position.closes_with_reply and not self._position.has_text:
            raise BadArgument(
                "the conversation waits for its answer: append af.gen(…) or af.assistant(…) first, or give "
                "all messages before the answer to af.conversation([…])"
            )
        self._position = self._position.ended()
        self._entries.append(TurnEnds())
        self.put(ops.End(self._state.id))

    def set(self, name: str, values: Sequence[str | Reference[Any]]) -> Variable[str]:
        """Records a variable whose text is not appended to the state."""
        pieces: list[str | Expression] = []
        for value in values:
            pieces += MARKERS.split(value) if isinstance(value, str) else [value]
        check_is_text(f"set({name!r})", pieces)
        if not all(isinstance(piece, str | Reference) for piece in pieces):
            raise BadArgument(
                f"set({name!r}): its text may hold strings and variables, and no gen or select: "
                "append those where the text stands"
            )
        parts = tuple([self._part(piece) for piece in pieces])
        node = self._declare(name, TEXT)
        self._record(ops.Set(self._state.id, node.id, name, parts))
        return Variable(node)

    def decide(
        self, name: str, questions: tuple[Question, ...], value_type: ValueType
    ) -> Variable[dict[str, Decision]]:
        """Records a variable with the answers to questions."""
        self._flush()
        num_entries = len(self._entries)
        node = self._declare(name, value_type)
        self._record(self._traced(ops.Decide(self._state.id, node.id, name, questions), node, num_entries))
        return Variable(node)

    def read(self, what: ops.ReadWhat, value_type: ValueType) -> Variable[Any]:
        """Records a hidden variable with the content of the state at this point."""
        node = self._declare(f"{what}()", value_type, is_shown=False)
        self._record(ops.Read(self._state.id, node.id, node.name, what))
        return Variable(node)

    def embed(
        self, texts: Sequence[str], wanted: ops.Embed, value_type: ValueType
    ) -> Variable[list[list[float]]]:
        """Records a hidden variable with the embeddings of the texts. ``wanted``: the options."""
        node = self._declare("embed()", value_type, is_shown=False)
        self._record(
            msgspec.structs.replace(
                wanted, state=self._state.id, var=node.id, name=node.name, texts=tuple(texts)
            )
        )
        return Variable(node)

    def _add_text(self, piece: str | Expression) -> None:
        self._text.append(self._part(piece))
        self._append_entry(piece)

    def _part(self, piece: str | Expression) -> str | ops.Ref:
        if isinstance(piece, str):
            return piece
        assert isinstance(piece, Reference)
        piece.check_sendable()
        node, transforms, label = find_target(piece)
        if node.state.link is not self._state.link:
            raise ForeignState(f"{label} belongs to another session: await it and append its value")
        if node.state.is_open:
            node.is_used = True
            return ops.Ref(node.id, transforms)
        if node.has_value:
            return apply_transforms(node.text, transforms)
        node.raise_failure()
        raise StateClosed(f"the state of {label} has ended: await it before its run ends", reason="ended")

    def _flush(self) -> None:
        """Ends the current text op."""
        if self._text:
            parts, self._text = tuple(self._text), []
            self._record(ops.Text(self._state.id, parts))

    def _converse(self, conversation: Conversation) -> None:
        """Records the turns of a conversation, and the assistant's, which stays open."""
        if self._position.open_role is not None or self._entries or not self._state.transcript.is_empty:
            raise BadArgument("a conversation begins a state: append it first, and nothing before it")
        if not conversation.messages and not conversation.tools:
            return  # the first call of an application that keeps its history elsewhere
        for message in conversation.messages:
            arguments = [call.arguments for call in message.tool_calls]
            sources = [placed.image.source for placed in message.images]
            MARKERS.reject([message.content, *arguments, *sources], "conversation: a message", "messages")
            parts = [
                part if isinstance(part, str) else medium_expression(part) for part in message.parts or [""]
            ]
            self._entries += [TurnBegins(message.role, message.tool_call_id, message.name), *parts]
            self._entries += [ToolCalls(make_calls(message.tool_calls))] if message.tool_calls else []
            self._entries.append(TurnEnds())
        last = conversation.messages[-1].role if conversation.messages else ""
        self._entries[-1:] = [] if last == "assistant" else [TurnEnds(), TurnBegins("assistant")]
        self._position = TurnPosition("assistant", closes_with_reply=True, has_text=last == "assistant")
        self._offer = Offer(conversation.tools, conversation.choice)
        files = [placed.image for message in conversation.messages for placed in message.images]
        if files:
            conversation = conversation.with_files([file.reference() for file in files])
        self.put(ops.Converse(self._state.id, conversation))

    def _generate(self, item: GenExpression[Any]) -> None:
        constraint = item.value_type.constraint
        fixed = [*item.params.stop, item.params.stop_regex or "", *(constraint.texts() if constraint else ())]
        if any(fixed):
            MARKERS.reject(fixed, f"gen({item.name!r}): a stop string or a constraint")
        is_reply = item.value_type.is_reply
        if is_reply and item.offer is not None and item.offer != (self._offer or _NO_TOOLS):
            self._give_tools(item.offer)
        ends_turn = self._begin_reply(item.name) if is_reply else self._begin_own(f"gen({item.name!r})")
        if item.max_retries:
            self._generate_valid(item)
        else:
            self._put_gen(item)
        if ends_turn:
            self.end()

    def _give_tools(self, offer: Offer) -> None:
        """Records the tools of the next replies: with a conversation that is not sent yet, so that the chat
        template renders it once."""
        self._offer = offer
        if not self._ops or self._text or not isinstance(last := self._ops[-1], ops.Converse):
            self.put(ops.Tools(self._state.id, *offer))
            return
        whole = msgspec.structs.replace(last.conversation, tools=offer.tools, choice=offer.choice)
        self._ops[-1] = self._sent[-1] = ops.Converse(self._state.id, whole)

    def _select(
        self, name: str, choices: tuple[str, ...], method: ops.SelectMethod, value_type: ValueType
    ) -> None:
        MARKERS.reject(choices, f"select({name!r}): a choice", "choices")
        ends_turn = self._begin_own(f"select({name!r}, […])")
        num_entries = len(self._entries)
        node = self._append_variable(name, value_type)
        select = ops.Select(self._state.id, node.id, name, choices, method)
        self.put(self._traced(select, node, num_entries))
        if ends_turn:
            self.end()

    def _put_gen(self, item: GenExpression[Any]) -> None:
        constraint, is_reply = item.value_type.constraint, item.value_type.is_reply
        num_entries = len(self._entries)
        node = self._append_variable(item.name, item.value_type, is_gen=True)
        if is_reply:
            self._entries.append(ToolCalls(node.front))
        params = item.params
        if params.seed is None and self._state.capabilities.seeds:
            seed = self._state.seed_at(node, self._num_gens)
            params = msgspec.structs.replace(params, seed=seed)
        self._num_gens += 1
        gen = ops.Gen(self._state.id, node.id, item.name, params, constraint, is_reply)
        self.put(self._traced(gen, node, num_entries))

    def _generate_valid(self, item: GenExpression[Any]) -> None:
        """Records a gen that appends only a valid text; see ``validation``."""
        state = self._state
        on_invalid = "reask" if item.asks_again else "retry"
        state.link.needs_values(f"gen({item.name!r}, on_invalid={on_invalid!r}) is validated by the program")
        num_entries = len(state.transcript.own) + len(self._entries)
        node = self._append_variable(item.name, item.value_type)  # done when the fork is
        number = len(state.children) + len(self._attempts)
        attempts = Attempts(item, node, number, num_entries, role=self._position.open_role)
        self._attempts.append((attempts, len(self._ops)))
        self._record(ops.Fork(state.id, (attempts.base.id,)))
        self._sent += attempts.first_ops()
        self._text.append(ops.Ref(node.id))

    def _traced(self, op: GenOp, node: VariableNode, num_entries: int) -> GenOp:
        """The op with its span. ``num_entries``: the number of entries of this append before it."""
        if self._state.span is None:
            return op
        num_entries += len(self._state.transcript.own)
        return traced(op, node, num_entries=num_entries, in_turn=self._position.open_role is not None)

    def _begin_reply(self, name: str) -> bool:
        """Begins an assistant's turn for a reply unless one is open. Returns whether the reply ends the
        turn."""
        is_open = self._position.open_role
        if is_open is None:
            self.begin("assistant")
        elif is_open != "assistant":
            raise BadArgument(f"reply({name!r}): the {is_open} turn is open: end it first")
        return is_open is None or self._position.closes_with_reply

    def _begin_own(self, what: str) -> bool:
        """Begins a turn for a gen or select outside the turns of a state that has turns. Returns whether it
        did."""
        if not self._position.check_own_turn(what):
            return False
        self.begin("assistant")
        return True

    def _append_entry(self, entry: TranscriptEntry) -> None:
        self._entries.append(entry)
        if not self._position.has_text:
            self._position = self._position._replace(has_text=True)

    def _append_variable(self, name: str, value_type: ValueType, *, is_gen: bool = False) -> VariableNode:
        """Declares a variable whose text is appended to the state."""
        self._flush()
        node = self._declare(name, value_type, is_gen=is_gen)
        node.is_generated = True
        self._append_entry(Variable(node))
        return node

    def _declare(
        self, name: str, value_type: ValueType, *, is_gen: bool = False, is_shown: bool = True
    ) -> VariableNode:
        """Declares the variable of the op that is recorded next."""
        node = VariableNode(self._state, self._state.link.next_id(), name, value_type, is_shown=is_shown)
        self._declared.append(_Declared(node, is_gen, len(self._ops)))
        return node
