"""Walks over JSON schemas that clients wrote, which may be any JSON."""

from __future__ import annotations

from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from agentflow.engine.text.tool_format import FALLBACK
from agentflow.engine.text.tools import call_schema
from agentflow.protocol.chat import ToolSpec
from agentflow.protocol.schemas.walk import (
    HOLD_A_LIST,
    HOLD_A_SCHEMA,
    HOLD_NAMED,
    has_type,
    resolved,
    subschemas,
)

KEYS = st.sampled_from([*HOLD_A_SCHEMA, *HOLD_A_LIST, *HOLD_NAMED, "$ref", "$id", "$anchor", "type", "a"])
TEXTS = st.sampled_from(["#", "#/$defs/a", "#/definitions/a", "x#a", "object"])
ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)


@given(schema=st.dictionaries(KEYS, ANY, max_size=4))
@example(schema={"$ref": "#/$defs/a", "$defs": []})
@example(schema={"type": [{}]})
def test_f37_any_json_can_be_the_parameters_of_a_tool(schema: dict[str, Any]) -> None:
    assert call_schema(FALLBACK, [ToolSpec("find", "", schema)])["type"] == "object"
    for part in subschemas(schema):
        assert isinstance(resolved(part, schema), dict)
        assert has_type(0.5, part.get("type")) in (True, False)
