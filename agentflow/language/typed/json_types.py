"""Python types as JSON schemas, and readers of their values.

``json_type`` takes any type that pydantic's ``TypeAdapter`` or msgspec take. pydantic describes types that
mention it anywhere (a model, a ``Field``, a validator), and types for which msgspec has no form; msgspec
describes all others. No constraint is dropped: rules that a grammar cannot enforce are checked when the value
is read.

pydantic is imported only for types that need it. ``partial_value`` reads JSON that is still generated.
"""

from __future__ import annotations

import copy
import dataclasses
import datetime
import functools
import importlib.util
import inspect
import json
import operator
import re
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, Final, Literal, NamedTuple, TypeAlias, get_args, get_origin, get_type_hints

import jiter
import msgspec

from agentflow.errors import BadArgument, error_param
from agentflow.language.failures.mistakes import defined_at
from agentflow.protocol.record import Record
from agentflow.protocol.schemas.decimals import MOST_DIGITS, Endpoint, decimal_pattern
from agentflow.protocol.schemas.hoisting import hoisted, stands_alone
from agentflow.protocol.schemas.walk import (
    FORMATS,
    NAIVE_PATTERN_OF_FORMAT,
    PATTERN_OF_FORMAT,
    resolved,
    subschemas,
)

JsonSchema: TypeAlias = dict[str, Any]
ReadJson: TypeAlias = Callable[[str | bytes], Any]
"""Reads a value from JSON. ``ValueError`` if it is not valid."""

_PYDANTIC: Final = frozenset({"pydantic", "pydantic_core", "annotated_types"})
"""Packages whose metadata in ``Annotated`` constrains a type. msgspec would ignore it."""


_INSTEAD = " (write a pydantic model, a dataclass, a TypedDict, or a type such as list[str])"


class TypedJson(NamedTuple):
    """A type as JSON. ``adapter``: pydantic's ``TypeAdapter``; None for a type that msgspec describes."""

    schema: JsonSchema
    read: ReadJson
    adapter: Any = None


def json_type(kind: Any, where: str = "gen: schema") -> tuple[JsonSchema, ReadJson]:
    """The schema of a type and the reader of its values. ``BadArgument``, which begins with ``where``, if the
    type has no form in JSON or is an instance."""
    found = typed_json(kind, where)
    return enforceable(found.schema), TypeReader(kind, found.read)


class TypeReader:
    """The reader of a type's values. It is pickled as the type."""

    __slots__ = ("_kind", "_read")

    def __init__(self, kind: Any, read: ReadJson) -> None:
        self._kind = kind
        self._read = read

    def __call__(self, data: str | bytes) -> Any:
        return self._read(data)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _make_reader, (self._kind,)


def _make_reader(kind: Any) -> ReadJson:
    return json_type(kind)[1]


def typed_json(kind: Any, where: str) -> TypedJson:
    """Like ``json_type``, with keywords in the schema that a grammar cannot enforce."""
    shown = shown_type(kind)
    if isinstance(kind, str):
        raise BadArgument(f"{where}: give the type itself, not the string {kind!r:.80}")
    if _is_instance(kind):
        name = type(kind).__name__
        raise BadArgument(f"{where}: give the type {name}, not an instance of it")
    try:
        libraries = find_libraries(kind)
        if {"msgspec", "pydantic"} <= libraries:
            raise TypeError("it has both msgspec's structs or constraints and pydantic's: use one of the two")
        if libraries == {"keys"} and importlib.util.find_spec("pydantic") is not None:
            libraries.add("pydantic")  # msgspec's schemas omit the types of dict keys
        return _of_pydantic(kind) if "pydantic" in libraries else _of_either(kind)
    except Exception as error:  # an annotation may be undefined, and pydantic has errors of many types
        why = _shown_error(error)
        raise BadArgument(f"{where}: {shown} cannot be expressed as JSON: {why}{_INSTEAD}") from None


def parameters_type(name: str, function: Callable[..., Any]) -> tuple[JsonSchema, ReadJson]:
    """The schema of an object with the function's parameters, and a reader that makes keyword arguments from
    it. ``BadArgument`` if the function cannot be called with keyword arguments, or a type has no form in
    JSON."""
    try:
        parameters = inspect.signature(function, eval_str=True).parameters.values()
    except Exception as error:  # evaluating an annotation may raise anything
        raise BadArgument(f"tool {name!r}: its signature cannot be read: {error}", param="tools") from None
    members: dict[str, JsonSchema] = {}
    readers: dict[str, ReadJson] = {}
    defaults: dict[str, Callable[[], Any]] = {}
    definitions: dict[str, JsonSchema] = {}
    for parameter in parameters:
        where = f"tool {name!r}: parameter {parameter.name!r}"
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise BadArgument(
                f"{where} is positional-only or variadic; tools need named parameters", param="tools"
            )
        if parameter.annotation is parameter.empty:
            raise BadArgument(
                f"{where} has no type annotation, as in {parameter.name}: str ({defined_at(function)})",
                param="tools",
            )
        kind, default = parameter.annotation, parameter.default
        if _is_pydantic_field(default):
            kind = Annotated[kind, default]
            if not default.is_required():
                defaults[parameter.name] = functools.partial(default.get_default, call_default_factory=True)
        elif default is not parameter.empty:
            defaults[parameter.name] = functools.partial(_same, default)
        with error_param("tools"):
            schema, readers[parameter.name] = json_type(kind, where)
        members[parameter.name] = with_definitions(parameter.name, schema, definitions)
    found: JsonSchema = {"type": "object", "properties": members, "additionalProperties": False}
    found["required"] = [member for member in members if member not in defaults]
    if definitions:
        found["$defs"] = definitions

    def read(data: str | bytes) -> dict[str, Any]:
        given = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
        if unknown := given.keys() - readers.keys():
            raise ValueError(f"there is no parameter {min(unknown)!r}")
        if missing := readers.keys() - given.keys() - defaults.keys():
            raise ValueError(f"parameter {min(missing)!r} is missing")
        return {
            member: _read_member(member, reader, given[member]) if member in given else defaults[member]()
            for member, reader in readers.items()
        }

    return found, read


def with_definitions(name: str, schema: JsonSchema, definitions: dict[str, JsonSchema]) -> JsonSchema:
    """``schema`` as part of a larger one: its definitions move into ``definitions``. If another one has the
    same name, or the schema has ids, they are prefixed with ``name``."""
    own = schema.get("$defs", {})
    if any(definitions.get(key, value) != value for key, value in own.items()) or stands_alone(schema):
        return hoisted(name, schema, definitions)
    definitions |= own
    return {key: value for key, value in schema.items() if key != "$defs"}


def _read_member(name: str, read: ReadJson, data: msgspec.Raw) -> Any:
    try:
        return read(bytes(data))
    except ValueError as error:
        raise ValueError(f"parameter {name!r}: {error}") from None


def _same(value: Any) -> Any:
    return value


def shown_type(kind: Any) -> str:
    """The type as a program writes it: ``list[Report]``.

    >>> shown_type(int), shown_type(list[int] | None)
    ('int', 'list[int] | None')
    """
    if isinstance(kind, type) and not get_args(kind):
        return kind.__qualname__.rpartition(".<locals>.")[2]
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return shown_type(inner[0])
    if origin in (typing.Union, types.UnionType):
        return " | ".join(["None" if one is type(None) else shown_type(one) for one in inner])
    if origin is Literal or origin is None:
        return repr(kind).removeprefix("typing.")
    return f"{shown_type(origin)}[{', '.join([shown_type(one) for one in inner])}]"


def _is_instance(kind: Any) -> bool:
    """Whether it is an object whose type was probably meant: a model, a struct or a dataclass."""
    if isinstance(kind, type) or get_origin(kind) is not None:
        return False
    of_model = hasattr(type(kind), "__pydantic_core_schema__")
    return of_model or isinstance(kind, msgspec.Struct) or dataclasses.is_dataclass(kind)


def _shown_error(error: Exception) -> str:
    """The first line of the message, without pydantic's advice to its own users."""
    line = str(error).partition("\n")[0].partition(". Set `arbitrary_types_allowed")[0]
    return line or type(error).__name__


def find_libraries(kind: Any) -> set[str]:
    """Which of msgspec and pydantic the type mentions, at any depth; ``keys`` for a dict whose keys are not
    plain strings."""
    found: set[str] = set()
    pending, seen = [kind], dict[int, Any]()  # keeps the objects alive, so that their ids stay unique
    while pending:
        one = pending.pop()
        if id(one) in seen:
            continue
        seen[id(one)] = one
        if get_origin(one) is Annotated:
            found |= {library for meta in one.__metadata__ for library in _libraries_of_metadata(meta)}
        if get_origin(one) is not Literal:
            pending += get_args(one)
        if get_origin(one) in (dict, Mapping) and get_args(one)[0] not in (str, Any):
            found.add("keys")
        pending += [getattr(one, "__value__", None), get_origin(one)]  # of ``type X = ...``
        if not isinstance(one, type):
            continue
        if issubclass(one, Record):
            continue  # which either library reads and writes
        if hasattr(one, "__get_pydantic_core_schema__") or hasattr(one, "__pydantic_core_schema__"):
            found.add("pydantic")  # which looks into it itself
            continue
        if issubclass(one, msgspec.Struct):
            found.add("msgspec")
        if dataclasses.is_dataclass(one):
            found |= {"pydantic" for field in dataclasses.fields(one) if _is_pydantic_field(field.default)}
        if _has_members(one):
            pending += get_type_hints(one, include_extras=True).values()
    return found


def _libraries_of_metadata(meta: Any) -> set[str]:
    if isinstance(meta, msgspec.Meta):
        return {"msgspec"}
    package = type(meta).__module__.partition(".")[0]
    return {"pydantic"} if package in _PYDANTIC or hasattr(meta, "__get_pydantic_core_schema__") else set()


def _is_pydantic_field(default: Any) -> bool:
    pydantic = sys.modules.get("pydantic.fields")
    return pydantic is not None and isinstance(default, pydantic.FieldInfo)


def _has_members(kind: type) -> bool:
    is_attrs = hasattr(kind, "__attrs_attrs__")
    is_named_tuple = issubclass(kind, tuple) and hasattr(kind, "_fields")
    return (
        dataclasses.is_dataclass(kind)
        or typing.is_typeddict(kind)
        or issubclass(kind, msgspec.Struct)
        or is_named_tuple
        or is_attrs
    )


def _of_either(kind: Any) -> TypedJson:
    try:
        return TypedJson(_of_msgspec(kind), msgspec.json.Decoder(kind).decode)
    except Exception:  # a KeyError for two classes of one name
        if importlib.util.find_spec("pydantic") is None:
            raise
    return _of_pydantic(kind)


def _of_msgspec(kind: Any) -> JsonSchema:
    """msgspec's schema, in which times have a format. It leaves that out where the offset is optional."""
    schema = msgspec.json.schema(_with_offsets(kind))
    definitions = schema.get("$defs", {})
    for one in _classes_in(kind):
        members = definitions.get(one.__name__, {}).get("properties", {})
        names: dict[str, str] = {}
        if issubclass(one, msgspec.Struct):
            names = {field.name: field.encode_name for field in msgspec.structs.fields(one)}
        for name, hint in get_type_hints(one, include_extras=True).items():
            member = members.get(names.get(name, name))
            if member is not None and (timed := _with_offsets(hint)) != hint:
                found = msgspec.json.schema(timed)
                found.pop("$defs", None)
                members[names.get(name, name)] = {**member, **found}
    return schema


def _classes_in(kind: Any) -> list[type]:
    """The classes with members that the type mentions, at any depth."""
    found: list[type] = []
    pending = [kind]
    while pending:
        one = pending.pop()
        pending += [part for part in (*get_args(one), getattr(one, "__value__", None)) if part is not None]
        if isinstance(one, type) and one not in found and _has_members(one):
            found.append(one)
            pending += get_type_hints(one, include_extras=True).values()
    return found


def _with_offsets(kind: Any) -> Any:
    """The type whose times require an offset, unless they declare otherwise. Times without an offset are
    strings with a pattern, because msgspec's schema does not describe them. Times inside classes are
    unchanged."""
    if kind in (datetime.datetime, datetime.time):
        return Annotated[kind, msgspec.Meta(tz=True)]
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated and inner[0] in (datetime.datetime, datetime.time):
        metas = [meta for meta in inner[1:] if isinstance(meta, msgspec.Meta)]
        has_offset = next((meta.tz for meta in reversed(metas) if meta.tz is not None), None)
        if has_offset is False:
            pattern = NAIVE_PATTERN_OF_FORMAT["time" if inner[0] is datetime.time else "date-time"]
            told = [msgspec.Meta(**{name: getattr(meta, name) for name in _TOLD}) for meta in metas]
            return Annotated[(str, *told, msgspec.Meta(pattern=pattern))]
        if has_offset is not None:
            return kind
    return _with_parts(kind, _with_offsets)


_TOLD: Final = ("title", "description", "examples", "extra_json_schema")


def _with_parts(kind: Any, change: Callable[[Any], Any]) -> Any:
    """The type with its arguments changed, as ``list[int]`` of ``list[str]``."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is None or origin is Literal:
        return kind
    if origin is Annotated:
        return Annotated[(change(inner[0]), *inner[1:])]
    changed = tuple([change(one) if not isinstance(one, list) else one for one in inner])
    if changed == inner:
        return kind
    if origin in (typing.Union, types.UnionType):
        return functools.reduce(operator.or_, changed)
    return origin[changed]


def type_adapter(kind: Any) -> Any:
    """pydantic's ``TypeAdapter`` of a type."""
    if importlib.util.find_spec("pydantic") is None:
        raise TypeError("its constraints need pydantic, which is not installed")
    import pydantic

    return pydantic.TypeAdapter(_with_new_typed_dicts(kind))


def _of_pydantic(kind: Any) -> TypedJson:
    import pydantic

    adapter = type_adapter(kind)
    schema = adapter.json_schema(schema_generator=schema_generator())

    def read(data: str | bytes) -> Any:
        try:
            return adapter.validate_json(data)
        except pydantic.ValidationError as error:
            raise NotValid(error.errors(include_url=False)) from error

    return TypedJson(schema, read, adapter)


class NotValid(ValueError):
    """A value that a type's validators reject. ``errors``: as pydantic lists them."""

    def __init__(self, errors: Iterable[Mapping[str, Any]]) -> None:
        self.errors = tuple(errors)
        shown = []
        for error in self.errors:
            place = ".".join(map(str, error["loc"]))
            shown.append(f"{place}: {error['msg']}" if place else error["msg"])
        super().__init__("; ".join(shown))


@functools.cache
def schema_generator() -> Any:
    """pydantic's generator of schemas, with decimals as strings of bounded length, which keep every digit,
    and with patterns for times that must not have an offset."""
    from pydantic.json_schema import GenerateJsonSchema

    class Generator(GenerateJsonSchema):
        def decimal_schema(self, schema: Any) -> JsonSchema:
            max_digits = schema.get("max_digits")
            places = schema.get("decimal_places", MOST_DIGITS)
            places = places if max_digits is None else min(places, max_digits)
            limits = {key: Endpoint(schema[key], key in ("gt", "lt")) for key in _LIMITS if key in schema}
            pattern = decimal_pattern(
                [limits[key] for key in ("ge", "gt") if key in limits],
                [limits[key] for key in ("le", "lt") if key in limits],
                whole_digits=MOST_DIGITS if max_digits is None else max_digits - places,
                places=places,
            )
            return {"type": "string", "pattern": pattern}

        def datetime_schema(self, schema: Any) -> JsonSchema:
            return self._without_offset(schema, "date-time") or super().datetime_schema(schema)

        def time_schema(self, schema: Any) -> JsonSchema:
            return self._without_offset(schema, "time") or super().time_schema(schema)

        def _without_offset(self, schema: Any, kind: str) -> JsonSchema | None:
            is_naive = schema.get("tz_constraint") == "naive"
            return {"type": "string", "pattern": NAIVE_PATTERN_OF_FORMAT[kind]} if is_naive else None

        def dict_schema(self, schema: Any) -> JsonSchema:
            found = super().dict_schema(schema)
            if "keys_schema" in schema and "patternProperties" not in found:
                keys = schema["keys_schema"]
                names = self.generate_inner(keys)
                is_literal = keys["type"] == "literal" or (keys["type"] == "enum" and "sub_type" not in keys)
                is_number = is_literal and _has_other_than_text(keys)  # which is never read from text
                if is_number or names.get("type") in ("array", "object"):
                    raise TypeError(
                        "the keys of a dict must have a form as text, such as str, int or an enum of texts"
                    )
                found["propertyNames"] = names
            return found

        def model_field_schema(self, schema: Any) -> JsonSchema:
            self._refuse_path(schema)
            return super().model_field_schema(schema)

        def dataclass_field_schema(self, schema: Any) -> JsonSchema:
            self._refuse_path(schema)
            return super().dataclass_field_schema(schema)

        def _refuse_path(self, field: Any) -> None:
            alias = field.get("validation_alias")
            config = self._config
            by_name = config.populate_by_name or getattr(config, "validate_by_name", False)  # since 2.11
            if isinstance(alias, list) and not by_name:
                paths = alias if isinstance(alias[0], list) else [alias]
                if all(len(path) > 1 for path in paths):
                    raise TypeError(f"a field is read from the path {paths[0]}, where it is not written")

        def generator_schema(self, schema: Any) -> JsonSchema:
            raise TypeError("an Iterable would be read later, and not be checked: write a list")

    return Generator


def _has_other_than_text(keys: Any) -> bool:
    """Whether a literal or an enum, in pydantic's form, has values that are no strings."""
    values = keys["expected"] if keys["type"] == "literal" else [one.value for one in keys["members"]]
    return not all(isinstance(value, str) for value in values)


_LIMITS: Final = ("ge", "gt", "le", "lt")


def _with_new_typed_dicts(kind: Any) -> Any:
    """The type with ``typing_extensions.TypedDict`` for ``typing.TypedDict``, which pydantic rejects before
    Python 3.12. Types inside classes are unchanged."""
    if sys.version_info >= (3, 12):
        return kind
    if isinstance(kind, type) and typing.is_typeddict(kind) and type(kind).__module__ == "typing":
        import typing_extensions

        hints = get_type_hints(kind, include_extras=True)
        form = {}
        for name, hint in hints.items():
            marker = get_origin(hint)  # postponed annotations hide it from __required_keys__
            if marker not in (typing.Required, typing.NotRequired):
                marker = typing.Required if name in kind.__required_keys__ else typing.NotRequired  # type: ignore[attr-defined]
            else:
                (hint,) = get_args(hint)
            form[name] = marker[_with_new_typed_dicts(hint)]
        new = typing_extensions.TypedDict(kind.__name__, form)  # type: ignore[misc]
        new.__doc__ = kind.__doc__
        return new
    return _with_parts(kind, _with_new_typed_dicts)


def enforceable(schema: JsonSchema) -> JsonSchema:
    """The schema of a type, without the keywords that the engine rejects because a grammar cannot enforce
    them. The type's reader enforces these.

    >>> enforceable({"type": "array", "items": {"type": "integer"}, "uniqueItems": True})
    {'type': 'array', 'items': {'type': 'integer'}}
    """
    root = copy.deepcopy(schema)
    for one in list(subschemas(root)):
        one.pop("uniqueItems", None)
        if one.get("minProperties", 0) > 1:
            one["minProperties"] = 1
        _fit_format(one)
        _fit_names(one, root)
        _fit_discriminator(one, root)
    return root


def _fit_format(schema: JsonSchema) -> None:
    name = schema.get("format")
    if name == "decimal":  # msgspec's
        schema["pattern"] = decimal_pattern()
    if name is not None and name not in FORMATS:
        del schema["format"]


def _fit_names(schema: JsonSchema, root: JsonSchema) -> None:
    """Names of members that are an enumeration become optional members, others match a pattern."""
    names = resolved(schema.pop("propertyNames", None), root)
    if "patternProperties" in schema:  # pydantic's form of keys with a pattern
        schema.setdefault("additionalProperties", False)
        return
    if "properties" in schema:
        return
    member = schema.get("additionalProperties", True)
    allowed = [names["const"]] if "const" in names else names.get("enum")
    if names.get("type") == "boolean":
        allowed = [True, False]
    if allowed and all(isinstance(name, str | int) for name in allowed):
        written = [name if isinstance(name, str) else json.dumps(name) for name in allowed]
        schema["properties"] = dict.fromkeys(written, member)
        schema["additionalProperties"] = False
    elif (pattern := _pattern_of_names(names)) is not None:
        schema["patternProperties"] = {pattern: member}
        schema["additionalProperties"] = False


def _pattern_of_names(names: JsonSchema) -> str | None:
    """The pattern of names with this schema. None if all are allowed."""
    if names.get("type") in ("integer", "number"):
        fraction = "" if names["type"] == "integer" else r"(\.[0-9]{1,15})?"
        least = max(names.get("minimum", -1), names.get("exclusiveMinimum", -2) + 1)
        zero = "" if least >= 1 else "0|" if least >= 0 else "-?0|-?"
        return f"^({zero}[1-9][0-9]{{0,14}}){fraction}$"
    if "pattern" in names:
        return str(names["pattern"])
    if names.get("format") in PATTERN_OF_FORMAT:
        return f"^(?:{PATTERN_OF_FORMAT[names['format']]})$"
    if "minLength" in names or "maxLength" in names:
        most = names.get("maxLength", "")
        return rf'^[^\x00-\x1f"\\]{{{names.get("minLength", 0)},{most}}}$'
    return None


def _fit_discriminator(schema: JsonSchema, root: JsonSchema) -> None:
    """The engine accepts ``oneOf`` only for options that exclude each other by a required member. The reader
    decides which of several options a value has, also by a function. A default makes the discriminator
    optional, but the reader requires it."""
    if "oneOf" not in schema or "anyOf" in schema:
        return
    options = schema["anyOf"] = schema.pop("oneOf")
    discriminator = schema.pop("discriminator", None)
    if not isinstance(discriminator, dict):
        return
    name = discriminator["propertyName"]
    for option in options:
        target = resolved(option, root)
        if name in target.get("properties", {}) and name not in target.get("required", []):
            target["required"] = [*target.get("required", []), name]


_NUMBER_CHARS = "0123456789+-.eE"
_STRING = re.compile(r'"(?:[^"\\]|\\.)*+("?)', re.DOTALL)
"""A string, and its closing quote if it has one."""


class NothingYet(ValueError):
    """No part of the value is certain yet."""


def partial_value(text: str) -> Any:
    """The part of a JSON value that ``text``, a prefix of it, determines. ``NothingYet`` if there is none, or
    if ``text`` is not a prefix of JSON.

    The result only grows with the text: strings and lists become longer and records get more fields. A part
    that may still change (``12`` of ``123``, ``tr`` of ``true``) is left out.

    >>> partial_value('{"title": "Leav')
    {'title': 'Leav'}
    """
    try:
        # A lone surrogate cannot be encoded; no engine writes one.
        data = _without_open_number(text).encode()
        return jiter.from_json(data, partial_mode="trailing-strings", allow_inf_nan=False)
    except ValueError as error:
        raise NothingYet(str(error)) from None


def _without_open_number(text: str) -> str:
    """``text`` without a number at its end that may get more digits."""
    before = text.rstrip(_NUMBER_CHARS)
    has_digits = any(char.isdigit() for char in text[len(before) :])
    is_in_string = "" in _STRING.findall(before)
    return before if has_digits and not is_in_string else text
