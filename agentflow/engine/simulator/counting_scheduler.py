"""A scheduler of requests with known outputs, for simulators. The time of a step grows with its changes.

Most requests of a step decode: each adds one token, which changes nothing that others could see. The
scheduler *counts* these requests: it knows the step in which each was at a given token, and so its progress
in any later step. A step allocates slots for all of them, puts tokens into the cache when they are due, and
plans and computes prompts as always. The progress of a counted request is written when it is read: when
memory is planned, or when the request ends or is preempted. Charges follow when a policy reads them.

No batch is built, because nothing computes it. A step returns its amounts, for a ``CostModel``.

After each step, the scheduler decides like one that handles all requests one by one. If some request that
decodes cannot be counted, a step handles all of them one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from agentflow.engine.batch import BatchOutput
from agentflow.engine.request import SAMPLED_ONCE, Objective, Request, Row, Status, make_rows
from agentflow.engine.scheduling.admission import Admission
from agentflow.engine.scheduling.in_flight import COMMIT_RUN
from agentflow.engine.scheduling.scheduler import Scheduler, SchedulerConfig
from agentflow.engine.scheduling.step_limits import Draft
from agentflow.engine.simulator.cost_model import Amounts


class CountingScheduler(Scheduler):
    """Like ``Scheduler``; ``next_step`` and ``complete_step`` replace ``schedule`` and ``complete``."""

    def __init__(self, *, config: SchedulerConfig, **options: Any) -> None:
        super().__init__(config=config, **options)
        self._end_of: dict[int, int] = {}  # by request: its tokens when it ends
        self._num_admitted = 0
        self._admission_of: dict[int, int] = {}  # numbers the running requests, by id, in their order
        self._step = 0  # steps that were launched
        self._num_planned = 0  # steps that were planned: one more while a step is being planned
        # The counted requests, by id, and in the order of the arrays.
        self._counted: dict[int, _Counted] = {}
        self._in_arrays: list[_Counted] = []
        self._bases = np.zeros(config.max_running, dtype=np.int64)
        self._table_rows = np.zeros(config.max_running, dtype=np.int64)
        self._sum_bases = 0
        self._groups: dict[_GroupKey, _Group] = {}
        # By step, also with requests that are no longer counted: the requests with tokens that enter the
        # cache when it completes, and the requests that end with it.
        self._due: dict[int, list[_Counted]] = {}
        self._last: dict[int, list[_Counted]] = {}

    def add_known(self, request: Request, output: Sequence[int]) -> None:
        """Queues a request that generates these tokens, at least one."""
        end = request.num_tokens + len(output)
        request.tokens[request.num_tokens : end] = output
        self._end_of[request.id] = end
        self.add(request)

    def add(self, request: Request) -> None:
        """Queues a request."""
        # Its place depends on the tokens of its program, and the charge of a new tenant on all charges.
        if any(tenant != request.tenant for tenant, _ in self._groups):
            self._charge_all()
        else:
            self._charge_group((request.tenant, request.origin.program))
        super().add(request)

    # Steps.

    def next_step(self) -> Amounts | None:
        """Begins the next step. Returns its amounts, or None if there is nothing to run."""
        if self.pauses.is_used:
            self._charge_all()
        draft = self._plan()
        if draft is None:
            return None
        rows = make_rows([*draft.tokens.items()])
        slots = self.memory.allocate(draft.num_tokens)
        table, count = self.memory.table.slots, len(self._in_arrays)
        if count:
            columns = self._bases[:count] + self._step
            table[self._table_rows[:count], columns] = slots[:count]
        self._step += 1
        num_tokens = num_sampled = count
        num_read, num_others, pairs = self._sum_bases + count * self._step, 0, 0.0
        for row in rows:
            first, num_tokens = num_tokens, num_tokens + row.num_tokens
            table[row.request.req_row, row.start : row.end] = slots[first:num_tokens]
            num_sampled += len(row.targets)
            if row.num_tokens == 1:
                num_read += row.end
            else:
                num_others += row.end
                pairs += row.num_tokens * (row.end - row.num_tokens / 2)
        self.num_decode_tokens = draft.num_decode
        features = np.array([1.0, num_tokens, num_sampled, float(num_read + num_others), pairs])
        self._in_flight.launch(rows, lambda: features, is_scored=False)
        return 1.0, num_tokens, num_sampled, float(num_read), pairs

    def complete_step(self, took_s: float) -> list[Row]:
        """The step has run. Returns the results of requests that were not counted in it, and of requests that
        have ended. ``took_s``: its duration."""
        launched = self._in_flight.launched[0]
        self._observe(launched.features, took_s)
        for one in _in_order(self._due.pop(self._step, ())):
            self.memory.commit(one.request, one.base + self._step)
            self._due.setdefault(self._step + COMMIT_RUN, []).append(one)
        token_ids = [row.request.tokens[row.end] for row in launched.rows if row.targets]
        rows = self._in_flight.complete(BatchOutput(np.array(token_ids, dtype=np.int64), None))
        self.memory.num_computed += len(self._counted)
        self._counters.generated(len(self._counted))
        self._count_step()
        ended = [self._end_row(one) for one in _in_order(self._last.pop(self._step, ()))]
        for row in rows:
            if row.token_ids:
                self._count(row.request)
        return ended + rows

    def _end_row(self, one: _Counted) -> Row:
        """The last row of a request that ends."""
        self._leave(one)
        request = one.request
        row = Row(request, request.num_computed - 1, 1, SAMPLED_ONCE)
        row.token_ids = [int(request.tokens[request.num_computed])]
        return row

    def _decode(self) -> Draft:
        count = len(self._counted)
        num_ready = len(self.running) - len(self._prefills.requests)
        if self._pace is not None or num_ready != count or count > self.memory.num_available:
            for one in [*self._in_arrays]:
                self._leave(one)
            return super()._decode()
        if count:
            self._num_planned += 1
            if self.pauses.is_used:
                for (tenant, _), group in self._groups.items():
                    self.pauses.charge(tenant, len(group.members))
        return Draft(max(self.config.token_budget, count + 1), num_tokens=count, num_decode=count)

    def _prefill(self, draft: Draft) -> None:
        if self.waiting.num_tenants > 1:  # the least charged one is next
            self._charge_all()
        super()._prefill(draft)

    def _prompt_seconds(self, draft: Draft) -> float:
        if not self._counted:
            return super()._prompt_seconds(draft)
        requests = [one.request for one in self._in_arrays]
        return self._seconds_beside(requests, self._sum_bases + len(requests) * self._step, draft)

    def _admissions(self) -> Admission:
        if self._admission is None:
            for one in self._in_arrays:
                one.write(self._step)
        return super()._admissions()

    # Requests.

    def _admit(self, request: Request) -> bool:
        is_admitted = super()._admit(request)
        if is_admitted:
            self._num_admitted += 1
            self._admission_of[request.id] = self._num_admitted
        return is_admitted

    def _stop_running(self, request: Request) -> None:
        if request.id in self._counted:
            self._leave(self._counted[request.id])
        super()._stop_running(request)
        del self._admission_of[request.id]

    def release(self, request: Request) -> None:
        """Removes a request in any state; may be repeated."""
        super().release(request)
        self._end_of.pop(request.id, None)

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
        """The scheduling hint of a state changed. The arguments are as in ``UpdateHint``."""
        moved: list[Request] = []
        for request in self._of_state.get(state, ()):
            if request.status is Status.WAITING:  # its place follows from the tokens of its program
                self._charge_group((request.tenant, program))
            elif request.id in self._counted and request.origin.program != program:
                self._leave(self._counted[request.id])
                moved.append(request)
        super().update_hint(state, program, task_group, objective, steps, returns_s, tpot_s, ttft_s)
        for request in moved:
            self._count(request)

    def _count(self, request: Request) -> None:
        """Counts a running request from now on, if it decodes and does nothing else, and has tokens left."""
        if request.num_tokens >= self._end_of[request.id] or self._pace is not None:
            return
        if request.num_computed != request.num_tokens - 1 or request.num_computed != request.num_charged:
            return
        if request.wants_scores or request.is_steered:
            return
        assert request.committed is not None
        key = request.tenant, request.origin.program
        self._charge_group(key)
        group = self._groups.setdefault(key, _Group(self._num_planned))
        base, index = request.num_computed - self._step, len(self._in_arrays)
        one = _Counted(request, base, self._admission_of[request.id], key, index)
        group.members[one] = None
        self._counted[request.id] = one
        self._in_arrays.append(one)
        self._bases[index], self._table_rows[index] = base, request.req_row
        self._sum_bases += base
        due = max(self._step + 1, request.committed.num_tokens + COMMIT_RUN - base)
        self._due.setdefault(due, []).append(one)
        self._last.setdefault(self._end_of[request.id] - 1 - base, []).append(one)

    def _leave(self, one: _Counted) -> None:
        """Stops counting a request."""
        one.write(self._step)
        one.is_counted = False
        self._charge_group(one.key)
        group = self._groups[one.key]
        del group.members[one]
        if not group.members:
            del self._groups[one.key]
        del self._counted[one.request.id]
        self._sum_bases -= one.base
        last = self._in_arrays.pop()
        if last is not one:
            last.index = one.index
            self._in_arrays[one.index] = last
            self._bases[one.index], self._table_rows[one.index] = last.base, last.request.req_row

    # Charges.

    def _charge_all(self) -> None:
        for key in self._groups:
            self._charge_group(key)

    def _charge_group(self, key: _GroupKey) -> None:
        """Charges the requests of a program for the steps that were planned since they were charged."""
        group = self._groups.get(key)
        if group is not None and group.charged < self._num_planned:
            num_tokens = (self._num_planned - group.charged) * len(group.members)
            group.charged = self._num_planned
            self.waiting.charge(next(iter(group.members)).request, num_tokens)


_GroupKey = tuple[str, int]  # tenant and program


@dataclass(slots=True, eq=False)
class _Counted:
    """A counted request."""

    request: Request
    base: int  # its computed tokens, less the steps that were launched
    number: int  # of its admission
    key: _GroupKey
    index: int  # in the arrays
    is_counted: bool = True

    def write(self, step: int) -> None:
        """Writes its progress after this many steps."""
        request = self.request
        request.num_computed = request.num_charged = self.base + step
        request.num_tokens = request.num_computed + 1


@dataclass(slots=True, eq=False)
class _Group:
    """The counted requests of one program."""

    charged: int  # steps for which its requests have been charged
    members: dict[_Counted, None] = field(default_factory=dict)


def _in_order(found: Sequence[_Counted]) -> Sequence[_Counted]:
    """Returns the requests that are still counted, in the order of the running requests."""
    counted = [one for one in found if one.is_counted]
    return counted if len(counted) < 2 else sorted(counted, key=lambda one: one.number)
