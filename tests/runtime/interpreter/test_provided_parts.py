"""Variables whose text the client provides in parts, and the states that read them while they grow."""

from __future__ import annotations

import gc
import math
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.observed_backends import settle
from support.session_peer import Listener

from agentflow.backends.scripted_generator import ScriptedContext, ScriptedGenerator
from agentflow.errors import EngineFailed
from agentflow.protocol import ops
from agentflow.protocol.events import Delta, ErrorInfo, Usage, Value, VarFailed
from agentflow.protocol.sampling import GenParams
from agentflow.protocol.text.transform import Transform
from agentflow.runtime.interpreter import interpreter as interpreter_module
from agentflow.runtime.interpreter import variables, wired_text
from agentflow.runtime.interpreter.interpreter import Interpreter
from agentflow.runtime.interpreter.variables import EventCursor, VariableRecord
from agentflow.runtime.limits import MemoryBudget, MemoryReservation

pytestmark = pytest.mark.anyio

STEP = 4


@pytest.fixture(scope="module", autouse=True)
def small_steps() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wired_text, "MIN_GROWN_CHARS", STEP)
        yield


class AheadGenerator(ScriptedGenerator):
    """Lists the contexts that it was asked to compute ahead. Answers with its prompt in angle brackets."""

    def __init__(self) -> None:
        super().__init__(lambda prompt: f"<{prompt}>")
        self.ahead: list[str] = []

    async def fill_ahead(self, context: ScriptedContext) -> None:
        self.ahead.append(context.text)
        await anyio.lowlevel.checkpoint()


class Bench:
    """An interpreter whose events the test collects."""

    def __init__(self, memory: MemoryBudget, group: anyio.abc.TaskGroup) -> None:
        self.generator = AheadGenerator()
        self.interpreter = Interpreter(self.generator, group, memory)
        self.listener = Listener()

    async def submit(self, *submitted: ops.Op) -> None:
        for op in submitted:
            self.interpreter.submit(op)
        await settle()
        self.listener.deliver(self.interpreter.events.drain())


@asynccontextmanager
async def bench(memory: MemoryBudget | None = None) -> AsyncIterator[Bench]:
    """At its end all states are closed, and nothing may be held."""
    memory = memory or MemoryBudget(10_000_000)
    with anyio.fail_after(20):
        async with anyio.create_task_group() as group:
            at = Bench(memory, group)
            yield at
            left = [state.id for state in at.interpreter._states if not state.is_closing]
            await at.submit(*map(ops.Close, left))
        gc.collect()
        assert (at.generator.num_open, at.generator.num_running) == (0, 0)
        assert memory.num_bytes == 0


OWNER, READER, WHOLE, SOURCE, ANSWER, NOTE = 1, 2, 3, 4, 5, 6
READING = (
    ops.Open(OWNER),
    ops.Expect(OWNER, SOURCE, "source"),
    ops.Open(READER),
    ops.Text(READER, ("a ", ops.Ref(SOURCE), " b")),
    ops.Gen(READER, ANSWER, "answer", GenParams()),
)
UPPER = ops.Ref(SOURCE, (Transform("upper"),))


async def test_a_waiting_state_computes_the_text_while_it_grows() -> None:
    async with bench() as at:
        await at.submit(*READING)
        assert at.generator.ahead == ["a "]
        await at.submit(ops.Provide(SOURCE, "123", more=True))
        assert at.generator.ahead == ["a "]
        await at.submit(ops.Provide(SOURCE, "45", more=True))
        assert at.generator.ahead == ["a ", "a 12345"]
        await at.submit(ops.Provide(SOURCE, "6"))
        assert at.listener.texts[ANSWER] == "<a 123456 b>"


async def test_steps_grow_with_the_context() -> None:
    async with bench() as at:
        await at.submit(ops.Open(OWNER), ops.Text(OWNER, ("x" * 800,)), *READING[2:3])
        await at.submit(
            ops.Expect(OWNER, SOURCE, "source"), ops.Text(OWNER, (ops.Ref(SOURCE),)), ops.Await(OWNER, 1)
        )
        for _ in range(300):
            await at.submit(ops.Provide(SOURCE, "y", more=True))
        lengths = [len(text) for text in at.generator.ahead]
        assert lengths == [800, 900, 1012]
        await at.submit(ops.Provide(SOURCE))
        assert at.listener.reached[OWNER] == 1


async def test_a_state_begins_with_the_part_that_is_there() -> None:
    async with bench() as at:
        await at.submit(*READING[:2], ops.Provide(SOURCE, "12", more=True))
        await at.submit(*READING[2:])
        assert at.generator.ahead == ["a 12"]


async def test_the_client_receives_only_the_end_and_other_readers_each_part() -> None:
    async with bench() as at:
        await at.submit(*READING[:2])
        other = EventCursor()
        with at.interpreter.variable(SOURCE).reading(other):
            await at.submit(ops.Provide(SOURCE, "12", more=True))
            assert at.listener.texts == {}
            assert other.drain() == [Delta(SOURCE, 0, "12")]
            await at.submit(ops.Provide(SOURCE, "3"))
            assert other.drain() == [Value(SOURCE, 2, "3", "provided", Usage())]
        assert at.listener.ends[SOURCE] == Value(SOURCE, 0, "123", "provided", Usage())


async def test_parts_count_in_the_memory_and_no_room_for_them_fails_the_readers() -> None:
    memory = MemoryBudget(60_000)
    async with bench(memory) as at:
        await at.submit(*READING[:2])
        before = memory.num_bytes
        await at.submit(ops.Provide(SOURCE, "x" * 1_000, more=True))
        assert memory.num_bytes >= before + 1_000
        await at.submit(*READING[2:], ops.Provide(SOURCE, "x" * 1_000_000, more=True))
        for var, code in ((SOURCE, "overloaded"), (ANSWER, "run_failed")):
            end = at.listener.ends[var]
            assert isinstance(end, VarFailed)
            assert (end.error.code, end.error.origin.code) == (code, "overloaded")


@pytest.mark.parametrize("more", [True, False])
async def test_parts_have_a_longest_text(monkeypatch: pytest.MonkeyPatch, more: bool) -> None:
    monkeypatch.setattr(interpreter_module, "MAX_OP_CHARS", 10)
    async with bench() as at:
        await at.submit(*READING[:2])
        await at.submit(ops.Provide(SOURCE, "1234567890", more=True), ops.Provide(SOURCE, "1", more=more))
        end = at.listener.ends[SOURCE]
        assert isinstance(end, VarFailed)
        assert end.error.code == "prompt_too_long"


@pytest.mark.parametrize("more", [True, False])
async def test_f37_a_text_in_one_part_has_the_same_bound(monkeypatch: pytest.MonkeyPatch, more: bool) -> None:
    monkeypatch.setattr(interpreter_module, "MAX_OP_CHARS", 10)
    for text, code in (("1234567890", ""), ("12345678901", "prompt_too_long")):
        async with bench() as at:
            await at.submit(*READING[:2])
            await at.submit(ops.Provide(SOURCE, text, more=more))
            end = at.listener.ends.get(SOURCE)
            assert (end.error.code if isinstance(end, VarFailed) else "") == code


async def test_f37_an_error_that_has_no_room_is_replaced() -> None:
    async with bench(MemoryBudget(100_000)) as at:
        await at.submit(*READING[:2])
        await at.submit(ops.Provide(SOURCE, error=ErrorInfo("invalid_value", "no", text="x" * 200_000)))
        end = at.listener.ends[SOURCE]
        assert isinstance(end, VarFailed)
        assert end.error.code == "overloaded"


ENDS = ("value", "error", "error with text", "cancel owner", "cancel reader", "close owner", "deadline")
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)


@given(
    parts=st.lists(st.tuples(TEXT, st.booleans()), max_size=8),
    end=st.sampled_from(ENDS),
    begins_at=st.integers(0, 8),
)
async def test_readers_get_the_whole_text_or_the_cause(
    parts: list[tuple[str, bool]], end: str, begins_at: int
) -> None:
    """``parts``: the parts, and whether the readers run after each. ``begins_at``: the part before which the
    readers begin."""
    readers = (
        *READING[2:],
        ops.Open(WHOLE),
        ops.Set(WHOLE, NOTE, "note", ("n ", UPPER, ops.Ref(SOURCE))),
    )
    text = "".join([part for part, _ in parts])
    async with bench() as at:
        await at.submit(*READING[:2])
        for number, (part, is_settled) in enumerate(parts):
            if number == begins_at:
                await at.submit(*readers)
            at.interpreter.submit(ops.Provide(SOURCE, part, more=True))
            if is_settled:
                await settle()
        if begins_at >= len(parts):
            await at.submit(*readers)
        match end:
            case "value":
                await at.submit(ops.Provide(SOURCE, "!"))
            case "error":
                await at.submit(ops.Provide(SOURCE, error=ErrorInfo(EngineFailed.code, "broken")))
            case "error with text":
                error = ErrorInfo(EngineFailed.code, "broken")
                await at.submit(ops.Provide(SOURCE, "!", error, more=True))
            case "cancel owner":
                await at.submit(ops.Cancel(OWNER))
            case "cancel reader":
                await at.submit(ops.Cancel(READER), ops.Provide(SOURCE, "!"))
            case "close owner":
                await at.submit(ops.Close(OWNER))
                await at.submit(ops.Provide(SOURCE, "ignored"))
            case "deadline":
                await at.submit(ops.Limit(READER, deadline_s=0.0))
                await at.submit(ops.Provide(SOURCE, "!"))
        ends, whole = at.listener.ends, f"{text}!"
        if end in ("value", "cancel reader", "deadline"):
            assert at.listener.texts[SOURCE] == whole
            assert at.listener.texts[NOTE] == f"n {whole.upper()}{whole}"
        else:
            code = "engine_failed" if end.startswith("error") else "cancelled"
            note = ends[NOTE]
            assert isinstance(note, VarFailed)
            assert (note.error.code, note.error.origin.code) == ("run_failed", code)
        answer = ends[ANSWER]
        if end == "value":
            assert at.listener.texts[ANSWER] == f"<a {whole} b>"
        elif end in ("cancel reader", "deadline"):
            assert isinstance(answer, VarFailed)
            assert answer.error.code == {"cancel reader": "cancelled"}.get(end, "deadline_exceeded")
        else:
            assert isinstance(answer, VarFailed)
            assert answer.error.origin.code == code
        filled = at.generator.ahead
        assert all(f"a {text}".startswith(known) for known in filled)
        assert filled == sorted(filled, key=len)


@given(
    waits=st.lists(st.one_of(st.integers(0, 12), st.just(math.inf)), max_size=8),
    grown=st.lists(st.integers(0, 5), max_size=6),
)
async def test_waits_end_with_the_characters_that_they_are_for(waits: list[float], grown: list[int]) -> None:
    variable = VariableRecord(
        1, "x", EventCursor(), MemoryReservation(MemoryBudget(), 0), lambda call: call(), is_expected=True
    )
    ended: list[float] = []

    async def wait(num_chars: float) -> None:
        await variable.wait(num_chars)
        ended.append(num_chars)

    with anyio.fail_after(10):
        async with anyio.create_task_group() as group:
            for num_chars in waits:
                group.start_soon(wait, num_chars)
            await settle()
            for count in grown:
                variable.provide("x" * count)
                await settle()
                assert sorted(ended) == sorted(n for n in waits if n <= variable.num_chars)
            variable.complete(Value(1, 0, variable.text, "provided", Usage()))
    assert sorted(ended) == sorted(waits)


async def test_many_states_go_on_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part wakes at most ``MAX_WOKEN`` of the states that wait for it in one turn."""
    monkeypatch.setattr(variables, "MAX_WOKEN", 2)
    later: list[object] = []
    variable = VariableRecord(
        1, "x", EventCursor(), MemoryReservation(MemoryBudget(), 0), later.append, is_expected=True
    )
    woken: list[int] = []

    async def wait(number: int) -> None:
        await variable.wait(1)
        woken.append(number)

    with anyio.fail_after(10):
        async with anyio.create_task_group() as group:
            for number in range(5):
                group.start_soon(wait, number)
            await settle()
            for _ in range(3):  # later parts do not begin more turns
                variable.provide("x")
            await settle()
            assert (len(woken), len(later)) == (2, 1)
            while later:
                call = later.pop()
                assert callable(call)
                call()
                await settle()
    assert sorted(woken) == list(range(5))
