"""Reads a JSON schema, rejects keywords that cannot be enforced, and makes the rest explicit.

The explicit schema is narrower, so that all generated text is valid under the original, and it means the same
to a DFA and to a parser: an object that declares members has no others, numbers are in the range that parsers
accept, and dates exist. Where any value is allowed, it refers to the added definition ``ANY_VALUE``, so that
numbers are bounded there, too. A recursive schema must have a finite value.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Iterator, Set
from typing import Any, Final

from llguidance import LLMatcher

from agentflow.engine.grammar.compiler.dead_ends import check_writable, drop_names_without_text
from agentflow.engine.grammar.json_scalars import MOST_INTEGER, MOST_NUMBER
from agentflow.engine.grammar.json_schema import IN_PLACE
from agentflow.errors import BadArgument
from agentflow.protocol.grammars.pattern_parts import rust_pattern
from agentflow.protocol.schemas.references import point_references
from agentflow.protocol.schemas.walk import (
    ANNOTATIONS,
    FORMATS,
    HOLD_A_LIST,
    HOLD_A_SCHEMA,
    HOLD_NAMED,
    KEYWORDS,
    PATTERN_OF_FORMAT,
    TYPES,
    SchemaPath,
    canonical_text,
    find_part,
    has_type,
    inner_with_paths,
    pointer_steps,
    resolved,
)

Schema = dict[str, Any]

_DEFINITIONS: Final = frozenset({"$defs", "definitions"})
_ANNOTATIONS_OF_VALUES: Final = ANNOTATIONS - {"$schema", *_DEFINITIONS}

ANY_VALUE: Final = "agentflow:any-value"
"""The definition's name and absolute URI: no ``$id`` around a reference changes its target."""


def define_any_value(root: Schema, subschemas: Iterable[Schema]) -> None:
    """Adds the definition ``ANY_VALUE`` to ``root``, and a reference to it in schemas without constraints.

    >>> define_any_value(schema := {"type": "array"}, [schema])
    >>> schema["items"]
    {'$ref': 'agentflow:any-value'}
    """
    for schema in list(subschemas):
        _replace_true(schema)
        types = schema.get("type")
        names = types if isinstance(types, list) else [types]
        if not set(schema) - ANNOTATIONS:
            schema["anyOf"] = [{"$ref": ANY_VALUE}]  # older drafts ignore $id next to $ref
        if "object" in names and "additionalProperties" not in schema:
            schema["additionalProperties"] = {"$ref": ANY_VALUE}
        if "array" in names and "items" not in schema and "additionalItems" not in schema:
            schema["items"] = {"$ref": ANY_VALUE}
    root.setdefault("definitions", {})[ANY_VALUE] = _any_value()


def _replace_true(schema: Schema) -> None:
    for key in HOLD_A_SCHEMA:
        if schema.get(key) is True:
            schema[key] = {"$ref": ANY_VALUE}
    for key in HOLD_A_LIST:
        if isinstance(listed := schema.get(key), list):
            schema[key] = [{"$ref": ANY_VALUE} if one is True else one for one in listed]
    for key in HOLD_NAMED:
        if isinstance(named := schema.get(key), dict):
            schema[key] = {name: {"$ref": ANY_VALUE} if one is True else one for name, one in named.items()}


def _any_value() -> Schema:
    again = {"$ref": ANY_VALUE}
    plain = [{"type": name} for name in ("string", "boolean", "null")]
    number = {"type": "number", "minimum": -MOST_NUMBER, "maximum": MOST_NUMBER}
    nested = [{"type": "array", "items": again}, {"type": "object", "additionalProperties": again}]
    # "id" is the older name of "$id" (draft 4), and means nothing in later drafts.
    return {"id": ANY_VALUE, "$id": ANY_VALUE, "anyOf": [*plain, number, *nested]}


_LITERAL: Final = frozenset({"const", "enum"})


def endless_references(root: Schema) -> set[str]:
    """Returns the references to schemas that no value can satisfy because each would contain another one like
    it; ``#`` is the root.

    >>> endless_references({"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"]})
    {'#'}

    Each pass finds the schemas that can be satisfied by values found before. Every other pass goes backwards,
    so that long chains of references need few passes.
    """
    targets = _targets(root)
    names = list(targets)
    endless = set(names)
    while True:
        num_before = len(endless)
        for name in names:
            if name in endless and _is_finite(targets[name], endless):
                endless.remove(name)
        if len(endless) == num_before:
            return endless
        names.reverse()


_LIMITS: Final = (
    ({"integer", "number"}, ("minimum", "maximum")),
    ({"string"}, ("minLength", "maxLength")),
    ({"array"}, ("minItems", "maxItems")),
    ({"object"}, ("minProperties", "maxProperties")),
)


def _is_above(schema: Schema, least: str, most: str) -> bool:
    """Whether the lower limit of a schema is above the upper one."""
    return _limit(schema, least, -math.inf) > _limit(schema, most, math.inf)


def _targets(root: Schema) -> dict[str, Any]:
    """Returns the targets of the references in the schema, and the root."""
    references = {schema["$ref"]: None for _, schema in subschemas_with_paths(root) if "$ref" in schema}
    return {
        reference: find_part(path, root)
        for reference in ("#", *references)
        if (path := pointer_steps(reference)) is not None
    }


def _is_finite(schema: Any, endless: Set[str]) -> bool:
    """Whether the schema has a value, given that references in ``endless`` have none. In doubt, True."""
    if not isinstance(schema, dict) or _LITERAL & schema.keys():
        return schema is not False and not (isinstance(schema, dict) and schema.get("enum") == [])
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference in endless:
        return False
    for key, wanted in (("anyOf", any), ("oneOf", any), ("allOf", all)):
        options = schema.get(key)
        if isinstance(options, list) and options and not wanted(_is_finite(one, endless) for one in options):
            return False
    types = schema.get("type")
    names = types if isinstance(types, list) else [types]
    if any({*names} <= kinds and _is_above(schema, *limits) for kinds, limits in _LIMITS):
        return False
    if names == ["object"]:
        members, required = schema.get("properties", {}), schema.get("required", [])
        return all(_is_finite(members.get(name), endless) for name in required)
    if names == ["array"]:
        first = schema.get("prefixItems", [])
        least = schema.get("minItems", 0)
        least = max(0, int(least)) if isinstance(least, int | float) else 0
        needed = [*first[:least], *([schema.get("items")] if least > len(first) else [])]
        return all(_is_finite(one, endless) for one in needed)
    return True


MOST_DEPTH: Final = 60

_LARGEST_LIMIT: Final = 10**300
"""The parser reads the limits of numbers as floats."""
_LARGEST_COUNT: Final = 10**9
"""No text has as many characters, items or members."""


def parse_schema(source: str) -> Schema:
    """Returns the schema of a JSON text, its references as pointers. Raises ``BadArgument`` if it is not the
    text of a schema."""
    try:
        schema = json.loads(source, parse_constant=_no_constant)
        source.encode()
        json.dumps(schema, ensure_ascii=False, allow_nan=False).encode()
    except RecursionError:
        raise BadArgument(f"schema: nests deeper than {MOST_DEPTH}") from None
    except ValueError as error:  # includes lone surrogates and 1e999
        raise BadArgument(f"schema: not valid JSON: {error}") from None
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise BadArgument(f"schema: must be an object that some value satisfies, not {source[:40]}")
    schema.pop("x-guidance", None)  # the library's options are not for users to set
    point_references(schema)
    return schema


def check_schema(schema: Schema, path: SchemaPath = ()) -> None:
    """Drops keywords without effect. Raises ``BadArgument``, with the path, for an invalid schema.
    ``path``: the path of ``schema``."""
    for where, sub in subschemas_with_paths(schema, path):
        _refuse_what_is_no_schema(sub, ".".join(where))
        _drop_what_says_nothing(sub)
        _bound_limits(sub, ".".join(where))


def explicit(schema: Schema) -> Schema:
    """Returns the explicit form of a schema that has passed ``check_schema`` and has only enforceable
    keywords. Raises ``BadArgument`` if no finite value satisfies it."""
    for path, sub in list(subschemas_with_paths(schema)):
        drop_names_without_text(sub)
        check_writable(sub, ".".join(path))
        _check_limits(sub, ".".join(path))
    subschemas = [sub for _, sub in subschemas_with_paths(schema)]
    endless = endless_references(schema)
    if "#" in endless and _is_finite(schema, frozenset()):  # otherwise, the parser says why
        raise BadArgument(
            "schema: no finite value satisfies it: each would contain another one like it; let the recursive "
            "member be null, or do not require it"
        )
    for sub in subschemas:
        if endless and sub.get("$ref") in endless:  # a model that began such a value could not end it
            sub.clear()
            sub["enum"] = []
    for sub in subschemas:
        if sub.get("uniqueItems") is True and (lists := unique_lists(sub, schema)) is not None:
            kept = {key: value for key, value in sub.items() if key in ANNOTATIONS}
            sub.clear()
            sub |= {**kept, "enum": lists}
    for sub in subschemas:
        if "$ref" in sub and "type" in sub and sub["type"] == resolved(sub, schema).get("type"):
            del sub["type"]  # the library refuses it if the reference is recursive
        _drop_wide_limits(sub)
    _replace_one_of(schema)
    is_flat = not any(_applies_in_place(sub) for sub in subschemas)
    is_joined = any({"properties", "patternProperties"} <= sub.keys() for sub in subschemas)
    for sub in subschemas:
        if is_flat and not is_joined:
            _name_types(sub)
        if is_flat:
            _close(sub)
        _bound_numbers(sub)
    if is_flat:
        define_any_value(schema, subschemas)
    return schema


def _replace_one_of(root: Schema) -> None:
    """Replaces each ``oneOf`` by an ``anyOf``, before its options become narrower and may only then exclude
    each other. Raises ``BadArgument``, with the path, if they are not known to."""
    left: list[tuple[SchemaPath, Schema]] = []
    for path, schema in subschemas_with_paths(root):
        if "oneOf" in schema and exclude_each_other(schema["oneOf"], root):
            allow_overlap(schema)
        elif "oneOf" in schema:
            left.append((path, schema))
    if left and _fault(root):
        definitions = {key: root[key] for key in _DEFINITIONS & root.keys()}
        places = [path for path, one in left if "oneOf" in _fault({**definitions, "oneOf": one["oneOf"]})]
        where = ".".join([*(places or [left[0][0]])[0], "oneOf"])
        raise BadArgument(
            f"schema: {where} is supported only if its options exclude each other by a type or a required "
            "constant"
        )
    for _, schema in left:
        allow_overlap(schema)


def _fault(schema: Schema) -> str:
    """The reason for which the parser refuses the schema. Empty if it does not."""
    return LLMatcher.validate_grammar(f"start: %json {json.dumps(for_llguidance(schema))}")


def allow_overlap(schema: Schema) -> None:
    """Replaces ``oneOf`` by the same options as an ``anyOf``."""
    options = schema.pop("oneOf")
    if "anyOf" in schema:
        schema["allOf"] = [*schema.get("allOf", []), {"anyOf": options}]
    else:
        schema["anyOf"] = options


def for_llguidance(schema: Schema) -> Schema:
    """Returns the schema in the form for llguidance: patterns replace the formats in ``PATTERN_OF_FORMAT``,
    Rust reads all patterns, narrow ranges do not begin at an open limit, and limits are floats."""
    narrower: Schema = json.loads(json.dumps(schema))
    subschemas = [sub for _, sub in subschemas_with_paths(narrower)]
    # Two patterns of names may become equal, so that both their schemas apply.
    is_flat = not any(
        _applies_in_place(sub) or len(sub.get("patternProperties", ())) > 1 for sub in subschemas
    )
    for sub in subschemas:
        for key in _ANNOTATIONS_OF_VALUES & sub.keys() - {"$id"}:
            del sub[key]
        patterns = [rust_pattern(sub.pop("pattern"))] if isinstance(sub.get("pattern"), str) else []
        if isinstance(name := sub.get("format"), str) and name in PATTERN_OF_FORMAT:
            del sub["format"]
            patterns.append(f"^(?:{PATTERN_OF_FORMAT[name]})$")
        if patterns:
            sub["pattern"] = patterns.pop()
        if patterns:
            sub["allOf"] = [*sub.get("allOf", []), {"pattern": patterns.pop()}]
        if isinstance(named := sub.get("patternProperties"), dict):
            is_closed = sub.get("additionalProperties") is False
            sub["patternProperties"] = _for_rust(named, is_ecmascript=not is_closed)
        _close_open_limits(sub, is_flat=is_flat)
        _move_to_floats(sub)
    return narrower


def _for_rust(named: Schema, *, is_ecmascript: bool) -> Schema:
    """Returns ``patternProperties`` whose patterns Rust reads. Some patterns may become equal."""
    found: Schema = {}
    for pattern, schema in named.items():
        written = rust_pattern(pattern, is_ecmascript=is_ecmascript)
        found[written] = {"allOf": [found[written], schema]} if written in found else schema
    return found


MOST_ALTERNATIVES: Final = 1_050
"""The most members and options at one place: 1,000 optional members, and the other parts of their objects."""

_UNITS_OF_CONTAINER: Final = 2


def num_alternatives(root: Schema) -> int:
    """Returns the most members and options among which the parser chooses at one place of the explicit
    schema. Raises ``BadArgument``, with the path, if there are more than a step of the parser can process.

    >>> num_alternatives({"type": "object", "properties": {"a": {}, "b": {}, "c": {}}, "required": ["c"]})
    5
    """
    known: dict[int, int] = {}
    most = 0
    for path, schema in subschemas_with_paths(root):
        count = _alternatives(schema, root, known)
        if count > MOST_ALTERNATIVES:
            where = f"{'.'.join(path)}: " if path else ""
            raise BadArgument(
                f"schema: {where}allows {count:,} members or options at one place, more than "
                f"{MOST_ALTERNATIVES:,}: require some of the members, or group them in objects"
            )
        most = max(most, count)
    return most


def _alternatives(schema: Any, root: Schema, known: dict[int, int]) -> int:
    """Counts the alternatives of one schema. ``known``: the counts by the identity of a schema; 0 for schemas
    that are being counted."""
    if not isinstance(schema, dict):
        return 1
    if id(schema) in known:
        return known[id(schema)]
    known[id(schema)] = 0
    target = resolved(schema, root)
    count = _alternatives(target, root, known) if target is not schema else 0
    for key in ("anyOf", "oneOf", "allOf"):
        count += sum([_alternatives(one, root, known) for one in schema.get(key, [])])
    count += sum([isinstance(value, dict | list) for value in schema.get("enum", [])])
    required = {*schema.get("required", [])}
    longest = run = 0
    for name in schema.get("properties", {}):
        run += 1  # the required member that ends a run is an alternative, too
        longest = max(longest, run)
        run = 0 if name in required else run
    known[id(schema)] = count = count + longest + _UNITS_OF_CONTAINER
    return count


_NEAREST: Final = 1e-12
_LARGEST_EXACT: Final = 2**53
_LARGEST_MOVED: Final = 10**6
"""Beyond it, a limit would be moved by more than 1e-6 although the range may be wide."""


def _close_open_limits(schema: Schema, *, is_flat: bool) -> None:
    """Moves the open integer limit of a range narrower than 1 into the range, and closes it. llguidance 1.9
    would allow the limit itself, such as 0 between the open limits 0 and 0.5. Without ``is_flat``, another
    schema may narrow the range."""
    types = _types(schema)
    if types and "number" not in types:
        return
    for key, opposite, sign in (("minimum", "maximum", 1), ("maximum", "minimum", -1)):
        limit = schema.get(_open(key))
        if not isinstance(limit, int | float) or limit != int(limit):
            continue
        step = _NEAREST * max(1, abs(limit))
        others = [schema[name] for name in (opposite, _open(opposite)) if name in schema]
        is_narrow = any(
            2 * step < sign * (other - limit) < 1 for other in others if isinstance(other, int | float)
        )
        if is_narrow or not (is_flat or abs(limit) > _LARGEST_MOVED):
            _close_limit(schema, key, sign, limit + sign * step)


def _move_to_floats(schema: Schema) -> None:
    """Moves large limits into the range, to the nearest float: the parser reads limits as floats."""
    for key, sign in (("minimum", 1), ("maximum", -1)):
        for name in (key, _open(key)):
            limit = schema.get(name)
            if not isinstance(limit, int) or abs(limit) < _LARGEST_EXACT:
                continue
            near = float(limit)
            if sign * near < sign * limit or (near == limit and name != key):
                near = math.nextafter(near, sign * math.inf)
            if name == key:
                schema[key] = int(near)
            else:
                _close_limit(schema, key, sign, int(near))


def _close_limit(schema: Schema, key: str, sign: int, limit: float) -> None:
    """Replaces an open limit by a closed one, or by the stricter one that the schema has."""
    del schema[_open(key)]
    schema[key] = max(limit, _limit(schema, key, limit), key=lambda one: sign * one)


def _open(key: str) -> str:
    return "exclusive" + key.capitalize()


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def subschemas_with_paths(schema: Any, path: SchemaPath = ()) -> Iterator[tuple[SchemaPath, Schema]]:
    """Yields the schema, which is at ``path``, and all schemas inside it, each with its path. Raises
    ``BadArgument`` if they nest too deep."""
    pending: list[tuple[Any, SchemaPath, int]] = [(schema, path, 0)]
    while pending:
        schema, path, depth = pending.pop()
        if not isinstance(schema, dict):
            continue
        if depth > MOST_DEPTH:
            raise BadArgument(f"schema: nests deeper than {MOST_DEPTH}")
        yield path, schema
        pending += reversed([(one, (*path, *keys), depth + 1) for keys, one in inner_with_paths(schema)])


def _applies_in_place(schema: Schema) -> bool:
    """Whether another schema constrains the same value, so that neither can be closed alone."""
    said = schema.keys() - ANNOTATIONS - {"id"}
    joins_many = isinstance(schema.get("allOf"), list) and len(schema["allOf"]) > 1
    return joins_many or (bool(said & IN_PLACE) and len(said) > 1)


def _drop_what_says_nothing(schema: Schema) -> None:
    # The library knows few annotations, and takes the others for keywords that restrict a reference.
    says_nothing = _ANNOTATIONS_OF_VALUES if "$ref" in schema else frozenset()
    for key in [key for key in schema if key not in KEYWORDS or key in says_nothing]:
        del schema[key]
    if schema.get("propertyNames") in ({}, {"type": "string"}, True):
        del schema["propertyNames"]
    if isinstance(name := schema.get("format"), str) and name not in FORMATS:
        del schema["format"]  # an annotation, as in JSON schema
    if "contains" not in schema:
        schema.pop("minContains", None)
        schema.pop("maxContains", None)
    if "if" not in schema:
        schema.pop("then", None)
        schema.pop("else", None)
    elif "then" not in schema and "else" not in schema:
        del schema["if"]
    # If no other schema evaluates members or items, these mean the same as the plain keywords.
    if not IN_PLACE & set(schema):
        for key, plain in (("unevaluatedProperties", "additionalProperties"), ("unevaluatedItems", "items")):
            if key in schema and plain not in schema and "contains" not in schema:
                schema[plain] = schema.pop(key)
    for key, value in (("uniqueItems", False), ("unevaluatedProperties", True), ("unevaluatedItems", True)):
        if schema.get(key) is value:
            del schema[key]
    for key, value in list(schema.items()):
        if key.startswith(("min", "max", "exclusive")) and isinstance(value, float) and value == int(value):
            schema[key] = int(value)


def _bound_limits(schema: Schema, path: str) -> None:
    """Replaces a limit by the largest one that its readers accept. Raises ``BadArgument``, with the path, if
    that would allow more values."""
    for key, limit in list(schema.items()):
        is_most = "max" in key.lower()
        if not isinstance(limit, int) or not (is_most or "min" in key.lower() or key == "multipleOf"):
            continue
        largest = _LARGEST_LIMIT if key[-1] in "mf" else _LARGEST_COUNT  # maximum, multipleOf; maxItems
        if abs(limit) <= largest:
            continue
        if key == "multipleOf" or is_most != (limit > 0):
            raise BadArgument(f"schema: {f'{path}: ' if path else ''}{key} is too large")
        schema[key] = largest if is_most else -largest


def drop_unused_definitions(root: Schema) -> None:
    """Drops the definitions to which no other schema refers: they need not be enforceable."""
    used: set[int] = set()
    pending: list[Any] = [root]
    while pending:
        part = pending.pop()
        if isinstance(part, dict) and id(part) not in used:
            used.add(id(part))
            pending += [one for (key, *_), one in inner_with_paths(part) if key not in _DEFINITIONS]
            if (path := pointer_steps(part.get("$ref"))) is not None:
                pending.append(find_part(path, root))
    for keyword in _DEFINITIONS & root.keys():
        root[keyword] = {
            name: one
            for name, one in root[keyword].items()
            if one is True or one is False or any(id(part) in used for _, part in subschemas_with_paths(one))
        }


def _refuse_what_is_no_schema(schema: Schema, path: str) -> None:
    def fault(key: str, what: str) -> BadArgument:
        return BadArgument(f"schema: {f'{path}: ' if path else ''}{key} must be {what}")

    for key, value in schema.items():
        names = value if isinstance(value, list) else [value] if key == "type" else None
        if key in ("type", "required") and (
            names is None or not all(isinstance(name, str) for name in names)
        ):
            raise fault(key, "a list of names")
        if key == "type" and names is not None and not {*names} <= {*TYPES}:
            wrong = next(name for name in names if name not in TYPES)
            raise fault(key, f"one of {', '.join(TYPES)}, or a list of these, not {wrong[:100]!r}")
        if key in HOLD_NAMED and not isinstance(value, dict):
            raise fault(key, "an object of schemas")
        if key in ("anyOf", "oneOf", "allOf", "prefixItems", "enum") and not isinstance(value, list):
            raise fault(key, "a list")
        if key == "$ref" and not isinstance(value, str):
            raise fault(key, "a string")


def least_members(schema: Schema) -> int | None:
    """Returns the largest enforceable ``minProperties``, if the schema has a larger one, else None. Two
    members may have the same name, and a JSON parser then keeps one of them."""
    least = schema.get("minProperties")
    is_closed = schema.get("additionalProperties") is False and "patternProperties" not in schema
    most = max(1, len(set(schema.get("required", []))))
    return most if isinstance(least, int) and least > most and not is_closed else None


MOST_UNIQUE_LISTS: Final = 500
_KEYS_OF_UNIQUE: Final = ANNOTATIONS | {"type", "items", "uniqueItems", "minItems", "maxItems"}
_MOST_UNIQUE_VALUES: Final = 32


def unique_lists(schema: Schema, root: Schema) -> list[Any] | None:
    """Returns all lists under a schema with ``uniqueItems``. None if there are too many, or they are unknown.

    >>> unique_lists({"type": "array", "items": {"type": "boolean"}, "uniqueItems": True}, {})
    [[], [False], [True], [False, True], [True, False]]
    """
    if set(schema) - _KEYS_OF_UNIQUE or schema.get("type") != "array":
        return None
    values = _find_values(schema.get("items"), root)
    least, most = schema.get("minItems", 0), schema.get("maxItems", _MOST_UNIQUE_VALUES)
    if values is None or not isinstance(least, int) or not isinstance(most, int):
        return None
    most = min(most, len(values))
    if sum([math.perm(len(values), length) for length in range(least, most + 1)]) > MOST_UNIQUE_LISTS:
        return None
    lengths = range(max(least, 0), most + 1)
    return [[*some] for length in lengths for some in itertools.permutations(values, length)] or None


def _find_values(schema: Any, root: Schema) -> list[Any] | None:
    """Returns the different values of a schema; None if there are many."""
    found = resolved(schema, root)
    keywords = set(found) - ANNOTATIONS
    if found is not schema and isinstance(schema, dict) and set(schema) - ANNOTATIONS != {"$ref"}:
        return None
    if keywords <= {"const", "type"} and "const" in keywords:
        values = [found["const"]]
    elif keywords <= {"enum", "type"} and "enum" in keywords:
        values = found["enum"]
    elif keywords == {"type"} and found["type"] in ("boolean", "null"):
        values = [False, True] if found["type"] == "boolean" else [None]
    else:
        return None
    if "type" in keywords and not all(has_type(value, found["type"]) for value in values):
        return None
    different: dict[str, Any] = {}
    for value in values:
        different.setdefault(canonical_text(value), value)
    return [*different.values()] if len(different) <= _MOST_UNIQUE_VALUES else None


def _largest_number(schema: Schema) -> int | None:
    """Returns the largest number that is generated for a schema. None if it is not for numbers of a range."""
    if _LITERAL & schema.keys():
        return None
    names = _types(schema)
    return MOST_NUMBER if "number" in names else MOST_INTEGER if "integer" in names else None


_SIGN_OF_LIMIT: Final = {"minimum": -1, "exclusiveMinimum": -1, "maximum": 1, "exclusiveMaximum": 1}


def _check_limits(schema: Schema, path: str) -> None:
    """Raises ``BadArgument``, with the path, if a limit excludes all numbers that are generated."""
    if (most := _largest_number(schema)) is None:
        return
    for key, sign in _SIGN_OF_LIMIT.items():
        is_inside = most == MOST_INTEGER and key in ("minimum", "maximum")
        if isinstance(limit := schema.get(key), int | float) and -sign * limit >= most + is_inside:
            where = f"{path}: " if path else ""
            raise BadArgument(
                f"schema: {where}{key} allows no number of those that are generated, up to {most:,}"
            )


def _drop_wide_limits(schema: Schema) -> None:
    """Drops limits beyond all numbers that are generated: the parser would refuse them."""
    if (most := _largest_number(schema)) is None:
        return
    for key, sign in _SIGN_OF_LIMIT.items():
        if isinstance(limit := schema.get(key), int | float) and sign * limit > most:
            del schema[key]


def _name_types(schema: Schema) -> None:
    """Adds all types to a schema without a type, so that numbers in it are bounded."""
    keywords = schema.keys() - ANNOTATIONS
    if keywords and keywords.isdisjoint({"type", *_LITERAL, *IN_PLACE}):
        schema["type"] = [name for name in TYPES if name != "integer"]


def _bound_numbers(schema: Schema) -> None:
    if (most := _largest_number(schema)) is None:
        return
    for key, opposite, sign in (("minimum", "maximum", -1), ("maximum", "minimum", 1)):
        has_limit = key in schema or "exclusive" + key.capitalize() in schema
        if not has_limit and sign * _limit(schema, opposite, 0) < most:
            schema[key] = sign * most


def _limit(schema: Schema, key: str, otherwise: float) -> float:
    value = schema.get(key, schema.get("exclusive" + key.capitalize(), otherwise))
    return value if isinstance(value, int | float) else otherwise


def _close(schema: Schema) -> None:
    """Makes declared members the only ones, unless the schema mentions others."""
    properties = schema.get("properties")
    speaks_of_others = {"additionalProperties", "patternProperties", "minProperties"} & set(schema)
    if properties and not speaks_of_others and set(schema.get("required", [])) <= set(properties):
        schema["additionalProperties"] = False


def exclude_each_other(options: Any, root: Any) -> bool:
    """Whether no value is valid under two of the options. Considers their types, their literal values, and
    the literal values of a member that both require."""
    if not isinstance(options, list):
        return False
    targets = [resolved(option, root) for option in options]
    pairs = ((a, b) for n, a in enumerate(targets) for b in targets[:n])
    return all(_are_apart(a, b, root) for a, b in pairs)


def _are_apart(a: Schema, b: Schema, root: Any) -> bool:
    values_a, values_b = _literal_values(a), _literal_values(b)
    if values_a is not None and values_b is not None:
        return values_a.isdisjoint(values_b)
    types_a, types_b = _types(a), _types(b)
    if types_a and types_b and types_a.isdisjoint(types_b):
        return True
    if types_a != {"object"} or types_b != {"object"}:
        return False
    both = set(a.get("required", [])) & set(b.get("required", []))
    members_a, members_b = a.get("properties", {}), b.get("properties", {})
    for name in both & set(members_a) & set(members_b):
        one = _literal_values(resolved(members_a[name], root))
        other = _literal_values(resolved(members_b[name], root))
        if one is not None and other is not None and one.isdisjoint(other):
            return True
    return False


def _literal_values(schema: Schema) -> set[str] | None:
    """Returns the literal values as JSON; None if there are others than strings and null: JSON does not
    distinguish 1 from 1.0."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list) or not all(value is None or isinstance(value, str) for value in values):
        return None
    return {json.dumps(value) for value in values}


def _types(schema: Schema) -> set[str]:
    types = schema.get("type", [])
    names = set(types) if isinstance(types, list) else {str(types)}
    return names | {"integer"} if "number" in names else names
