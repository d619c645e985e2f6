"""The engine of one model: schedule, run the batch, read the output, report, in a loop.

An ``Engine`` runs in a separate thread, away from the event loop, or in a separate process. It exchanges
``messages``: ``send`` queues one, and each step delivers a list of them. With nothing to run, the engine
blocks on its inbox.

``make_request`` turns a ``Submit`` into a ``Request``, and ``outputs`` turns sampled tokens into messages.
"""

from __future__ import annotations

import logging
import math
import queue
import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias

from msgspec.structs import astuple

from agentflow.engine.adapters import AdapterRead, Adapters
from agentflow.engine.batch import Batch
from agentflow.engine.cache.blocks import BlockFeed, BlocksReport
from agentflow.engine.constrained.grammar_builder import BuiltGrammar, GrammarBuilder
from agentflow.engine.constrained.grammar_cache import GrammarCache
from agentflow.engine.messages import (
    PHASES,
    SIGN_OF_LIFE_S,
    STEP_BOUNDS_S,
    Abort,
    BlocksRequest,
    BlocksUpdate,
    BucketCounts,
    Charges,
    CloseState,
    DropMedium,
    Failed,
    FromEngine,
    KeepMedium,
    LoadAdapter,
    NeedPayload,
    PeekRequest,
    SnapshotRequest,
    Started,
    StatsRequest,
    StepBegins,
    Stop,
    ToEngine,
    UnloadAdapter,
    UpdateHint,
)
from agentflow.engine.models.memory_need import FEATURE_BYTES
from agentflow.engine.outputs import Outputs
from agentflow.engine.request import Request, Status, Submit, make_request
from agentflow.engine.runner import AcceleratorFault, MediaRunner, ModelRunner, OutOfMemory, PreparingRunner
from agentflow.engine.scheduling.media_work import MediaWork
from agentflow.engine.scheduling.policies.charges import Charged
from agentflow.engine.scheduling.scheduler import RequestFault, Scheduler, SchedulerConfig
from agentflow.engine.text.tokenizer import Tokenizer
from agentflow.engine.watching.snapshot import EngineWatch
from agentflow.errors import AgentflowError, Cancelled, EngineFailed
from agentflow.protocol.events import StepRecord

logger = logging.getLogger(__name__)

_Message: TypeAlias = ToEngine | KeepMedium | BuiltGrammar | AdapterRead

DeliverMessages = Callable[[list[FromEngine]], None]
# After this many failed forward passes in a row the engine counts as broken.
MAX_FAILURES_IN_A_ROW = 3
MAX_REPORTED_BLOCKS = 1024
"""The most blocks in one report of the cache."""
READ_S = 0.01
"""The processor time for messages between two steps, unless the last step took longer. Other messages wait
for the next step, so that running requests continue while thousands of others arrive."""
CHARGES_EVERY_S = 0.05
"""The least time between two reports of charges."""
_SCHEDULE, _RUN, _COMPLETE, _DELIVER = range(len(PHASES))


class EngineBroken(Exception):
    """The engine cannot continue, through no fault of its requests: another engine may run them. The message
    is safe to show to clients."""


@dataclass(slots=True)
class _Launched:
    """A batch that was launched and not collected."""

    num_tokens: int
    num_decode: int  # of these, the tokens of requests that decode
    num_waiting: int  # requests in the queue when it was launched
    began: float = 0.0  # on the clock ``perf_counter``
    handle: Any = None  # of the runner
    error: Exception | None = None  # why its launch failed


class Engine:
    """Runs requests on a model. ``send`` may be called from any thread.

    Args:
        runner: The model.
        tokenizer: The model's tokenizer.
        config: The scheduler's options.
        deliver: Called in the engine's thread with the messages of a step: while the next step runs, or
            immediately if there is none.
        reports: The engine reports its cached blocks and charges, for routers.
    """

    def __init__(
        self,
        runner: ModelRunner,
        tokenizer: Tokenizer,
        config: SchedulerConfig,
        deliver: DeliverMessages,
        *,
        reports: bool = False,
    ) -> None:
        self._runner = runner
        self._deliver = deliver
        self._is_stuck = False  # the last step had nothing to run
        self._inbox: queue.SimpleQueue[_Message] = queue.SimpleQueue()
        info = runner.info
        self._media = MediaWork(runner, FEATURE_BYTES) if isinstance(runner, MediaRunner) else None
        self._blocks = BlockFeed(MAX_REPORTED_BLOCKS)
        self._wants_all_blocks = False  # the next report is a snapshot
        self.scheduler = Scheduler(
            num_slots=info.num_slots,
            max_context=info.max_context,
            config=config,
            model=info.identity,
            media=self._media,
            on_blocks=self._blocks.on_blocks if reports else None,
        )
        if reports:
            self.scheduler.waiting.charged = Charged()
        self.times = [BucketCounts.empty(STEP_BOUNDS_S) for _ in PHASES]
        self._watch = EngineWatch(self.scheduler, info.model)
        self._adapters = Adapters(runner, self._inbox.put)
        self._requests: dict[int, Request] = {}
        self._outbox: list[FromEngine] = []
        self._grammars = GrammarCache(tokenizer, info.vocab_size)
        self._outputs = Outputs(self.scheduler, tokenizer, self._grammars, info.end_token_ids, self._outbox)
        self._builder = GrammarBuilder(self._grammars.make, self._inbox.put)
        self._unready: dict[str, dict[int, Submit]] = {}  # by the keys of the grammars that are being built
        self._ready: deque[tuple[int, Submit]] = deque()  # the submits whose grammars are built
        self._awaited: dict[int, str] = {}  # the keys of the grammars in ``_unready`` and ``_ready``
        self._awaiting: dict[int, dict[int, Request]] = {}  # the requests that wait for them, by state and id
        self._started: set[int] = set()
        self._delivery_error: Exception | None = None
        self._in_flight: deque[_Launched] = deque()  # oldest first
        self._num_ahead = 1 if info.launches_ahead else 0
        self._preparing = runner if info.prepares and isinstance(runner, PreparingRunner) else None
        self._collected = 0.0  # when the last batch was collected, on the clock ``perf_counter``
        self._took_s = 0.0  # the time of that batch
        # That batch until ``_record`` has recorded its step: its number, the requests that run and the slots
        # in use after it, and the seconds that reading its output took.
        self._unrecorded: tuple[_Launched, int, int, int, float] | None = None
        self._num_failures = 0  # forward passes in a row
        self._num_halved = 0  # batches since the start
        self._num_unhandled = 0  # faults in messages about no request, since the start
        self._has_stop = False  # ``Stop`` was sent: all messages up to it are read
        self._is_stopping = False
        self._charges_at = 0.0  # the next report of charges, on the clock ``monotonic``

    def send(self, message: ToEngine | KeepMedium) -> None:
        """Queues a message. The engine reads it before one of the next steps."""
        self._inbox.put(message)
        if isinstance(message, Stop):
            self._has_stop = True

    def run(self) -> None:
        """Runs until ``Stop``. ``EngineBroken`` after an accelerator fault or ``MAX_FAILURES_IN_A_ROW``
        failed forward passes."""
        try:
            if not self._runner.info.embedding_size:
                self._grammars.prepare()
            while True:
                self.take_messages()
                self._is_stuck = False
                if self._is_stopping or not self.step():
                    self._deliver_outbox()
                    self._is_stuck = True
                if self._is_stopping:
                    return
        finally:
            self._builder.close()
            self._adapters.close()
            try:
                self._drain()  # a runner may not be closed while a batch runs
                self._runner.close()
            except Exception:  # a broken device may not even free its memory
                logger.exception("cannot close the model runner")

    def step(self) -> bool:
        """Launches the next batch, and collects the oldest one in flight unless another one may be launched
        first. Returns False if there was nothing to run."""
        try:
            is_new = self._launch()
        except RequestFault as fault:
            self._fail_all(fault.requests, _logged("cannot schedule the request"))
            return True
        if not self._in_flight:
            return False
        if not is_new or len(self._in_flight) > self._num_ahead or self._in_flight[-1].error is not None:
            self._collect()
        return True

    def _launch(self) -> bool:
        """Schedules and launches a batch, if there is one to run."""
        if not self.scheduler.running and not self.scheduler.waiting.num_waiting:
            return False
        if self._in_flight and self.scheduler.wants_media:
            return False
        began = time.perf_counter()
        batch = self.scheduler.schedule()
        is_encoding = self._media is not None and bool(self._media.wanted) and self._media.has_work
        if is_encoding:
            self._encode()
            began = time.perf_counter()
        if batch is None:
            return is_encoding
        launched = _Launched(
            len(batch.token_ids), self.scheduler.num_decode_tokens, self.scheduler.waiting.num_waiting
        )
        self._in_flight.append(launched)
        launched.began = time.perf_counter()
        try:
            launched.handle = self._runner.launch(batch)
        except Exception as error:  # raised when its turn comes: batches complete in order
            launched.error = error
        self.times[_SCHEDULE].count(STEP_BOUNDS_S, launched.began - began)
        self._announce(batch)
        return True

    def _encode(self) -> None:
        """Runs the planned slices of encodings. A failure fails the requests with the image."""
        assert self._media is not None
        self._outbox.append(StepBegins(1))
        self._meanwhile()
        for identity, error in self._media.run_planned():
            if isinstance(error, AcceleratorFault):
                self._break(_logged("the accelerator failed", error))
            if isinstance(error, OutOfMemory) and self._media.shrink(self.scheduler.running.values()):
                continue
            self._fail_medium(identity, error)
        if self._delivery_error is not None:
            raise self._delivery_error

    def _fail_medium(self, identity: str, error: Exception) -> None:
        """Fails the requests that need the features of a medium, which cannot be made. Requests whose grammar
        is not built yet do not need them yet."""
        assert self._media is not None
        failure = _as_failure(error, "cannot encode an image of the request")
        for request in [*self._media.wanted.get(identity, ())]:
            if self.scheduler.needs_medium(request, identity):
                self._fail(request.id, failure)

    def _collect(self) -> None:
        """Waits for the oldest batch in flight, and reports its results."""
        self._meanwhile()
        launched = self._in_flight.popleft()
        try:
            if launched.error is not None:
                raise launched.error
            output = self._runner.collect(launched.handle)
        except Exception as error:
            self._drain()
            self._forward_failed(error)
            return
        self._num_failures = 0
        if self._delivery_error is not None:
            raise self._delivery_error
        has_run = time.perf_counter()
        took_s = has_run - max(launched.began, self._collected)
        self._collected, self._took_s = has_run, took_s
        try:
            rows = self.scheduler.complete(output, took_s)
        except Exception:
            self._drain()
            failed = self.scheduler.discard()
            if not failed:  # the next step would end in the same way
                raise
            self._fail_all(failed, _logged("cannot read the forward pass's output"))
            return
        for row in rows:
            if row.request.status is Status.FINISHED:
                continue
            request = row.request
            try:
                if row.error is not None:
                    raise row.error
                self._outputs.advance(row)
            except Exception as error:
                self._fail(request.id, _as_failure(error, "cannot process the request's output"))
            if request.status is Status.FINISHED:
                self._drop(request.id)
        if self._collected >= self._watch.notes_use_at:
            self._watch.note_use(self._collected)
        memory, num_running = self.scheduler.memory, len(self.scheduler.running)
        complete_s = time.perf_counter() - has_run
        self._unrecorded = launched, memory.num_steps, num_running, memory.num_in_use, complete_s

    def _record(self) -> None:
        """Records the last step that has run, for clients that watch the engine, unless it is recorded."""
        if self._unrecorded is None:
            return
        launched, number, num_running, num_in_use, complete_s = self._unrecorded
        self._unrecorded = None
        self.times[_RUN].count(STEP_BOUNDS_S, self._took_s)
        self.times[_COMPLETE].count(STEP_BOUNDS_S, complete_s)
        self._watch.steps.append(
            StepRecord(
                number,
                launched.num_tokens - launched.num_decode,
                launched.num_decode,
                num_running,
                launched.num_waiting,
                num_in_use,
                round(1000 * self._took_s, 3),
            )
        )

    def _drain(self) -> None:
        """Collects the batches launched after one that failed. Their outputs depend on it and do not
        count."""
        while self._in_flight:
            launched = self._in_flight.popleft()
            try:
                if launched.error is None:
                    self._runner.collect(launched.handle)
            except AcceleratorFault:
                self._break(_logged("the accelerator failed"))
            except Exception:
                logger.debug("a batch failed after one that had failed", exc_info=True)

    def take_messages(self) -> None:
        """Handles the queued messages, for as long as the last step took or for ``READ_S``. If there is
        nothing to run, waits for one first, or until a paused program is resumed."""
        num_waiting = self.scheduler.waiting.num_waiting
        timeout_s = self.scheduler.resumes_in_s if num_waiting and self._is_stuck else math.inf
        has_work = self.scheduler.running or num_waiting or self._in_flight
        is_idle = not (self._outbox or self._blocks.changes or self._ready) and (
            not has_work or timeout_s < math.inf
        )
        if not is_idle and not self._ready and self._inbox.empty():  # as in most steps
            return
        self._record()
        timeout_s = min(timeout_s, SIGN_OF_LIFE_S)
        read_s, began_s = max(READ_S, self._took_s), time.thread_time()
        while is_idle or self._has_stop or time.thread_time() - began_s < read_s:
            if self._ready:
                self._enter(*self._ready.popleft())
                continue
            try:
                message = self._inbox.get(is_idle, timeout_s if has_work else None)
            except queue.Empty:
                if is_idle and timeout_s == SIGN_OF_LIFE_S:
                    self._deliver([])
                return
            is_idle = False
            if isinstance(message, Stop):
                self._is_stopping = True
                return
            try:
                self._handle(message)
            except Exception as error:
                self._cannot_handle(message, error)

    def _handle(self, message: _Message) -> None:
        match message:
            case Submit():
                self._submit(message)
            case BuiltGrammar():
                self._grammar_built(message)
            case Abort():
                if message.request_id in self._requests:
                    self._fail(message.request_id, Cancelled("the request was aborted"))
            case CloseState():
                self.scheduler.close_state(message.state, is_dropped=message.is_dropped)
            case UpdateHint():
                self._update_hint(message)
            case BlocksRequest():
                self._wants_all_blocks = True
            case Charges():
                self._charge(message)
            case StatsRequest() | SnapshotRequest():
                num_unready = len(self._awaited)
                stats = self._watch.stats(message.ticket, self.times, num_unready)
                if isinstance(message, SnapshotRequest):
                    self._outbox.append(self._watch.snapshot(message, self._requests.values(), stats))
                else:
                    self._outbox.append(stats)
            case PeekRequest():
                self._outbox.append(self._watch.peek(message))
            case LoadAdapter():
                self._adapters.read(message)
            case AdapterRead():
                self._install_adapter(message)
            case UnloadAdapter():
                self._adapters.unload(message.identity)
            case KeepMedium():
                if self._media is not None:
                    self._media.add(message.medium)
            case DropMedium():
                if self._media is not None:
                    self._media.drop(message.identity)

    def _cannot_handle(self, message: _Message, error: Exception) -> None:
        """Fails the requests that the message is about, and no others."""
        match message:
            case Submit() | Abort():
                failed = [message.request_id]
            case UpdateHint():
                failed = [one.id for one in self._requests.values() if one.origin.state == message.state]
            case BuiltGrammar():
                failed = [one for one, key in self._awaited.items() if key == message.key]
            case AdapterRead():
                failed = [message.message.ticket]
            case LoadAdapter() | StatsRequest() | SnapshotRequest() | PeekRequest():
                failed = [message.ticket]
            case _:  # it is about no request
                failed = []
        if not failed:
            self._num_unhandled += 1
            if self._num_unhandled.bit_count() == 1:  # log at 1, 2, 4, …: it may happen in every step
                text = "cannot handle a message (%d so far): %s"
                logger.error(text, self._num_unhandled, type(message).__name__, exc_info=error)
            return
        failure = _as_failure(error, "cannot handle a message of the request")
        for request_id in failed:
            self._fail(request_id, failure)

    def _charge(self, message: Charges) -> None:
        """Charges tenants for the work of other engines."""
        for tenant, used in message.tenants:
            self.scheduler.waiting.charge_elsewhere(tenant, used)
        for tenant, program, num_tokens in message.programs:
            self.scheduler.waiting.program_elsewhere(tenant, program, num_tokens)

    def _add_reports(self) -> None:
        """Adds the reports for a router, if they were asked for. They go to the front, because ``StepBegins``
        must stay last. At most one is of blocks, so that these are delivered in the order of their
        numbers."""
        report: BlocksReport | None = None
        if self._wants_all_blocks:
            report = self._blocks.snapshot(self.scheduler.memory.cache.stored_blocks())
            self._wants_all_blocks = False
        elif self._blocks.changes:
            report = self._blocks.flush()
        if report is not None:
            self._outbox.insert(0, BlocksUpdate.of(report))
        charged = self.scheduler.waiting.charged
        if charged and (now_s := time.monotonic()) >= self._charges_at:
            self._charges_at = now_s + CHARGES_EVERY_S
            self._outbox.insert(0, Charges(*charged.take()))

    def _install_adapter(self, read: AdapterRead) -> None:
        try:
            self._outbox.append(self._adapters.install(read))
        except Exception as error:
            failure = _as_failure(error, "cannot load the adapter")
            self._outbox.append(Failed(read.message.ticket, failure.code, str(failure), failure.param))

    def _submit(self, message: Submit) -> None:
        """Checks a request and queues it. If its grammar is not built yet, it first waits for the grammar,
        without slots, while the steps of others continue."""
        constraint, new, unready = message.constraint, None, None
        if constraint is not None and not self._grammars.knows(constraint):
            unready = self._unready.get(constraint.key)
            new = constraint if unready is None else None
        if new is not None and not new.payload:
            self._outbox.append(NeedPayload(message.request_id))
            return
        try:
            request = make_request(message, self._runner.info, self.scheduler.max_total_tokens)
            if any(self._media is None or run.identity not in self._media for run in request.media.runs):
                raise EngineFailed("the engine does not have an image of the request")
            if message.adapter:
                self._adapters.use(message.adapter, message.origin.adapter)
        except Exception as error:
            self._fail(message.request_id, _as_failure(error, "cannot accept the request"))
            return
        self._requests[request.id] = request
        if new is not None:
            self._builder.build(new, message.origin.tenant)
            unready = self._unready[new.key] = {}  # if it is built: others wait for it
        if unready is None:
            self._enter(request.id, message)
        else:
            assert constraint is not None
            unready[request.id], self._awaited[request.id] = message, constraint.key
            self._awaiting.setdefault(request.origin.state, {})[request.id] = request

    def _update_hint(self, update: UpdateHint) -> None:
        """Updates the hint of a state's requests, including requests whose grammar is not built yet."""
        for request in self._awaiting.get(update.state, {}).values():
            request.origin = update.apply_to(request.origin)
        self.scheduler.update_hint(*astuple(update))

    def _grammar_built(self, built: BuiltGrammar) -> None:
        messages = self._unready.pop(built.key, {})
        if built.grammar is not None:
            self._grammars.put(built.key, built.grammar)
        if built.error is None:
            self._ready += messages.items()
            return
        failure = _as_failure(built.error, "cannot build the grammar")
        for request_id in [*messages]:
            self._fail(request_id, failure)

    def _enter(self, request_id: int, message: Submit) -> None:
        """Starts the text of a request whose grammar is built, and adds it to the scheduler's queue, unless
        it was aborted."""
        request = self._requests.get(request_id)
        if request is None:
            return
        self._stop_waiting(request)
        try:
            self._outputs.begin(request, message)
            self.scheduler.add(request)
            if message.generated_ids or request.is_steered:
                self._outputs.end_if_complete(request)
        except Exception as error:
            self._fail(request.id, _as_failure(error, "cannot accept the request"))
        if request.status is Status.FINISHED:
            self._drop(request.id)

    def _stop_waiting(self, request: Request) -> str | None:
        """The request no longer waits for its grammar. Returns the key of the grammar, if it did."""
        key = self._awaited.pop(request.id, None)
        if key is not None:
            siblings = self._awaiting[request.origin.state]
            del siblings[request.id]
            if not siblings:
                del self._awaiting[request.origin.state]
        return key

    def _announce(self, batch: Batch) -> None:
        new = self.scheduler.running.keys() - self._started
        if new:
            self._started |= new
            self._outbox.append(Started(sorted(new)))
        self._outbox.append(StepBegins(len(batch.token_ids)))

    def _meanwhile(self) -> None:
        """Does the work that the next batch does not depend on, while a batch runs: makes and delivers the
        remaining messages of the previous step, records the step, and learns from its time. Then prepares the
        next batch. An error of the delivery is raised only after the batch, which did not cause it."""
        self._record()
        self.scheduler.cost.settle()
        try:
            self._deliver_outbox()
        except Exception as error:
            self._delivery_error = error
        if self._preparing is not None and self._inbox.empty():
            try:
                batch = self.scheduler.prepare()
                if batch is not None:
                    self._preparing.prepare(batch)
            except Exception:  # without it, the step fails again and shows which request is at fault
                logger.debug("cannot prepare the next batch", exc_info=True)

    def _report_texts(self) -> None:
        for request, error in self._outputs.report():
            self._fail(request.id, _as_failure(error, "cannot process the request's output"))

    def _deliver_outbox(self) -> None:
        self._report_texts()
        self._add_reports()
        if self._outbox:
            delivered = [*self._outbox]
            self._outbox.clear()
            began = time.perf_counter()
            self._deliver(delivered)
            self.times[_DELIVER].count(STEP_BOUNDS_S, time.perf_counter() - began)

    def _fail(self, request_id: int, error: AgentflowError) -> None:
        is_known = request_id in self._requests
        self._report_texts()  # it needs the request's text, and may fail it already
        if is_known and request_id not in self._requests:
            return
        self._drop(request_id)
        self._outbox.append(Failed(request_id, error.code, str(error), error.param))

    def _fail_all(self, requests: Sequence[Request], failure: EngineFailed) -> None:
        for request in requests:
            self._fail(request.id, failure)

    def _drop(self, request_id: int) -> None:
        request = self._requests.get(request_id)
        self._outputs.drop(request_id)
        self._started.discard(request_id)
        key = None if request is None else self._stop_waiting(request)
        messages = None if key is None else self._unready.get(key)
        if key is not None and messages is not None:  # the grammar is not built yet
            messages.pop(request_id, None)
            if not messages:
                del self._unready[key]
                self._builder.cancel(key)
        if request is not None:
            if request.status is not Status.FINISHED:
                self.scheduler.release(request)
            # Not before: the scheduler would go on with a request that the engine does not know.
            del self._requests[request_id]
            request.next_mask = None  # it refers to the request
            if request.adapter:
                self._adapters.release(request.adapter)

    def _forward_failed(self, error: Exception) -> None:
        """Called in the handler of ``error``. A batch that ran out of memory runs again in halves; a request
        that does not fit alone is failed. After any other error, each request of the batch runs again alone,
        and is failed if that pass fails too."""
        if isinstance(error, AcceleratorFault):
            self._break(_logged("the accelerator failed"))
        if isinstance(error, OutOfMemory):
            failed = self.scheduler.retries.smaller()
            if failed:
                self._fail_all(failed, _logged("there is not enough memory to run this request"))
                return
            self._num_halved += 1
            if self._num_halved.bit_count() == 1:  # log at 1, 2, 4, …: it may happen in every step
                text = "out of memory in a forward pass (%d so far), running its batch in halves: %s"
                logger.warning(text, self._num_halved, error)
            return
        self._num_failures += 1
        failure = _logged("the forward pass failed")
        if self._num_failures == MAX_FAILURES_IN_A_ROW:
            self._break(failure)
        self._fail_all(self.scheduler.retries.one_by_one(), failure)

    def _break(self, failure: EngineFailed) -> NoReturn:
        self._deliver_outbox()  # includes which requests were running
        raise EngineBroken(f"the engine is broken: {failure}")


def _as_failure(error: Exception, what: str) -> AgentflowError:
    """The error itself if clients may see it; else ``_logged``."""
    return error if isinstance(error, AgentflowError) else _logged(what, error)


def _logged(what: str, error: Exception | None = None) -> EngineFailed:
    """Logs ``error`` (by default, the exception being handled) under an id. The error for clients contains
    only that id."""
    error_id = secrets.token_hex(4)
    logger.error("error %s: %s", error_id, what, exc_info=error or True)
    return EngineFailed(f"{what} (error {error_id}: see the engine's log)")
