"""Random programs: every request has the same value as alone, and every failure has its cause."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentflow.backends.scripted_generator import ScriptedContext, ScriptedGenerator
from agentflow.errors import RunFailed
from agentflow.protocol.sampling import GenParams
from agentflow.runtime import loop_turns
from agentflow.runtime.generator import Generated, SessionModels
from agentflow.runtime.limits import MemoryBudget
from agentflow.server.programs.program import (
    ProgramInput,
    ProgramOutput,
    ProgramVariable,
    PromptPiece,
    ServedProgram,
)

pytestmark = pytest.mark.anyio
FAIL = "!"


class FailingGenerator(ScriptedGenerator):
    """Writes its prompt in angle brackets, and fails after ``FAIL``."""

    def __init__(self) -> None:
        super().__init__(lambda prompt: f"<{prompt}>")

    async def generate(self, context: ScriptedContext, *rest: Any, **options: Any) -> Generated:
        await anyio.lowlevel.checkpoint()
        if context.text.endswith(FAIL):
            raise RunFailed("as asked")
        return await super().generate(context, *rest, **options)


@dataclass(frozen=True)
class Plan:
    """Requests in order, the values of the inputs that no request makes, and when each is set: before the
    request of this number, or at the end."""

    requests: list[list[PromptPiece]]
    values: dict[str, str]
    times: dict[str, int]


@st.composite
def plans(draw: Any) -> Plan:
    requests: list[list[PromptPiece]] = []
    known: list[str] = ["x0", "x1"]
    for number in range(draw(st.integers(1, 6))):
        pieces: list[PromptPiece] = [f"r{number}"]
        for index in range(draw(st.integers(1, 2))):
            for source in draw(st.lists(st.sampled_from(known), max_size=3)):
                pieces += [ProgramInput(source), "+"]
            if draw(st.integers(0, 5)) == 0:
                pieces.append(FAIL)
            pieces.append(ProgramOutput(f"v{number}.{index}", GenParams()))
        requests.append(pieces)
        known += [piece.variable for piece in pieces if isinstance(piece, ProgramOutput)]
    times = {name: draw(st.integers(0, len(requests))) for name in ("x0", "x1")}
    return Plan(requests, {"x0": "one", "x1": "two"}, times)


def alone(plan: Plan) -> tuple[dict[str, str], dict[str, str]]:
    """The values of all variables, and for each without a value the variable that is the cause."""
    values, causes = dict(plan.values), dict[str, str]()
    for pieces in plan.requests:
        text, cause = "", ""
        for piece in pieces:
            match piece:
                case str():
                    text += piece
                case ProgramInput(variable=name):
                    cause = cause or causes.get(name, "")
                    text += values.get(name, "")
                case ProgramOutput(variable=name):
                    cause = cause or (name if text.endswith(FAIL) else "")
                    if cause:
                        causes[name] = cause
                    else:
                        values[name] = f"<{text}>"
                        text += values[name]
    return values, causes


@given(plan=plans(), num_turns=st.integers(0, 5))
async def test_a_program_gives_what_its_requests_give_alone(plan: Plan, num_turns: int) -> None:
    generator, memory = FailingGenerator(), MemoryBudget()
    program = ServedProgram("p", "", memory)
    values, causes = alone(plan)
    with anyio.fail_after(20):
        async with anyio.create_task_group() as group:
            program.begin(SessionModels(generator), group)
            for number, pieces in enumerate([*plan.requests, []]):
                for name, time in plan.times.items():
                    if time == number:
                        await program.set(name, plan.values[name])
                if pieces:
                    await program.submit(pieces)
                for _ in range(num_turns):
                    await anyio.lowlevel.checkpoint()
            for name in {**values, **causes}:
                variable = program.find(name)
                assert variable is not None
                assert await program.wait(variable)
                if name in values:
                    assert variable.record.text == values[name]
                    continue
                path = await program.path_of_failure(variable)
                assert (path[0].id, path[-1]) == (causes[name], variable)
                for before, after in pairwise(path):
                    assert after.request is not None
                    assert before in after.request.variables
            program.end()
            group.cancel_scope.cancel()
    await program.aclose()
    assert (generator.num_open, memory.num_bytes) == (0, 0)


@given(plan=plans(), num_turns=st.integers(0, 20))
async def test_the_end_of_a_program_at_any_time_frees_everything(plan: Plan, num_turns: int) -> None:
    generator, memory = FailingGenerator(), MemoryBudget()
    program = ServedProgram("p", "", memory)
    with anyio.fail_after(20):
        async with anyio.create_task_group() as group:
            program.begin(SessionModels(generator), group)
            for pieces in plan.requests:
                await program.submit(pieces)
            for _ in range(num_turns):
                await anyio.lowlevel.checkpoint()
            program.end()
            group.cancel_scope.cancel()
    await program.aclose()
    assert (generator.num_open, generator.num_running, memory.num_bytes) == (0, 0, 0)


class Searched(list[ProgramVariable]):
    """Counts the searches in the variables of requests."""

    num = 0

    def __iter__(self) -> Iterator[ProgramVariable]:
        Searched.num += 1
        return super().__iter__()


async def test_a_long_path_is_searched_once_and_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    program, num_turns = ServedProgram("p", "", MemoryBudget()), 0

    async def count() -> None:
        nonlocal num_turns
        while True:
            await anyio.lowlevel.checkpoint()
            num_turns += 1

    with anyio.fail_after(20):
        async with anyio.create_task_group() as group:
            program.begin(SessionModels(FailingGenerator()), group)
            await program.submit([FAIL, ProgramOutput("v0", GenParams())])
            for number in range(1, 50):
                await program.submit(
                    [ProgramInput(f"v{number - 1}"), ProgramOutput(f"v{number}", GenParams())]
                )
            last = program.find("v49")
            assert last is not None
            await program.wait(last)
            for number in range(50):
                variable = program.find(f"v{number}")
                assert variable is not None
                assert variable.request is not None
                variable.request.variables = Searched(variable.request.variables)
            monkeypatch.setattr(loop_turns, "TURN_S", -1)
            monkeypatch.setattr(Searched, "num", 0)
            group.start_soon(count)
            for _ in range(3):
                path = await program.path_of_failure(last)
                assert [variable.id for variable in path] == [f"v{number}" for number in range(50)]
            assert Searched.num == 50
            assert num_turns >= 100
            group.cancel_scope.cancel()
    await program.aclose()
