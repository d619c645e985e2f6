"""The engine of one model: schedule → one batch → run → end of text → commit, in a loop.

It lives in a thread of its own, away from the event loop, and speaks only in the messages of
``engine_messages``. It sleeps on its inbox while there is nothing to run.

What an engine tells of itself: its counters and gauges, read between two steps.

A request whose text a grammar constrains: keeps its mask up to date, and jumps forward for it.
"""

from __future__ import annotations

import logging
import queue
import resource
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import NoReturn

from agentflow.engine.batch import Batch
from agentflow.engine.grammar.grammar import TokenWords
from agentflow.engine.grammar.grammar_cache import GrammarCache
from agentflow.engine.grammar.jump_forward import ConstrainedText, Encode, Jump
from agentflow.engine.intake import request_of, text_end_of
from agentflow.engine.process.ipc import (
    Abort,
    CloseState,
    EngineStats,
    Failed,
    Finished,
    FromEngine,
    Progress,
    Report,
    Started,
    StepBegins,
    Stop,
    Submit,
    ToEngine,
    Wanted,
)
from agentflow.engine.request import Request, Status, TopTokens
from agentflow.engine.runner import AcceleratorFault, ModelRunner, OutOfMemory
from agentflow.engine.scheduling.in_flight import StepResult
from agentflow.engine.scheduling.scheduler import Scheduler, SchedulerConfig
from agentflow.engine.step_times import COMPLETE, DELIVER, RUN, SCHEDULE, StepTimes
from agentflow.engine.text.detokenizer import TextEnd
from agentflow.engine.text.tokenizer import Tokenizer
from agentflow.errors import AgentflowError, Cancelled, EngineFailed, RequestRefused


def engine_stats(ticket: int, model: str, scheduler: Scheduler, times: StepTimes) -> EngineStats:
    """The answer to ``Report(ticket)``."""
    memory = scheduler.memory
    counters = scheduler.counters
    return EngineStats(
        ticket=ticket,
        model=model,
        steps=counters.steps,
        prompt_tokens=counters.prompt_tokens,
        cached_tokens=counters.cached_tokens,
        cached_output_tokens=counters.cached_output_tokens,
        computed_tokens=counters.computed_tokens,
        generated_tokens=counters.generated_tokens,
        forced_tokens=counters.forced_tokens,
        evicted_tokens=counters.evicted_tokens,
        retractions=counters.retractions,
        free_slots=memory.slots.num_free,
        cached_slots=memory.cache.num_cached,
        held_slots=memory.num_held,
        total_slots=memory.slots.total,
        running=len(scheduler.running),
        waiting=len(scheduler.waiting),
        peak_resident_bytes=peak_resident_bytes(),
        step_times=deepcopy(times.phases),  # read in another thread, while this one counts on
    )


def peak_resident_bytes() -> int:
    """Largest resident memory of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class ConstrainedRequest:
    """``request.token_mask`` is right after each call."""

    def __init__(self, request: Request, text: ConstrainedText, end_words: TokenWords) -> None:
        self._request = request
        self._text = text
        self._end_words = end_words
        self._cannot_go_on = False

    def is_complete(self) -> bool:
        """Whether the text is complete, and nothing may follow or none of the model's tokens can write it."""
        return self._cannot_go_on or self._text.must_end()

    def begin(self, generated_ids: Sequence[int]) -> Jump | None:
        """What an engine that died had generated is there already; what is forced then is appended."""
        for token_id in generated_ids:
            self._text.take(token_id)
        return self._go_on()

    def take(self, token_id: int) -> Jump | None:
        """One more token was sampled; what is forced after it is appended."""
        self._text.take(token_id)
        return self._go_on()

    def _go_on(self) -> Jump | None:
        jump = self._text.jump(self._request.max_new_tokens)
        self._request.token_mask = self._mask()
        return jump

    def _mask(self) -> TokenWords:
        """With the tokens that end the generation, where it may end. ``RequestRefused`` for an empty one."""
        text, request = self._text, self._request
        words = text.mask()
        if not text.may_end():
            if not words.any():
                raise RequestRefused(
                    "the constraint wants a text next that the model's tokens cannot write: "
                    f"the text so far is {text.shown()!r}"
                )
            return words
        if not words.any():
            self._cannot_go_on = not self._end_words.any()
            return self._end_words
        is_early = len(text.token_ids) < request.params.min_tokens
        return words if is_early else words | self._end_words


def constrained_request(
    request: Request, message: Submit, grammars: GrammarCache, tokenizer: Tokenizer
) -> ConstrainedRequest:
    """The request of a ``Submit`` with a constraint."""
    assert message.constraint is not None

    matcher = grammars.grammar(message.constraint).matcher()
    jumping: Encode | None = tokenizer.encode_written if message.jump_forward else None
    text = ConstrainedText(matcher, grammars.vocabulary, jumping)
    return ConstrainedRequest(request, text, grammars.vocabulary.only(request.end_ids))


logger = logging.getLogger(__name__)

Deliver = Callable[[list[FromEngine]], None]
# Forward passes in a row that fail, after which the engine counts as broken.
MAX_FAILURES_IN_A_ROW = 3


class EngineBroken(Exception):
    """This engine cannot go on, and its requests are not to blame: another one may run them. The message is
    for clients."""


class Engine:
    """Runs requests on ``runner``. ``send`` may be called from any thread; ``deliver`` is called from the
    engine's: with what a step gave while the next one runs, or at once where there is none."""

    def __init__(
        self, runner: ModelRunner, tokenizer: Tokenizer, config: SchedulerConfig, deliver: Deliver
    ) -> None:
        self._runner = runner
        self._tokenizer = tokenizer
        self._deliver = deliver
        self._inbox: queue.SimpleQueue[ToEngine] = queue.SimpleQueue()
        info = runner.info
        self.scheduler = Scheduler(num_slots=info.num_slots, max_context=info.max_context, config=config)
        self._requests: dict[int, Request] = {}
        self._texts: dict[int, TextEnd] = {}
        self._constrained: dict[int, ConstrainedRequest] = {}
        self._grammars = GrammarCache(tokenizer, info.vocab_size)
        self._endings: dict[int, str] = {}  # of requests whose text is complete: why
        self._started: set[int] = set()
        self._outbox: list[FromEngine] = []
        self._failed_meanwhile: Exception | None = None
        self._num_failures = 0  # of forward passes, in a row
        self._num_halved = 0  # batches, since the start
        self._is_stopping = False
        self.times = StepTimes()

    def send(self, message: ToEngine) -> None:
        """Queues a message; it is read before the next step starts."""
        self._inbox.put(message)

    def run(self) -> None:
        """The loop, until ``Stop``. ``EngineBroken`` after a fault of the accelerator, or
        ``MAX_FAILURES_IN_A_ROW`` forward passes that failed."""
        try:
            self._grammars.prepare()
            while True:
                self.take_messages()
                if self._is_stopping or not self.step():
                    self._deliver_outbox()
                if self._is_stopping:
                    return
        finally:
            try:
                self._runner.close()
            except Exception:  # a broken device cannot even give its memory back
                logger.exception("the model runner cannot be closed")

    def step(self) -> bool:
        """One forward pass, if there is anything to run."""
        began = time.perf_counter()
        batch = self.scheduler.schedule()
        if batch is None:
            return False
        self.times.count(SCHEDULE, time.perf_counter() - began)
        self._announce(batch)
        began = time.perf_counter()
        try:
            output = self._runner.run(batch, self._meanwhile)
        except Exception as error:
            self._forward_failed(error)
            return True
        self._num_failures = 0
        if self._failed_meanwhile is not None:
            raise self._failed_meanwhile
        has_run = time.perf_counter()
        self.times.count(RUN, has_run - began)
        for result in self.scheduler.complete(output, has_run - began):
            try:
                self._advance(result)
            except AgentflowError as error:
                self._fail(result.request.id, error)
            except Exception:
                self._fail(result.request.id, _logged("the request's output cannot be used"))
        self.times.count(COMPLETE, time.perf_counter() - has_run)
        return True

    def _forward_failed(self, error: Exception) -> None:
        """Called while ``error`` is handled. A batch that did not fit into memory runs again in halves. Of
        another one each request runs again alone: the one whose pass fails then is to blame and fails."""
        if isinstance(error, AcceleratorFault):
            self._break(_logged("the accelerator failed"))
        if isinstance(error, OutOfMemory):
            failed = self.scheduler.retry_smaller(one_by_one=False)
            if not failed:
                self._num_halved += 1
                if self._num_halved.bit_count() == 1:  # at 1, 2, 4, …: it may happen in every step
                    text = "no memory for a forward pass (%d so far): its batch runs again in halves: %s"
                    logger.warning(text, self._num_halved, error)
                return
        self._num_failures += 1
        failure = _logged("the forward pass failed")
        if self._num_failures == MAX_FAILURES_IN_A_ROW:
            self._break(failure)
        if not isinstance(error, OutOfMemory):
            failed = self.scheduler.retry_smaller(one_by_one=True)
        for request in failed:
            self._fail(request.id, failure)

    def _break(self, failure: EngineFailed) -> NoReturn:
        self._deliver_outbox()  # also which requests were running
        raise EngineBroken(f"the engine is broken: {failure}")

    def _announce(self, batch: Batch) -> None:
        """What is sent when a step begins."""
        new = self.scheduler.running.keys() - self._started
        if new:
            self._started |= new
            self._outbox.append(Started(sorted(new)))
        self._outbox.append(StepBegins(len(batch.token_ids)))

    def _deliver_outbox(self) -> None:
        if self._outbox:
            delivered, self._outbox = self._outbox, []
            began = time.perf_counter()
            self._deliver(delivered)
            self.times.count(DELIVER, time.perf_counter() - began)

    def _meanwhile(self) -> None:
        """While a batch runs, delivers what the one before gave. An error is kept until this batch has run,
        which did not cause it."""
        try:
            self._deliver_outbox()
        except Exception as error:
            self._failed_meanwhile = error

    def take_messages(self) -> None:
        """Reads what was sent; where there is nothing to run, waits for something."""
        is_idle = not self.scheduler.running and not len(self.scheduler.waiting) and not self._outbox
        while True:
            try:
                message = self._inbox.get(block=is_idle)
            except queue.Empty:
                return
            is_idle = False
            match message:
                case Submit():
                    self._submit(message)
                case Abort():
                    if message.request_id in self._requests:
                        self._fail(message.request_id, Cancelled("the request was aborted"))
                case CloseState():
                    self.scheduler.close_state(message.state)
                case Report():
                    model = self._runner.info.model
                    stats = engine_stats(message.ticket, model, self.scheduler, self.times)
                    self._outbox.append(stats)
                case Stop():
                    self._is_stopping = True
                    return

    def _submit(self, message: Submit) -> None:
        constraint = message.constraint
        if constraint is not None and not constraint.payload and not self._grammars.knows(constraint):
            self._outbox.append(Wanted(message.request_id))
            return
        try:
            request = request_of(message, self._runner.info, self.scheduler.max_total_tokens)
            text = text_end_of(message, self._tokenizer)
            if message.constraint is not None and text is not None:
                self._constrain(request, text, message)
            self.scheduler.add(request)
        except AgentflowError as error:
            self._fail(message.request_id, error)
            return
        except Exception:
            self._fail(message.request_id, _logged("the request cannot be taken"))
            return
        self._requests[request.id] = request
        if text is not None:
            self._texts[request.id] = text
            if request.num_generated or request.token_mask is not None:
                self._finish_if_complete(request, text)

    def _constrain(self, request: Request, text: TextEnd, message: Submit) -> None:
        """Puts the request under its grammar; what that forces at once is appended."""
        constrained = constrained_request(request, message, self._grammars, self._tokenizer)
        self._constrained[request.id] = constrained
        jump = constrained.begin(message.generated_ids)
        if jump is not None:
            self._jump(request, text, jump)

    def _advance(self, result: StepResult) -> None:
        request = result.request
        if request.status is Status.FINISHED:
            return
        params = request.params
        if params.wants_logprobs or request.score_from:  # others get some too, beside those that asked
            request.logprobs += result.logprobs
        if params.top_logprobs:
            request.top_logprobs += result.tops
        if result.token_id is None:
            if request.num_to_compute == 0:
                self._finish(request, self._endings.get(request.id, "length"))
            return
        text = self._texts[request.id]
        if result.token_id in self._runner.info.end_token_ids and not params.ignore_eos:
            self._finish(request, "eos")
        elif result.token_id in params.stop_token_ids:
            self._finish(request, "stop", result.token_id)
        else:
            delta = text.push(result.token_id)
            logprobs = result.logprobs if params.wants_logprobs else ()
            self._outbox.append(Progress(request.id, delta, (result.token_id,), logprobs, result.tops))
            constrained = self._constrained.get(request.id)
            if constrained is not None and not text.stopped:
                jump = constrained.take(result.token_id)
                if jump is not None:
                    self._jump(request, text, jump)
            self._finish_if_complete(request, text)

    def _jump(self, request: Request, text: TextEnd, jump: Jump) -> None:
        """The request goes on by what its grammar forces."""
        num_dropped = request.num_generated - jump.num_kept
        self.scheduler.replace_output(request, jump.num_kept, jump.token_ids)
        delta = text.replace(jump.num_kept, jump.token_ids)
        self._outbox.append(Progress(request.id, delta, jump.token_ids, (), (), num_dropped))

    def _finish_if_complete(self, request: Request, text: TextEnd) -> None:
        constrained = self._constrained.get(request.id)
        if text.stopped or (constrained is not None and constrained.is_complete()):
            self._finish_when_scored(request, "stop")
        elif request.num_generated >= request.max_new_tokens:
            self._finish_when_scored(request, "length")

    def _finish_when_scored(self, request: Request, reason: str) -> None:
        """Ends the request, or has it run on for the log-probabilities of what was forced."""
        if request.first_unscored < request.num_tokens:
            request.is_complete = True
            self._endings[request.id] = reason
        else:
            self._finish(request, reason)

    def _finish(self, request: Request, reason: str, stopped_by: int | None = None) -> None:
        text_end, tree = self._texts.get(request.id), request.tree
        token_ids: list[int] = []
        text = ""
        logprobs: list[float | None] = [*request.logprobs]
        top_logprobs: list[TopTokens | None] = [*request.top_logprobs]
        if text_end is not None:
            ending = text_end.finish()
            token_ids, text = ending.ids, ending.text
            anew: list[None] = [None] * (len(token_ids) - ending.kept)
            logprobs = [*logprobs[: ending.kept], *anew] if logprobs else []
            top_logprobs = [*top_logprobs[: ending.kept], *anew] if top_logprobs else []
        self._outbox.append(
            Finished(
                request_id=request.id,
                token_ids=token_ids,
                text=text,
                finish_reason=reason,
                prompt_tokens=request.num_prompt,
                cached_tokens=request.num_cached,
                output_tokens=request.num_generated,
                logprobs=logprobs,
                top_logprobs=top_logprobs,
                choice_logprobs=[] if tree is None else tree.by_choice(request.target_logprobs),
                stopped_by=stopped_by if text_end is None or text_end.stop is None else text_end.stop,
            )
        )
        self._drop(request.id)

    def _fail(self, request_id: int, error: AgentflowError) -> None:
        self._outbox.append(Failed(request_id, error.code, str(error)))
        self._drop(request_id)

    def _drop(self, request_id: int) -> None:
        request = self._requests.pop(request_id, None)
        self._texts.pop(request_id, None)
        self._constrained.pop(request_id, None)
        self._endings.pop(request_id, None)
        self._started.discard(request_id)
        if request is not None:
            self.scheduler.release(request)


def _logged(what: str) -> EngineFailed:
    """For clients, which get no more than an id of the exception that is handled; the log has all of it."""
    error_id = secrets.token_hex(4)
    logger.exception("error %s: %s", error_id, what)
    return EngineFailed(f"{what} (error {error_id}: the engine's log says more)")
