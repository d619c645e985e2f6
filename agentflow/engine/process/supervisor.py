"""Keeps an engine process alive: starts it, kills it when it hangs, and replaces it when it dies.

The client sees one engine that never loses a request: the next process continues the requests that a dead one
had not finished, from the ids that were already generated. After ``MAX_DEATHS_IN_A_ROW`` the engine is
*down*: requests fail immediately, and new processes start at growing intervals until one loads.

The socket of a process that died closes. One that hangs is found by its deadlines (``deadlines``). Without
unfinished requests nothing is measured.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import anyio
import anyio.to_thread
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from msgspec.structs import replace

from agentflow.engine.client import EngineClient
from agentflow.engine.machine.child_process import to_frame
from agentflow.engine.media_run import PreparedMedium
from agentflow.engine.messages import (
    Abort,
    AdapterLoaded,
    BlocksRequest,
    Charges,
    CloseState,
    DropMedium,
    EngineSnapshot,
    EngineStats,
    Failed,
    Finished,
    FromEngine,
    KeepMedium,
    LoadAdapter,
    Loaded,
    LoadFailed,
    Logged,
    NeedPayload,
    NodeTokens,
    Placed,
    Progress,
    Start,
    StepBegins,
    Stop,
    ToEngine,
    UnloadAdapter,
    answer_decoder,
    from_engine_decoder,
)
from agentflow.engine.process.child import Child, StartChild, start_process
from agentflow.engine.process.deadlines import Deadlines, StepPace
from agentflow.engine.process.medium_parts import medium_parts
from agentflow.engine.process.request_journal import RequestJournal, Unfinished, aborted
from agentflow.engine.process.shutdown_budget import ShutdownBudget
from agentflow.engine.process.worker import LAST_STEP_S
from agentflow.engine.submit import Submit
from agentflow.engine.text.tokenizer import Tokenizer
from agentflow.errors import AgentflowError, BadModelFolder, EngineDown, EngineFailed, from_code
from agentflow.runtime.task_group import open_task_group

# The time for an engine to end by itself: for its last step, and for freeing its memory.
END_S = LAST_STEP_S + 2.0


logger = logging.getLogger(__name__)

# The engine is down after this many deaths in a row, without a completed step or PEACE_S between them.
MAX_DEATHS_IN_A_ROW = 3
PEACE_S = 60.0
# The delay before a restart after two deaths in a row. It doubles with each further death, up to MAX_DELAY_S:
# the cause may be temporary.
FIRST_DELAY_S = 1.0
MAX_DELAY_S = 60.0
# The time for a process whose socket has closed to exit by itself, so that its exit code is known.
LAST_WORDS_S = 1.0

# The most keys of sent constraints to remember; all are dropped when there are this many.
MAX_SENT_KEYS = 10_000

# The client's tickets begin at 1; the tickets of adapters that are loaded again are negative.
_FIRST_RELOAD = -1_000_000

RESTARTING = "the engine is restarting: it answers again in a few seconds"


def restart_delay_s(num_deaths: int) -> float:
    """Returns the seconds until the next start, after ``num_deaths`` deaths in a row.

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
    start_child: StartChild = start_process,
) -> AsyncIterator[EngineClient]:
    """Runs an engine in a separate process within the scope. An error of the first load is raised here, as
    the same class if it is one of agentflow's.

    Args:
        start: how to load the engine.
        load_tokenizer: runs in a thread while the process loads the model.
        max_unfinished: the most unfinished requests; None: no limit.
        deadlines: the time limits of the process; None: the defaults.
        exits_when_down: raise ``EngineFailed`` when the engine is down.
        shutdown: limits the time to end the process.
        start_child: starts the process.

    Raises:
        EngineFailed: the process died ``MAX_DEATHS_IN_A_ROW`` times before it has loaded once, or at any time
            if ``exits_when_down``.
    """
    supervisor = EngineSupervisor(
        start,
        deadlines=deadlines or Deadlines(),
        exits_when_down=exits_when_down,
        shutdown=shutdown or ShutdownBudget(0.0),
        start_child=start_child,
    )
    async with open_task_group() as group:
        group.start_soon(supervisor.run)
        try:
            tokenizer = await anyio.to_thread.run_sync(prepared, load_tokenizer)
            loaded = await supervisor.loaded()
            check_tokenizer(loaded, tokenizer)
            client = EngineClient(supervisor, loaded.info, tokenizer, max_unfinished=max_unfinished)
            supervisor.receiver = client
            yield client
        finally:
            group.cancel_scope.cancel()


def prepared(load_tokenizer: Callable[[], Tokenizer]) -> Tokenizer:
    """Loads a tokenizer, and makes it ready. Takes a second for a large one."""
    tokenizer = load_tokenizer()
    tokenizer.prepare()
    return tokenizer


def check_tokenizer(loaded: Loaded, tokenizer: Tokenizer) -> None:
    """Raises ``BadModelFolder`` if the engine has another tokenizer: token ids would mean other text."""
    if loaded.tokenizer != tokenizer.identity:
        raise BadModelFolder("the tokenizer differs from the one that was loaded before")


class Receiver(Protocol):
    """Gets the messages of a supervised engine: an ``EngineClient``, or the receiver of one of several
    engines. Called in the event loop's thread."""

    def receive(self, messages: Sequence[FromEngine]) -> None:
        """The messages of one step."""

    def end_all(self, why: str) -> None:
        """The engine has ended; no message follows."""


class _Unusable(Exception):
    """A running process must be replaced. The message completes the sentence "the engine …"."""


class _Hung(_Unusable):
    """The process was silent for longer than its deadline."""


class _Replaced(_Unusable):
    """The process is replaced on request."""

    def __init__(self) -> None:
        super().__init__("is replaced")


class _LoadError(_Unusable):
    """The process cannot load its engine, or loaded another one. ``error``: the exception for the caller of
    ``supervised_engine``."""

    def __init__(self, error: AgentflowError | ModuleNotFoundError) -> None:
        super().__init__(f"cannot be loaded again ({error})")
        self.error = error


@dataclass(slots=True, eq=False)
class _Adapter:
    """A load of an adapter, which each new process repeats."""

    name: str
    folder: str
    identity: str
    is_loaded: bool = True  # by this process


def _log(lines: Sequence[object]) -> None:
    """Logs the lines that the process has logged."""
    for line in lines:
        if isinstance(line, Logged):
            logging.getLogger(line.logger).log(line.level, "%s", line.text)


def _load_error(answer: LoadFailed) -> _LoadError:
    if answer.missing_package is not None:
        return _LoadError(ModuleNotFoundError(answer.message, name=answer.missing_package))
    return _LoadError(from_code(answer.code, answer.message))


class EngineSupervisor:
    """An ``EngineLink`` to the current process, which it replaces when it dies. ``receiver`` gets its
    messages; set it when ``loaded`` has returned. All methods run in the event loop's thread. The number of
    unfinished requests bounds the data that waits to be written."""

    def __init__(
        self,
        start: Start,
        *,
        deadlines: Deadlines,
        exits_when_down: bool,
        shutdown: ShutdownBudget,
        start_child: StartChild = start_process,
        name: str = "the engine",
    ) -> None:
        self.receiver: Receiver | None = None
        self.on_change: Callable[[], object] | None = None
        """Called when ``is_ready`` or ``down_because`` has changed, before queued requests are sent or
        failed."""
        self.down_because: str | None = None
        """Why requests fail immediately; None if they do not."""
        self._start = start
        self._name = name  # for messages
        self._deadlines = deadlines
        self._exits_when_down = exits_when_down
        self._shutdown = shutdown
        self._start_child = start_child
        self._loaded: Loaded | None = None  # of the first process
        self._load_failure: AgentflowError | ModuleNotFoundError | None = None
        self._first_load = anyio.Event()  # it ended
        self._child: Child | None = None
        self._outgoing: MemoryObjectSendStream[bytes] | None = None
        self._journal = RequestJournal()
        self._queries: set[int] = set()
        self._loads: set[int] = set()  # the tickets of adapters, which may take long to read
        self._adapters: list[_Adapter] = []  # each new process must load these
        self._reloads: dict[int, _Adapter] = {}  # the adapters that this process is loading, by ticket
        self._unneeded: list[str] = []  # identities of adapters, to be unloaded after their last request
        self._sent_keys: set[str] = set()  # of the constraints that were sent to this process
        self._media: dict[str, PreparedMedium] = {}  # the images that requests may have
        self._media_sent: set[str] = set()  # to this process, or on the way
        self._media_outgoing: MemoryObjectSendStream[PreparedMedium] | None = None
        self._deaths = 0  # in a row, of unknown cause
        self._blamed_deaths = 0  # in a row
        self._serving: anyio.CancelScope | None = None  # of the messages to and from a process
        self._is_replacing = False
        self._reload_tickets = itertools.count(_FIRST_RELOAD)
        self._loaded_at = math.inf
        self._pace = StepPace(deadlines)
        self._num_frames = 0  # received from this process
        self._num_interrupted = 0  # unfinished requests when the last process ended
        self._has_sent = anyio.Event()
        self.restarts = 0

    @property
    def pid(self) -> int | None:
        """The process id; None between two processes."""
        return None if self._child is None else self._child.pid

    @property
    def is_ready(self) -> bool:
        """Whether a process runs requests."""
        return self._outgoing is not None

    @property
    def has_suspects(self) -> bool:
        """Whether requests that may crash the process run alone, or wait for that."""
        return self._journal.has_suspects

    @property
    def num_unfinished(self) -> int:
        """Requests that have not ended."""
        return len(self._journal)

    def adopt(self, requests: Iterable[Unfinished]) -> None:
        """Accepts requests, which another engine may have begun. Those that cannot be sent fail."""
        for request in requests:
            self._journal.adopt(request)
        self._forward()

    def give_up(self, *, suspects: bool = False) -> list[Unfinished]:
        """Returns and forgets the requests that no process has; suspects only if asked for."""
        return self._journal.give_up(suspects=suspects)

    def replace(self) -> None:
        """Ends the process, if one runs requests, and starts another one, which continues them."""
        if self._serving is not None:
            self._is_replacing = True
            self._serving.cancel()

    def must_load(self, loaded: AdapterLoaded) -> None:
        """Loads an adapter that another engine of the model has, in this process and in each new one."""
        adapter = _Adapter(loaded.name, loaded.folder, loaded.identity, is_loaded=False)
        self._adapters.append(adapter)
        if self._outgoing is not None:
            self._load_adapter(adapter)

    def send(self, message: ToEngine | KeepMedium) -> None:
        """Accepts a message whether or not a process is running. Raises ``EngineDown`` for a ``Query``
        without a process, and for a ``Submit`` while the engine is down; ``ValueError`` or ``OverflowError``
        for text or numbers that no message can have."""
        match message:
            case Submit() if self.down_because is not None:
                raise EngineDown(self.down_because)
            case Submit():
                self._journal.add(message)
                self._forward(message.request_id)
            case Abort():
                if self._journal.abort(message.request_id) and self._outgoing is not None:
                    self._post(message)
                else:
                    self._hand_over([aborted(message.request_id)])
                    self._forward()  # other requests may have waited for this suspect
            case UnloadAdapter():
                self._unneeded.append(message.identity)
                self._forward()
            case KeepMedium():
                self._media[message.medium.identity] = message.medium  # sent when a request needs it
            case DropMedium():
                self._drop_medium(message.identity)
            case CloseState() | Placed() | Charges() | BlocksRequest():
                if isinstance(message, Placed):
                    self._journal.place(message)
                if self._outgoing is not None:
                    self._post(message)  # a new process has no states, and reads the origins again
            case Stop():
                pass  # its scope ends the process
            case _ if self._outgoing is None:
                raise EngineDown(self.down_because or RESTARTING)
            case LoadAdapter():
                self._loads.add(message.ticket)
                self._post(message)
            case _:
                self._queries.add(message.ticket)
                self._post(message)

    async def loaded(self) -> Loaded:
        """Waits until the first process has loaded. Raises the error of its load, or ``EngineFailed`` if it
        died ``MAX_DEATHS_IN_A_ROW`` times before."""
        await self._first_load.wait()
        if self._load_failure is not None:
            raise self._load_failure
        assert self._loaded is not None
        return self._loaded

    async def run(self) -> None:
        """Runs until cancelled, or until the first load has failed, which ``loaded`` reports. Raises
        ``EngineFailed`` if the engine is down and ``exits_when_down``."""
        try:
            while True:
                try:
                    how = await self._live()
                except _LoadError as unloadable:
                    self._load_failure = unloadable.error
                    return
                self.restarts += 1
                num_deaths = max(self._deaths, self._blamed_deaths)
                delay_s = restart_delay_s(num_deaths)
                logger.log(
                    logging.INFO if self._is_replacing else logging.ERROR,
                    "%s %s with %d unfinished requests; restarting it in %g s",
                    self._name,
                    how,
                    self._num_interrupted,
                    delay_s,
                )
                self._is_replacing = False
                if num_deaths >= MAX_DEATHS_IN_A_ROW:
                    failure = EngineFailed(f"{self._name} {how}; it died {num_deaths} times in a row")
                    if self._loaded is None:
                        self._load_failure = failure
                        return
                    if self._exits_when_down:
                        raise failure
                    self._go_down(num_deaths)
                if delay_s:
                    await self._deadlines.sleep(delay_s)
        finally:
            self._first_load.set()
            if self.receiver is not None:
                self.receiver.end_all("the engine has stopped")

    def _go_down(self, num_deaths: int) -> None:
        why = f"{self._name} is down: it died {num_deaths} times in a row and is being restarted; see the log"
        self.down_because = why
        self._changed()
        self._hand_over(self._journal.fail_all(why))

    async def _live(self) -> str:
        """Runs one process until it has ended. Returns how it ended. Raises ``_LoadError`` if the first
        process cannot load."""
        self._loaded_at = math.inf
        try:
            child = await self._start_child(self._start)
        except OSError as error:
            self._process_died()
            return f"cannot be started ({error})"
        self._child = child
        unusable: _Unusable | None = None
        grace_s: float | None = None  # stays None on cancellation: then the shutdown budget decides
        try:
            await self._load(child)
            await self._converse(child)
        except (EOFError, _Unusable) as error:
            unusable = error if isinstance(error, _Unusable) else None
            grace_s = 0.0 if isinstance(error, _Hung) else LAST_WORDS_S
            if isinstance(error, _Replaced):
                grace_s = END_S
                self._end_queries(self._journal.process_replaced())
            else:
                self._process_died()
        finally:
            how = await child.end(self._shutdown.take(END_S) if grace_s is None else grace_s)
            self._child = None
        if isinstance(unusable, _LoadError) and self._loaded is None:
            raise unusable
        return how if unusable is None else str(unusable)

    async def _load(self, child: Child) -> None:
        """Waits until the process is ready. Raises ``_Hung``, or ``_LoadError``, even if it loaded another
        model."""
        answer: Loaded | LoadFailed | None = None
        async with open_task_group() as group:
            group.start_soon(self._expire, self._deadlines.load_s, group.cancel_scope)
            while answer is None:
                for frame in await child.receive():
                    received = answer_decoder.decode(frame)
                    if isinstance(received, list):
                        _log(received)
                    else:
                        answer = received
            group.cancel_scope.cancel()
        if answer is None:
            raise _Hung(f"hung: it had not loaded its model after {self._deadlines.load_s:g} s")
        if isinstance(answer, LoadFailed):
            raise _load_error(answer)
        if self._loaded is None:
            self._loaded = answer
            self._first_load.set()
        elif answer != self._loaded:  # requests continue as token ids, which would mean other text
            changed = "model" if answer.info != self._loaded.info else "tokenizer"
            raise _LoadError(BadModelFolder(f"the {changed} differs from the one that was loaded before"))
        self._loaded_at = anyio.current_time()

    async def _converse(self, child: Child) -> None:
        """Exchanges messages until the process dies (raises ``EOFError``) or hangs (raises ``_Hung``)."""
        self._sent_keys.clear()
        self._pace = StepPace(self._deadlines)
        self._num_frames = 0
        self._journal.media.clear()
        self._media_sent.clear()
        outgoing, to_write = anyio.create_memory_object_stream[bytes](math.inf)
        media_outgoing, media = anyio.create_memory_object_stream[PreparedMedium](math.inf)
        self._outgoing, self._media_outgoing = outgoing, media_outgoing
        turn = anyio.Lock()
        try:
            with outgoing, to_write, media_outgoing, media:
                self._load_adapters()
                self.down_because = None
                self._changed()
                self._forward()
                async with open_task_group() as group:
                    self._serving = group.cancel_scope
                    group.start_soon(_write, child, to_write, turn)
                    group.start_soon(self._write_media, child, media, turn)
                    group.start_soon(self._watch, group.cancel_scope)
                    while True:
                        for frame in await child.receive():
                            messages = from_engine_decoder.decode(frame)
                            if messages and isinstance(messages[0], Logged):
                                _log(messages)  # does not count as progress of the engine
                                continue
                            self._num_frames += 1
                            self._receive(messages)
        finally:
            self._outgoing = self._media_outgoing = self._serving = None
        if self._is_replacing:
            raise _Replaced
        raise _Hung(f"hung: it was silent for {self._pace.limit_s:g} s with unfinished requests")

    async def _expire(self, limit_s: float, scope: anyio.CancelScope) -> None:
        await self._deadlines.passes(limit_s, lambda: False)
        scope.cancel()

    async def _watch(self, scope: anyio.CancelScope) -> None:
        """Cancels ``scope`` if the process owes an answer and is silent for longer than its deadline."""
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
        """Whether more frames have arrived, or the process owes no answer."""
        return self._num_frames != num_frames or not self._is_owed

    @property
    def _is_owed(self) -> bool:
        return self._journal.is_owed or bool(self._queries)

    def _receive(self, messages: list[FromEngine]) -> None:
        last = messages[-1] if messages else None
        num_tokens = last.num_tokens if isinstance(last, StepBegins) else None
        self._pace.received(anyio.current_time(), num_tokens)
        handed: list[FromEngine] = []
        for message in messages:
            match message:
                case EngineStats():
                    self._queries.discard(message.ticket)
                    message = replace(message, restarts=self.restarts)
                case EngineSnapshot():
                    self._queries.discard(message.ticket)
                    stats = replace(message.stats, restarts=self.restarts)
                    message = replace(message, stats=stats)
                case NodeTokens():
                    self._queries.discard(message.ticket)
                case AdapterLoaded() if message.ticket in self._reloads:
                    self._adapter_reloaded(message)
                    continue
                case AdapterLoaded():
                    self._loads.discard(message.ticket)
                    self._adapters.append(_Adapter(message.name, message.folder, message.identity))
                case Failed() if message.request_id in self._reloads:
                    handed += self._adapter_gone(message)
                    continue
                case Failed():
                    self._queries.discard(message.request_id)
                    self._loads.discard(message.request_id)
                case Progress() | Finished():
                    self._deaths = self._blamed_deaths = 0
                case NeedPayload():
                    self._send_whole(message.request_id)
            self._journal.receive(message)
            handed.append(message)
        self._hand_over(handed)
        self._forward()

    def _load_adapters(self) -> None:
        """Loads the adapters of the last process in a new one. Requests wait for their adapters."""
        self._reloads.clear()
        for adapter in self._adapters:
            adapter.is_loaded = False
            self._load_adapter(adapter)

    def _load_adapter(self, adapter: _Adapter) -> None:
        ticket = next(self._reload_tickets)
        self._reloads[ticket] = adapter
        self._journal.wait_for([adapter.identity])
        self._post(LoadAdapter(ticket, adapter.name, adapter.folder, adapter.identity))

    def _adapter_reloaded(self, message: AdapterLoaded) -> None:
        adapter = self._reloads.pop(message.ticket)
        adapter.is_loaded = True
        self._journal.adapter_loaded(message.identity)
        if adapter not in self._adapters:  # it was unloaded meanwhile
            self._post(UnloadAdapter(message.identity))

    def _adapter_gone(self, message: Failed) -> list[Failed]:
        """Handles an adapter that could not be loaded again. Returns the answers of its requests."""
        gone = self._reloads.pop(message.request_id)
        logger.error("an adapter could not be loaded again: %s", message.message)
        is_hope_left = any(
            one.identity == gone.identity and (one.is_loaded or one in self._reloads.values())
            for one in self._adapters
        )
        return [] if is_hope_left else self._journal.adapter_gone(gone.identity)

    def _unload_adapters(self) -> None:
        """Unloads adapters that no longer have a name, after the last request that uses them: until then, a
        new process must load them again."""
        for identity in [one for one in self._unneeded if not self._journal.needs(one)]:
            self._unneeded.remove(identity)
            adapter = next(one for one in self._adapters if one.identity == identity)
            self._adapters.remove(adapter)
            if adapter.is_loaded and self._outgoing is not None:
                self._post(UnloadAdapter(identity))

    def _send_whole(self, request_id: int) -> None:
        """Sends the request again, with the payload of its constraint."""
        submit = self._journal.resubmit(request_id)
        if submit is None:
            self._hand_over([aborted(request_id)])
        elif self._outgoing is not None:
            self._post(submit)

    def _process_died(self) -> None:
        """Ends the requests that end with the process; the others wait for the next one."""
        if anyio.current_time() - self._loaded_at >= PEACE_S:
            self._deaths = self._blamed_deaths = 0
        ended, is_blamed = self._journal.process_died()
        if is_blamed:
            self._blamed_deaths += 1
        else:
            self._deaths += 1
        self._end_queries(ended)

    def _end_queries(self, ended: list[Failed]) -> None:
        """Fails the queries to the process that has ended. ``ended``: the requests that ended with it."""
        ended += [Failed(ticket, EngineDown.code, RESTARTING) for ticket in self._queries | self._loads]
        self._queries.clear()
        self._loads.clear()
        self._hand_over(ended)
        self._num_interrupted = len(self._journal)
        self._changed()  # others may take requests

    def _changed(self) -> None:
        if self.on_change is not None:
            self.on_change()

    def _forward(self, new: int | None = None) -> None:
        """Sends the requests that the process may have now. One that cannot be sent fails alone; for ``new``,
        which the client does not wait for yet, this raises the error instead."""
        fault: Exception | None = None
        if self._unneeded:
            self._unload_adapters()
        if self._outgoing is not None:
            self._send_media()
            failed: list[Failed] = []
            for submit in self._journal.release():
                try:
                    self._post(self._without_known_payload(submit))
                except Exception as error:
                    # No message can have its numbers or its text.
                    self._journal.drop(submit.request_id)
                    if submit.request_id == new:
                        fault = error
                        continue
                    logger.exception("cannot send a request")
                    why = "cannot send the request: see the server's log"
                    failed.append(Failed(submit.request_id, EngineFailed.code, why))
            if failed:
                self._hand_over(failed)
            if fault is not None:
                raise fault

    def _send_media(self) -> None:
        """Begins to send the images for which requests wait."""
        assert self._media_outgoing is not None
        for identity in self._journal.missing_media() - self._media_sent:
            self._media_sent.add(identity)
            self._media_outgoing.send_nowait(self._media[identity])

    def _drop_medium(self, identity: str) -> None:
        self._media.pop(identity, None)
        if identity in self._journal.media and self._outgoing is not None:
            self._journal.media.discard(identity)
            self._media_sent.discard(identity)
            self._post(DropMedium(identity))

    async def _write_media(
        self, child: Child, media: MemoryObjectReceiveStream[PreparedMedium], turn: anyio.Lock
    ) -> None:
        """Writes images in parts, after each of which other messages have their turn."""
        try:
            async for medium in media:
                for part in medium_parts(medium):
                    async with turn:
                        await child.send(to_frame(part))
                self._journal.media.add(medium.identity)
                if medium.identity not in self._media:  # dropped meanwhile
                    self._drop_medium(medium.identity)
                self._forward()
        except OSError:
            pass  # the process died; the reader handles it

    def _without_known_payload(self, submit: Submit) -> Submit:
        """Removes the payload, which may be megabytes, of a constraint that was already sent to this process.
        If the process has dropped the constraint, it answers ``NeedPayload``."""
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
        if self.receiver is not None:
            self.receiver.receive(messages)


async def _write(child: Child, to_write: MemoryObjectReceiveStream[bytes], turn: anyio.Lock) -> None:
    try:
        async for frame in to_write:
            async with turn:
                await child.send(frame)
    except OSError:
        pass  # the process died; the reader handles it
