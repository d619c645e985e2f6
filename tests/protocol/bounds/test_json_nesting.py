"""How deep a value nests, against a recursive reference; and that the server refuses requests that nest too
deep."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.api_server import MODEL, ApiServer
from support.server.module_servers import module_server

from agentflow.engine.text.chat_template import ToolDialect, message_values, to_json
from agentflow.protocol.bounds.json_bounds import MOST_NESTING, nests_deeper
from agentflow.protocol.chat import CalledTool, Message

VALUES = st.recursive(
    st.one_of(st.none(), st.integers(), st.text(max_size=2)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=2), inner, max_size=3)
    ),
)


def depth(value: Any) -> int:
    if isinstance(value, dict):
        value = list(value.values())
    return 1 + max(map(depth, value), default=0) if isinstance(value, list) else 0


@given(VALUES, st.integers(0, 6))
def test_the_depth_is_that_of_a_recursive_reference(value: Any, most: int) -> None:
    assert nests_deeper(value, most) == (depth(value) > most)


def openai_tool(schema: str) -> tuple[str, str]:
    tool = '{"type":"function","function":{"name":"f","parameters":' + schema + "}}"
    return "/v1/chat/completions", f'{USER},"tools":[{tool}]'


def openai_format(schema: str) -> tuple[str, str]:
    json_schema = '{"name":"f","schema":' + schema + "}"
    return (
        "/v1/chat/completions",
        f'{USER},"response_format":{{"type":"json_schema","json_schema":{json_schema}}}',
    )


def openai_call(deep: str) -> tuple[str, str]:
    function = json.dumps({"name": "f", "arguments": deep})
    called = '{"role":"assistant","tool_calls":[{"id":"c","function":' + function + "}]}"
    result = '{"role":"tool","tool_call_id":"c","content":"x"}'
    return "/v1/chat/completions", f'"messages":[{called},{result}]'


def anthropic_call(deep: str) -> tuple[str, str]:
    used = '{"type":"tool_use","id":"c","name":"f","input":' + deep + "}"
    called = '{"role":"assistant","content":[' + used + "]}"
    result = '{"role":"user","content":[{"type":"tool_result","tool_use_id":"c","content":"x"}]}'
    return "/v1/messages", f'"messages":[{called},{result}]'


def anthropic_format(deep: str) -> tuple[str, str]:
    messages = '"messages":[{"role":"user","content":"x"}],"output_config":'
    return "/v1/messages", messages + '{"format":{"type":"json_schema","schema":' + deep + "}}"


def nested(levels: int) -> str:
    """A nested value as text: Python's JSON encoder recurses."""
    return '{"a":' * levels + "{}" + "}" * levels


def nested_schema(levels: int) -> str:
    return '{"properties":{"a":' * levels + "{}" + "}}" * levels


USER = '"messages":[{"role":"user","content":"x"}]'
DEPTHS = (MOST_NESTING + 1, 400, 900, 930, *range(940, 1000, 4), 2000)
# Each level of such a schema is two objects.
SCHEMA_DEPTHS = (MOST_NESTING // 2, MOST_NESTING // 2 + 1, 300, 400, *range(430, 500, 3), 2000)
REQUESTS = [
    (openai_tool, nested_schema, SCHEMA_DEPTHS),
    (openai_format, nested_schema, SCHEMA_DEPTHS),
    (openai_call, nested, DEPTHS),
    (anthropic_call, nested, DEPTHS),
    (anthropic_format, nested, DEPTHS),
]


server = module_server()


@pytest.mark.parametrize(("request_with", "value", "depths"), REQUESTS)
def test_a_request_that_nests_too_deep_is_refused(server: ApiServer, request_with, value, depths) -> None:
    with httpx2.Client(base_url=server.url) as client:
        for levels in depths:
            path, fields = request_with(value(levels))
            answer = client.post(path, content=f'{{"model":"{MODEL}","max_tokens":2,{fields}}}')
            assert answer.status_code == 400, answer.text
            assert answer.json()["error"]["type"] == "invalid_request_error"
    server.assert_idle()


def test_arguments_that_nest_as_deep_as_they_may_are_read() -> None:
    for levels in (MOST_NESTING, *DEPTHS):
        deep = '{"a":' * (levels - 1) + "{}" + "}" * (levels - 1)
        message = Message("assistant", "", tool_calls=(CalledTool("c", "f", deep),))
        [value] = message_values([message], ToolDialect())
        shown = value["tool_calls"][0]["function"]["arguments"]
        assert depth(shown) == (levels if levels <= MOST_NESTING else 1)
        assert to_json(shown) == deep
