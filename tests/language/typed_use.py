"""Types that type checkers infer for typed values. `make lint` runs mypy and pyright on it; no test does.

A line with ``type: ignore`` is an error that mypy must find: mypy reports an unused comment as an error.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Generic, Literal, NamedTuple, TypedDict, TypeVar, assert_type

from pydantic import BaseModel, Field

import agentflow as af


class Report(BaseModel):
    grade: int


ItemT = TypeVar("ItemT")


class Page(BaseModel, Generic[ItemT]):
    items: list[ItemT]


@dataclass
class Point:
    x: float


class City(TypedDict):
    name: str


def look_up(city: str) -> str:
    return city


async def right(s: af.State) -> Report:
    report = af.gen("report", schema=Report, max_tokens=64)
    s += af.assistant(report)
    point, city = af.gen("point", schema=Point), af.gen("city", schema=City)
    number, is_so = af.gen("number", type=int, min_p=0.5), af.gen("is_so", type=bool)
    plain = af.gen("plain", regex="[a-z]+")
    s += "a" + point + city + number + is_so + plain
    tight = af.gen("tight", schema=City, whitespace="tight", jump_forward=False)
    slow = af.gen("slow", regex="a|b", jump_forward=False)
    tagged = af.gen("tagged", tags=[af.Tag("<a>", schema=City, end="</a>")], whitespace="free")
    s += tight + slow + tagged
    assert_type(await s[tagged], list[str | af.Tagged])
    for piece in await s[tagged]:
        if not isinstance(piece, str):
            assert_type(piece.tag, af.Tag)
    # JSON comes as parts of the value, all else as text.
    assert_type(aiter(s[report]), AsyncIterator[Any])
    assert_type(aiter(s[city]), AsyncIterator[Any])
    assert_type(aiter(s[number]), AsyncIterator[str])
    assert_type(aiter(s[is_so]), AsyncIterator[str])
    assert_type(aiter(s[tagged]), AsyncIterator[str])
    assert_type(aiter(s[plain]), AsyncIterator[str])
    async for partial in s[report]:
        print(partial["grade"])
    assert_type(await s[report], Report)
    assert_type(await s[point], Point)
    assert_type((await s[city])["name"], str)
    many, maybe = af.gen("many", schema=list[Report]), af.gen("maybe", schema=Report | None)
    s += many + maybe
    assert_type(await s[many], list[Report])
    assert_type(await s[maybe], Report | None)
    print(await s[maybe])
    either = af.gen("either", schema=Report | Point, on_invalid="retry", max_retries=1)
    bounded, letter = af.gen("b", schema=Annotated[int, Field(ge=1)]), af.gen("c", schema=Literal["a", "b"])
    page, named = af.gen("page", schema=Page[Report]), af.gen("named", schema=dict[str, Report])
    plain_json = af.gen("plain_json", schema={"type": "object"})
    s += either + bounded + letter + page + named + plain_json
    assert_type(await s[either], Report | Point)
    assert_type(await s[bounded], int)
    assert_type(await s[letter], Literal["a", "b"])
    assert_type(await s[page], Page[Report])
    assert_type(await s[named], dict[str, Report])
    assert_type(await s[plain_json], Any)
    assert_type(await s[number], int)
    assert_type(await s[is_so], bool)
    assert_type(await s[plain], str)
    assert_type(s["plain"], af.Variable[Any])  # only the expression knows the type
    assert_type(s[plain], af.Variable[str])
    assert_type(await s.text(), str)
    assert_type(await s.token_ids(), list[int])
    assert_type(await s[number].map(lambda n: str(n + 1)), str)
    assert_type(await s[report].json("grade"), str)
    assert_type(await s.set("q", f"{s[number]}"), str)
    assert_type(s.copy(), af.State)
    async with s.user():
        s += "in a turn"
    return await s[report]


async def replies(s: af.State) -> None:
    answer = af.reply("answer")
    s += af.conversation([af.Message("user", "?")]) + answer
    assert_type(s[answer], af.Variable[af.Reply])
    assert_type(aiter(s[answer]), AsyncIterator[str])
    async for so_far in s[answer].partials():
        assert_type(so_far, af.Reply)
        assert_type(so_far.tool_calls, tuple[af.ToolCall, ...])
    async for text in s[af.gen("text")].partials():
        assert_type(text, str)
    async for number in s[af.gen("numbers", schema=list[int])].elements():
        assert_type(number, int)
    s += af.conversation(await s.messages())


@af.program
async def count(s: af.State, text: str, times: int = 1) -> float:
    return len(text) * times


async def plain_count(s: af.State, text: str, times: int) -> float:
    return len(text) * times


class Place(NamedTuple):
    x: int
    y: int


async def at(s: af.State, place: Place) -> float:
    return place.x


async def arguments(flow: af.Session) -> None:
    s = flow.state()
    s += af.user("a state of its own")
    assert_type(await count(s, "a", times=2), float)
    async with flow.state() as t:
        t += s["x"]
    assert_type(await flow.run(count, "a", 2), float)
    assert_type(af.run(count, "a", 2), float)
    assert_type(af.run(plain_count, "a", times=2), float)
    assert_type(af.run(count, "a", session=af.session()), float)
    one_each = ["a", "b"]
    two_each = [("a", 1), ("b", 2)]
    assert_type(af.map(count, one_each), list[float])
    assert_type(af.map(count, (text for text in one_each), concurrency=2, progress=True), list[float])
    assert_type(af.map(plain_count, two_each, session=af.session()), list[float])
    assert_type(af.map(plain_count, zip(one_each, [1, 2], strict=True)), list[float])
    assert_type(af.map(at, [Place(1, 2)]), list[float])
    assert_type(af.map(plain_count, [{"text": "a", "times": 1}]), list[float])
    assert_type(af.map(count, one_each, on_error="return"), list[float | Exception])
    assert_type(await flow.map(count, one_each), list[float])
    assert_type(await flow.map(plain_count, two_each, on_error="return"), list[float | Exception])
    unknown: list[Any] = []
    assert_type(await flow.map(plain_count, unknown), list[float])
    assert_type(await flow.map(plain_count, Frame(), retries=2, resume="x", key="id"), list[float])
    assert_type(await flow.map(count, one_each, key=len, resume="x").pairs(), list[tuple[Any, float]])
    assert_type(await flow.map(count, one_each).to_dicts(), list[dict[str, Any]])
    async with flow.state() as s:
        branches = s.fork(2)
        assert_type(await branches.first("x"), af.State)
        assert_type(await branches.best("x", key=len), af.State)
        assert_type(await branches.best("x", n=2, branch_key=id), list[af.State])
        number, word = af.gen("n", type=int), af.select("w", ["a", "b"])
        assert_type(await branches.gather(number), list[int])
        assert_type(await branches.gather(word), list[str])
        assert_type(await branches.gather("x"), list[Any])
        assert_type(branches.variables(number), list[af.Variable[int]])
        assert_type(await branches.vote(number), int | None)
        assert_type(await branches.vote(word, n=2), str | None)
        assert_type(await branches.first(number), af.State)
        async for branch in branches.as_completed(number):
            assert_type(branch, af.State)
        assert_type(await af.act(s, tools=[look_up]), str)
        assert_type(await af.act(s, tools=[look_up], schema=Report), Report)
        assert_type(await af.act(s, tools=[look_up], schema=Report | None), Report | None)
        assert_type(await af.act(s, tools=[look_up], schema={"type": "object"}), Any)
        assert_type(await af.race(*branches), af.State)
        assert_type(await af.race(count(s.copy(), "a", 1), flow.run(plain_count, "a", 1)), float)


class Frame:
    """A dataframe, which also gives its columns when it is iterated over."""

    def __iter__(self) -> Iterator[Place]:
        raise NotImplementedError

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        raise NotImplementedError


async def wrong_arguments(flow: af.Session) -> None:
    af.run(count)  # type: ignore[call-overload]
    af.run(count, 3)  # type: ignore[call-overload]
    af.run(plain_count, "a", time=2)  # type: ignore[call-arg]
    af.run(plain_count, "a", 2, 3)  # type: ignore[call-overload]
    await flow.run(count, 3)  # type: ignore[arg-type]
    af.map(count, [3])  # type: ignore[arg-type]
    af.map(plain_count, ["a"])  # type: ignore[arg-type]
    af.map(plain_count, [("a", "b")])  # type: ignore[arg-type]
    af.map(plain_count, [("a",)])  # type: ignore[arg-type]
    af.map(count, ["a"], concurency=3)  # type: ignore[call-overload]
    await flow.map(count, [3])  # type: ignore[arg-type]
    flow.state().fork("3")  # type: ignore[arg-type]


async def wrong(s: af.State) -> None:
    report = af.gen("report", schema=Report)
    number = af.gen("number", type=int)
    s += report + number
    text: str = await s[report]  # type: ignore[index]
    print((await s[report]).title)  # type: ignore[attr-defined]
    s[number].map(lambda n: n + 1)  # type: ignore[return-value,arg-type]
    s += 3  # type: ignore[arg-type]
    af.gen("x", schema=Report, type=int)  # type: ignore[call-overload]
    af.gen("x", max_token=3)  # type: ignore[call-overload]
    af.gen("x", regex="a", whitespace="tight")  # type: ignore[call-overload]
    af.gen("x", schema=Report, whitespace="none")  # type: ignore[call-overload]
    af.Tag("<a>", regex="a")  # type: ignore[call-arg]
    async for delta in s[number]:
        print(delta["grade"])  # type: ignore[index]
    s.begin("user")  # type: ignore[attr-defined]
    s.hint(objective="speed")  # type: ignore[arg-type]
    del text
