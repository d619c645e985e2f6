"""Tools: functions and schemas that a model may ask to have called, and the calls made of its text."""

from __future__ import annotations

import functools
import inspect
import json
import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import annotated_types
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import AfterValidator, BaseModel
from support.faults import has_param

import agentflow as af
from agentflow.language.typed.replies import reader_of_replies
from agentflow.language.typed.tools import described_tool
from agentflow.protocol.chat import Arguments, CallBegun, CalledTool, ReplyWriter

pytestmark = pytest.mark.anyio


@dataclass
class Place:
    city: str
    country: str = "DE"


def weather(place: Place, unit: Literal["C", "F"] = "C") -> str:
    return f"{place.city}, {place.country}: 20 {unit}"


async def search(query: str, *, limit: Annotated[int, msgspec.Meta(ge=1)] = 3) -> list[str]:
    return [query] * limit


class Shop:
    def buy(self, items: list[str]) -> int:
        return len(items)

    def __call__(self, item: str) -> str:
        return item


class Address(BaseModel):
    street: str


class Order(BaseModel):
    """Refers to a definition."""

    to: Address
    notes: list[Address] = []


ORDER = {
    "type": "function",
    "function": {"name": "order", "description": "…", "parameters": Order.model_json_schema()},
}
PING = {"name": "ping"}


def replied(tools: list[Any], *calls: CalledTool) -> tuple[af.ToolCall, ...]:
    """The calls of a reply, as programs get them."""
    writer = ReplyWriter()
    pieces = [piece for call in calls for piece in (CallBegun(call.id, call.name), Arguments(call.arguments))]
    read = reader_of_replies([described_tool(tool) for tool in tools])
    return read(writer.push(pieces) + writer.finish()).tool_calls


def called(tools: list[Any], **calls: dict[str, Any]) -> tuple[af.ToolCall, ...]:
    """The calls of these tools with these arguments."""
    return replied(tools, *[CalledTool("c", name, json.dumps(given)) for name, given in calls.items()])


async def test_functions_are_called_with_arguments_of_their_types():
    tools = [weather, search, Shop().buy]
    found = called(
        tools,
        weather={"place": {"city": "Köln"}},
        search={"query": "x", "limit": 2},
        buy={"items": ["a", "b"]},
    )
    assert [call.name for call in found] == ["weather", "search", "buy"]
    assert found[0].arguments == {"place": Place("Köln"), "unit": "C"}
    assert found[0]() == "Köln, DE: 20 C"
    assert await found[1]() == ["x", "x"]
    assert found[2]() == 2
    assert found[0].function is weather


def test_a_partial_function_and_a_callable_object_are_tools():
    [first, second] = called(
        [functools.partial(weather, unit="F"), Shop()],
        weather={"place": {"city": "Rome", "country": "IT"}},
        Shop={"item": "nail"},
    )
    assert (first(), second()) == ("Rome, IT: 20 F", "nail")


def test_calls_of_a_schema_have_no_function():
    [order, ping] = called([ORDER, PING], order={"to": {"street": "a"}}, ping={})
    assert (order.arguments, ping.arguments, ping.function) == ({"to": {"street": "a"}}, {}, None)
    with pytest.raises(af.errors.BadArgument, match="'order'"):
        order()


FAULTS = [
    ({}, "parameter .place. is missing"),
    ({"place": {"city": 3}}, "Expected `str`, got `int`"),
    ({"place": {"city": "a"}, "unit": "K"}, "Invalid enum value"),
    ({"place": {"city": "a"}, "x": 1}, "there is no parameter .x."),
]


@pytest.mark.parametrize(("arguments", "fault"), FAULTS)
def test_a_call_with_invalid_arguments_has_a_fault(arguments, fault):
    [call] = called([weather, ORDER], weather=arguments)
    assert re.search(fault, call.fault)
    with pytest.raises(af.InvalidValue, match=fault):
        call()


def positional(x: int, /) -> None: ...
def many(*xs: int) -> None: ...
def untyped(x) -> None: ...
def unknown(x: Nowhere) -> None: ...  # noqa: F821
def inexpressible(x: inspect.Signature) -> None: ...


REFUSED = [
    (weather, None),
    (PING, None),
    ("ping", None),
    (3, None),
    (object(), None),
    ([PING, PING], "'ping'"),
    ([3], "a function or a schema, not 3"),
    ([{}], None),
    ([{"name": "x", "parameters": 3}], None),
    ([positional], "'positional'.*'x'"),
    ([many], "'many'.*'xs'"),
    ([untyped], "'untyped'.*'x' has no type annotation"),
    ([unknown], "'unknown'.*'Nowhere'"),
    ([inexpressible], "'inexpressible'.*'x'.*Signature"),
]


@pytest.mark.parametrize(("tools", "shown"), REFUSED)
def test_invalid_tools_are_rejected(tools, shown):
    with pytest.raises(af.errors.BadArgument, match=shown, check=has_param("tools")):
        af.reply("x", tools=tools)


def remove(path: str = "/") -> str:
    """A tool that must not run with its default by mistake."""
    raise AssertionError(path)


def count(n: Annotated[int, annotated_types.Le(10)]) -> int:
    return n


def stops(value: int) -> int:
    raise SystemExit(value)


def odd(n: Annotated[int, AfterValidator(stops)]) -> int:
    return n


@pytest.mark.parametrize("is_known", [True, False], ids=["function", "schema"])
@given(st.text(alphabet='{"path:/}[]1, ', max_size=12), st.integers(0, 14))
def test_f13a_only_whole_calls_run(is_known: bool, text: str, end: int) -> None:
    """For any truncation of the arguments, a call without a fault has all of them."""
    tool: Any = remove if is_known else {"name": "remove", "parameters": {"type": "object"}}
    for arguments in (text, '{"path": "/tmp"}'[:end]):
        [call] = replied([tool], CalledTool("c", "remove", arguments))
        try:
            whole = isinstance(json.loads(arguments), dict)
        except ValueError:
            whole = False
        if not whole:
            assert call.fault
            assert call.text == arguments
            with pytest.raises(af.InvalidValue):
                call()
        elif not call.fault:
            assert call.arguments == json.loads(arguments)


async def test_f45a_arguments_are_validated_alike_in_a_reply_and_an_agent() -> None:
    for number in (3, 5_000):
        [call] = replied([count], CalledTool("c", "count", json.dumps({"n": number})))
        assert bool(call.fault) == (number > 10)
        if number > 10:
            with pytest.raises(af.InvalidValue):
                call()
        else:
            assert call() == 3
        agent = af.Scripted({"answer": [af.ToolCall("count", {"n": number}), "done"]})
        async with af.session(backend=agent) as flow, flow.state() as s:
            await af.act(s, tools=[count])
            result = [m["content"] for m in await s.messages() if m["role"] == "tool"]
        assert (result == ["3"]) == (number <= 10)


def test_f45a_a_validator_that_ends_oddly_is_a_fault() -> None:
    [call] = replied([odd], CalledTool("c", "odd", '{"n": 1}'))
    assert call.fault
    with pytest.raises(af.InvalidValue):
        call()


STRICT = {
    "type": "object",
    "properties": {"city": {"type": "string", "pattern": "^[A-Z]"}},
    "required": ["city"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("text", "is_right"),
    [
        ('{"city": "Oslo"}', True),
        ('{"city": "oslo"}', False),
        ("{}", False),
        ('{"city": "Oslo", "a": 1}', False),
    ],
)
def test_arguments_are_checked_against_a_strict_schema(text: str, is_right: bool) -> None:
    for strict in (True, False):
        tool = described_tool({"name": "weather", "strict": strict, "parameters": STRICT})
        call = tool.call(text)
        assert call.arguments == json.loads(text)
        assert bool(call.fault) == (strict and not is_right)


def test_a_strict_schema_that_cannot_be_checked_accepts_all_arguments() -> None:
    tool = described_tool({"name": "weather", "strict": True, "parameters": {"$ref": "#"}})
    assert not tool.call('{"city": 1}').fault
