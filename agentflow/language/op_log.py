"""The log of a state's ops: their progress, their lines in the program, and their content.

``UnfinishedOps`` counts the ops that the backend has not finished. ``SingleWriter`` rejects concurrent
appends. ``LineTable`` finds the line of the program that appended an op, so that a failure can name it.
``Transcript`` holds the content of the state as the client knows it, for ``messages()`` and ``join``.
"""

from __future__ import annotations

import asyncio
import sys
import weakref
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import suppress
from contextvars import ContextVar
from itertools import islice
from types import CoroutineType, GeneratorType
from typing import Any, NamedTuple

import anyio

from agentflow.errors import BacklogFull, BadArgument, ConcurrentAppend, NotSupported
from agentflow.language.expressions import Expression, MediumExpression, Offer
from agentflow.language.failures.mistakes import no_loop
from agentflow.language.failures.stack_frames import ProgramLine
from agentflow.language.typed.tools import ToolCall
from agentflow.protocol.ops import Role

MAX_IN_FLIGHT = 10_000


class UnfinishedOps:
    """The unfinished ops of one state. Two things show that ops are done: the end of a variable that was
    declared among them, and a ticket that the backend has reached."""

    def __init__(self) -> None:
        self.num_submitted = 0
        self._num_done = 0
        self._last_ticket = 0
        self._marks: dict[int, int] = {}  # number of a variable, or minus a ticket → ops submitted up to it
        self._changed: anyio.Event | None = None  # while a task waits in ``change``

    @property
    def is_empty(self) -> bool:
        """Whether all submitted ops are done."""
        return self._num_done >= self.num_submitted

    def check_room(self, num_ops: int) -> None:
        """``BacklogFull`` if ``num_ops`` more would exceed ``MAX_IN_FLIGHT``."""
        if self.num_submitted + num_ops - self._num_done > MAX_IN_FLIGHT:
            raise BacklogFull(
                f"{MAX_IN_FLIGHT} ops wait on this state: await something before appending more"
            )

    def expect(self, var_id: int, num_ops: int) -> None:
        """The first ``num_ops`` ops are done when this variable ends."""
        self._marks[var_id] = num_ops

    def next_ticket(self) -> int | None:
        """A ticket for all ops submitted so far; None if they are done or have a ticket already."""
        if self.is_empty or self._marks.get(-self._last_ticket) == self.num_submitted:
            return None
        self._last_ticket += 1
        self._marks[-self._last_ticket] = self.num_submitted
        return self._last_ticket

    def end_variable(self, var_id: int) -> None:
        """The variable has ended."""
        self.settle(self._marks.pop(var_id, 0))

    def reach(self, ticket: int) -> None:
        """The backend has reached the ticket."""
        self.settle(self._marks.pop(-ticket, 0))

    def settle(self, num_ops: int) -> None:
        """The first ``num_ops`` ops are done."""
        self._num_done = max(self._num_done, num_ops)
        self.wake()

    def wake(self) -> None:
        """Wakes every task in ``change``."""
        if self._changed is not None:
            self._changed.set()
            self._changed = None

    async def change(self) -> None:
        """Waits until something changes."""
        self._changed = self._changed or anyio.Event()
        await self._changed.wait()

    def is_done(self, num_ops: int) -> bool:
        """Whether the first ``num_ops`` ops are done."""
        return self._num_done >= num_ops


WRITTEN: ContextVar[tuple[dict[int, Any], ...]] = ContextVar("written", default=())
"""For each race in which the running task is a contender: the states to which the contender has appended, by
number."""


class SingleWriter:
    """Rejects two tasks that append to one state concurrently, because the order of their ops would be
    random.

    Tasks may append one after another, and a task may continue after a child task that appended has ended. An
    error is a task that returns while a task that appended later is still alive."""

    def __init__(self) -> None:
        # Coroutines of tasks, in the order of their last append, without repetition.
        self._last: list[weakref.ref[Any]] = []

    def check(self, lines: LineTable) -> None:
        """Records that the running task appends now, or raises ``ConcurrentAppend``. ``lines``: the lines of
        the earlier appends."""
        now = _running()
        if now is None or (self._last and self._last[-1]() is now):
            return
        alive = [ref for ref in self._last if not _has_ended(ref())]
        if alive and alive[-1]() is now:  # the tasks that appended later have ended
            self._last = alive
            return
        if any(ref() is now for ref in alive):
            raise ConcurrentAppend(
                "two tasks append to this state at the same time, so the order of their ops is random (the "
                f"other appended at {lines.last}): fork the state and give each task a branch"
            )
        self._last = [*alive, weakref.ref(now)]


def _running() -> object | None:
    """The coroutine of the running task."""
    with suppress(RuntimeError):  # not in asyncio
        task: Any = asyncio.current_task()
        return None if task is None else task.get_coro()
    trio = sys.modules.get("trio")
    if trio is not None:
        with suppress(RuntimeError):  # not in trio either
            return trio.lowlevel.current_task().coro  # type: ignore[no-any-return]
    raise no_loop()


def _has_ended(coroutine: object | None) -> bool:
    """Whether the coroutine has ended. An unknown kind of coroutine counts as ended."""
    if isinstance(coroutine, CoroutineType):
        return coroutine.cr_frame is None
    return not isinstance(coroutine, GeneratorType) or coroutine.gi_frame is None


class LineTable:
    """Maps the number of an op in its state to the line that appended it."""

    def __init__(self) -> None:
        self._ends: list[int] = []
        self._lines: list[ProgramLine | None] = []

    def add(self, end: int, line: ProgramLine | None) -> None:
        """The ops after the last ``end``, up to number ``end``, come from ``line``."""
        if self._lines and self._lines[-1] == line:
            self._ends[-1] = end
        else:
            self._ends.append(end)
            self._lines.append(line)

    @property
    def last(self) -> ProgramLine | None:
        """The line of the last append."""
        return self._lines[-1] if self._lines else None

    def find_line(self, number: int) -> ProgramLine | None:
        """The line that appended op ``number``, counted from 1."""
        index = bisect_left(self._ends, number)
        return self._lines[index] if index < len(self._lines) else None


class TurnBegins(NamedTuple):
    """A turn of this role begins. ``tool_call_id`` and ``name`` are as in ``af.Message``."""

    role: str
    tool_call_id: str | None = None
    name: str | None = None


class TurnEnds(NamedTuple):
    """The turn ends."""


class ToolCalls(NamedTuple):
    """The turn calls tools: the given calls, or the calls of a variable that holds a reply."""

    source: tuple[ToolCall, ...] | Expression


Content = str | Expression
TranscriptEntry = Content | TurnBegins | TurnEnds | ToolCalls


class TurnContent(NamedTuple):
    """A turn whose content is not resolved yet."""

    begin: TurnBegins
    content: list[Content]
    calls: list[ToolCalls]


class TurnPosition(NamedTuple):
    """The position of a state among its turns."""

    open_role: Role | None = None  # the role of the open turn
    closes_with_reply: bool = False  # a conversation opened that turn: the next reply or turn ends it
    last_role: str | None = None  # the role of the last turn that has ended
    has_text: bool = False  # something was appended in the open turn, or after the last one

    def begun(self, role: Role) -> TurnPosition:
        """The position after the begin of a turn."""
        return TurnPosition(role)

    def ended(self) -> TurnPosition:
        """The position after the end of the open turn."""
        return TurnPosition(last_role=self.open_role)

    def check_own_turn(self, what: str) -> bool:
        """Whether ``what``, a gen or select, begins a new turn: outside turns, in a state with turns.
        ``BadArgument`` where it would continue other text."""
        if self.open_role is not None or self.last_role is None:
            return False
        if self.has_text:
            raise BadArgument(
                f"{what} follows text outside the turns: put both into one turn, as in "
                f"s += af.assistant('…', af.{what})"
            )
        if self.last_role == "assistant":
            raise BadArgument(
                f"{what} follows the end of the assistant's turn: put it into that turn, as in "
                f"s += af.assistant('…', af.{what}), or append af.user(…) first"
            )
        return True


class Transcript:
    """The texts, variables, images and tool calls of a state, and where its turns begin and end. Append-only.

    A fork's transcript continues its parent's first ``num_inherited`` entries without a copy. ``position``:
    the position at its end. ``offer``: the tools that replies may call."""

    def __init__(self, parent: Transcript | None = None) -> None:
        self._parent = parent
        self.num_inherited = len(parent._entries) if parent is not None else 0
        self._entries: list[TranscriptEntry] = []
        self.position: TurnPosition = parent.position if parent is not None else TurnPosition()
        self.offer: Offer | None = parent.offer if parent is not None else None

    def extend(self, entries: Sequence[TranscriptEntry], position: TurnPosition, offer: Offer | None) -> None:
        """Appends the entries, after which the state is at ``position``."""
        self._entries += entries
        self.position, self.offer = position, offer

    def forget_files(self) -> None:
        """Keeps references to the images and videos, and not their bytes."""
        self._entries = [
            entry.without_bytes() if isinstance(entry, MediumExpression) else entry for entry in self._entries
        ]

    @property
    def is_empty(self) -> bool:
        """Whether it has no entries, also none before a fork."""
        return next(self.all(), None) is None

    @property
    def own(self) -> Sequence[TranscriptEntry]:
        """The entries since the fork; do not change them."""
        return self._entries

    def own_content(self) -> list[Content]:
        """The content since the fork, without the marks of turns."""
        marks = TurnBegins | TurnEnds | ToolCalls
        return [entry for entry in self._entries if not isinstance(entry, marks)]

    def check_portable(self) -> None:
        """Raises ``NotSupported`` if another model cannot be given the content: calls of tools are in the
        notation of the model that made them."""
        if any(isinstance(entry, ToolCalls) for entry in self.all()):
            raise NotSupported(
                "fork: the conversation has tool calls, which another model reads only as messages: begin a "
                "state with af.conversation(await s.messages())"
            )

    def turns(self) -> list[TurnContent]:
        """The turns so far, the open one included. Text outside turns belongs to none."""
        found: list[TurnContent] = []
        is_open = False
        for entry in self.all():
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

    def all(self, num_own: int | None = None) -> Iterator[TranscriptEntry]:
        """All entries, including the entries before the fork; of the own entries only the first
        ``num_own``."""
        chain = [(self, len(self._entries) if num_own is None else num_own)]
        while (parent := chain[-1][0]._parent) is not None:
            chain.append((parent, chain[-1][0].num_inherited))
        for transcript, length in reversed(chain):
            yield from islice(transcript._entries, length)
