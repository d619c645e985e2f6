"""Compiled constraints, refused ones with their messages, and that texts under constraints are valid."""

import calendar
import datetime
import json
import random
import uuid
from contextlib import suppress
from typing import Annotated, Literal

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field, TypeAdapter
from support.commands import run_python

from agentflow.engine.grammar.compiler.compile import compile_constraint
from agentflow.engine.grammar.dfa import Dfa
from agentflow.errors import BadArgument
from agentflow.protocol.constraint import Constraint
from benchmarks.constrained.text_walks import takes, text_under, walk


class Address(BaseModel):
    street: str
    city: str | None = None


class Person(BaseModel):
    name: str = Field(min_length=1)
    age: int = Field(ge=0, le=150)
    share: float = Field(ge=0, le=1)
    role: Literal["admin", "user"]
    homes: list[Address] = []


class Tree(BaseModel):
    value: int
    children: list["Tree"] = []


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int


class Dog(BaseModel):
    kind: Literal["dog"]
    name: str


class Owner(BaseModel):
    pet: Annotated[Cat | Dog, Field(discriminator="kind")]


def compiled(kind, source, **more):
    return compile_constraint(Constraint(kind, source, **more).check())


def schema_of(model) -> str:
    return json.dumps(model.model_json_schema())


def some_texts(constraint, number: int, prefix: bytes = b"") -> list[bytes]:
    dice = random.Random(number)
    walks = (walk(text_under(constraint), dice, prefix) for _ in range(number))
    return [text for text in walks if text is not None]


@pytest.mark.parametrize("whitespace", ["compact", "tight", "free"])
@pytest.mark.parametrize(
    ("model", "form"), [(Person, "dfa"), (Tree, "llguidance"), (Owner, "dfa"), (Address, "dfa")]
)
def test_records_are_read_back(model, form, whitespace):
    constraint = compiled("schema", schema_of(model), whitespace=whitespace)
    assert constraint.form == form
    texts = some_texts(constraint, 20)
    assert len(texts) == 20
    for text in texts:
        value = model.model_validate_json(text)
        assert takes(constraint, text.decode())
        if whitespace == "compact" and text.isascii() and b"\\u" not in text and b"\\/" not in text:
            assert json.loads(json.dumps(json.loads(text))) == json.loads(
                value.model_dump_json(exclude_unset=True)
            )


@pytest.mark.parametrize(
    ("whitespace", "text"),
    [
        ("compact", '{"value": 1, "children": [{"value": 2}]}'),
        ("tight", '{"value":1,"children":[{"value":2}]}'),
    ],
)
def test_a_parser_allows_the_same_whitespace_as_a_dfa(whitespace, text):
    for other in ("compact", "tight", "free"):
        expected = other in (whitespace, "free")
        assert takes(compiled("schema", schema_of(Tree), whitespace=other), text) == expected


CONSTRAINED = {
    "pattern": {"type": "string", "pattern": "^[a-z]{2,4}-[0-9]+$"},
    "format": {"type": "string", "format": "date-time"},
    "multipleOf": {"type": "integer", "multipleOf": 7, "minimum": 0},
    "range": {"type": "number", "exclusiveMinimum": 0, "maximum": 12.5},
    "allOf": {
        "allOf": [
            {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
            {"maxProperties": 1},
        ]
    },
    "map": {"type": "object", "additionalProperties": {"type": "integer"}, "maxProperties": 2},
    "patternProperties": {
        "type": "object",
        "patternProperties": {"^x": {"type": "null"}},
        "additionalProperties": False,
    },
    "any": {},
    "oneOf": {"oneOf": [{"type": "string", "maxLength": 3}, {"type": "integer", "minimum": 5}]},
    "unevaluated": {
        "type": "object",
        "properties": {"a": {"const": 1}},
        "unevaluatedProperties": {"type": "null"},
    },
    "uniqueItems: false": {"type": "array", "items": {"type": "boolean"}, "uniqueItems": False},
}


@pytest.mark.parametrize("name", CONSTRAINED)
def test_texts_that_a_parser_allows_are_valid(name):
    schema = CONSTRAINED[name]
    checker = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
    texts = some_texts(compiled("schema", json.dumps(schema)), 60)
    assert len(texts) > 50
    for text in texts:
        checker.validate(json.loads(text))


def test_members_that_are_declared_are_all_there_are_in_either_form():
    members = {"a": {"type": "integer"}, "b": {"type": "string", "pattern": "x"}}
    machine = compiled("schema", json.dumps({"type": "object", "properties": {"a": members["a"]}}))
    parser = compiled("schema", json.dumps({"type": "object", "properties": members}))
    assert (machine.form, parser.form) == ("dfa", "llguidance")
    for constraint in (machine, parser):
        assert takes(constraint, '{"a": 1}')
        assert not takes(constraint, '{"a": 1, "c": 1}')
        assert not takes(constraint, '{"\\u0061": "x"}')
    asked_for = {"type": "object", "properties": members, "additionalProperties": True}
    assert takes(compiled("schema", json.dumps(asked_for)), '{"a": 1, "c": 1}')


@pytest.mark.parametrize(
    "extra", [{"nullable": True}, {"deprecated": True}, {"x-order": {"a": 1}}, {"type": "object"}]
)
def test_f37_words_that_say_nothing_change_nothing(extra):
    """Next to a recursive reference, where the library refuses them, and in a schema for a DFA."""
    node = {"type": "object", "properties": {"next": {"$ref": "#/$defs/N", **extra}}}
    schema = {"$ref": "#/$defs/N", "$defs": {"N": node}, **extra}
    assert takes(compiled("schema", json.dumps(schema)), '{"next": {"next": {}}}')
    options = [{"type": "object", "properties": {"a": {"type": "null"}}, **extra}, {"const": 1}]
    constraint = compiled("schema", json.dumps({"anyOf": options, **(extra if "type" not in extra else {})}))
    assert constraint.form == "dfa"
    assert not takes(constraint, '{"b": 1}')


def test_f37_unevaluated_members_may_be_allowed():
    schema = {"properties": {"a": {"type": "null"}}, "unevaluatedProperties": True, "type": "object"}
    assert takes(compiled("schema", json.dumps(schema)), '{"a": null, "b": 1}')


def test_numbers_are_bounded_in_either_form():
    for schema in ({"type": "integer"}, {"type": "array", "items": {"type": "integer", "minimum": 7}}):
        constraint = compiled("schema", json.dumps(schema))
        wrap = "[%s]" if "items" in schema else "%s"
        assert takes(constraint, wrap % ("9" * 18))
        assert not takes(constraint, wrap % ("9" * 19))


def test_a_value_that_is_true_is_no_schema():
    constraint = compiled("schema", '{"type": "array", "items": {"const": true}}')
    assert takes(constraint, "[true, true]")
    assert not takes(constraint, "[1]")


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ("{}", "%s"),
        ("true", "%s"),
        ('{"type": "array"}', "[%s]"),
        ('{"type": "object"}', '{"a": [%s]}'),
        ('{"type": "object", "properties": {"a": {"title": "anything"}}}', '{"a": {"b": %s}}'),
        ('{"type": ["object", "null"], "additionalProperties": true}', '{"a": %s}'),
        ('{"anyOf": [{"type": "null"}, true]}', "%s"),
        ('{"type": "array", "prefixItems": [true], "items": false}', "[%s]"),
        ('{"maxLength": 9}', "%s"),
        ('{"minItems": 1}', "[%s]"),
        ('{"properties": {"a": {"multipleOf": 0.5}}}', '{"a": [%s]}'),
        ('{"type": "array", "items": {"required": ["b"]}}', "[[%s]]"),
    ],
)
def test_where_any_value_may_stand_its_numbers_are_bounded(schema, text):
    constraint = compiled("schema", schema)
    for value in ("1", "-1.5", '"a"', "null", "true", '[1, {"a": 2}]', "{}", "9" * 15):
        assert takes(constraint, text % value), value
    for value in ("1e5", "9" * 16, "-", "nul", "[1e5]"):
        assert not takes(constraint, text % value), value


@pytest.mark.parametrize(
    "pattern", ["((a{1,50}){1,50}){1,50}", "((a{0,50}){0,50}){0,50}", "(?s)(.{1,300}){1,300}"]
)
def test_nested_repeats_that_compile_can_be_written(pattern):
    assert takes(compiled("regex", pattern), "a" * 3000)


@pytest.mark.parametrize("pattern", [r"(\S+ ?){1,5000}", r"(\w+,? ?){1,5000}"])
def test_repeated_words_can_be_written_to_any_length(pattern):
    assert takes(compiled("regex", pattern), "some words and " * 200)


@pytest.mark.parametrize("pattern", ["((a{1,50}b?){1,50}){1,50}", r"((\w{1,50} ?){1,50}){1,50}"])
def test_a_pattern_that_is_read_in_too_many_ways_is_refused_before_anything_is_written(pattern):
    with pytest.raises(BadArgument, match="limits of one step"):
        compiled("regex", pattern)


DRAFTS = ("draft-04", "draft-06", "draft-07", "draft/2020-12", None)


@pytest.mark.parametrize(  # each two of the three together
    ("draft", "identity", "key"),
    [
        (draft, identity, ("id", "$id")[(i + j) % 2])
        for i, draft in enumerate(DRAFTS)
        for j, identity in enumerate(("http://x.net/a", "other.json", "urn:a:b"))
    ],
)
def test_a_nested_identifier_moves_no_reference_of_our_own(draft, key, identity):
    """Draft 4 spells ``$id`` as ``id``: both change the base that references below them are read against."""
    inner = {key: identity, "type": "object"}
    schema = {key: "http://x.net/root", "type": "object", "properties": {"a": inner, "b": {}}}
    if draft is not None:
        host = "https" if draft.startswith("draft/") else "http"
        schema["$schema"] = f"{host}://json-schema.org/{draft}/schema#".replace("12/schema#", "12/schema")
    constraint = compiled("schema", json.dumps(schema))
    assert takes(constraint, '{"a": {"b": [1, {"c": null}]}, "b": 2}')
    assert not takes(constraint, '{"a": {"b": %s}}' % ("9" * 16))
    assert not takes(constraint, '{"a": 1}')


def test_no_declared_name_is_written_twice():
    """Free names may be: a grammar cannot remember which there were."""
    schema = {"type": "object", "properties": {"a": {}, "é": {}}, "additionalProperties": True}
    constraint = compiled("schema", json.dumps(schema))
    assert takes(constraint, '{"a": 1, "é": 2, "c": 3, "d": 4}')
    for name in ("a", "é", r"\u0061", r"\u00e9"):
        assert not takes(constraint, f'{{"a": 1, "é": 2, "c": 3, "{name}": 4}}'), name
    assert takes(constraint, '{"c": 3, "c": 4}')


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        (
            '{"type": "array", "uniqueItems": true}',
            "schema: uniqueItems is supported for items of few values",
        ),
        ('{"properties": {"a": {"not": {"type": "null"}}}}', "schema: properties.a.not is not supported"),
        ('{"contains": {"const": 1}}', "schema: contains is not supported"),
        ('{"if": {"type": "null"}, "then": {}}', "schema: if is not supported"),
        ('{"oneOf": [{"type": "integer"}, {"type": "number"}]}', "oneOf is supported only if"),
        ('{"$recursiveRef": "#"}', "schema: $recursiveRef is not supported"),
        ('{"$ref": "other.json"}', "$ref refers to 'other.json', which is not in the schema"),
        ('{"type": "string", "pattern": "a(?=b)"}', "pattern is supported without look-arounds only"),
        ('{"minProperties": 2}', "minProperties above 1 needs"),
        ('{"type": "integer", "minimum": 3, "maximum": 2}', "minimum (3) is greater than maximum (2)"),
        ('{"type": "integer", "minimum": 3, "exclusiveMinimum": true}', "exclusiveMinimum must be a number"),
        ('{"enum": []}', "anyOf is empty"),
        ('{"type": "thing"}', "type must be one of object, array, string"),
        ('{"required": 3}', "required must be a list of names"),
        ('{"properties": []}', "properties must be an object"),
        ("false", "must be an object that some value satisfies"),
        ("[1]", "must be an object that some value satisfies"),
        ('{"a": ', "not valid JSON"),
        ('{"const": 1e999}', "not valid JSON"),
        ('{"const": NaN}', "NaN is not JSON"),
        ('{"const": "\\ud800"}', "not valid JSON"),
        ("[" * 100_000, "nests deeper than 60"),
        ('{"items": ' * 100 + "{}" + "}" * 100, "nests deeper than 60"),
        ('{"$ref": "#"}', "no finite value"),
        ('{"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}', "no finite value"),
    ],
)
def test_a_schema_that_cannot_be_kept_is_refused_by_name(schema, words):
    with pytest.raises(BadArgument) as caught:
        compiled("schema", schema)
    assert words in str(caught.value)


@pytest.mark.parametrize("keyword", ["$defs", "definitions"])
@pytest.mark.parametrize("start", [{}, {"$id": "https://example.com/a"}])
@pytest.mark.parametrize(
    "unused",
    [
        {"$ref": "other.json"},
        {"$ref": "#/nowhere"},
        {"type": "array", "items": {"$ref": "#anchor"}},
        {"not": {}},
        {"$ref": "#/%s/again"},
    ],
)
def test_f37_an_unused_definition_need_not_be_enforceable(keyword, start, unused):
    definitions = {
        "a": {"anyOf": [{"type": "null"}, {"$ref": f"#/{keyword}/b/items"}]},
        "b": {"type": "array", "items": {"type": "integer"}},
        "yes": True,
        "again": {"$ref": f"#/{keyword}/unused"},
        "unused": json.loads(json.dumps(unused) % (() if "%s" not in json.dumps(unused) else keyword)),
    }
    used = {**start, "$ref": f"#/{keyword}/a", keyword: definitions}
    constraint = compiled("schema", json.dumps(used))
    assert takes(constraint, "null")
    assert takes(constraint, "12")
    with pytest.raises(BadArgument):
        compiled("schema", json.dumps({"$ref": f"#/{keyword}/unused", keyword: definitions}))


OPEN = {"type": "object", "properties": {"b": {"const": ""}}}


@pytest.mark.parametrize(
    "options",
    [
        [{"type": "object", "required": ["z"]}, OPEN],  # {"z": 1} is valid under both
        [OPEN, {"const": {"z": None}}],
        [OPEN, {"type": "object", "properties": {"z": {"type": "null"}}, "required": ["z"]}],
        [{"type": "number"}, {"const": 1e20}],
    ],
)
@pytest.mark.parametrize("more", [{}, {"anyOf": [{"type": "object"}, {"type": "number"}]}])
def test_f37_options_that_exclude_each_other_only_when_narrowed_are_rejected(options, more):
    with pytest.raises(BadArgument):
        compiled("schema", json.dumps({"oneOf": options, **more}))
    with pytest.raises(BadArgument):
        compiled("schema", json.dumps({"type": "array", "items": {"oneOf": options[::-1], **more}}))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ([{"anyOf": [{"type": "string"}, {"type": "null"}]}, {"type": "integer"}], "null"),
        ([{**OPEN, "additionalProperties": False}, {"const": {"z": None}}], '{"z": null}'),
        ([OPEN, {"type": "array", "items": {"type": "null"}}], '{"b": ""}'),
    ],
)
def test_f37_options_that_exclude_each_other_are_enforced(options, text):
    for more in ({}, {"anyOf": [{"type": ["object", "null"]}, {"type": "array"}]}):
        assert takes(compiled("schema", json.dumps({"oneOf": options, **more})), text)


CLOSED = {"type": "object", "required": ["k"], "additionalProperties": False}
APART = [{**CLOSED, "properties": {"k": {"type": kind}}} for kind in ("string", "null")]


def test_f37_a_wide_limit_elsewhere_does_not_reject_options():
    for limits in ({"minimum": -1e20}, {"exclusiveMaximum": 1e20, "multipleOf": 0.5}):
        schema = {"properties": {"a": {"oneOf": APART}, "b": {"type": "number", **limits}}}
        constraint = compiled("schema", json.dumps({"type": "object", **schema}))
        assert takes(constraint, '{"a": {"k": null}, "b": 1.5}')


@pytest.mark.parametrize("order", [1, -1])
def test_f37_the_path_is_that_of_the_options_that_are_not_supported(order):
    together = [{"type": "string", "pattern": "^a"}, {"type": "string", "pattern": "^b"}]
    members = [("good", {"oneOf": APART}), ("bad", {"oneOf": together})][::order]
    with pytest.raises(BadArgument, match=r"properties\.bad\.oneOf "):
        compiled("schema", json.dumps({"type": "object", "properties": dict(members)}))


LARGE = 10**400


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"const": LARGE}, f"{LARGE}"),
        ({"enum": [1, -LARGE]}, f"{-LARGE}"),
        ({"type": "integer", "default": LARGE}, "1"),
        ({"type": "string", "pattern": "^a$", "examples": [LARGE]}, '"a"'),
        ({"type": "integer", "maximum": LARGE}, "1"),
        ({"type": "number", "minimum": -LARGE, "exclusiveMaximum": LARGE}, "1.5"),
        ({"type": "number", "exclusiveMinimum": -LARGE, "multipleOf": 0.5}, "1.5"),
        ({"type": "number", "exclusiveMinimum": -1e20, "multipleOf": 0.5}, "1.5"),
        ({"type": "integer", "minimum": -(10**20), "maximum": 5, "multipleOf": 3}, "-3"),
        ({"type": ["number", "string"], "maximum": 1e20, "pattern": "a"}, "1.5"),
        ({"allOf": [{"type": "integer", "minimum": -LARGE}, {"maximum": 5}]}, "5"),
        ({"type": "string", "maxLength": LARGE}, '"a"'),
        ({"type": "array", "items": {"type": "null"}, "maxItems": LARGE}, "[null]"),
        ({"type": "object", "additionalProperties": {"type": "null"}, "maxProperties": LARGE}, '{"a": null}'),
    ],
)
def test_f37_a_large_integer_is_a_value_or_allows_all(schema, text):
    assert takes(compiled("schema", json.dumps(schema)), text)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "minimum": LARGE},
        {"type": "number", "exclusiveMinimum": LARGE, "maximum": 2 * LARGE},
        {"type": ["number", "null"], "maximum": -LARGE},
        {"type": "integer", "multipleOf": LARGE},
        {"type": "string", "minLength": LARGE},
        {"type": "array", "minItems": LARGE, "items": {"type": "null"}},
        {"minProperties": LARGE},
        {"oneOf": [{"const": LARGE}, {"const": 1}]},
    ],
)
def test_f37_a_large_integer_that_cannot_be_kept_is_refused(schema):
    with pytest.raises(BadArgument):
        compiled("schema", json.dumps(schema))


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "number", "minimum": 1e15, "maximum": 1e17},
        {"type": "number", "exclusiveMinimum": 10**15},
        {"type": "number", "maximum": -1e15, "multipleOf": 5},
        {"type": "integer", "minimum": 10**18, "maximum": 10**18 + 5},
        {"type": "integer", "exclusiveMinimum": 10**18 - 1},
        {"type": ["integer", "null"], "exclusiveMaximum": 1 - 10**18},
    ],
)
def test_f37_a_range_beyond_all_numbers_that_are_generated_is_rejected(schema):
    """Of a number, the upper limit was dropped, and the digits had no end."""
    for outer, place in ((schema, "schema: m|schema: e"), ({"type": "array", "items": schema}, r"items: ")):
        with pytest.raises(BadArgument, match=place):
            compiled("schema", json.dumps(outer))
    edge = {"type": "integer", "minimum": 10**18 - 1, "pattern": "a"}
    assert takes(compiled("schema", json.dumps(edge)), "9" * 18)


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"allOf": [{"type": "number", "exclusiveMinimum": 0}, {"maximum": 0.5}]}, "0.5", "0"),
        ({"allOf": [{"type": "number", "maximum": 0.5}, {"exclusiveMinimum": 0}]}, "0.5", "0"),
        ({"allOf": [{"type": "number", "exclusiveMaximum": 3, "minimum": 0}, {"minimum": 2.5}]}, "2.5", "3"),
        ({"type": ["number", "null"], "exclusiveMinimum": -1, "maximum": -0.5}, "-0.5", "-1"),
        ({"exclusiveMinimum": 1, "maximum": 1.5}, "1.5", "1"),
        ({"allOf": [{"type": "integer"}, {"exclusiveMinimum": 1}]}, "2", "1"),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 5, "exclusiveMaximum": 0.5}, "0.25", "0"),
        ({"allOf": [{"type": "number", "exclusiveMinimum": 0, "minimum": 2}, {"maximum": 9}]}, "2", "1"),
    ],
)
def test_f37_an_open_limit_is_no_value_of_a_narrow_range(schema, good, bad):
    source = json.dumps({"anyOf": [schema, {"type": "array", "items": {"$ref": "#"}}]})
    constraint = compiled("schema", source)
    assert constraint.form == "llguidance"
    assert takes(constraint, good)
    assert not takes(constraint, bad)


@pytest.mark.parametrize(
    ("key", "limit", "near"),
    [
        ("exclusiveMinimum", 0, "0.00000000000000001"),
        ("exclusiveMinimum", -5, "-4.99999999999999"),
        ("exclusiveMaximum", 0, "-0.00000000000000001"),
        ("exclusiveMaximum", 5, "4.99999999999999"),
    ],
)
def test_f37_numbers_next_to_an_open_limit_are_generated_if_no_other_schema_narrows_it(key, limit, near):
    schema = {"type": "number", key: limit}
    source = json.dumps({"anyOf": [schema, {"type": "array", "items": {"$ref": "#"}}]})
    constraint = compiled("schema", source)
    assert constraint.form == "llguidance"
    assert takes(constraint, near)
    assert not takes(constraint, str(limit))


@pytest.mark.parametrize("limit", ["0", None, True, [], {}])
def test_f37_a_limit_that_is_no_number_is_ignored_or_a_bad_argument(limit):
    for key, opposite in (("minimum", "maximum"), ("maximum", "minimum")):
        name = "exclusive" + key.capitalize()
        sign = 1 if key == "minimum" else -1
        for schema in (
            {"type": "number", key: limit, name: 0, opposite: sign * 0.5},
            {"type": "number", key: 0, name: 0, opposite: limit},
            {"allOf": [{"type": "number", key: limit, name: 0}, {opposite: limit}]},
            {key: limit, name: 2**60},
        ):
            with suppress(BadArgument):
                compiled("schema", json.dumps(schema))


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(
    "limit", [2**53 - 1, 2**53, 2**53 + 1, 2**53 + 3, 2**59 + 1, 10**17, 10**17 + 1, 10**18 - 1]
)
@pytest.mark.parametrize("key", ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"])
@pytest.mark.parametrize("kind", [int, float])
def test_f37_large_limits_are_enforced(key, limit, sign, kind):
    """The parser reads limits as floats."""
    schema = {"type": "integer", key: kind(sign * limit)}
    try:
        constraint = compiled(
            "schema", json.dumps({"anyOf": [schema, {"type": "array", "items": {"$ref": "#"}}]})
        )
    except BadArgument:
        assert limit == 10**18 - 1
        return
    checker = jsonschema.Draft202012Validator(schema)
    near = [sign * limit + more for more in range(-300, 301)]
    taken = [value for value in near if takes(constraint, json.dumps(value))]
    assert all(checker.is_valid(value) and abs(value) < 10**18 for value in taken)
    assert taken


SAID = ["type", "properties", "items", "enum", "const", "anyOf", "oneOf", "allOf", "$ref", "required"]
SAID += [
    "minimum",
    "maxLength",
    "minItems",
    "$defs",
    "pattern",
    "additionalProperties",
    "minProperties",
    "format",
]
anything = st.recursive(
    st.sampled_from([None, True, 3, -1.5, "a", "object", "string", "#", "date", []]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(SAID), inner, max_size=4),
    max_leaves=8,
)


VALUES = {
    "strings": {"type": "string"},
    "integers": {"type": "integer"},
    "patterns": {"type": "string", "pattern": "^a+$"},
    "objects": {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "null"}}},
}


def optional_members(number: int, value: object, name: str = "member") -> dict[str, object]:
    return {"type": "object", "properties": {f"{name}_{n}": value for n in range(number)}}


@pytest.mark.parametrize(
    ("number", "value"),
    [
        *((135, value) for value in VALUES),
        (1000, "strings"),
        *(pytest.param(1000, value, marks=pytest.mark.full) for value in VALUES if value != "strings"),
    ],
)
def test_f39b_objects_of_many_optional_members_can_be_written(number, value):
    schema = optional_members(number, VALUES[value])
    constraint = compiled("schema", json.dumps(schema))
    checker = jsonschema.Draft202012Validator(schema)
    for prefix in (f'{{"member_{number // 2}', f'{{"member_{number - 1}'):
        text = walk(text_under(constraint), random.Random(0), prefix.encode())
        assert text is not None
        assert text.startswith(prefix.encode())
        checker.validate(json.loads(text))


def test_f39c_many_optional_arguments_of_a_tool_can_be_written():
    source = json.dumps(optional_members(400, {"type": "boolean"}))
    rule = {"begin": "<call>", "kind": "schema", "source": source, "end": "</call>"}
    constraint = compiled("tags", json.dumps([rule]))
    assert takes(constraint, 'I call <call>{"member_7": true, "member_399": false}</call>')


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        (optional_members(1_200, {"type": "string"}), "1,"),
        ({"type": "array", "items": optional_members(2_000, {"type": "string"})}, "items: "),
        ({"anyOf": [optional_members(600, {"type": "null"}, name) for name in "ab"]}, "1,"),
        ({"anyOf": [{"type": "array", "items": {"pattern": f"^{n}"}} for n in range(900)]}, "1,"),
    ],
)
def test_f39d_too_many_members_at_one_place_are_rejected_before_anything_is_written(schema, place):
    with pytest.raises(BadArgument) as caught:
        compiled("schema", json.dumps(schema))
    assert place in str(caught.value)


@st.composite
def crowded_schemas(draw):
    """Objects of many optional members and unions of many options."""

    def an_object(name: str) -> dict[str, object]:
        members = optional_members(draw(st.integers(1, 90)), draw(st.sampled_from([*VALUES.values()])), name)
        required = draw(st.lists(st.sampled_from([*members["properties"]]), max_size=2, unique=True))
        others = draw(st.sampled_from([{}, {"additionalProperties": True}]))
        return {**members, "required": required, **others}

    options = [an_object(name) for name in draw(st.sampled_from(["a", "ab", "abcd"]))]
    options += [{"type": "array", "items": one} for one in draw(st.sampled_from([[], options]))]
    options += [{"type": "array", "items": {"const": n}} for n in range(draw(st.integers(0, 90)))]
    return draw(st.sampled_from([{"anyOf": options}, {"type": "array", "items": {"anyOf": options}}]))


@given(crowded_schemas(), st.integers(0, 99))
def test_f39e_a_schema_that_compiles_can_be_written(schema, seed):
    text = text_under(compiled("schema", json.dumps(schema)))
    dice = random.Random(seed)
    for _ in range(80):
        allowed = text.allowed()
        if not allowed:
            break
        marks = [byte for byte in allowed if byte in b'"{}[]:, ']
        text.accept(dice.choice(marks or allowed))
    assert text.allowed() or text.may_end()


@given(anything)
def test_any_json_is_compiled_or_rejected_as_a_schema(schema):
    try:
        constraint = compiled("schema", json.dumps(schema))
    except BadArgument:
        return
    assert text_under(constraint).allowed()


TIMES = [datetime.date, datetime.datetime, datetime.time, datetime.timedelta, uuid.UUID]


@pytest.mark.parametrize("kind", TIMES)
def test_formats_are_read_back(kind):
    """Digits at random: no day that does not exist, no second that a reader of times refuses."""
    reader = TypeAdapter(kind)
    constraint = compiled("schema", json.dumps(reader.json_schema()))
    for number in range(100):
        dice, growing, text = random.Random(number), text_under(constraint), bytearray()
        while allowed := growing.allowed():
            digits = [byte for byte in allowed if byte in b"0123456789"]
            ends = b'"' if len(text) > 30 and ord('"') in allowed else allowed
            text.append(dice.choice(digits if digits and len(text) < 30 else [*ends]))
            growing.accept(text[-1])
        reader.validate_json(bytes(text))


@pytest.mark.parametrize("year", [1999, 2000, 1900, 2024, 2023, 2100, 2400, 1204])
def test_the_29th_of_february_is_in_leap_years(year):
    constraint = compiled("schema", '{"type": "string", "format": "date"}')
    assert takes(constraint, f'"{year}-02-29"') == calendar.isleap(year)
    assert takes(constraint, f'"{year}-02-28"')
    assert takes(constraint, f'"{year}-12-31"')


def test_choices_and_patterns_compile_to_dfas():
    assert Dfa.from_bytes(compiled("choices", "", choices=("a", "ab", "é")).payload).matches("é".encode())
    dfa = Dfa.from_bytes(compiled("regex", r"^\d{4}-\d\d$").payload)
    assert dfa.matches(b"2024-05")
    assert not dfa.matches(b"2024-5")


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        (r".*a.{30}", "xa" + "é" * 30, "xb" + "é" * 30),
        (r"(\d{1,500}[a-c]){1,300}", "1a22b", "1a22"),
        (r"\p{Lu}\p{Ll}+/é", "Éa/é", "éa/é"),
    ],
)
def test_a_pattern_too_large_for_a_dfa_is_enforced_by_a_parser(pattern, good, bad):
    constraint = compiled("regex", pattern)
    assert constraint.form == "llguidance"
    assert takes(constraint, good)
    assert not takes(constraint, bad)


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        (r"\p{L}\/\p{L}", "é/é"),
        (r"\p{L}[\/.]\p{L}", "é/é"),
        (r"\p{L}[/.]\p{L}/", "é.é/"),
        (r"\p{L}\\/", "é\\/"),
        (r"\p{L}\\\/", "é\\/"),
        ("\\p{L}\n\\p{L}\r", "é\né\r"),
        ("\\p{L}\\\n", "é\n"),
    ],
)
def test_f37_slashes_and_line_breaks_of_a_pattern_for_a_parser_are_characters(pattern, text):
    assert takes(compiled("regex", pattern), text)
    tag = {"begin": "<a>", "kind": "regex", "source": pattern, "end": "</a>"}
    assert takes(compiled("tags", json.dumps([tag])), f"so <a>{text}</a>")


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        (r"(a)\1", "regex: back-references"),
        ("(", "regex: not a valid Python pattern"),
        (r"[^\s\S]", "no text matches"),
        (r"\p{Nothing}", "regex parse error: Unicode property not found"),
        (r"(?=b).*a.{30}", "regex: look-arounds, word boundaries"),
    ],
)
def test_a_pattern_that_cannot_be_kept_is_refused(pattern, words):
    with pytest.raises(BadArgument) as caught:
        compiled("regex", pattern)
    assert words in str(caught.value)


def test_grammars_in_both_notations():
    lark = compiled("grammar", 'start: "(" start ")" | NUMBER\nNUMBER: /[0-9]+/\n')
    gbnf = compiled("grammar", 'root ::= "(" root ")" | number # comment\nnumber ::= [0-9]+\n')
    for constraint in (lark, gbnf):
        assert constraint.form == "llguidance"
        assert takes(constraint, "((12))")
        assert not takes(constraint, "((12)")
    arrow = compiled("grammar", 'start: NAME "::=" /[0-9]/\nNAME: /[a-z]+/')
    assert takes(arrow, "x::=1")


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        ('expr ::= "a"', "needs a rule named root; found: ['expr']"),
        ("root ::= nothing", "grammar: Rule 'nothing' not found"),
        ("root ::= (", "grammar: "),
        ("start: a\na[temperature=0.5]: /b/", "grammar: temperature must be set on the gen"),
        ("start: a\na[capture, max_tokens=5]: /b*/", "grammar: max_tokens must be set on the gen"),
        ("start: nothing", 'grammar: at 1(8): unknown name: "nothing"'),
        ('start: "a', "grammar: 1(10): lexer error"),
        ("start: <|im_end|>", "grammar: at 1(8): unknown special token"),
        (r"start: /[^\x00-\U0010FFFF]/", "grammar: the grammar reaches a position where no token can follow"),
        (
            f"start: A\nA: /{'(.*a.{12})'}/ & /{'(.*b.{13})'}/ & ~/.*c.{{14}}/",
            "grammar: the grammar cannot be used: fuel",
        ),
        ('start: ""', "grammar: no text but the empty one"),
        (
            'start: %json {"not": {}, "x-guidance": {"lenient": true}}',
            'grammar: unsupported keywords: "not": check these in the program',
        ),
    ],
)
def test_a_grammar_that_cannot_be_kept_is_refused(grammar, words):
    with pytest.raises(BadArgument) as caught:
        compiled("grammar", grammar)
    assert words in str(caught.value)


def test_the_key_is_of_what_determines_the_result():
    keys = [
        compiled(kind, source, **more).key
        for kind, source, more in [
            ("regex", "a", {}),
            ("regex", "b", {}),
            ("grammar", 'start: "a"', {}),
            ("choices", "", {"choices": ("a", "b")}),
            ("choices", "", {"choices": ("ab",)}),
            ("schema", '{"type": "null"}', {}),
            ("schema", '{"type": "null"}', {"whitespace": "free"}),
        ]
    ]
    assert len(set(keys)) == len(keys)
    assert compiled("regex", "a", jump_forward=False).key == keys[0]
    assert all(len(key) == 64 for key in keys)


CHAIN = """
from agentflow.protocol.constraint import Constraint
from agentflow.engine.grammar.compiler.compile import compile_constraint
rules = "".join(f"r{n}: r{n + 1}\\n" for n in range(%d))
print(compile_constraint(Constraint("grammar", f'start: r0\\n{rules}r%d: "a"')).form)
"""


def test_a_grammar_that_overflows_a_stack_ends_the_process_that_compiles():
    """And no other: one that the engine's stack could just not take does not get that far."""
    ends = [run_python("-c", CHAIN % (length, length)) for length in (100, 5_000)]
    assert ends[0].stdout == "llguidance\n"
    assert ends[1].returncode < 0
    assert ends[1].stdout == ""
