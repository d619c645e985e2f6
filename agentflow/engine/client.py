"""The event loop's side of an engine: ``EngineClient`` sends requests and waits for their results.

``running_engine`` runs an engine in a thread; ``process.supervisor`` runs one in a process.
"""

from __future__ import annotations

import atexit
import ctypes
import itertools
import logging
import threading
import time
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from copy import copy
from pathlib import Path
from typing import Protocol

import anyio
import anyio.lowlevel
from msgspec.structs import replace

from agentflow.engine.engine import Engine, EngineBroken
from agentflow.engine.grammar.compiler.messages import CompiledConstraint
from agentflow.engine.media.known_media import KnownMedia
from agentflow.engine.media_run import PreparedMedium
from agentflow.engine.messages import (
    Abort,
    AdapterLoaded,
    CloseState,
    DropMedium,
    EngineAnswer,
    EngineSnapshot,
    EngineStats,
    Failed,
    Finished,
    FromEngine,
    KeepMedium,
    LoadAdapter,
    NodeTokens,
    Progress,
    Query,
    StatsRequest,
    Stop,
    ToEngine,
    UnloadAdapter,
    UpdateHint,
)
from agentflow.engine.request import Origin, Submit
from agentflow.engine.runner import ModelRunner, RunnerInfo
from agentflow.engine.scheduling.scheduler import SchedulerConfig
from agentflow.engine.text.reasoning import ReasoningFormat
from agentflow.engine.text.tokenizer import Tokenizer
from agentflow.engine.text.tool_output import CallMarks
from agentflow.engine.watching.shared_watches import SharedWatches
from agentflow.errors import (
    AgentflowError,
    EngineDown,
    EngineFailed,
    Overloaded,
    UnknownModel,
    from_code,
    listed,
)
from agentflow.protocol.sampling import SamplingParams
from agentflow.runtime.generator import OnText
from agentflow.runtime.limits import tenant_part
from agentflow.runtime.task_group import loop_caller

logger = logging.getLogger(__name__)

Load = Callable[[], tuple[ModelRunner, Tokenizer, SchedulerConfig]]
OnProgress = Callable[[Progress], None]
_NOWHERE = Origin()
# How long leaving the scope waits for the last step of an engine thread.
END_S = 1.0


class EngineLink(Protocol):
    """Accepts messages for an engine: the ``Engine`` itself in a thread, an ``EngineSupervisor`` for a
    process. Answers come to ``EngineClient.receive``. ``send`` raises EngineFailed while the engine is
    down."""

    def send(self, message: ToEngine | KeepMedium) -> None: ...

    # Links to several engines also have ``def find_replica(self, request_id: int) -> int | None``.


class RequestObserver(Protocol):
    """Observes all messages of an ``EngineClient``, in the event loop's thread. Must not raise."""

    def sent(self, submit: Submit) -> None:
        """A request was accepted and sent to the engine."""

    def received(self, messages: Sequence[FromEngine]) -> None:
        """The messages of one step. The last one of a request is its ``Finished`` or ``Failed``."""


class _Call:
    """One unanswered request or ``Query``: its progress callback or the query, and then its answer."""

    __slots__ = ("answer", "broken_by", "ended", "error", "on_progress", "query")

    def __init__(self, on_progress: OnProgress | None = None, query: Query | None = None) -> None:
        self.on_progress = on_progress
        self.query = query
        self.ended = anyio.Event()
        self.answer: Finished | EngineAnswer | None = None
        self.error: AgentflowError | None = None
        self.broken_by: Exception | None = None  # raised by ``on_progress``

    def progress(self, message: Progress) -> None:
        if self.on_progress is None or self.broken_by is not None:
            return
        try:
            self.on_progress(message)
        except Exception as error:  # a fault of this request's consumer must not affect others
            self.broken_by = error
            self.ended.set()

    def end(self, answer: Finished | EngineAnswer | Failed) -> None:
        if isinstance(answer, Failed):
            self.error = from_code(answer.code, answer.message, answer.param)
        else:
            self.answer = answer
        self.ended.set()


class EngineClient:
    """Made by ``running_engine`` and ``supervised_engine``. All methods belong to the event loop's thread.
    ``max_unfinished``: requests that the engine has not ended, aborted ones included (None: no limit). Beyond
    it, and beyond one tenant's part of it, requests are rejected with ``Overloaded``."""

    def __init__(
        self,
        engine: EngineLink,
        info: RunnerInfo,
        tokenizer: Tokenizer,
        *,
        max_unfinished: int | None = None,
    ) -> None:
        self.info = info
        self.tokenizer = tokenizer
        self.engine = engine
        self._ids = itertools.count(1)
        self._calls: dict[int, _Call] = {}
        self._one_ended = anyio.Event()
        self._max_unfinished = max_unfinished
        self._unfinished: dict[int, tuple[str, int]] = {}  # tenant and state of each
        self._request_of: dict[int, int] = {}  # by state: its last request, while it is unfinished
        self._num_unfinished_of: Counter[str] = Counter()
        self._media: KnownMedia | None = None  # since the first image
        self._media_of: dict[int, list[PreparedMedium]] = {}  # of unfinished requests, by id
        self._queries: dict[int, _Call] = {}
        self._stats_ticket: int | None = None  # of the unanswered StatsRequest
        self.watches = SharedWatches(self._query)
        self.adapters: dict[str, AdapterLoaded] = {}
        """The loaded adapters by name."""
        self._ended_because: str | None = None
        self._observers: list[RequestObserver] = []

    def observe(self, observer: RequestObserver) -> None:
        """Registers an observer of all later messages."""
        self._observers.append(observer)

    async def until_idle(self) -> None:
        """Waits until no call waits for a request."""
        while self._calls:
            await self._one_ended.wait()

    @property
    def num_calls(self) -> int:
        """Calls that wait for a request."""
        return len(self._calls)

    async def generate(
        self,
        token_ids: list[int],
        params: SamplingParams,
        *,
        seed: int,
        on_text: OnText | None = None,
        on_progress: OnProgress | None = None,
        origin: Origin = _NOWHERE,
        constraint: CompiledConstraint | None = None,
        jump_forward: bool = True,
        on_sent: Callable[[], None] | None = None,
        reasoning_format: ReasoningFormat | None = None,
        calls: CallMarks | None = None,
    ) -> Finished:
        """Generates after a prompt. Cancelling the call aborts the request.

        Args:
            token_ids: The prompt.
            params: The sampling parameters.
            seed: The seed of the random numbers.
            on_text: Called with each text delta. An exception aborts the request and propagates.
            on_progress: Called with all progress of each step. Exceptions as for ``on_text``.
            origin: The tenant, the program and the cache salt of the request.
            constraint: The output satisfies it.
            jump_forward: Forced text is appended without sampling.
            on_sent: Called when the request is in the engine's queue.
            reasoning_format: How the output may begin with reasoning.
            calls: The marks of the tool calls that the output may have.
        """
        message = Submit(
            next(self._ids),
            token_ids,
            params,
            seed=seed,
            origin=origin,
            constraint=constraint,
            jump_forward=jump_forward,
            reasoning_format=reasoning_format,
            calls=calls,
        )
        return await self._call(message, on_progress if on_text is None else texts_to(on_text), on_sent)

    async def compute(self, token_ids: list[int], *, origin: Origin = _NOWHERE) -> Finished:
        """Computes the tokens, so that they are cached."""
        return await self._call(Submit(next(self._ids), token_ids, None, origin=origin), None)

    async def score(
        self, token_ids: list[int], score_from: int, *, num_top: int = 0, origin: Origin = _NOWHERE
    ) -> Finished:
        """Log-probabilities of ``token_ids[score_from:]``, each given all tokens before it, with the
        ``num_top`` likeliest tokens in its place."""
        params = SamplingParams(logprobs=True, top_logprobs=num_top)
        message = Submit(next(self._ids), token_ids, params, origin=origin, score_from=score_from)
        return await self._call(message, None)

    async def score_choices(
        self,
        token_ids: list[int],
        choices: Sequence[Sequence[int]],
        *,
        heads: Sequence[Sequence[int]] = (),
        head_of: Sequence[int] = (),
        origin: Origin = _NOWHERE,
    ) -> Finished:
        """Computes the log-probabilities of the tokens of all choices together. Shared prefixes are computed
        once.

        Args:
            token_ids: The prompt.
            choices: The tokens of each choice.
            heads: Tokens between the prompt and some of the choices.
            head_of: The index of each choice's head; without heads, choices follow the prompt.
            origin: The tenant, the program and the cache salt of the request.

        Raises:
            BadArgument: a choice has no tokens.
        """
        message = Submit(
            next(self._ids), token_ids, None, origin=origin, choices=choices, heads=heads, head_of=head_of
        )
        return await self._call(message, None)

    async def embed(self, token_ids: list[int], *, origin: Origin = _NOWHERE) -> Finished:
        """The embedding of the tokens. ``BadArgument`` if the model generates text."""
        return await self._call(Submit(next(self._ids), token_ids, None, origin=origin, embeds=True), None)

    def add_medium(self, medium: PreparedMedium, tenant: str) -> PreparedMedium:
        """Sends an image to the engine for the requests of one of the tenant's states. Returns the image as
        an object that the state must hold as long as it has the image. ``Overloaded``."""
        self._drop_media()
        if self._media is None:
            self._media = KnownMedia()
        known, is_new = self._media.add(medium, tenant)
        if is_new:
            self.engine.send(KeepMedium(copy(known)))
        return known

    def _drop_media(self) -> None:
        """Drops the images that no state and no unfinished request has."""
        if self._media is not None:
            for identity in self._media.released():
                self.engine.send(DropMedium(identity))

    def compute_ahead(self, token_ids: list[int], *, origin: Origin) -> int:
        """Prefills tokens for later requests, if there is much room, without waiting. Returns an id for
        ``forget``."""
        request_id = next(self._ids)
        if self._ended_because is None and not self.info.embedding_size and self._has_room(origin.tenant):
            with suppress(EngineFailed, UnknownModel):  # it is down, or its adapter is gone
                self._submit(Submit(request_id, token_ids, None, origin=replace(origin, is_extra=True)))
        return request_id

    def _has_room(self, tenant: str) -> bool:
        """Whether the tenant, and all tenants together, use less than half of their limit: the rest is for
        requests whose answers a client awaits."""
        most = self._max_unfinished
        if most is None:
            return True
        num_own = self._num_unfinished_of[tenant]
        return 2 * len(self._unfinished) < most and 2 * num_own < tenant_part(most, tenant)

    def forget(self, request_id: int) -> None:
        """Cancels a ``compute_ahead``."""
        self.engine.send(Abort(request_id))

    def find_replica(self, state: int) -> int | None:
        """The number of the replica on which the state's last request runs; None if it has ended, or if there
        is one engine."""
        find: Callable[[int], int | None] | None = getattr(self.engine, "find_replica", None)
        request_id = self._request_of.get(state)
        return None if find is None or request_id is None else find(request_id)

    def new_number(self) -> int:
        """A new number of a state or task group, for an ``Origin``."""
        return next(self._ids)

    def update_hint(self, update: UpdateHint) -> None:
        """A state's scheduling hint changed. Unknown states are ignored."""
        self.engine.send(update)

    def close_state(self, state: int, *, is_dropped: bool = False) -> None:
        """The state will have no more requests. ``is_dropped``: because it was cancelled."""
        self._drop_media()
        self.engine.send(CloseState(state, is_dropped))

    async def stats(self) -> EngineStats:
        """Counters and gauges, read between two steps. ``EngineDown`` immediately while the engine restarts.

        Concurrent calls share one query. The answer includes all progress that the client had received before
        the query.
        """
        self._check_alive()
        ticket = self._stats_ticket
        if ticket is None or ticket not in self._queries:
            ticket = self._stats_ticket = self._send_query(StatsRequest)
        call = self._queries[ticket]
        await call.ended.wait()
        stats = self._answer(call)
        assert isinstance(stats, EngineStats)
        return stats

    async def load_adapter(self, name: str, folder: Path) -> AdapterLoaded:
        """Loads the adapter (LoRA) in ``folder`` for requests whose ``Origin.adapter`` is ``name``. It
        replaces a loaded one of the same name, which requests that were sent keep until they end.
        ``BadModelFolder``, ``BadArgument`` or ``EngineDown``."""
        loaded = await self._query(lambda ticket: LoadAdapter(ticket, name, str(folder)))
        assert isinstance(loaded, AdapterLoaded)
        return loaded

    @property
    def loading_adapters(self) -> set[str]:
        """The names of the adapters that the engine is loading."""
        queries = [call.query for call in self._queries.values()]
        return {query.name for query in queries if isinstance(query, LoadAdapter)}

    def unload_adapter(self, name: str) -> None:
        """Requests that were sent keep it until they end. Unknown names are ignored."""
        loaded = self.adapters.pop(name, None)
        if loaded is not None:
            self.engine.send(UnloadAdapter(loaded.identity))

    def _adapter_loaded(self, loaded: AdapterLoaded) -> None:
        self.unload_adapter(loaded.name)
        self.adapters[loaded.name] = loaded

    def _adapter_identity(self, adapter: str) -> str:
        """The identity of the adapter of that name, empty for the base model. ``UnknownModel``."""
        if not adapter:
            return ""
        loaded = self.adapters.get(adapter)
        if loaded is None:
            known = listed(sorted(self.adapters))
            raise UnknownModel(f"the adapter {adapter!r} is not loaded (there are: {known})")
        return loaded.identity

    async def _query(self, make: Callable[[int], Query]) -> EngineAnswer:
        """Sends the query that ``make`` makes for a ticket, and returns the answer. ``EngineDown`` as for
        ``stats``."""
        self._check_alive()
        call = self._queries[self._send_query(make)]
        await call.ended.wait()
        answer = self._answer(call)
        assert not isinstance(answer, Finished)
        return answer

    def _send_query(self, make: Callable[[int], Query]) -> int:
        ticket = next(self._ids)
        self._drop_media()
        query = make(ticket)
        self.engine.send(query)
        self._queries[ticket] = _Call(query=query)
        return ticket

    async def _call(
        self, message: Submit, on_progress: OnProgress | None, on_sent: Callable[[], None] | None = None
    ) -> Finished:
        # Work in threads and starts of tasks cannot be cancelled, so the caller may have been cancelled
        # meanwhile.
        await anyio.lowlevel.checkpoint_if_cancelled()
        self._check_alive()
        self.check_room(message.origin.tenant)
        self._submit(message)
        call = self._calls[message.request_id] = _Call(on_progress)
        if on_sent is not None:
            on_sent()
        try:
            await call.ended.wait()
            if call.broken_by is not None:
                raise call.broken_by
        except BaseException:
            self.engine.send(Abort(message.request_id))
            raise
        finally:
            self._calls.pop(message.request_id, None)
            if not self._calls:
                self._one_ended.set()
                self._one_ended = anyio.Event()
        finished = self._answer(call)
        assert isinstance(finished, Finished)
        return finished

    def check_room(self, tenant: str) -> None:
        """``Overloaded`` if the engine has ``max_unfinished`` requests, or the tenant has its part of
        them."""
        if self._max_unfinished is None:
            return
        if len(self._unfinished) >= self._max_unfinished:
            most = self._max_unfinished
            raise Overloaded(f"the engine has {most} unfinished requests, the limit: try again later")
        most = tenant_part(self._max_unfinished, tenant)
        if self._num_unfinished_of[tenant] >= most:
            raise Overloaded(
                f"the engine has {most} unfinished requests of this tenant, its limit: try again later"
            )

    def _submit(self, message: Submit) -> None:
        if message.origin.adapter and not message.adapter:
            message = replace(message, adapter=self._adapter_identity(message.origin.adapter))
        if self._media is not None:
            runs, media = self._media.runs_in(message.token_ids)
            if runs:
                message = replace(message, media=runs)
                self._media_of[message.request_id] = media
        try:
            self.engine.send(message)
        except BaseException:
            self._media_of.pop(message.request_id, None)
            raise
        tenant, state = message.origin.tenant, message.origin.state
        self._unfinished[message.request_id] = tenant, state
        if state:
            self._request_of[state] = message.request_id
        self._num_unfinished_of[tenant] += 1
        for observer in self._observers:
            observer.sent(message)

    def _answer(self, call: _Call) -> Finished | EngineAnswer:
        if call.error is not None:
            raise call.error
        if call.answer is None:
            self._check_alive()
        assert call.answer is not None
        return call.answer

    def _check_alive(self) -> None:
        if self._ended_because is not None:
            raise EngineDown(self._ended_because)

    def receive(self, messages: Sequence[FromEngine]) -> None:
        """Delivers the messages of one step. Called in the event loop's thread."""
        for observer in self._observers:
            observer.received(messages)
        for message in messages:
            match message:
                case Progress():
                    call = self._calls.get(message.request_id)  # None: aborted meanwhile
                    if call is not None:
                        call.progress(message)
                case Finished() | Failed():
                    self._has_ended(message.request_id)
                    self._end(message.request_id, message)
                case AdapterLoaded():
                    self._adapter_loaded(message)
                    self._end(message.ticket, message)
                case EngineStats() | EngineSnapshot() | NodeTokens():
                    self._end(message.ticket, message)
        self._drop_media()

    def _has_ended(self, request_id: int) -> None:
        self._media_of.pop(request_id, None)
        known = self._unfinished.pop(request_id, None)
        if known is not None:
            tenant, state = known
            if self._request_of.get(state) == request_id:
                del self._request_of[state]
            self._num_unfinished_of[tenant] -= 1
            if not self._num_unfinished_of[tenant]:
                del self._num_unfinished_of[tenant]

    def _end(self, number: int, answer: Finished | EngineAnswer | Failed) -> None:
        call = self._queries.pop(number, None) or self._calls.get(number)
        if call is not None:
            call.end(answer)

    def end_all(self, why: str) -> None:
        """The engine has ended: fails all calls, current and later ones, with ``EngineDown(why)``."""
        self._ended_because = self._ended_because or why
        for call in self._calls.values():
            call.ended.set()
        for call in self._queries.values():
            call.ended.set()
        self._queries.clear()


def texts_to(on_text: OnText) -> OnProgress:
    """Returns a callback for the progress of a generation, which reports new text."""

    def pass_text(progress: Progress) -> None:
        if progress.text:
            on_text(progress.text)

    return pass_text


class _EngineThread(threading.Thread):
    """Loads an engine and runs it. ``ready``: loading succeeded or failed. ``ended``: the thread has ended.

    Loading takes seconds, so the thread is a daemon. If its session ends meanwhile, the thread is left
    behind, drops the model as soon as it can, and keeps no process alive. At the exit of the process it is
    interrupted, because the interpreter ends daemon threads where they are, and in a function of torch that
    aborts the process."""

    def __init__(self, load: Load, max_unfinished: int | None) -> None:
        super().__init__(name="agentflow engine", daemon=True)
        self.ready = anyio.Event()
        self.ended = anyio.Event()
        self.client: EngineClient | None = None
        self.failure: BaseException | None = None
        self._load = load
        self._max_unfinished = max_unfinished
        self._is_stopping = False
        self._call_in_loop = loop_caller()
        _threads.add(self)

    def run(self) -> None:
        try:
            engine = self._loaded()
            if engine is not None:
                self._run(engine)
        finally:
            self._call(self.ended.set)

    def _loaded(self) -> Engine | None:
        try:
            runner, tokenizer, config = self._load()
            tokenizer.prepare()
            engine = Engine(runner, tokenizer, config, self._deliver)
            self.client = EngineClient(engine, runner.info, tokenizer, max_unfinished=self._max_unfinished)
        except BaseException as error:
            self.failure = error
            return None
        finally:
            self._call(self.ready.set)
        if self._is_stopping:  # read after writing ``client``; ``stop`` does the reverse
            engine.send(Stop())
        return engine

    def _run(self, engine: Engine) -> None:
        why = "the engine has stopped"
        try:
            engine.run()
        except EngineBroken as error:
            why = str(error)
        except BaseException:
            why = "the engine broke: see its log"
            logger.exception("the engine broke")
        assert self.client is not None
        client = self.client
        self._call(lambda: client.end_all(why))

    def _deliver(self, messages: list[FromEngine]) -> None:
        assert self.client is not None
        client = self.client
        self._call(lambda: client.receive(messages))

    def _call(self, function: Callable[[], object]) -> None:
        with suppress(RuntimeError):  # the loop has ended
            self._call_in_loop(function)

    async def stop(self) -> None:
        """Ends the engine after its step, and waits for that for at most ``END_S``. Does not wait for a
        load."""
        self._is_stopping = True
        if self.client is None:
            return
        self.client.engine.send(Stop())
        with anyio.move_on_after(END_S, shield=True):
            await self.ended.wait()

    def interrupt(self) -> None:
        """Ends the engine after its step, or the load between two of its instructions."""
        self._is_stopping = True
        if self.client is not None:
            self.client.engine.send(Stop())
        elif self.ident is not None:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(self.ident), ctypes.py_object(SystemExit)
            )


_threads: weakref.WeakSet[_EngineThread] = weakref.WeakSet()


@atexit.register
def _interrupt_engines() -> None:
    """Interrupts the engines that no session has ended, and waits for at most ``END_S``."""
    left = [thread for thread in _threads if thread.is_alive()]
    for thread in left:
        thread.interrupt()
    until = time.monotonic() + END_S
    with suppress(KeyboardInterrupt):
        for thread in left:
            thread.join(max(0.0, until - time.monotonic()))


@asynccontextmanager
async def running_engine(load: Load, *, max_unfinished: int | None = None) -> AsyncIterator[EngineClient]:
    """Runs an engine in a separate thread within the scope. ``load`` runs there too, because loading takes
    seconds and must not block the event loop; its errors are raised here. Leaving the scope takes at most
    ``END_S``, also by a native ``task.cancel()``, which ignores shields; while ``load`` runs, no time."""
    thread = _EngineThread(load, max_unfinished)
    thread.start()
    try:
        await thread.ready.wait()
        if thread.client is None:
            raise thread.failure or EngineFailed("the engine did not start")
        yield thread.client
    finally:
        await thread.stop()
