"""A run of LangChain is one program: the scheduler gets its begin and its end."""

from __future__ import annotations

import copy
import threading
from contextlib import asynccontextmanager
from typing import Any
from uuid import uuid4

import pytest
from langchain_agentflow import Agentflow, ChatAgentflow
from langchain_agentflow.programs import RUNS, RunTree
from langchain_core.callbacks import CallbackManager
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableLambda, RunnableParallel
from langchain_core.tools import tool
from settling import until

import agentflow as af
from agentflow.integrations.client import MAX_KEPT
from agentflow.protocol import ops


class Heard:
    """A scripted backend that keeps the ops."""

    def __init__(self) -> None:
        self.ops: list[ops.Op] = []
        self._inner = af.Scripted(lambda _: "Yes.")
        self.generator = self._inner.generator

    @asynccontextmanager
    async def connect(self, deliver: Any, lost: Any):
        async with self._inner.connect(deliver, lost) as connection:
            send = connection.send
            connection.send = lambda sent: (self.ops.extend(sent), send(sent))[1]  # type: ignore[method-assign]
            yield connection

    @property
    def programs(self) -> list[str]:
        return [op.program for op in self.ops if isinstance(op, ops.Open)]

    @property
    def objectives(self) -> set[str | None]:
        return {op.objective for op in self.ops if isinstance(op, ops.Open)}


@pytest.fixture
def heard() -> Heard:
    return Heard()


@pytest.fixture
def model(heard: Heard) -> ChatAgentflow:
    return ChatAgentflow(backend=heard)


def asking(model: ChatAgentflow, text: str) -> Any:
    return ChatPromptTemplate.from_messages([("user", text)]) | model


def test_a_call_that_stands_alone_is_no_program(heard, model):
    model.invoke("x")
    assert heard.programs == [""]
    until(model, lambda: heard.generator.num_open == 0)


def test_the_calls_of_one_chain_are_one_program(heard, model):
    chain = RunnableParallel(a=asking(model, "a {x}"), b=asking(model, "b {x}")) | (
        lambda both: both["a"].content
    )
    chain.invoke({"x": "1"})
    chain.invoke({"x": "2"})
    first, second = heard.programs[:2], heard.programs[2:]
    assert len(set(first)) == len(set(second)) == 1
    assert set(first) != set(second)
    assert "" not in heard.programs


async def test_calls_within_tools_and_functions_belong_to_their_root(heard, model):
    @tool
    async def look(x: str) -> str:
        """Looks."""
        return str((await model.ainvoke(x)).content)

    async def both(x: str) -> str:
        return await look.ainvoke(x) + str((await asking(model, "{y}").ainvoke({"y": x})).content)

    assert await RunnableLambda(both).ainvoke("x") == "Yes.Yes."
    assert len(heard.programs) == 2
    assert len(set(heard.programs)) == 1


def test_what_a_program_computed_is_held_until_it_ends(heard, model):
    def steps(x: str) -> str:
        for number in range(1, 8):
            model.invoke(f"{x} {number}")
            until(model, lambda number=number: heard.generator.num_open == min(number, MAX_KEPT))
        return x

    RunnableLambda(steps).invoke("x")
    until(model, lambda: heard.generator.num_open == 0)


def test_a_chain_that_fails_ends_its_program_too(heard, model):
    def fail(x: str) -> str:
        model.invoke(x)
        raise ValueError(x)

    with pytest.raises(ValueError, match="x"):
        RunnableLambda(fail).invoke("x")
    until(model, lambda: heard.generator.num_open == 0)


def test_a_batch_is_one_program_that_nobody_waits_for_one_by_one(heard, model):
    asking(model, "{x}").batch([{"x": str(n)} for n in range(9)])
    assert len(heard.programs) == 9
    assert len(set(heard.programs)) == 1
    assert heard.objectives == {"throughput"}
    until(model, lambda: heard.generator.num_open == 0)


def test_runs_are_forgotten_when_they_end(heard, model):
    before = len(RUNS._roots)
    for _ in range(3):
        asking(model, "{x}").invoke({"x": "1"})
        list(asking(model, "{x}").stream({"x": "1"}))
    assert len(RUNS._roots) == before


async def test_streamed_calls_belong_to_their_root(heard, model):
    chain = RunnableParallel(a=asking(model, "a {x}"), b=asking(model, "b {x}"))
    assert list(chain.stream({"x": "1"}))
    async for _ in chain.astream({"x": "2"}):
        pass
    async for _ in chain.astream_events({"x": "3"}, version="v2"):
        pass
    programs = [heard.programs[at : at + 2] for at in (0, 2, 4)]
    assert [len(set(both)) for both in programs] == [1, 1, 1]
    assert len({name for both in programs for name in both}) == 3
    assert "" not in heard.programs
    until(model, lambda: heard.generator.num_open == 0)


def test_a_run_whose_root_nobody_saw_is_no_program(heard, model):
    config = {"callbacks": CallbackManager([], parent_run_id=uuid4())}
    model.invoke("x", config)
    assert heard.programs == [""]
    RunnableLambda(lambda _: model.invoke("y")).invoke(None, config)
    assert heard.programs[1] != ""
    until(model, lambda: heard.generator.num_open == 0)


def test_a_text_model_in_a_chain_belongs_to_it(heard):
    model = Agentflow(backend=heard)
    RunnableParallel(a=model, b=model).invoke("x")
    assert len(set(heard.programs)) == 1
    assert heard.objectives == {None}


def test_f37_a_call_that_begins_while_its_root_ends_is_part_of_the_program() -> None:
    runs, root = RunTree(), uuid4()
    ended: list[str] = []

    class Connection:
        """The root ends in another thread while the call is recorded."""

        end_program = staticmethod(ended.append)

        def __hash__(self) -> int:
            if not ending.is_alive() and not ended:
                ending.start()
                ending.join(0.2)  # it waits for the record
            return 0

    ending = threading.Thread(target=runs.on_chain_end, args=({},), kwargs={"run_id": root})
    runs.on_chain_start({}, {}, run_id=root)
    runs.end_with(root, Connection())  # type: ignore[arg-type]
    ending.join()
    assert ended == [str(root)]
    assert not runs._at_end
    assert copy.deepcopy(runs) is RUNS
