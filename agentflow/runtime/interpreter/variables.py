"""The variables of one session, and the events that its reader has not received yet.

Events are not queued. ``VariableRecord`` knows the position of the reader, as the records of states do, and
``EventCursor.drain`` makes the events that bring the reader up to date, so text that was generated while it
did not read is sent as one delta. After a broken connection, ``rewind`` moves a record back to the position
that the client reports.

A variable may have more readers (``VariableRecord.reading``). Its text is kept once, and each reader has its
own position and its own ``EventCursor``."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, Protocol

import anyio
import msgspec

from agentflow.errors import AgentflowError, ProtocolError
from agentflow.protocol.bounds.sized import sized
from agentflow.protocol.chat import read_reply
from agentflow.protocol.events import Delta, ErrorInfo, Event, Usage, Value, VarFailed
from agentflow.protocol.growing_text import GrowingText
from agentflow.runtime.limits import (
    GROWING_CHAR_BYTES,
    READER_BYTES,
    MemoryReservation,
    error_bytes,
    value_bytes,
)

MAX_NUMBER = 2**53 - 1
"""The largest number of a state, variable or ticket: every JSON parser represents it exactly."""


def may_be_number(number: int) -> bool:
    """Whether a state, variable or ticket may have this number."""
    return -MAX_NUMBER <= number <= MAX_NUMBER


def check_number(number: int) -> None:
    """Raises ``ProtocolError`` for a number that no state, variable or ticket may have."""
    if not may_be_number(number):
        raise ProtocolError(f"states, variables and tickets have numbers up to {MAX_NUMBER}, not {number}")


class EventSource(Protocol):
    """A source of events that knows which of them the reader has received: a variable, a state, the answers
    to ``GetStats``."""

    def take_events(self) -> list[Event]:
        """The events since the last call."""


class EventCursor:
    """The position of one reader of events: the set of records that have changed since it last called
    ``drain``."""

    def __init__(self) -> None:
        self._changed_records: dict[EventSource, None] = {}  # a dict: an ordered set
        self._changed = anyio.Event()

    def mark(self, record: EventSource) -> None:
        """``record`` has new events."""
        # To the end: a state's ticket is reported after the variables before it.
        self._changed_records.pop(record, None)
        self._changed_records[record] = None
        self.wake()

    def drop(self, record: EventSource) -> None:
        """The reader no longer reads ``record``."""
        self._changed_records.pop(record, None)

    def wake(self) -> None:
        """Ends the current ``wait`` even without new events."""
        self._changed.set()

    async def wait(self) -> None:
        """Waits for new events."""
        await self._changed.wait()

    async def next(self) -> list[Event]:
        """Waits for new events, and drains them."""
        await self.wait()
        return self.drain()

    async def deliver_to(self, receive: Callable[[list[Event]], None]) -> None:
        """Gives all new events to ``receive``, until it is cancelled."""
        while True:
            await self._changed.wait()
            receive(self.drain())

    def drain(self) -> list[Event]:
        """New events, in the order in which their records last changed: from at most ``MAX_DRAINED_RECORDS``
        records, and about ``MAX_DRAINED_CHARS`` characters. If some are left, ``wait`` returns
        immediately."""
        events: list[Event] = []
        records, num_chars = self._changed_records, 0
        for _ in range(MAX_DRAINED_RECORDS):
            if not records or num_chars > MAX_DRAINED_CHARS:
                break
            record = next(iter(records))
            del records[record]
            taken = record.take_events()
            num_chars += sum([len(event.text) for event in taken if isinstance(event, Delta | Value)])
            events += taken
        if not records:
            self._changed = anyio.Event()
        return events


MAX_DRAINED_RECORDS = 250
MAX_DRAINED_CHARS = 4_000_000
MAX_WOKEN = 50
"""The maximum number of ops waiting for a variable that continue in one turn of the event loop."""


Reports = Literal["all", "end", "nothing"]
"""The events of a variable that a reader receives."""


@dataclass(slots=True)
class VariablePosition:
    """The position of one reader in a variable."""

    num_chars: int = 0
    num_reasoning_chars: int = 0
    has_end: bool = False

    def rewind(self, num_chars: int) -> None:
        """Moves back to ``num_chars`` characters, before the end. Reasoning is sent again."""
        self.num_chars, self.num_reasoning_chars, self.has_end = max(0, num_chars), 0, False


class VariableReader:
    """One more reader of a variable. ``VariableRecord.reading`` makes it."""

    def __init__(self, variable: VariableRecord, events: EventCursor, reports: Reports) -> None:
        self._variable = variable
        self._events = events
        self._reports = reports
        self._position = VariablePosition()

    def mark(self, *, is_end: bool) -> None:
        """The variable has more text, or its end."""
        if self._reports == "all" or (is_end and self._reports == "end"):
            self._events.mark(self)

    def rewind(self, num_chars: int) -> None:
        """Like ``VariableRecord.rewind``, for this reader."""
        self._position.rewind(num_chars)
        self._events.mark(self)

    def take_events(self) -> list[Event]:
        return self._variable.events_after(self._position)


_wait_numbers = itertools.count()


class VariableRecord:
    """One variable: its text so far, its end, and the position of the reader of the session's events.
    ``reports``: the events that the reader receives.

    Args:
        var_id: Its number.
        name: Its name.
        events: The session's events.
        reservation: Its memory; None: nothing counts it.
        later: Calls a function in another turn of the event loop.
        is_expected: The client provides the text, and receives only the end.
        is_reply: The text is the notation of a reply.
    """

    def __init__(
        self,
        var_id: int,
        name: str,
        events: EventCursor,
        reservation: MemoryReservation | None,
        later: Callable[[Callable[[], object]], None],
        *,
        is_expected: bool = False,
        is_reply: bool = False,
    ) -> None:
        self.id = var_id
        self.name = name
        self.is_expected = is_expected
        self._is_reply = is_reply
        self._text = GrowingText()
        self._num_held_bytes = 0  # of provided text while it grows
        self._reasoning = GrowingText()
        self.value: Value | None = None
        self.error: AgentflowError | None = None
        self.num_lost_tokens = 0  # that were generated and are in no value
        self.has_ended = False
        # For each waiting op the number of characters for which it waits, and its event; a heap.
        self._waiting: list[tuple[float, int, anyio.Event]] = []
        self._is_waking = False  # in a later turn of the event loop
        self._later = later
        self._content: str | None = None
        self._events = events
        self._reservation = reservation
        self.reports: Reports = "end" if is_expected else "all"
        self._position = VariablePosition()
        self._readers: dict[VariableReader, None] = {}  # other than the session's

    @property
    def text(self) -> str:
        """The text so far."""
        return str(self._text)

    @property
    def num_chars(self) -> int:
        """The length of the text so far."""
        return len(self._text)

    @property
    def reasoning(self) -> str:
        """The reasoning so far."""
        return str(self._reasoning)

    def text_from(self, at: int) -> str:
        """The text so far from character ``at`` on, which may be its end, in time linear in the result."""
        return self._text.part(at)

    @property
    def content(self) -> str:
        """The text of references to the complete variable; for a reply, its prose."""
        if self._content is None:
            self._content = read_reply(self.text).text if self._is_reply else self.text
        return self._content

    def extend(self, delta: str) -> None:
        """Appends text. Has no effect after the end."""
        if self.has_ended:
            return
        self._text.put(self.num_chars, delta)
        if self._waiting and self._waiting[0][0] <= self.num_chars and not self._is_waking:
            self._wake()
        self._mark()

    def provide(self, part: str) -> None:
        """Appends text that the client provides, which counts as memory. ``Overloaded``."""
        if self._reservation is not None:
            num_bytes = GROWING_CHAR_BYTES * len(part)
            self._reservation.add(num_bytes)
            self._num_held_bytes += num_bytes
        self.extend(part)

    def hold_error(self, info: ErrorInfo) -> None:
        """Counts the memory of an error that the client provides. ``Overloaded``."""
        if self._reservation is not None:
            self._reservation.add(sized(info))

    def extend_reasoning(self, delta: str) -> None:
        """Appends reasoning, which will also be in the value."""
        self._reasoning.put(len(self._reasoning), delta)
        self._mark()

    def complete(self, value: Value) -> None:
        """Completes the variable; ``value`` has all of its text. ``Overloaded``."""
        self._release_growing()
        if self._reservation is not None:
            self._reservation.add(value_bytes(value))
        self._text = GrowingText(value.text)
        self.value = value
        self._end()

    def complete_text(self, text: str, reason: str) -> None:
        """Completes the variable with text that was not generated. ``Overloaded``."""
        self.complete(Value(self.id, 0, text, reason, Usage()))

    def fail(self, error: AgentflowError, num_tokens: int = 0) -> None:
        """Ends the variable without a value. Has no effect after its end. ``num_tokens``: that were generated
        for it, if the error has no usage."""
        if not self.has_ended:
            self.num_lost_tokens = num_tokens
            self._text.end()
            self._release_growing()
            if self._reservation is not None:
                self._reservation.count(error_bytes(error, self.text))
            self.error = error
            self._end()

    def _release_growing(self) -> None:
        if self._reservation is not None:
            self._reservation.count(-self._num_held_bytes)
            self._num_held_bytes = 0

    async def wait(self, num_chars: float = math.inf) -> None:
        """Waits for the end, or until the text has ``num_chars`` characters."""
        if not self.has_ended and self.num_chars < num_chars:
            reached = anyio.Event()
            heapq.heappush(self._waiting, (num_chars, next(_wait_numbers), reached))
            await reached.wait()

    def _end(self) -> None:
        self.has_ended = True
        self._reasoning.end()
        if not self._is_waking:
            self._wake()
        self._mark(is_end=True)

    def _mark(self, *, is_end: bool = False) -> None:
        self._mark_own(is_end=is_end)
        for reader in self._readers:
            reader.mark(is_end=is_end)

    def _mark_own(self, *, is_end: bool) -> None:
        if self.reports == "all" or (is_end and self.reports == "end"):
            self._events.mark(self)

    def _wake(self) -> None:
        reached = math.inf if self.has_ended else self.num_chars
        for _ in range(MAX_WOKEN):
            if not self._waiting or self._waiting[0][0] > reached:
                break
            heapq.heappop(self._waiting)[2].set()
        self._is_waking = bool(self._waiting) and self._waiting[0][0] <= reached
        if self._is_waking:
            self._later(self._wake)

    @contextmanager
    def reading(self, events: EventCursor, reports: Reports = "all") -> Iterator[VariableReader]:
        """The scope of one more reader, which receives the events from the first character on in ``events``.
        ``Overloaded``."""
        if self._reservation is not None:
            self._reservation.add(READER_BYTES)
        reader = VariableReader(self, events, reports)
        self._readers[reader] = None
        try:
            reader.mark(is_end=self.has_ended)
            yield reader
        finally:
            del self._readers[reader]  # breaks the cycle of references
            events.drop(reader)
            if self._reservation is not None:
                self._reservation.count(-READER_BYTES)

    def rewind(self, num_chars: int) -> None:
        """The reader of the session's events has received ``num_chars`` characters, and not the end.
        Reasoning is sent again."""
        self._position.rewind(num_chars)
        self._mark_own(is_end=self.has_ended)

    def take_events(self) -> list[Event]:
        return self.events_after(self._position)

    def events_after(self, position: VariablePosition) -> list[Event]:
        """The events since ``position``, which moves forward."""
        if position.has_end:
            return []
        at, position.num_chars = min(position.num_chars, self.num_chars), self.num_chars
        rest = self.text_from(at)
        reasoning_at, position.num_reasoning_chars = position.num_reasoning_chars, len(self._reasoning)
        reasoning = self._reasoning.part(reasoning_at)
        deltas: list[Event] = []
        if rest or reasoning:
            deltas = [Delta(self.id, at, rest, reasoning, reasoning_at if reasoning else 0)]
        if self.error is not None:
            position.has_end = True
            info = ErrorInfo.of(self.error)
            if self.num_lost_tokens and info.usage is None:
                info = msgspec.structs.replace(info, usage=Usage(output_tokens=self.num_lost_tokens))
            return [*deltas, VarFailed(self.id, info)]
        if self.value is not None:
            position.has_end = True
            return [msgspec.structs.replace(self.value, at=at, text=rest)]
        return deltas
