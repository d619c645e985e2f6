"""From text to a value: what ``gen``'s ``schema``, ``type``, ``choices`` and ``tools`` mean on both ends.

Each gives a constraint for the backend and a reader that makes a Python value of the text. (Of ``tags``, the
module ``tag`` does.)

Tools: Python functions (or schemas) that a model may ask to have called.

The model's text is a JSON list of calls, ``[{"name": …, "arguments": {…}}, …]``; its schema is made
of the functions' signatures, and each call comes back with arguments of the types they name.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec

from agentflow.errors import BadArgument
from agentflow.protocol.chat import ToolSpec, hoisted
from agentflow.protocol.constraint import Constraint, Whitespace

Tool = Callable[..., Any] | Mapping[str, Any]
"""A function with annotated parameters, or a mapping with ``name``, ``parameters`` (a JSON schema) and
perhaps ``description``, as OpenAI's API has it."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call that the model asks for. ``function``: the tool, where it was given as one.

    >>> calls = af.gen("calls", tools=[weather])
    >>> s += af.user("What is the weather in Oslo?") + af.assistant(calls)
    >>> for call in await s[calls]:
    ...     print(call.name, call.arguments)
    ...     s += af.tool(call())
    weather {'city': 'Oslo'}
    """

    name: str
    arguments: dict[str, Any]
    function: Callable[..., Any] | None = None

    def __call__(self) -> Any:
        """Calls the function (an async one gives an awaitable)."""
        if self.function is None:
            raise BadArgument(f"tool {self.name!r} was given as a schema: call what it stands for yourself")
        return self.function(**self.arguments)


def spec_of(tool: Tool) -> ToolSpec:
    """What a model is told of the tool. ``BadArgument`` where it is none."""
    described = _described(tool)
    parameters = described.parameters
    if described.signature is not None:
        [reference], definitions = msgspec.json.schema_components([described.signature])
        parameters = definitions.pop(reference["$ref"].rpartition("/")[2])
        parameters = {**parameters, "$defs": definitions} if definitions else parameters
    return ToolSpec(described.name, described.description, parameters or {})


class _RawCall(msgspec.Struct):
    name: str
    arguments: msgspec.Raw


class Toolbox:
    """The tools of one gen, by name."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        if isinstance(tools, str | Mapping) or not isinstance(tools, Iterable) or callable(tools):
            raise BadArgument("tools must be a list of functions or schemas")
        self._tools: dict[str, _Described] = {}
        for tool in tools:
            described = _described(tool)
            if described.name in self._tools:
                raise BadArgument(f"two tools have the name {described.name!r}")
            self._tools[described.name] = described
        if not self._tools:
            raise BadArgument("tools: there must be at least one")

    def schema(self) -> dict[str, Any]:
        """The JSON schema of a list of calls."""
        call, definitions = self._described_call()
        schema = {"type": "array", "items": call}
        return {**schema, "$defs": definitions} if definitions else schema

    def call_schema(self) -> dict[str, Any]:
        """The JSON schema of one call."""
        call, definitions = self._described_call()
        return {**call, "$defs": definitions} if definitions else call

    def _described_call(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """One call of one of the tools, and what that refers to."""
        signatures = [tool.signature for tool in self._tools.values() if tool.signature is not None]
        described, definitions = msgspec.json.schema_components(signatures)
        own = iter(described)
        calls = [
            {
                "type": "object",
                "properties": {
                    "name": {"const": tool.name},
                    "arguments": next(own)
                    if tool.parameters is None
                    else hoisted(tool.name, tool.parameters, definitions),
                },
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
            for tool in self._tools.values()
        ]
        return calls[0] if len(calls) == 1 else {"anyOf": calls}, definitions

    def read(self, text: str) -> list[ToolCall]:
        """The calls in ``text``. ``ValueError`` where it is no list of calls of these tools."""
        return [self._call(raw) for raw in msgspec.json.decode(text, type=list[_RawCall])]

    def read_call(self, text: str) -> ToolCall:
        """The call in ``text``. ``ValueError`` where it is no call of one of these tools."""
        return self._call(msgspec.json.decode(text, type=_RawCall))

    def _call(self, raw: _RawCall) -> ToolCall:
        tool = self._tools.get(raw.name)
        if tool is None:
            raise ValueError(f"there is no tool {raw.name!r} (there are: {', '.join(self._tools)})")
        return ToolCall(tool.name, tool.arguments(raw.arguments), tool.function)


@dataclass(frozen=True, slots=True)
class _Described:
    """Of a function its signature as a struct, of a schema its parameters."""

    name: str
    function: Callable[..., Any] | None = None
    signature: type[msgspec.Struct] | None = None
    parameters: dict[str, Any] | None = None
    description: str = ""

    def arguments(self, raw: msgspec.Raw) -> dict[str, Any]:
        if self.signature is None:
            loose: dict[str, Any] = msgspec.json.decode(raw, type=dict[str, Any])
            return loose
        decoded = msgspec.json.decode(raw, type=self.signature)
        return {field: getattr(decoded, field) for field in self.signature.__struct_fields__}


def _described(tool: Tool) -> _Described:
    if isinstance(tool, Mapping):
        inner = tool.get("function", tool)  # OpenAI wraps it: {"type": "function", "function": {…}}
        name, parameters = inner.get("name"), inner.get("parameters", {"type": "object", "properties": {}})
        if not isinstance(name, str) or not name or not isinstance(parameters, Mapping):
            raise BadArgument("a tool's schema needs a name, and parameters that are a JSON schema")
        description = inner.get("description")
        described = description if isinstance(description, str) else ""
        return _Described(name, parameters=dict(parameters), description=described)
    if not callable(tool):
        raise BadArgument(f"a tool is a function or a schema, not {tool!r}")
    name = getattr(tool, "__name__", type(tool).__name__)
    return _Described(name, tool, _signature(name, tool), description=inspect.getdoc(tool) or "")


def _same(value: Any) -> Any:
    return value


def _signature(name: str, function: Callable[..., Any]) -> type[msgspec.Struct]:
    """A struct with the function's parameters."""
    try:
        parameters = inspect.signature(function, eval_str=True).parameters.values()
    except Exception as error:  # whatever evaluating an annotation raises
        raise BadArgument(f"tool {name!r}: its signature cannot be read: {error}") from None
    fields: list[tuple[str, Any] | tuple[str, Any, Any]] = []
    for parameter in parameters:
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise BadArgument(f"tool {name!r}: parameter {parameter.name!r} cannot be given by its name")
        kind = parameter.annotation
        if kind is parameter.empty:
            raise BadArgument(f"tool {name!r}: parameter {parameter.name!r} has no type annotation")
        if parameter.default is parameter.empty:
            fields.append((parameter.name, kind))
        else:
            default = parameter.default
            fields.append((parameter.name, kind, msgspec.field(default_factory=partial(_same, default))))
    try:
        made = msgspec.defstruct(name, fields, kw_only=True, forbid_unknown_fields=True)
        msgspec.json.schema(made)
    except TypeError as error:
        raise BadArgument(
            f"tool {name!r}: its parameters cannot be expressed as JSON: {str(error).partition(chr(10))[0]}"
        ) from None
    return made


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
