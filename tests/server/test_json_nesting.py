"""How deep a value nests, against the recursion that it saves others from; and what the server says then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx2
import pytest
from api_server import MODEL, api_server
from hypothesis import given
from hypothesis import strategies as st

from agentflow.server.json_nesting import MOST_NESTING, nests_deeper

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
            message = answer.json()["error"]["message"]
            # The decoder, too, has a limit.
            assert ("deep" in message) or ("recursion" in message) or ("prompt has" in message), message
        server.assert_idle()
