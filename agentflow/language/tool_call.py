"""Tools: Python functions (or schemas) that a model may ask to have called.

The model's text is a JSON list of calls, ``[{"name": …, "arguments": {…}}, …]``; its schema is made
of the functions' signatures, and each call comes back with arguments of the types they name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from agentflow.errors import BadArgument
from agentflow.protocol.chat import ToolSpec

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


def hoisted(name: str, schema: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """``schema`` as a part of a larger one: what it defines goes into the definitions of the whole, under
    the tool's name, and what it refers to is found there."""

    def moved(part: Any) -> Any:
        if isinstance(part, Mapping):
            return {
                key: new_place(value) if key == "$ref" and isinstance(value, str) else moved(value)
                for key, value in part.items()
            }
        return [moved(item) for item in part] if isinstance(part, list | tuple) else part

    def new_place(reference: str) -> str:
        for keyword in ("$defs", "definitions"):
            if reference.startswith(f"#/{keyword}/"):
                return f"#/$defs/{name}." + reference.removeprefix(f"#/{keyword}/")
        if reference.startswith("#"):
            raise BadArgument(f"tool {name!r}: its schema may only refer to its $defs, not to {reference!r}")
        return reference

    for keyword in ("$defs", "definitions"):
        for key, value in schema.get(keyword, {}).items():
            definitions[f"{name}.{key}"] = moved(value)
    return {key: moved(value) for key, value in schema.items() if key not in ("$defs", "definitions")}


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
