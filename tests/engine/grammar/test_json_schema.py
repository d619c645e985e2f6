"""JSON schemas as regular expressions: they allow the valid values, and no others."""

import itertools
import json
import random

import jsonschema
import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from support.engine.pattern_strategies import walked
from support.engine.schema_strategies import schemas, valid_value, written

from agentflow.engine.grammar.dfa import Dfa, build_dfa
from agentflow.engine.grammar.json_schema import FREE_WHITESPACE_CHARS, schema_to_regex
from agentflow.engine.grammar.regex import Alternation

POLICIES = ("compact", "tight", "free")
STRING = {"type": "string"}
INTEGER = {"type": "integer"}


def machine(schema, whitespace="compact") -> Dfa:
    regex = schema_to_regex(schema, whitespace)
    assert regex is not None
    return build_dfa(regex)


@given(schemas, st.sampled_from(POLICIES), st.randoms(use_true_random=False))
def test_allowed_texts_are_valid_for_every_reader(schema, whitespace, dice):
    regex = schema_to_regex(schema, whitespace)
    assume(regex is not None)
    dfa = build_dfa(regex)
    for _ in range(5):
        text = walked(dfa, dice, max_bytes=60)
        value = json.loads(text)
        jsonschema.Draft202012Validator(schema).validate(value)
        assert msgspec.json.decode(text) == value


@given(schemas, st.sampled_from(POLICIES), st.randoms(use_true_random=False))
def test_valid_values_in_the_order_of_their_members_are_allowed(schema, whitespace, dice):
    regex = schema_to_regex(schema, whitespace)
    assume(regex is not None)
    dfa = build_dfa(regex)
    for _ in range(5):
        text = written(valid_value(schema, dice), whitespace, dice)
        assert dfa.matches(text.encode()), text


@given(schemas, st.randoms(use_true_random=False))
def test_a_text_that_was_changed_is_allowed_only_where_it_is_valid(schema, dice):
    regex = schema_to_regex(schema, "compact")
    assume(regex is not None)
    dfa = build_dfa(regex)
    for _ in range(5):
        text = written(valid_value(schema, dice), "compact", dice)
        at = dice.randint(0, len(text))
        text = text[:at] + dice.choice(["", *'0a"\\,{}[]- .e']) + text[at + dice.randint(0, 1) :]
        if dfa.matches(text.encode()):
            jsonschema.Draft202012Validator(schema).validate(json.loads(text))


@pytest.mark.parametrize("num_members", [1, 2, 3, 4])
def test_optional_members_are_left_out_with_their_commas(num_members):
    """The texts are all objects with some of the members, in order, and no others; all are tried."""
    names = "abcd"[:num_members]
    for required in itertools.chain.from_iterable(
        itertools.combinations(names, n) for n in range(num_members + 1)
    ):
        properties = {name: {"const": 1} for name in names}
        dfa = machine({"type": "object", "properties": properties, "required": list(required)}, "tight")
        kept = [
            [name for name, is_there in zip(names, present, strict=True) if is_there]
            for present in itertools.product([True, False], repeat=num_members)
        ]
        expected = {
            json.dumps(dict.fromkeys(some, 1), separators=(",", ":"))
            for some in kept
            if set(required) <= set(some)
        }
        assert set(all_texts(dfa)) == expected


def all_texts(dfa: Dfa) -> list[str]:
    """All texts of a DFA without loops."""
    found, growing = [], [(1, b"")]
    while growing:
        state, text = growing.pop()
        if dfa.accepting[state]:
            found.append(text.decode())
        row = dfa.transitions[state][dfa.class_of_byte]
        growing += [(int(row[byte]), text + bytes([byte])) for byte in range(256) if row[byte]]
    return found


@pytest.mark.parametrize(
    ("schema", "texts"),
    [
        ({"type": "integer", "minimum": 8, "exclusiveMaximum": 12}, ["8", "9", "10", "11"]),
        ({"enum": ["a", 1, None, {"b": [True]}]}, ['"a"', "1", "null", '{"b": [true]}']),
        ({"type": ["boolean", "null"]}, ["true", "false", "null"]),
        (
            {"type": "array", "items": {"const": 1}, "minItems": 1, "maxItems": 3},
            ["[1]", "[1, 1]", "[1, 1, 1]"],
        ),
        (
            {"type": "array", "prefixItems": [{"const": 1}, {"const": 2}], "items": False},
            ["[]", "[1]", "[1, 2]"],
        ),
        ({"type": "object", "additionalProperties": False}, ["{}"]),
        ({"$ref": "#/$defs/x~1y", "$defs": {"x/y": {"const": "%"}}}, ['"%"']),
        ({"allOf": [{"const": 1}], "title": "as pydantic writes a reference"}, ["1"]),
        ({"type": "integer", "enum": [1, 2], "default": 1}, ["1", "2"]),
    ],
)
def test_all_the_texts_of_small_schemas(schema, texts):
    assert sorted(all_texts(machine(schema))) == sorted(texts)


def test_strings_are_what_any_reader_takes():
    dfa = machine({"type": "string", "maxLength": 1})
    for text in (
        '""',
        '"é"',
        '"😀"',
        r'"\n"',
        r'"\u00e9"',
        r'"\ud83d\ude00"',
        r'"\/"',
        '"\x7f"',
        r'"\uDBFF\uDFFF"',
    ):
        assert dfa.matches(text.encode()), text
        assert len(json.loads(text)) <= 1
    for text in (
        '"ab"',
        '"\n"',
        r'"\ud83d"',
        r'"\ude00"',
        r'"\ud83d\n"',
        r'"\x41"',
        '"',
        r'"\"',
        r'"\u12"',
        '"\x1f"',
    ):
        assert not dfa.matches(text.encode()), text
    assert not dfa.matches(b'"\xff"')
    assert not dfa.matches(b'"\xed\xa0\x80"')  # half of a surrogate pair, as bytes


def test_numbers_are_what_64_bits_hold():
    whole, number = machine(INTEGER), machine({"type": "number"})
    for text in ("0", "7", "-12", "9" * 18, "-" + "9" * 18):
        assert whole.matches(text.encode())
        assert msgspec.json.decode(text, type=int) == int(text)
    for text in ("-0", "01", "1.0", "1e3", "9" * 19, "+1", ""):
        assert not whole.matches(text.encode())
    for text in ("0", "-0.5", "3.14", "9" * 15 + "." + "9" * 17):
        assert number.matches(text.encode())
    for text in ("1e999", ".5", "5.", "00.1", "9" * 16, "NaN", "Infinity"):
        assert not number.matches(text.encode())


def test_whitespace_is_the_policys():
    schema = {"type": "object", "properties": {"a": {"type": "array", "items": INTEGER}}, "required": ["a"]}
    compact, tight, free = '{"a": [1, 2]}', '{"a":[1,2]}', '{\n  "a" : [ 1 ,\t2 ]\r\n}'
    takes = {policy: machine(schema, policy) for policy in POLICIES}
    assert [takes["compact"].matches(text.encode()) for text in (compact, tight, free)] == [
        True,
        False,
        False,
    ]
    assert [takes["tight"].matches(text.encode()) for text in (compact, tight, free)] == [False, True, False]
    assert all(takes["free"].matches(text.encode()) for text in (compact, tight, free))
    most = " " * FREE_WHITESPACE_CHARS
    assert takes["free"].matches(f'{{{most}"a":[]}}'.encode())
    assert not takes["free"].matches(f'{{ {most}"a":[]}}'.encode())


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {},
        {"type": "object"},
        {"type": "array"},
        {"type": "object", "properties": {"a": INTEGER}, "additionalProperties": True},
        {"type": "object", "properties": {"a": INTEGER}, "required": ["b"]},
        {"type": "object", "properties": {"a": INTEGER}, "minProperties": 1},
        {"type": "string", "pattern": "^a"},
        {"type": "string", "format": "email"},
        {"type": "string", "format": "date", "maxLength": 10},
        {"type": "string", "maxLength": 10**6},
        {"type": "integer", "multipleOf": 3},
        {"type": "integer", "minimum": 7, "multipleOf": 2},
        {"type": "integer", "minimum": 3, "maximum": 2},
        {"type": "number", "minimum": 0.5, "maximum": 0.4},
        {"type": "array", "items": INTEGER, "uniqueItems": True},
        {"type": "array", "items": INTEGER, "minItems": 3, "maxItems": 2},
        {"type": "array", "prefixItems": [INTEGER], "items": False, "minItems": 2},
        {"type": "string", "minLength": 3, "maxLength": 2},
        {"enum": []},
        {"enum": [1, "a"], "type": "string"},
        {"const": 1, "minimum": 0},
        {"const": float("inf")},
        {"anyOf": []},
        {"anyOf": [STRING], "minLength": 3},
        {"allOf": [STRING, {"minLength": 3}]},
        {"oneOf": [STRING, INTEGER]},
        {"not": STRING},
        {"type": "string", "maxLenght": 3},
        {"type": "thing"},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}},
        {"$ref": "#/$defs/a", "$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}}}},
        {"$ref": "#/$defs/nothing"},
        {"$ref": "elsewhere.json"},
    ],
)
def test_schemas_that_are_not_regular_are_for_a_parser(schema):
    assert schema_to_regex(schema, "compact") is None


def test_a_schema_that_doubles_with_every_reference_is_for_a_parser():
    doubled = {"type": "array", "prefixItems": [{"$ref": "#/$defs/0"}, {"$ref": "#/$defs/0"}], "items": False}
    defs = {"0": INTEGER}
    for n in range(1, 31):
        defs[str(n)] = json.loads(json.dumps(doubled).replace("/0", f"/{n - 1}"))
    assert schema_to_regex({"$ref": "#/$defs/30", "$defs": defs}, "compact") is None


def test_a_schema_that_nests_for_ever_is_for_a_parser():
    schema = INTEGER
    for _ in range(5000):
        schema = {"type": "array", "items": schema}
    assert schema_to_regex(schema, "compact") is None


@pytest.mark.parametrize("required", [[], ["0"]], ids=["none required", "the first required"])
def test_many_members_are_for_a_parser(required):
    properties = {str(n): {"const": n} for n in range(5000)}
    schema = {"type": "object", "properties": properties, "required": required}
    assert schema_to_regex(schema, "compact") is None


@pytest.mark.parametrize("required", [[], ["0"], ["19"]])
def test_f39a_optional_members_stay_a_small_dfa(required):
    """The rest of the object is the same after any members."""
    properties = {str(n): {"type": "boolean"} for n in range(20)}
    dfa = machine({"type": "object", "properties": properties, "required": required})
    assert dfa.num_states < 30 * len(properties)
    assert dfa.matches(b'{"0": true, "7": false, "19": true}')
    assert not dfa.matches(b'{"7": false, "0": true, "19": true}')


def test_a_record_is_a_small_dfa():
    properties = {"name": STRING, "age": INTEGER, "tags": {"type": "array", "items": STRING}}
    regex = schema_to_regex(
        {"type": "object", "properties": properties, "required": list(properties)}, "compact"
    )
    assert regex not in (None, Alternation(()))
    dfa = build_dfa(regex)
    assert dfa.num_states < 200
    assert dfa.matches(b'{"name": "Ada", "age": 36, "tags": ["a", "b"]}')
    assert walked(dfa, random.Random(1), 40).startswith(b'{"name": "')
