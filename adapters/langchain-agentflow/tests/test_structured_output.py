"""Values of answers: which schema they are decoded under, and that only whole answers have one."""

from __future__ import annotations

import pytest
from langchain_agentflow import ChatAgentflow
from langchain_agentflow.structured_output import json_schema_of
from langchain_core.exceptions import OutputParserException
from langchain_core.tools import tool
from pydantic import BaseModel

import agentflow as af


class City(BaseModel):
    """A city."""

    name: str
    about: str = ""


class Node(BaseModel):
    """A tree."""

    value: int
    children: list[Node] = []


TAGS = {"title": "Tags", "type": "array", "items": {"type": "string"}}


@tool
def weather(city: str) -> str:
    """Tells the weather in a city."""
    return city


def saying(answer: str | af.Reply, **options) -> ChatAgentflow:
    return ChatAgentflow(backend=af.Scripted(lambda _: answer), **options)


@pytest.mark.parametrize("method", ["json_schema", "json_mode"])
@pytest.mark.parametrize("schema", [City, City.model_json_schema()], ids=["class", "dict"])
def test_what_was_cut_off_has_no_value(schema, method):
    """Though what is there could be closed, and would then be one."""
    model = saying('{"name": "Oslo", "about": "It is cold and dark"}', max_tokens=5)
    asked = model.with_structured_output(schema, method=method)
    with pytest.raises(OutputParserException, match="max_tokens"):
        asked.invoke("x")
    raw = model.with_structured_output(schema, method=method, include_raw=True).invoke("x")
    assert raw["parsed"] is None
    assert "max_tokens" in str(raw["parsing_error"])


def test_a_call_that_was_cut_off_has_no_value():
    model = saying("no call at all, but prose", max_tokens=2)
    raw = model.with_structured_output(City, method="function_calling", include_raw=True).invoke("x")
    assert raw["parsed"] is None
    assert raw["parsing_error"] is not None


async def test_values_come_in_parts():
    model = saying('{"name": "Oslo", "about": "It is cold and dark"}')
    asked = model.with_structured_output(City.model_json_schema())
    parts = [part async for part in asked.astream("x")]
    assert len(parts) > 2
    assert parts == list(asked.stream("x"))
    assert parts[-1] == {"name": "Oslo", "about": "It is cold and dark"}
    cut = saying('{"name": "Oslo", "about": "It is cold and dark"}', max_tokens=4)
    with pytest.raises(OutputParserException, match="max_tokens"):
        list(cut.with_structured_output(City.model_json_schema()).stream("x"))


@pytest.mark.parametrize("schema", [City, City.model_json_schema()], ids=["class", "dict"])
def test_where_tools_are_called_there_is_no_value(schema):
    model = saying(af.Reply("", (af.ToolCall("weather", {"city": "Oslo"}, "c"),)))
    asked = model.with_structured_output(schema, include_raw=True, tools=[weather])
    raw = asked.invoke("x")
    assert (raw["parsed"], raw["parsing_error"]) == (None, None)
    assert raw["raw"].tool_calls[0]["name"] == "weather"
    with pytest.raises(ValueError, match="function_calling"):
        model.with_structured_output(schema, method="function_calling", tools=[weather])


@pytest.mark.parametrize(
    ("asked", "schema"),
    [
        (TAGS, TAGS),
        ({"anyOf": [TAGS, {"type": "null"}]}, {"anyOf": [TAGS, {"type": "null"}]}),
        ({"name": "tags", "strict": True, "schema": TAGS}, TAGS),
        ({"type": "json_schema", "json_schema": {"name": "tags", "schema": TAGS}}, TAGS),
        (Node, Node.model_json_schema()),
    ],
)
def test_a_schema_stays_whole(asked, schema):
    assert json_schema_of(asked) == schema


def test_any_object_without_a_schema():
    assert saying('{"a": 1}').with_structured_output(method="json_mode").invoke("x") == {"a": 1}
    with pytest.raises(ValueError, match="'json_schema' needs a schema"):
        saying("x").with_structured_output()
