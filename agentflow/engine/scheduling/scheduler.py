"""The scheduler: which rows the next forward pass computes.

Continuous batching (Yu et al., "Orca", 2022) with chunked prefill: every step runs one row for each
request that decodes, and gives the rest of its budget to prompts, a chunk at a time. The policy says
whose chunk is next: that of a running prompt, or of a waiting one, which is admitted then. The budget
is in rows and, once the cost of steps is known, in seconds: beside prompts a step takes at most
``MAX_STRETCH`` times what its decoding takes alone, and prompts at most ``PROMPT_STEP_S`` of it
(``LONE_PROMPT_STEP_S`` where one request is alone).

The KV pool is shared between running requests and the radix cache: what is not in use is evicted when
slots are needed; where that is not enough, the running request that costs least to redo is preempted.

A step in the making: how many rows of which requests it computes, and the time that is left for more.

Whether a request could ever run: told when it comes, and not when it has waited.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field

from agentflow.engine.batch import Batch, BatchOutput
from agentflow.engine.cache.kv_manager import KVMemory
from agentflow.engine.cache.radix_cache import TokenRun
from agentflow.engine.request import CacheIdentity, Request, Status
from agentflow.engine.scheduling.admission import OutputReserve
from agentflow.engine.scheduling.batch_builder import Work, build_batch, tree_rows
from agentflow.engine.scheduling.in_flight import Counters, InFlight, StepResult
from agentflow.engine.scheduling.in_progress_prefixes import InProgressPrefixes
from agentflow.engine.scheduling.policies import DEFAULT_POLICY, policy_named
from agentflow.engine.scheduling.sampling_table import SamplingTable
from agentflow.engine.scheduling.step_cost import Features, StepCost, batch_features
from agentflow.engine.token_tree import TokenTree
from agentflow.errors import PromptTooLong


@dataclass(slots=True)
class Draft:
    """``rows``: of each request, of its tokens first, then of its select's tree. ``limit``: rows that the
    step may have. ``num_decode``: rows of requests that decode. ``spare_s``: the time that prompts may
    add."""

    limit: int
    rows: dict[Request, int] = field(default_factory=dict)
    num_rows: int = 0
    num_decode: int = 0
    spare_s: float = math.inf

    @property
    def num_free(self) -> int:
        """Rows that the step may still have."""
        return self.limit - self.num_rows

    def add(self, request: Request, num_rows: int) -> None:
        """So many more rows of the request."""
        self.rows[request] = self.rows.get(request, 0) + num_rows
        self.num_rows += num_rows

    def left_of(self, request: Request) -> int:
        """Rows of the request that the step does not have yet."""
        return request.num_to_compute - self.rows.get(request, 0)

    def parts(self) -> tuple[list[Work], list[Work]]:
        """How many tokens of each request, those with one row first, and how many nodes of each select."""
        work: list[Work] = []
        trees: list[Work] = []
        for request, num_rows in self.rows.items():
            num_nodes = max(0, num_rows - (request.num_tokens - request.num_computed))
            if num_nodes < num_rows:
                work.append((request, num_rows - num_nodes))
            if num_nodes:
                trees.append((request, num_nodes))
        work.sort(key=_is_chunk)  # stable
        return work, trees


def _is_chunk(item: Work) -> bool:
    return item[1] > 1


def check_size(request: Request, max_total_tokens: int, total_slots: int) -> None:
    """``PromptTooLong`` where it could not. ``max_total_tokens``: of a sequence, its output included."""
    if request.tree is not None:
        _check_tree(request.num_prompt, request.tree, max_total_tokens, total_slots)
    elif request.num_prompt + (1 if request.max_new_tokens else 0) > max_total_tokens:
        raise PromptTooLong(
            f"the prompt has {request.num_prompt} tokens; with its output it must fit into "
            f"{max_total_tokens} (the smaller of the model's context and the KV pool): shorten it"
        )


def _check_tree(num_prompt: int, tree: TokenTree, max_total_tokens: int, total_slots: int) -> None:
    if num_prompt + tree.longest > max_total_tokens:
        raise PromptTooLong(
            f"the prompt has {num_prompt} tokens; with the {tree.longest} of its longest choice it must "
            f"fit into {max_total_tokens} (the smaller of the model's context and the KV pool): shorten it"
        )
    if num_prompt + tree.num_nodes > total_slots:
        raise PromptTooLong(
            f"the prompt has {num_prompt} tokens and its choices {tree.num_nodes} to compute; "
            f"together they must fit into the KV pool of {total_slots}: offer fewer or shorter choices"
        )


# Forced tokens are computed in the step after they are known where they are no more than this; more of them
# take their turn like a prompt's.
MAX_FORCED_ROWS = 32

MAX_STRETCH = 2.75
"""A step that decodes for latency takes at most so many times what it takes without any prompt's rows."""
MIN_STEP_S = 0.005
"""A step may always take so long: the short steps of fast devices need no limit."""
PROMPT_STEP_S = 0.09
"""The prompts of a step take at most so long: a new request waits for the step that runs."""
LONE_PROMPT_STEP_S = 0.2
"""The same for a request that is alone, which larger chunks serve faster."""
CHUNKS_PER_STEP = 8
MIN_CHUNK = 16
"""Rows given at a time: an eighth of what prompts have of a step, and no fewer than this."""


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """``token_budget``: rows of one forward. ``max_running``: requests in one batch."""

    max_running: int = 64
    token_budget: int = 256
    policy: str = DEFAULT_POLICY
    use_cache: bool = True


class Scheduler:
    """Owns the KV memory of one model and who runs on it. Used from one thread."""

    def __init__(self, *, num_slots: int, max_context: int, config: SchedulerConfig) -> None:
        self.config = config
        self.max_total_tokens = min(max_context, num_slots)
        self.waiting = policy_named(config.policy, self._peek, config.token_budget)
        self.running: dict[int, Request] = {}
        self._prefills = InProgressPrefixes()
        self.memory = KVMemory(
            num_slots=num_slots,
            max_context=max_context,
            max_running=config.max_running,
            use_cache=config.use_cache,
            on_cached=self.waiting.tokens_cached,
            on_evict=self.waiting.tokens_evicted,
        )
        self._sampling = SamplingTable(config.max_running)
        self._counters = Counters()
        self._reserve = OutputReserve()
        self._arrivals = itertools.count()
        self._in_flight = InFlight(self.memory, self._prefills, self._counters)
        self.cost = StepCost()
        self._features: Features | None = None  # of the batch that runs
        self._parts: deque[list[Work]] = deque()  # of a batch that failed, to be run before anything else

    @property
    def counters(self) -> Counters:
        """Brought up to date."""
        self._counters.evicted_tokens = self.memory.num_evicted
        self._counters.computed_tokens = self.memory.num_computed
        return self._counters

    def add(self, request: Request) -> None:
        """Queues a request, or raises ``PromptTooLong`` where it could never run."""
        check_size(request, self.max_total_tokens, self.memory.slots.total)
        room = self.max_total_tokens - request.num_prompt
        request.max_new_tokens = min(request.max_new_tokens, room)
        request.arrival = next(self._arrivals)
        self.waiting.add(request)

    def schedule(self) -> Batch | None:
        """The next batch, with slots for all its rows, or None where there is nothing to run."""
        draft = self._next_part()
        while draft is None:
            draft = self._decode()
            self._fill(draft)
            if not draft.num_rows:
                if not self.running:
                    return None
                self._retract_one(1)  # half-done prefills hold all slots between them
                draft = None
        work, trees = draft.parts()
        self._in_flight.work, self._in_flight.trees = work, trees
        if self._sampling.num_scoring:
            self._in_flight.scored = tree_rows(work, trees)
        slots = self.memory.allocate(draft.num_rows)
        batch = build_batch(work, slots, self.memory.req_to_token, self._sampling, trees)
        self._features = batch_features(batch)
        return batch

    def complete(self, output: BatchOutput, took_s: float = 0.0) -> list[StepResult]:
        """The batch of the last ``schedule`` has run: its rows are computed now. New tokens are
        appended to their requests; what the rows of each request gave is returned. ``took_s``: how long it
        ran, from which later steps are planned (0: unknown)."""
        if took_s > 0 and self._features is not None:
            self.cost.observe(self._features, took_s)
        self._counters.steps += 1
        self.memory.num_steps += 1
        self._reserve.stepped()
        return self._in_flight.complete(output)

    def discard(self) -> list[Request]:
        """The batch of the last ``schedule`` failed: its rows are not computed, its slots go back.
        Returns its requests; the caller releases them."""
        return self._in_flight.discard()

    def retry_smaller(self, *, one_by_one: bool) -> list[Request]:
        """The batch of the last ``schedule`` failed: its rows run again before anything else does, in two
        halves, or each request's on their own (``one_by_one``). Where the batch cannot be divided so, it is
        discarded and its requests are returned, for the caller to release."""
        parts = self._in_flight.by_request() if one_by_one else self._in_flight.halves()
        requests = self.discard()
        if len(parts) == 1:
            return requests
        self._parts.extendleft(reversed(parts))
        return []

    def _next_part(self) -> Draft | None:
        """The next part of a failed batch. What it needs was there for the whole batch, and nothing else has
        run since. Requests that were released meanwhile drop out."""
        while self._parts:
            draft = Draft(limit=0)
            for request, num_rows in self._parts.popleft():
                if request.status is Status.RUNNING:
                    draft.add(request, num_rows)
            if draft.num_rows:
                return draft
        return None

    def release(self, request: Request) -> None:
        """The one way out of the scheduler, whatever the state of the request; may be repeated.
        What it computed stays in the cache, unlocked."""
        if request.status is Status.RUNNING:
            self._reserve.finished(request)
            self._stop_running(request)
            self.waiting.finish(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        request.status = Status.FINISHED

    def retract(self, request: Request) -> None:
        """Takes a running request's slots and puts it in front of the queue. Its tokens are kept;
        what was computed stays in the cache for as long as nobody needs the room."""
        self._stop_running(request)
        request.status = Status.WAITING
        request.num_retractions += 1
        self.waiting.restore(request)
        self._counters.retractions += 1
        self._reserve.retracted()

    def replace_output(self, request: Request, num_kept: int, token_ids: list[int]) -> None:
        """Of what the request has generated the first ``num_kept`` tokens stay, and ``token_ids``, which a
        grammar forces, come after them. They are computed with the next steps, like a prompt; what was
        computed of the tokens that go is given back."""
        start = request.num_prompt + num_kept
        end = start + len(token_ids)
        self._counters.forced_tokens += len(token_ids)
        self._counters.generated(end - request.num_tokens)
        request.tokens[start:end] = token_ids
        request.num_tokens = end
        del request.logprobs[num_kept:], request.top_logprobs[num_kept:]
        if request.status is not Status.RUNNING:
            return
        self._sampling.keep_output(request, num_kept)
        # The logits of the last token are needed, and those before tokens whose log-probability is wanted.
        num_computed = min(request.num_computed, start, request.first_unscored - 1)
        if num_computed < request.num_computed:
            self.memory.roll_back(request, num_computed)
        self._prefills.discard(request)
        if request.num_to_compute > MAX_FORCED_ROWS:
            self._prefills.add(request)

    def close_state(self, state: Hashable) -> None:
        """A program's state is over: what it computed is ordinary cache now."""
        self.memory.liveness.close(state)

    def check_idle(self) -> None:
        """Raises ``AssertionError`` unless nothing is held or locked, as it must be when idle."""
        assert not self.running
        assert not len(self._prefills)
        assert not len(self.waiting)
        self.memory.check()

    def _decode(self) -> Draft:
        """One row for each request that decodes, and with it those of the tokens that a grammar has forced
        on it since, as far as the budget allows. Where slots are short, requests are preempted first."""
        while True:
            decoding = [r for r in self.running.values() if r not in self._prefills]
            # Whatever decodes, there is a row for a prompt.
            limit = max(self.config.token_budget, len(decoding) + 1)
            draft = Draft(limit, dict.fromkeys(decoding, 1), len(decoding))
            for request in decoding:
                if request.num_to_compute > 1:
                    draft.add(request, min(request.num_to_compute - 1, draft.num_free - 1))
            missing = draft.num_rows - self.memory.num_available
            if missing <= 0:
                break
            self._retract_one(missing)
        draft.num_decode = draft.num_rows
        for request, num_rows in draft.rows.items():
            self._charge(request, request.num_computed + num_rows, num_rows)
        return draft

    def _fill(self, draft: Draft) -> None:
        """Gives what the budget leaves to prompts, chunk by chunk, in the order of the policy. Waiting
        requests are admitted as their turn comes, until one finds no room."""
        prompts = list(self._prefills)
        may_admit = self.memory.has_free_row and len(self.waiting) > 0
        if not prompts and not may_admit:
            return
        draft.spare_s = self._prompt_seconds(draft)
        chunk = max(MIN_CHUNK, draft.num_free // CHUNKS_PER_STEP)
        promised: int | None = None
        self.waiting.start_step(prompts)
        while draft.num_free > 0:
            request = self.waiting.next(prompts, self._is_blocked if may_admit else None)
            if request is None:
                return
            if request.status is Status.WAITING:
                if promised is None:
                    promised = sum(map(self._reserve.need, self.running.values()))
                if not self._admit(request, promised):
                    may_admit = False
                    continue
                promised += self._reserve.need(request)
                may_admit = self.memory.has_free_row
                prompts.append(request)
            num_rows = self._rows_of_chunk(request, draft, chunk)
            if not num_rows and draft.num_rows > draft.num_decode:
                return  # the time is used up, or the pool
            if num_rows:
                start = request.num_computed + request.num_nodes_computed + draft.rows.get(request, 0)
                draft.add(request, num_rows)
                self._charge(request, start + num_rows, num_rows)
            if not num_rows or not draft.left_of(request):
                prompts.remove(request)

    def _prompt_seconds(self, draft: Draft) -> float:
        """How much time prompts may add to a step that computes what the draft has so far."""
        if not self.cost.is_known:
            return math.inf
        if len(self.running) + len(self.waiting) == 1:
            return LONE_PROMPT_STEP_S
        if not any(request.objective == "latency" for request in draft.rows):
            return PROMPT_STEP_S
        num_read = sum(request.num_computed for request in draft.rows)
        decode_s = self.cost.decode_s(draft.num_rows, len(draft.rows), num_read)
        return min(PROMPT_STEP_S, max(MIN_STEP_S, MAX_STRETCH * decode_s) - decode_s)

    def _rows_of_chunk(self, request: Request, draft: Draft, chunk: int) -> int:
        """How many rows of the request fit into the draft now, at most ``chunk``, and takes their time off
        it. However short the time is, the step has some rows of a prompt."""
        available = self.memory.num_available - draft.num_rows
        num_rows = min(chunk, draft.num_free, draft.left_of(request), available)
        given = draft.rows.get(request, 0)
        context, is_first = request.num_computed + given, not given
        affordable = self.cost.rows_within(draft.spare_s, context, is_first=is_first)
        if affordable < num_rows:
            least = 0 if draft.num_rows > draft.num_decode else min(num_rows, MIN_CHUNK)
            num_rows = affordable if affordable >= MIN_CHUNK else least
        draft.spare_s -= self.cost.chunk_s(num_rows, context, is_first=is_first)
        return num_rows

    def _charge(self, request: Request, end: int, num_rows: int) -> None:
        """So many rows of the request, up to this place in it, are charged to its tenant, but for those that
        were charged before: what a preemption makes the engine compute again is free."""
        start = max(end - num_rows, request.num_charged)
        if end > start:
            request.num_charged = end
            self.waiting.charge(request, end - start)

    def _admit(self, request: Request, promised: int) -> bool:
        """Whether there is room for the request beside those that run; if so, it runs. ``promised``: what
        they need if none ends before the others, which is quick to know and often fits."""
        match = self.memory.match(request)
        request.num_computed = request.num_shared = match.num_tokens
        available = self.memory.num_available
        if not self.running:
            fits = request.num_to_compute <= available
        elif self._reserve.need(request) + promised <= available:
            fits = True
        else:
            fits = self._reserve.need_at_peak([*self.running.values(), request]) <= available
        if fits and 2 * len(self.running) > self.config.max_running:
            # The batch is well filled: what the next requests of open states need is worth a short wait.
            fits = request.num_to_compute + self.memory.num_expected <= available
        if not fits:
            request.num_computed = 0
            self.memory.cache.unlock(match)
            return False
        self.waiting.admit(request)
        self.running[request.id] = request
        request.status = Status.RUNNING
        self.memory.attach(request, match)
        self._sampling.attach(request)
        if request.num_to_compute > 1 or request.tree is not None:
            self._prefills.add(request)
        if not request.was_admitted:
            request.was_admitted = True
            request.num_cached = min(match.num_tokens, request.num_prompt)
            self._counters.prompt_tokens += request.num_prompt
            self._counters.cached_tokens += request.num_cached
            self._counters.cached_output_tokens += min(match.num_output, request.num_cached)
        return True

    def _is_blocked(self, request: Request, match: int | None) -> bool:
        """Whether a running prefill will compute tokens that this request needs and has not got:
        then it waits for them (they enter the cache chunk by chunk) instead of computing them twice."""
        if not self.config.use_cache or not len(self._prefills):
            return False
        if match is None:
            match = self._peek(request.extra_key, request.reusable_run())
        return self._prefills.will_compute(request, match)

    def _peek(self, identity: CacheIdentity, run: TokenRun) -> int:
        return self.memory.peek(identity, run)

    def _retract_one(self, missing: int) -> None:
        """A running request gives way: of those that free at least so many slots, the one that costs
        least to redo; where none frees enough, the one that frees most. The youngest of equals. Who had
        to give way before counts for more, so that it is not always the same one."""

        def cost(request: Request) -> tuple[bool, int, int]:
            redo = self.memory.redo_tokens(request)
            weighed = redo * (1 + request.num_retractions)
            return redo < missing, -redo if redo < missing else weighed, -request.arrival

        self.retract(min(self.running.values(), key=cost))

    def _stop_running(self, request: Request) -> None:
        self._sampling.detach(request)
        self.memory.detach(request)
        del self.running[request.id]
        self._prefills.discard(request)
