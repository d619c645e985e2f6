"""What each op does with its state's context, once its turn has come."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Generic

import anyio

from agentflow import ops
from agentflow.budget import clipped, spend
from agentflow.cells import PendingOp, StateCell, VariableCell
from agentflow.errors import DeadlineExceeded, ProtocolError, RunFailed, StateClosed
from agentflow.events import Value
from agentflow.generator import ContextT, Generator, Scored, StateHint, Usage
from agentflow.held_memory import FORKED_CHAR_BYTES, HeldMemory, value_bytes
from agentflow.ops import check_choices, check_hint, check_timeout
from agentflow.state_tree import StateTree, origin_of
from agentflow.transform import apply_in_turn

# Texts that take each other twice double with every op: thirty small ops must not fill the memory.
MAX_OP_CHARS = 8 * 1024 * 1024


class OpExecution(Generic[ContextT]):
    """Executes ops on ``generator``. ``start_child`` takes the context of a forked state, unless that is
    gone. What values and contexts hold is counted in ``memory``."""

    def __init__(
        self,
        generator: Generator[ContextT],
        states: StateTree[ContextT],
        variables: Mapping[int, VariableCell],
        memory: HeldMemory,
        start_child: Callable[[int, ContextT], bool],
    ) -> None:
        self._generator = generator
        self._states = states
        self._variables = variables
        self._memory = memory
        self._start_child = start_child
        # Of the threads that all sessions share, this one searches in one at a time.
        self._searching = anyio.CapacityLimiter(1)

    async def execute(self, state: StateCell[ContextT], pending: PendingOp) -> None:
        """Runs an op that needs the state's context; waits for the variables in it, in their order."""
        context, op = state.context, pending.op
        if isinstance(op, ops.Set):  # needs no context: a sealed state may have one
            await self._set(op, pending)
            return
        if context is None:
            raise StateClosed(f"state {state.id} was sealed: nothing can be appended to it")
        match op:
            case ops.Text():
                text = await self._resolved(op.parts, pending.sources)
                self._states.hold_text(state, text)
                self._generator.fill(context, text)
            case ops.Begin():
                self._generator.begin_role(context, op.role)
            case ops.End():
                self._generator.end_role(context)
            case ops.Gen():
                await self._generate(state, context, op)
            case ops.Select():
                check_choices(op.name, op.choices)
                variable = self._variables[op.var]  # now: by the end its state may have been closed
                scored = await self._generator.score(context, op.choices, op.method)
                self._states.hold_text(state, op.choices[scored.index])
                self.complete(variable, op.choices[scored.index], _selected(op, scored))
            case ops.Fork():
                await self._fork(state, context, op)
            case _:
                await self._look(context, pending)

    async def _set(self, op: ops.Set, pending: PendingOp) -> None:
        variable = self._variables[op.var]
        self._give(variable, await self._resolved(op.parts, pending.sources), "set")

    async def _fork(self, state: StateCell[ContextT], context: ContextT, op: ops.Fork) -> None:
        num_bytes, num_left = FORKED_CHAR_BYTES * state.num_chars, len(op.children)
        self._memory.hold(num_bytes * num_left)  # first: the copies may be very many
        try:
            contexts = await self._generator.fork(context, num_left)
            for child_id, child_context in zip(op.children, contexts, strict=True):
                if self._start_child(child_id, child_context):
                    num_left -= 1
        finally:
            self._memory.release(num_bytes * num_left)

    async def _look(self, context: ContextT, pending: PendingOp) -> None:
        """Ops that leave the state's text as it is, and images."""
        op = pending.op
        match op:
            case ops.Read():
                if op.what == "token_ids":
                    text = json.dumps(await self._generator.token_ids(context))
                else:
                    text = self._generator.text(context)
                self._give(self._variables[op.var], text, "read")
            case ops.Hint():
                check_hint(op.output_tokens, op.forks, op.deadline_s)
                self._generator.hint(
                    context, StateHint(op.objective, op.output_tokens, op.forks, op.deadline_s)
                )
            case ops.Image():
                self._generator.capabilities.require_images()
                self._generator.image(context, op.source)
            case _:
                raise ProtocolError(f"an op that cannot stand in a stream: {op!r}")

    async def _generate(self, state: StateCell[ContextT], context: ContextT, op: ops.Gen) -> None:
        self._generator.capabilities.require(op.constraint)
        params = clipped(op.params.check(), state.budgets)
        variable = self._variables[op.var]
        constraint = None if op.constraint is None else op.constraint.check()
        check_timeout(op.timeout_s)
        with anyio.move_on_after(op.timeout_s) as scope:
            end = await self._generator.generate(context, params, variable.extend, constraint)
        if scope.cancelled_caught:
            raise DeadlineExceeded(f"{op.name!r} took longer than its {op.timeout_s} s")
        was_cut = end.finish_reason == "length" and params.max_tokens < op.params.max_tokens
        spend(end.usage.output_tokens, state.budgets, was_cut=was_cut)
        value = Value(
            op.var, 0, "", end.finish_reason, end.usage, end.logprobs, top_logprobs=end.top_logprobs
        )
        self._states.hold_text(state, end.text)
        self.complete(variable, end.text, value)

    def complete(self, variable: VariableCell, text: str, value: Value) -> None:
        """Gives the variable its value. ``Overloaded`` where that is too much."""
        if not variable.done.is_set():  # otherwise its state was closed meanwhile
            num_bytes = value_bytes(text, value)
            self._memory.hold(num_bytes)
            variable.num_bytes += num_bytes
        variable.complete(text, value)

    def _give(self, variable: VariableCell, text: str, reason: str) -> None:
        self.complete(variable, text, Value(variable.id, 0, "", reason, Usage()))

    async def _resolved(self, parts: ops.Parts, sources: Sequence[VariableCell]) -> str:
        """The text of the parts, once it is there; ``sources``: the variables in them, in their order."""
        pieces: list[str] = []
        num_chars = 0
        variables = iter(sources)
        for part in parts:
            piece = part if isinstance(part, str) else await self._value(part, next(variables))
            num_chars += len(piece)
            if num_chars > MAX_OP_CHARS:
                raise RunFailed(f"with its variables, this text has more than {MAX_OP_CHARS:,} characters")
            pieces.append(piece)
        return "".join(pieces)

    async def _value(self, part: ops.Ref, variable: VariableCell) -> str:
        """What stands for a reference, once it is there."""
        await variable.done.wait()
        if variable.error is not None:
            cause = origin_of(variable.error)
            raise RunFailed(f"the text needs {variable.name!r}, which has no value") from cause
        return await apply_in_turn(variable.text, part.transforms, self._searching)


def _selected(op: ops.Select, scored: Scored) -> Value:
    choices = dict(zip(op.choices, scored.logprobs, strict=True))
    return Value(op.var, 0, "", "choice", scored.usage or Usage(), None, choices)
