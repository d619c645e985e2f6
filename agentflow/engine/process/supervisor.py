"""Keeps an engine process alive: starts it, ends it when it hangs, and starts it again.

To its client it is one engine that never forgets a request: what a dead process had not finished, the
next one runs on from the ids that were generated already. After ``MAX_DEATHS_IN_A_ROW`` the engine is *down*:
requests fail at once, and further processes are started at growing intervals until one loads.

How long an engine process may stay silent: deadlines of loads and steps.

A process that has died closes its socket. One that hangs (stopped, a step or a load that never ends) keeps it
open and sends nothing, so the supervisor measures. The engine announces each forward pass with its number of
rows; the next frame says that it has run. What a pass may take follows from what passes of its size took
before. While nothing is owed nothing is measured, and an idle process costs nothing.
"""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

import anyio
import anyio.to_thread
from anyio.abc import TaskStatus
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from msgspec.structs import replace

from agentflow.engine.client import EngineClient
from agentflow.engine.process.child import ChildProcess, to_frame
from agentflow.engine.process.ipc import (
    Abort,
    CloseState,
    EngineStats,
    Failed,
    Finished,
    FromEngine,
    Loaded,
    LoadFailed,
    NeedPayload,
    Progress,
    Start,
    StatsRequest,
    StepBegins,
    Submit,
    ToEngine,
    answer_decoder,
    from_engine_decoder,
)
from agentflow.engine.process.request_journal import RequestJournal, aborted
from agentflow.engine.process.shutdown_budget import ShutdownBudget
from agentflow.engine.process.worker import LAST_STEP_S
from agentflow.engine.text.tokenizer import Tokenizer
from agentflow.errors import AgentflowError, BadModelFolder, EngineDown, EngineFailed, from_code
from agentflow.runtime.task_group import open_task_group

# How long an engine may take to end by itself: its last step, and then its memory.
END_S = LAST_STEP_S + 2.0


class EngineChild(ChildProcess):
    """One engine process, from ``start`` to ``end``."""

    @classmethod
    def start(cls, start: Start) -> EngineChild:
        """A process that begins to load."""
        return cls.run("agentflow.engine.process.worker", start)


# A step may take so many times what the slowest one of its size took lately.
STEP_FACTOR = 20.0
# Of each step the slowest one counts for less: a single outlier is forgotten after some dozens.
_FADE = 0.9


@dataclass(frozen=True, slots=True)
class Deadlines:
    """``load_s``: from the start of a process until it is ready for requests. ``step_s``: of a step at least,
    however fast others were. ``first_step_s``: of the first step of each size, which may compile kernels and
    capture graphs; also the longest that any step may take. ``sleep``: how time passes, for tests.

    All are measured in slices of ``slice_s``, of which each must pass on its own: time in which the server
    itself was stopped counts as one slice at most.
    """

    load_s: float = 600.0
    step_s: float = 30.0
    first_step_s: float = 300.0
    sleep: Callable[[float], Awaitable[None]] = anyio.sleep  # noqa: TID251  to measure it is its purpose

    @property
    def slice_s(self) -> float:
        return self.step_s / 4

    async def passes(self, limit_s: float, is_over: Callable[[], bool]) -> bool:
        """Waits for ``limit_s`` and returns True; False as soon as a slice ends with ``is_over()``."""
        waited_s = 0.0
        while waited_s < limit_s:
            await self.sleep(self.slice_s)
            if is_over():
                return False
            waited_s += self.slice_s
        return True


class StepPace:
    """What the steps of one process took, by size: numbers of rows up to the same power of two."""

    def __init__(self, deadlines: Deadlines) -> None:
        self._deadlines = deadlines
        self._slowest_s: dict[int, float] = {}
        self._size: int | None = None  # of the step that runs; None: none is known to
        self._since = 0.0

    def received(self, now_s: float, num_rows: int | None) -> None:
        """A frame came at ``now_s``: the step that was announced before has run, and with ``num_rows`` the
        next one begins."""
        if self._size is not None:
            before_s = self._slowest_s.get(self._size, 0.0)
            self._slowest_s[self._size] = max(now_s - self._since, before_s * _FADE)
        self._size = None if num_rows is None else (num_rows - 1).bit_length()
        self._since = now_s

    @property
    def limit_s(self) -> float:
        """How long the next frame may take."""
        limits = self._deadlines
        if not self._slowest_s or (self._size is not None and self._size not in self._slowest_s):
            return limits.first_step_s
        slowest_s = 0.0 if self._size is None else self._slowest_s[self._size]
        return min(max(limits.step_s, STEP_FACTOR * slowest_s), limits.first_step_s)


logger = logging.getLogger(__name__)

# Deaths in a row, without a completed step or so much peace between them, after which the engine is down.
MAX_DEATHS_IN_A_ROW = 3
PEACE_S = 60.0
# Before a start after two deaths in a row, twice as long after each more, and so long at most: the cause may
# need time to pass.
FIRST_DELAY_S = 1.0
MAX_DELAY_S = 60.0
# How long a process whose socket has ended may take to say how it ended.
LAST_WORDS_S = 1.0

# Constraints that the process was sent, remembered by their keys.
MAX_SENT_KEYS = 10_000

RESTARTING = "the engine is restarting: it answers again in a few seconds"


def restart_delay_s(num_deaths: int) -> float:
    """The delay before the next start, after so many deaths in a row.

    >>> [restart_delay_s(n) for n in (0, 1, 2, 3, 7, 8, 5000)]
    [0.0, 0.0, 1.0, 2.0, 32.0, 60.0, 60.0]
    """
    if num_deaths < 2:
        return 0.0
    return min(FIRST_DELAY_S * 2.0 ** min(num_deaths - 2, 16), MAX_DELAY_S)


@asynccontextmanager
async def supervised_engine(
    start: Start,
    load_tokenizer: Callable[[], Tokenizer],
    *,
    max_unfinished: int | None = None,
    deadlines: Deadlines | None = None,
    exits_when_down: bool = False,
    shutdown: ShutdownBudget | None = None,
) -> AsyncIterator[EngineClient]:
    """An engine in a process of its own for as long as the scope lasts. What ``start`` loads fails to
    load with is raised here, as the same error where it is one of agentflow's; ``EngineFailed`` where the
    process dies ``MAX_DEATHS_IN_A_ROW`` times before it has loaded once, or (``exits_when_down``) later.
    ``shutdown``: what the end of the process is timed by."""
    supervisor = EngineSupervisor(
        start,
        load_tokenizer,
        max_unfinished,
        deadlines=deadlines or Deadlines(),
        exits_when_down=exits_when_down,
        shutdown=shutdown or ShutdownBudget(0.0),
    )
    async with open_task_group() as group:
        client: EngineClient = await group.start(supervisor.run)
        try:
            yield client
        finally:
            group.cancel_scope.cancel()


class _Unusable(Exception):
    """A process that runs and is to be replaced. The message says how, after "the engine"."""


class _Hung(_Unusable):
    """It has sent nothing for longer than what it does may take."""


class _LoadError(_Unusable):
    """It cannot load its engine, or not the one that it should. ``error``: as it is raised at a server's
    start."""

    def __init__(self, error: AgentflowError | ModuleNotFoundError) -> None:
        super().__init__(f"cannot be loaded again ({error})")
        self.error = error


def _load_error(answer: LoadFailed) -> _LoadError:
    if answer.missing_package is not None:
        return _LoadError(ModuleNotFoundError(answer.message, name=answer.missing_package))
    return _LoadError(from_code(answer.code, answer.message))


class EngineSupervisor:
    """An ``EngineLink`` to one process after the other. Use ``supervised_engine`` to make one; all of it
    belongs to the event loop's thread. What waits to be written is bounded by what is unfinished."""

    def __init__(
        self,
        start: Start,
        load_tokenizer: Callable[[], Tokenizer],
        max_unfinished: int | None,
        *,
        deadlines: Deadlines,
        exits_when_down: bool,
        shutdown: ShutdownBudget,
    ) -> None:
        self._start = start
        self._load_tokenizer = load_tokenizer
        self._max_unfinished = max_unfinished
        self._deadlines = deadlines
        self._exits_when_down = exits_when_down
        self._shutdown = shutdown
        self._client: EngineClient | None = None
        self._child: EngineChild | None = None
        self._outgoing: MemoryObjectSendStream[bytes] | None = None
        self._ledger = RequestJournal()
        self._reports: set[int] = set()
        self._sent_keys: set[str] = set()  # of the constraints that this process has been sent
        self._deaths = 0  # in a row, of unknown cause
        self._convictions = 0  # in a row
        self._down_because: str | None = None
        self._loaded_at = math.inf
        self._pace = StepPace(deadlines)
        self._num_frames = 0  # that this process sent
        self._has_sent = anyio.Event()
        self.restarts = 0

    @property
    def pid(self) -> int | None:
        """Of the process there is now, loading or loaded; None between two."""
        return None if self._child is None else self._child.pid

    def send(self, message: ToEngine) -> None:
        """Accepts a message whether or not a process is running. ``EngineDown`` for a ``StatsRequest``
        without one, and for a ``Submit`` while the engine is down."""
        match message:
            case Submit() if self._down_because is not None:
                raise EngineDown(self._down_because)
            case Submit():
                self._ledger.add(message)
                self._forward()
            case Abort():
                if self._ledger.abort(message.request_id) and self._outgoing is not None:
                    self._post(message)
                else:
                    self._hand_over([aborted(message.request_id)])
                    self._forward()  # it may have been the one that others waited for
            case CloseState():
                if self._outgoing is not None:
                    self._post(message)  # a new process keeps nothing for any state
            case StatsRequest() if self._outgoing is None:
                raise EngineDown(self._down_because or RESTARTING)
            case StatsRequest():
                self._reports.add(message.ticket)
                self._post(message)

    async def run(self, *, task_status: TaskStatus[EngineClient]) -> None:
        """Until cancelled; started with the client once the first process has loaded. EngineFailed where that
        fails, or where the engine is down and the server is to exit then."""
        try:
            while True:
                how = await self._live(task_status)
                self.restarts += 1
                num_deaths = max(self._deaths, self._convictions)
                delay_s = restart_delay_s(num_deaths)
                logger.error(
                    "the engine %s; %d unfinished requests; it is started again in %g s",
                    how,
                    len(self._ledger),
                    delay_s,
                )
                if num_deaths >= MAX_DEATHS_IN_A_ROW:
                    if self._client is None or self._exits_when_down:
                        raise EngineFailed(f"the engine {how}; it died {num_deaths} times in a row")
                    self._go_down(num_deaths)
                if delay_s:
                    await self._deadlines.sleep(delay_s)
        finally:
            if self._client is not None:
                self._client.end_all("the engine has stopped")

    def _go_down(self, num_deaths: int) -> None:
        why = (
            f"the engine is down: it died {num_deaths} times in a row and is started again; the log says more"
        )
        self._down_because = why
        self._hand_over(self._ledger.fail_all(why))

    async def _live(self, task_status: TaskStatus[EngineClient]) -> str:
        """One process, from its start until it has ended. Returns how it ended."""
        self._loaded_at = math.inf
        try:
            child = EngineChild.start(self._start)
        except OSError as error:
            self._bury()
            return f"cannot be started ({error})"
        self._child = child
        unusable: _Unusable | None = None
        grace_s: float | None = None  # where this is cancelled: what the server's end has left for it
        try:
            await self._load(child, task_status)
            await self._converse(child)
        except (EOFError, _Unusable) as error:
            unusable = error if isinstance(error, _Unusable) else None
            grace_s = 0.0 if isinstance(error, _Hung) else LAST_WORDS_S
            self._bury()
        finally:
            how = await child.end(self._shutdown.take(END_S) if grace_s is None else grace_s)
            self._child = None
        if isinstance(unusable, _LoadError) and self._client is None:
            raise unusable.error
        return how if unusable is None else str(unusable)

    async def _load(self, child: EngineChild, task_status: TaskStatus[EngineClient]) -> None:
        """Until the process is ready. ``_Hung``; ``_LoadError``, also where it has another model."""
        tokenizer: Tokenizer | None = None
        frames: list[bytes] = []
        async with open_task_group() as group:
            group.start_soon(self._expire, self._deadlines.load_s, group.cancel_scope)
            if self._client is None:  # while the process loads the model
                tokenizer = await anyio.to_thread.run_sync(self._load_tokenizer)
            while not frames:
                frames = await child.receive()
            group.cancel_scope.cancel()
        if not frames:
            raise _Hung(f"hung: it had not loaded its model after {self._deadlines.load_s:g} s")
        answer = answer_decoder.decode(frames[0])
        if isinstance(answer, LoadFailed):
            raise _load_error(answer)
        self._check_same(answer, tokenizer)
        self._loaded_at = anyio.current_time()
        if tokenizer is not None:
            self._client = EngineClient(self, answer.info, tokenizer, max_unfinished=self._max_unfinished)
            task_status.started(self._client)

    def _check_same(self, loaded: Loaded, tokenizer: Tokenizer | None) -> None:
        """Requests are replayed as token ids: those of another model or vocabulary would be other texts."""
        if self._client is not None:
            tokenizer = self._client.tokenizer
            if loaded.info != self._client.info:
                raise _LoadError(BadModelFolder("the model is not the one that was loaded before"))
        if tokenizer is not None and loaded.tokenizer != tokenizer.fingerprint:
            raise _LoadError(BadModelFolder("the tokenizer is not the one that was loaded before"))

    async def _converse(self, child: EngineChild) -> None:
        """Until the process dies (EOFError) or hangs (``_Hung``)."""
        self._sent_keys.clear()
        self._pace = StepPace(self._deadlines)
        self._num_frames = 0
        self._down_because = None
        outgoing, to_write = anyio.create_memory_object_stream[bytes](math.inf)
        self._outgoing = outgoing
        try:
            with outgoing, to_write:
                self._forward()
                async with open_task_group() as group:
                    group.start_soon(_write, child, to_write)
                    group.start_soon(self._watch, group.cancel_scope)
                    while True:
                        for frame in await child.receive():
                            self._num_frames += 1
                            self._hear(from_engine_decoder.decode(frame))
        finally:
            self._outgoing = None
        raise _Hung(f"hung: it was silent for {self._pace.limit_s:g} s with requests to answer")

    async def _expire(self, limit_s: float, scope: anyio.CancelScope) -> None:
        await self._deadlines.passes(limit_s, lambda: False)
        scope.cancel()

    async def _watch(self, scope: anyio.CancelScope) -> None:
        """Cancels ``scope`` when the process owes an answer and is silent for longer than a step may take."""
        while True:
            if not self._is_owed:
                self._has_sent = anyio.Event()
                await self._has_sent.wait()
                continue
            has_answered = partial(self._has_answered, self._num_frames)
            if await self._deadlines.passes(self._pace.limit_s, has_answered):
                scope.cancel()
                return

    def _has_answered(self, num_frames: int) -> bool:
        """Since it had sent so many frames, or there is nothing to answer any more."""
        return self._num_frames != num_frames or not self._is_owed

    @property
    def _is_owed(self) -> bool:
        return self._ledger.is_owed or bool(self._reports)

    def _hear(self, messages: list[FromEngine]) -> None:
        last = messages[-1] if messages else None
        num_rows = last.num_tokens if isinstance(last, StepBegins) else None
        self._pace.received(anyio.current_time(), num_rows)
        for position, message in enumerate(messages):
            match message:
                case EngineStats():
                    self._reports.discard(message.ticket)
                    messages[position] = replace(message, restarts=self.restarts)
                    continue
                case Progress() | Finished():
                    self._deaths = self._convictions = 0
                case NeedPayload():
                    self._send_whole(message.request_id)
            self._ledger.hear(message)
        self._hand_over(messages)
        self._forward()

    def _send_whole(self, request_id: int) -> None:
        """Once more, with the payload of its constraint."""
        submit = self._ledger.again(request_id)
        if submit is None:
            self._hand_over([aborted(request_id)])
        elif self._outgoing is not None:
            self._post(submit)

    def _bury(self) -> None:
        """The process is dead: what waits for nothing else ends, and the other requests wait for the next
        process."""
        if anyio.current_time() - self._loaded_at >= PEACE_S:
            self._deaths = self._convictions = 0
        ended, is_convicted = self._ledger.bury()
        if is_convicted:
            self._convictions += 1
        else:
            self._deaths += 1
        ended += [Failed(ticket, EngineDown.code, RESTARTING) for ticket in self._reports]
        self._reports.clear()
        self._hand_over(ended)

    def _forward(self) -> None:
        if self._outgoing is not None:
            for submit in self._ledger.release():
                self._post(self._with_news_only(submit))

    def _with_news_only(self, submit: Submit) -> Submit:
        """Without the payload of a constraint that this process was sent already: it may be megabytes. If it
        has it no longer, it says so."""
        constraint = submit.constraint
        if constraint is None:
            return submit
        if constraint.key in self._sent_keys:
            return replace(submit, constraint=replace(constraint, payload=b""))
        if len(self._sent_keys) >= MAX_SENT_KEYS:
            self._sent_keys.clear()
        self._sent_keys.add(constraint.key)
        return submit

    def _post(self, message: ToEngine) -> None:
        assert self._outgoing is not None
        self._outgoing.send_nowait(to_frame(message))
        self._has_sent.set()

    def _hand_over(self, messages: Sequence[FromEngine]) -> None:
        if self._client is not None:
            self._client.receive(messages)


async def _write(child: EngineChild, to_write: MemoryObjectReceiveStream[bytes]) -> None:
    try:
        async for frame in to_write:
            await child.send(frame)
    except OSError:
        pass  # it died, which the reader hears too
