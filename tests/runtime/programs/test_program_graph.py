"""The live graph of a session, against a reference that computes everything from the whole history."""

import itertools
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples

from agentflow.engine.generator.context import group_of_hint
from agentflow.engine.request import AWAITED_GROUPS, PATIENT_GROUPS
from agentflow.protocol import ops
from agentflow.protocol.ops import Objective
from agentflow.protocol.sampling import GenParams
from agentflow.runtime.programs.deduction import MAX_STAGES, MAX_STEPS
from agentflow.runtime.programs.graph import ProgramGraph
from agentflow.runtime.programs.scheduling_hint import SchedulingHint

Key = tuple[int, int] | None


@dataclass
class PlainNode:
    """A node of the reference: its dependencies and its outcome."""

    number: int
    state: int
    kind: str
    explicit: Objective | None
    preds: list[int]
    is_wanted: bool = False
    has_ended: bool = False
    is_removed: bool = False

    @property
    def is_request(self) -> bool:
        return self.kind in ("gen", "select", "decide", "embed")


@dataclass
class PlainState:
    """A state of the reference: the nodes on which its next op may depend."""

    objective: Objective | None
    items: list[int] = field(default_factory=list)
    nodes: list[int] = field(default_factory=list)
    is_stopped: bool = False


class Reference:
    """The whole history of a session, from which all is computed again at each question."""

    def __init__(self) -> None:
        self.nodes: list[PlainNode] = []
        self.states: dict[int, PlainState] = {}
        self.by_var: dict[int, int] = {}

    def add(self, number: int, kind: str, refs: list[int]) -> int:
        state = self.states[number]
        state.items += refs
        preds = [] if kind == "expect" else self.unfinished(state.items)
        node = PlainNode(len(self.nodes), number, kind, state.objective, preds)
        self.nodes.append(node)
        state.nodes.append(node.number)
        if kind != "expect":
            state.items = [node.number]
        return node.number

    def unfinished(self, items: list[int]) -> list[int]:
        return [n for n in dict.fromkeys(items) if not self.nodes[n].has_ended]

    def fork(self, parent: int, children: tuple[int, ...]) -> int | None:
        state, node = self.states[parent], None
        if not state.is_stopped and len(self.unfinished(state.items)) > 1:
            node = self.add(parent, "fork", [])
        for child in children:
            self.states[child] = PlainState(state.objective, [*state.items], is_stopped=state.is_stopped)
        return node

    def stop(self, number: int) -> None:
        state = self.states[number]
        state.is_stopped = True
        for n in state.nodes:
            node = self.nodes[n]
            if not node.has_ended:
                node.has_ended = node.is_removed = True
        state.items = []

    def deduced(self) -> dict[int, tuple[str, Key, int | None]]:
        """The objective, the stage (None if it has one member) and the steps of each unfinished node."""
        nodes = self.nodes
        all_succs: dict[int, list[int]] = defaultdict(list)
        for node in nodes:
            if not node.is_removed:
                for pred in node.preds:
                    all_succs[pred].append(node.number)
        kept = {
            node.number
            for node in nodes
            if not node.is_removed
            and (not node.has_ended or any(not nodes[s].has_ended for s in all_succs[node.number]))
        }

        def succs(n: int) -> list[int]:
            return [s for s in all_succs[n] if s in kept]

        def num_preds(n: int) -> int:
            return len([p for p in nodes[n].preds if not nodes[p].is_removed])

        @cache
        def key_of_preds(n: int) -> Key:
            return (n, 1) if num_preds(n) > 1 else key_before(n)

        @cache
        def key_before(n: int) -> Key:
            key = key_of(n)
            if key is None or key[1] + nodes[n].is_request > MAX_STAGES:
                return None
            return key[0], key[1] + nodes[n].is_request

        @cache
        def key_of(n: int) -> Key:
            keys = {key_of_preds(s) for s in succs(n)}
            if len(keys) > 1:  # several consumers of one stage
                keys = {key_before(s) for s in succs(n)}
            return keys.pop() if len(keys) == 1 else None

        members: dict[Key, int] = defaultdict(int)
        for n in sorted(kept, reverse=True):
            members[key_of(n)] += nodes[n].is_request

        @cache
        def objective(n: int) -> str:
            node = nodes[n]
            if node.explicit:
                return node.explicit
            if node.is_wanted or not succs(n):
                return "latency"
            if node.is_request and key_of(n) is not None and members[key_of(n)] > 1:
                return "throughput"
            found = [objective(s) if len(succs(n)) == 1 else gate(s) for s in succs(n)]
            return "latency" if "latency" in found else "throughput"

        @cache
        def gate_of_preds(n: int) -> str:
            return objective(n) if num_preds(n) > 1 else gate(n)

        @cache
        def gate(n: int) -> str:
            if key_of(n) is None:
                return objective(n)
            found = [gate_of_preds(s) if len(succs(n)) == 1 else gate(s) for s in succs(n)]
            return "latency" if "latency" in found else "throughput"

        @cache
        def steps(n: int) -> int | None:
            found = []
            for p in nodes[n].preds:
                if not nodes[p].has_ended:
                    if nodes[p].kind == "expect" or steps(p) is None:
                        return None
                    found.append((steps(p) or 0) + nodes[p].is_request)
            return min(max(found, default=0), MAX_STEPS)

        return {
            n: (objective(n), key_of(n) if members[key_of(n)] > 1 else None, steps(n))
            for n in sorted(kept, reverse=True)
            if not nodes[n].has_ended
        }

    def hints(self) -> dict[int, tuple[str, Key, int | None]]:
        """The same of each state's next request."""
        deduced = self.deduced()
        found: dict[int, tuple[str, Key, int | None]] = {}
        for number, state in self.states.items():
            waiting = [n for n in state.nodes if n in deduced and self.nodes[n].is_request]
            found[number] = deduced[waiting[0]] if waiting else (state.objective or "latency", None, None)
        return found


class Session:
    """Feeds random actions to a graph and to the reference."""

    def __init__(self, max_visits: int) -> None:
        self.graph = ProgramGraph(max_visits=max_visits)
        self.reference = Reference()
        self.reported: dict[int, SchedulingHint] = {}
        self.numbers = itertools.count(1)
        self.forks: dict[int, ops.Fork] = {}
        self.declared: dict[int, ops.Declaring] = {}

    def act(self, action: str, a: int, b: int, c: int) -> None:
        states = sorted(self.reference.states)
        if action == "open" or not states:
            number = next(self.numbers)
            given: list[Objective | None] = [None, None, None, "throughput", "latency"]
            objective = given[a % 5]
            self.graph.submit(ops.Open(number, objective=objective, program=("", "p")[b % 2]))
            self.reference.states[number] = PlainState(objective)
            return
        number = states[a % len(states)]
        known = [*self.reference.by_var]
        var = known[b % len(known)] if known else 0
        open_nodes = [node for node in self.reference.nodes if not node.has_ended]
        match action:
            case "text":
                chosen = [known[(b + i * (1 + c % 3)) % len(known)] for i in range(c % 4)] if known else []
                self.refer(number, chosen)
            case "gen" | "select" | "set" | "expect":
                self.declare(action, number, [var] if known and action == "set" else [])
            case "reduce" | "shared" if (
                open_nodes
            ):  # a request, or a fork, that needs some of the last variables
                wanted = [v for v in known if not self.reference.nodes[self.reference.by_var[v]].has_ended]
                self.refer(number, wanted[-1 - b % 6 :])
                if action == "reduce":
                    self.declare("gen", number, [])
                else:
                    self.fork(number, 1 + c % 4)
            case "branches":  # a request in each of the last states
                for state in states[-1 - b % 4 :]:
                    self.declare("gen", state, [])
            case "fork":
                self.fork(number, 1 + c % 4)
            case "want" if known:
                self.graph.want(var, ("value", "stream")[c % 2])
                node_number = self.reference.by_var[var]
                self.reference.nodes[node_number].is_wanted = True
            case "end" if open_nodes:
                forks = [node for node in open_nodes if node.kind == "fork"] if c % 2 else []
                node_ = (forks or open_nodes)[b % len(forks or open_nodes)]
                node_.has_ended = True
                if node_.kind == "expect":
                    self.graph.provide(self.var_of(node_.number))
                elif node_.kind == "fork":
                    self.graph.end(self.forks[node_.number])
                else:
                    op = self.declared[node_.number]
                    self.graph.begin(op)
                    self.graph.end(op)
            case "stop":
                self.graph.stop(number)
                self.reference.stop(number)
            case "close":
                self.graph.close(number)
                self.reference.stop(number)
                del self.reference.states[number]
                self.reported.pop(number, None)
            case _:
                pass

    def fork(self, number: int, count: int) -> None:
        fork = ops.Fork(number, tuple([next(self.numbers) for _ in range(count)]))
        self.graph.submit(fork)
        node = self.reference.fork(number, fork.children)
        if node is not None:
            self.forks[node] = fork

    def refer(self, number: int, variables: list[int]) -> None:
        self.graph.submit(ops.Text(number, tuple([ops.Ref(one) for one in variables])))
        if not self.reference.states[number].is_stopped:
            self.reference.states[number].items += [self.reference.by_var[one] for one in variables]

    def var_of(self, node: int) -> int:
        return next(var for var, n in self.reference.by_var.items() if n == node)

    def declare(self, kind: str, number: int, refs: list[int]) -> None:
        var = next(self.numbers)
        made: dict[str, Callable[[], ops.Declaring]] = {
            "gen": lambda: ops.Gen(number, var, "x", GenParams()),
            "select": lambda: ops.Select(number, var, "x", ("a", "b")),
            "set": lambda: ops.Set(number, var, "x", tuple([ops.Ref(ref) for ref in refs])),
            "expect": lambda: ops.Expect(number, var, "x"),
        }
        op = made[kind]()
        self.graph.submit(op)
        if not self.reference.states[number].is_stopped:
            node = self.reference.add(number, kind, [self.reference.by_var[ref] for ref in refs])
            self.reference.by_var[var] = node
            self.declared[node] = op

    def check(self) -> None:
        while self.graph.has_changes:
            self.reported |= dict(self.graph.take_hints())
        expected = self.reference.hints()
        assert {n: (p.objective, p.steps) for n, p in self.reported.items()} == {
            n: (objective, steps) for n, (objective, _, steps) in expected.items()
        }
        groups: dict[int, Key] = {}
        for number, hint in self.reported.items():
            assert groups.setdefault(hint.group, expected[number][1]) == expected[number][1]
        assert len(set(groups.values())) == len(groups)
        assert groups.get(0) is None
        assert self.graph.num_held <= 8 * len(self.kept())

    def kept(self) -> list[int]:
        """The unfinished nodes and their neighbours, and the edges between them."""
        nodes = self.reference.nodes
        found = [0]
        for node in nodes:
            if not node.has_ended:
                found += [node.number, *node.preds]
        return found


_ACTIONS = ["open", "text", "gen", "fork", "select", "set", "expect", "want", "stop", "close"]
_ACTIONS += ["reduce", "branches", "end"] * 3 + ["shared"]
_numbers = st.integers(0, 40)
_actions = st.lists(
    st.tuples(st.sampled_from(_ACTIONS), _numbers, _numbers, _numbers), min_size=25, max_size=50
)


@examples(60)
@given(_actions, st.sampled_from((1, 3, 4096)))
def test_random_programs_against_the_reference(
    actions: list[tuple[str, int, int, int]], max_visits: int
) -> None:
    session = Session(max_visits)
    for index, action in enumerate(actions):
        session.act(*action)
        if index % 5 == 0:
            session.check()
    session.check()


def gen(state: int, var: int) -> ops.Gen:
    return ops.Gen(state, var, "x", GenParams())


def text(state: int, *variables: int) -> ops.Text:
    return ops.Text(state, tuple([ops.Ref(var) for var in variables]))


def graph_after(*submitted: ops.Op) -> ProgramGraph:
    graph = ProgramGraph(itertools.count(100).__next__)
    for op in submitted:
        graph.submit(op)
    return graph


def hints_of(graph: ProgramGraph, *states: int) -> list[SchedulingHint]:
    hints = [graph.hint(state) for state in states]
    return [hint for hint in hints if hint is not None]


def test_chain_over_states_counts_by_latency() -> None:
    graph = graph_after(
        ops.Open(1), gen(1, 11), ops.Open(2), text(2, 11), gen(2, 12), ops.Open(3), text(3, 12), gen(3, 13)
    )
    hints = hints_of(graph, 1, 2, 3)
    assert [(hint.objective, hint.group, hint.steps) for hint in hints] == [
        ("latency", 0, 0),
        ("latency", 0, 1),
        ("latency", 0, 2),
    ]
    graph.end(gen(1, 11))
    assert graph.take_hints()[-2:] == [
        (2, SchedulingHint(hints[1].program, 0, "latency", 0)),
        (3, SchedulingHint(hints[2].program, 0, "latency", 1)),
    ]


def forked() -> list[ops.Op]:
    branches = [op for state in (2, 3, 4) for op in (gen(state, 10 + state), gen(state, 20 + state))]
    return [ops.Open(1), gen(1, 11), ops.Fork(1, (2, 3, 4)), *branches, text(1, 22, 23, 24), gen(1, 19)]


def separate() -> list[ops.Op]:
    opened = [op for state in (2, 3, 4) for op in (ops.Open(state, program="one"), text(state, 11))]
    branches = [op for state in (2, 3, 4) for op in (gen(state, 10 + state), gen(state, 20 + state))]
    return [ops.Open(1, program="one"), gen(1, 11), *opened, *branches, text(1, 22, 23, 24), gen(1, 19)]


@pytest.mark.parametrize("program", [forked, separate])
def test_map_reduce(program: Callable[[], list[ops.Op]]) -> None:
    """The stages before the last request are task groups, and the request that all need counts like it."""
    graph = graph_after(*program())
    first, *branches = hints_of(graph, 1, 2, 3, 4)
    assert (first.objective, first.group, first.steps) == ("latency", 0, 0)
    assert {(hint.objective, hint.steps) for hint in branches} == {("throughput", 1)}
    assert len({hint.group for hint in branches}) == 1
    assert {hint.program for hint in branches} == {first.program}
    graph.end(gen(1, 11))
    early = {hint.group for hint in hints_of(graph, 2, 3, 4)}
    for state in (2, 3, 4):
        graph.end(gen(state, 10 + state))
    late = {hint.group for hint in hints_of(graph, 2, 3, 4)}
    assert len(late) == 1
    assert 0 not in late
    assert early.isdisjoint(late)
    graph.end(gen(2, 22))
    graph.end(gen(3, 23))
    assert hints_of(graph, 4)[0].group in late  # the last one is still waited for
    assert hints_of(graph, 1)[0].steps == 1
    graph.end(gen(4, 24))
    assert (hints_of(graph, 1)[0].objective, hints_of(graph, 1)[0].steps) == ("latency", 0)


def test_stages_of_which_each_request_needs_all_of_the_stage_before() -> None:
    graph = graph_after(
        *[ops.Open(state, program="p") for state in range(1, 7)],
        gen(1, 1),
        *[op for state in (2, 3) for op in (text(state, 1), gen(state, state))],
        *[op for state in (4, 5) for op in (text(state, 2, 3), gen(state, state))],
        text(6, 4, 5),
        gen(6, 6),
    )
    first, *rest, last = hints_of(graph, 1, 2, 3, 4, 5, 6)
    assert [(hint.objective, hint.group) for hint in (first, last)] == [("latency", 0)] * 2
    assert {(hint.objective, hint.group_objective) for hint in rest} == {("throughput", "latency")}
    assert rest[0].group == rest[1].group != rest[2].group == rest[3].group
    assert 0 not in {hint.group for hint in rest}


def test_awaited_branch_counts_by_latency() -> None:
    graph = graph_after(*forked())
    graph.want(22)
    graph.end(gen(1, 11))
    for state in (2, 3, 4):
        graph.end(gen(state, 10 + state))
    assert [hint.objective for hint in hints_of(graph, 2, 3, 4)] == ["latency", "throughput", "throughput"]


def test_task_group_with_an_explicit_objective_has_it_to_its_consumer() -> None:
    """Members of one stage below an awaited request: its throughput members do not rank by it."""
    graph = graph_after(*forked())
    graph.want(22, objective="throughput")
    graph.end(gen(1, 11))
    for state in (2, 3, 4):
        graph.end(gen(state, 10 + state))
    asked, *rest = hints_of(graph, 2, 3, 4)
    assert {hint.group for hint in rest} == {asked.group}
    assert {hint.objective for hint in (asked, *rest)} == {"throughput"}
    assert (asked.group_objective, {hint.group_objective for hint in rest}) == ("throughput", {"latency"})
    assert group_of_hint(asked) >= PATIENT_GROUPS > group_of_hint(rest[0]) >= AWAITED_GROUPS


def test_objective_of_a_program_and_of_a_variable() -> None:
    graph = graph_after(ops.Open(1, objective="throughput"), gen(1, 11), gen(1, 12))
    assert hints_of(graph, 1)[0].objective == "throughput"
    graph.want(11, objective="latency")
    assert hints_of(graph, 1)[0].objective == "latency"
    graph.end(gen(1, 11))
    assert hints_of(graph, 1)[0].objective == "throughput"


def test_states_that_name_no_program_are_in_that_of_the_session() -> None:
    graph = ProgramGraph(program="p")
    for op in (ops.Open(1), ops.Open(2), ops.Open(3, program="other"), gen(1, 11), gen(2, 12), gen(3, 13)):
        graph.submit(op)
    first, second, third = hints_of(graph, 1, 2, 3)
    assert first.program == second.program != third.program
    assert {hint.group for hint in (first, second, third)} == {0}
    graph.close(1)
    graph.submit(ops.Open(4))
    assert hints_of(graph, 4)[0].program == second.program


def test_streamed_variable_has_its_targets() -> None:
    graph = graph_after(ops.Open(1), gen(1, 11))
    graph.take_hints()
    graph.want(11, "stream", ttft_s=0.5, tpot_s=0.05)
    ((_, hint),) = graph.take_hints()
    assert (hint.objective, hint.is_streamed, hint.ttft_s, hint.tpot_s) == ("latency", True, 0.5, 0.05)


def test_state_that_waits_for_its_client() -> None:
    graph = graph_after(ops.Open(1, label="agent"), gen(1, 11))
    graph.end(gen(1, 11), now_s=10.0)
    assert (hints_of(graph, 1)[0].steps, hints_of(graph, 1)[0].returns_s) == (None, None)
    graph.submit(ops.Expect(1, 12, "tool"))
    graph.submit(text(1, 12))
    graph.submit(gen(1, 13), now_s=14.0)
    assert hints_of(graph, 1)[0].steps is None
    graph.provide(12)
    assert hints_of(graph, 1)[0].steps == 0
    graph.end(gen(1, 13), now_s=15.0)
    assert (hints_of(graph, 1)[0].steps, hints_of(graph, 1)[0].returns_s) == (None, 4.0)


def test_cancelled_branch_leaves_its_group() -> None:
    graph = graph_after(*forked())
    before = hints_of(graph, 3)[0]
    graph.stop(2)
    graph.stop(4)
    after = hints_of(graph, 3)[0]
    assert before.group
    assert not after.group
    assert after.objective == "latency"


def test_memory_is_bounded_by_unfinished_ops() -> None:
    graph = graph_after(ops.Open(1), gen(1, 2))
    for var in range(2, 20_000, 2):
        graph.submit(text(1, var))
        graph.submit(gen(1, var + 2))
        graph.end(gen(1, var))
        graph.submit(text(1, var + 2))
        graph.submit(text(1, var + 2))
        if var % 1000 == 0:
            graph.submit(ops.Open(1 + 2 * var))
            graph.submit(ops.Fork(1, (3 + 2 * var, 5 + 2 * var)))
            for state in (1 + 2 * var, 3 + 2 * var, 5 + 2 * var):
                graph.close(state)
        graph.take_hints()
        assert graph.num_held < 100


def num_portions(graph: ProgramGraph) -> int:
    """The calls of ``take_hints`` until all is settled."""
    count = 0
    while graph.has_changes:
        graph.take_hints()
        count += 1
    return count


def crossed(num: int, max_visits: int) -> ProgramGraph:
    """``num`` gens, ``num`` consumers of all of them, and two sinks of all consumers."""
    graph = ProgramGraph(itertools.count(100).__next__, max_visits=max_visits)
    for state in range(1, num + 1):
        graph.submit(ops.Open(state))
        graph.submit(gen(state, state))
    for state in range(num + 1, 2 * num + 1):
        graph.submit(ops.Open(state))
        graph.submit(text(state, *range(1, num + 1)))
        graph.submit(gen(state, state))
    for state in (2 * num + 1, 2 * num + 2):
        graph.submit(ops.Open(state))
        graph.submit(text(state, *range(num + 1, 2 * num + 1)))
        graph.submit(gen(state, state))
    num_portions(graph)
    return graph


def test_edges_count_as_visits_after_a_want() -> None:
    graph = crossed(30, max_visits=100)
    for objective in ("throughput", "latency"):
        graph.want(61, objective=objective)
        graph.want(62, objective=objective)
        assert num_portions(graph) >= 5
        assert {hint.objective for hint in hints_of(graph, 61, 62)} == {objective}


def test_edges_count_as_visits_after_a_stop() -> None:
    graph = crossed(30, max_visits=100)
    graph.stop(61)
    assert num_portions(graph) >= 8
    graph.close(62)
    assert num_portions(graph) >= 8
    assert {hint.steps for hint in hints_of(graph, *range(31, 61))} == {1}


def test_edges_count_as_visits_after_an_end() -> None:
    graph = crossed(30, max_visits=100)
    for state in range(1, 61):
        graph.end(gen(state, state))
        num_most = num_portions(graph)
    assert num_most >= 5  # the last consumer needed all gens
    assert {hint.steps for hint in hints_of(graph, 61, 62)} == {0}


def test_ops_of_a_stopped_state_leave_in_portions() -> None:
    graph = ProgramGraph(max_visits=100)
    graph.submit(ops.Open(1))
    for var in range(1, 1_001):
        graph.submit(gen(1, var))
    num_portions(graph)
    graph.stop(1)
    assert not graph.nodes()
    assert num_portions(graph) >= 20
    assert graph.num_held == 0


def gathered(num: int) -> ProgramGraph:
    """The graph of states with two gens each, which are awaited as a whole."""
    graph = ProgramGraph()
    states = range(1, num + 1)
    for state in states:
        graph.submit(ops.Open(state, program="p"))
        graph.submit(gen(state, state))
        graph.submit(gen(state, num + state))
    graph.gather(1, states)
    return graph


def test_states_that_are_awaited_as_a_whole_have_one_consumer() -> None:
    graph = gathered(3)
    first = hints_of(graph, 1, 2, 3)
    assert {hint.objective for hint in first} == {"throughput"}
    assert len({hint.group for hint in first}) == 1
    for state in (1, 2, 3):
        graph.end(gen(state, state))
    last = hints_of(graph, 1, 2, 3)
    assert len({hint.group for hint in last}) == 1
    assert last[0].group not in (0, first[0].group)
    for state in (1, 2, 3):
        assert [node.kind for node in graph.nodes()].count("gather") == 1
        graph.end(gen(state, 3 + state))
    assert not graph.nodes()


def test_the_consumer_of_states_leaves_with_their_root() -> None:
    graph = gathered(2)
    graph.stop(2)
    graph.stop(1)
    for state in (1, 2):
        graph.close(state)
    num_portions(graph)
    assert graph.num_held == 0
    assert hints_of(gathered(1), 1)[0].objective == "latency"
