"""Converts a JSON schema to one regular expression, if it is regular and small.

``schema_to_regex`` joins the expressions of ``json_scalars``. Text generated from the result is always valid
under the schema, but not all valid text can be generated: members come in the order of ``properties``, and
there are no others unless the schema asks for them. A schema that is not regular is left to llguidance
(None).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from agentflow.engine.grammar.json_scalars import (
    BOOLEAN,
    MOST_INTEGER,
    NULL,
    integer,
    number,
    string,
    text_of_format,
)
from agentflow.engine.grammar.regex import EMPTY, Alternation, CharSet, Concatenation, Regex, Repeat, literal
from agentflow.protocol.constraint import Whitespace
from agentflow.protocol.schemas.walk import (
    ALL_TYPED,
    ANNOTATIONS,
    KEYWORDS_OF_TYPE,
    find_part,
    has_type,
    pointer_steps,
)

FREE_WHITESPACE_CHARS: Final = 16
"""The limit at one place, so that a model cannot generate whitespace forever."""


@dataclass(frozen=True, slots=True)
class Spaces:
    """The whitespace inside brackets, around commas and around colons."""

    inside: Regex
    comma: Regex
    colon: Regex

    def enclosed(self, opening: str, members: Regex, closing: str) -> Regex:
        """Returns a non-empty list of members in its brackets."""
        return Concatenation((literal(opening), self.inside, members, self.inside, literal(closing)))

    def empty(self, opening: str, closing: str) -> Regex:
        """Returns empty brackets."""
        return Concatenation((literal(opening), self.inside, literal(closing)))

    def listed(self, members: list[Regex]) -> Regex:
        """Returns the members, separated by commas."""
        parts: list[Regex] = []
        for member in members:
            parts += [self.comma, member] if parts else [member]
        return Concatenation(tuple(parts))

    def member(self, name: str, value: Regex) -> Regex:
        """Returns a member of an object."""
        return Concatenation((literal(json.dumps(name, ensure_ascii=False)), self.colon, value))


def layout(whitespace: Whitespace) -> Spaces:
    """Returns the layout of a whitespace policy."""
    if whitespace == "free":
        space = CharSet(((0x09, 0x0A), (0x0D, 0x0D), (0x20, 0x20)))
        any_space = Repeat(space, 0, FREE_WHITESPACE_CHARS)
        return Spaces(
            any_space,
            Concatenation((any_space, literal(","), any_space)),
            Concatenation((any_space, literal(":"), any_space)),
        )
    gap = " " if whitespace == "compact" else ""
    return Spaces(EMPTY, literal("," + gap), literal(":" + gap))


def exactly(value: object, spaces: Spaces) -> Regex | None:
    """Returns the text of the value that a ``const`` requires. None if JSON cannot represent it."""
    if isinstance(value, dict):
        members = {str(name): exactly(member, spaces) for name, member in value.items()}
        if not members:
            return spaces.empty("{", "}")
        named = [spaces.member(name, part) for name, part in members.items() if part is not None]
        return spaces.enclosed("{", spaces.listed(named), "}") if len(named) == len(members) else None
    if isinstance(value, list):
        if not value:
            return spaces.empty("[", "]")
        parts = [part for member in value if (part := exactly(member, spaces)) is not None]
        return spaces.enclosed("[", spaces.listed(parts), "]") if len(parts) == len(value) else None
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return literal(json.dumps(value, ensure_ascii=False))


IN_PLACE: Final = frozenset(["anyOf", "allOf", "oneOf", "$ref", "if", "not", "dependentSchemas"])
"""Keywords that apply further schemas to the same value."""


MOST_POSITIONS: Final = 6_000
"""The size limit of an expression: the number of its character positions, repeats written out."""

MOST_DEPTH: Final = 40

JsonObject: TypeAlias = Mapping[str, Any]


class _NotRegular(Exception):
    """The schema must be left to llguidance."""


def schema_to_regex(schema: object, whitespace: Whitespace) -> Regex | None:
    """Returns the texts of values that are valid under ``schema``, whose references are pointers. None if
    they are not a regular language, the expression is too large, or a keyword is not supported here.

    >>> schema_to_regex({"type": "array", "items": {"type": "boolean"}, "maxItems": 2}, "compact")
    Alternation(...)  # [], [true], [false], [true, true], ...
    """
    try:
        regex = _SchemaReader(schema, whitespace).regex(schema)
    except _NotRegular:
        return None
    return regex if num_positions(regex) <= MOST_POSITIONS else None


class _SchemaReader:
    def __init__(self, root: object, whitespace: Whitespace) -> None:
        self._root = root
        self._layout = layout(whitespace)
        self._of_reference: dict[str, Regex] = {}
        self._open: list[str] = []
        self._depth = 0
        self._of_type: dict[str, Callable[[JsonObject], Regex]] = {
            "object": self._object,
            "array": self._array,
            "string": self._string,
            "integer": self._integer,
            "number": self._number,
            "boolean": lambda _: BOOLEAN,
            "null": lambda _: NULL,
        }

    def regex(self, schema: object) -> Regex:
        """Returns the expression of a schema at any depth."""
        if not isinstance(schema, dict) or self._depth >= MOST_DEPTH:
            raise _NotRegular  # ``true`` allows any value, and values nest
        self._depth += 1
        constraining = {key: value for key, value in schema.items() if key not in ANNOTATIONS}
        regex = self._constrained(constraining)
        self._depth -= 1
        return regex

    def _constrained(self, schema: JsonObject) -> Regex:
        for key, apply in (("$ref", self._reference), ("anyOf", self._alternatives), ("allOf", self._all_of)):
            if key in schema:
                if len(schema) > 1:
                    raise _NotRegular
                return apply(schema[key])
        if "const" in schema or "enum" in schema:
            return self._values(schema)
        types = schema.get("type")
        names = [types] if isinstance(types, str) else types
        if not isinstance(names, list) or not names or not all(name in self._of_type for name in names):
            raise _NotRegular
        if "number" in names and "integer" in names:
            names = [name for name in names if name != "integer"]
        return _union([self._typed(name, schema) for name in names])

    def _typed(self, name: str, schema: JsonObject) -> Regex:
        said = {key for key in schema if key != "type"}
        if said - ALL_TYPED:
            raise _NotRegular
        return self._of_type[name]({key: schema[key] for key in said & KEYWORDS_OF_TYPE[name]})

    def _values(self, schema: JsonObject) -> Regex:
        """Returns the values of ``const`` and ``enum``, which may only be combined with a matching
        ``type``."""
        if set(schema) - {"const", "enum", "type"} or {"const", "enum"} <= set(schema):
            raise _NotRegular
        values = schema["enum"] if "enum" in schema else [schema["const"]]
        if not isinstance(values, list) or not values:
            raise _NotRegular
        if "type" in schema and not all(has_type(value, schema["type"]) for value in values):
            raise _NotRegular
        found = [exactly(value, self._layout) for value in values]
        return _union([_needed(regex) for regex in found])

    def _reference(self, reference: object) -> Regex:
        path = pointer_steps(reference)
        if not isinstance(reference, str) or not path or reference in self._open:
            raise _NotRegular
        if reference not in self._of_reference:
            self._open.append(reference)
            self._of_reference[reference] = self.regex(find_part(path, self._root))
            self._open.pop()
        return self._of_reference[reference]

    def _alternatives(self, options: object) -> Regex:
        if not isinstance(options, list) or not options:
            raise _NotRegular
        return _union([self.regex(option) for option in options])

    def _all_of(self, schemas: object) -> Regex:
        if not isinstance(schemas, list) or len(schemas) != 1:
            raise _NotRegular
        return self.regex(schemas[0])

    def _object(self, said: JsonObject) -> Regex:
        properties = said.get("properties", {})
        required = said.get("required", [])
        if set(said) - {"properties", "required", "additionalProperties"} or not isinstance(properties, dict):
            raise _NotRegular
        closed = said.get("additionalProperties", not properties) is False
        if not closed:
            raise _NotRegular
        if not isinstance(required, list) or not set(required) <= set(properties):
            raise _NotRegular
        if not properties:
            return self._layout.empty("{", "}")
        members = [
            (self._layout.member(name, self.regex(value)), name in required)
            for name, value in properties.items()
        ]
        all_there = self._layout.enclosed("{", _members(members, self._layout.comma), "}")
        return all_there if required else Alternation((self._layout.empty("{", "}"), all_there))

    def _array(self, said: JsonObject) -> Regex:
        if set(said) - {"items", "prefixItems", "minItems", "maxItems"}:
            raise _NotRegular
        first = said.get("prefixItems", [])
        least, most = _count(said, "minItems"), _limit(said, "maxItems")
        if not isinstance(first, list) or (most is not None and most < (least or 0)):
            raise _NotRegular
        if said.get("items") is False:
            most = len(first) if most is None else min(most, len(first))
        heads = [self.regex(item) for item in first[:most]]
        has_rest = most is None or most > len(heads)
        rest = self.regex(said.get("items", True)) if has_rest else EMPTY
        if least > len(heads) and not has_rest:
            raise _NotRegular
        comma, lists = self._layout.comma, []
        for length in range(max(least, 1), len(heads) + 1):
            lists.append(self._layout.listed(heads[:length]))
        if has_rest:
            fewest = max(least, len(heads) + 1) - len(heads)
            most_rest = None if most is None else most - len(heads) - 1
            tail = EMPTY if most_rest == 0 else Repeat(Concatenation((comma, rest)), fewest - 1, most_rest)
            lists.append(Concatenation((self._layout.listed([*heads, rest]), tail)))
        found = [self._layout.enclosed("[", members, "]") for members in lists]
        return _union([self._layout.empty("[", "]"), *found] if least == 0 else found)

    def _string(self, said: JsonObject) -> Regex:
        if set(said) == {"format"} and isinstance(said["format"], str):
            return _needed(text_of_format(said["format"]))
        if set(said) - {"minLength", "maxLength"}:
            raise _NotRegular
        least, most = _count(said, "minLength"), _limit(said, "maxLength")
        if most is not None and most < least:
            raise _NotRegular
        return string(least, most)

    def _integer(self, said: JsonObject) -> Regex:
        limits = _numeric_limits(said)
        least = [_whole(limits["least"])] if "least" in limits else []
        least += [_whole(limits["above"]) + 1] if "above" in limits else []
        most = [_whole(limits["most"])] if "most" in limits else []
        most += [_whole(limits["below"]) - 1] if "below" in limits else []
        return _needed(integer(max(least, default=-MOST_INTEGER), min(most, default=MOST_INTEGER)))

    def _number(self, said: JsonObject) -> Regex:
        return _needed(number(**_numeric_limits(said)))


_LIMITS: Final = {
    "minimum": "least",
    "maximum": "most",
    "exclusiveMinimum": "above",
    "exclusiveMaximum": "below",
}


def _numeric_limits(said: JsonObject) -> dict[str, int | float]:
    """Returns the limits of a number, by the names of ``number``'s arguments."""
    if set(said) - set(_LIMITS) or not all(_is_number(limit) for limit in said.values()):
        raise _NotRegular
    return {_LIMITS[key]: limit for key, limit in said.items()}


def _members(members: list[tuple[Regex, bool]], comma: Regex) -> Regex:
    """Returns texts of at least one of the members, in order, including all required ones, separated by
    commas."""
    required = [place for place, (_, is_required) in enumerate(members) if is_required]
    if not required:
        return _some([member for member, _ in members], comma)
    first = required[0]
    parts: list[Regex] = [Repeat(Concatenation((member, comma)), 0, 1) for member, _ in members[:first]]
    parts.append(members[first][0])
    for member, is_required in members[first + 1 :]:
        next_one = Concatenation((comma, member))
        parts.append(next_one if is_required else Repeat(next_one, 0, 1))
    return Concatenation(tuple(parts))


def _some(members: list[Regex], comma: Regex) -> Regex:
    """Returns texts of at least one of the members, in order. Halves share their parts, so the expression
    stays small."""
    if len(members) == 1:
        return members[0]
    middle = len(members) // 2
    first, second = _some(members[:middle], comma), _some(members[middle:], comma)
    return Alternation((Concatenation((first, Repeat(Concatenation((comma, second)), 0, 1))), second))


def _union(options: list[Regex]) -> Regex:
    return options[0] if len(options) == 1 else Alternation(tuple(options))


def _needed(regex: Regex | None) -> Regex:
    if regex is None:
        raise _NotRegular
    return regex


def _whole(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise _NotRegular
    return value


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _count(said: JsonObject, key: str) -> int:
    """Returns the value of a counting keyword; 0 if it is absent."""
    found = _limit(said, key)
    return 0 if found is None else found


def _limit(said: JsonObject, key: str) -> int | None:
    if key not in said:
        return None
    count = _whole(said[key])
    if not 0 <= count <= MOST_POSITIONS:
        raise _NotRegular
    return count


def num_positions(regex: Regex, known: dict[int, int] | None = None) -> int:
    """Returns the size of the expression when written out. A shared part counts each time."""
    known = {} if known is None else known
    found = known.get(id(regex))
    if found is None:
        if isinstance(regex, Repeat):
            most = regex.least if regex.most is None else regex.most
            found = num_positions(regex.part, known) * max(1, most)
        elif isinstance(regex, Concatenation):
            found = sum([num_positions(part, known) for part in regex.parts])
        elif isinstance(regex, Alternation):
            found = sum([num_positions(option, known) for option in regex.options])
        else:
            found = 1
        known[id(regex)] = found
    return found
