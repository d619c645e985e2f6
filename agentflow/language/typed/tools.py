"""Functions as tools. ``tool`` gives a function a name and limits, ``described_tool`` the schema of its
parameters. A ``ToolCall`` has arguments of the types in the signature.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, TypeAlias, overload

import msgspec

from agentflow.errors import BadArgument, InvalidValue, listed, shown_error
from agentflow.language.by_name import by_name
from agentflow.language.failures.user_code import UserCode
from agentflow.language.typed.json_form import JsonRecord, json_text
from agentflow.language.typed.json_types import (
    NothingYet,
    parameters_type,
    partial_value,
)
from agentflow.protocol.bounds.client_pattern import CannotCheck
from agentflow.protocol.chat import CalledTool, ToolSpec
from agentflow.protocol.sampling import is_number, is_whole
from agentflow.runtime.task_group import first_error

Tool: TypeAlias = "Callable[..., Any] | Mapping[str, Any] | FunctionTool"
"""A function with annotated parameters, a tool made by ``af.tool``, or a mapping with ``name``,
``parameters`` (a JSON schema) and optionally ``description``, as in OpenAI's API."""


@dataclass(frozen=True, slots=True)
class ToolCall(JsonRecord):
    """A call that the model requests. ``id`` identifies it in the turn with its result. ``text``: the
    arguments as the model wrote them, a JSON object. ``function``: the tool, where it is known. ``fault``:
    why the call cannot run, because its arguments are truncated or invalid; then ``arguments`` has only the
    certain ones, and calling it raises ``InvalidValue``.

    >>> answer = af.reply("answer", tools=[weather], choice="required")
    >>> s += af.user("What is the weather in Oslo?") + answer
    >>> for call in (await s[answer]).tool_calls:
    ...     print(call.name, call.arguments)
    ...     s += af.tool_result(call(), call=call)
    weather {'city': 'Oslo'}
    """

    name: str
    arguments: dict[str, Any]
    id: str = ""
    text: str = field(default="", repr=False, compare=False)
    function: Callable[..., Any] | None = field(default=None, repr=False, compare=False)
    fault: str = field(default="", repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.arguments, dict):
            raise BadArgument(
                f"ToolCall: the arguments must be a dict, not {self.arguments!r}", param="arguments"
            )
        if not self.text and not self.fault:  # a truncated call may have no text
            try:
                object.__setattr__(self, "text", json_text(self.arguments))
            except ValueError as error:
                raise BadArgument(
                    f"ToolCall: the arguments are not JSON: {error}", param="arguments"
                ) from None

    @classmethod
    def _shown_fields(cls) -> tuple[str, ...]:
        return "name", "arguments", "id"

    def __call__(self) -> Any:
        """Calls the function; an async function returns an awaitable. ``InvalidValue`` if the call has a
        fault."""
        if self.fault:
            raise InvalidValue(f"the call of tool {self.name!r} cannot run: {self.fault}")
        if self.function is None:
            raise BadArgument(f"the function of tool {self.name!r} is not known here: call it yourself")
        return self.function(**self.arguments)


@dataclass(frozen=True, slots=True)
class FunctionTool:
    """A function as a tool, made by ``af.tool``. Calling it calls the function."""

    function: Callable[..., Any]
    name: str | None = None
    description: str | None = None
    parameters: Mapping[str, Any] | None = None
    timeout_s: float | None = None
    max_calls: int | None = None

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        values = [getattr(self, one.name) for one in fields(self)]
        return by_name(self, self.function) or (FunctionTool, tuple(values))

    def __get__(self, instance: object, owner: type | None = None) -> FunctionTool:
        """The tool of a bound method."""
        if instance is None:
            return self
        return replace(self, function=self.function.__get__(instance, owner))


@overload
def tool(
    function: Callable[..., Any],
    *,
    name: str | None = None,
    description: str | None = None,
    parameters: Mapping[str, Any] | None = None,
    timeout_s: float | None = None,
    max_calls: int | None = None,
) -> FunctionTool: ...
@overload
def tool(
    *,
    name: str | None = None,
    description: str | None = None,
    parameters: Mapping[str, Any] | None = None,
    timeout_s: float | None = None,
    max_calls: int | None = None,
) -> Callable[[Callable[..., Any]], FunctionTool]: ...
def tool(
    function: Callable[..., Any] | None = None,
    *,
    name: str | None = None,
    description: str | None = None,
    parameters: Mapping[str, Any] | None = None,
    timeout_s: float | None = None,
    max_calls: int | None = None,
) -> Any:
    """Makes a tool of a function, if its signature and docstring are not enough. Also a decorator.

    Args:
        function: The function; or a tool, such as one of ``af.mcp``, which is copied with the given changes.
        name: The tool's name for the model; by default the function's name.
        description: The description for the model; by default the function's docstring.
        parameters: The JSON schema of its keyword arguments, which then arrive as plain JSON values.
        timeout_s: The time limit of one call in ``af.act``, in seconds.
        max_calls: The maximum number of calls in one ``af.act``.

    Raises:
        BadArgument: An argument is invalid.

    >>> @af.tool(timeout_s=5, max_calls=3)
    ... async def search(query: str) -> list[str]:
    ...     \"\"\"Searches the library.\"\"\"
    ...     return [f"a book on {query}"]
    >>> await search("plants")
    ['a book on plants']
    >>> [af.tool(weather, name="forecast").name, af.tool(weather).description]
    ['forecast', None]
    """
    if function is None:
        return partial(
            tool,
            name=name,
            description=description,
            parameters=parameters,
            timeout_s=timeout_s,
            max_calls=max_calls,
        )
    if not callable(function):
        raise BadArgument(
            f"tool: {function!r:.80} is not a function; a turn with a tool's result is af.tool_result(text)"
        )
    check_timeout("tool", timeout_s)
    check_max_calls("tool", max_calls)
    if isinstance(function, FunctionTool):
        given: dict[str, Any] = {
            "name": name,
            "description": description,
            "parameters": parameters,
            "timeout_s": timeout_s,
            "max_calls": max_calls,
        }
        return replace(function, **{key: value for key, value in given.items() if value is not None})
    return FunctionTool(function, name, description, parameters, timeout_s, max_calls)


def check_timeout(where: str, timeout_s: float | None, param: str = "timeout_s") -> None:
    """``BadArgument`` for ``param`` unless it is None or a positive number of seconds."""
    if timeout_s is not None and not (is_number(timeout_s, 0, math.inf) and timeout_s > 0):
        raise BadArgument(
            f"{where}: {param} must be a number of seconds above 0, not {timeout_s!r}", param=param
        )


def check_max_calls(where: str, max_calls: int | None) -> None:
    """``BadArgument`` unless it is None or a number of calls."""
    if max_calls is not None and not is_whole(max_calls, 0, math.inf):
        raise BadArgument(f"{where}: max_calls must be a whole number, not {max_calls!r}", param="max_calls")


def describe_tool(tool: Tool) -> ToolSpec:
    """The tool's description for the model. ``BadArgument`` if it is not a tool."""
    return described_tool(tool).spec


class Toolbox:
    """The tools of one ``act``, by name."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        if isinstance(tools, str | Mapping) or not isinstance(tools, Iterable) or callable(tools):
            raise BadArgument("tools must be a list of functions or schemas", param="tools")
        self._tools: dict[str, DescribedTool] = {}
        for tool in tools:
            described = described_tool(tool)
            if described.name in self._tools:
                raise BadArgument(
                    f"two tools have the name {described.name!r}: rename one with af.tool(tool, name=…), or "
                    "those of a server with af.mcp(…, prefix=…)",
                    param="tools",
                )
            self._tools[described.name] = described

    def __iter__(self) -> Iterator[DescribedTool]:
        return iter(self._tools.values())

    def __getitem__(self, name: str) -> DescribedTool:
        """The tool of this name; ``ValueError`` if there is none."""
        tool = self._tools.get(name)
        if tool is None:
            raise ValueError(f"there is no tool {name!r} (there are: {listed(self._tools)})")
        return tool


@dataclass(frozen=True, slots=True)
class DescribedTool:
    """A tool with its schema and its function."""

    name: str
    description: str
    parameters: dict[str, Any]  # the schema of its arguments
    read: Callable[[str | bytes], dict[str, Any]]  # reads the arguments from JSON
    function: Callable[..., Any] | None = None  # None for a tool that was given as a schema
    timeout_s: float | None = None  # as in ``tool``
    max_calls: int | None = None  # as in ``tool``
    is_typed: bool = False
    # the given schema is enforced exactly, like OpenAI's ``"strict": true``, and arguments are checked
    is_strict: bool = False
    # the object that it was made of, as which it is pickled
    given: Tool | None = field(default=None, repr=False, compare=False)

    def __reduce__(self) -> tuple[Any, ...]:
        return described_tool, (self.given,)

    @property
    def spec(self) -> ToolSpec:
        """Its description for the model. A given schema may have keywords that cannot be enforced; the schema
        of a type has none."""
        strict = self.is_typed or self.is_strict
        return ToolSpec(self.name, self.description, self.parameters, strict=strict)

    def call(self, text: str, call_id: str = "") -> ToolCall:
        """A call of the tool with the arguments in ``text``, or with a fault if these are truncated or
        invalid."""
        fault = _incompleteness(text)
        if not fault:
            try:
                with UserCode(f"the validation of the arguments of {self.name!r}"):
                    arguments = self.read(text)
                if self.is_strict:
                    _require_kept(self.parameters, text)
                return ToolCall(self.name, arguments, call_id, text, self.function)
            except Exception as error:
                fault = f"the arguments are invalid: {shown_for_model(error)}"
        return ToolCall(self.name, _certain(text), call_id, text, self.function, fault)


def plain_call(name: str, text: str, call_id: str) -> ToolCall:
    """A call of a tool that is not known here; with a fault if its arguments are truncated."""
    return ToolCall(name, _certain(text), call_id, text, fault=_incompleteness(text))


def _incompleteness(text: str) -> str:
    """The reason why ``text`` is no JSON object; empty if it is one."""
    if CalledTool("", "", text).is_whole:
        return ""
    return f"its arguments are no whole JSON object (max_tokens may have cut them): {text[-100:]!r}"


def _require_kept(schema: dict[str, Any], text: str) -> None:
    """``ValueError`` if arguments violate a schema that the backend should enforce: a server may ignore it.
    Arguments that cannot be checked in a bounded time, or without the package for it, are accepted."""
    try:
        from agentflow.protocol.bounds.schema_check import SchemaCheck
    except ImportError:
        return
    try:
        found = SchemaCheck(schema).violations(text)
    except CannotCheck:
        return
    if found.paths:
        raise ValueError(found.message)


def _certain(text: str) -> dict[str, Any]:
    """The certain part of truncated arguments."""
    try:
        found = partial_value(text)
    except NothingYet:
        return {}
    return found if isinstance(found, dict) else {}


def shown_for_model(error: BaseException) -> str:
    """The error as text for the model. Text that could not be sent is escaped."""
    lone = first_error(error) if isinstance(error, Exception) else error
    name = "" if type(lone) is ValueError else f"{type(lone).__name__}: "
    shown = shown_error(lone, str)
    text = f"{name}{shown}" if shown else type(lone).__name__
    return escape_surrogates(text)


def escape_surrogates(text: str) -> str:
    """The text, in which half a surrogate pair, which cannot be sent, is escaped."""
    return text.encode("utf-8", "backslashreplace").decode()


_read_object = msgspec.json.Decoder(dict[str, Any]).decode


def described_tool(tool: Tool) -> DescribedTool:
    """The tool with its name, its schema and its limits. ``BadArgument`` if it is not a tool."""
    return replace(_described(tool), given=tool)


def _described(tool: Tool) -> DescribedTool:
    if isinstance(tool, Mapping):
        inner = tool.get("function", tool)  # OpenAI wraps it: {"type": "function", "function": {…}}
        given, parameters = inner.get("name"), inner.get("parameters", {"type": "object", "properties": {}})
        if not isinstance(given, str) or not given or not isinstance(parameters, Mapping):
            raise BadArgument("a tool's schema needs a name, and parameters that are a JSON schema")
        description = inner.get("description")
        described = description if isinstance(description, str) else ""
        is_strict = inner.get("strict") is True
        return DescribedTool(given, described, dict(parameters), _read_object, is_strict=is_strict)
    if not isinstance(tool, FunctionTool):
        if not callable(tool):
            raise BadArgument(f"a tool is a function or a schema, not {tool!r}")
        tool = FunctionTool(tool)
    function = tool.function
    named = function.func if isinstance(function, partial) else function
    name = str(tool.name or getattr(named, "__name__", type(named).__name__))
    if name == "<lambda>":
        raise BadArgument("a tool needs a name: give a lambda one with af.tool(…, name=…)")
    described = inspect.getdoc(named) or "" if tool.description is None else tool.description
    limits = (tool.timeout_s, tool.max_calls)
    if tool.parameters is not None:
        return DescribedTool(name, described, dict(tool.parameters), _read_object, function, *limits)
    parameters, read = parameters_type(name, function)
    return DescribedTool(name, described, parameters, read, function, *limits, is_typed=True)
