"""Functions as tools. ``Toolbox`` describes them: the model writes a JSON list of calls,
``[{"name": ..., "arguments": {...}}, ...]``, and each call gets arguments of the types in the signature.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from agentflow.errors import BadArgument
from agentflow.language.typed.json_types import parameters_type, with_definitions
from agentflow.protocol.chat import ToolSpec, hoisted

Tool = Callable[..., Any] | Mapping[str, Any]
"""A function with annotated parameters, or a mapping with ``name``, ``parameters`` (a JSON schema) and
optionally ``description``, as in OpenAI's API."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model requests. ``function``: the tool, if it was given as a function.

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
        """Calls the function; an async function returns an awaitable."""
        if self.function is None:
            raise BadArgument(f"tool {self.name!r} was given as a schema: call what it stands for yourself")
        return self.function(**self.arguments)


def spec_of(tool: Tool) -> ToolSpec:
    """The tool's description for the model. ``BadArgument`` if it is not a tool."""
    described = _described(tool)
    return ToolSpec(described.name, described.description, described.parameters)


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
        """The schema of one call of any of the tools, and the definitions that it refers to."""
        definitions: dict[str, Any] = {}
        calls = [
            {
                "type": "object",
                "properties": {
                    "name": {"const": tool.name},
                    "arguments": tool.placed(definitions),
                },
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
            for tool in self._tools.values()
        ]
        return calls[0] if len(calls) == 1 else {"anyOf": calls}, definitions

    def read(self, text: str) -> list[ToolCall]:
        """The calls in ``text``. ``ValueError`` if it is not a list of calls of these tools."""
        return [self._call(raw) for raw in msgspec.json.decode(text, type=list[_RawCall])]

    def read_call(self, text: str) -> ToolCall:
        """The call in ``text``. ``ValueError`` if it is not a call of one of these tools."""
        return self._call(msgspec.json.decode(text, type=_RawCall))

    def _call(self, raw: _RawCall) -> ToolCall:
        tool = self._tools.get(raw.name)
        if tool is None:
            raise ValueError(f"there is no tool {raw.name!r} (there are: {', '.join(self._tools)})")
        return ToolCall(tool.name, tool.read(bytes(raw.arguments)), tool.function)


@dataclass(frozen=True, slots=True)
class _Described:
    """A tool. ``parameters``: the schema of its arguments; ``read`` makes them of JSON. ``function``: None
    for a tool that was given as a schema."""

    name: str
    description: str
    parameters: dict[str, Any]
    read: Callable[[str | bytes], dict[str, Any]]
    function: Callable[..., Any] | None = None

    def placed(self, definitions: dict[str, Any]) -> dict[str, Any]:
        """The schema of its arguments as part of a larger one with these ``definitions``."""
        place = hoisted if self.function is None else with_definitions
        return place(self.name, self.parameters, definitions)


def _described(tool: Tool) -> _Described:
    if isinstance(tool, Mapping):
        inner = tool.get("function", tool)  # OpenAI wraps it: {"type": "function", "function": {…}}
        name, parameters = inner.get("name"), inner.get("parameters", {"type": "object", "properties": {}})
        if not isinstance(name, str) or not name or not isinstance(parameters, Mapping):
            raise BadArgument("a tool's schema needs a name, and parameters that are a JSON schema")
        description = inner.get("description")
        described = description if isinstance(description, str) else ""
        return _Described(name, described, dict(parameters), msgspec.json.Decoder(dict[str, Any]).decode)
    if not callable(tool):
        raise BadArgument(f"a tool is a function or a schema, not {tool!r}")
    name = getattr(tool, "__name__", type(tool).__name__)
    parameters, read = parameters_type(name, tool)
    return _Described(name, inspect.getdoc(tool) or "", parameters, read, tool)
