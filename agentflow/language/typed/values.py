"""The type of a gen's value: a ``ValueType`` has a constraint for the backend and a reader that makes a
Python value from the text. ``value_type`` makes it from ``schema``, ``type``, ``regex`` or ``grammar``.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial
from typing import Annotated, Any, Final, get_args, get_origin

import msgspec

from agentflow.errors import BadArgument, error_param, short_repr
from agentflow.language.typed.json_types import json_type, shown_type
from agentflow.language.typed.recursion import with_bounded_depth
from agentflow.protocol.constraint import INTEGER_PATTERN, NUMBER_PATTERN, Constraint, Whitespace
from agentflow.protocol.schemas.walk import KEYWORDS, TYPES, subschemas


@dataclass(frozen=True, slots=True)
class ValueType:
    """How the text of a variable becomes a value."""

    shown: str  # its name in messages
    constraint: Constraint | None  # on the text
    read: Callable[[str], Any]  # makes the value of a text; ``ValueError`` for an invalid one
    # the text is JSON, and iterating over a variable yields partial values instead of text
    comes_in_parts: bool = False
    is_reply: bool = False  # it is an assistant's whole reply, with tool calls
    element: Any = None  # the type of a list's elements

    @property
    def is_text(self) -> bool:
        """Whether the value is the text itself."""
        return self.read is str

    @property
    def may_be_truncated(self) -> bool:
        """Whether a truncated text can be a value: free text can, ``12`` of ``123`` cannot."""
        return self.constraint is None or self.constraint.kind == "tags" or self.is_reply

    def element_reader(self) -> Callable[[str], Any] | None:
        """Makes an element of the list from its text. None if the value is no list."""
        if self.element is None:
            return None
        return json.loads if self.element is Any else json_type(self.element)[1]

    def decoded(self, whitespace: Whitespace, jump_forward: bool) -> ValueType:
        """A copy with these options of its constraint. ``BadArgument`` if it has no constraint."""
        if self.constraint is None:
            name = "whitespace" if whitespace != "compact" else "jump_forward"
            raise BadArgument(
                f"gen: {name} applies to a constraint, and this gen has none: give a schema, for example",
                param=name,
            )
        asked = msgspec.structs.replace(self.constraint, whitespace=whitespace, jump_forward=jump_forward)
        asked.check_decoding()
        return replace(self, constraint=asked)


TEXT = ValueType("text", None, str)


def value_type(
    *,
    regex: str | None = None,
    schema: Any = None,
    type: type | None = None,
    grammar: str | None = None,
) -> ValueType:
    """The type that one of these arguments gives. ``BadArgument`` if it is invalid, or if several are
    given."""
    given = {"regex": regex, "schema": schema, "type": type, "grammar": grammar}
    refuse_several(given)
    for name, value in given.items():
        if value is not None:
            with error_param(name):
                return _TYPES[name](value)
    return TEXT


def refuse_several(given: Mapping[str, Any], where: str = "gen") -> None:
    """``BadArgument`` if more than one of these is given."""
    names = [name for name, value in given.items() if value is not None]
    if len(names) > 1:
        raise BadArgument(
            f"{where}: {' and '.join(names)} exclude each other: give one of them", param=names[-1]
        )


def _of_regex(regex: str) -> ValueType:
    return ValueType("text", Constraint("regex", regex).check(), str)


def _of_grammar(grammar: str) -> ValueType:
    return ValueType("text", Constraint("grammar", grammar).check(), str)


def _of_type(wanted: type) -> ValueType:
    if wanted is str:
        return TEXT
    constraint = _SCALARS.get(wanted) if isinstance(wanted, type) else None
    if constraint is None:
        raise BadArgument(f"gen: type must be int, float, bool or str, not {wanted!r}; for others use schema")
    return ValueType(wanted.__name__, constraint, partial(_read_scalar, wanted))


def _read_scalar(wanted: Callable[[str], Any], text: str) -> Any:
    return (_read_bool if wanted is bool else wanted)(text.strip())


def _read_bool(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError(f"{text!r} is neither true nor false")
    return text.lower() == "true"


def _of_schema(schema: Any) -> ValueType:
    """A pydantic model, a dataclass, a TypedDict, anything else that msgspec knows, or a JSON schema."""
    if isinstance(schema, Mapping):
        _check_written(schema)
        element = Any if schema.get("type") == "array" else None
        return ValueType("JSON value", _schema(schema), json.loads, comes_in_parts=True, element=element)
    described, read = json_type(schema)
    described = with_bounded_depth(described)
    # Type checkers expect that iterating over a string or a number yields text.
    is_scalar = isinstance(schema, type) and issubclass(schema, str | int | float)
    kind = schema
    while get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    element = (*get_args(kind), Any)[0] if get_origin(kind) in _LISTS else None
    return ValueType(
        shown_type(schema), _schema(described), read, comes_in_parts=not is_scalar, element=element
    )


_LISTS: Final = (list, Sequence)


def _check_written(schema: Mapping[str, Any]) -> None:
    """``BadArgument`` if a JSON schema that a program wrote allows every value by mistake, or has an unknown
    type."""
    if schema and not KEYWORDS.intersection(schema):
        near = [found[0] for key in schema if (found := get_close_matches(str(key), KEYWORDS, 1))]
        instead = (
            f"did you mean {near[0]!r}?"
            if near
            else 'members of an object are {"type": "object", "properties": {…}}'
        )
        raise BadArgument(f"gen: schema: {short_repr(schema)} has no keyword of JSON Schema: {instead}")
    names = schema.get("type")
    for name in names if isinstance(names, list) else [names]:
        if isinstance(name, str) and name not in TYPES:
            known = ", ".join(TYPES)
            raise BadArgument(f"gen: schema: type {name!r} is none of JSON Schema's: {known}")


def _schema(schema: Mapping[str, Any]) -> Constraint:
    try:
        source = json.dumps(schema, ensure_ascii=False)
        constraint = Constraint(
            "schema",
            source,
            string_chars=_longest(schema, DEFAULT_STRING_CHARS, "maxLength", "minLength"),
            list_items=_longest(schema, DEFAULT_LIST_ITEMS, "maxItems", "minItems", "maxProperties"),
        )
        return constraint.check()
    except (TypeError, ValueError, RecursionError) as error:
        raise BadArgument(f"gen: schema is not a JSON schema: {error}") from None


DEFAULT_STRING_CHARS: Final = 4_000
"""The maximum length of a string without ``maxLength`` in a value: about 1,000 tokens."""
DEFAULT_LIST_ITEMS: Final = 200
"""The maximum length of a list or dict without ``maxItems`` in a value."""


def _longest(schema: Mapping[str, Any], default: int, *keys: str) -> int:
    """The default, or the largest length in the schema, so that no allowed value is cut."""
    found = [default]
    for part in subschemas(schema):
        named = [part.get(key) for key in keys]
        found += [int(length) for length in named if isinstance(length, int | float)]
        if "maxItems" in keys:
            found += [len(part[key]) for key in ("properties", "prefixItems") if key in part]
    return max(found)


def with_lengths(constraint: Constraint) -> str:
    """The schema of the constraint, whose strings and lists without a limit get the constraint's limits: for
    a schema inside tags, where only the grammar itself can count lengths."""
    if constraint.kind != "schema":
        return constraint.source
    schema = json.loads(constraint.source)
    for part in subschemas(schema):
        types = part.get("type")
        names = types if isinstance(types, list) else [types]
        if "string" in names and not _SETS_LENGTH.intersection(part):
            part["maxLength"] = constraint.string_chars
        if "array" in names:
            part.setdefault("maxItems", constraint.list_items)
    return json.dumps(schema, ensure_ascii=False)


_SETS_LENGTH: Final = frozenset({"maxLength", "pattern", "format", "enum", "const"})


def warn_of_length(name: str, text: str, constraint: Constraint | None) -> None:
    """Warns if a part of the value has the default maximum length, which has probably cut it."""
    if constraint is None or constraint.string_chars is None or constraint.list_items is None:
        return
    if len(text) < min(constraint.string_chars, constraint.list_items):
        return
    pending = [json.loads(text)]
    while pending:
        part = pending.pop()
        if isinstance(part, str) and len(part) >= constraint.string_chars == DEFAULT_STRING_CHARS:
            _warn(name, "a string", f"{DEFAULT_STRING_CHARS:,} characters", "max_length")
            return
        if isinstance(part, list | dict):
            if len(part) >= constraint.list_items == DEFAULT_LIST_ITEMS:
                _warn(name, "a list or dict", f"{DEFAULT_LIST_ITEMS} members", "max_length")
                return
            pending += part.values() if isinstance(part, dict) else part


def _warn(name: str, what: str, most: str, field: str) -> None:
    warnings.warn(
        f"{name!r}: {what} ended after {most}, the default bound: allow more with Field({field}=…), or as "
        "maxLength or maxItems of a JSON schema",
        RuntimeWarning,
        stacklevel=2,
    )


_SCALARS: dict[type, Constraint] = {
    int: Constraint("regex", INTEGER_PATTERN),
    float: Constraint("regex", NUMBER_PATTERN),
    bool: Constraint("choices", choices=("true", "false")),
}
_TYPES: dict[str, Callable[[Any], ValueType]] = {
    "regex": _of_regex,
    "schema": _of_schema,
    "type": _of_type,
    "grammar": _of_grammar,
}
