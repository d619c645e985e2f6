"""What ``gen``'s ``schema``, ``type``, ``choices``, ``tools`` and ``tags`` mean.

A ``ValueType`` has a constraint for the backend and a reader that makes a Python value of the text.
``value_type`` makes it of ``gen``'s arguments. ``Toolbox`` describes functions as tools: the model writes a
JSON list of calls, ``[{"name": ..., "arguments": {...}}, ...]``, and each call gets arguments of the types in
the function's signature. ``Tag`` constrains places in free text, and ``split_at_tags`` finds them in the
generated text.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec
import regex

from agentflow.errors import BadArgument
from agentflow.protocol.chat import ToolSpec, hoisted
from agentflow.protocol.constraint import Constraint, TagRule, Whitespace
from agentflow.protocol.transform import REGEX_TIMEOUT_S


@dataclass(frozen=True, slots=True)
class ValueType:
    """``shown``: its name in messages. ``constraint``: on the text, if any. ``read``: makes the value of a
    text; raises ``ValueError`` for an invalid one. ``comes_in_parts``: the text is JSON, and iterating over a
    variable yields partial values instead of text. ``is_reply``: it is an assistant's whole reply, tool calls
    included."""

    shown: str
    constraint: Constraint | None
    read: Callable[[str], Any]
    comes_in_parts: bool = False
    is_reply: bool = False

    @property
    def may_be_truncated(self) -> bool:
        """Whether a truncated text can be a value: free text can, ``12`` of ``123`` cannot."""
        return self.constraint is None or self.constraint.kind == "tags" or self.is_reply

    def decoded(self, whitespace: Whitespace, jump_forward: bool) -> ValueType:
        """The same with these options of its constraint. ``BadArgument`` if it has none."""
        if whitespace == "compact" and jump_forward is True:
            return self
        if self.constraint is None:
            name = "whitespace" if whitespace != "compact" else "jump_forward"
            raise BadArgument(
                f"gen: {name} applies to a constraint, and this gen has none: give a schema, for example"
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
    """The type that one of these arguments names. ``BadArgument`` if it is invalid, or if several are
    given."""
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
    """``BadArgument`` if more than one of these is given."""
    names = [name for name, value in given.items() if value is not None]
    if len(names) > 1:
        raise BadArgument(f"{where}: {' and '.join(names)} exclude each other: give one of them")


def of_json_schema(schema: Mapping[str, Any], read: Callable[[str], Any], shown: str) -> ValueType:
    """A value with a JSON schema. ``BadArgument`` if the schema is invalid."""
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
    except Exception as error:  # an annotation may be undefined, and a type may have no JSON form
        raise BadArgument(
            f"gen: schema {name!r} cannot be expressed as JSON ({_first_line(error)}): "
            "give a pydantic model, a dataclass, a TypedDict or a JSON schema"
        ) from None
    # Type checkers expect that iterating over a string or a number yields text.
    is_scalar = isinstance(schema, type) and issubclass(schema, str | int | float)
    return ValueType(name, _schema(described), read, comes_in_parts=not is_scalar)


def _schema(schema: Mapping[str, Any]) -> Constraint:
    try:
        return Constraint("schema", json.dumps(schema, ensure_ascii=False)).check()
    except (TypeError, ValueError, RecursionError) as error:
        raise BadArgument(f"gen: schema is not a JSON schema: {error}") from None


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


_SCALARS: dict[type, Constraint] = {
    int: Constraint("regex", r"-?(0|[1-9][0-9]{0,17})"),
    float: Constraint("regex", r"-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,17})?([eE][+-]?[0-9]{1,3})?"),
    bool: Constraint("choices", choices=("true", "false")),
}


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
        """The schema of one call of any of the tools, and the definitions that it refers to."""
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
        """The calls in ``text``. ``ValueError`` if it is not a list of calls of these tools."""
        return [self._call(raw) for raw in msgspec.json.decode(text, type=list[_RawCall])]

    def read_call(self, text: str) -> ToolCall:
        """The call in ``text``. ``ValueError`` if it is not a call of one of these tools."""
        return self._call(msgspec.json.decode(text, type=_RawCall))

    def _call(self, raw: _RawCall) -> ToolCall:
        tool = self._tools.get(raw.name)
        if tool is None:
            raise ValueError(f"there is no tool {raw.name!r} (there are: {', '.join(self._tools)})")
        return ToolCall(tool.name, tool.arguments(raw.arguments), tool.function)


@dataclass(frozen=True, slots=True)
class _Described:
    """A tool. ``signature``: of a function, as a struct; ``parameters``: of a tool that is a schema."""

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
    except Exception as error:  # evaluating an annotation may raise anything
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


class Tag:
    """A place in the text of ``gen(tags=[...])``: its content, between ``begin`` and ``end``, matches a
    ``schema``, a ``regex`` or a ``grammar`` (as in ``gen``), or is a call of one of the ``tools``. The text
    around tags is free, and there may be no tags.

    The value of the gen is a list of pieces in order: a string for free text and an ``af.Tagged`` for each
    tag. ``BadArgument`` if the arguments are invalid.

    >>> call = af.Tag("<call>", tools=[weather], end="</call>")
    >>> reply = af.gen("reply", tags=[call])
    >>> s += af.user("Should I take an umbrella in Oslo?") + af.assistant(reply)
    >>> for piece in await s[reply]:
    ...     print(piece if isinstance(piece, str) else piece.value())
    Let me look.
    rain in Oslo
    """

    def __init__(
        self,
        begin: str,
        *,
        end: str,
        schema: Any = None,
        regex: str | None = None,
        grammar: str | None = None,
        tools: Sequence[Tool] | None = None,
    ) -> None:
        self.begin = begin
        self.end = end
        refuse_several({"schema": schema, "regex": regex, "grammar": grammar, "tools": tools}, where="Tag")
        if tools is not None:
            self._type = _one_call(Toolbox(tools))
        else:
            self._type = value_type(schema=schema, regex=regex, grammar=grammar)
        constraint = self._type.constraint
        if constraint is None:
            raise BadArgument(f"Tag({begin!r}): give a schema, a regex, a grammar or tools")
        assert constraint.kind == "schema" or constraint.kind == "regex" or constraint.kind == "grammar"
        self._rule = TagRule(begin, constraint.kind, constraint.source, end)
        self._rule.check()
        if not end:
            raise BadArgument(f"Tag({begin!r}): end must not be empty, because it ends the tag")

    def __repr__(self) -> str:
        return f"<Tag {self.begin!r} … {self.end!r}: {self._type.shown}>"


@dataclass(frozen=True, slots=True)
class Tagged:
    """The content of a tag: its ``text``, without ``begin`` and ``end``, and its ``value``: the typed value
    for a schema, an ``af.ToolCall`` for tools, the text for a regex or a grammar.

    >>> reply = af.gen("reply", tags=[af.Tag("<call>", tools=[weather], end="</call>")])
    >>> s += af.user("Should I take an umbrella in Oslo?") + af.assistant(reply)
    >>> prose, call = await s[reply]
    >>> call.tag.begin, call.text, call.value.arguments
    ('<call>', '{"name": "weather", "arguments": {"city": "Oslo"}}', {'city': 'Oslo'})
    """

    tag: Tag
    text: str
    value: Any


def tagged_type(tags: Sequence[Tag]) -> ValueType:
    """The type of ``gen(tags=...)``."""
    if isinstance(tags, str) or not isinstance(tags, Sequence) or not all(isinstance(t, Tag) for t in tags):
        raise BadArgument(f"gen: tags must be a list of af.Tag, not {tags!r}")
    rules = tuple([tag._rule for tag in tags])
    source = msgspec.json.encode(rules).decode()

    def read(text: str) -> list[str | Tagged]:
        return [
            piece if isinstance(piece, str) else _tagged(tags[piece.index], piece.text)
            for piece in split_at_tags(text, rules)
        ]

    return ValueType("text with tags", Constraint("tags", source).check(), read)


def _tagged(tag: Tag, text: str) -> Tagged:
    return Tagged(tag, text, tag._type.read(text))


def _one_call(toolbox: Toolbox) -> ValueType:
    return of_json_schema(toolbox.call_schema(), toolbox.read_call, "tool call")


_SPACE = " \t\n\r"
_JSON = json.JSONDecoder()


@dataclass(frozen=True, slots=True)
class InTag:
    """The text between ``begin`` and ``end`` of the rule with this index."""

    index: int
    text: str


def split_at_tags(text: str, rules: tuple[TagRule, ...]) -> list[str | InTag]:
    """The free text and the contents of tags, in order, without empty free text. ``ValueError`` if a tag is
    not closed or its content is invalid; grammars are not checked.

    The content may contain the tag's end, for example in a JSON string. A tag ends at the first ``end``
    before which its content is complete."""
    index_of = {rule.begin: index for index, rule in enumerate(rules)}
    begins = re.compile("|".join([re.escape(begin) for begin in index_of]))
    pieces: list[str | InTag] = []
    at = 0
    while (begin := begins.search(text, at)) is not None:
        index = index_of[begin.group()]
        rule = rules[index]
        end = _end_of(text, begin.end(), rule)
        if end is None:
            raise ValueError(f"{rule.begin!r} is not followed by a valid {rule.kind} and {rule.end!r}")
        pieces += [text[at : begin.start()], InTag(index, text[begin.end() : end])]
        at = end + len(rule.end)
    pieces.append(text[at:])
    return [piece for piece in pieces if piece]


def matches_whole(pattern: str, text: str) -> bool:
    """Whether all of ``text`` matches. ``BadArgument`` if the pattern is invalid, ``ValueError`` if matching
    takes too long."""
    try:
        return regex.fullmatch(pattern, text, timeout=REGEX_TIMEOUT_S) is not None
    except regex.error as error:
        raise BadArgument(f"{pattern!r:.200} is not a regular expression: {error}") from None
    except (TimeoutError, RecursionError):
        raise ValueError(f"matching {pattern!r:.200} takes too long") from None


def _end_of(text: str, start: int, rule: TagRule) -> int | None:
    """The position of the ``end`` of the tag whose content begins at ``start``; None if it has no end."""
    match rule.kind:
        case "schema":
            return _end_of_json(text, start, rule.end)
        case "regex":
            end = text.find(rule.end, start)
            while end >= 0 and not matches_whole(rule.source, text[start:end]):
                end = text.find(rule.end, end + 1)
        case "grammar":
            end = text.find(rule.end, start)
    return end if end >= 0 else None


def _end_of_json(text: str, start: int, end_mark: str) -> int | None:
    while start < len(text) and text[start] in _SPACE:
        start += 1
    try:
        _, value_end = _JSON.raw_decode(text, start)
    except (ValueError, RecursionError):
        return None
    end = text.find(end_mark, value_end)
    return end if end >= 0 and not text[value_end:end].strip(_SPACE) else None
