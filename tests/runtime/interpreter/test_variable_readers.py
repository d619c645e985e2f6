"""A variable with several readers: each receives all of it, from its own position."""

from __future__ import annotations

from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.observed_backends import settle

from agentflow.backends.scripted_generator import ScriptedContext, ScriptedGenerator
from agentflow.errors import EngineFailed, Overloaded, PromptTooLong, ProtocolError
from agentflow.protocol import ops
from agentflow.protocol.events import Delta, ErrorInfo, Usage, Value, VarFailed
from agentflow.protocol.sampling import GenParams
from agentflow.protocol.text.transform import Transform
from agentflow.runtime.interpreter.interpreter import Interpreter
from agentflow.runtime.interpreter.variables import EventCursor, VariableRecord
from agentflow.runtime.limits import READER_BYTES, MemoryBudget, MemoryReservation

pytestmark = pytest.mark.anyio
MOST_READERS = 3


def make_variable(memory: MemoryBudget | None = None) -> tuple[VariableRecord, EventCursor]:
    cursor = EventCursor()
    reservation = MemoryReservation(memory or MemoryBudget(), 0)
    return VariableRecord(1, "x", cursor, reservation, lambda call: call()), cursor


def received(text: str, cursor: EventCursor) -> tuple[str, bool]:
    """``text`` with the new events of the cursor, and whether the end is among them."""
    for event in cursor.drain():
        assert isinstance(event, Delta | Value)
        assert event.at == len(text)
        text += event.text
        if isinstance(event, Value):
            return text, True
    return text, False


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("extend"), st.text(max_size=3)),
        st.tuples(st.just("drain"), st.integers(0, MOST_READERS - 1)),
        st.tuples(st.just("rewind"), st.integers(0, MOST_READERS - 1), st.floats(0, 1)),
    ),
    max_size=30,
)


@given(steps=STEPS)
def test_each_reader_receives_the_whole_text_whatever_others_do(steps: list[Any]) -> None:
    variable, own = make_variable()
    cursors = [EventCursor() for _ in range(MOST_READERS - 1)]
    with variable.reading(cursors[0]) as first, variable.reading(cursors[1]) as second:
        readers: list[Any] = [variable, first, second]
        cursors = [own, *cursors]
        texts = [""] * MOST_READERS
        for step in steps:
            match step:
                case "extend", delta:
                    variable.extend(delta)
                case "drain", number:
                    texts[number], has_ended = received(texts[number], cursors[number])
                    assert (texts[number], has_ended) == (variable.text, False)
                case "rewind", number, part:
                    texts[number] = texts[number][: int(part * len(texts[number]))]
                    readers[number].rewind(len(texts[number]))
        whole = variable.text + "!"
        variable.complete(Value(1, 0, whole, "eos", Usage()))
        for text, cursor in zip(texts, cursors, strict=True):
            assert received(text, cursor) == (whole, True)
            assert cursor.drain() == []


def test_a_late_reader_begins_at_the_first_character() -> None:
    variable, _ = make_variable()
    variable.extend("so ")
    late = EventCursor()
    with variable.reading(late):
        variable.extend("far")
        assert late.drain() == [Delta(1, 0, "so far")]
        variable.fail(EngineFailed("broken"))
        assert [type(event) for event in late.drain()] == [VarFailed]


def test_a_reader_of_the_end_receives_one_event() -> None:
    variable, _ = make_variable()
    cursor = EventCursor()
    with variable.reading(cursor, "end"):
        variable.extend("so")
        assert cursor.drain() == []
        value = Value(1, 0, "so", "eos", Usage())
        variable.complete(value)
        assert cursor.drain() == [value]


def test_a_reader_costs_the_same_for_any_text_and_nothing_after_its_scope() -> None:
    memory = MemoryBudget(3 * READER_BYTES - 1)
    variable, _ = make_variable(memory)
    variable.extend("a" * 10_000)
    gone = EventCursor()
    with variable.reading(gone), variable.reading(EventCursor()):
        assert memory.num_bytes == 2 * READER_BYTES
        with pytest.raises(Overloaded), variable.reading(EventCursor()):
            pass
    assert memory.num_bytes == 0
    variable.extend("more")
    assert gone.drain() == []


class FillingGenerator(ScriptedGenerator):
    """Lists the texts that it is given."""

    def __init__(self) -> None:
        super().__init__(lambda prompt: f"<{prompt}>")
        self.filled: list[str] = []

    def fill(self, context: ScriptedContext, text: str) -> None:
        self.filled.append(text)
        super().fill(context, text)


async def test_the_text_before_an_unfinished_reference_is_filled_immediately() -> None:
    generator = FillingGenerator()
    async with anyio.create_task_group() as group:
        interpreter = Interpreter(generator, group)
        for op in (
            ops.Open(1),
            *(ops.Expect(1, var, f"v{var}") for var in (1, 2, 3)),
            ops.Provide(1, "known"),
            ops.Open(2),
            ops.Text(2, ("a ", ops.Ref(1), " b ", ops.Ref(2), " c ", ops.Ref(3), " d")),
            ops.Gen(2, 4, "v4", GenParams()),
        ):
            interpreter.submit(op)
        await settle()
        assert generator.filled == ["a known b "]
        interpreter.submit(ops.Provide(3, "last"))
        await settle()
        assert generator.filled == ["a known b "]
        interpreter.submit(ops.Provide(2, "next"))
        await settle()
        assert generator.filled == ["a known b ", "next c last d"]
        assert interpreter.variable(4).text == "<a known b next c last d>"
        with pytest.raises(ProtocolError):
            interpreter.variable(5)
    interpreter.close()


@pytest.mark.parametrize("has_bad_transform", [False, True])
async def test_a_reference_without_a_value_fails_the_state_after_a_fill(has_bad_transform: bool) -> None:
    generator = FillingGenerator()
    transforms = (Transform("json", "missing"),) if has_bad_transform else ()
    async with anyio.create_task_group() as group:
        interpreter = Interpreter(generator, group)
        for op in (
            ops.Open(1),
            *(ops.Expect(1, var, f"v{var}") for var in (1, 2)),
            ops.Open(2),
            ops.Text(2, ("a ", ops.Ref(1, transforms), " b ", ops.Ref(2), " c")),
            ops.Gen(2, 3, "v3", GenParams()),
            ops.Provide(1, "{}"),
        ):
            interpreter.submit(op)
        await settle()
        assert generator.filled == ([] if has_bad_transform else ["a {} b "])
        # Also after a failed transform: the value that is missing is the cause.
        interpreter.submit(ops.Provide(2, error=ErrorInfo("engine_failed", "broken")))
        await settle()
        error = interpreter.variable(3).error
        assert error is not None
        assert isinstance(error.__cause__, EngineFailed)
        interpreter.submit(ops.Close(1))
        interpreter.submit(ops.Close(2))
    interpreter.close()
    assert generator.num_open == 0


class FullGenerator(ScriptedGenerator):
    """Has no room for any text."""

    def fill(self, context: ScriptedContext, text: str) -> None:
        raise PromptTooLong("full")


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("ends_first", [False, True])
async def test_the_error_of_a_text_does_not_depend_on_when_its_variable_ends(
    ends_first: bool, fails: bool
) -> None:
    end = ops.Provide(1, "v", ErrorInfo("engine_failed", "broken") if fails else None)
    generator = FullGenerator(lambda _: "")
    async with anyio.create_task_group() as group:
        interpreter = Interpreter(generator, group)
        interpreter.submit(ops.Open(1))
        interpreter.submit(ops.Expect(1, 1, "v1"))
        if ends_first:
            interpreter.submit(end)
        for op in (ops.Open(2), ops.Text(2, ("a ", ops.Ref(1))), ops.Gen(2, 2, "v2", GenParams())):
            interpreter.submit(op)
        await settle()
        if not ends_first:
            assert not interpreter.variable(2).has_ended
            interpreter.submit(end)
            await settle()
        error = interpreter.variable(2).error
        assert error is not None
        assert isinstance(error.__cause__, EngineFailed if fails else PromptTooLong)
        interpreter.submit(ops.Close(1))
        interpreter.submit(ops.Close(2))
    interpreter.close()
    assert generator.num_open == 0
