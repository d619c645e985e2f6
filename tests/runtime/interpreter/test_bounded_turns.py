"""Work whose size a client chooses is done in turns, and comes to the same result."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Generator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import agentflow as af
from agentflow.backends.scripted_generator import ScriptedGenerator
from agentflow.protocol import ops
from agentflow.protocol.bounds import sized as sized_module
from agentflow.protocol.bounds.sized import sized, sizing
from agentflow.protocol.chat import ToolSpec
from agentflow.protocol.events import ErrorInfo, Event, Reached, StateFailed, Value
from agentflow.protocol.op_table import GRAPH_TICKET
from agentflow.protocol.sampling import GenParams
from agentflow.protocol.text import transform
from agentflow.protocol.text.transform import Transform, apply_transforms
from agentflow.runtime import loop_turns
from agentflow.runtime.interpreter import interpreter, state_tree, variables
from agentflow.runtime.interpreter.checking import CheckingInterpreter
from agentflow.runtime.interpreter.interpreter import Interpreter
from agentflow.runtime.interpreter.state_tree import StateTree

pytestmark = pytest.mark.anyio

CASED = st.text(alphabet="aAσςΣß İıŉ. '1\n\u0301\u00ad漢", max_size=60)


@pytest.mark.parametrize("name", ["upper", "lower"])
@example(text="ΑΣ " + "a" * 9, size=2)
@example(text="Σ" * 9, size=2)
@given(text=CASED, size=st.integers(1, 8))
def test_f27b_letters_change_in_pieces_as_in_the_whole(name: Any, text: str, size: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transform, "MAX_INLINE_CHARS", size)
        assert apply_transforms(text, (Transform(name),)) == getattr(text, name)()


async def test_f27b_long_texts_are_transformed_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []
    monkeypatch.setitem(
        transform._STEPS, "strip", lambda text, _: threads.append(threading.get_ident()) or text.strip()
    )
    backend = af.Scripted("x")
    async with af.session(backend=backend) as flow, flow.state() as s:
        s.set("v", "x" * (transform.MAX_INLINE_CHARS + 1))
        s += s["v"].strip()
        await s
    assert len(threads) == 1
    assert threads[0] != threading.get_ident()


async def test_f27c_a_turn_ends_after_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    num_turns = 0

    async def count() -> None:
        nonlocal num_turns
        while True:
            await anyio.lowlevel.checkpoint()
            num_turns += 1

    async with anyio.create_task_group() as group:
        group.start_soon(count)
        monkeypatch.setattr(loop_turns, "TURN_S", 1000)
        turn = loop_turns.LoopTurn()
        for _ in range(100):
            await turn.pause()
        assert num_turns == 0
        monkeypatch.setattr(loop_turns, "TURN_S", -1)
        turn = loop_turns.LoopTurn()
        for _ in range(100):
            await turn.pause()
        assert num_turns >= 90
        group.cancel_scope.cancel()


async def test_tasks_that_others_wake_run_before_a_turn_that_has_ended_continues() -> None:
    first, second, third = anyio.Event(), anyio.Event(), anyio.Event()

    async def pass_on(received: anyio.Event, sent: anyio.Event) -> None:
        await received.wait()
        sent.set()

    async with anyio.create_task_group() as group:
        group.start_soon(pass_on, first, second)
        group.start_soon(pass_on, second, third)
        await anyio.wait_all_tasks_blocked()
        first.set()
        await loop_turns.end_loop_turn()
        assert third.is_set()


async def test_tasks_that_are_ready_together_begin_in_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loop_turns, "TURN_S", -1)
    starts = loop_turns.Starts()
    begun: list[int] = []
    most = turn = 0

    async def begin(number: int) -> None:
        await starts.pause()
        begun.append(number)

    async def watch() -> None:
        nonlocal most, turn
        while len(begun) < 100:
            most, turn = max(most, len(begun) - turn), len(begun)
            await anyio.lowlevel.checkpoint()

    async with anyio.create_task_group() as group:
        for number in range(100):
            group.start_soon(begin, number)
        group.start_soon(watch)
    assert sorted(begun) == list(range(100))
    assert most <= loop_turns.MAX_STARTS


async def test_a_cancelled_task_does_not_hold_up_those_behind_it() -> None:
    starts = loop_turns.Starts()
    begun: list[int] = []

    async def begin(number: int) -> None:
        with anyio.CancelScope() as scope:
            if number % 2:
                scope.cancel()
            await starts.pause()
            await anyio.lowlevel.checkpoint()
            begun.append(number)

    async with anyio.create_task_group() as group:
        for number in range(40):
            group.start_soon(begin, number)
    assert sorted(begun) == list(range(0, 40, 2))


class Session:
    """An interpreter whose events the test takes."""

    def __init__(self, interpreter: Interpreter[Any]) -> None:
        self.interpreter = interpreter
        self.events: list[Event] = []

    def submit(self, *sent: ops.Op) -> None:
        for op in sent:
            self.interpreter.submit(op)

    async def until(self, num_failed: int) -> list[StateFailed]:
        """Reads events until ``num_failed`` states have failed."""
        while True:
            failed = [event for event in self.events if isinstance(event, StateFailed)]
            if len(failed) >= num_failed:
                return failed
            self.events += await self.interpreter.events.next()


@pytest.mark.parametrize("num_stopped", [2, 30])
async def test_f27d_a_failure_climbs_a_chain_of_task_groups_once(
    monkeypatch: pytest.MonkeyPatch, num_stopped: int
) -> None:
    """Each level cancels the levels below it, which have been cancelled already."""
    monkeypatch.setattr(state_tree, "MAX_STOPPED", num_stopped)
    num_stops = 0
    stop = StateTree.stop

    def counted(self: Any, state: Any, error: Any) -> None:
        nonlocal num_stops
        num_stops += 1
        stop(self, state, error)

    monkeypatch.setattr(StateTree, "stop", counted)
    depth = 300
    async with anyio.create_task_group() as group:
        session = Session(Interpreter(ScriptedGenerator("x"), group))
        session.submit(ops.Open(1))
        for state in range(1, depth):
            session.submit(ops.Fork(state, (state + 1,)), ops.TaskGroup(state, (state + 1,)))
        session.submit(ops.Begin(depth, "user"), ops.End(depth), ops.End(depth))
        failed = await session.until(depth)
        group.cancel_scope.cancel()
    assert {event.state for event in failed} == set(range(1, depth + 1))
    assert num_stops < 4 * depth


async def test_f27e_events_of_many_records_come_in_several_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variables, "MAX_DRAINED_RECORDS", 7)
    monkeypatch.setattr(variables, "MAX_DRAINED_CHARS", 40)
    async with anyio.create_task_group() as group:
        interpreter = Interpreter(ScriptedGenerator("x"), group)
        session = Session(interpreter)
        session.submit(ops.Open(1))
        session.submit(*(ops.Set(1, number, f"v{number}", ("x" * number,)) for number in range(1, 60)))
        session.submit(ops.Await(1, 1))
        sizes = []
        while not session.events or session.events[-1] != Reached(1, 1):
            taken = await interpreter.events.next()
            sizes.append(len(taken))
            session.events += taken
        group.cancel_scope.cancel()
    values = [event for event in session.events if isinstance(event, Value)]
    assert [value.var for value in values] == list(range(1, 60))
    assert max(sizes) <= 7
    assert sizes.count(7) < len(sizes)  # long texts come in smaller batches


async def test_f27f_a_fork_has_a_bounded_number_of_branches() -> None:
    async with af.session(backend=af.Scripted("x")) as flow, flow.state() as s:
        assert len(s.fork(ops.MAX_BRANCHES)) == ops.MAX_BRANCHES
        with pytest.raises(af.errors.BadArgument):
            s.fork(ops.MAX_BRANCHES + 1)
    async with anyio.create_task_group() as group:
        session = Session(CheckingInterpreter(ScriptedGenerator("x"), group))
        session.submit(ops.Open(1))
        with pytest.raises(af.Overloaded):  # there is no room for the failed states either
            session.submit(ops.Fork(1, tuple(range(2, ops.MAX_BRANCHES + 3))))
        group.cancel_scope.cancel()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=8) | st.dictionaries(st.text(max_size=5), inner, max_size=8),
    max_leaves=60,
)


def run(steps: Generator[None, None, int]) -> tuple[int, int]:
    """The result and the number of steps before it."""
    result = 0

    def through() -> Generator[None, None, None]:
        nonlocal result
        result = yield from steps

    num_steps = sum(1 for _ in through())
    return result, num_steps


@given(value=JSON, copies=st.integers(1, 150), step=st.integers(1, 9), size=st.integers(1, 9))
def test_sizes_are_measured_in_steps_as_at_once(value: Any, copies: int, step: int, size: int) -> None:
    kept = [value, [value] * copies, list(range(copies))]
    expected = sized(*kept)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sized_module, "_STEP", step)
        patch.setattr(sized_module, "_SLICE", size)
        measured, num_steps = run(sizing(*kept))
    assert measured == expected
    assert copies <= 64 or num_steps >= copies // size


class Turns:
    """Counts the turns of the event loop that another task gets."""

    num_turns = 0

    async def count(self) -> None:
        while True:
            await anyio.lowlevel.checkpoint()
            self.num_turns += 1


@asynccontextmanager
async def counted_turns(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Turns]:
    """Each turn is over immediately."""
    monkeypatch.setattr(loop_turns, "TURN_S", -1)
    counted = Turns()
    async with anyio.create_task_group() as group:
        group.start_soon(counted.count)
        yield counted
        group.cancel_scope.cancel()


async def all_freed(generator: ScriptedGenerator) -> None:
    with anyio.fail_after(10):
        while generator.num_open:
            await anyio.lowlevel.checkpoint()


NUM_BRANCHES = 200
CHILDREN = tuple(range(2, 2 + NUM_BRANCHES))


async def test_f37_the_references_of_a_text_are_resolved_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    transformed = ops.Ref(1, (Transform("upper"), Transform("lower")) * 8)
    async with counted_turns(monkeypatch) as counted, anyio.create_task_group() as group:
        session = Session(Interpreter(ScriptedGenerator("x"), group))
        session.submit(ops.Open(1), ops.Set(1, 1, "v", ("Ab",)))
        session.submit(ops.Set(1, 2, "w", (transformed,) * 200), ops.Await(1, 1))
        while Reached(1, 1) not in session.events:
            session.events += await session.interpreter.events.next()
        group.cancel_scope.cancel()
    assert "ab" * 200 in [event.text for event in session.events if isinstance(event, Value)]
    assert counted.num_turns > 200


async def test_branches_begin_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    async with counted_turns(monkeypatch) as counted, anyio.create_task_group() as group:
        session = Session(Interpreter(ScriptedGenerator("x"), group))
        session.submit(ops.Open(1), ops.Fork(1, CHILDREN), *(ops.Await(child, 1) for child in CHILDREN))
        reached: list[Event] = []
        while len(reached) < NUM_BRANCHES:
            reached += await session.interpreter.events.next()
        group.cancel_scope.cancel()
    assert sorted([event.state for event in reached if isinstance(event, Reached)]) == list(CHILDREN)
    assert counted.num_turns > NUM_BRANCHES


@pytest.mark.parametrize("num_woken", [1, 7])
@pytest.mark.parametrize("fails", [False, True])
async def test_states_that_wait_for_one_variable_continue_a_few_at_a_time(
    monkeypatch: pytest.MonkeyPatch, num_woken: int, fails: bool
) -> None:
    monkeypatch.setattr(variables, "MAX_WOKEN", num_woken)
    async with anyio.create_task_group() as group:
        session = Session(Interpreter(ScriptedGenerator("x"), group))
        session.submit(ops.Open(1), ops.Expect(1, 1, "v"), ops.Fork(1, CHILDREN))
        for child in CHILDREN:
            session.submit(ops.Set(child, child, "w", (ops.Ref(1), "!")), ops.Await(child, 1))
        await anyio.wait_all_tasks_blocked()
        session.interpreter.events.drain()
        ended: list[Event] = []
        async with counted_turns(monkeypatch) as counted:
            error = ErrorInfo.of(af.errors.RunFailed("no value")) if fails else None
            session.submit(ops.Provide(1, "" if fails else "text", error))
            while sum(isinstance(event, Reached | StateFailed) for event in ended) < NUM_BRANCHES:
                ended += await session.interpreter.events.next()
        group.cancel_scope.cancel()
    assert counted.num_turns >= NUM_BRANCHES // num_woken - 2
    values = [event.var for event in ended if isinstance(event, Value) and event.text == "text!"]
    assert sorted(values) == ([] if fails else list(CHILDREN))
    assert any(isinstance(event, StateFailed) for event in ended) == fails


async def test_branches_of_a_failed_state_fail_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    async with counted_turns(monkeypatch) as counted, anyio.create_task_group() as group:
        session = Session(Interpreter(ScriptedGenerator("x"), group))
        session.submit(ops.Open(1), ops.End(1), ops.Fork(1, CHILDREN))  # there is no turn to end
        failed = await session.until(1 + NUM_BRANCHES)
        group.cancel_scope.cancel()
    assert {event.state for event in failed} == {1, *CHILDREN}
    assert counted.num_turns > NUM_BRANCHES


@pytest.mark.parametrize("num_turns", [3, 50, NUM_BRANCHES + 5])
async def test_a_fork_that_is_cancelled_frees_the_branches_that_have_not_begun(
    monkeypatch: pytest.MonkeyPatch, num_turns: int
) -> None:
    generator = ScriptedGenerator("x")
    async with counted_turns(monkeypatch), anyio.create_task_group() as group:
        session = Session(Interpreter(generator, group))
        session.submit(ops.Open(1), ops.Fork(1, CHILDREN))
        for _ in range(num_turns):
            await anyio.lowlevel.checkpoint()
        session.submit(ops.Cancel(1))
        failed = await session.until(1 + NUM_BRANCHES)
        await all_freed(generator)
        group.cancel_scope.cancel()
    assert {event.error.code for event in failed} == {"cancelled"}


@pytest.mark.parametrize("num_stopped", [1, 7, 1_000])
async def test_the_siblings_of_a_failed_branch_are_cancelled_a_few_at_a_time(
    monkeypatch: pytest.MonkeyPatch, num_stopped: int
) -> None:
    monkeypatch.setattr(state_tree, "MAX_STOPPED", num_stopped)
    in_turn: list[int] = [0]
    stop = StateTree.stop

    def counted(self: Any, state: Any, error: Any) -> None:
        in_turn[-1] += 1
        stop(self, state, error)

    monkeypatch.setattr(StateTree, "stop", counted)

    def begin_turn(function: Any) -> Any:
        def call(*args: Any) -> Any:
            in_turn.append(0)
            return function(*args)

        return call

    async with anyio.create_task_group() as group:
        session = Session(Interpreter(ScriptedGenerator("x"), group))
        later = session.interpreter._states._later
        monkeypatch.setattr(session.interpreter._states, "_later", lambda call: later(begin_turn(call)))
        session.submit(ops.Open(1), ops.Fork(1, CHILDREN), ops.TaskGroup(1, CHILDREN), ops.Await(1, 1))
        while Reached(1, 1) not in session.events:  # a failed fork would stop its branches itself
            session.events += await session.interpreter.events.next()
        session.submit(ops.Gen(2, 1, "x", GenParams(max_tokens=1)), ops.End(3))
        failed = await session.until(1 + NUM_BRANCHES)
        group.cancel_scope.cancel()
    assert {event.state for event in failed} == {1, *CHILDREN}
    assert max(in_turn) <= num_stopped
    assert [event.state for event in failed if event.error.code != "cancelled"].count(3) == 1


GRAPH = ops.SubmitGraph(
    1,
    (
        ops.Open(1),
        ops.Text(1, ("say",)),
        ops.Fork(1, (2, 3)),
        *(ops.Text(2, ("a",)) for _ in range(50)),
        ops.Set(2, 1, "v", ("done",)),
    ),
    outputs=(1,),
)


async def test_no_op_of_a_graph_runs_before_all_are_submitted() -> None:
    generator = ScriptedGenerator("x")
    async with anyio.create_task_group() as group:
        session = Session(Interpreter(generator, group))
        for _ in session.interpreter.submitting(GRAPH):
            await anyio.lowlevel.checkpoint()
            assert generator.num_open <= 1
            assert not session.interpreter.events.drain()
        while Reached(1, GRAPH_TICKET) not in session.events:
            session.events += await session.interpreter.events.next()
        group.cancel_scope.cancel()
    assert [event.text for event in session.events if isinstance(event, Value)] == ["done"]


async def test_no_op_of_a_rejected_graph_runs() -> None:
    generator = ScriptedGenerator("x")
    wrong = msgspec.structs.replace(GRAPH, ops=(*GRAPH.ops, ops.Text(9, ("b",))))
    async with anyio.create_task_group() as group:
        session = Session(Interpreter(generator, group))
        for _ in session.interpreter.submitting(wrong):
            await anyio.lowlevel.checkpoint()
        [failed] = await session.until(1)
        assert failed.state == 1
        await all_freed(generator)
        group.cancel_scope.cancel()


WIDE_GRAPH = ops.SubmitGraph(1, (ops.Open(1), ops.Fork(1, CHILDREN)))


async def test_f37_the_states_of_a_graph_are_removed_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreter, "REMOVALS_PER_LOOK", 1)
    async with anyio.create_task_group() as group:
        session = Session(Interpreter(ScriptedGenerator("x"), group))
        session.submit(WIDE_GRAPH)
        while Reached(1, GRAPH_TICKET) not in session.events:
            session.events += await session.interpreter.events.next()
        async with counted_turns(monkeypatch) as counted:
            session.submit(ops.Close(1))
            with anyio.fail_after(10):
                while [*session.interpreter._states]:
                    await anyio.lowlevel.checkpoint()
        group.cancel_scope.cancel()
    assert counted.num_turns > NUM_BRANCHES


async def test_f37_the_states_of_a_rejected_graph_are_stopped_in_steps() -> None:
    wrong = msgspec.structs.replace(WIDE_GRAPH, ops=(*WIDE_GRAPH.ops, ops.Text(9999, ("b",))))
    async with anyio.create_task_group() as group:
        session = Session(Interpreter(ScriptedGenerator("x"), group))
        num_steps = len([*session.interpreter.submitting(wrong)])
        group.cancel_scope.cancel()
    assert num_steps > NUM_BRANCHES


def test_an_op_of_many_parts_is_counted_in_many_steps() -> None:
    spec = ToolSpec("a", "", {"enum": [[] for _ in range(20_000)]})
    op = ops.Tools(1, (spec,))
    num_bytes, num_steps = run(sizing(op))
    assert num_bytes == sized(op) > 20_000 * 56
    assert num_steps >= 20
