"""Runs the ops that need a model: they fill the context of their state, generate from it, score choices, fork
it and read it. Embeddings and ``set`` need no context, but wait in the same stream.
"""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, Generic

import msgspec

from agentflow.errors import InvalidValue, ProtocolError, StateClosed
from agentflow.protocol import ops
from agentflow.protocol.chat import Conversation, ToolSpec
from agentflow.protocol.decisions import answers_text
from agentflow.protocol.events import Usage, Value
from agentflow.protocol.images import Video
from agentflow.runtime.generator import (
    METER,
    ContextT,
    Embedder,
    EmbeddingOptions,
    Generator,
    StateHint,
    Upcoming,
    UpcomingGen,
)
from agentflow.runtime.interpreter.state_tree import PendingOp, StateRecord, with_place
from agentflow.runtime.interpreter.variables import VariableRecord
from agentflow.runtime.interpreter.wired_text import FillAhead, WiredTexts, check_length
from agentflow.runtime.limits import (
    FORKED_CHAR_BYTES,
    TURN_CHARS,
    Budget,
    MemoryBudget,
    MemoryReservation,
    budget_exceeded,
    clipped,
    text_bytes,
)
from agentflow.runtime.loop_turns import LoopTurn

MAX_UPCOMING = 64
"""The maximum number of ops after a gen that its generator receives."""


def opened_context(generator: Generator[ContextT], op: ops.Open) -> ContextT:
    """A new, empty context for a state that ``op`` opens, or for a fork of it on another model."""
    context = generator.open(op.cache_salt, program=op.program, label=op.label)
    if op.objective is not None:
        generator.hint(context, StateHint(op.objective))
    return context


class OpExecution(Generic[ContextT]):
    """Executes ops with the generators of their states.

    Args:
        find: Returns the generator of a model.
        embedders: By the models' names, the default one first.
        variables: By their numbers.
        memory: The budget of the session's texts.
        start_child: Starts a forked state with its generator and context, its memory and its number of
            characters.
    """

    def __init__(
        self,
        find: Callable[[str], Generator[ContextT]],
        embedders: Mapping[str, Embedder],
        variables: Mapping[int, VariableRecord],
        memory: MemoryBudget,
        start_child: Callable[
            [StateRecord[ContextT], Generator[ContextT], ContextT, MemoryReservation | None, int], None
        ],
    ) -> None:
        self._find = find
        self._embedders = embedders
        self._variables = variables
        self._memory = memory
        self._start_child = start_child
        self._texts = WiredTexts(memory)

    async def execute(self, state: StateRecord[ContextT], pending: PendingOp[ContextT]) -> None:
        """Runs an op, after it has waited for the variables that its text refers to."""
        context, generator, op = state.context, state.generator, pending.op
        match op:
            case ops.Set():  # needs no context: the state may be sealed
                variable = self._variables[op.var]
                texts: list[str] = []
                held = MemoryReservation(self._memory, 0)

                def hold(text: str) -> None:
                    held.add(sys.getsizeof(text))
                    texts.append(text)

                await self._texts.resolve(op.parts, pending.sources, hold)
                del held, hold
                variable.complete_text("".join(texts), "set")
            case ops.Embed():
                await self._embed(op)
            case ops.Read() if generator is not None:
                await self._read(op, state, generator, pending)
            case _ if context is None or generator is None:
                raise StateClosed(
                    f"state {state.id} was sealed: nothing can be appended to it", reason="sealed"
                )
            case _:
                await self._extend(state, generator, context, pending)

    async def _extend(
        self,
        state: StateRecord[ContextT],
        generator: Generator[ContextT],
        context: ContextT,
        pending: PendingOp[ContextT],
    ) -> None:
        """Runs an op that uses the state's context."""
        op = pending.op
        if isinstance(op, ops.Gen | ops.Select | ops.Decide) and op.trace:
            generator.hint(context, StateHint(trace=op.trace))
        match op:
            case ops.Text() if not pending.sources:
                parts = [part for part in op.parts if isinstance(part, str)]
                check_length(sum(map(len, parts)))
                text = "".join(parts)
                state.reserve_text(text)
                generator.fill(context, text)
            case ops.Text():

                def fill(text: str) -> None:
                    state.reserve_text(text)
                    generator.fill(context, text)

                await self._texts.resolve(op.parts, pending.sources, fill, _ahead(state, generator, context))
            case ops.Converse():
                conversation = op.conversation
                if pending.images:
                    conversation = conversation.with_files(pending.images)
                await self._converse(state, generator, context, conversation)
            case ops.Tools():
                state.reserve_text("", _count_chars(op.tools))
                await generator.offer_tools(context, op.tools, op.choice)
            case ops.Begin():
                state.reserve_text("", TURN_CHARS + len(op.tool_call_id or "") + len(op.name or ""))
                generator.begin_role(context, op.role, op.tool_call_id, op.name)
            case ops.End():
                generator.end_role(context)
                ahead = None if state.pending else _ahead(state, generator, context)
                if ahead is not None:
                    await ahead.fill()
            case ops.Gen():
                await self._generate(state, generator, context, op)
            case ops.Select():
                variable = self._variables[op.var]  # before the wait, in which its state may be closed
                scored = await generator.score(context, op.choices, op.method)
                choice = op.choices[scored.index]
                scores = dict(zip(op.choices, scored.scores, strict=True))
                state.reserve_text(choice)
                value = Value(
                    op.var,
                    0,
                    choice,
                    "choice",
                    scored.usage,
                    choices=scores,
                    decided_by=scored.decided_by,
                    model=scored.model,
                    passed_over=scored.passed_over,
                )
                variable.complete(value)
            case ops.Decide():
                variable = self._variables[op.var]
                decided = await generator.decide(context, op.questions)
                value = Value(
                    op.var,
                    0,
                    answers_text(op.questions, decided.probabilities),
                    "decided",
                    decided.usage,
                    decided_by=decided.decided_by,
                    model=decided.model,
                    passed_over=decided.passed_over,
                )
                variable.complete(value)
            case ops.Fork():
                await self._fork(state, generator, context, op.model, pending.children)
            case ops.Image():
                generator.image(context, pending.images[0])
            case ops.Video():
                generator.video(context, Video(pending.images[0], op.num_frames))
            case ops.Hint():
                hint = StateHint(op.objective, op.output_tokens, op.forks, op.deadline_s, op.speculate)
                generator.hint(context, hint)
            case _:
                raise ProtocolError(f"an op that cannot stand in a stream: {op!r}")

    async def _converse(
        self,
        state: StateRecord[ContextT],
        generator: Generator[ContextT],
        context: ContextT,
        conversation: Conversation,
    ) -> None:
        for message in conversation.messages:
            texts = [message.reasoning or "", message.tool_call_id or "", message.name or ""]
            for call in message.tool_calls:
                texts += [call.id, call.name, call.arguments]
            num_chars = TURN_CHARS * (1 + len(message.tool_calls)) + sum(map(len, texts))
            state.reserve_text(message.content, num_chars)
        state.reserve_text("", _count_chars(conversation.tools))
        await generator.converse(context, conversation)

    async def _fork(
        self,
        state: StateRecord[ContextT],
        generator: Generator[ContextT],
        context: ContextT,
        model: str,
        children: Sequence[StateRecord[ContextT]],
    ) -> None:
        wanted, turn = self._find(model) if model else generator, LoopTurn()
        begins_empty = wanted is not generator
        num_chars = 0 if begins_empty else state.num_chars
        reservations: list[MemoryReservation | None] = [None] * len(children)
        if not self._memory.is_unlimited:  # first, because there may be many copies
            for index in range(len(children)):
                reservations[index] = MemoryReservation(self._memory, FORKED_CHAR_BYTES * num_chars)
                await turn.pause()
        if begins_empty:
            assert state.opened is not None
            contexts = [opened_context(wanted, state.opened) for _ in children]
        else:
            contexts = await generator.fork(context, len(children))
        forked = zip(children, contexts, reservations, strict=True)
        try:
            for child, child_context, reservation in forked:
                self._start_child(child, wanted, child_context, reservation, num_chars)
                await turn.pause()
        finally:
            for _, child_context, _ in forked:  # after a cancellation
                wanted.free(child_context)

    async def _read(
        self,
        op: ops.Read,
        state: StateRecord[ContextT],
        generator: Generator[ContextT],
        pending: PendingOp[ContextT],
    ) -> None:
        context = state.sealed if state.context is None else state.context
        if context is None:  # fails only the variable: the state has ended without an error
            error = StateClosed(
                f"the content of sealed state {state.id} was dropped to make room for newer ones",
                reason="sealed",
            )
            self._variables[op.var].fail(with_place(error, state, pending.number))
            return
        if op.what == "token_ids":
            text = json.dumps(await generator.token_ids(context))
        elif op.what == "tokens":
            text = json.dumps(await generator.token_texts(context), ensure_ascii=False)
        else:
            text = generator.text(context)
        self._variables[op.var].complete_text(text, "read")

    async def _embed(self, op: ops.Embed) -> None:
        variable = self._variables[op.var]  # before the wait, in which its state may be closed
        embedder = self._embedders[op.model or next(iter(self._embedders))]
        options = EmbeddingOptions(op.prompt, op.prompt_name, op.dimensions)
        tokens = MemoryReservation(
            self._memory, sum(text_bytes(text, len(op.prompt or "")) for text in op.texts)
        )
        made = await embedder.embed(op.texts, options)
        del tokens
        text = json.dumps([base64.b64encode(vector).decode("ascii") for vector in made.vectors])
        variable.complete(Value(op.var, 0, text, "embedded", made.usage))

    async def _generate(
        self,
        state: StateRecord[ContextT],
        generator: Generator[ContextT],
        context: ContextT,
        op: ops.Gen,
    ) -> None:
        variable = self._variables[op.var]
        params = op.params
        if state.budgets:
            params = clipped(params, state.budgets, generator.capabilities.default_max_tokens)
        generate = generator.reply if op.reply else generator.generate
        streamed = (variable.extend_reasoning,) if params.stream_reasoning else ()
        expect = getattr(generator, "expect", None)
        if expect is not None and not op.reply:
            expect(context, _upcoming(state))
        charge = TokenCharge(state)
        token = METER.set(charge.count)
        try:
            end = await generate(context, params, variable.extend, op.constraint, *streamed)
            was_truncated = end.finish_reason == "length" and params is not op.params
            charge.end(end.usage, was_truncated=was_truncated)
        except InvalidValue as error:
            if error.usage is not None:
                charge.end(error.usage, was_truncated=False)
            raise
        finally:
            METER.reset(token)
            state.num_unreported = charge.close()
        state.reserve_text(end.text, len(end.reasoning or ""))
        value = Value(
            op.var,
            0,
            end.text,
            end.finish_reason,
            end.usage,
            logprobs=end.logprobs,
            top_logprobs=end.top_logprobs,
            forced=end.forced,
            reasoning=end.reasoning,
            tokens=end.tokens,
            model=end.model,
            passed_over=end.passed_over,
        )
        variable.complete(value)
        state.num_unreported = 0


class TokenCharge:
    """Charges the tokens of one generation to the budgets of its state, while it runs. A budget that the
    state gets meanwhile is charged with all of them. Tokens beyond a budget end the generation."""

    __slots__ = ("_charged", "_num_tokens", "_state")

    def __init__(self, state: StateRecord[Any]) -> None:
        self._state = state
        self._num_tokens = 0
        self._charged: dict[Budget, int] = {}

    def count(self, num_tokens: int) -> None:
        """Charges new tokens. Negative: earlier ones did not count."""
        self._num_tokens += num_tokens
        budgets = self._state.budgets
        if budgets and self._charge(budgets):
            self._state.abort()

    def end(self, usage: Usage, *, was_truncated: bool) -> None:
        """Charges the rest of the usage. ``was_truncated``: a budget truncated the generation.
        ``BudgetExceeded``."""
        self._num_tokens = usage.output_tokens
        budgets = self._state.budgets
        if self._charge(budgets) or (was_truncated and any(budget.tokens_left < 1 for budget in budgets)):
            raise budget_exceeded(usage)

    def close(self) -> int:
        """The generation has ended or was cancelled. Returns the number of its tokens."""
        for budget, num_tokens in self._charged.items():
            budget.tokens_running -= num_tokens
        return self._num_tokens

    def _charge(self, budgets: Sequence[Budget]) -> bool:
        """Whether a budget is exceeded."""
        is_exceeded = False
        for budget in budgets:
            num_new = self._num_tokens - self._charged.get(budget, 0)
            budget.tokens_left -= num_new
            budget.tokens_running += num_new
            self._charged[budget] = self._num_tokens
            is_exceeded = is_exceeded or budget.tokens_left < 0
        return is_exceeded


def _upcoming(state: StateRecord[ContextT]) -> list[Upcoming]:
    """The text and the gens that wait in the state's stream up to the end of its turn, or up to a text that
    is not known yet."""
    found: list[Upcoming] = []
    for pending in islice(state.pending, MAX_UPCOMING):
        match op := pending.op:
            case ops.Text() if all(isinstance(part, str) for part in op.parts):
                found.append("".join([part for part in op.parts if isinstance(part, str)]))
            case ops.Gen() if not op.reply:
                found.append(UpcomingGen(op.params, op.constraint))
            case ops.Hint() | ops.Await() | ops.Set() | ops.Expect():
                pass
            case _:
                break
    return found


def _ahead(
    state: StateRecord[ContextT], generator: Generator[ContextT], context: ContextT
) -> FillAhead | None:
    fill_ahead = getattr(generator, "fill_ahead", None)
    return None if fill_ahead is None else FillAhead(partial(fill_ahead, context), state)


def _count_chars(tools: Sequence[ToolSpec]) -> int:
    return sum(len(msgspec.json.encode(tool)) for tool in tools)
