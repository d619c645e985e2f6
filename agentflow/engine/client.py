"""The event loop's side of an engine: sends it requests and waits for their ends; and its thread."""

from __future__ import annotations

import itertools
import logging
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Protocol

import anyio
import anyio.lowlevel

from agentflow.engine.engine import Engine, EngineBroken
from agentflow.engine.grammar.compiler.messages import CompiledConstraint
from agentflow.engine.process.ipc import (
    Abort,
    CloseState,
    EngineStats,
    Failed,
    Finished,
    FromEngine,
    Origin,
    Progress,
    StatsRequest,
    Stop,
    Submit,
    ToEngine,
)
from agentflow.engine.runner import ModelRunner, RunnerInfo
from agentflow.engine.scheduling.scheduler import SchedulerConfig
from agentflow.engine.text.tokenizer import Tokenizer
from agentflow.errors import AgentflowError, EngineDown, EngineFailed, Overloaded, from_code
from agentflow.protocol.sampling import SamplingParams
from agentflow.runtime.limits import part_of
from agentflow.runtime.task_group import loop_caller

logger = logging.getLogger(__name__)

Load = Callable[[], tuple[ModelRunner, Tokenizer, SchedulerConfig]]
OnText = Callable[[str], None]
OnProgress = Callable[[Progress], None]
_NOWHERE = Origin()
# How long leaving waits for the last step of an engine thread.
END_S = 1.0


class EngineLink(Protocol):
    """The way to an engine: the ``Engine`` itself where it is a thread, an ``EngineSupervisor`` where it
    is a process. Answers come to ``EngineClient.receive``. ``send`` raises EngineFailed while the engine is
    down."""

    def send(self, message: ToEngine) -> None: ...


class RequestObserver(Protocol):
    """Sees all that goes over an ``EngineClient``, in the event loop's thread. It may not raise."""

    def sent(self, submit: Submit) -> None:
        """A request was accepted and is on its way to the engine."""

    def received(self, messages: Sequence[FromEngine]) -> None:
        """The messages of one step. A request's last one is its ``Finished`` or ``Failed``."""


class _Call:
    """One question in flight, a request or a report: who hears how it goes on, and its answer."""

    __slots__ = ("answer", "broken_by", "ended", "error", "on_progress")

    def __init__(self, on_progress: OnProgress | None = None) -> None:
        self.on_progress = on_progress
        self.ended = anyio.Event()
        self.answer: Finished | EngineStats | None = None
        self.error: AgentflowError | None = None
        self.broken_by: Exception | None = None  # raised by ``on_progress``

    def progress(self, message: Progress) -> None:
        if self.on_progress is None or self.broken_by is not None:
            return
        try:
            self.on_progress(message)
        except Exception as error:  # the fault of this request's consumer: nothing else may fail of it
            self.broken_by = error
            self.ended.set()

    def end(self, answer: Finished | EngineStats | Failed) -> None:
        if isinstance(answer, Failed):
            self.error = from_code(answer.code, answer.message)
        else:
            self.answer = answer
        self.ended.set()


class EngineClient:
    """Use ``running_engine`` or ``supervised_engine`` to make one. All methods belong to the event loop's
    thread. ``max_unfinished``: requests that the engine has not ended, aborted ones included; None: any
    number. Beyond it, and beyond one tenant's part of it, a request is refused with Overloaded."""

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
        self._unfinished: dict[int, str] = {}  # whose they are
        self._num_unfinished_of: Counter[str] = Counter()
        self._report: tuple[int, _Call] | None = None  # the question for its state, while it has no answer
        self._ended_because: str | None = None
        self._observers: list[RequestObserver] = []

    def observe(self, observer: RequestObserver) -> None:
        """From now on ``observer`` sees what is sent and heard."""
        self._observers.append(observer)

    async def until_idle(self) -> None:
        """Returns when nobody waits for a request."""
        while self._calls:
            await self._one_ended.wait()

    @property
    def num_calls(self) -> int:
        """Requests that somebody waits for."""
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
    ) -> Finished:
        """Generates; ``on_sent`` is called when the engine's queue has the request, ``on_text`` is called
        with each delta, ``on_progress`` with all progress of each step. Cancelling the call aborts the
        request, and so does what the latter two raise, which is raised here."""
        message = Submit(
            next(self._ids),
            token_ids,
            params,
            seed=seed,
            origin=origin,
            constraint=constraint,
            jump_forward=jump_forward,
        )
        return await self._call(message, on_progress if on_text is None else _texts_to(on_text), on_sent)

    async def compute(self, token_ids: list[int], *, origin: Origin = _NOWHERE) -> Finished:
        """Only computes the tokens, so that they are cached."""
        return await self._call(Submit(next(self._ids), token_ids, None, origin=origin), None)

    async def score(self, token_ids: list[int], score_from: int, *, origin: Origin = _NOWHERE) -> Finished:
        """Log-probabilities of ``token_ids[score_from:]``, each given all tokens before it."""
        message = Submit(next(self._ids), token_ids, None, origin=origin, score_from=score_from)
        return await self._call(message, None)

    async def score_choices(
        self, token_ids: list[int], choices: Sequence[Sequence[int]], *, origin: Origin = _NOWHERE
    ) -> Finished:
        """Log-probabilities of each choice's tokens after ``token_ids``, all computed together. What they
        begin with in common is computed once. BadArgument for a choice without a token."""
        message = Submit(next(self._ids), token_ids, None, origin=origin, choices=choices)
        return await self._call(message, None)

    def compute_ahead(self, token_ids: list[int], *, origin: Origin) -> int:
        """Has the tokens computed for those that will come, if there is room; nobody waits. Returns what
        ``forget`` takes."""
        request_id = next(self._ids)
        if self._ended_because is None and self._has_room(origin.tenant):
            with suppress(EngineFailed):  # it is down
                self._submit(Submit(request_id, token_ids, None, origin=origin))
        return request_id

    def _has_room(self, tenant: str) -> bool:
        try:
            self.check_room(tenant)
        except Overloaded:
            return False
        return True

    def forget(self, request_id: int) -> None:
        """What was to be computed ahead is not needed, if it has not been computed yet."""
        self.engine.send(Abort(request_id))

    def new_number(self) -> int:
        """For an ``Origin``: a state or task group that no other has."""
        return next(self._ids)

    def close_state(self, state: int) -> None:
        """No more requests of this state will come."""
        self.engine.send(CloseState(state))

    async def stats(self) -> EngineStats:
        """Counters and gauges, read between two steps. EngineFailed, at once, while it restarts.

        The engine is asked one question at a time: whoever asks before it has answered hears the same answer,
        also where nobody waits for it any more. It has in it whatever the client had heard before it asked.
        """
        self._check_alive()
        if self._report is None:
            ticket = next(self._ids)
            self.engine.send(StatsRequest(ticket))
            self._report = (ticket, _Call())
        _, report = self._report
        await report.ended.wait()
        stats = self._answer(report)
        assert isinstance(stats, EngineStats)
        return stats

    async def _call(
        self, message: Submit, on_progress: OnProgress | None, on_sent: Callable[[], None] | None = None
    ) -> Finished:
        # A thread's work, and a task's start, are not cancelled: whoever waited may have gone meanwhile.
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
        """``Overloaded`` where the engine has as many unfinished requests, or as many of the tenant's, as
        there may be."""
        if self._max_unfinished is None:
            return
        if len(self._unfinished) >= self._max_unfinished:
            most = self._max_unfinished
            raise Overloaded(f"the engine has {most} unfinished requests, which is the limit: try later")
        most = part_of(self._max_unfinished, tenant)
        if self._num_unfinished_of[tenant] >= most:
            raise Overloaded(
                f"the engine has {most} unfinished requests of this tenant, which is what one may have: "
                "try later"
            )

    def _submit(self, message: Submit) -> None:
        self.engine.send(message)
        self._unfinished[message.request_id] = message.origin.tenant
        self._num_unfinished_of[message.origin.tenant] += 1
        for observer in self._observers:
            observer.sent(message)

    def _answer(self, call: _Call) -> Finished | EngineStats:
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
        """Hands a step's messages to whom they concern. Called in the event loop's thread."""
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
                case EngineStats():
                    self._end(message.ticket, message)

    def _has_ended(self, request_id: int) -> None:
        tenant = self._unfinished.pop(request_id, None)
        if tenant is not None:
            self._num_unfinished_of[tenant] -= 1
            if not self._num_unfinished_of[tenant]:
                del self._num_unfinished_of[tenant]

    def _end(self, number: int, answer: Finished | EngineStats | Failed) -> None:
        call = self._calls.get(number)
        if self._report is not None and self._report[0] == number:
            call, self._report = self._report[1], None
        if call is not None:
            call.end(answer)

    def end_all(self, why: str) -> None:
        """The engine is gone: whoever waits for it, or asks it for something later, hears so."""
        self._ended_because = self._ended_because or why
        for call in self._calls.values():
            call.ended.set()
        if self._report is not None:
            self._report[1].ended.set()


def _texts_to(on_text: OnText) -> OnProgress:
    def hear(progress: Progress) -> None:
        if progress.text:
            on_text(progress.text)

    return hear


class _EngineThread(threading.Thread):
    """Loads an engine and runs it. ``ready``: it has loaded, or failed to. ``ended``: the thread is over.

    A load can take seconds and cannot be interrupted. So the thread is a daemon: when its session ends
    meanwhile, it is left behind, drops what it has loaded as soon as it can, and keeps no process alive."""

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

    def run(self) -> None:
        try:
            engine = self._loaded()
            if engine is not None:
                self._run(engine)
        finally:
            self._tell(self.ended.set)

    def _loaded(self) -> Engine | None:
        try:
            runner, tokenizer, config = self._load()
            engine = Engine(runner, tokenizer, config, self._deliver)
            self.client = EngineClient(engine, runner.info, tokenizer, max_unfinished=self._max_unfinished)
        except BaseException as error:
            self.failure = error
            return None
        finally:
            self._tell(self.ready.set)
        if self._is_stopping:  # after ``client``: one of the two threads sees what the other has set
            engine.send(Stop())
        return engine

    def _run(self, engine: Engine) -> None:
        why = "the engine has stopped"
        try:
            engine.run()
        except EngineBroken as error:
            why = str(error)
        except BaseException:
            why = "the engine broke: its log says how"
            logger.exception("the engine broke")
        assert self.client is not None
        client = self.client
        self._tell(lambda: client.end_all(why))

    def _deliver(self, messages: list[FromEngine]) -> None:
        assert self.client is not None
        client = self.client
        self._tell(lambda: client.receive(messages))

    def _tell(self, function: Callable[[], object]) -> None:
        with suppress(RuntimeError):  # the loop has ended
            self._call_in_loop(function)

    async def stop(self) -> None:
        """Ends the engine after its step, and waits for that, but no longer than ``END_S``. For the end of a
        load it does not wait."""
        self._is_stopping = True
        if self.client is None:
            return
        self.client.engine.send(Stop())
        with anyio.move_on_after(END_S, shield=True):
            await self.ended.wait()


@asynccontextmanager
async def running_engine(load: Load, *, max_unfinished: int | None = None) -> AsyncIterator[EngineClient]:
    """An engine in a thread of its own for as long as the scope lasts. ``load`` runs there too:
    loading a model takes seconds and must not block the loop. Its errors are raised here. Leaving the scope
    takes ``END_S`` at most, also by a native ``task.cancel()``, which passes every shield; while ``load``
    runs, nothing."""
    thread = _EngineThread(load, max_unfinished)
    thread.start()
    try:
        await thread.ready.wait()
        if thread.client is None:
            raise thread.failure or EngineFailed("the engine did not start")
        yield thread.client
    finally:
        await thread.stop()
