"""One answer to a query from the answers of all replicas.

Counters and gauges add up. The nodes of the replicas' trees get numbers that differ, and the times of their
use are moved to one clock. Steps are numbered across replicas, in the order in which snapshots show them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping

from msgspec.structs import astuple, fields, replace

from agentflow.engine.messages import EngineSnapshot, EngineStats, RequestRow, TreeRow
from agentflow.engine.watching.snapshot import MAX_REQUESTS, MAX_STEPS
from agentflow.protocol.events import StepRecord

_EPOCHS = 2**53


def merged_stats(ticket: int, answers: Mapping[int, EngineStats]) -> EngineStats:
    """Returns the sum of the replicas' stats. There is at least one."""
    first, *others = answers.values()
    merged = replace(first, ticket=ticket)
    for other in others:
        sums = {
            field.name: value + getattr(merged, field.name)
            for field, value in zip(fields(EngineStats), astuple(other), strict=True)
            if isinstance(value, int | float)
        }
        times = [one + two for one, two in zip(merged.step_times, other.step_times, strict=True)]
        merged = replace(merged, **sums | {"ticket": ticket, "step_times": times})
    return merged


class MergedSnapshots:
    """Snapshots of all replicas. ``size``: more than the highest number of a replica. ``clock``: seconds."""

    def __init__(self, size: int, clock: Callable[[], float]) -> None:
        self._size = size
        self._clock = clock
        self._steps: deque[StepRecord] = deque(maxlen=MAX_STEPS)
        self._num_steps = 0
        self._last: dict[int, tuple[int, int]] = {}  # of each replica: its epoch and its last known step

    def last_step(self, replica: int) -> int:
        """Returns the number of the last step of a replica that is known."""
        return self._last.get(replica, (0, 0))[1]

    def replica(self, node: int) -> tuple[int, int]:
        """Returns the replica of a node in a merged snapshot, and the node's number there."""
        return node % self._size, node // self._size

    def merge(
        self, ticket: int, steps_after: int, sees_steps: bool, answers: Mapping[int, EngineSnapshot]
    ) -> EngineSnapshot:
        """Returns one snapshot. There is at least one answer."""
        now_s = self._clock()
        tenants: dict[str, int] = {}
        nodes: list[TreeRow] = []
        for number, answer in answers.items():
            self._add_steps(number, answer)
            shift_s = now_s - answer.time_s
            indices = [tenants.setdefault(name, len(tenants)) for name in answer.tenants]
            for node, parent, num_tokens, num_output, locks, keeps, used_s, tenant in answer.nodes:
                above = parent * self._size + number if parent else 0
                place = node * self._size + number
                nodes.append(
                    (place, above, num_tokens, num_output, locks, keeps, used_s + shift_s, indices[tenant])
                )
        steps = [step for step in self._steps if step.number > steps_after] if sees_steps else []
        return EngineSnapshot(
            ticket=ticket,
            epoch=sum(answer.epoch for answer in answers.values()) % _EPOCHS,
            time_s=now_s,
            steps=steps,
            # Running ones first, as in each answer.
            requests=sorted(
                [self._placed(row, number) for number, answer in answers.items() for row in answer.requests],
                key=lambda row: row[3] == "waiting",
            )[:MAX_REQUESTS],
            nodes=nodes,
            tenants=[*tenants],
            num_nodes=sum(answer.num_nodes for answer in answers.values()),
            stats=merged_stats(ticket, {number: answer.stats for number, answer in answers.items()}),
            took_s=max(answer.took_s for answer in answers.values()),
        )

    def _placed(self, row: RequestRow, number: int) -> RequestRow:
        return (*row[:-1], number if self._size > 1 else None)

    def _add_steps(self, number: int, answer: EngineSnapshot) -> None:
        epoch, last = self._last.get(number, (0, 0))
        if epoch != answer.epoch:
            last = 0
        for step in answer.steps:
            if step.number > last:
                last = step.number
                self._num_steps += 1
                self._steps.append(replace(step, number=self._num_steps))
        self._last[number] = answer.epoch, last
