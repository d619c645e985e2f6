"""Queries to all replicas of a model, each with one answer.

A replica that dies before it answers does not count. An adapter is loaded by all replicas or by none: those
that are restarting load it when they have a process again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import anyio
from msgspec.structs import replace

from agentflow.cluster.replicas.merged_answers import MergedSnapshots, merged_stats
from agentflow.engine.messages import (
    AdapterLoaded,
    EngineAnswer,
    EngineSnapshot,
    EngineStats,
    Failed,
    LoadAdapter,
    PeekRequest,
    Query,
    SnapshotRequest,
    StatsRequest,
    UnloadAdapter,
)
from agentflow.engine.process.supervisor import RESTARTING, EngineSupervisor
from agentflow.errors import BadModelFolder, EngineDown

AnswerT = TypeVar("AnswerT", EngineStats, EngineSnapshot, AdapterLoaded)

_FIRST_REFRESH = -2_000_000_000
"""The ticket of replica 0 in ``refresh``; others count down. Supervisors use negative tickets as well, from
-1,000,000 up."""


@dataclass(slots=True, eq=False)
class _Open:
    """A query without an answer."""

    query: Query
    missing: set[int]  # replicas that have not answered
    answers: dict[int, EngineAnswer] = field(default_factory=dict)
    failures: list[Failed] = field(default_factory=list)


class ReplicaQueries:
    """Sends queries to ``replicas``, by number. ``clock``: seconds."""

    def __init__(self, replicas: Mapping[int, EngineSupervisor], clock: Callable[[], float]) -> None:
        self._replicas = replicas
        self._open: dict[int, _Open] = {}
        self._snapshots = MergedSnapshots(len(replicas), clock)
        self.stats: dict[int, EngineStats] = {}
        """The last known stats of each replica that has a process."""
        self._refreshing: dict[int, anyio.Event] = {}  # replicas that owe stats to ``refresh``

    async def refresh(self) -> None:
        """Reads the stats of all replicas that have a process. A replica that owes an answer to an earlier
        call is not asked again."""
        for number, supervisor in self._replicas.items():
            if supervisor.is_ready and number not in self._refreshing:
                supervisor.send(StatsRequest(_FIRST_REFRESH - number))
                self._refreshing[number] = anyio.Event()
        for answered in [*self._refreshing.values()]:
            await answered.wait()

    def is_silent(self, number: int) -> bool:
        """Whether a replica has not answered the last ``refresh``."""
        return number in self._refreshing

    def lost(self, number: int) -> None:
        """A replica has lost its process: the stats of that process do not apply to the next one."""
        self.stats.pop(number, None)

    def send(self, query: Query) -> None:
        """Sends a query to the replicas that have a process. Raises ``EngineDown`` if none has."""
        ready = {number: one for number, one in self._replicas.items() if one.is_ready}
        if isinstance(query, PeekRequest):
            number, node = self._snapshots.replica(query.node)
            if number not in ready:
                raise EngineDown(RESTARTING)
            ready[number].send(replace(query, node=node))
            return
        if not ready:
            reasons = [one.down_because for one in self._replicas.values()]
            raise EngineDown(reasons[0] if reasons[0] is not None and all(reasons) else RESTARTING)
        self._open[query.ticket] = _Open(query, set(ready))
        for number, supervisor in ready.items():
            part = query
            if isinstance(query, SnapshotRequest):
                num_nodes = -(-query.max_nodes // len(ready))
                last = self._snapshots.last_step(number)
                part = replace(query, max_nodes=num_nodes, steps_after=last)
            supervisor.send(part)

    def received(self, number: int, answer: EngineAnswer | Failed) -> EngineAnswer | Failed | None:
        """Returns the answer to a query if ``answer``, of one replica, completes it. Answers to queries for a
        single replica are returned unchanged."""
        ticket = answer.request_id if isinstance(answer, Failed) else answer.ticket
        if isinstance(answer, EngineStats):
            self.stats[number] = answer
        elif isinstance(answer, EngineSnapshot):
            self.stats[number] = answer.stats
        if ticket <= _FIRST_REFRESH:
            if (answered := self._refreshing.pop(number, None)) is not None:
                answered.set()
            return None
        asked = self._open.get(ticket)
        if asked is None:
            return answer
        asked.missing.discard(number)
        if isinstance(answer, Failed):
            asked.failures.append(answer)
        else:
            asked.answers[number] = answer
        if asked.missing:
            return None
        del self._open[ticket]
        if not asked.answers:
            return asked.failures[0]
        return self._merged(asked)

    def _merged(self, asked: _Open) -> EngineAnswer | Failed:
        answers, query = asked.answers, asked.query
        match query:
            case StatsRequest():
                return merged_stats(query.ticket, _only(EngineStats, answers))
            case SnapshotRequest():
                snapshots = _only(EngineSnapshot, answers)
                return self._snapshots.merge(query.ticket, query.steps_after, query.tenant is None, snapshots)
            case _:
                assert isinstance(query, LoadAdapter)
                return self._loaded(query, _only(AdapterLoaded, answers), asked.failures)

    def _loaded(
        self, query: LoadAdapter, answers: Mapping[int, AdapterLoaded], failures: Iterable[Failed]
    ) -> EngineAnswer | Failed:
        first = next(iter(answers.values()))
        failed = next((one for one in failures if one.code != EngineDown.code), None)
        if failed is None and any(one.identity != first.identity for one in answers.values()):
            why = f"the files of the adapter {query.name!r} changed while replicas read them: load it again"
            failed = Failed(query.ticket, BadModelFolder.code, why)
        if failed is not None:
            for number, answer in answers.items():
                self._replicas[number].send(UnloadAdapter(answer.identity))
            return failed
        for number, supervisor in self._replicas.items():
            if number not in answers:
                supervisor.must_load(first)
        return first


def _only(kind: type[AnswerT], answers: Mapping[int, EngineAnswer]) -> dict[int, AnswerT]:
    return {number: answer for number, answer in answers.items() if isinstance(answer, kind)}
