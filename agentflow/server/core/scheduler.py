"""The scheduler: which rows the next forward pass computes.

Continuous batching (Yu et al., "Orca", 2022) with chunked prefill: every step runs one row for each
request that decodes, and fills the rest of a token budget with prompt tokens, first of requests
already admitted, then of waiting ones in the order of a policy. The KV pool is shared between
running requests and the radix cache: what nobody holds is evicted when slots are needed.

Accounting, checked by ``check_idle``: ``free + cached + held == total``, where *held* are slots of
running requests that are not in the cache yet.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np

from agentflow.errors import PromptTooLong
from agentflow.server.core.batch import Batch, BatchOutput
from agentflow.server.core.batch_builder import Work, build_batch, targets_of
from agentflow.server.core.kv_slots import KVSlots
from agentflow.server.core.policy import policy_named
from agentflow.server.core.radix_cache import PrefixMatch, RadixCache, common_prefix_len
from agentflow.server.core.request import Request, Status

# Slots kept free for each running request when another is admitted, so that the newcomer is not
# thrown out again by the next few decode steps.
HEADROOM_PER_REQUEST = 8


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """``token_budget``: rows of one forward. ``max_running``: requests in one batch."""

    max_running: int = 64
    token_budget: int = 256
    policy: str = "fcfs"
    use_cache: bool = True


@dataclass(slots=True)
class Counters:
    """What happened since the start, in tokens unless the name says otherwise."""

    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    generated_tokens: int = 0
    evicted_tokens: int = 0
    retractions: int = 0


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step gave a request: a sampled token (None while it prefills or scores), and the
    log-probabilities of its sampled or scored tokens where they were asked for."""

    request: Request
    token_id: int | None
    logprobs: list[float]


class _Admission(enum.Enum):
    ADMITTED = enum.auto()
    LATER = enum.auto()  # another request is computing what this one needs
    FULL = enum.auto()


class Scheduler:
    """Owns the slots, the cache and the page table of one model. Used from one thread."""

    def __init__(self, *, num_slots: int, max_context: int, config: SchedulerConfig) -> None:
        self.config = config
        self.max_total_tokens = min(max_context, num_slots)
        self.slots = KVSlots(num_slots)
        self.cache = RadixCache()
        self.page_table = np.zeros((config.max_running, max_context), dtype=np.int32)
        self.waiting: dict[int, Request] = {}
        self.running: dict[int, Request] = {}
        self.counters = Counters()
        self._order = policy_named(config.policy)
        self._free_rows = list(range(config.max_running - 1, -1, -1))
        self._in_flight: list[Work] = []

    def add(self, request: Request) -> None:
        """Queues a request, or raises ``PromptTooLong`` where it could never run."""
        room = self.max_total_tokens - request.num_prompt
        if room < (1 if request.max_new_tokens else 0):
            raise PromptTooLong(
                f"the prompt has {request.num_prompt} tokens; with its output it must fit into "
                f"{self.max_total_tokens} (the smaller of the model's context and the KV pool): shorten it"
            )
        request.max_new_tokens = min(request.max_new_tokens, room)
        self.waiting[request.id] = request

    def schedule(self) -> Batch | None:
        """The next batch, with slots for all its rows, or None where there is nothing to run."""
        work = self._decode_rows()
        budget = max(1, self.config.token_budget - len(work))
        for request in list(self.running.values()):
            if request.num_to_compute > 1:
                budget -= self._prefill_rows(request, budget, work)
        for request in self._order(self.waiting.values(), self.cache) if self.waiting else ():
            if budget <= 0 or not self._free_rows:
                break
            admission = self._admit(request)
            if admission is _Admission.FULL:
                break
            if admission is _Admission.ADMITTED:
                budget -= self._prefill_rows(request, budget, work)
        if not work and self.running:
            # Half-done prefills hold all slots between them: the youngest gives way.
            self.retract(next(reversed(self.running.values())))
            return self.schedule()
        work.sort(key=lambda item: item[1] != 1)  # stable: requests with one row come first
        self._in_flight = work
        return build_batch(work, self.page_table) if work else None

    def complete(self, output: BatchOutput) -> list[StepResult]:
        """The batch of the last ``schedule`` has run: its rows are computed now. New tokens are
        appended to their requests; what the rows of each request gave is returned."""
        self.counters.steps += 1
        results: list[StepResult] = []
        next_output = 0
        for request, num_rows in self._in_flight:
            targets = targets_of(request, num_rows)
            end = next_output + len(targets)
            logprobs = [] if output.logprobs is None else output.logprobs[next_output:end].tolist()
            in_prompt = request.num_computed < request.num_prompt
            request.num_computed += num_rows
            self.counters.computed_tokens += num_rows
            if in_prompt:
                self._commit(request)
            token_id = None
            if targets and targets[0][1] < 0:
                token_id = int(output.token_ids[next_output])
                self._append(request, token_id)
            results.append(StepResult(request, token_id, logprobs))
            next_output = end
        self._in_flight = []
        return results

    def discard(self) -> list[Request]:
        """The batch of the last ``schedule`` failed: its rows are not computed, its slots go back.
        Returns its requests; the caller releases them."""
        failed = [request for request, _ in self._in_flight]
        for request, num_rows in self._in_flight:
            row = self.page_table[request.page_row]
            self.slots.release(row[request.num_computed : request.num_computed + num_rows])
        self._in_flight = []
        return failed

    def release(self, request: Request) -> None:
        """The one way out of the scheduler, whatever the state of the request; may be repeated.
        What it computed stays in the cache, unlocked."""
        if request.status is Status.RUNNING:
            self._stop_running(request)
        self.waiting.pop(request.id, None)
        request.status = Status.FINISHED

    def retract(self, request: Request) -> None:
        """Takes a running request's slots and puts it in front of the queue. Its tokens are kept;
        what was computed stays in the cache for as long as nobody needs the room."""
        self._stop_running(request)
        request.status = Status.WAITING
        self.waiting = {request.id: request} | self.waiting
        self.counters.retractions += 1

    @property
    def num_held(self) -> int:
        """Slots of running requests that are not in the cache."""
        return self.slots.total - self.slots.num_free - self.cache.num_cached

    def check_idle(self) -> None:
        """Raises ``AssertionError`` unless nothing is held or locked, as it must be when idle."""
        assert not self.running
        assert not self.waiting
        assert self.num_held == 0, f"{self.num_held} slots are held by nobody"
        assert self.cache.num_locked == 0, f"{self.cache.num_locked} cached tokens are locked by nobody"
        assert len(self._free_rows) == self.config.max_running
        self.cache.check()

    def _decode_rows(self) -> list[Work]:
        work: list[Work] = []
        for request in list(self.running.values()):
            if request.status is Status.RUNNING and request.num_to_compute == 1:
                while not self._make_room(1):
                    # The youngest gives way: it comes after this one in the order, or is this one,
                    # so nothing that is already in ``work`` loses its slots.
                    victim = next(reversed(self.running.values()))
                    self.retract(victim)
                    if victim is request:
                        break
                else:
                    self._take_slots(request, 1, work)
        return work

    def _prefill_rows(self, request: Request, budget: int, work: list[Work]) -> int:
        """Adds as many of the request's rows as budget and pool allow; returns how many."""
        num_rows = min(budget, request.num_to_compute)
        if num_rows <= 0:
            return 0
        if not self._make_room(num_rows):
            num_rows = self.slots.num_free
        if num_rows > 0:
            self._take_slots(request, num_rows, work)
        return num_rows

    def _make_room(self, count: int) -> bool:
        missing = count - self.slots.num_free
        if missing > 0:
            evicted = self.cache.evict(missing)
            self.counters.evicted_tokens += len(evicted)
            self.slots.release(evicted)
        return self.slots.num_free >= count

    def _take_slots(self, request: Request, num_rows: int, work: list[Work]) -> None:
        start = request.num_computed
        self.page_table[request.page_row, start : start + num_rows] = self.slots.allocate(num_rows)
        work.append((request, num_rows))

    def _admit(self, request: Request) -> _Admission:
        match = self._match(request)
        if self._is_being_computed(request, match.num_tokens):
            return _Admission.LATER
        self.cache.lock(match)
        promised = sum(max(0, r.num_to_compute) for r in self.running.values())
        headroom = HEADROOM_PER_REQUEST * len(self.running)
        available = self.slots.num_free + self.cache.num_evictable - promised - headroom
        if request.num_tokens - match.num_tokens > available:
            self.cache.unlock(match)
            return _Admission.FULL
        del self.waiting[request.id]
        self.running[request.id] = request
        request.status = Status.RUNNING
        request.page_row = self._free_rows.pop()
        self.page_table[request.page_row, : match.num_tokens] = match.slots
        request.num_computed = match.num_tokens
        request.committed = match
        if not request.was_admitted:
            request.was_admitted = True
            request.num_cached = match.num_tokens
            self.counters.prompt_tokens += request.num_prompt
            self.counters.cached_tokens += match.num_tokens
        return _Admission.ADMITTED

    def _match(self, request: Request) -> PrefixMatch:
        reusable = request.num_reusable if self.config.use_cache else 0
        return self.cache.match(request.extra_key, request.tokens[:reusable])

    def _is_being_computed(self, request: Request, num_matched: int) -> bool:
        """Whether a running prefill will compute tokens that this request needs and has not got:
        then it waits for them (they enter the cache chunk by chunk) instead of computing them twice."""
        if not self.config.use_cache:
            return False
        wanted = request.tokens[: request.num_reusable]
        if num_matched == len(wanted):
            return False
        for other in self.running.values():
            if other.num_to_compute <= 1 or other.extra_key != request.extra_key:
                continue
            theirs = other.tokens[: other.num_tokens]
            # Most others differ at the first uncached token: look there before comparing it all.
            if num_matched >= len(theirs) or theirs[num_matched] != wanted[num_matched]:
                continue
            if common_prefix_len(wanted, theirs) > max(num_matched, other.num_computed):
                return True
        return False

    def _commit(self, request: Request) -> None:
        """Puts all computed tokens of a running request into the cache and locks them there."""
        known = request.committed
        assert known is not None
        count = request.num_computed
        if count == known.num_tokens or not self.config.use_cache:
            return
        row = self.page_table[request.page_row]
        match, existing = self.cache.insert(request.extra_key, request.tokens[:count], row[:count])
        if existing > known.num_tokens:
            self.slots.release(row[known.num_tokens : existing])  # somebody else was faster
        row[:count] = match.slots
        self.cache.lock(match)
        self.cache.unlock(known)
        request.committed = match

    def _stop_running(self, request: Request) -> None:
        self._commit(request)
        assert request.committed is not None
        self.cache.unlock(request.committed)
        row = self.page_table[request.page_row]
        self.slots.release(row[request.committed.num_tokens : request.num_computed])
        request.committed = None
        request.num_computed = 0
        self._free_rows.append(request.page_row)
        request.page_row = -1
        del self.running[request.id]

    def _append(self, request: Request, token_id: int) -> None:
        request.tokens[request.num_tokens] = token_id
        request.num_tokens += 1
        self.counters.generated_tokens += 1
