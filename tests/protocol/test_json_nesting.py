"""How deep a value nests, against the recursion that it saves others from; and what the server says then."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.api_server import MODEL, api_server

from agentflow.engine.text.chat_template import ToolDialect, message_values
from agentflow.errors import BadArgument
from agentflow.protocol.chat import CalledTool, Message
from agentflow.protocol.json_bounds import MOST_NESTING, nests_deeper

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
def test_as_by_recursion(value: Any, most: int) -> None:
    assert nests_deeper(value, most) == (depth(value) > most)


def schema_of(levels: int) -> str:
    """As text: what writes JSON in Python calls itself, too."""
    return '{"properties":{"a":' * levels + "{}" + "}}" * levels


def in_tool(schema: str) -> str:
    return '"tools":[{"type":"function","function":{"name":"f","parameters":' + schema + "}}]"


def in_format(schema: str) -> str:
    return '"response_format":{"type":"json_schema","json_schema":{"name":"f","schema":' + schema + "}}"


@pytest.mark.parametrize("field", [in_tool, in_format])
def test_a_schema_that_nests_too_deep_is_refused(field: Callable[[str], str]) -> None:
    with api_server() as server:
        for levels in (MOST_NESTING // 2, MOST_NESTING // 2 + 1, 300, 400, *range(430, 500), 2000):
            body = '{"model":"%s","messages":[{"role":"user","content":"x"}],"max_tokens":2,%s}'
            answer = httpx2.post(
                f"{server.url}/v1/chat/completions", content=body % (MODEL, field(schema_of(levels)))
            )
            assert answer.status_code == 400
            assert answer.json()["error"]["type"] == "invalid_request_error"
        server.assert_idle()


DEPTHS = (MOST_NESTING + 1, 400, 900, 930, *range(940, 1000, 4), 2000)


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
    said = '"messages":[{"role":"user","content":"x"}],"output_config":'
    return "/v1/messages", said + '{"format":{"type":"json_schema","schema":' + deep + "}}"


@pytest.mark.parametrize("asking", [openai_call, anthropic_call, anthropic_format])
def test_calls_and_formats_that_nest_too_deep_are_refused(asking: Callable[[str], tuple[str, str]]) -> None:
    with api_server() as server:
        for levels in DEPTHS:
            path, fields = asking('{"a":' * levels + "{}" + "}" * levels)
            body = f'{{"model":"{MODEL}","max_tokens":2,{fields}}}'
            answer = httpx2.post(server.url + path, content=body)
            assert answer.status_code == 400, answer.text
            assert answer.json()["error"]["type"] == "invalid_request_error"
        server.assert_idle()


def test_arguments_that_nest_as_deep_as_they_may_are_read() -> None:
    for levels in (MOST_NESTING, *DEPTHS):
        deep = '{"a":' * (levels - 1) + "{}" + "}" * (levels - 1)
        message = Message("assistant", "", tool_calls=(CalledTool("c", "f", deep),))
        with pytest.raises(BadArgument) if levels > MOST_NESTING else nullcontext():
            [value] = message_values([message], ToolDialect())
            assert depth(value["tool_calls"][0]["function"]["arguments"]) == MOST_NESTING
