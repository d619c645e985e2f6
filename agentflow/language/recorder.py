"""From expressions to ops: text is merged, variables become references, turns get their marks.

How many of a state's ops have been submitted, and how many of these are done.

Two things say that ops are done: the end of a variable that was declared among them, and a ticket that
the backend has reached.

Which tasks append to a state: two that do so at the same time would leave its order to chance.

Which line of the user's program is being run: so that an op that fails later can name it.

What was appended to a state, as the client knows it: for ``messages()`` and for joins.

Texts, variables, images, tool calls, and the beginnings and ends of turns, in order. A fork's transcript goes
on from where its parent's was, without a copy.
"""

from __future__ import annotations

import asyncio
import os
import sys
import weakref
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from types import CoroutineType, GeneratorType
from typing import TYPE_CHECKING, Any, NamedTuple, Union

import anyio
import msgspec

from agentflow.errors import BacklogFull, BadArgument, ConcurrentAppend, ForeignState, StateClosed
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
from agentflow.language.values import TEXT, ValueType
from agentflow.language.variable import Reference, Variable
from agentflow.protocol import ops
from agentflow.protocol.chat import CalledTool, Conversation
from agentflow.protocol.transform import apply_transforms

if TYPE_CHECKING:
    from agentflow.language.state import Appending
    from agentflow.language.variable import Reference, Variable


MAX_BACKLOG = 10_000


class Backlog:
    """Of one state. A *mark* is a variable's id, or a ticket with its sign turned."""

    def __init__(self) -> None:
        self.num_submitted = 0
        self.ticket = 0  # the last one asked for
        self._num_settled = 0
        self._marks: dict[int, int] = {}  # mark → ops submitted up to it
        self._changed = anyio.Event()

    @property
    def is_settled(self) -> bool:
        """Whether all that was submitted is done."""
        return self._num_settled >= self.num_submitted

    def check_room(self, num_ops: int) -> None:
        """``BacklogFull`` where so many more would be too many."""
        if self.num_submitted + num_ops - self._num_settled > MAX_BACKLOG:
            raise BacklogFull(f"{MAX_BACKLOG} ops wait on this state: await something before appending more")

    def expect(self, var_id: int, num_ops: int) -> None:
        """When this variable ends, the first ``num_ops`` ops are done."""
        self._marks[var_id] = num_ops

    def next_ticket(self) -> int | None:
        """A ticket that is reached when all that was submitted is done; None where one is asked already,
        or all is done."""
        if self.is_settled or self._marks.get(-self.ticket) == self.num_submitted:
            return None
        self.ticket += 1
        self._marks[-self.ticket] = self.num_submitted
        return self.ticket

    def end_variable(self, var_id: int) -> None:
        """The variable has ended."""
        self.settle(self._marks.pop(var_id, 0))

    def reach(self, ticket: int) -> None:
        """The ticket was reached."""
        self.settle(self._marks.pop(-ticket, 0))

    def settle(self, num_ops: int) -> None:
        """The first ``num_ops`` ops are done."""
        self._num_settled = max(self._num_settled, num_ops)
        self.wake()

    def wake(self) -> None:
        """Whoever waits for a change looks again."""
        self._changed.set()
        self._changed = anyio.Event()

    async def change(self) -> None:
        """Waits until something changes."""
        await self._changed.wait()

    def is_done(self, num_ops: int) -> bool:
        """Whether the first ``num_ops`` are done."""
        return self._num_settled >= num_ops


class Appenders:
    """One task may append after another, and a task may hand the state to a child and go on when that
    has ended. What is refused is a task that comes back while one that appended since is still alive."""

    def __init__(self) -> None:
        # Coroutines of tasks, in the order of their last append, without repetition.
        self._last: list[weakref.ref[Any]] = []

    def check(self) -> None:
        """The running task appends now."""
        now = _running()
        if now is None or (self._last and self._last[-1]() is now):
            return
        alive = [ref for ref in self._last if not _has_ended(ref())]
        if alive and alive[-1]() is now:  # those that appended since have ended
            self._last = alive
            return
        if any(ref() is now for ref in alive):
            raise ConcurrentAppend(
                "two tasks append to this state at the same time, so that the order of what they append is "
                "chance: fork it, and give each task a branch"
            )
        self._last = [*alive, weakref.ref(now)]


def _running() -> object | None:
    """The coroutine of the running task."""
    with suppress(RuntimeError):  # no asyncio here
        task: Any = asyncio.current_task()
        return None if task is None else task.get_coro()
    trio = sys.modules.get("trio")
    if trio is not None:
        with suppress(RuntimeError):  # no trio either
            return trio.lowlevel.current_task().coro  # type: ignore[no-any-return]
    raise ConcurrentAppend(
        "this thread has no event loop: append from the task that runs the program "
        "(from a worker thread by anyio.from_thread.run_sync)"
    )


def _has_ended(coroutine: object | None) -> bool:
    """Whether its task has. Of other kinds than Python's own nothing is known: they are not accused."""
    if isinstance(coroutine, CoroutineType):
        return coroutine.cr_frame is None
    return not isinstance(coroutine, GeneratorType) or coroutine.gi_frame is None


_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


class ProgramLine(NamedTuple):
    """A line outside this package."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{os.path.basename(self.file)}:{self.line}, in {self.function}"


def calling_line() -> ProgramLine | None:
    """The innermost line on the stack that is not this package's own. About a microsecond."""
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if not code.co_filename.startswith(_PACKAGE):
            return ProgramLine(code.co_filename, frame.f_lineno, code.co_name)
        frame = frame.f_back  # type: ignore[assignment]
    return None


class LineTable:
    """From the number of an op in its state to the line that appended it."""

    def __init__(self) -> None:
        self._ends: list[int] = []
        self._lines: list[ProgramLine | None] = []

    def add(self, end: int, line: ProgramLine | None) -> None:
        """The ops up to number ``end``, from the end of those before, come from ``line``."""
        if self._lines and self._lines[-1] == line:
            self._ends[-1] = end
        else:
            self._ends.append(end)
            self._lines.append(line)

    def line_of(self, number: int) -> ProgramLine | None:
        """Where op ``number`` (from 1) was appended."""
        index = bisect_left(self._ends, number)
        return self._lines[index] if index < len(self._lines) else None


class TurnBegins(NamedTuple):
    """A turn of this role begins. ``tool_call_id`` and ``name``: as ``af.Message`` has them."""

    role: str
    tool_call_id: str | None = None
    name: str | None = None


class TurnEnds(NamedTuple):
    """The turn ends."""


class ToolCalls(NamedTuple):
    """The turn calls tools: these, or those of a reply that is a part of it."""

    source: tuple[CalledTool, ...] | Variable[Any]


Content = Union["str", "Reference[Any]", ImageExpression]
Entry = Content | TurnBegins | TurnEnds | ToolCalls


class TurnContent(NamedTuple):
    """A turn, its content not resolved yet."""

    begin: TurnBegins
    content: list[Content]
    calls: list[ToolCalls]


class Transcript:
    """Append-only. ``open_role``: of the turn that is not closed yet."""

    def __init__(self, parent: Transcript | None = None) -> None:
        self._parent = parent
        self._num_inherited = len(parent._entries) if parent is not None else 0
        self._entries: list[Entry] = []
        self.open_role: str | None = parent.open_role if parent is not None else None

    def extend(self, entries: Sequence[Entry], open_role: str | None) -> None:
        """These were appended, and this turn is open after them."""
        self._entries += entries
        self.open_role = open_role

    @property
    def is_empty(self) -> bool:
        """Whether nothing was appended, here or before a fork."""
        return next(self._all(), None) is None

    def own_content(self) -> list[Content]:
        """What was appended since the fork, without the marks of turns."""
        marks = TurnBegins | TurnEnds | ToolCalls
        return [entry for entry in self._entries if not isinstance(entry, marks)]

    def turns(self) -> list[TurnContent]:
        """The turns so far, the open one included. Text outside turns belongs to none."""
        found: list[TurnContent] = []
        is_open = False
        for entry in self._all():
            if isinstance(entry, TurnBegins):
                found.append(TurnContent(entry, [], []))
                is_open = True
            elif isinstance(entry, TurnEnds):
                is_open = False
            elif isinstance(entry, ToolCalls):
                found[-1].calls.append(entry)
            elif is_open:
                found[-1].content.append(entry)
        return found

    def _all(self) -> Iterator[Entry]:
        chain: list[tuple[Transcript, int]] = [(self, len(self._entries))]
        while (parent := chain[-1][0]._parent) is not None:
            chain.append((parent, chain[-1][0]._num_inherited))
        for transcript, length in reversed(chain):
            yield from islice(transcript._entries, length)


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
