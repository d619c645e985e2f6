"""From text to a value: what ``gen``'s ``schema``, ``type``, ``choices`` and ``tools`` mean on both ends.

Each gives a constraint for the backend and a reader that makes a Python value of the text. (Of ``tags``, the
module ``tag`` does.)
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from agentflow.errors import BadArgument
from agentflow.language.tool_call import Tool, Toolbox
from agentflow.protocol.constraint import Constraint, Whitespace

_SCALARS: dict[type, Constraint] = {
    int: Constraint("regex", r"-?(0|[1-9][0-9]{0,17})"),
    float: Constraint("regex", r"-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,17})?([eE][+-]?[0-9]{1,3})?"),
    bool: Constraint("choices", choices=("true", "false")),
}


@dataclass(frozen=True, slots=True)
class ValueType:
    """``constraint``: what the text must look like, if anything. ``read``: the value of a text, or
    ``ValueError``. ``shown``: what the value is, for messages. ``comes_in_parts``: it is made of JSON, and
    its readers are shown the parts of it that are there, not its text."""

    shown: str
    constraint: Constraint | None
    read: Callable[[str], Any]
    comes_in_parts: bool = False

    is_reply: bool = False
    """Whether it is an assistant's whole reply, calls included."""

    @property
    def may_be_cut(self) -> bool:
        """Whether a text that ended for its length can be a value: free text can, ``12`` of ``123`` not."""
        return self.constraint is None or self.constraint.kind == "tags" or self.is_reply

    def decoded(self, whitespace: Whitespace, jump_forward: bool) -> ValueType:
        """The same, written and decoded so. ``BadArgument`` where there is nothing that could be."""
        if whitespace == "compact" and jump_forward is True:
            return self
        if self.constraint is None:
            name = "whitespace" if whitespace != "compact" else "jump_forward"
            raise BadArgument(
                f"gen: {name} says how a constraint is kept, and there is none: give a schema, say"
            )
        asked = msgspec.structs.replace(self.constraint, whitespace=whitespace, jump_forward=jump_forward)
        return replace(self, constraint=asked.check())


TEXT = ValueType("text", None, str)


def value_type(
    *,
    regex: str | None = None,
    schema: Any = None,
    choices: Sequence[str] | None = None,
    type: type | None = None,
    tools: Sequence[Tool] | None = None,
    grammar: str | None = None,
) -> ValueType:
    """What one of these arguments asks for. ``BadArgument`` where it makes no sense, or two are given."""
    given = {"regex": regex, "schema": schema, "choices": choices, "type": type, "tools": tools}
    refuse_several({**given, "grammar": grammar})
    if schema is not None:
        return _of_schema(schema)
    if type is not None:
        return _of_type(type)
    if tools is not None:
        toolbox = Toolbox(tools)
        return of_json_schema(toolbox.schema(), toolbox.read, "list of tool calls")
    if choices is not None:
        return _of_choices(choices)
    if regex is not None:
        return ValueType("text", Constraint("regex", regex).check(), str)
    if grammar is not None:
        return ValueType("text", Constraint("grammar", grammar).check(), str)
    return TEXT


def refuse_several(given: Mapping[str, Any], where: str = "gen") -> None:
    """``BadArgument`` where more than one of these is given."""
    names = [name for name, value in given.items() if value is not None]
    if len(names) > 1:
        raise BadArgument(f"{where}: {' and '.join(names)} exclude each other: give one of them")


def of_json_schema(schema: Mapping[str, Any], read: Callable[[str], Any], shown: str) -> ValueType:
    """A value of which a JSON schema says how it is written. ``BadArgument`` where it is none."""
    return ValueType(shown, _schema(schema), read, comes_in_parts=True)


def _of_choices(choices: Sequence[str]) -> ValueType:
    if isinstance(choices, str) or not isinstance(choices, Sequence):
        raise BadArgument(f"choices must be a list of strings, not {choices!r}")
    return ValueType("choice", Constraint("choices", choices=tuple(choices)).check(), str)


def _of_type(wanted: type) -> ValueType:
    if wanted is str:
        return TEXT
    constraint = _SCALARS.get(wanted) if isinstance(wanted, type) else None
    if constraint is None:
        raise BadArgument(f"gen: type must be int, float, bool or str, not {wanted!r}; for others use schema")
    read = _read_bool if wanted is bool else wanted
    return ValueType(wanted.__name__, constraint, lambda text: read(text.strip()))


def _read_bool(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError(f"{text!r} is neither true nor false")
    return text.lower() == "true"


def _of_schema(schema: Any) -> ValueType:
    """A pydantic model, a dataclass, a TypedDict, anything else that msgspec knows, or a JSON schema."""
    if isinstance(schema, Mapping):
        return of_json_schema(schema, json.loads, "JSON value")
    name = getattr(schema, "__name__", repr(schema))
    read: Callable[[str], Any]
    try:
        if hasattr(schema, "model_json_schema"):  # pydantic, which need not be installed
            described, read = schema.model_json_schema(), schema.model_validate_json
        else:
            described, read = msgspec.json.schema(schema), msgspec.json.Decoder(schema).decode
    except Exception as error:  # of annotations that name nothing, and of types without a JSON form
        raise BadArgument(
            f"gen: schema {name!r} cannot be expressed as JSON ({_first_line(error)}): "
            "give a pydantic model, a dataclass, a TypedDict or a JSON schema"
        ) from None
    # A type checker takes what is a string or a number for text that comes piece by piece.
    is_scalar = isinstance(schema, type) and issubclass(schema, str | int | float)
    return ValueType(name, _schema(described), read, comes_in_parts=not is_scalar)


def _schema(schema: Mapping[str, Any]) -> Constraint:
    try:
        return Constraint("schema", json.dumps(schema, ensure_ascii=False)).check()
    except (TypeError, ValueError, RecursionError) as error:
        raise BadArgument(f"gen: schema is no JSON schema: {error}") from None


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
