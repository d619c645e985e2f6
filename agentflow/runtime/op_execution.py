"""What each op does with its state's context, once its turn has come."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Generic

import anyio
import msgspec

from agentflow.errors import DeadlineExceeded, ProtocolError, RunFailed, StateClosed
from agentflow.protocol import ops
from agentflow.protocol.chat import Conversation
from agentflow.protocol.events import Value
from agentflow.protocol.transform import apply_in_turn
from agentflow.runtime.cells import PendingOp, StateCell, VariableCell
from agentflow.runtime.generator import ContextT, Generator, Scored, StateHint, Usage
from agentflow.runtime.held_memory import FORKED_CHAR_BYTES, TURN_CHARS, HeldMemory, Holding
from agentflow.runtime.limits import clipped, spend
from agentflow.runtime.state_tree import origin_of

# Texts that take each other twice double with every op: thirty small ops must not fill the memory.
MAX_OP_CHARS = 8 * 1024 * 1024


class OpExecution(Generic[ContextT]):
    """Executes ops on ``generator``. ``start_child`` takes the context of a forked state, with what that
    holds, and its number of characters."""

    def __init__(
        self,
        generator: Generator[ContextT],
        variables: Mapping[int, VariableCell],
        memory: HeldMemory,
        start_child: Callable[[StateCell[ContextT], ContextT, Holding, int], None],
    ) -> None:
        self._generator = generator
        self._variables = variables
        self._memory = memory
        self._start_child = start_child
        # Of the threads that all sessions share, this one searches in one at a time.
        self._searching = anyio.CapacityLimiter(1)

    async def execute(self, state: StateCell[ContextT], pending: PendingOp[ContextT]) -> None:
        """Runs an op that needs the state's context; waits for the variables in it, in their order."""
        context, op = state.context, pending.op
        if isinstance(op, ops.Set):  # needs no context: a sealed state may have one
            await self._set(op, pending)
            return
        if isinstance(op, ops.Read):
            await self._read(op, state, pending)
            return
        if context is None:
            raise StateClosed(f"state {state.id} was sealed: nothing can be appended to it")
        match op:
            case ops.Text():
                text = await self._resolved(op.parts, pending.sources)
                state.hold_text(text)
                self._generator.fill(context, text)
            case ops.Converse():
                await self._converse(state, context, op.conversation)
            case ops.Begin():
                state.hold_text("", TURN_CHARS)
                self._generator.begin_role(context, op.role)
            case ops.End():
                self._generator.end_role(context)
            case ops.Gen():
                await self._generate(state, context, op)
            case ops.Select():
                variable = self._variables[op.var]  # now: by the end its state may have been closed
                scored = await self._generator.score(context, op.choices, op.method)
                state.hold_text(op.choices[scored.index])
                variable.complete(op.choices[scored.index], _selected(op, scored))
            case ops.Fork():
                await self._fork(state, context, pending.children)
            case _:
                await self._look(context, pending)

    async def _converse(
        self, state: StateCell[ContextT], context: ContextT, conversation: Conversation
    ) -> None:
        for message in conversation.messages:
            called = sum(len(call.name) + len(call.arguments) for call in message.tool_calls)
            state.hold_text(message.content, TURN_CHARS + called)
        state.hold_text("", sum(len(msgspec.json.encode(tool)) for tool in conversation.tools))
        await self._generator.converse(context, conversation)

    async def _set(self, op: ops.Set, pending: PendingOp[ContextT]) -> None:
        variable = self._variables[op.var]
        _complete(variable, await self._resolved(op.parts, pending.sources), "set")

    async def _fork(
        self, state: StateCell[ContextT], context: ContextT, children: Sequence[StateCell[ContextT]]
    ) -> None:
        num_chars = state.num_chars
        # First: the copies may be very many.
        holdings = [Holding(self._memory, FORKED_CHAR_BYTES * num_chars) for _ in children]
        contexts = await self._generator.fork(context, len(children))
        for child, child_context, holding in zip(children, contexts, holdings, strict=True):
            self._start_child(child, child_context, holding, num_chars)

    async def _read(self, op: ops.Read, state: StateCell[ContextT], pending: PendingOp[ContextT]) -> None:
        context = state.sealed if state.context is None else state.context
        if context is None:  # fails nothing but itself: the state's own work is done
            dropped = StateClosed(f"what state {state.id} held when it was sealed was dropped for newer ones")
            dropped.place = None if pending.number is None else (state.id, pending.number)
            self._variables[op.var].fail(dropped)
            return
        if op.what == "token_ids":
            text = json.dumps(await self._generator.token_ids(context))
        else:
            text = self._generator.text(context)
        _complete(self._variables[op.var], text, "read")

    async def _look(self, context: ContextT, pending: PendingOp[ContextT]) -> None:
        """Ops that leave the state's text as it is, and images."""
        op = pending.op
        match op:
            case ops.Hint():
                self._generator.hint(
                    context, StateHint(op.objective, op.output_tokens, op.forks, op.deadline_s)
                )
            case ops.Image():
                self._generator.image(context, op.source)
            case _:
                raise ProtocolError(f"an op that cannot stand in a stream: {op!r}")

    async def _generate(self, state: StateCell[ContextT], context: ContextT, op: ops.Gen) -> None:
        params = clipped(op.params, state.budgets)
        variable = self._variables[op.var]
        with anyio.move_on_after(op.timeout_s) as scope:
            generate = self._generator.reply if op.reply else self._generator.generate
            end = await generate(context, params, variable.extend, op.constraint)
        if scope.cancelled_caught:
            raise DeadlineExceeded(f"{op.name!r} took longer than its {op.timeout_s} s")
        was_cut = end.finish_reason == "length" and params.max_tokens < op.params.max_tokens
        spend(end.usage.output_tokens, state.budgets, was_cut=was_cut)
        value = Value(
            op.var, 0, "", end.finish_reason, end.usage, end.logprobs, top_logprobs=end.top_logprobs
        )
        state.hold_text(end.text)
        variable.complete(end.text, value)

    async def _resolved(self, parts: ops.Parts, sources: Sequence[VariableCell]) -> str:
        """The text of the parts, once it is there; ``sources``: the variables in them, in their order."""
        for variable in sources:  # nothing is kept while it waits
            await variable.done.wait()
            if variable.error is not None:
                cause = origin_of(variable.error)
                raise RunFailed(f"the text needs {variable.name!r}, which has no value") from cause
        pieces: list[str] = []
        num_chars = 0
        variables = iter(sources)
        holding = Holding(self._memory, 0)  # a search in between may have to wait for those of others
        for part in parts:
            if isinstance(part, str):
                piece = part
            else:
                piece = await apply_in_turn(next(variables).content, part.transforms, self._searching)
                holding.add(sys.getsizeof(piece))
            num_chars += len(piece)
            if num_chars > MAX_OP_CHARS:
                raise RunFailed(f"with its variables, this text has more than {MAX_OP_CHARS:,} characters")
            pieces.append(piece)
        return "".join(pieces)


def _complete(variable: VariableCell, text: str, reason: str) -> None:
    variable.complete(text, Value(variable.id, 0, "", reason, Usage()))


def _selected(op: ops.Select, scored: Scored) -> Value:
    choices = dict(zip(op.choices, scored.scores, strict=True))
    return Value(op.var, 0, "", "choice", scored.usage or Usage(), None, choices)
