"""Steps in which the running requests decode and nothing else happens, without batches. For simulators.

While no prompt is computed, no waiting request could start, and none that runs ends, each step adds one token
to each request. A ``DecodeRun`` counts such steps. In each one it does what others could see: it allocates
slots, which evicts, puts tokens into the cache, and learns the cost of steps. The progress and the charges of
the requests are written later, for all steps together. So a step costs what it evicts and commits, however
many requests decode.

After ``stop``, the scheduler is as after the same number of ``Scheduler.schedule`` and ``complete``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from agentflow.engine.request import Request
from agentflow.engine.scheduling.in_flight import COMMIT_RUN
from agentflow.engine.scheduling.scheduler import Scheduler


class DecodeRun:
    """Steps of a scheduler, as long as its requests only decode.

    Args:
        scheduler: One for which ``decoding`` returned the requests.
        requests: All running requests. Their buffers have the tokens that the steps generate.
        num_steps: How many steps there may be: none of the requests ends in them.
    """

    def __init__(self, scheduler: Scheduler, requests: Sequence[Request], num_steps: int) -> None:
        self._scheduler = scheduler
        self._requests = requests
        self._limit = num_steps
        self._num_launched = self._num_completed = self._num_charged = 0  # steps
        self._starts = [request.num_computed for request in requests]
        self._positions = np.array(self._starts)
        self._req_rows = np.array([request.req_row for request in requests])
        self._num_read = sum(self._starts)
        # By step: the requests of which tokens enter the cache when it completes.
        self._due: dict[int, list[int]] = {}
        for index, request in enumerate(requests):
            assert request.committed is not None
            step = max(1, COMMIT_RUN - request.num_computed + request.committed.num_tokens)
            self._due.setdefault(step, []).append(index)

    @property
    def num_rows(self) -> int:
        """Requests in each step."""
        return len(self._requests)

    @property
    def num_completed(self) -> int:
        """Steps that have completed."""
        return self._num_completed

    @property
    def may_continue(self) -> bool:
        """Whether the next step may be one of the run, too."""
        return self._num_completed < self._limit and not self._scheduler.pauses.paused

    def launch(self) -> int | None:
        """Begins a step. Returns how many tokens of KV it reads, or None, and does nothing, if a request has
        to be preempted first."""
        scheduler, memory = self._scheduler, self._scheduler.memory
        num_rows = len(self._requests)
        if scheduler.pauses.is_used:
            scheduler.pauses.resume()
        if memory.num_available < num_rows:
            return None
        slots = memory.allocate(num_rows)
        memory.table.write_tokens(self._req_rows, self._positions, slots)
        scheduler.num_decode_tokens = num_rows
        self._positions += 1
        self._num_read += num_rows
        self._num_launched += 1
        return self._num_read

    def complete(self, took_s: float) -> None:
        """The step has run, in ``took_s`` seconds."""
        scheduler, num_rows = self._scheduler, len(self._requests)
        features = np.array([1.0, num_rows, num_rows, self._num_read, 0.0])
        self._num_completed += 1
        due = self._due.pop(self._num_completed, None)
        if due is not None:
            for index in due:
                scheduler.memory.commit(self._requests[index], self._starts[index] + self._num_completed)
            self._due.setdefault(self._num_completed + COMMIT_RUN, []).extend(due)
        scheduler.decoded(features, took_s)

    def charge(self) -> None:
        """Charges the requests for all launched steps. Called before a request is added to the scheduler."""
        num_steps = self._num_launched - self._num_charged
        if num_steps:
            self._num_charged = self._num_launched
            for request in self._requests:
                request.num_charged += num_steps
                self._scheduler.waiting.charge(request, num_steps)

    def stop(self) -> None:
        """Ends the run, between two steps."""
        assert self._num_launched == self._num_completed
        self.charge()
        for request, start in zip(self._requests, self._starts, strict=True):
            request.num_computed = start + self._num_completed
            request.num_tokens = request.num_computed + 1


def decoding(scheduler: Scheduler) -> Sequence[Request]:
    """The running requests, if all that the next steps have to do is to decode them; otherwise none."""
    requests = [*scheduler.running.values()]
    if not requests or not scheduler.only_decodes(requests):
        return ()
    for request in requests:
        if request.num_computed != request.num_tokens - 1 or request.num_computed < request.num_prompt:
            return ()
        if request.num_charged != request.num_computed or request.wants_scores or request.is_steered:
            return ()
    return requests
