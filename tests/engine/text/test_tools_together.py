"""The schemas of several tools in one constraint: equal names of their definitions, ids and anchors."""

from __future__ import annotations

import itertools
import json
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples
from support.faults import has_param

from agentflow.engine.grammar.compiler.compile import compile_constraint
from agentflow.engine.grammar.compiler.messages import CompiledConstraint
from agentflow.engine.text.tool_format import FALLBACK, IN_CHANNELS
from agentflow.engine.text.tools import _calls
from agentflow.errors import BadArgument
from agentflow.protocol.chat import FREE_CHOICE, ToolSpec
from agentflow.protocol.constraint import Constraint
from benchmarks.constrained.text_walks import takes

FORMS = {"plain": FALLBACK, "channels": IN_CHANNELS}


def compiled(*tools: ToolSpec, form: str = "plain") -> CompiledConstraint:
    return compile_constraint(_calls(FORMS[form], dict(enumerate(tools)), FREE_CHOICE))


def takes_call(constraint: CompiledConstraint, name: str, value: Any, *, form: str = "plain") -> bool:
    arguments = json.dumps(value, ensure_ascii=False)
    if form == "channels":
        rule_begin = json.loads(_calls(IN_CHANNELS, {0: ToolSpec(name, "", {})}, FREE_CHOICE).source)[0]
        return takes(constraint, rule_begin["begin"] + arguments)
    call = f'{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": {arguments}}}'
    return takes(constraint, f"{FALLBACK.begin}{call}{FALLBACK.end}")


TEXT_AND_OBJECT = {"a": {"$ref": "#/definitions/A"}, "m": {"type": "object"}}
WITH_ID = {"type": "object", "properties": TEXT_AND_OBJECT, "definitions": {"A": {"type": "string"}}}
RECURSIVE = {
    "type": "object",
    "properties": {"a": {"$ref": "#/$defs/A"}, "m": {"$ref": "#/$defs/Tree"}},
    "$defs": {
        "A": {"type": "string"},
        "Tree": {"type": "object", "properties": {"left": {"$ref": "#/$defs/Tree"}}},
    },
}
PATTERN = {
    "type": "object",
    "properties": {"a": {"$ref": "#/$defs/A"}},
    "additionalProperties": True,
    "$defs": {"A": {"type": "string", "pattern": "^[a-z]+$"}},
}
ABSOLUTE = {
    "type": "object",
    "properties": {"a": {"$ref": "https://x.org/s.json#/$defs/A"}, "m": {"type": "object"}},
    "$defs": {"A": {"type": "string"}},
}


IDS_OF_TOOLS = ("https://x.org/s.json", "my-tool", "https://x.org/s.json#")


@pytest.mark.parametrize(  # each two of the four together
    ("schema", "own_id", "strict", "form"),
    [
        (schema, own_id, n % 2 == 1, ("plain", "channels")[n // 2 % 2])
        for n, (schema, own_id) in enumerate(
            itertools.product([WITH_ID, RECURSIVE, PATTERN, ABSOLUTE], IDS_OF_TOOLS)
        )
    ],
)
def test_f37_a_tool_with_an_id(schema: dict[str, Any], own_id: str, strict: bool, form: str) -> None:
    if schema is ABSOLUTE and own_id == "my-tool":
        schema = json.loads(json.dumps(ABSOLUTE).replace("https://x.org/s.json", "my-tool"))
    tool = ToolSpec("find", "", {"$id": own_id, **schema}, strict)
    other = ToolSpec("other", "", {"type": "object", "properties": {}}, strict=False)
    for tools in ((tool,), (tool, other)):
        found = compiled(*tools, form=form)
        assert found.relaxed == ()
        assert takes_call(found, "find", {"a": "x", "m": {}}, form=form)
        assert not takes_call(found, "find", {"a": 1}, form=form)


NAMES = ("a/b", "a~b", "a%20b", "a b", "é", "a.b", "a=b", "#", "日本")


@pytest.mark.parametrize("name", NAMES)
def test_f37_names_that_no_pointer_can_have(name: str) -> None:
    for n, key in enumerate(("A", "a/b", "a b", "é", "A.b", "Page[int]", "a%b"), NAMES.index(name)):
        strict = n % 2 == 1
        pointer = key.replace("/", "~1").replace("%", "%25").replace(" ", "%20")
        leaf = {"type": "object", "properties": {"kids": {"type": "array"}, "n": {"type": "string"}}}
        leaf["properties"]["kids"]["items"] = {"$ref": f"#/$defs/{pointer}"}
        schema = {"type": "object", "properties": {"x": {"$ref": f"#/$defs/{pointer}"}}, "$defs": {key: leaf}}
        found = compiled(ToolSpec(name, "", schema, strict))
        assert found.relaxed == ()
        assert takes_call(found, name, {"x": {"kids": [{"kids": [], "n": "y"}]}})
        assert not takes_call(found, name, {"x": {"kids": [{"n": 1}]}})


def recursive(member: str) -> dict[str, Any]:
    """A recursive type in TypeBox's form, which numbers the ids in each process."""
    nodes = {"type": "array", "items": {"$ref": "T0"}}
    properties = {member: {"type": "string"}, "nodes": nodes}
    return {"$id": "T0", "type": "object", "properties": properties, "required": [member, "nodes"]}


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("nested", [False, True])
def test_f37_equal_ids_of_two_tools(strict: bool, nested: bool) -> None:
    tools = []
    for name, member in (("t0", "id"), ("t1", "name")):
        schema = recursive(member)
        if nested:
            schema = {"type": "object", "properties": {"tree": schema}, "required": ["tree"]}
        tools.append(ToolSpec(name, "", schema, strict))
    found = compiled(*tools)
    assert found.relaxed == ()
    for name in ("t0", "t1"):
        for member in ("id", "name"):
            own = {("t0", "id"): "id", ("t1", "name"): "name"}.get((name, member))
            outer = "id" if name == "t0" else "name"
            value: Any = {outer: "x", "nodes": [{member: "y", "nodes": []}]}
            assert takes_call(found, name, {"tree": value} if nested else value) == (own is not None)


def test_f37_definitions_of_one_tool_and_a_tool_of_that_name() -> None:
    number = {"type": "object", "properties": {"x": {"$ref": "#/$defs/read"}}, "required": ["x"]}
    link = {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}}
    for strict in (False, True):
        fs = ToolSpec("fs", "", {**number, "$defs": {"read": {"type": "integer"}}}, strict)
        found = compiled(fs, ToolSpec("fs.read", "", {**link, "required": ["next"]}, strict))
        assert found.relaxed == ()
        assert takes_call(found, "fs", {"x": 12})
        assert not takes_call(found, "fs", {"x": {"next": None}})
        assert takes_call(found, "fs.read", {"next": {"next": None}})


def test_f37_a_dynamic_anchor_is_an_anchor() -> None:
    for kind, value, other in (("string", "x", 1), ("integer", 1, "x")):
        leaf = {"$dynamicAnchor": "A", "type": kind}
        schema = {"type": "object", "properties": {"a": {"$ref": "#A"}}, "$defs": {"A": leaf}}
        found = compiled(ToolSpec("find", "", schema), ToolSpec("other", "", RECURSIVE))
        assert takes_call(found, "find", {"a": value})
        assert not takes_call(found, "find", {"a": other})


def test_f37_one_name_in_both_keywords_of_definitions() -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/A"}, "b": {"$ref": "#/definitions/A"}},
        "$defs": {"A": {"type": "string"}},
        "definitions": {"A": {"type": "integer"}},
    }
    found = compiled(ToolSpec("find", "", schema))
    assert takes_call(found, "find", {"a": "x", "b": 1})
    assert not takes_call(found, "find", {"a": 1})
    assert not takes_call(found, "find", {"b": "x"})


def test_f37_relaxed_keywords_have_the_paths_and_names_of_their_tool() -> None:
    unkept = {"type": "object", "properties": {"x": {"$ref": "#/$defs/a b"}}, "$defs": {"a b": {"not": {}}}}
    twice = {**unkept, "$id": "https://x.org/s.json"}
    tools = [ToolSpec("fs", "", twice, strict=False), ToolSpec("fs.a", "", unkept, strict=False)]
    relaxed = [(one.name, one.path) for one in compiled(*tools).relaxed]
    assert sorted(relaxed) == [("fs", ("$defs", "a b", "not")), ("fs.a", ("$defs", "a b", "not"))]
    missing = {"type": "object", "properties": {"x": {"$ref": "#/$defs/Missing"}}}
    with pytest.raises(BadArgument, match="Missing", check=has_param("tools[0].properties.x.$ref")):
        compiled(ToolSpec("fs", "", missing))
    assert [one.path for one in compiled(ToolSpec("fs", "", missing, strict=False)).relaxed] == [
        ("properties", "x", "$ref")
    ]


IDS = (None, "T0", "https://x.org/s.json", "urn:x:t")
KEYS = ("A", "B.c", "a/b", "é")


@st.composite
def tool_schemas(draw: st.DrawFn, member: str) -> dict[str, Any]:
    """A schema whose members refer to definitions by pointers, anchors and ids. ``member``: the only member
    of every definition but ``next``."""
    root_id = draw(st.sampled_from(IDS))
    is_anchored = draw(st.booleans())
    definitions: dict[str, Any] = {}
    references: list[str] = []
    for key in draw(st.lists(st.sampled_from(KEYS), min_size=1, max_size=2, unique=True)):
        kind = draw(st.sampled_from(["pointer", "anchor", "id", "absolute"]))
        leaf: dict[str, Any] = {"type": draw(st.sampled_from(["integer", "string"]))}
        one = {"type": "object", "properties": {member: leaf}, "required": [member]}
        one["additionalProperties"] = False
        pointer = "#/$defs/" + key.replace("/", "~1").replace("é", "%C3%A9")
        reference = inner = pointer
        if kind == "anchor":
            number = KEYS.index(key)
            one["$anchor"] = f"N{number}"
            reference = inner = f"#N{number}"
        elif kind == "id":
            one["$id"] = reference = f"https://y.org/{KEYS.index(key)}"
            inner = draw(st.sampled_from(["#", reference, reference.rpartition("/")[2]]))
        elif kind == "absolute" and root_id is not None:
            reference = root_id + pointer
        if draw(st.booleans()):
            one["properties"]["next"] = {"$ref": inner}
        definitions[key] = one
        references.append(reference)
    properties: dict[str, Any] = {f"x{n}": {"$ref": one} for n, one in enumerate(references)}
    if draw(st.booleans()):
        properties["again"] = {"$ref": draw(st.sampled_from(["#", root_id or "#"]))}
    root: dict[str, Any] = {"type": "object", "properties": properties, "$defs": definitions}
    root["additionalProperties"] = False
    if root_id is not None:
        root["$id"] = root_id
    if is_anchored:
        root["$anchor"] = "Root"
        properties["root"] = {"$ref": "#Root"}
    return root


def values_of(member: str, num: int) -> list[Any]:
    """Returns values of which each tool takes some."""
    values = [{f"x{n}": {member: one}} for n in range(num) for one in (1, "a")]
    values += [{"x0": {member: one, "next": {member: one}}} for one in (1, "a")]
    return [*values, *[{key: one} for key in ("again", "root") for one in values[:2]]]


@examples(150)
@given(form=st.sampled_from([*FORMS]), data=st.data())
def test_f37_tools_together_take_the_values_of_each_alone(form: str, data: st.DataObject) -> None:
    names = data.draw(
        st.lists(st.sampled_from(["fs", "fs.A", "fs.B", "a/b", "é"]), min_size=2, max_size=2, unique=True)
    )
    schemas = {name: data.draw(tool_schemas(f"m{n}")) for n, name in enumerate(names)}
    strict = data.draw(st.booleans())
    found = compiled(*[ToolSpec(name, "", one, strict) for name, one in schemas.items()], form=form)
    assert found.relaxed == ()
    num_taken = 0
    for name, schema in schemas.items():
        alone = compile_constraint(Constraint("schema", json.dumps(schema)))
        checker = jsonschema.Draft202012Validator(schema)
        num = len(schema["$defs"])
        for n in range(len(schemas)):
            for value in values_of(f"m{n}", num):
                expected = checker.is_valid(value)
                assert takes_call(found, name, value, form=form) == expected
                assert n != list(schemas).index(name) or takes(alone, json.dumps(value)) == expected
                num_taken += expected
                assert not (expected and n != list(schemas).index(name) and f"m{n}" in json.dumps(value))
    assert num_taken >= len(schemas)
