"""A scheduler that is stepped by hand on the deterministic runner, and each request's answer alone.

The fake runner's next token hashes everything the page table shows, so any mistake in slots,
sharing, chunking, eviction or preemption changes an output or raises.
"""

import time
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from support.engine.requests import request_of

from agentflow.engine.batch import Batch, BatchOutput, SampledRows
from agentflow.engine.models.table_copy import TableCopy
from agentflow.engine.request import Request
from agentflow.engine.scheduling.media_work import MediaWork
from agentflow.engine.scheduling.policies.fair_policy import FairLongestPrefix
from agentflow.engine.scheduling.policies.policy import LongestPrefix
from agentflow.engine.scheduling.scheduler import Scheduler, SchedulerConfig
from agentflow.engine.simulator.depth_first import SIMULATED_POLICIES, DepthFirst
from agentflow.engine.simulator.fake_runner import FakeRunner
from agentflow.protocol.sampling import SamplingParams

GREEDY = SamplingParams()


def hash_token(tokens: list[int]) -> int:
    """The token of the fake runner after these tokens."""
    return zlib.crc32(np.array(tokens, dtype=np.int64).tobytes()) % 1000


def expected_output(prompt: list[int], count: int) -> list[int]:
    """The reference: one request, alone, without slots or cache."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(hash_token(tokens))
    return tokens[len(prompt) :]


class UnpenalizedRunner(FakeRunner):
    """The fake model has no logits: it reads no penalties."""

    def choose(self, seen: list[NDArray[np.int64]], sampled: SampledRows) -> BatchOutput:
        return super().choose(seen, replace(sampled, edits=None))


class Harness:
    """A scheduler and a fake runner, stepped by hand, with the invariants checked at every step.
    ``feature_bytes``: images are encoded, and their features have this budget. ``batches``: all that were
    launched. ``ahead``: a batch is launched before the one before it is collected, if there is one to launch.
    ``prepares``: the next batch is built before a batch is collected, if the scheduler can."""

    def __init__(
        self,
        num_slots: int = 256,
        *,
        ahead: bool = False,
        prepares: bool = False,
        feature_bytes: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        **config,
    ) -> None:
        self.runner = FakeRunner(
            num_slots=num_slots,
            max_context=128,
            launches_ahead=ahead,
            needs_features=feature_bytes is not None,
        )
        self.in_flight: deque[Batch] = deque()
        self.media = None if feature_bytes is None else MediaWork(self.runner, feature_bytes)
        self.scheduler = Scheduler(
            num_slots=num_slots,
            max_context=128,
            config=SchedulerConfig(**config),
            policies=SIMULATED_POLICIES,
            clock=clock,
            media=self.media,
        )
        self.copy, self.copied = TableCopy(), np.full_like(self.scheduler.memory.table.slots, -1)
        self.requests: dict[int, Request] = {}
        self.batches: list[Batch] = []
        self.num_prepared = 0  # of the batches
        self._prepares = prepares
        self._prepared: Batch | None = None

    def add(
        self, request_id: int, prompt: list[int], count: int, extra: str = "", params=GREEDY, **kwargs
    ) -> Request:
        tokens = np.array(prompt, dtype=np.int32)
        request = request_of(request_id, tokens, count, params, salt=extra, **kwargs)
        self.scheduler.add(request)
        self.requests[request_id] = request
        return request

    @property
    def token_counts(self) -> list[int]:
        """The scheduled tokens of each batch."""
        return [len(batch.token_ids) for batch in self.batches]

    def launch(self) -> bool:
        """Launches the next batch, if there is one, after the slices of encodings that are planned."""
        if self.in_flight and self.scheduler.wants_media:
            return False
        batch = self.scheduler.schedule()
        is_encoding = self.media is not None and bool(self.media.planned)
        if is_encoding:
            assert not self.in_flight
            assert not self.media.run_planned()
        if batch is None:
            return is_encoding
        self.batches.append(batch)
        self.num_prepared += batch is self._prepared
        num_tokens = batch.query_lens.sum() + (0 if batch.trees is None else batch.trees.query_lens.sum())
        assert len(batch.token_ids) == len(batch.positions) == len(batch.write_slots) == num_tokens
        assert len(np.unique(batch.write_slots)) == len(batch.write_slots)
        check_shared(batch)
        self.check_copy(batch)
        self.in_flight.append(self.runner.launch(batch))
        self._prepared = self.scheduler.prepare() if self._prepares else None
        self.check()
        return True

    def check_copy(self, batch: Batch) -> None:
        """A copy of the table that gets the changes of each batch is equal to it where the batch reads it."""
        changes = self.copy.changes(batch)
        self.copied[changes.rows, changes.columns] = changes.slots
        for row, length in reads_of(batch):
            np.testing.assert_array_equal(self.copied[row, :length], batch.req_to_token[row, :length])

    def fail(self) -> list[Request]:
        """The oldest batch in flight fails, if there is one or one can be launched. Returns its requests."""
        if not self.in_flight and not (self.launch() and self.in_flight):
            return []
        while self.in_flight:
            self.runner.collect(self.in_flight.popleft())
        failed = self.scheduler.discard()
        self.check()
        return failed

    def step(self) -> bool:
        is_new = self.launch()
        if not self.in_flight:
            return is_new
        if is_new and self.runner.info.launches_ahead and len(self.in_flight) == 1:
            return True
        for result in self.scheduler.complete(self.runner.collect(self.in_flight.popleft())):
            request = result.request
            request.logprobs += result.logprobs
            ended = request.num_generated >= request.max_new_tokens and request.num_to_compute <= 1
            if ended and (request.max_new_tokens or result.is_last):
                self.scheduler.release(request)
        self.check()
        return True

    def run(self) -> None:
        """Steps until no request is left."""
        while self.step():
            pass

    def check(self) -> None:
        scheduler = self.scheduler
        held = sum(
            r.num_computed - r.committed.num_tokens + len(r.node_slots) for r in scheduler.running.values()
        )
        for launched in scheduler._in_flight.launched:
            held += sum(len(row.withdrawn_slots) for row in launched.rows if row.withdrawn_slots is not None)
        memory = scheduler.memory
        assert memory.num_in_use == held
        assert memory.slots.num_free + memory.cache.num_cached + held == memory.slots.total
        memory.cache.check()
        memory.slots.check()
        self.check_matches()

    def check_matches(self) -> None:
        """The policy's match of each waiting request is the cache's."""
        waiting = self.scheduler.waiting
        matches: list[tuple[Request, int]] = []
        if isinstance(waiting, LongestPrefix):
            matches = [(one, waiting._by_match.count_match(one)) for one in waiting._waiting.values()]
        if isinstance(waiting, DepthFirst):
            matches = [(one, waiting._tree.count_match(one)) for one in waiting._waiting.values()]
        if isinstance(waiting, FairLongestPrefix):
            for tenant in waiting._tenants.values():
                matches += [
                    (one.request, tenant.count_match(one.request)) for one in tenant.arrivals.waiting.values()
                ]
        for request, match in matches:
            assert match == self.scheduler.memory.peek(request.cache_key, request.reusable_run())

    def output(self, request_id: int) -> list[int]:
        request = self.requests[request_id]
        return request.tokens[request.num_prompt : request.num_tokens].tolist()


def reads_of(batch: Batch) -> list[tuple[int, int]]:
    """The rows of the table that a batch reads, and the number of columns."""
    reads = [*zip(batch.req_rows.tolist(), batch.kv_lens.tolist(), strict=True)]
    if batch.trees is not None:
        reads += zip(batch.trees.req_rows.tolist(), batch.trees.prefix_lens.tolist(), strict=True)
    return reads


def check_shared(batch: Batch) -> None:
    """The prefixes that a batch names are all that its rows share, by a comparison of every pair."""
    cached = dict(zip(batch.req_rows.tolist(), (batch.kv_lens - batch.query_lens).tolist(), strict=True))
    for row, length in reads_of(batch):
        cached.setdefault(row, length)
    for row, length in cached.items():
        for other, other_length in cached.items():
            size = min(length, other_length)
            is_equal = batch.req_to_token[row, :size] == batch.req_to_token[other, :size]
            common = size if is_equal.all() else int(is_equal.argmin())
            named = max((end for end, rows in batch.shared if row in rows and other in rows), default=0)
            assert row == other or named == common
