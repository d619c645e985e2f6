"""The variables of a session without an interpreter: which events a reader gets."""

from __future__ import annotations

from collections.abc import Callable

import anyio
import pytest
from msgspec.structs import replace

from agentflow.errors import EngineFailed
from agentflow.protocol.events import Delta, Usage, Value, VarFailed
from agentflow.runtime.interpreter import variables
from agentflow.runtime.interpreter.variables import EventCursor, VariableRecord
from agentflow.runtime.limits import MemoryBudget, MemoryReservation, error_bytes, value_bytes

pytestmark = pytest.mark.anyio


def value_of(text: str) -> Value:
    return Value(1, 0, text, "eos", Usage(1, 0, 1))


class Variables:
    """Variables of one session. ``later``: the functions that were left for later turns of the event loop."""

    def __init__(self) -> None:
        self.cursor = EventCursor()
        self.memory = MemoryBudget()
        self.later: list[Callable[[], object]] = []

    def make(self, **options: bool) -> VariableRecord:
        reservation = MemoryReservation(self.memory, 0)
        return VariableRecord(1, "x", self.cursor, reservation, self.later.append, **options)


REASONING, TEXT = Delta(1, 0, "", "why", 0), Delta(1, 0, "so")


@pytest.mark.parametrize(
    ("reports", "expected"),
    [
        ("all", [[REASONING], [TEXT], [replace(value_of("so"), at=2, text="")]]),
        ("end", [[], [], [value_of("so")]]),
        ("nothing", [[], [], []]),
    ],
)
def test_a_variable_reports_all_or_its_end_or_nothing(reports, expected):
    made = Variables()
    variable = made.make()
    variable.reports = reports
    found = []
    for step in (
        lambda: variable.extend_reasoning("why"),
        lambda: variable.extend("so"),
        lambda: variable.complete(value_of("so")),
    ):
        step()
        found.append(made.cursor.drain())
    assert found == expected


def test_after_a_rewind_reasoning_is_sent_again():
    made = Variables()
    variable = made.make()
    variable.extend_reasoning("why")
    variable.extend("because")
    made.cursor.drain()
    variable.rewind(2)
    assert made.cursor.drain() == [Delta(1, 2, "cause", "why", 0)]


@pytest.mark.parametrize("end", [value_of("so"), EngineFailed("broken")], ids=["value", "failure"])
def test_an_end_is_counted_and_sent_once(end):
    made = Variables()
    variable = made.make()
    variable.extend("so")
    made.cursor.drain()
    if isinstance(end, Value):
        variable.complete(end)
        assert made.memory.num_bytes == value_bytes(end) > 0
    else:
        variable.fail(end)
        assert made.memory.num_bytes == error_bytes(end, "so") > 0
    assert [type(event) for event in made.cursor.drain()] in ([Value], [VarFailed])
    variable.extend("late")
    assert made.cursor.drain() == []


@pytest.mark.parametrize(("limit", "most"), [("MAX_DRAINED_CHARS", 5), ("MAX_DRAINED_RECORDS", 2)])
async def test_a_drain_is_bounded_and_the_rest_is_there_at_once(limit, most, monkeypatch):
    monkeypatch.setattr(variables, limit, most)
    made = Variables()
    for text in ("first", "2", "3"):
        made.make().extend(text)
    assert made.cursor.drain() == [Delta(1, 0, "first"), Delta(1, 0, "2")]
    with anyio.fail_after(10):
        assert await made.cursor.next() == [Delta(1, 0, "3")]
