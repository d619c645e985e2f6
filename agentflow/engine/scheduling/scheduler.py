"""The scheduler: which tokens the next forward pass computes.

Continuous batching (Yu et al., "Orca", 2022) with chunked prefill. Each step schedules one token of every
request that decodes (``_decode``), then fills the rest of its token budget with chunks of prompts
(``_prefill``). The policy picks the prompt of each chunk: a running one, or a waiting one, which is admitted
then (``_admit``). A step is limited in tokens and, once the cost of steps is known, in seconds: while
requests decode for latency, prompts may lengthen it by a bounded factor, or up to a given bound (``pace``),
and prompts never take more than a bounded part of a second (``step_limits``).

Running requests and the radix cache share the KV pool. If slots are missing, unlocked cache is evicted. If
that is not enough, the running request that is cheapest to recompute is *preempted*: its slots become free,
its tokens are kept, and it waits at the front of the queue.

Images are encoded in slices (``media_work``). A slice is scheduled like a chunk of a prompt: the policy picks
its request, its time counts as time of prompts, and its tenant is charged for the tokens that could be
computed in that time.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from agentflow.engine.batch import Batch, BatchOutput
from agentflow.engine.cache.blocks import OnBlocks
from agentflow.engine.media_run import MediaRun
from agentflow.engine.request import Objective, Origin, Request, Row, Status, check_total_tokens, make_rows
from agentflow.engine.scheduling.admission import Admission, OutputReserve
from agentflow.engine.scheduling.defaults import CPU_TOKEN_BUDGET, DEFAULT_POLICY, MAX_RUNNING
from agentflow.engine.scheduling.in_flight import Counters, InFlight, InProgressPrefixes
from agentflow.engine.scheduling.kv_memory import KVMemory
from agentflow.engine.scheduling.liveness import NewLiveness
from agentflow.engine.scheduling.media_work import MediaWork
from agentflow.engine.scheduling.pace import Pace
from agentflow.engine.scheduling.policies.fair_policy import FairLongestPrefix
from agentflow.engine.scheduling.policies.policy import (
    Clock,
    FirstCome,
    LongestPrefix,
    PeekCache,
    Policy,
    RandomOrder,
)
from agentflow.engine.scheduling.policies.waiting_tree import SearchEnds
from agentflow.engine.scheduling.program_pauses import ProgramPauses
from agentflow.engine.scheduling.retries import Retries
from agentflow.engine.scheduling.rows.batch_builder import NextDecode, SamplingTable, build_batch
from agentflow.engine.scheduling.step_limits import (
    CHUNKS_PER_STEP,
    LONE_PROMPT_STEP_S,
    MAX_STRETCH,
    MIN_CHUNK,
    MIN_STEP_S,
    PROMPT_STEP_S,
    Draft,
    StepCost,
    StepFeatures,
    batch_features,
)
from agentflow.errors import BadArgument

MAX_FORCED_TOKENS = 32
"""At most this many tokens that a grammar forces are computed in the next step. Longer forced runs are
scheduled in chunks, like a prompt."""
MAX_DISPLACED = 64
"""A request may evict this many tokens that open states need next if the batch has room."""
MAX_UNENCODED = 64
"""After this many requests whose images it has no time to encode, a step plans no further encodings."""
MAX_PASSED = 128
"""Of requests that wait for an encoding, a step passes at most this many, except those that were passed
before. This also limits how many of them a step moves in the policy's order."""
NewPolicy = Callable[[PeekCache, int, Clock], Policy]
"""Makes a policy for a scheduler with this token budget and clock."""
POLICIES: Mapping[str, NewPolicy] = {
    DEFAULT_POLICY: FairLongestPrefix,
    "lpm": LongestPrefix,
    "fcfs": FirstCome,
    "random": RandomOrder,
}


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The options of a scheduler."""

    max_running: int = MAX_RUNNING  # requests in one batch
    token_budget: int = CPU_TOKEN_BUDGET  # scheduled tokens of one forward pass
    policy: str = DEFAULT_POLICY  # its name
    use_cache: bool = True  # False: prompts are computed without cached tokens
    whole_prompts: bool = False  # a prompt is computed in one pass, even if it is longer than the budget
    # The target for the time per output token of requests with the objective ``latency``, as in ``Pace``.
    tpot_target_ms: int | None = None


class RequestFault(Exception):
    """A step could not be scheduled. ``requests``: the request at fault, or all requests of the step if no
    single one is known. There is at least one; the caller must release them."""

    def __init__(self, requests: Sequence[Request]) -> None:
        super().__init__(f"requests {', '.join([str(request.id) for request in requests])}")
        self.requests = requests


class Scheduler:
    """Owns the KV memory of one model and decides which requests run on it. Not thread-safe.

    A step is ``schedule``, then one of ``complete``, ``discard``, ``retries.smaller`` and
    ``retries.one_by_one``. ``schedule`` may be called once more before that: the second batch continues the
    requests of the first with the tokens that it will sample. Work that needs the values of these tokens
    waits, and nothing is preempted.

    Args:
        num_slots: The size of the KV pool in tokens.
        max_context: The longest sequence in tokens.
        config: The options.
        policies: The policies to choose from, by name.
        model: The identity of the model.
        on_blocks: As in ``RadixCache``.
        clock: Seconds, for the patience of requests and the times between the requests of a state.
        new_liveness: As in ``KVMemory``.
        media: The encodings of images; None: the runner needs none.

    Raises:
        BadArgument: The policy is unknown.
    """

    def __init__(
        self,
        *,
        num_slots: int,
        max_context: int,
        config: SchedulerConfig,
        policies: Mapping[str, NewPolicy] = POLICIES,
        model: str = "",
        on_blocks: OnBlocks | None = None,
        clock: Callable[[], float] = time.monotonic,
        new_liveness: NewLiveness | None = None,
        media: MediaWork | None = None,
    ) -> None:
        self.config = config
        self.media = media
        self.wants_media = False
        """Whether an encoding continues or begins once no batch is in flight."""
        self.max_total_tokens = min(max_context, num_slots)
        if config.policy not in policies:
            known = ", ".join(policies)
            raise BadArgument(f"unknown scheduling policy {config.policy!r}; known: {known}", param="policy")
        self.running: dict[int, Request] = {}
        self.num_decode_tokens = 0
        """The tokens of decoding requests in the batch that was scheduled last."""
        self._prefills = InProgressPrefixes()  # the running requests that do not decode yet
        self.memory = KVMemory(
            num_slots=num_slots,
            max_context=max_context,
            max_running=config.max_running,
            use_cache=config.use_cache,
            model=model,
            on_blocks=on_blocks,
            clock=clock,
            new_liveness=new_liveness,
        )
        self.waiting = policies[config.policy](self.memory.peek, config.token_budget, clock)
        self.memory.on_cached, self.memory.on_evict = self.waiting.tokens_cached, self.waiting.tokens_evicted
        self._clock = clock
        self.cost = StepCost()
        # None as long as no request has had a bound on the time of steps.
        self._pace = None if config.tpot_target_ms is None else self._new_pace()
        self.pauses = ProgramPauses(self.memory, self.waiting, self.cost, self.running, clock)
        if self.waiting.pauses_programs:
            self.memory.make_room = self.pauses.make_room
        self._sampling = SamplingTable(config.max_running)
        self._counters = Counters()
        self._reserve = OutputReserve()
        self._admission: Admission | None = None  # of the step that is being planned
        self._arrivals = itertools.count()
        self._of_state: dict[int, dict[Request, None]] = {}  # the requests that wait or run, by state
        self._in_flight = InFlight(self.memory, self._prefills, self._counters)
        self._next = NextDecode(self.memory, self._sampling)
        self.retries = Retries(self._in_flight, whole_prompts=config.whole_prompts)
        self._planned: Request | None = None  # whose turn it is while a step is planned
        self._held_back: list[Request] = []  # waiting requests that do not fit in this step
        self._most_expected: float = math.inf  # an upper limit of ``num_expected`` in this step
        self._num_unencoded = 0  # requests of the step, held back by their images
        # Requests that were passed since then, with the image. They wait apart from the next step on.
        self._unencoded: list[tuple[Request, str]] = []
        self._encoded: deque[Request] = deque()  # their image was encoded: they wait like others again

    @property
    def counters(self) -> Counters:
        """Totals since the start."""
        self._counters.evicted_tokens = self.memory.num_evicted
        self._counters.computed_tokens = self.memory.num_computed
        return self._counters

    def add(self, request: Request) -> None:
        """Queues a request. ``PromptTooLong`` if it could never run."""
        check_total_tokens(request, self.max_total_tokens, self.memory.slots.total)
        room = self.max_total_tokens - request.num_prompt
        request.max_new_tokens = min(request.max_new_tokens, room)
        request.arrival = next(self._arrivals)
        request.patience_end = min(request.patience_end, self._start_by(request, request.origin))
        self.waiting.add(request)
        self._note_pace(request)
        if self.media is not None and request.media.runs:
            self.media.arrived(request)
        if request.origin.state:
            self._of_state.setdefault(request.origin.state, {})[request] = None
            if not request.origin.is_ahead:
                self.memory.liveness.arrived(request.origin.state)

    def _new_pace(self) -> Pace:
        target_ms = self.config.tpot_target_ms
        pace = Pace(self.cost, None if target_ms is None else target_ms / 1e3, self.config.token_budget)
        for request in self.waiting:
            pace.waits(request)
        return pace

    def _note_pace(self, request: Request) -> None:
        """A request is new or has another hint, and may be the first one with a bound."""
        if self._pace is None and request.origin.tpot_s is not None:
            self._pace = self._new_pace()
        elif self._pace is not None and request.status is Status.WAITING:
            self._pace.waits(request)

    def schedule(self) -> Batch | None:
        """The next batch, with slots for all its tokens, or None if there is nothing to run (before the batch
        in flight completes, if there is one). ``media.planned`` has the slices of encodings to run before the
        batch, or without one; none are planned while a batch is in flight. ``RequestFault`` after a fault. If
        a batch cannot be built, its requests run alone, which finds the one at fault."""
        if self.media is not None and self.media.wanted:
            self.media.start_step()
        if self._in_flight.launched and self.retries.parts:
            return None
        with suppress(Exception):  # then the ordinary way finds the request at fault
            if (prepared := self._take_prepared()) is not None:
                return prepared
        while True:
            work = self.retries.next() if self.retries.is_used else ()
            draft = Draft.of(work) if work else self._plan()
            if draft is None:
                return None
            if draft.num_tokens > self.retries.limit:
                draft = Draft.of(self.retries.first_part([*draft.tokens.items()]))
            try:
                return self._build(draft)
            except Exception as error:
                if len(draft.tokens) == 1:
                    raise RequestFault([*draft.tokens]) from error
                self.retries.alone([*draft.tokens.items()])

    def prepare(self) -> Batch | None:
        """Builds the next batch while one is in flight, if all running requests go on decoding: a later
        ``schedule`` then has less to do, and returns the same batches. None if anything else may follow.

        Returns:
            The batch that ``schedule`` may return next. Its token ids and slots are not known before.
        """
        if not self._only_decodes or len(self._in_flight.launched) != 1:
            return None
        return self._next.build(self._in_flight.launched[0].rows, len(self.running))

    @property
    def _only_decodes(self) -> bool:
        """Whether the next step is one token of each running request, unless one of them ends."""
        return not (
            self._prefills.requests
            or (self.waiting.num_waiting and self._has_room_to_run)
            or self._pace is not None
            or self.pauses.is_used
            or self.retries.is_used
            or self.retries.limit < math.inf
            or (self.media is not None and self.media.wanted)
        )

    def _take_prepared(self) -> Batch | None:
        """The batch of ``prepare``, then in flight, if ``_plan`` and ``_build`` would make the same one."""
        built = self._next.find(len(self.running))
        if built is None or not self._only_decodes:
            return None
        self.wants_media = False
        for row in built.rows:
            self._charge(row.request, row.end, 1)
        slots = self.memory.allocate(len(built.rows))
        try:
            self._next.fill(built, slots)
        except Exception:
            self.memory.slots.release(slots)
            raise
        self.num_decode_tokens = len(built.rows)
        self._in_flight.launch(built.rows, partial(batch_features, built.batch), is_scored=False)
        return built.batch

    def _plan(self) -> Draft | None:
        """The next step, or None if there is nothing to run."""
        if not self.running and not self.waiting.num_waiting:
            return None
        self.wants_media = False
        try:
            if self.pauses.is_used:
                self.pauses.resume()
            while True:
                self._planned = None
                draft = self._decode()
                self._prefill(draft)
                self._admission = None  # it refers to requests that may end
                if draft.num_tokens:
                    return draft
                if (
                    not self.running
                    or self._in_flight.launched
                    or (self.media is not None and self.media.has_work)
                ):
                    return None
                self._preempt_one(1)  # unfinished prefills use all slots together
        except Exception as error:
            if self._planned is not None:
                raise RequestFault([self._planned]) from error
            raise RequestFault([*self.running.values()] or [*self.waiting]) from error

    def _build(self, draft: Draft) -> Batch:
        """The batch of a planned step, which is then in flight. If this raises, no slots are taken."""
        rows = make_rows([*draft.tokens.items()])
        slots = self.memory.allocate(draft.num_tokens)
        in_flight = self._in_flight.launched
        before = in_flight[-1].rows if in_flight else ()
        try:
            shared = self.memory.readers.prefixes() if len(self.running) > 1 else ()
            batch = build_batch(rows, slots, self.memory.table, shared, self._sampling, before)
            is_scored = batch.sampled.scored is not None
            self._in_flight.launch(rows, partial(batch_features, batch), is_scored=is_scored)
        except Exception:
            self.memory.slots.release(slots)
            for request in draft.tokens:
                request.node_slots = request.node_slots[: request.num_nodes_computed]
            raise
        self.num_decode_tokens = draft.num_decode
        return batch

    def _decode(self) -> Draft:
        """Schedules one token of each request that decodes, and with it the tokens that a grammar has forced
        since, as far as the budget allows. Preempts requests first if slots are missing."""
        while True:
            prefilling = self._prefills.requests
            ready = [request for number, request in self.running.items() if number not in prefilling]
            bound_s = math.inf if self._pace is None else self._pace.bound_s(ready)
            if self._in_flight.launched:
                ready = [r for r in self.running.values() if self._can_decode_ahead(r)]
            decoding, left_out = (ready, ()) if self._pace is None else self._pace.in_turn(ready, bound_s)
            # However many requests decode, a prompt gets at least one token.
            budget = int(min(self.config.token_budget, self.retries.limit))
            limit = max(budget, len(decoding) + 1)
            draft = Draft(limit, dict.fromkeys(decoding, 1), len(decoding), bound_s=bound_s)
            for request in decoding:
                num_known = request.num_tokens + request.num_pending
                if num_known - request.num_computed != 1 and request.num_to_compute > 1:
                    draft.add(request, min(request.num_to_compute - 1, draft.num_free - 1))
            missing = draft.num_tokens - self.memory.num_available if draft.num_tokens else 0
            if missing <= 0:
                break
            if self._in_flight.launched:
                return Draft(0)
            self._preempt_one(missing)
        if self._pace is not None:
            self._pace.planned(left_out)
        draft.num_decode = draft.num_tokens
        charge = self.waiting.charge
        for request, num_tokens in draft.tokens.items():
            self._planned = request
            start = request.num_computed
            if request.num_charged > start or self.pauses.is_used:
                self._charge(request, start + num_tokens, num_tokens)
            else:  # as in most steps
                request.num_charged = start + num_tokens
                charge(request, num_tokens)
        self._planned = None
        return draft

    def _can_decode_ahead(self, request: Request) -> bool:
        """Whether the request's next token can be computed before the batch in flight has completed."""
        left = request.num_to_compute
        if left < 1 or (request.id in self._prefills.requests and (left > 1 or request.tree is not None)):
            return False
        if not request.num_pending:
            return True
        if request.num_generated + request.num_pending >= request.max_new_tokens or request.is_steered:
            return False
        return not request.params.has_penalties and request.num_generated >= request.params.min_tokens

    def _prefill(self, draft: Draft) -> None:
        """Fills the draft with chunks of prompts, in the order of the policy. Admits waiting requests in
        their turn. A request that does not fit into memory is held back, and requests that do not delay it
        may pass it (see ``admission``). A request that would break a bound on the time of steps is held back
        too (see ``pace``)."""
        while self._held_back:
            self._held_back.pop().is_held_back = False
        if self.media is not None and (self._unencoded or self._encoded or self.media.completed):
            self._set_unencoded(self.media)
        prompts = [*self._prefills.requests.values()]
        if self._in_flight.launched:  # the last chunks of some are launched
            prompts = [r for r in prompts if r.num_to_compute > (1 if r.tree is None else 0)]
        may_admit = self._has_room_to_run and self.waiting.num_waiting > 0
        if not prompts and not may_admit:
            return
        draft.spare_s = self._prompt_seconds(draft)
        chunk = max(MIN_CHUNK, draft.num_free // CHUNKS_PER_STEP)
        self._admission = None
        self._most_expected = math.inf
        self._num_unencoded = 0
        self.waiting.start_step()
        if self._pace is not None:
            self._pace.start_step(self.running.values() if may_admit else ())
        while draft.num_free > 0:
            self._planned = None
            if not prompts and not may_admit:
                return
            request = self.waiting.next(prompts, self._is_blocked if may_admit else None)
            if request is None:
                return
            self._planned = request
            if request.status is Status.WAITING:
                if self._pace is not None and not self._pace.may_start(request):
                    self._hold_back(request)
                    may_admit = self._pace.hold_back(request, self.memory.num_computed)
                    self.waiting.hold_back_paced(request.tenant)
                    continue
                if (run := self._missing_run(request, draft)) is not None:
                    if not self._encode(request, run.identity, draft):
                        self._hold_back(request)
                        self._num_unencoded += 1
                        if self._num_unencoded == MAX_UNENCODED:
                            self.waiting.hold_back_unencoded()
                    continue
                if not self._admit(request):
                    self._hold_back(request)
                    may_admit = self._admissions().is_open
                    continue
                may_admit = self._has_room_to_run and self.waiting.num_waiting > 0
                prompts.append(request)
            if (run := self._missing_run(request, draft)) is not None:
                if not self._encode(request, run.identity, draft):
                    prompts.remove(request)
                continue
            num_left = request.num_to_compute - draft.tokens.get(request, 0)
            available = self.memory.num_available - draft.num_tokens
            if self.config.whole_prompts:
                fits = num_left <= available and (num_left <= draft.num_free or not draft.num_tokens)
                num_tokens = num_left if fits else 0
            else:
                most = min(chunk, num_left)
                num_tokens = draft.chunk_size(request, most, available, self.cost, self.media)
            if not num_tokens and draft.num_tokens > draft.num_decode:
                return  # no time or no slots are left
            if num_tokens:
                start = request.num_computed + request.num_nodes_computed + draft.tokens.get(request, 0)
                draft.add(request, num_tokens)
                self._charge(request, start + num_tokens, num_tokens)
                if self.media is not None and request.media.runs:
                    self.media.use(request, start, start + num_tokens)
            if not num_tokens or num_tokens == num_left:
                prompts.remove(request)

    def _set_unencoded(self, media: MediaWork) -> None:
        """Requests that the last step passed wait apart until their image is encoded. The search for others
        then passes all of them, except in a step that has time for their encodings."""
        for request, identity in self._unencoded:
            self._planned = request
            if request in self.waiting and not media.is_ready(identity):
                self.waiting.set_unencoded(request, True)
        self._unencoded.clear()
        for identity in media.completed:
            self._encoded += media.wanted.get(identity, ())
        media.completed.clear()
        for _ in range(min(len(self._encoded), MAX_PASSED)):
            request = self._planned = self._encoded.popleft()
            if request.is_unencoded:
                self.waiting.set_unencoded(request, False)
        self._planned = None

    @property
    def _has_room_to_run(self) -> bool:
        """Whether one more request may run."""
        return len(self.running) < self.config.max_running

    def _missing_run(self, request: Request, draft: Draft) -> MediaRun | None:
        """The run that the request needs next, if it has no features."""
        if self.media is None or not request.media.runs:
            return None
        if request.status is Status.WAITING:
            return self.media.missing(request, self._num_cached(request))
        start = request.num_computed + draft.tokens.get(request, 0)
        run = self.media.missing(request, start)
        return run if run is not None and run.start <= start else None

    def needs_medium(self, request: Request, identity: str) -> bool:
        """Whether tokens of the medium are left to compute. A waiting request may find them in the cache."""
        runs = [run for run in request.media.runs if run.identity == identity]
        is_waiting = bool(runs) and request.status is Status.WAITING
        num_done = self._num_cached(request) if is_waiting else request.num_computed
        return any(run.end > num_done for run in runs)

    def _num_cached(self, request: Request) -> int:
        return self.memory.peek(request.cache_key, request.reusable_run())

    def _encode(self, request: Request, identity: str, draft: Draft) -> bool:
        """Plans slices of the encoding that the request needs, for about the time of a chunk. Returns whether
        more may be planned for it in this step."""
        assert self.media is not None
        self.wants_media = True
        if self._in_flight.launched or not self.media.begin(identity, self.running.values()):
            return False
        num_left, count = self.media.num_left(identity), draft.count_slices(identity, self.media)
        if not count:
            return False
        num_new = self.media.plan(identity, count)
        new_s = num_new * (self.media.slice_s(identity) or 0.0)
        num_tokens = self.cost.tokens_within(new_s, 0, is_first=False)
        if not 0 < num_tokens < 2**31:  # a cost is unknown
            num_tokens = num_new * MIN_CHUNK
        if num_new:
            self.waiting.charge(request, num_tokens)
            if self.pauses.is_used:
                self.pauses.charge(request.tenant, num_tokens)
        return count < num_left

    def _hold_back(self, request: Request) -> None:
        request.is_held_back = True
        self._held_back.append(request)

    def _admissions(self) -> Admission:
        """The admissions of the step that is being planned. Not needed for a request that runs alone."""
        if self._admission is None:
            budget, step = self.config.token_budget, self.memory.num_steps
            self._admission = Admission(self._reserve, self.running.values(), budget, step)
        return self._admission

    def _admit(self, request: Request) -> bool:
        """Starts a waiting request if it fits into memory next to the running ones."""
        num_locked = self.memory.cache.num_locked
        match = self.memory.match(request)
        available = self.memory.num_available
        request.num_computed = request.num_shared = match.num_tokens
        num_left = request.num_to_compute
        is_admitted = False
        try:
            if self._fits(request, num_left, available):
                self.waiting.admit(request)
                is_admitted = True
            else:
                cached = self.memory.cache.num_locked - num_locked
                self._admissions().hold_back(request, available, cached)
        finally:
            if not is_admitted:
                request.num_computed = 0
                self.memory.cache.unlock(match)
        if not is_admitted:
            return False
        self.running[request.id] = request
        request.status = Status.RUNNING
        self.memory.attach(request, match)
        self._sampling.attach(request)
        if self._pace is not None:
            self._pace.departed(request)
            self._pace.started(request)
        if self._admission is not None:
            self._admission.admitted(request)
        if num_left > 1 or request.tree is not None:
            self._prefills.add(request)
        if not request.num_preemptions:
            if request.origin.program:
                num_lost = self.memory.liveness.num_tokens(request.origin.state) - match.num_tokens
                if num_lost > 0:
                    self.pauses.recomputes(request, num_lost, match.num_tokens)
            if not request.origin.is_extra:
                self._counters.prompt_tokens += request.num_prompt
                self._counters.cached_tokens += request.num_cached
                self._counters.cached_output_tokens += min(match.num_output, request.num_cached)
        return True

    def _fits(self, request: Request, num_left: int, available: int) -> bool:
        """Whether the request fits into ``available`` slots, with ``num_left`` tokens to compute."""
        if not self.running:
            return num_left <= available
        if not self._admissions().fits(request, available):
            return False
        # Cached tokens that open states need next would have to be computed again. They are worth a short
        # wait, unless they are few and the batch has room.
        is_well_filled = 2 * len(self.running) > self.config.max_running
        most = available - num_left + (0 if is_well_filled else MAX_DISPLACED)
        if self._most_expected <= most:
            return True
        num_expected = self.memory.num_expected  # without the tokens that the match locks
        if num_expected > most:
            return False
        self._most_expected = num_expected  # the request is admitted, and the lock stays
        return True

    def complete(self, output: BatchOutput, took_s: float = 0.0) -> list[Row]:
        """The oldest batch in flight has run. Appends new tokens to their requests, and returns the results
        of each request. ``took_s``: the duration of the pass, from which later steps are planned (0:
        unknown). If this raises, the batch did not count: ``discard`` it."""
        if took_s > 0:
            self._observe(self._in_flight.launched[0].features, took_s)
        results = self._in_flight.complete(output)
        self._count_step()
        return results

    def _observe(self, features: Callable[[], StepFeatures], took_s: float) -> None:
        self.cost.observe(features, took_s)
        if self._pace is not None:
            self._pace.ran(took_s)

    def _count_step(self) -> None:
        if self.retries.limit < math.inf:
            self.retries.fits()
        self._counters.steps += 1
        self.memory.num_steps += 1
        if self._reserve.caution:
            self._reserve.stepped()

    def discard(self) -> list[Request]:
        """The oldest batch in flight failed: frees its slots and the slots of the batch launched after it.
        Returns its requests, which the caller must release."""
        return self._in_flight.discard()

    def finish(self, request: Request, num_forced: int = 0) -> None:
        """Removes a request whose output ended by itself, and learns its length. ``num_forced``: its output
        tokens that a grammar forced."""
        self._counters.forced_tokens += num_forced
        if request.status is Status.RUNNING:
            self._reserve.finished(request)
        self.release(request)

    def release(self, request: Request) -> None:
        """Removes a request in any state; may be repeated. Its computed tokens stay in the cache,
        unlocked."""
        if request.status is Status.RUNNING:
            self._stop_running(request)
            if self.pauses.is_used or self.pauses.resumed:
                self.pauses.stopped(request, has_ended=True)
            self.waiting.finish(request)
        elif request in self.waiting:
            self.waiting.remove(request)
            self.pauses.left()
            if self._pace is not None:
                self._pace.departed(request)
            if not request.origin.is_ahead:
                self.memory.liveness.departed(request.origin.state)
        if self.media is not None and request.media.runs:
            self.media.departed(request)
            if not self.media.wanted:
                self._unencoded.clear()
                self._encoded.clear()
        request.status = Status.FINISHED
        state = request.origin.state
        if request in self._of_state.get(state, ()):
            del self._of_state[state][request]
            if not self._of_state[state]:
                del self._of_state[state]

    def preempt(self, request: Request) -> None:
        """Preempts a running request: frees its slots and puts it at the front of the queue. Its tokens are
        kept, and their KV stays in the cache until the room is needed."""
        self._stop_running(request)
        self.pauses.stopped(request, has_ended=False)
        request.num_preemptions += 1
        request.passed_until = self.memory.num_steps
        self.waiting.restore(request)
        request.status = Status.WAITING  # not before: after a fault it is released as one that ran
        if not request.origin.is_ahead:
            self.memory.liveness.preempted(request.origin.state)
        self._note_pace(request)
        self._counters.preemptions += 1
        self._reserve.preempted()

    def replace_output(self, request: Request, num_kept: int, token_ids: list[int]) -> None:
        """Keeps the first ``num_kept`` generated tokens and replaces the rest by ``token_ids``, which a
        grammar forces. The next steps compute these like a prompt; the KV of replaced tokens is freed."""
        start = request.num_prompt + num_kept
        end = start + len(token_ids)
        request.num_redrawn += num_kept < request.num_generated
        self._counters.generated(end - request.num_tokens)
        request.tokens[start:end] = token_ids
        request.num_tokens = end
        del request.logprobs[num_kept:], request.top_logprobs[num_kept:]
        request.num_scored = min(request.num_scored, num_kept)
        if request.status is not Status.RUNNING:
            return
        self._sampling.keep_output(request, num_kept)
        # The logits of the last token are needed, and the logits before tokens that are scored.
        num_computed = min(request.num_computed, start, request.first_unscored - 1)
        if num_computed < request.num_computed:
            self.memory.roll_back(request, num_computed)
        self._prefills.discard(request)
        if request.num_to_compute > MAX_FORCED_TOKENS:
            self._prefills.add(request)

    def update_hint(
        self,
        state: int,
        program: int,
        task_group: int,
        objective: Objective,
        steps: int | None = 0,
        returns_s: float | None = None,
        tpot_s: float | None = None,
        ttft_s: float | None = None,
    ) -> None:
        """The scheduling hint of a state changed; the arguments are as in ``UpdateHint``. It applies to the
        state's waiting and running requests, and ranks its cached tokens by the time when it continues."""
        self.memory.liveness.expect(state, steps, returns_s)
        for request in self._of_state.get(state, ()):
            origin = request.origin.at(program, task_group, objective, tpot_s, ttft_s)
            if origin != request.origin:
                is_new = origin.ttft_s != request.origin.ttft_s
                if self._pace is not None and origin.tpot_s != request.origin.tpot_s:
                    self._pace.bound_changed(request)
                self.waiting.update_origin(
                    request, origin, self._start_by(request, origin) if is_new else math.inf
                )
                self._note_pace(request)

    def _start_by(self, request: Request, origin: Origin) -> float:
        """When the request must start, on the clock, for its first token to arrive in the time that its
        reader asks for; infinite if its reader asks for none."""
        if origin.ttft_s is None or origin.is_ahead or request.num_generated:
            return math.inf
        match = self.memory.peek(request.cache_key, request.reusable_run())
        prompt_s = self.cost.chunk_s(request.num_tokens - match, match, is_first=True)
        return self._clock() + max(0.0, origin.ttft_s - prompt_s - self.cost.decode_s(1, 1, 0))

    def close_state(self, state: Hashable, *, is_dropped: bool = False) -> None:
        """A program state was closed: its cached tokens become ordinary cache, or with ``is_dropped`` the
        first to be evicted."""
        self.memory.liveness.close(state, is_dropped=is_dropped)
        self.pauses.left()

    @property
    def resumes_in_s(self) -> float:
        """Seconds until a paused program is resumed in any case; infinite if none is."""
        return self.pauses.resumes_in_s if self.pauses.is_used else math.inf

    def check_idle(self) -> None:
        """For tests. ``AssertionError`` if anything waits, runs, or has slots in use or locked."""
        assert not self.running
        assert not self._prefills.requests
        assert not len(self.waiting)
        assert not self._of_state
        self.memory.check()

    def _prompt_seconds(self, draft: Draft) -> float:
        """Seconds that prompts may add to a step with the tokens that the draft has so far."""
        num_read = sum([request.num_computed for request in draft.tokens])
        return self._seconds_beside(draft.tokens, num_read, draft)

    def _seconds_beside(self, decoding: Collection[Request], num_read: int, draft: Draft) -> float:
        """Seconds that prompts may add to a step in which these requests decode. ``num_read``: the tokens
        that they attend to together."""
        if not self.cost.is_known:
            return math.inf
        if len(self.running) + self.waiting.num_waiting == 1:
            return LONE_PROMPT_STEP_S
        decode_s = self.cost.decode_s(draft.num_tokens, len(decoding), num_read)
        limit_s = draft.bound_s
        if self.config.tpot_target_ms is None and any(request.is_urgent for request in decoding):
            limit_s = min(limit_s, max(MIN_STEP_S, MAX_STRETCH * decode_s))
        return min(PROMPT_STEP_S, limit_s - decode_s)

    def _charge(self, request: Request, end: int, num_tokens: int) -> None:
        """Charges the tenant for the last ``num_tokens`` tokens before ``end``, except tokens that were
        charged before: computing them again after a preemption is free."""
        start = max(end - num_tokens, request.num_charged)
        if end > start:
            request.num_charged = end
            self.waiting.charge(request, end - start)
            if self.pauses.is_used:
                self.pauses.charge(request.tenant, end - start)

    def _is_blocked(self, request: Request, match: int | None) -> bool:
        """Whether the request does not fit into memory or time in this step, or a running prefill will
        compute the tokens that it needs next. It then waits for them, as they enter the cache chunk by chunk,
        instead of computing them a second time."""
        if request.is_held_back:
            return True
        if self._pace is not None and self._pace.holds_back(request):
            self._hold_back(request)
            return True
        if self._num_unencoded >= MAX_UNENCODED and self.media is not None and request.media.runs:
            if match is None:
                match = self._num_cached(request)
            if (run := self.media.missing(request, match)) is not None:
                if len(self._unencoded) >= MAX_PASSED:
                    raise SearchEnds
                self._hold_back(request)
                self._unencoded.append((request, run.identity))
                return True
        if not self.config.use_cache or not self._prefills.requests:
            return False
        if match is None:
            match = self._num_cached(request)
        return self._prefills.will_compute(request, match)

    def _preempt_one(self, missing: int) -> None:
        """Preempts the running request that is cheapest to recompute and frees at least ``missing`` slots; if
        none frees enough, the one that frees most; among equals the youngest. Each earlier preemption raises
        a request's cost, so that it is not always the same one."""

        def cost(request: Request) -> tuple[bool, int, int]:
            redo = self.memory.redo_tokens(request)
            weighed = redo * (1 + request.num_preemptions)
            return redo < missing, -redo if redo < missing else weighed, -request.arrival

        self._planned = min(self.running.values(), key=cost)
        self.preempt(self._planned)
        self._planned = None

    def _stop_running(self, request: Request) -> None:
        if request.id not in self.running:
            return  # a fault ended its preemption
        if self._in_flight.launched:
            self._in_flight.withdraw(request)
        self._sampling.detach(request)
        self.memory.detach(request)
        del self.running[request.id]
        if request.id in self._prefills.requests:
            self._prefills.discard(request)
