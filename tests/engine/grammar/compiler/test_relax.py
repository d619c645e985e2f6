"""Schemas that a grammar cannot keep: relaxed if they are not strict, else rejected with the place."""

import copy
import itertools
import json

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.engine.schema_strategies import LITERALS, schemas, valid_value

from agentflow.engine.grammar.compiler.compile import compile_constraint
from agentflow.engine.grammar.compiler.explicit_schema import check_schema
from agentflow.engine.grammar.compiler.messages import PartedConstraint, SchemaPart
from agentflow.engine.grammar.compiler.relax import relax, without_look_arounds
from agentflow.errors import BadArgument
from agentflow.protocol.constraint import Constraint
from benchmarks.constrained.text_walks import takes, text_under

DECIMAL = r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"
NODE = {"type": "object", "properties": {"next": {"$ref": "#/$defs/Node"}}}
MODELS = [
    {"type": "object", "properties": {"kind": {"const": kind}}, "required": ["kind"]} for kind in ("a", "b")
]


def member(schema, **more):
    return {"type": "object", "properties": {"x": schema}, **more}


def call_of(schema, *, is_strict):
    """A constraint of calls of one tool."""
    members = {"name": {"const": "find"}, "arguments": schema}
    root = {"type": "object", "properties": members, "required": [*members], "additionalProperties": False}
    part = SchemaPart(("properties", "arguments"), "find", "tools[0]", is_strict)
    return PartedConstraint.of(Constraint("schema", json.dumps(root)), part)


def compiled(schema, *, is_strict=False):
    return compile_constraint(call_of(schema, is_strict=is_strict))


AS_THEY_ARE = {
    "formats": [
        member({"type": "string", "format": name})
        for name in ("binary", "password", "path", "byte", "url", "uri", "iri", "int64", "regex")
    ],
    "a set of an enumeration": [
        member({"type": "array", "items": {"enum": ["a", "b", "c"]}, "uniqueItems": True})
    ],
    "of an MCP server": [
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "type": "object",
            "properties": {"path": {"type": "string", "examples": ["/"], "readOnly": True}},
            "additionalProperties": {},
            "title": "args",
            "deprecated": True,
        },
        {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "number"}},
        {"type": "object"},
        {"type": "object", "properties": {}},
    ],
    "a discriminated union": [
        member({"oneOf": MODELS, "discriminator": {"propertyName": "kind"}}),
        member({"oneOf": [{"type": "string"}, {"type": "integer"}, {"type": "null"}]}),
    ],
    "references": [member({"$ref": "#/properties/arguments"})],
}


@pytest.mark.parametrize("name", AS_THEY_ARE)
@pytest.mark.parametrize("is_strict", [True, False])
def test_supported_keywords_are_not_relaxed(name, is_strict):
    for schema in AS_THEY_ARE[name]:
        assert compiled(schema, is_strict=is_strict).relaxed == ()


RELAXED = {
    "set": (member({"type": "array", "items": {"type": "string"}, "uniqueItems": True}), "x.uniqueItems"),
    "decimal": (
        member({"anyOf": [{"type": "number"}, {"type": "string", "pattern": DECIMAL}]}),
        "x.anyOf.1.pattern",
    ),
    "back-reference": (member({"type": "string", "pattern": r"(a)\1"}), "x.pattern"),
    "overlapping oneOf": (member({"oneOf": [{"type": "integer"}, {"type": "number"}]}), "x.oneOf"),
    "not": (member({"type": "string", "not": {"const": ""}}), "x.not"),
    "contains": (member({"type": "array", "contains": {"const": 1}}), "x.contains"),
    "elsewhere": (member({"$ref": "https://example.com/a.json"}), "x.$ref"),
    "nowhere": (member({"$ref": "#/$defs/b"}), "x.$ref"),
    "draft 4": (member({"type": "integer", "minimum": 3, "exclusiveMinimum": True}), "x.exclusiveMinimum"),
    "empty range": (member({"type": "integer", "minimum": 3, "maximum": 2}, required=["x"]), "x"),
    "a number of members": (member(member({"type": "string"}, minProperties=1)), "x.minProperties"),
}


@pytest.mark.parametrize("name", RELAXED)
def test_unsupported_keywords_are_relaxed_or_rejected(name):
    schema, place = RELAXED[name]
    [one] = compiled(schema).relaxed
    assert (one.name, ".".join(one.path)) == ("find", f"properties.{place}")
    with pytest.raises(BadArgument) as caught:
        compiled(schema, is_strict=True)
    assert caught.value.param == f"tools[0].properties.{place}"
    assert "'find'" in str(caught.value)
    assert not any(word in str(caught.value) for word in ("arguments", "tool_call", "llguidance"))


def test_as_little_as_possible_is_relaxed():
    constraint = compiled(member({"type": "string", "pattern": DECIMAL}, required=["x"]))
    assert takes(constraint, '{"name": "find", "arguments": {"x": "12.5"}}')
    assert not takes(constraint, '{"name": "find", "arguments": {"x": "many"}}')
    patterns = {"patternProperties": {"^(?!x)": {"type": "null"}}, "additionalProperties": False}
    constraint = compiled({"type": "object", "properties": {"n": {"type": "integer"}}, **patterns})
    assert takes(constraint, '{"name": "find", "arguments": {"n": 1, "more": null}}')
    assert not takes(constraint, '{"name": "find", "arguments": {"n": "1"}}')


def test_a_member_that_has_no_finite_value_may_have_any():
    endless = {"type": "object", "properties": {"n": {"$ref": "#/$defs/find"}}, "required": ["n"]}
    constraint = call_of({"$ref": "#/$defs/find"}, is_strict=False)
    root = {**json.loads(constraint.source), "$defs": {"find": endless}}
    found = compile_constraint(constraint.with_schema(json.dumps(root)))
    assert [(one.name, one.path) for one in found.relaxed] == [("find", ("properties", "n"))]
    assert takes(found, '{"name": "find", "arguments": {"n": 1}}')


@pytest.mark.parametrize(
    ("schema", "word"),
    [
        (member({"type": "thing"}), "integer"),
        (member({"type": "string", "required": True}), "required"),
        (member({"enum": "a"}), "enum"),
    ],
)
@pytest.mark.parametrize("is_strict", [True, False])
def test_an_invalid_schema_is_rejected_with_its_place(schema, word, is_strict):
    with pytest.raises(BadArgument, match=r"tool 'find': properties\.x: ") as caught:
        compiled(schema, is_strict=is_strict)
    assert caught.value.param == "tools[0]"
    assert word in str(caught.value)


def test_one_of_several_tools_is_named():
    """The strict one keeps all, and the others are not relaxed for it."""
    options = [
        json.loads(call_of(schema, is_strict=True).source)
        for schema in (member({"type": "null"}), member({"not": {}}), member({"not": {}}))
    ]
    for number, option in enumerate(options):
        option["properties"]["name"]["const"] = f"t{number}"

    def parts(*strict):
        return [
            SchemaPart(("anyOf", n, "properties", "arguments"), f"t{n}", f"tools[{n}]", is_strict)
            for n, is_strict in enumerate(strict)
        ]

    constraint = Constraint("schema", json.dumps({"anyOf": options}))
    found = compile_constraint(PartedConstraint.of(constraint, *parts(True, False, False)))
    assert [one.name for one in found.relaxed] == ["t1", "t2"]
    with pytest.raises(BadArgument) as caught:
        compile_constraint(PartedConstraint.of(constraint, *parts(True, False, True)))
    assert caught.value.param == "tools[2].properties.x.not"


@pytest.mark.parametrize(
    ("pattern", "looser"),
    [
        (r"a(?=b(c|[)]))d", "a(?:)d"),
        (r"(?<!\))[()]\(?=", r"(?:)[()]\(?="),
        (r"[](?=]x(?!(y))", "[](?=]x(?:)"),
        (r"(?:a|(?<=b(?=c))d)+", "(?:a|(?:)d)+"),
        (r"[^](?=a)]", "[^](?=a)]"),
        (r"\[(?!a)", r"\[(?:)"),
    ],
)
def test_only_look_arounds_are_dropped_from_a_pattern(pattern, looser):
    assert without_look_arounds(pattern) == looser


@pytest.mark.parametrize(
    ("items", "more"),
    [
        ({"enum": ["a", "b", "c"]}, {}),
        ({"type": "boolean"}, {"minItems": 1}),
        ({"enum": list(range(20))}, {"maxItems": 2}),
        ({"$ref": "#/$defs/kind"}, {"minItems": 2}),
        ({"enum": [1, 1.0, True, None, "1"]}, {"maxItems": 2}),
        ({"type": "string", "const": "a"}, {}),
    ],
)
def test_a_list_of_different_values_has_each_at_most_once(items, more):
    schema = {
        "type": "array",
        "items": items,
        "uniqueItems": True,
        **more,
        "$defs": {"kind": {"enum": [1, 2]}},
    }
    constraint = compile_constraint(Constraint("schema", json.dumps(schema)))
    values = {"boolean": [True, False]}.get(items.get("type"), items.get("enum", [1, 2, "a"]))
    checker = jsonschema.Draft202012Validator(schema)
    num_valid = 0
    for length in range(4):
        for some in itertools.islice(itertools.product(values, repeat=length), 500):
            is_valid = checker.is_valid([*some])
            num_valid += is_valid
            if 1.0 not in [one for one in some if isinstance(one, float)]:
                assert takes(constraint, json.dumps(some)) == is_valid, some
    assert num_valid


def test_too_many_different_lists_are_not_written_out():
    schema = {"type": "array", "items": {"enum": list(range(6))}, "uniqueItems": True}
    with pytest.raises(BadArgument, match="uniqueItems"):
        compile_constraint(Constraint("schema", json.dumps(schema)))
    assert [one.path for one in compiled(member(schema)).relaxed] == [("properties", "x", "uniqueItems")]


EXTRA = st.sampled_from(
    [
        {},
        {"uniqueItems": True},
        {"not": {"const": 3}},
        {"contains": {"type": "string"}, "minContains": 2},
        {"if": {"type": "string"}, "then": {"minLength": 2}, "else": {"not": {"const": None}}},
        {"propertyNames": {"maxLength": 1}},
        {"propertyNames": {"type": "string"}},
        {"dependentRequired": {"a": ["type"]}},
        {"dependentSchemas": {"a": {"minProperties": 2}}},
        {"unevaluatedProperties": False},
        {"unevaluatedItems": {"type": "integer"}},
        {"minProperties": 2},
        {"pattern": "^(?!a).*$"},
        {"format": "byte"},
        {"$ref": "#/nowhere"},
        {"oneOf": [{"type": "string"}, {"not": {"const": 1}}]},
    ]
)


def grown(schema, extras):
    """The schema with more keywords at places in it."""
    schema = copy.deepcopy(schema)
    places = [schema]
    for key in ("properties",):
        places += schema.get(key, {}).values()
    if isinstance(schema.get("items"), dict):
        places.append(schema["items"])
    for place, extra in zip(places, extras, strict=False):
        place |= {key: value for key, value in extra.items() if key not in place}
    return schema


@given(schemas, st.lists(EXTRA, min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_whatever_was_valid_stays_valid(schema, extras, dice):
    original = grown(schema, extras)
    looser = json.loads(json.dumps(original))
    check_schema(looser)
    checked = copy.deepcopy(looser)
    places = relax(looser)
    if not places:
        assert looser == checked
    strict, loose = jsonschema.Draft202012Validator(original), jsonschema.Draft202012Validator(looser)
    has_reference = "#/nowhere" in json.dumps(original)
    for value in [valid_value(schema, dice), valid_value(schema, dice), *LITERALS]:
        if not places:
            assert loose.is_valid(value) == strict.is_valid(value)
        elif not has_reference and strict.is_valid(value):
            assert loose.is_valid(value)


@given(schemas, st.lists(EXTRA, min_size=1, max_size=4))
def test_any_schema_compiles_if_it_is_not_strict(schema, extras):
    constraint = compiled(grown({"type": "object", "properties": {"a": schema}}, [{}, *extras]))
    assert text_under(constraint).allowed()
