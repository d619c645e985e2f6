"""Typed values: the request for each kind of type, the value read from the text, and refused types."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from typing import Any, Literal, TypedDict

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field
from support.faults import has_param
from support.observed_backends import assert_idle, unconstrained
from support.programs import by_end

import agentflow as af
from agentflow.language.typed.values import value_type
from agentflow.protocol.constraint import MAX_SOURCE_CHARS, Constraint

pytestmark = pytest.mark.anyio


class Part(BaseModel):
    name: str


class Report(BaseModel):
    grade: int = Field(ge=1, le=6)
    parts: list[Part] = []


@dataclasses.dataclass
class Point:
    x: float
    label: str = "here"


class City(TypedDict):
    name: str
    size: int | None


class Shape(msgspec.Struct):
    kind: Literal["circle", "square"]


async def valued(text: str, **wanted: Any) -> Any:
    """The value of a gen that generates ``text``."""
    backend = af.Scripted([text])
    try:
        async with af.session(backend=backend) as flow, flow.state() as s:
            expression = af.gen("r", max_tokens=200_000, **wanted)
            s += af.assistant(expression)
            assert await s[expression].whole_text() == text
            return await s[expression]
    finally:
        assert_idle(backend)


VALUES = [
    ({"schema": Report}, '{"grade": 2, "parts": [{"name": "a"}]}', Report(grade=2, parts=[Part(name="a")])),
    ({"schema": Point}, '{"x": 1.5}', Point(1.5)),
    ({"schema": City}, '{"name": "Köln", "size": null}', {"name": "Köln", "size": None}),
    ({"schema": Shape}, '{"kind": "circle"}', Shape("circle")),
    ({"schema": list[int]}, "[1, 2]", [1, 2]),
    ({"schema": {"type": "object"}}, '{"a": [1, null]}', {"a": [1, None]}),
    ({"schema": {}}, "3", 3),
    ({"type": int}, "-12", -12),
    ({"type": float}, "1.5e3", 1500.0),
    ({"type": float}, "-0", 0.0),
    ({"type": bool}, "false", False),
    ({"type": str}, " as it is ", " as it is "),
    ({"regex": "[0-9]{3}"}, "123", "123"),
    ({"grammar": 'start: "a"'}, "a", "a"),
    ({}, "text", "text"),
]


@pytest.mark.parametrize(("wanted", "text", "value"), VALUES)
async def test_the_value_of_a_text(wanted, text, value):
    found = await valued(text, **wanted)
    assert (found, type(found)) == (value, type(value))


INVALID = [
    ({"schema": Report}, '{"grade": 7}', r"not a valid Report: '{\"grade\": 7}'", "less than or equal to 6"),
    ({"schema": Report}, '{"grade": ', "not a valid Report", "EOF"),
    ({"schema": Point}, '{"x": "far"}', "not a valid Point", r"Expected `float`, got `str` - at `\$.x`"),
    ({"schema": City}, '{"name": "a"}', "not a valid City", "missing required field `size`"),
    ({"schema": {"type": "object"}}, "[" * 100_000, r"not a valid JSON value: '\[{199}…'", "recursion"),
    ({"schema": list[int]}, "[" * 100_000, "not a valid list", "Expected `int`, got `array`"),
]


@pytest.mark.parametrize(("wanted", "text", "message", "cause"), INVALID)
async def test_an_invalid_text_raises(wanted, text, message, cause):
    expression = af.gen("r", max_tokens=200_000, **wanted)
    backend = unconstrained([text])
    async with af.session(backend=backend) as flow, flow.state() as s:
        s += expression
        with pytest.raises(
            af.InvalidValue, match=r"'r' ended \(eos\) with a text that is " + message
        ) as failed:
            await s[expression]
        with pytest.raises(type(failed.value.__cause__), match=cause):
            raise failed.value.__cause__
        assert isinstance(failed.value, ValueError)
        await s  # the state holds the text and goes on
        assert await s[expression].upper() == text.upper()
        assert await s.text() == text
    assert_idle(backend)


TRUNCATED = [
    ({"type": int}, "12", "34", "not a complete int"),
    ({"type": float}, "1.5", "6", "not a complete float"),
    ({"type": bool}, "true", "st", "not a complete bool"),
    ({"regex": "[0-9 ]+"}, "12", "3", "not a complete text"),
    ({"grammar": 'start: "a" " b"'}, "a", "b", "not a complete text"),
    ({"schema": {"type": "integer"}}, "1", "", "not a complete JSON value"),
    ({"schema": Point}, '{"x": 1}', "", "not a complete Point"),
]


@pytest.mark.parametrize(("wanted", "text", "rest", "described"), TRUNCATED)
async def test_a_truncated_text_has_no_value_even_if_it_is_valid(wanted, text, rest, described):
    num_tokens = len(text.split(" "))
    expression = af.gen("r", max_tokens=num_tokens, **wanted)
    script = [f"{text} {rest}"]
    # No number has two words: only a script that ignores constraints is truncated within one.
    backend = unconstrained(script) if "type" in wanted else af.Scripted(script)
    async with af.session(backend=backend) as flow, flow.state() as s:
        s += expression
        message = rf"'r' was truncated after {num_tokens} tokens? and is {described}, raise max_tokens: "
        for _ in range(2):
            with pytest.raises(af.InvalidValue, match=message + re.escape(repr(text))) as failed:
                await s[expression]
        (note,) = failed.value.__notes__
        assert note.startswith("what failed was appended at test_value_type.py:")
        assert await s[expression].whole_text() == s[expression].text == text
        assert s[expression].finish_reason == "length"
        s += f" and {s[expression]}"  # a reference inserts the truncated text
        assert await s.text() == f"{text} and {text}"


async def test_truncated_free_text_is_a_value():
    async with af.session(backend=af.Scripted(["one two", "one two"])) as flow, flow.state() as s:
        s += af.gen("r", max_tokens=1) + af.gen("typed", max_tokens=1, type=str)
        assert (await s["r"], await s["typed"]) == ("one", "one")


async def test_a_map_names_the_input_whose_value_was_truncated():
    @af.program
    async def counted(s: af.State, text: str) -> int:
        count = af.gen("count", type=int, max_tokens=1)
        s += text + count
        return await s[count]

    async with af.session(backend=unconstrained(by_end({"a": "1", "b": "2 3"}))) as flow:
        with pytest.raises(af.InvalidValue, match="was truncated after 1 token") as failed:
            await flow.map(counted, ["a", "b"])
        (line, which) = failed.value.__notes__
        assert line.endswith("in counted")
        assert which == "in map: input 1 was 'b'"
        assert await flow.map(counted, ["a"]) == [1]


@given(value=st.integers(-(10**17), 10**17))
async def test_integers_match_their_constraint(value):
    assert await valued(str(value), type=int) == value


@given(value=st.floats(-1e15, 1e15, allow_nan=False))
async def test_floats_match_their_constraint(value):
    assert await valued(json.dumps(value), type=float) == value


def constraint_of(**wanted: Any) -> Constraint | None:
    return af.gen("r", **wanted).value_type.constraint


def test_the_constraint_of_each_type():
    assert constraint_of() is None
    assert constraint_of(type=str) is None
    assert constraint_of(regex="a+") == Constraint("regex", "a+")
    assert constraint_of(grammar="start: a") == Constraint("grammar", "start: a")
    assert constraint_of(type=bool) == Constraint("choices", choices=("true", "false"))
    assert constraint_of(type=int).kind == constraint_of(type=float).kind == "regex"
    for schema, described in ((Report, Report.model_json_schema()), (Point, msgspec.json.schema(Point))):
        found = constraint_of(schema=schema)
        assert (found.kind, json.loads(found.source)) == ("schema", described)
    assert json.loads(constraint_of(schema={"type": "object"}).source) == {"type": "object"}


class WithFunction(BaseModel):
    function: Callable[[int], int]


@dataclasses.dataclass
class WithUnknown:
    x: Nowhere  # noqa: F821


CIRCLE: dict[str, Any] = {}
CIRCLE["not"] = CIRCLE

REFUSED = [
    ({"schema": Report, "type": int}, "type", None),
    ({"regex": "a", "grammar": "a"}, "grammar", None),
    ({"schema": WithFunction}, "schema", "WithFunction"),
    ({"schema": WithUnknown}, "schema", "WithUnknown.*Nowhere"),
    ({"schema": object()}, "schema", None),
    ({"schema": Callable}, "schema", None),
    ({"schema": {"type": object()}}, "schema", None),
    ({"schema": CIRCLE}, "schema", None),
    ({"schema": "Report"}, "schema", "give the type itself"),
    ({"schema": {"title": "x" * MAX_SOURCE_CHARS}}, "schema", "200000"),
    ({"type": list}, "type", "for others use schema"),
    ({"type": "int"}, "type", None),
    ({"type": []}, "type", None),
    ({"regex": ""}, "regex", "200000"),
    ({"regex": re.compile("a+")}, "regex", None),
    ({"regex": 3}, "regex", None),
    ({"grammar": "x" * (MAX_SOURCE_CHARS + 1)}, "grammar", "200000"),
]


@pytest.mark.parametrize(("wanted", "param", "shown"), REFUSED)
def test_invalid_types_are_rejected(wanted, param, shown):
    with pytest.raises(af.errors.BadArgument, match=shown, check=has_param(param)):
        af.gen("r", **wanted)


async def test_typed_values_over_the_wire(server):
    report, number = af.gen("report", schema=Report), af.gen("number", type=int)
    async with af.session(server.url) as flow, flow.state() as s:
        s += 'say {"grade":3}' + report + " 42" + number
        assert await s[report] == Report(grade=3)
        assert await s[number] == 42
        assert await s[report].json("grade") == "3"
        s += " x" + af.gen("bad", type=int)
        with pytest.raises(af.errors.RunFailed, match="regex"):
            await s["bad"]


# Which variable an expression names


async def test_an_expression_looks_up_only_its_own_variable():
    number = af.gen("x", type=int)
    async with af.session(backend=af.Scripted(["text", "1", "text"])) as flow, flow.state() as s:
        with pytest.raises(af.errors.UnknownVariable, match="'x'"):
            s[number]
        s += af.gen("x")
        with pytest.raises(af.errors.UnknownVariable, match="not of this gen"):
            s[number]
        s += number
        found = s[number]
        assert s.copy()[number] is found
        s += af.gen("x")
        with pytest.raises(af.errors.UnknownVariable, match="before another"):
            s[number]
        assert (await found, await s["x"]) == (1, "text")


@pytest.mark.parametrize("kind", ["text", "regex"])
def test_a_type_without_a_reader_gives_the_text(kind):
    made = value_type() if kind == "text" else value_type(regex="a")
    assert (made.shown, made.read("a")) == ("text", "a")
