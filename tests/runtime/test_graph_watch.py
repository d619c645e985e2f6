"""The looks of a watch of live graphs, put together, are the whole graphs at each time."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples

from agentflow.language.observing.graph_watch import GraphsView
from agentflow.protocol import ops
from agentflow.protocol.events import GraphDelta, LiveGraph, Usage
from agentflow.protocol.sampling import GenParams
from agentflow.runtime.programs import watch
from agentflow.runtime.programs.graph import ProgramGraph
from agentflow.runtime.programs.live import Room, TenantGraphs, live_graph
from agentflow.runtime.programs.watch import GraphsWatch

Action = tuple[str, int, int, int]


class Tenant:
    """Random sessions. The first one watches."""

    def __init__(self, new_room: Callable[[], Room] = Room) -> None:
        self.numbers = itertools.count(1)
        self.graphs = TenantGraphs()
        self.replicas: dict[int, int] = {}
        self.declared: dict[int, list[ops.Op]] = {}  # unfinished, by the index of the session
        self.variables: dict[int, list[int]] = {}
        self.open: dict[int, ProgramGraph] = {}
        self.add_session(0)
        self.new_room = new_room
        self.watch = GraphsWatch(self.open[0], self.graphs, new_room)
        self.view = GraphsView()

    def add_session(self, index: int) -> None:
        graph = self.open[index] = ProgramGraph(find_replica=self.replicas.get)
        self.declared[index], self.variables[index] = [], []
        self.graphs.add(graph)

    def act(self, index: int, action: Action) -> None:
        name, a, b, c = action
        if index not in self.open:
            self.add_session(index)
        graph = self.open[index]
        states = [state.number for state in graph.states()]
        declared, variables = self.declared[index], self.variables[index]
        if name == "open" or not states:
            objective = (None, None, "throughput")[a % 3]
            program = ("", "p", "q")[b % 3]
            graph.submit(ops.Open(next(self.numbers), objective=objective, program=program))
            return
        state = states[a % len(states)]
        refs = tuple([ops.Ref(var) for var in variables[-(b % 5) :]]) if b % 5 else ()
        match name:
            case "gen" | "set" | "expect":
                var = next(self.numbers)
                graph.submit(ops.Text(state, refs))
                op: ops.Declaring = ops.Gen(state, var, "x", GenParams())
                if name != "gen":
                    op = ops.Set(state, var, "y", ()) if name == "set" else ops.Expect(state, var, "z")
                graph.submit(op)
                declared.append(op)
                variables.append(var)
            case "fork":
                fork = ops.Fork(state, tuple([next(self.numbers) for _ in range(1 + c % 3)]))
                graph.submit(fork)
                declared.append(fork)
            case "hint":
                graph.submit(ops.Hint(state, ("latency", "throughput")[b % 2]))
            case "want" if variables:
                graph.want(variables[b % len(variables)], ("value", "stream")[c % 2])
            case "begin" if declared:
                graph.begin(declared[b % len(declared)])
            case "move":
                self.replicas[state] = b
            case "end" if declared:
                op = declared.pop(b % len(declared))
                if isinstance(op, ops.Expect):
                    graph.provide(op.var)
                else:
                    graph.begin(op)
                    graph.end(op, usage=Usage(prompt_tokens=a, miss_reason="evicted" if c % 2 else ""))
            case "stop":
                graph.stop(state, has_failed=bool(b % 2))
            case "close":
                graph.close(state)
            case "leave" if index:
                self.graphs.remove(self.open.pop(index))
            case _:
                pass

    def look(self) -> None:
        self.settle()
        self.view.apply(self.watch.look())

    def settle(self) -> None:
        for graph in self.open.values():
            while graph.has_changes:
                graph.take_hints()

    def expected(self) -> list[LiveGraph]:
        room = self.new_room()
        own, *others = self.graphs
        shown = [live_graph(own, room)]
        for graph in others:
            if graph.num_states and room.num_states > 0:
                shown.append(live_graph(graph, room))
        return shown


def plain(graphs: list[LiveGraph]) -> list[LiveGraph]:
    """The graphs with programs and groups numbered in the order of their appearance."""
    found = []
    for graph in graphs:
        programs: dict[int, int] = {}
        groups: dict[int, int] = {0: 0}
        states = [
            msgspec.structs.replace(
                state,
                program=programs.setdefault(state.program, len(programs)),
                group=groups.setdefault(state.group, len(groups)),
            )
            for state in sorted(graph.states, key=lambda state: state.id)
        ]
        nodes = [
            msgspec.structs.replace(
                node, group=groups.setdefault(node.group, len(groups)), needs=tuple(sorted(node.needs))
            )
            for node in graph.nodes
        ]
        found.append(msgspec.structs.replace(graph, states=tuple(states), nodes=tuple(nodes)))
    return sorted(found, key=repr)


_NAMES = ["open", "fork", "hint", "want", "move", "stop", "close", "leave", "set", "expect"]
_NAMES += ["gen", "begin", "end"] * 4
_small = st.integers(0, 30)
_actions = st.lists(
    st.tuples(st.integers(0, 2), st.tuples(st.sampled_from(_NAMES), _small, _small, _small)),
    min_size=20,
    max_size=60,
)
_ROOMS: dict[str, Callable[[], Room]] = {"ample": Room, "little": partial(Room, 5, 6, 8)}


@examples(150)
@given(_actions, st.sampled_from(sorted(_ROOMS)), st.sets(st.integers(0, 59)), st.sets(st.integers(0, 59)))
def test_looks_put_together_are_the_whole_graphs(
    actions: list[tuple[int, Action]], room: str, unseen: set[int], lost: set[int]
) -> None:
    tenant = Tenant(_ROOMS[room])
    for number, (index, action) in enumerate(actions):
        tenant.act(index, action)
        if number in unseen:
            continue
        if number in lost:
            tenant.watch.look()
            tenant.watch.reset()
        tenant.look()
        assert plain(tenant.view.graphs()) == plain(tenant.expected())
        assert not tenant.watch.has_news() or room == "little"


def busy_session(num_states: int) -> Tenant:
    tenant = Tenant()
    for _ in range(num_states):
        tenant.act(0, ("open", 0, 0, 0))
    for number in range(num_states):
        tenant.act(0, ("gen", number, 0, 0))
    return tenant


@pytest.mark.parametrize("num_states", [10, 400])
def test_a_look_has_only_the_changes(num_states: int) -> None:
    tenant = busy_session(num_states)
    tenant.look()
    tenant.act(0, ("begin", 0, 3, 0))
    assert tenant.watch.has_news()
    (delta,) = tenant.watch.look().graphs
    assert [(node.id, node.status) for node in delta.nodes] == [(4, "running")]
    assert delta == GraphDelta(1, nodes=delta.nodes)
    assert not tenant.watch.has_news()


def test_a_cancelled_request_is_no_longer_needed() -> None:
    tenant = busy_session(3)
    graph = tenant.open[0]
    graph.submit(ops.Text(3, (ops.Ref(4), ops.Ref(5))))
    graph.submit(ops.Gen(3, 7, "x", GenParams()))
    tenant.look()
    assert tenant.view.graphs()[0].nodes[-1].needs == (3, 1, 2)
    graph.stop(1)
    tenant.look()
    assert tenant.view.graphs()[0].nodes[-1].needs == (3, 2)


def test_f37_an_ended_request_loses_its_needs_when_these_leave_later() -> None:
    tenant = Tenant()
    graph = tenant.open[0]
    graph.submit(ops.Open(1))
    gens = [ops.Gen(1, var, "x", GenParams()) for var in (2, 3, 4)]
    for op in gens:
        graph.submit(op)
    graph._max_visits, max_visits = 0, graph._max_visits  # as if much else had changed
    for op in gens[:2]:
        graph.end(op)
    tenant.view.apply(tenant.watch.look())
    graph._max_visits = max_visits
    tenant.look()
    assert plain(tenant.view.graphs()) == plain(tenant.expected())


def test_a_look_is_bounded_and_shows_more_when_there_is_room() -> None:
    tenant = busy_session(1_200)
    first = tenant.watch.look()
    (delta,) = first.graphs
    assert (first.reset, len(delta.states), len(delta.nodes)) == (True, 1_000, 1_000)
    assert delta.num_states_left_out == 200
    for state in range(1, 301):
        tenant.open[0].close(state)
    tenant.settle()
    (delta,) = tenant.watch.look().graphs
    assert [len(delta.states), len(delta.states_gone), delta.num_states_left_out] == [200, 300, 0]
    tenant.act(0, ("begin", 0, 900, 0))
    assert [len(one.nodes) for one in tenant.watch.look().graphs] == [1]


def test_sessions_beyond_the_limit_are_counted() -> None:
    tenant = Tenant(partial(Room, 2, 10, 10))
    for index in (1, 2, 3):
        tenant.act(index, ("open", 0, 0, 0))
    look = tenant.watch.look()
    assert [one.id for one in look.graphs] == [2, 3]
    assert look.num_graphs_left_out == 1
    tenant.act(1, ("leave", 0, 0, 0))
    look = tenant.watch.look()
    assert (look.gone, [one.id for one in look.graphs], look.num_graphs_left_out) == ((2,), [4], 0)


def test_changes_that_nobody_reads_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "MAX_CHANGED", 20)
    tenant = busy_session(2)
    tenant.look()
    for _ in range(100):
        tenant.act(0, ("gen", 0, 0, 0))
        tenant.act(0, ("end", 0, -1, 0))
        assert tenant.watch._num_changed <= 20
    tenant.look()
    assert plain(tenant.view.graphs()) == plain(tenant.expected())


def test_a_watch_with_too_many_numbers_starts_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "MAX_NUMBERS", 30)
    tenant = Tenant()
    resets = []
    for _ in range(100):
        tenant.act(0, ("open", 0, 0, 0))
        tenant.settle()
        resets.append(tenant.watch.look().reset)
        tenant.act(0, ("close", 0, 0, 0))
    assert 2 <= sum(resets) <= 5


def test_a_closed_watch_is_told_nothing() -> None:
    tenant = busy_session(1)
    tenant.look()
    tenant.watch.close()
    tenant.act(0, ("begin", 0, 0, 0))
    assert not tenant.watch.has_news()
    assert not tenant.open[0].watchers
