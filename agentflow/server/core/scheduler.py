"""The scheduler: which rows the next forward pass computes.

Continuous batching (Yu et al., "Orca", 2022) with chunked prefill: every step runs one row for each
request that decodes, and fills the rest of a token budget with prompt tokens, first of requests
already admitted, then of waiting ones in the order of a policy. The KV pool is shared between
running requests and the radix cache: what nobody holds is evicted when slots are needed; where that
is not enough, the running request that costs least to redo gives way.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable
from dataclasses import dataclass

from agentflow.server.core.batch import Batch, BatchOutput
from agentflow.server.core.batch_builder import Work, build_batch
from agentflow.server.core.branch_builder import tree_rows
from agentflow.server.core.counters import Counters
from agentflow.server.core.draft import Draft
from agentflow.server.core.in_flight import InFlight, StepResult
from agentflow.server.core.kv_memory import KVMemory
from agentflow.server.core.output_reserve import OutputReserve
from agentflow.server.core.policies import DEFAULT_POLICY, policy_named
from agentflow.server.core.prefills import Prefills
from agentflow.server.core.request import CacheIdentity, Request, Status
from agentflow.server.core.request_size import check_size
from agentflow.server.core.sampling_table import SamplingTable
from agentflow.server.core.token_run import TokenRun

# Forced tokens are computed in the step after they are known where they are no more than this; more of them
# take their turn like a prompt's.
MAX_FORCED_ROWS = 32


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """``token_budget``: rows of one forward. ``max_running``: requests in one batch."""

    max_running: int = 64
    token_budget: int = 256
    policy: str = DEFAULT_POLICY
    use_cache: bool = True


def _is_chunk(item: Work) -> bool:
    return item[1] > 1


class Scheduler:
    """Owns the KV memory of one model and who runs on it. Used from one thread."""

    def __init__(self, *, num_slots: int, max_context: int, config: SchedulerConfig) -> None:
        self.config = config
        self.max_total_tokens = min(max_context, num_slots)
        self.waiting = policy_named(config.policy, self._peek, config.token_budget)
        self.running: dict[int, Request] = {}
        self._prefills = Prefills()
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
        while True:
            draft = self._decode()
            for request in self._prefills:
                self._prefill(request, draft)
            self._admit_waiting(draft)
            if draft.num_rows or not self.running:
                break
            self._retract_one(1)  # half-done prefills hold all slots between them
        work = sorted(draft.work, key=_is_chunk)  # stable: requests with one row come first
        self._in_flight.work, self._in_flight.branches = work, draft.branches
        if not draft.num_rows:
            return None
        if self._sampling.num_scoring:
            self._in_flight.scored = tree_rows(work, draft.branches)
        slots = self.memory.allocate(draft.num_rows)
        return build_batch(work, slots, self.memory.page_table, self._sampling, draft.branches)

    def complete(self, output: BatchOutput) -> list[StepResult]:
        """The batch of the last ``schedule`` has run: its rows are computed now. New tokens are
        appended to their requests; what the rows of each request gave is returned."""
        self._counters.steps += 1
        self._reserve.stepped()
        return self._in_flight.complete(output)

    def discard(self) -> list[Request]:
        """The batch of the last ``schedule`` failed: its rows are not computed, its slots go back.
        Returns its requests; the caller releases them."""
        return self._in_flight.discard()

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
        on it since, as far as the budget allows. Where slots are short, requests give way first."""
        while True:
            decoding = [r for r in self.running.values() if r not in self._prefills]
            # Whatever decodes, there is a row for a prompt.
            limit = max(self.config.token_budget, len(decoding) + 1)
            num_rows = len(decoding)
            work: list[Work] = []
            for request in decoding:
                num_more = min(request.num_to_compute - 1, limit - 1 - num_rows)
                num_rows += num_more
                work.append((request, 1 + num_more))
            missing = num_rows - self.memory.num_available
            if missing <= 0:
                return Draft(work, [], num_rows, limit)
            self._retract_one(missing)

    def _prefill(self, request: Request, draft: Draft) -> None:
        """Adds as many of the request's rows as budget and pool allow."""
        available = self.memory.num_available - draft.num_rows
        num_rows = min(draft.limit - draft.num_rows, request.num_to_compute, available)
        if num_rows > 0:
            draft.add(request, num_rows)

    def _admit_waiting(self, draft: Draft) -> None:
        if draft.num_rows >= draft.limit or not len(self.waiting) or not self.memory.has_free_row:
            return
        promised = sum(map(self._reserve.need, self.running.values()))
        while draft.num_rows < draft.limit and self.memory.has_free_row:
            candidate = self.waiting.next(self._is_blocked)
            if candidate is None or not self._admit(candidate, promised):
                return
            promised += self._reserve.need(candidate)
            self._prefill(candidate, draft)

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
        if not fits:
            request.num_computed = 0
            self.memory.cache.unlock(match)
            return False
        self.waiting.admit(request, request.num_tokens - match.num_tokens + request.num_nodes)
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
