"""The programs of a workload in the live graph of a service, which gives each request its hint.

A client submits the requests of a program together with their dependencies: each is in the graph from the
program's beginning on. A request that arrives some time after the one before it (``Arrival.at_s``), as after
a tool, is submitted when it arrives. The client waits for all requests that no other one needs.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence

from agentflow.engine.simulator.workload import Arrival
from agentflow.protocol import ops
from agentflow.protocol.sampling import GenParams
from agentflow.runtime.programs.graph import ProgramGraph
from agentflow.runtime.programs.scheduling_hint import SchedulingHint

HintedState = tuple[int, SchedulingHint]
_GEN = GenParams()


class ProgramGraphs:
    """The graphs of all programs that run, each as the graph of a session.

    Args:
        arrivals: The requests of the workload. Those without a program are ignored.
        number: Returns the number for a name, always the same one.
    """

    def __init__(self, arrivals: Sequence[Arrival], number: Callable[[str], int]) -> None:
        self._arrivals = arrivals
        self._number = number
        self._next_number = itertools.count(1).__next__  # of programs and groups
        self._graphs: dict[str, ProgramGraph] = {}
        self._num_left = Counter(one.program for one in arrivals)
        self._gens: dict[int, ops.Gen] = {}  # that were submitted, by the index of the request
        self._followers: dict[int, list[int]] = {}
        for index, arrival in enumerate(arrivals):
            for before in self._before(arrival):
                self._followers.setdefault(before, []).append(index)

    def arrived(self, index: int, now_s: float) -> list[HintedState]:
        """A request of a program arrives. Returns the states of its program that have another hint."""
        if index not in self._gens:
            self._submit(self._wired_from(index), now_s)
        graph = self._graphs[self._arrivals[index].program]
        graph.begin(self._gens[index])
        return _hints(graph)

    def ended(self, index: int, now_s: float) -> list[HintedState]:
        """The request has ended. Returns the states of its program that have another hint."""
        name = self._arrivals[index].program
        graph = self._graphs[name]
        graph.end(self._gens[index], now_s)
        hints = _hints(graph)
        self._num_left[name] -= 1
        if not self._num_left[name]:
            del self._graphs[name]
        return hints

    def close(self, index: int) -> None:
        """No more requests come in the state of this request."""
        graph = self._graphs.get(self._arrivals[index].program)
        if graph is not None:
            graph.close(self.state(index))

    def hint(self, index: int) -> SchedulingHint:
        """The hint of the request's state, which has been submitted."""
        graph = self._graphs.get(self._arrivals[index].program)
        hint = None if graph is None else graph.hint(self.state(index))
        return hint or SchedulingHint()

    def state(self, index: int) -> int:
        """The number of the request's state. A request without one is alone in its state."""
        return self._number(self._arrivals[index].state or f"request {index}")

    @property
    def num_open(self) -> int:
        """Programs that have begun and not ended."""
        return len(self._graphs)

    @staticmethod
    def _before(arrival: Arrival) -> set[int]:
        return set() if arrival.after is None else {arrival.after, *arrival.joins}

    def _wired_from(self, index: int) -> list[int]:
        """The request and the requests that are submitted with it, in topological order."""
        found = {index: None}
        pending = [index]
        for one in pending:
            for follower in self._followers.get(one, ()):
                arrival = self._arrivals[follower]
                if arrival.at_s or arrival.program != self._arrivals[index].program or follower in found:
                    continue
                if all(before in found or before in self._gens for before in self._before(arrival)):
                    found[follower] = None
                    pending.append(follower)
        return pending

    def _submit(self, indices: Sequence[int], now_s: float) -> None:
        name = self._arrivals[indices[0]].program
        root = self._number(f"root of {name}")
        graph = self._graphs.get(name)
        if graph is None:  # the root state keeps the program's number while no other state is open
            graph = self._graphs[name] = ProgramGraph(self._next_number, program=name)
            graph.submit(ops.Open(root))
        known = {state.number for state in graph.states()}
        for index in indices:
            arrival, state = self._arrivals[index], self.state(index)
            if state not in known:
                known.add(state)
                objective = None if arrival.objective == "latency" else arrival.objective
                graph.submit(
                    ops.Open(state, objective=objective, label=arrival.label, group=arrival.task_group)
                )
            refs = tuple([ops.Ref(before + 1) for before in sorted(self._before(arrival))])
            graph.submit(ops.Text(state, refs))
            self._gens[index] = ops.Gen(state, index + 1, arrival.label, _GEN)
            graph.submit(self._gens[index], now_s)
        graph.gather(root, dict.fromkeys([self.state(index) for index in indices]))


def _hints(graph: ProgramGraph) -> list[HintedState]:
    hints: list[HintedState] = []
    while graph.has_changes:
        hints += graph.take_hints()
    return hints
