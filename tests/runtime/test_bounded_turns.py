"""Work whose size a client chooses is done in turns, and comes to the same result."""

from __future__ import annotations

import threading
from typing import Any

import anyio
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import agentflow as af
from agentflow.backends.scripted import ScriptedGenerator
from agentflow.protocol import ops, transform
from agentflow.protocol.events import Event, Reached, StateFailed, Value
from agentflow.protocol.transform import Transform, apply_transforms
from agentflow.runtime import state_tree, turns
from agentflow.runtime.interpreter import Interpreter
from agentflow.runtime.state_tree import StateTree

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
        monkeypatch.setattr(turns, "TURN_S", 1000)
        turn = turns.Turn()
        for _ in range(100):
            await turn.pause()
        assert num_turns == 0
        monkeypatch.setattr(turns, "TURN_S", -1)
        turn = turns.Turn()
        for _ in range(100):
            await turn.pause()
        assert num_turns >= 90
        group.cancel_scope.cancel()


class Session:
    """An interpreter whose events the test takes."""

    def __init__(self, interpreter: Interpreter[Any]) -> None:
        self.interpreter = interpreter
        self.events: list[Event] = []

    def submit(self, *sent: ops.Op) -> None:
        for op in sent:
            self.interpreter.submit(op)

    async def until(self, num_failed: int) -> list[StateFailed]:
        """Reads events until so many states have failed."""
        while True:
            failed = [event for event in self.events if isinstance(event, StateFailed)]
            if len(failed) >= num_failed:
                return failed
            await self.interpreter.events.wait()
            self.events += self.interpreter.events.drain()


@pytest.mark.parametrize("num_levels", [2, 30])
async def test_f27d_a_failure_climbs_a_chain_of_task_groups_once(
    monkeypatch: pytest.MonkeyPatch, num_levels: int
) -> None:
    """Each level cancels what is below it, which has been cancelled then."""
    monkeypatch.setattr(state_tree, "MAX_LEVELS", num_levels)
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
    monkeypatch.setattr(state_tree, "MAX_DRAINED_RECORDS", 7)
    monkeypatch.setattr(state_tree, "MAX_DRAINED_CHARS", 40)
    async with anyio.create_task_group() as group:
        interpreter = Interpreter(ScriptedGenerator("x"), group)
        session = Session(interpreter)
        session.submit(ops.Open(1))
        session.submit(*(ops.Set(1, number, f"v{number}", ("x" * number,)) for number in range(1, 60)))
        session.submit(ops.Await(1, 1))
        sizes = []
        while not session.events or session.events[-1] != Reached(1, 1):
            await interpreter.events.wait()
            taken = interpreter.events.drain()
            sizes.append(len(taken))
            session.events += taken
        group.cancel_scope.cancel()
    values = [event for event in session.events if isinstance(event, Value)]
    assert [value.var for value in values] == list(range(1, 60))
    assert max(sizes) <= 7
    assert sizes.count(7) < len(sizes)  # long texts come in fewer at once


async def test_f27f_a_fork_has_a_bounded_number_of_branches() -> None:
    async with af.session(backend=af.Scripted("x")) as flow, flow.state() as s:
        assert len(s.fork(ops.MAX_BRANCHES)) == ops.MAX_BRANCHES
        with pytest.raises(af.BadArgument):
            s.fork(ops.MAX_BRANCHES + 1)
    async with anyio.create_task_group() as group:
        session = Session(Interpreter(ScriptedGenerator("x"), group))
        session.submit(ops.Open(1))
        with pytest.raises(af.Overloaded):  # there is no room for so many failed states either
            session.submit(ops.Fork(1, tuple(range(2, ops.MAX_BRANCHES + 3))))
        group.cancel_scope.cancel()
