"""Random JSON schemas that are regular, and values that are valid under them, made without a DFA."""

import json
import random
from typing import Any

from hypothesis import strategies as st

Schema = dict[str, Any]

NAMES = ["a", "b", 'say "so"', "back\\slash", "größe", "", "😀", "line\nbreak", "$ref", "type"]
CHARS = 'ab"\\/\n\t é€😀\x7f\u2028'
LITERALS = [
    None,
    True,
    False,
    0,
    -7,
    10**17,
    1.5,
    "",
    "yes",
    'a"b\\c\n',
    "é😀",
    [],
    {},
    [1, ["x"]],
    {"k": {"l": None}},
]


def _with_count(schema: Schema, name: str, least: int, more: int | None) -> Schema:
    counts = {f"min{name}": least} if least else {}
    return schema | counts | ({} if more is None else {f"max{name}": least + more})


_optional_count = st.one_of(st.none(), st.integers(0, 3))
_strings = st.builds(
    _with_count, st.just({"type": "string"}), st.just("Length"), st.integers(0, 2), _optional_count
)
_integers = st.one_of(
    st.just({"type": "integer"}),
    st.sampled_from([{"type": "integer", "minimum": 0}, {"type": "integer", "exclusiveMinimum": 0}]),
    st.builds(
        lambda least, width: {"type": "integer", "minimum": least, "maximum": least + width},
        st.integers(-20, 20),
        st.integers(0, 30),
    ),
)
_numbers = st.sampled_from(
    [
        {"type": "number"},
        {"type": "number", "minimum": 0},
        {"type": "number", "minimum": 0, "maximum": 1},
        {"type": "number", "minimum": -2.5, "maximum": 99},
    ]
)
_leaves = st.one_of(
    _strings,
    _integers,
    _numbers,
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.just({"type": ["integer", "null", "string"]}),
    st.builds(lambda value: {"const": value}, st.sampled_from(LITERALS)),
    st.builds(lambda values: {"enum": values}, st.lists(st.sampled_from(LITERALS), min_size=1, max_size=3)),
)


def _object(members: dict[str, Schema], required: list[str], closed: bool) -> Schema:
    schema: Schema = {"type": "object", "properties": members, "title": "ignored"}
    names = [name for name in required if name in members]
    return (
        schema | ({"required": names} if names else {}) | ({"additionalProperties": False} if closed else {})
    )


def _grown(inner: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    names = st.sampled_from(NAMES)
    lists = st.builds(lambda items: {"type": "array", "items": items}, inner)
    return st.one_of(
        st.builds(
            _object,
            st.dictionaries(names, inner, min_size=1, max_size=4),
            st.lists(names, unique=True),
            st.booleans(),
        ),
        st.builds(_with_count, lists, st.just("Items"), st.integers(0, 2), _optional_count),
        st.builds(
            lambda first, rest: {"type": "array", "prefixItems": first, "items": rest},
            st.lists(inner, min_size=1, max_size=3),
            st.one_of(st.just(False), inner),
        ),
        st.builds(lambda options: {"anyOf": options}, st.lists(inner, min_size=1, max_size=3)),
    )


schemas = st.recursive(_leaves, _grown, max_leaves=6)
"""Strategy of schemas, of which ``schema_to_regex`` is to take all but the largest."""


def valid_value(schema: Schema, dice: random.Random) -> Any:
    """A value that the schema must allow: members in their order, no others."""
    if "anyOf" in schema:
        return valid_value(dice.choice(schema["anyOf"]), dice)
    if "enum" in schema:
        return dice.choice(schema["enum"])
    if "const" in schema:
        return schema["const"]
    types = schema["type"]
    kind = dice.choice(types) if isinstance(types, list) else types
    if kind == "object":
        required = schema.get("required", [])
        kept = [name for name in schema["properties"] if name in required or dice.random() < 0.6]
        return {name: valid_value(schema["properties"][name], dice) for name in kept}
    if kind == "array":
        return _valid_list(schema, dice)
    if kind == "string":
        least = schema.get("minLength", 0)
        length = dice.randint(least, schema.get("maxLength", least + 4))
        return "".join([dice.choice(CHARS) for _ in range(length)])
    if kind == "integer":
        least = schema.get("minimum", schema.get("exclusiveMinimum", -(10**18)) + 1)
        return dice.randint(least, schema.get("maximum", 10**18 - 1))
    if kind == "number":
        least, most = schema.get("minimum", -(10**6)), schema.get("maximum", 10**6)
        some = round(dice.uniform(least, most), 3) + 0.0  # no minus zero
        return some if dice.random() < 0.7 else dice.choice([least, most])
    return {"boolean": dice.random() < 0.5, "null": None}[kind]


def _valid_list(schema: Schema, dice: random.Random) -> list[Any]:
    first = schema.get("prefixItems", [])
    least = schema.get("minItems", 0)
    most = schema.get("maxItems", max(least, len(first)) + 2)
    length = dice.randint(least, most)
    items = [*first[:length], *[schema["items"]] * (length - len(first))]
    return [valid_value(item, dice) for item in items if item is not False]


def written(value: Any, whitespace: str, dice: random.Random) -> str:
    """The value's JSON as a policy has it; ``free``: with whitespace as it comes."""
    if whitespace != "free":
        separators = (", ", ": ") if whitespace == "compact" else (",", ":")
        return json.dumps(value, separators=separators, ensure_ascii=False)
    return json.dumps(value, indent=dice.choice([0, 1, 3, "\t"]), ensure_ascii=False)
