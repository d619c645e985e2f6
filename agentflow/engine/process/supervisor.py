"""Keeps an engine process alive: starts it, kills it when it hangs, and replaces it when it dies.

The client sees one engine that never loses a request: the next process continues the unfinished requests of a
dead one, from the ids that were already generated. After ``MAX_DEATHS_IN_A_ROW``, the engine is *down*:
requests fail immediately, and new processes start at growing intervals until one loads.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

import anyio
import anyio.to_thread
from msgspec.structs import replace

from agentflow.engine.client import EngineClient
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
    NeedPayload,
    NodeTokens,
    Progress,
    Start,
    Stop,
    ToEngine,
    UnloadAdapter,
    UpdateHint,
)
from agentflow.engine.process.child import Child, StartChild, start_child_process
from agentflow.engine.process.connection import Hung, ProcessConnection, Unusable
from agentflow.engine.process.deadlines import Deadlines
from agentflow.engine.process.request_journal import RequestJournal, Unfinished, aborted, lost_adapter
from agentflow.engine.process.shutdown_budget import ShutdownBudget
from agentflow.engine.process.worker import LAST_STEP_S
from agentflow.engine.request import Submit
from agentflow.engine.text.tokenizer import Tokenizer
from agentflow.errors import AgentflowError, BadModelFolder, EngineDown, EngineFailed, from_code
from agentflow.runtime.task_group import open_task_group

# The time for an engine to finish its last step and free its memory.
END_S = LAST_STEP_S + 2.0


logger = logging.getLogger(__name__)

# The engine is down after this many deaths in a row, without progress or PEACE_S between them.
MAX_DEATHS_IN_A_ROW = 3
PEACE_S = 60.0
# The delay before a restart after two deaths in a row. It doubles with each further death, up to MAX_DELAY_S:
# the cause may be temporary.
FIRST_DELAY_S = 1.0
MAX_DELAY_S = 60.0
# How long to wait after a process closes its socket until it exits, so that its exit code is known.
LAST_WORDS_S = 1.0

# The client's tickets start at 1; the tickets of reloaded adapters are negative.
_FIRST_RELOAD = -1_000_000

RESTARTING = "the engine is restarting: try again in a few seconds"


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
    start_child: StartChild = start_child_process,
) -> AsyncIterator[EngineClient]:
    """Runs an engine in a separate process within the scope. Raises the error of the first load, with the
    same class if it is an error of agentflow.

    Args:
        start: how to load the engine.
        load_tokenizer: runs in a thread while the process loads the model.
        max_unfinished: the most unfinished requests; None: no limit.
        deadlines: the time limits of the process; None: the defaults.
        exits_when_down: raise ``EngineFailed`` when the engine is down.
        shutdown: limits the time to end the process.
        start_child: starts the process.

    Raises:
        EngineFailed: the process died ``MAX_DEATHS_IN_A_ROW`` times before the first load, or at any time if
            ``exits_when_down``.
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
    """Loads and prepares a tokenizer. Takes a second for a large one."""
    tokenizer = load_tokenizer()
    tokenizer.prepare()
    return tokenizer


def check_tokenizer(loaded: Loaded, tokenizer: Tokenizer) -> None:
    """Raises ``BadModelFolder`` if the engine has a different tokenizer, with different token ids."""
    if loaded.tokenizer != tokenizer.identity:
        raise BadModelFolder("the tokenizer differs from the one that was loaded before")


class Receiver(Protocol):
    """Receives the messages of a supervised engine: an ``EngineClient``, or the receiver of one of several
    engines. Called in the event loop's thread."""

    def receive(self, messages: Sequence[FromEngine]) -> None:
        """Receives the messages of one step."""

    def end_all(self, why: str) -> None:
        """The engine has ended, and no message follows."""


class _Replaced(Unusable):
    """``replace`` was called."""

    def __init__(self) -> None:
        super().__init__("is replaced")


class _LoadError(Unusable):
    """The process cannot load its engine, or loaded a different one. ``error``: the exception for the caller
    of ``supervised_engine``."""

    def __init__(self, error: AgentflowError | ModuleNotFoundError) -> None:
        super().__init__(f"cannot be loaded again ({error})")
        self.error = error


@dataclass(slots=True, eq=False)
class _Adapter:
    """An adapter that was loaded, and that each new process must load again."""

    name: str
    folder: str
    identity: str
    is_loaded: bool = True  # the current process has loaded it


def _load_error(answer: LoadFailed) -> _LoadError:
    if answer.missing_package is not None:
        return _LoadError(ModuleNotFoundError(answer.message, name=answer.missing_package))
    return _LoadError(from_code(answer.code, answer.message))


class EngineSupervisor:
    """An ``EngineLink`` to the current process, which it replaces when the process dies. ``receiver`` gets
    the messages; set it when ``loaded`` has returned. All methods run in the event loop's thread. The number
    of unfinished requests bounds the data that waits to be written.

    The arguments are as in ``supervised_engine``.
    """

    def __init__(
        self,
        start: Start,
        *,
        deadlines: Deadlines,
        exits_when_down: bool,
        shutdown: ShutdownBudget,
        start_child: StartChild = start_child_process,
        name: str = "the engine",
    ) -> None:
        self.receiver: Receiver | None = None
        self.on_change: Callable[[], object] | None = None
        """Called when ``is_ready`` or ``down_because`` has changed, before queued requests are sent or
        fail."""
        self.on_adapter_gone: Callable[[str], object] | None = None
        """Called with the identity of an adapter that the process could not load again, before the queued
        requests that use it fail."""
        self.down_because: str | None = None
        """Why requests fail immediately; None if they do not."""
        self._start = start
        self._name = name  # for messages
        self._deadlines = deadlines
        self._exits_when_down = exits_when_down
        self._shutdown = shutdown
        self._start_child = start_child
        self._loaded: Loaded | None = None  # the answer of the first process
        self._load_failure: AgentflowError | ModuleNotFoundError | None = None
        self._first_load = anyio.Event()  # set when the first load has ended
        self._child: Child | None = None
        self._connection: ProcessConnection | None = None  # to a process that has loaded
        self._journal = RequestJournal()
        self._queries: set[int] = set()
        self._loads: set[int] = set()  # tickets of adapters, which may take long to read
        self._adapters: list[_Adapter] = []  # each new process must load these
        self._reloads: dict[int, _Adapter] = {}  # the adapters that this process is loading, by ticket
        self._lacking: set[str] = set()  # the identities of adapters that this process could not load again
        self._unneeded: list[str] = []  # the identities of adapters to unload after their last request
        self._media: dict[str, PreparedMedium] = {}  # the images that requests may have
        self._deaths = 0  # in a row, for unknown causes
        self._blamed_deaths = 0  # in a row
        self._is_replacing = False
        self._reload_tickets = itertools.count(_FIRST_RELOAD)
        self._loaded_at = math.inf
        self._num_interrupted = 0  # unfinished requests when the last process ended
        self.restarts = 0

    @property
    def pid(self) -> int | None:
        """The process id; None between two processes."""
        return None if self._child is None else self._child.pid

    @property
    def node(self) -> str:
        """The address of the process's machine; empty for this machine, and between two processes."""
        return "" if self._child is None else self._child.node

    @property
    def is_ready(self) -> bool:
        """Whether a process runs requests."""
        return self._connection is not None

    @property
    def has_suspects(self) -> bool:
        """Whether requests that may crash the process run alone, or wait to run alone."""
        return self._journal.has_suspects

    @property
    def num_unfinished(self) -> int:
        """The number of unfinished requests."""
        return len(self._journal)

    def adopt(self, requests: Iterable[Unfinished]) -> None:
        """Accepts requests that another engine may have started. Requests that cannot be sent fail."""
        for request in requests:
            self._journal.adopt(request)
        self._send_ready()

    def give_up(self, *, suspects: bool = False, adapter: str | None = None) -> list[Unfinished]:
        """Drops and returns the requests that no process has; suspects only if ``suspects``. ``adapter``:
        only requests that use the adapter with this identity."""
        return self._journal.give_up(suspects=suspects, adapter=adapter)

    def lacks(self, adapter: str) -> bool:
        """Whether the present process could not load the adapter with this identity again."""
        return adapter in self._lacking

    def replace(self) -> None:
        """Ends a process that runs requests, and starts another one, which continues them."""
        if self._connection is not None:
            self._is_replacing = True
            self._connection.close()

    def must_load(self, loaded: AdapterLoaded) -> None:
        """Loads an adapter that another engine of the model has, in this process and in each new one."""
        adapter = _Adapter(loaded.name, loaded.folder, loaded.identity, is_loaded=False)
        self._adapters.append(adapter)
        self._lacking.discard(adapter.identity)
        if self._connection is not None:
            self._load_adapter(adapter, self._connection)

    def send(self, message: ToEngine | KeepMedium) -> None:
        """Accepts a message, whether or not a process is running. Raises ``EngineDown`` for a ``Query``
        without a process, and for a ``Submit`` while the engine is down or lacks its adapter; ``ValueError``
        or ``OverflowError`` for text or numbers that cannot be encoded."""
        match message:
            case Submit() if self.down_because is not None:
                raise EngineDown(self.down_because)
            case Submit() if self.lacks(message.adapter):
                raise EngineDown(lost_adapter(message))
            case Submit():
                self._journal.add(message)
                self._send_ready(message.request_id)
            case Abort():
                if self._journal.abort(message.request_id) and self._connection is not None:
                    self._connection.post(message)
                else:
                    self._hand_over([aborted(message.request_id)])
                    self._send_ready()  # other requests may have waited for this suspect
            case UnloadAdapter():
                self._unneeded.append(message.identity)
                self._send_ready()
            case KeepMedium():
                self._media[message.medium.identity] = message.medium  # sent once a request needs it
            case DropMedium():
                self._drop_medium(message.identity)
            case CloseState() | UpdateHint() | Charges() | BlocksRequest():
                if isinstance(message, UpdateHint):
                    self._journal.update_hint(message)
                if self._connection is not None:
                    self._connection.post(message)  # a new process learns states from the requests' origins
            case Stop():
                pass  # the scope ends the process
            case _ if self._connection is None:
                raise EngineDown(self.down_because or RESTARTING)
            case _:
                (self._loads if isinstance(message, LoadAdapter) else self._queries).add(message.ticket)
                self._connection.post(message)

    async def loaded(self) -> Loaded:
        """Waits until the first process has loaded. Raises the error of its load, or ``EngineFailed`` if
        processes died ``MAX_DEATHS_IN_A_ROW`` times before."""
        await self._first_load.wait()
        if self._load_failure is not None:
            raise self._load_failure
        assert self._loaded is not None
        return self._loaded

    async def run(self) -> None:
        """Runs until it is cancelled, or until the first load has failed, which ``loaded`` reports. Raises
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
        """Runs one process until it has ended. Returns a phrase: how it ended. Raises ``_LoadError`` if the
        first process cannot load."""
        self._loaded_at = math.inf
        try:
            child = await self._start_child(self._start)
        except OSError as error:
            self._process_died()
            return f"cannot be started ({error})"
        self._child = child
        unusable: Unusable | None = None
        grace_s: float | None = None  # stays None on cancellation: then the shutdown budget decides
        try:
            await self._run(child)
        except (EOFError, Unusable) as error:
            unusable = error if isinstance(error, Unusable) else None
            grace_s = 0.0 if isinstance(error, Hung) else LAST_WORDS_S
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

    async def _run(self, child: Child) -> None:
        """Waits until the process is ready, and exchanges messages with it.

        Raises:
            EOFError: the process died.
            Hung: the process hangs.
            _Replaced: ``replace`` was called.
            _LoadError: the process cannot load, or loaded another model.
        """
        with ProcessConnection(child, self._deadlines, lambda: self._is_owed) as connection:
            self._check_loaded(await connection.load())
            self._loaded_at = anyio.current_time()
            self._journal.media.clear()
            self._connection = connection
            try:
                self._load_adapters(connection)
                self.down_because = None
                self._changed()
                self._send_ready()
                await connection.run(self._receive, self._medium_sent)
            finally:
                self._connection = None
        raise _Replaced

    def _check_loaded(self, answer: Loaded | LoadFailed) -> None:
        if isinstance(answer, LoadFailed):
            raise _load_error(answer)
        if self._loaded is None:
            self._loaded = answer
            self._first_load.set()
        elif answer != self._loaded:  # requests continue with token ids, which would have another meaning
            changed = "model" if answer.info != self._loaded.info else "tokenizer"
            raise _LoadError(BadModelFolder(f"the {changed} differs from the one that was loaded before"))

    @property
    def _is_owed(self) -> bool:
        return self._journal.is_owed or bool(self._queries)

    def _receive(self, messages: list[FromEngine]) -> None:
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
                    self._lacking.discard(message.identity)
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
        self._send_ready()

    def _load_adapters(self, connection: ProcessConnection) -> None:
        """Loads the adapters of the previous process in a new one. Requests wait for their adapters."""
        self._reloads.clear()
        for adapter in self._adapters:
            adapter.is_loaded = False
            self._load_adapter(adapter, connection)

    def _load_adapter(self, adapter: _Adapter, connection: ProcessConnection) -> None:
        ticket = next(self._reload_tickets)
        self._reloads[ticket] = adapter
        self._journal.wait_for([adapter.identity])
        connection.post(LoadAdapter(ticket, adapter.name, adapter.folder, adapter.identity))

    def _adapter_reloaded(self, message: AdapterLoaded) -> None:
        adapter = self._reloads.pop(message.ticket)
        adapter.is_loaded = True
        self._journal.adapter_loaded(message.identity)
        if adapter not in self._adapters and self._connection is not None:  # it was unloaded meanwhile
            self._connection.post(UnloadAdapter(message.identity))

    def _adapter_gone(self, message: Failed) -> list[Failed]:
        """Handles an adapter that could not be loaded again. Returns the answers of its requests."""
        gone = self._reloads.pop(message.request_id)
        logger.error("an adapter could not be loaded again: %s", message.message)
        same = [one for one in self._adapters if one.identity == gone.identity]
        if any(one in self._reloads.values() for one in same):
            return []
        if any(one.is_loaded for one in same):  # by another name, or by an earlier load
            self._journal.adapter_loaded(gone.identity)
            return []
        self._lacking.add(gone.identity)
        if self.on_adapter_gone is not None:
            self.on_adapter_gone(gone.identity)  # other engines may adopt requests
        return self._journal.adapter_gone(gone.identity)

    def _unload_adapters(self) -> None:
        """Unloads adapters without a name after the last request that uses them: until then, a new process
        must load them again."""
        for identity in [one for one in self._unneeded if not self._journal.needs(one)]:
            self._unneeded.remove(identity)
            same = [one for one in self._adapters if one.identity == identity]
            # One of them, preferably one that the process has not: the others need the weights.
            adapter = min(same, key=lambda one: one.is_loaded)
            self._adapters.remove(adapter)
            if adapter.is_loaded and self._connection is not None:
                self._connection.post(UnloadAdapter(identity))

    def _send_whole(self, request_id: int) -> None:
        """Sends the request again, with the payload of its constraint."""
        submit = self._journal.resubmit(request_id)
        if submit is None:
            self._hand_over([aborted(request_id)])
        elif self._connection is not None:
            self._connection.post(submit)

    def _process_died(self) -> None:
        """Counts a death, and ends the requests that end with the process. The others wait for the next
        process."""
        if anyio.current_time() - self._loaded_at >= PEACE_S:
            self._deaths = self._blamed_deaths = 0
        ended, is_blamed = self._journal.process_died()
        if is_blamed:
            self._blamed_deaths += 1
        else:
            self._deaths += 1
        self._end_queries(ended)

    def _end_queries(self, ended: list[Failed]) -> None:
        """Fails the queries to the process that has ended. ``ended``: the answers of requests that ended with
        it."""
        ended += [Failed(ticket, EngineDown.code, RESTARTING) for ticket in self._queries | self._loads]
        self._queries.clear()
        self._loads.clear()
        self._lacking.clear()  # the next process may load them
        self._hand_over(ended)
        self._num_interrupted = len(self._journal)
        self._changed()  # other engines may adopt requests

    def _changed(self) -> None:
        if self.on_change is not None:
            self.on_change()

    def _send_ready(self, new: int | None = None) -> None:
        """Sends the requests that may run now. A request that cannot be sent fails alone. For the request
        ``new``, for which the client does not wait yet, raises the error instead."""
        fault: Exception | None = None
        if self._unneeded:
            self._unload_adapters()
        if (connection := self._connection) is not None:
            for identity in self._journal.missing_media():
                connection.send_medium(self._media[identity])
            failed: list[Failed] = []
            for submit in self._journal.take_ready():
                try:
                    connection.submit(submit)
                except Exception as error:
                    # Its numbers or its text cannot be encoded.
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

    def _drop_medium(self, identity: str) -> None:
        self._media.pop(identity, None)
        if identity in self._journal.media and self._connection is not None:
            self._journal.media.discard(identity)
            self._connection.drop_medium(identity)

    def _medium_sent(self, identity: str) -> None:
        self._journal.medium_sent(identity)
        if identity not in self._media:  # dropped meanwhile
            self._drop_medium(identity)
        self._send_ready()

    def _hand_over(self, messages: Sequence[FromEngine]) -> None:
        if self.receiver is not None:
            self.receiver.receive(messages)
