"""The hints that the generator of a session receives, for programs of the usual shapes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from itertools import pairwise
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from support.fake_engine import FakeEngine
from support.observed_backends import Stepped, settle

import agentflow as af
from agentflow.backends.local import interpreted
from agentflow.backends.scripted_generator import ScriptedContext, ScriptedGenerator
from agentflow.protocol import ops
from agentflow.protocol.backend import Connection, Deliver, Lost
from agentflow.protocol.sampling import GenParams
from agentflow.runtime.generator import Generated, StateHint
from agentflow.runtime.interpreter import interpreter as interpreter_module
from agentflow.runtime.interpreter.interpreter import Interpreter
from agentflow.runtime.programs.graph import ProgramGraph
from agentflow.runtime.programs.scheduling_hint import SchedulingHint

pytestmark = [pytest.mark.anyio, pytest.mark.trio_in_full]


class HintedGenerator(ScriptedGenerator):
    """Notes the hint of each context: when its gens begin, and after it has changed."""

    def __init__(self) -> None:
        super().__init__(lambda prompt: prompt[-1])
        self.at_begin: list[tuple[str, SchedulingHint]] = []
        self.hints: list[SchedulingHint] = []
        self._latest: dict[int, tuple[ScriptedContext, SchedulingHint]] = {}

    def hint(self, context: ScriptedContext, hint: StateHint) -> None:
        if hint.scheduling is not None:
            self._latest[id(context)] = context, hint.scheduling
            self.hints.append(hint.scheduling)

    async def generate(self, context: ScriptedContext, *rest: Any, **options: Any) -> Generated:
        self.at_begin.append((context.text[-1], self._latest[id(context)][1]))
        return await super().generate(context, *rest, **options)

    def begun_with(self, ending: str) -> list[SchedulingHint]:
        """The hints of the gens whose prompt has this ending, when they began."""
        return [hint for text, hint in self.at_begin if text == ending]


class Hinted:
    """A backend on a ``HintedGenerator``."""

    def __init__(self) -> None:
        self.generator = HintedGenerator()

    def connect(self, deliver: Deliver, lost: Lost) -> AbstractAsyncContextManager[Connection]:
        return interpreted(self.generator, deliver)


async def by_forks(s: af.State) -> str:
    s += "plan P" + af.gen("plan")
    branches = s.fork(3)
    for branch in branches:
        branch += "branch B" + af.gen("part")
    s += "".join(f"{branch['part']}" for branch in branches) + "R" + af.gen("whole")
    return await s["whole"]


async def chain(s: af.State) -> str:
    for _ in range(3):
        s += "C" + af.gen("step")
    return await s["step"]


async def test_chain() -> None:
    backend = Hinted()
    async with af.session(backend=backend) as flow:
        await flow.run(chain)
        await flow.run(chain)
    hints = backend.generator.begun_with("C")
    assert {(hint.objective, hint.group, hint.steps) for hint in hints} == {("latency", 0, 0)}
    assert [hint.program == hints[0].program for hint in hints] == [True] * 3 + [False] * 3


async def test_map_reduce_by_forks() -> None:
    backend = Hinted()
    async with af.session(backend=backend) as flow:
        await flow.run(by_forks)
    generator = backend.generator
    assert [hint.objective for hint in generator.begun_with("P")] == ["latency"]
    parts = generator.begun_with("B")
    assert [(hint.objective, hint.steps) for hint in parts] == [("throughput", 0)] * 3
    assert len({hint.group for hint in parts}) == 1
    assert parts[0].group
    assert [(hint.objective, hint.group) for hint in generator.begun_with("R")] == [("latency", 0)]
    assert len({hint.program for hint in generator.hints}) == 1


@af.program
async def independent(s: af.State, item: str) -> list[str]:
    branches = s.fork(3)
    for branch in branches:
        branch += item + "B" + af.gen("draft")
        branch += "E" + af.gen("part")
    branches[0].set("end", branches[0]["part"].strip())
    s += "S" + af.gen("own")
    return [await s["own"], await branches[0]["end"], await branches[1]["part"], await branches[2]["part"]]


class Together(HintedGenerator):
    """Ends no gen before four have begun."""

    async def generate(self, context: ScriptedContext, *rest: Any, **options: Any) -> Generated:
        found = await super().generate(context, *rest, **options)
        while len(self.at_begin) < 4:
            await anyio.lowlevel.checkpoint()
        return found


async def test_independent_requests_of_a_graph_are_a_task_group() -> None:
    backend = Hinted()
    backend.generator = generator = Together()
    async with af.session(backend=backend) as flow:
        await flow.submit(independent.trace().optimised(), {"item": "x"})
        assert not (await flow.graph()).nodes
    last = [*generator.begun_with("E"), *generator.begun_with("S")]
    assert [hint.objective for hint in last] == ["throughput"] * 4
    [group] = {hint.group for hint in last}
    assert [hint.objective for hint in generator.begun_with("B")] == ["throughput"] * 3
    [earlier] = {hint.group for hint in generator.begun_with("B")}
    assert 0 != group != earlier != 0


async def test_the_only_last_request_of_a_graph_counts_by_latency() -> None:
    backend = Hinted()

    @af.program
    async def reduced(s: af.State) -> str:
        return await by_forks(s)

    async with af.session(backend=backend) as flow:
        await flow.submit(reduced.trace())
    assert [(hint.objective, hint.group) for hint in backend.generator.begun_with("R")] == [("latency", 0)]
    assert {hint.objective for hint in backend.generator.begun_with("B")} == {"throughput"}


async def test_map_counts_by_throughput() -> None:
    backend = Hinted()

    async def one(s: af.State, item: str) -> str:
        s += item + "M" + af.gen("answer")
        return await s["answer"]

    async with af.session(backend=backend) as flow:
        await flow.map(one, ["a", "b", "c"])
    hints = backend.generator.begun_with("M")
    assert [hint.objective for hint in hints] == ["throughput"] * 3
    assert len({hint.program for hint in hints}) == 3
    assert [hint.group_objective for hint in hints] == ["throughput"] * 3
    assert len({hint.group for hint in hints}) == 1
    assert hints[0].group


async def one_step(s: af.State, item: str) -> str:
    s += item + "M" + af.gen("answer")
    return await s["answer"]


@pytest.mark.parametrize("traced", [False, True])
async def test_each_map_is_one_group(traced: bool) -> None:
    backend = Hinted()
    program = af.program(one_step).trace() if traced else one_step
    async with af.session(backend=backend) as flow, anyio.create_task_group() as group:
        for inputs in (["a", "b"], ["c", "d"]):
            group.start_soon(flow.map(program, inputs).to_dicts)
    groups = [hint.group for hint in backend.generator.begun_with("M")]
    assert len(set(groups)) == 2
    assert {groups.count(number) for number in groups} == {2}
    assert all(groups)


async def test_branches_in_a_map_do_not_pass_latency_work() -> None:
    backend = Hinted()

    async def digest(s: af.State, item: str) -> str:
        s += item
        branches = s.fork(2)
        for branch in branches:
            branch += "B" + af.gen("part")
        s += "".join(f"{branch['part']}" for branch in branches) + "R" + af.gen("whole")
        return await s["whole"]

    async with af.session(backend=backend) as flow:
        await flow.map(digest, ["a"])
        await flow.run(digest, "b")
    mapped, alone = [backend.generator.begun_with("B")[first : first + 2] for first in (0, 2)]
    assert [hint.group_objective for hint in mapped] == ["throughput"] * 2
    assert [hint.group_objective for hint in alone] == ["latency"] * 2
    assert mapped[0].group == mapped[1].group != alone[0].group == alone[1].group


@pytest.mark.parametrize("read", [af.Variable.__aiter__, af.Variable.partials, af.Variable.reasoning_deltas])
async def test_variable_that_is_read_as_it_grows(read: Callable[[af.Variable], AsyncIterator[Any]]) -> None:
    backend = Hinted()

    async def read_one(s: af.State) -> str:
        s += "P" + af.gen("plan")
        branches = s.fork(2)
        for number, branch in enumerate(branches):
            branch += f"{number}B" + af.gen("part")
        s += "".join(f"{branch['part']}" for branch in branches) + "R" + af.gen("whole")
        async for _ in read(branches[1]["part"]):
            pass
        return await s["whole"]

    async with af.session(backend=backend) as flow:
        await flow.run(read_one)
    parts = backend.generator.begun_with("B")
    assert sorted([(hint.objective, hint.is_streamed) for hint in parts]) == [
        ("latency", True),
        ("throughput", False),
    ]


async def test_awaited_variable_that_something_else_needs() -> None:
    backend = Hinted()

    async def await_one(s: af.State) -> str:
        s += "P" + af.gen("plan")
        branches = s.fork(3)
        for number, branch in enumerate(branches):
            branch += f"{number}B" + af.gen("part")
        s += "".join(f"{branch['part']}" for branch in branches) + "R" + af.gen("whole")
        await branches[1]["part"]
        await branches[2]["part"].strip()
        return await s["whole"]

    async with af.session(backend=backend) as flow:
        await flow.run(await_one)
    parts = backend.generator.begun_with("B")
    assert sorted([hint.objective for hint in parts]) == ["latency", "throughput", "throughput"]
    assert not any(hint.is_streamed for hint in parts)


async def test_live_graph_numbers_programs_and_groups_from_one() -> None:
    backend = Stepped(lambda prompt: "word")
    async with af.session(backend=backend) as flow:
        parts = [flow.state(program="digest") for _ in range(3)]
        for part in parts:
            part += "B" + af.gen("part")
        whole = flow.state()
        whole += "".join(f"{part['part']}" for part in parts) + "R" + af.gen("whole")
        graph = await flow.graph()
        assert [(one.program, one.group, one.label) for one in graph.states] == [(1, 1, "digest")] * 3 + [
            (2, 0, "")
        ]
        assert [one.steps for one in graph.states] == [0, 0, 0, 1]
        assert graph.nodes[3].needs == tuple([node.id for node in graph.nodes[:3]])
        await backend.allow(4)
        await whole["whole"]
        assert (await flow.graph()).nodes == ()


async def test_live_graph_has_what_unfinished_nodes_depend_on() -> None:
    backend = Stepped(lambda prompt: "word")

    async def read(variable: af.Variable) -> None:
        async for _ in variable:
            pass

    async with af.session(backend=backend) as flow, anyio.create_task_group() as group:
        parts = [flow.state() for _ in range(2)]
        for part in parts:
            part += "B" + af.gen("part")
        whole = flow.state()
        whole += "".join(f"{part['part']}" for part in parts) + "R" + af.gen("whole")
        group.start_soon(read, whole["whole"])
        await settle()
        assert [(node.status, node.awaited) for node in (await flow.graph()).nodes] == [
            ("running", ""),
            ("running", ""),
            ("waiting", "stream"),
        ]
        await backend.allow(1)
        graph = await flow.graph()
        first, second, last = graph.nodes
        assert sorted([first.status, second.status]) == ["done", "running"]
        assert last.needs == (first.id, second.id)
        assert "after part" in str(graph)
        assert "after part, part" not in str(graph)
        await backend.allow(2)
        assert (await flow.graph()).nodes == ()


async def test_live_graph_tells_failed_states_from_cancelled_ones() -> None:
    def script(prompt: str) -> str:
        if prompt.endswith("F"):
            raise af.errors.RunFailed("out of order")
        return "word"

    async with af.session(backend=Stepped(script)) as flow:
        failed, cancelled = flow.state(), flow.state()
        failed += "F" + af.gen("x") + af.gen("y")
        cancelled += "C" + af.gen("x")
        await settle()
        cancelled.cancel()
        graph = await flow.graph()
        assert [(node.state, node.name, node.status) for node in graph.nodes] == [(failed.id, "x", "failed")]
        assert [state.has_ended for state in graph.states] == [True, True]
        with pytest.raises(af.errors.RunFailed):
            await failed


async def test_live_graph_has_the_groups_of_requests() -> None:
    async with af.session(backend=Stepped(lambda prompt: "word")) as flow, anyio.create_task_group() as tasks:
        tasks.start_soon(flow.map(one_step, ["a", "b"]).to_dicts)
        await settle()
        assert [node.group for node in (await flow.graph()).nodes] == [1, 1]
        parts = [flow.state() for _ in range(2)]
        for part in parts:
            part += "B" + af.gen("part")
        whole = flow.state()
        whole += "".join(f"{part['part']}" for part in parts) + "R" + af.gen("whole")
        assert [node.group for node in (await flow.graph()).nodes] == [1, 1, 2, 2, 0]
        tasks.cancel_scope.cancel()


async def test_live_graph_says_what_the_cache_missed() -> None:
    async with af.session(backend=FakeEngine()) as flow, flow.state() as s:
        s += "Of all that was said in the house, little was remembered. " * 20 + af.gen("x", max_tokens=1)
        await s["x"]
        await s
        [state] = (await flow.graph()).states
        usage = s["x"].usage
        assert state.miss_reason == usage.miss_reason == "first_seen"
        assert state.missed_tokens == usage.prompt_tokens - usage.cached_tokens > 255


async def test_get_with_an_objective() -> None:
    backend = Hinted()
    async with af.session(backend=backend) as flow, flow.state() as s:
        s += "C" + af.gen("first") + af.gen("second")
        await s["first"].get(objective="throughput", ttft_s=0.5, tpot_s=0.1)
        await s["second"].get()
    first = next(hint for hint in backend.generator.hints if hint.ttft_s is not None)
    assert (first.objective, first.ttft_s, first.tpot_s) == ("throughput", 0.5, 0.1)
    with pytest.raises(af.errors.BadArgument):
        await s["first"].get(ttft_s=-1.0)


async def test_recording_holds_no_live_graph(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"

    async def one(flow: af.Session) -> str:
        async with flow.state() as s:
            s += "B" + af.gen("part")
            await flow.graph()
            return await s["part"]

    async with af.session(backend=af.Scripted("word"), record=path) as flow:
        await one(flow)
    assert "graph" not in path.read_text()
    async with af.session(backend=af.Replay(path)) as flow:
        assert await one(flow) == "word"


class PortionedGraph(ProgramGraph):
    """Settles few edges at a time, and notes the turn of the event loop of each portion."""

    def __init__(self) -> None:
        super().__init__(max_visits=20)
        self.turn = 0
        self.turns_of_portions: list[int] = []

    def take_hints(self) -> list[tuple[int, SchedulingHint]]:
        self.turns_of_portions.append(self.turn)
        return super().take_hints()


async def test_other_tasks_run_between_portions_of_the_deduction(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = PortionedGraph()
    monkeypatch.setattr(interpreter_module, "ProgramGraph", lambda **_: graph)

    async def count() -> None:
        while True:
            graph.turn += 1
            await anyio.lowlevel.checkpoint()

    inputs, states = range(1, 21), range(21, 41)
    async with anyio.create_task_group() as group:
        interpreter = Interpreter(ScriptedGenerator(lambda _: ""), group)
        interpreter.submit(ops.Open(1))
        for var in inputs:
            interpreter.submit(ops.Expect(1, var, "x"))
        for state in states:
            interpreter.submit(ops.Open(state))
            interpreter.submit(ops.Text(state, tuple([ops.Ref(var) for var in inputs])))
            interpreter.submit(ops.Gen(state, state, "x", GenParams()))
        while graph.has_changes:
            await anyio.lowlevel.checkpoint()
        await settle()
        group.start_soon(count)
        graph.turns_of_portions.clear()
        for state in states:
            interpreter.submit(ops.Cancel(state))
        while graph.has_changes:
            await anyio.lowlevel.checkpoint()
        turns = graph.turns_of_portions
        assert len(turns) > 1
        assert all(later - before > 1 for before, later in pairwise(turns))
        group.cancel_scope.cancel()
    interpreter.close()
