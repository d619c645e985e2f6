"""Programs, tools and expressions in other processes."""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass
from typing import Annotated, Any

import pytest
from pydantic import BaseModel, Field

import agentflow as af

pytestmark = pytest.mark.anyio


class Report(BaseModel):
    score: Annotated[int, Field(ge=0, le=10)]


@dataclass
class Point:
    x: float


@af.program
async def judge(s: af.State, essay: str) -> int:
    s += af.user(essay) + af.assistant(af.gen("grade", type=int))
    return await s["grade"]


async def plain(s: af.State) -> str:
    return "plain"


kept = af.program(plain)


@af.tool(max_calls=2)
def weather(city: str) -> str:
    """The weather in a city."""
    return f"{city}: cold"


def clock() -> str:
    return "noon"


def again(item: Any) -> Any:
    return pickle.loads(pickle.dumps(item))


async def test_f16d_a_program_is_pickled_by_its_name():
    assert again(judge) is judge
    assert copy.deepcopy(judge) is judge
    assert again(kept).function is plain
    async with af.session(backend=af.Scripted(["7"])) as flow:
        assert await flow.run(again(judge), "On leaves.") == 7


def test_f16d_a_program_without_a_name_of_its_own_is_not_pickled():
    @af.program
    async def local(s: af.State) -> None: ...

    with pytest.raises((pickle.PicklingError, AttributeError)):
        pickle.dumps(local)


@pytest.mark.parametrize(
    ("gen", "answer", "value"),
    [
        (af.gen("x", schema=Report), '{"score": 3}', Report(score=3)),
        (af.gen("x", schema=list[Point]), '[{"x": 1.5}]', [Point(1.5)]),
        (af.gen("x", schema={"type": "array"}, whitespace="free"), "[1]", [1]),
        (af.gen("x", type=int), "12", 12),
        (af.gen("x", type=bool), "true", True),
        (af.gen("x", regex="a+"), "aa", "aa"),
        (af.gen("x", max_tokens=3, stop=["."]), "a", "a"),
    ],
)
async def test_f16d_a_gen_is_pickled_with_its_type(gen, answer, value):
    async with af.session(backend=af.Scripted([answer, answer])) as flow, flow.state() as s:
        copied = again(gen)
        assert copied.params == gen.params
        assert copied.value_type.constraint == gen.value_type.constraint
        s += copied
        assert await s[copied] == value


async def test_f16d_a_reply_with_tools_is_pickled():
    calls = af.ToolCall("weather", {"city": "Oslo"}), af.ToolCall("clock", {})
    async with af.session(backend=af.Scripted([calls])) as flow, flow.state() as s:
        reply = again(af.reply("reply", tools=[weather, clock]))
        s += af.user("Well?") + reply
        assert [call() for call in (await s[reply]).tool_calls] == ["Oslo: cold", "noon"]
    assert again(weather) is weather


async def test_f16d_a_gen_with_tags_is_pickled():
    tagged = again(af.gen("x", tags=[af.Tag("<n>", schema=Report, end="</n>")]))
    async with af.session(backend=af.Scripted(['so <n>{"score": 1}</n>'])) as flow, flow.state() as s:
        s += tagged
        assert (await s[tagged])[1].value == Report(score=1)


def test_f16d_sums_and_turns_are_pickled():
    turn = again(af.user("Well?") + af.assistant("It is ", af.select("x", ["a", "b"])))
    assert [type(part).__name__ for part in turn.parts] == ["RoleExpression", "RoleExpression"]
