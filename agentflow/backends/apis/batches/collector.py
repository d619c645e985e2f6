"""Answers the calls of a map in batches: collects the calls of a stage, sends them, and reads the results.

A call *parks* until its batch has ended. A stage is complete when nothing can happen before a parked call is
answered: the map begins no more inputs, and each state waits for its call or for a value of another state.

The answers of an input are kept while it may run again: equal requests of its next attempt get them, so that
only failed requests, and those that follow them, are paid again. Requests of a later map find their answers
at the vendor, by the records of the batches.
"""

from __future__ import annotations

import copy
import itertools
import secrets
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

import anyio
import anyio.lowlevel
import msgspec
from anyio.abc import TaskGroup

from agentflow.backends.apis.batches.batch_api import BatchApi, BatchOutcome, BatchState, Candidate
from agentflow.backends.apis.http.api_errors import is_transient
from agentflow.backends.apis.http.event_stream import EventSink
from agentflow.backends.apis.http.file_slots import filled_size
from agentflow.errors import AgentflowError, BadArgument, EngineFailed, Overloaded, RequestRefused, ServerLost
from agentflow.protocol.batches import BatchCounts, BatchNotes, BatchRecord
from agentflow.protocol.images import Image
from agentflow.runtime.backoff import doubled_s

FIRST_POLL_S = 2.0
MAX_POLL_S = 60.0
MAX_FAILED_POLLS: Final = 1_500
"""The polls in a row that may fail: a day without the vendor."""
FIRST_LOOK_S = 0.005
MAX_LOOK_S = 0.25
"""The pause between two looks whether a stage is complete."""
MAX_STAGE_S: Final = 60.0
"""How long a stage waits for a state that does not park its call."""
CANCEL_S: Final = 10.0
"""How long the end of a session may take to cancel batches."""


AnswerT = TypeVar("AnswerT")


@dataclass(eq=False)
class _ParkedCall:
    """A call that waits for its outcome."""

    request_id: str
    path: str
    line: bytes  # with slots for files
    files: tuple[Image, ...] = ()  # of the slots; until the batch was sent
    label: str = ""  # of its input
    ended: anyio.Event = field(default_factory=anyio.Event)
    outcome: BatchOutcome | None = None
    text: str | None = None  # of the answer, as the program got it


@dataclass(eq=False)
class _Input:
    """An input that has not ended.

    Attributes:
        calls: The calls of its latest attempt, by the keys of their requests, without rejected ones.
        has_rejected: Whether an answer of this attempt was rejected.
        answers: The answers that its next attempt gets, by the ids of the requests.
        charged: The ids of the requests that were charged.
    """

    calls: dict[str, _ParkedCall] = field(default_factory=dict)
    has_rejected: bool = False
    answers: dict[str, bytes] = field(default_factory=dict)
    charged: set[str] = field(default_factory=set)


@dataclass(eq=False)
class _Batch:
    """A batch, and the calls that wait for it. ``outcomes``: those that no call has taken."""

    record: BatchRecord
    candidates: list[Candidate] = field(default_factory=list)  # where it may be at the vendor
    calls: dict[str, _ParkedCall] = field(default_factory=dict)
    outcomes: dict[str, BatchOutcome] = field(default_factory=dict)
    state: BatchState = field(default_factory=lambda: BatchState(has_ended=False))
    is_followed: bool = False
    is_over: bool = False  # all outcomes are here, or ``error``
    was_read: bool = False  # by an earlier map
    error: AgentflowError | None = None


class Collector:
    """Sends the calls of one map.

    Args:
        api: The batch endpoints.
        notes: The map's side.
        tasks: Runs the batches.
        max_retries: The most further attempts to send a batch.
    """

    def __init__(
        self,
        api: BatchApi,
        notes: BatchNotes,
        tasks: TaskGroup,
        max_retries: int,
    ) -> None:
        self._api = api
        self._notes = notes
        self._tasks = tasks
        self._max_retries = max_retries
        self._pool: dict[str, _ParkedCall] = {}  # calls of the next batches
        self._num_parked = 0
        self._has_come = anyio.Event()
        self._sent: list[_Batch] = []
        self._by_request: dict[str, _Batch] = {}
        # The ids that no call may take: another one of the same attempt has them, or they failed or were
        # rejected.
        self._taken: set[str] = set()
        self._inputs: dict[str, _Input] = {}  # by label
        for record in notes.records():
            self._taken.update(record.rejected)
            record = msgspec.structs.replace(record, rejected=())
            batch = _Batch(record, was_read=record.is_read)
            if record.batch:
                batch.candidates = [Candidate(record.batch, is_certain=True)]
            self._by_request |= dict.fromkeys(record.requests, batch)
        notes.connect(self)

    async def answer(
        self,
        label: str,
        path: str,
        body: bytes,
        make_sink: Callable[[], EventSink],
        files: tuple[Image, ...] = (),
    ) -> bool:
        """Parks until the request is answered, and reads the answer into a sink.

        Args:
            label: The label of the input.
            path: The path of the request, ``#``, and its key.
            body: Its line in a batch.
            make_sink: Makes the sink.
            files: The files of the body's slots.

        Returns:
            Whether no earlier call was charged for the answer.
        """
        path, _, key = path.partition("#")
        call = _ParkedCall(key, path, body, files, label)
        owner = self._inputs.setdefault(label, _Input())
        owner.calls[key] = call
        self._take(call, next(one for one in _ids(key) if one not in self._taken))
        message = await self._parked(call)
        try:
            sink = make_sink()
            for event in self._api.events(path, message):
                sink.event(event)  # all of them: the usage of the whole answer is charged
            if not sink.is_over:
                sink.close()
        except AgentflowError:
            await self._reject(label, [key])
            raise
        is_new = call.request_id not in owner.charged
        owner.charged.add(call.request_id)
        return is_new

    def note_text(self, label: str, path: str, text: str) -> None:
        """The program gets this text as the answer to a request; the arguments are as in ``answer``."""
        owner = self._inputs.get(label)
        call = None if owner is None else owner.calls.get(path.partition("#")[2])
        if call is not None:
            call.text = text

    async def reject(self, label: str, texts: Collection[str]) -> None:
        """No later attempt at the input takes the answers with these texts. If this attempt has no such
        answer, and none was rejected before, no later attempt takes any of its answers."""
        owner = self._inputs.get(label)
        if owner is None:
            return
        answered = {key: call.text for key, call in owner.calls.items() if call.text is not None}
        found = [key for key, text in answered.items() if text in texts]
        await self._reject(label, found if found or owner.has_rejected else list(answered))

    async def reject_requests(self, label: str, paths: Iterable[str]) -> None:
        """No later attempt at the input takes the answers to these requests."""
        await self._reject(label, [path.partition("#")[2] for path in paths])

    async def _reject(self, label: str, keys: Iterable[str]) -> None:
        owner = self._inputs.get(label)
        if owner is None:
            return
        by_batch: dict[_Batch, list[str]] = {}
        for call in [owner.calls.pop(key) for key in keys if key in owner.calls]:
            owner.has_rejected = True
            owner.answers.pop(call.request_id, None)
            by_batch.setdefault(self._by_request[call.request_id], []).append(call.request_id)
        for batch, ids in by_batch.items():
            await self._notes.keep(msgspec.structs.replace(batch.record, rejected=tuple(ids)))

    def repeat(self, label: str) -> None:
        """The requests of the next attempt get the answers of the last one."""
        owner = self._inputs.get(label)
        if owner is None:
            return
        for call in owner.calls.values():
            if call.ended.is_set() and not isinstance(call.outcome, AgentflowError):
                self._taken.discard(call.request_id)
        owner.calls, owner.has_rejected = {}, False

    def end(self, label: str) -> None:
        """Drops the answers of an input."""
        self._inputs.pop(label, None)

    async def _parked(self, call: _ParkedCall) -> bytes:
        self._num_parked += 1
        try:
            self._place(call)
            await call.ended.wait()
        finally:
            if not call.ended.is_set():  # cancelled
                self._num_parked -= 1
                if self._pool.get(call.request_id) is call:
                    del self._pool[call.request_id]
                call.ended.set()
        if isinstance(call.outcome, bytes):
            return call.outcome
        assert call.outcome is not None
        raise copy.copy(call.outcome)  # calls may share it, and each adds its place

    def _place_again(self, call: _ParkedCall) -> None:
        """Places a call whose request has failed. An earlier map may have sent another attempt."""
        for request_id in _following(call.request_id):
            if request_id not in self._by_request:
                self._by_request.pop(call.request_id, None)
                break
            if request_id not in self._taken:
                self._take(call, request_id)
                break
        self._place(call)

    def _take(self, call: _ParkedCall, request_id: str) -> None:
        """Gives the call a request that no other call has."""
        if request_id != call.request_id:
            call.line = call.line.replace(f'"{call.request_id}"'.encode(), f'"{request_id}"'.encode(), 1)
            call.request_id = request_id
        self._taken.add(request_id)

    def _place(self, call: _ParkedCall) -> None:
        """Answers the call if its answer is kept. Otherwise, puts it into the batch that was sent with its
        request, or into the next one."""
        owner = self._inputs.get(call.label)
        if owner is not None and (answer := owner.answers.get(call.request_id)) is not None:
            self._end(call, answer)
            return
        batch = self._by_request.get(call.request_id)
        if batch is None:
            self._pool[call.request_id] = call
            self._has_come.set()
            return
        batch.calls[call.request_id] = call
        if batch.is_over:
            self._settle(batch, [call])
        elif not batch.is_followed:
            batch.is_followed = True
            self._sent.append(batch)
            self._tasks.start_soon(self._run, batch, [])

    async def run(self, num_calls: Callable[[], int]) -> None:
        """Sends each stage when it is complete, until it is cancelled.

        Args:
            num_calls: The number of calls of the states that do not wait for values of others, if each of
                these waits for its calls.
        """
        while True:
            await self._has_come.wait()
            await self._wait_for_stage(num_calls)
            calls, self._pool, self._has_come = self._pool, {}, anyio.Event()
            for part in self._parts(calls.values()):
                record = BatchRecord(
                    secrets.token_hex(16), tuple([call.request_id for call in part]), time.time()
                )
                batch = _Batch(record, calls={call.request_id: call for call in part}, is_followed=True)
                self._by_request |= dict.fromkeys(record.requests, batch)
                self._sent.append(batch)
                self._tasks.start_soon(self._run, batch, part)

    async def _wait_for_stage(self, num_calls: Callable[[], int]) -> None:
        """Waits until each active state has parked its calls."""
        look_s, num_parked, since_s = FIRST_LOOK_S, 0, anyio.current_time()
        while self._pool:
            if self._notes.is_fed:
                if num_calls() <= self._num_parked:
                    return
                # Whatever a state may be busy with: an early batch is better than none.
                if num_parked == self._num_parked and anyio.current_time() - since_s > MAX_STAGE_S:
                    return
            if num_parked != self._num_parked or not self._notes.is_fed:
                num_parked, since_s = self._num_parked, anyio.current_time()
            await _pause(look_s)
            look_s = min(MAX_LOOK_S, 2 * look_s)

    def _parts(self, calls: Iterable[_ParkedCall]) -> Iterator[list[_ParkedCall]]:
        """The calls in batches, each of one path and within the vendor's limits."""
        by_path: dict[str, list[_ParkedCall]] = {}
        for call in calls:
            by_path.setdefault(call.path, []).append(call)
        for group in by_path.values():
            part: list[_ParkedCall] = []
            num_bytes = 0
            for call in group:
                size = filled_size(call.line) + 1
                if part and (len(part) >= self._api.max_requests or num_bytes + size > self._api.max_bytes):
                    yield part
                    part, num_bytes = [], 0
                part.append(call)
                num_bytes += size
            yield part

    async def _run(self, batch: _Batch, calls: list[_ParkedCall]) -> None:
        """Sends the batch, unless it was sent by an earlier map, and waits for its outcomes."""
        try:
            if calls:
                await self._send(batch, calls)
            elif not batch.candidates:
                batch.candidates = await self._found(batch.record)
            if await self._follow(batch):
                await self._keep(batch, batch.record.batch, is_read=True)
            else:
                self._release(batch)  # the vendor never had it
                return
        except AgentflowError as error:
            batch.error = error
            if isinstance(error, BadArgument) and batch.record.batch and not calls:  # not found
                batch.error = RequestRefused(
                    f"batch {batch.record.batch} is not at the vendor any more: to send its requests again, "
                    f"remove the map's file .batches ({error})",
                    param="resume",
                )
        except Exception as error:
            batch.error = EngineFailed(f"a batch failed because of a fault of the backend: {error!r}")
            batch.error.__cause__ = error
        batch.is_over = True
        self._show()
        self._settle(batch, list(batch.calls.values()))

    async def _send(self, batch: _Batch, calls: list[_ParkedCall]) -> None:
        await self._notes.keep(batch.record)
        lines = [call.line for call in calls]
        num_failed = 0
        while True:
            try:
                # Without a kept record, the end of the session must know the batch, to cancel it.
                created = await self._api.create(
                    calls[0].path, lines, batch.record.tag, is_shielded=not self._notes.is_kept
                )
                batch.candidates = [Candidate(created, is_certain=True)]
                break
            except AgentflowError as error:
                num_failed += 1
                if not is_transient(error):
                    raise
                if isinstance(error, ServerLost | EngineFailed):
                    # The vendor may have the batch, although its answer was lost.
                    batch.candidates = await self._found(batch.record)
                    if batch.candidates:
                        break
                if num_failed > self._max_retries:
                    raise
                pause_s = getattr(error, "retry_after_s", None)
                await _pause(doubled_s(1.0, MAX_POLL_S, num_failed) if pause_s is None else pause_s)
        if batch.candidates[0].is_certain:
            for call in calls:
                call.line, call.files = b"", ()  # no other batch will have it
            await self._keep(batch, batch.candidates[0].batch)
        self._show()

    async def _found(self, record: BatchRecord) -> list[Candidate]:
        """Where a batch may be at the vendor, whose answer to it was lost."""

        async def find() -> Sequence[Candidate]:
            return await self._api.find(record)

        found = await self._repeated(find)
        known = {one.record.batch for one in (*self._by_request.values(), *self._sent)}
        return [one for one in found if one.batch not in known]

    async def _follow(self, batch: _Batch) -> bool:
        """Waits for the end of the batch, and takes its outcomes. False if the vendor does not have it."""
        for candidate in list(batch.candidates):
            await self._wait_for_end(batch, candidate.batch)
            if batch.state.failure is not None:
                await self._keep(batch, candidate.batch, is_read=True)
                raise batch.state.failure
            outcomes = await self._outcomes(candidate.batch, batch.state)
            if candidate.is_certain or not outcomes.keys().isdisjoint(batch.record.requests):
                batch.outcomes = outcomes
                if not batch.record.batch:
                    await self._keep(batch, candidate.batch)
                return True
        return False

    async def _outcomes(self, batch_id: str, state: BatchState) -> dict[str, BatchOutcome]:
        outcomes: dict[str, BatchOutcome] = {}

        async def read() -> None:
            await self._api.read(batch_id, state, outcomes.__setitem__)

        await self._repeated(read)
        return outcomes

    async def _wait_for_end(self, batch: _Batch, batch_id: str) -> None:
        async def poll() -> BatchState:
            return await self._api.state(batch_id)

        num_polls = 0
        while True:
            num_polls += 1
            batch.state = await self._repeated(poll, num_polls)
            self._show()
            if batch.state.has_ended:
                return
            await _pause(doubled_s(FIRST_POLL_S, MAX_POLL_S, num_polls))

    async def _repeated(self, ask: Callable[[], Awaitable[AnswerT]], num_asked: int = 1) -> AnswerT:
        """The answer of a vendor that may be out of reach for a day. The batch is paid: to give up would mean
        to pay for it again.

        Args:
            ask: Asks the vendor.
            num_asked: The number of answers before, which sets the pauses.
        """
        num_failed = 0
        while True:
            try:
                return await ask()
            except AgentflowError as error:
                num_failed += 1
                if not is_transient(error) or num_failed > MAX_FAILED_POLLS:
                    raise
                wait_s = doubled_s(FIRST_POLL_S, MAX_POLL_S, num_asked + num_failed - 1)
                if isinstance(error, Overloaded) and error.retry_after_s is not None:
                    wait_s = max(wait_s, error.retry_after_s)
            await _pause(wait_s)

    async def _keep(self, batch: _Batch, batch_id: str, *, is_read: bool = False) -> None:
        batch.record = msgspec.structs.replace(batch.record, batch=batch_id, is_read=is_read)
        await self._notes.keep(batch.record)

    def _settle(self, batch: _Batch, calls: Iterable[_ParkedCall]) -> None:
        """Gives calls the outcomes of a batch that is over."""
        # An error of this map, on the way to the outcomes, says nothing about them.
        is_known = batch.was_read and batch.error in (None, batch.state.failure)
        for call in calls:
            batch.calls.pop(call.request_id, None)
            outcome = batch.outcomes.pop(call.request_id, None)
            if isinstance(outcome, bytes):
                self._keep_answer(call, outcome, was_charged=batch.was_read)
            if outcome is None:
                outcome = batch.error or batch.state.missing
            if call.ended.is_set():  # cancelled
                call.outcome = outcome
                continue
            if isinstance(outcome, AgentflowError) and is_known:
                # An earlier map has reported that failure.
                self._place_again(call)
                continue
            self._end(call, outcome or EngineFailed("a batch ended without an outcome"))

    def _end(self, call: _ParkedCall, outcome: BatchOutcome) -> None:
        call.outcome = outcome
        call.line, call.files = b"", ()
        self._num_parked -= 1
        call.ended.set()

    def _keep_answer(self, call: _ParkedCall, answer: bytes, *, was_charged: bool) -> None:
        """Keeps the answer for the next attempt, also if the call was cancelled."""
        owner = self._inputs.get(call.label)
        if owner is None:
            return
        if was_charged:
            owner.charged.add(call.request_id)
        if self._notes.repeats:
            owner.answers[call.request_id] = answer

    def _release(self, batch: _Batch) -> None:
        """The calls go into the next batch."""
        self._sent.remove(batch)
        for request_id in batch.record.requests:
            if self._by_request.get(request_id) is batch:
                del self._by_request[request_id]
        for call in batch.calls.values():
            if not call.ended.is_set():
                self._place_again(call)

    def _show(self) -> None:
        running = [batch for batch in self._sent if not batch.is_over]
        self._notes.show(
            BatchCounts(
                len(self._sent),
                sum([len(batch.record.requests) for batch in running]),
                sum([batch.state.num_done for batch in running]),
                sum([batch.state.num_failed for batch in running]),
            )
        )

    async def close(self) -> None:
        """Cancels the batches that run, unless the map's records outlive it."""
        if self._notes.is_kept:
            return
        with anyio.CancelScope(shield=True), anyio.move_on_after(CANCEL_S):
            for batch in self._sent:
                if not batch.is_over and batch.record.batch:
                    try:
                        await self._api.cancel(batch.record.batch)
                    except AgentflowError:
                        continue  # it has ended meanwhile, or the vendor cannot be reached


def _ids(key: str) -> Iterator[str]:
    """The ids of requests that are equal to the one with this key, in the order in which calls take them."""
    identity = key.rpartition("-")[0]
    return (f"{identity}-{number}" for number in itertools.count(1))


def _following(request_id: str) -> Iterator[str]:
    """The ids of the next equal requests."""
    identity, _, number = request_id.rpartition("-")
    return (f"{identity}-{following}" for following in itertools.count(int(number) + 1))


async def _pause(pause_s: float) -> None:
    await anyio.sleep(pause_s)  # noqa: TID251  # a vendor's batch takes its time
