"""Writes values as JSON so that their types can read them back.

A value is written by the library that describes its type (``json_types``), under the names that the type
reads: aliases, without computed fields. ``JsonForm`` is the form of one type. ``json_text`` and ``as_plain``
write values whose type is not known in advance, by the class of each value.

Some types of pydantic write JSON that they cannot read: fields that are excluded or have another name in
JSON, serializers, secrets. ``_Adapter`` finds them by comparing the type's schemas for reading and for
writing.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import importlib.util
import json
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Final, Literal

import msgspec

from agentflow.errors import BadArgument
from agentflow.language.typed.json_types import (
    JsonSchema,
    TypedJson,
    find_libraries,
    schema_generator,
    shown_type,
    type_adapter,
    typed_json,
)
from agentflow.protocol.record import Record, is_sent_as_array
from agentflow.protocol.schemas.walk import resolved, subschemas

Order = Literal["deterministic"] | None


class JsonForm:
    """Writes values of a type as JSON, and reads them.

    Args:
        kind: The type.
        where: The beginning of an error's message.

    Raises:
        BadArgument: The type has no form in JSON, or cannot be read back from it.

    >>> days = JsonForm(list[datetime.date], "map")
    >>> days.plain([datetime.date(2024, 5, 1)])
    ['2024-05-01']
    """

    def __init__(self, kind: Any, where: str) -> None:
        found: TypedJson = typed_json(kind, where)
        self.read = found.read
        self._adapter = None if found.adapter is None else _Adapter(found.adapter)
        if self._adapter is not None and self._adapter.fault:
            raise BadArgument(
                f"{where}: {shown_type(kind)} cannot be read back from JSON: {self._adapter.fault}"
            )

    def plain(self, value: Any) -> Any:
        """The value in the types of JSON. ``ValueError`` if it has no such form."""
        with _as_value_error():
            return as_plain(value) if self._adapter is None else self._adapter.dumped(value)


class JsonRecord(Record):
    """A ``Record`` with values of any type."""

    __slots__ = ()

    def to_dict(self) -> dict[str, Any]:
        return {name: as_plain(getattr(self, name), is_read_back=False) for name in self._shown_fields()}


def json_text(value: Any, *, is_read_back: bool = True) -> str:
    """The value as JSON, with the compact white space of a schema.

    Args:
        value: A value that msgspec or pydantic accepts, by itself or in containers.
        is_read_back: As in ``as_plain``.

    Raises:
        ValueError: The value has no form in JSON.

    >>> json_text({"day": datetime.date(2024, 5, 1), "is_open": True})
    '{"day": "2024-05-01", "is_open": true}'
    """
    with _as_value_error():
        plain = as_plain(value, is_read_back=is_read_back)
        text = json.dumps(plain, ensure_ascii=False, allow_nan=False)
        # Half a surrogate pair cannot be sent. Its escape is JSON, but is not read everywhere.
        return text.encode(errors="strict" if is_read_back else "backslashreplace").decode()


def as_plain(value: Any, *, is_read_back: bool = True, order: Order = None) -> Any:
    """The value in the types of JSON: dicts, lists, strings, numbers.

    Args:
        value: A value that msgspec or pydantic accepts, by itself or in containers; scalars and arrays of
            numpy and pandas.
        is_read_back: Whether its type reads it again. Then computed fields are left out, and a type that
            cannot be read back is rejected. Secrets are rejected in either case.
        order: ``"deterministic"``: sets are sorted.

    Raises:
        TypeError, ValueError: The value has no such form.
    """
    kind: Any = type(value)
    if value is None or kind in _SCALARS:
        return value
    again = functools.partial(as_plain, is_read_back=is_read_back, order=order)
    if kind is tuple or isinstance(value, list | collections.deque):
        return [again(one) for one in value]
    if isinstance(value, dict):
        return {_plain_key(key): again(one) for key, one in value.items()}
    if isinstance(value, Record) and not (is_read_back and is_sent_as_array(kind)):
        return value.to_dict()
    adapter = _make_adapter(kind)
    if adapter is not None:
        return adapter.dumped(value, is_read_back=is_read_back)

    def unknown(part: Any) -> Any:
        """Converts a value of a type that msgspec does not know."""
        if type(part) is not kind:
            return again(part)
        for method in ("isoformat", "tolist"):
            if callable(found := getattr(part, method, None)):
                return again(found())
        other = _make_adapter(part.__class__, is_foreign=True)
        if other is None:
            advice = ": await it first" if hasattr(kind, "__await__") else ""
            raise TypeError(f"a {kind.__name__} has no form in JSON{advice}")
        return other.dumped(part, is_read_back=is_read_back)

    return msgspec.to_builtins(value, enc_hook=unknown, str_keys=True, order=order)


def record_fields(value: Any) -> dict[str, Any] | None:
    """The fields of a record (a dict, a dataclass, a struct, a model) in the types of JSON; None if it is no
    record. If a field has no form in JSON, it is unchanged."""
    kind: Any = type(value)
    is_record = is_dataclass(kind) or isinstance(value, Mapping | msgspec.Struct)
    if isinstance(value, type) or not (is_record or hasattr(kind, "model_dump")):
        return None
    with contextlib.suppress(Exception):  # a serializer of the user may raise anything
        return dict(as_plain(value, is_read_back=False))
    return {_column(key): _plain_or_same(member) for key, member in _named_members(value)}


def _named_members(value: Any) -> Iterator[tuple[Any, Any]]:
    """The members of a record under the names that its JSON has."""
    kind: Any = type(value)
    if isinstance(value, Mapping):
        yield from value.items()
        return
    if isinstance(value, msgspec.Struct):
        names = dict(zip(kind.__struct_fields__, kind.__struct_encode_fields__, strict=True))
    elif is_dataclass(kind):
        names = {one.name: one.name for one in fields(kind)}
    else:
        known = {**kind.model_fields, **kind.model_computed_fields}
        shown = {name: one for name, one in known.items() if not getattr(one, "exclude", None)}
        names = {name: getattr(one, "serialization_alias", None) or name for name, one in shown.items()}
        yield from (getattr(value, "__pydantic_extra__", None) or {}).items()
    for name, shown_name in names.items():
        try:
            member = getattr(value, name)
        except Exception:  # it was not set, or a computed field raises
            continue
        yield shown_name, member


def _plain_or_same(value: Any) -> Any:
    try:
        return as_plain(value, is_read_back=False)
    except Exception:
        return value


def _column(key: Any) -> str:
    try:
        return _plain_key(key)
    except Exception:
        return str(key)


_SCALARS: Final = (str, bool, int, float)


def _plain_key(key: Any) -> str:
    if type(key) is str:
        return key
    if isinstance(key, bool):  # as in ``json``
        return "true" if key else "false"
    found: dict[str, None] = msgspec.to_builtins({key: None}, str_keys=True)
    return next(iter(found))


@contextlib.contextmanager
def _as_value_error() -> Iterator[None]:
    try:
        yield
    except (TypeError, ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise ValueError(str(error)) from None


@functools.lru_cache(maxsize=256)
def _make_adapter(kind: type, *, is_foreign: bool = False) -> _Adapter | None:
    """The adapter of a class that pydantic describes. ``is_foreign``: msgspec has no form for it."""
    try:
        if is_foreign or "pydantic" in find_libraries(kind):
            return None if importlib.util.find_spec("pydantic") is None else _Adapter(type_adapter(kind))
    except Exception:  # an annotation may be undefined, and pydantic has errors of many types
        return None
    return None


class _Adapter:
    """A ``TypeAdapter`` of pydantic, and the difference between its schemas for reading and for writing.

    Attributes:
        fault: Why the type cannot be read back; empty if it can.
        secret: Which of its fields is a secret; empty if none is.
    """

    def __init__(self, adapter: Any) -> None:
        self._adapter = adapter
        self.secret = ""
        try:
            reads = adapter.json_schema(schema_generator=schema_generator())
            writes = adapter.json_schema(schema_generator=_generator_of_written(), mode="serialization")
        except Exception as error:  # pydantic has errors of many types
            self.fault = f"it has no schema: {error}"
        else:
            self.secret = _secret_in(writes)
            self.fault = self.secret or _Comparison(reads, writes).fault(reads, writes, "")

    def dumped(self, value: Any, *, is_read_back: bool = True) -> Any:
        """The value in the types of JSON. ``ValueError`` if the type does not allow it."""
        fault = self.fault if is_read_back else self.secret
        if fault:
            raise ValueError(f"a {type(value).__name__} has no form in JSON that can be read: {fault}")
        return self._adapter.dump_python(
            value, mode="json", by_alias=True, round_trip=is_read_back, warnings=False
        )


_UNKNOWN: Final = "x-serializer"
"""The key in the schema of a serializer without a return annotation; its value is the function's name."""
_SECRET: Final[JsonSchema] = {"type": "string", "format": "password", "writeOnly": True}
"""How pydantic describes a secret."""


@functools.cache
def _generator_of_written() -> Any:
    """The generator of a type's schema for writing with ``round_trip``."""

    class Generator(schema_generator()):  # type: ignore[misc]
        def generate_inner(self, schema: Any) -> JsonSchema:
            how = schema.get("serialization", {})
            if how.get("type") in ("function-plain", "function-wrap"):
                name = getattr(how["function"], "__name__", "")
                if not str(getattr(how["function"], "__module__", "")).startswith("pydantic."):
                    written = how.get("return_schema")
                    return {_UNKNOWN: name} if written is None else self.generate_inner(written)
                if "secret" in name:
                    return dict(_SECRET)
            found: JsonSchema = super().generate_inner(schema)
            return found

        def json_schema(self, schema: Any) -> JsonSchema:
            return {"type": "string"}  # the text of a ``Json`` field, also where it is written

    return Generator


def _secret_in(writes: JsonSchema) -> str:
    """Which field is a secret, in words."""
    for part in subschemas(writes):
        for name, member in part.get("properties", {}).items():
            if any(_is_secret(one) for one in subschemas(member)):
                return f"field {name!r} is a secret, of which JSON would have asterisks"
    is_secret = any(_is_secret(part) for part in subschemas(writes))
    return "it is a secret, of which JSON would have asterisks" if is_secret else ""


def _is_secret(schema: JsonSchema) -> bool:
    return schema.items() >= _SECRET.items()


class _Comparison:
    """Compares a type's schema for reading with its schema for writing."""

    def __init__(self, reads: JsonSchema, writes: JsonSchema) -> None:
        self._reads = reads
        self._writes = writes
        self._known: dict[tuple[Any, Any], str] = {}  # of pairs of definitions

    def fault(self, reads: JsonSchema, writes: JsonSchema, path: str) -> str:
        """The reason why the JSON written at this path cannot be read; empty if it can."""
        pair = reads.get("$ref"), writes.get("$ref")
        if pair == (None, None):
            return self._fault(reads, writes, path)
        if pair not in self._known:
            self._known[pair] = ""  # for a definition that refers to itself
            self._known[pair] = self._fault(
                resolved(reads, self._reads), resolved(writes, self._writes), path
            )
        return self._known[pair]

    def _fault(self, reads: JsonSchema, writes: JsonSchema, path: str) -> str:
        where = f"field {path!r}" if path else "it"
        if _UNKNOWN in writes:
            return f"{where} has the serializer {writes[_UNKNOWN]!r} without a return annotation"
        if (written := _options(writes)) is not None:
            faults = [self.fault(reads, one, path) for one in written]
            return next(filter(None, faults), "")
        if (read := _options(reads)) is not None:
            faults = [self.fault(one, writes, path) for one in read]
            return "" if "" in faults else faults[0]
        known, values = _values(reads), _values(writes)
        if known is not None and values is not None:
            return "" if all(value in known for value in values) else f"{where} is written as {values}"
        types, form = _types(reads), reads.get("format")
        is_typed = not types or (_types(writes) and _types(writes) <= types)
        if not is_typed or form not in (None, "password", writes.get("format")):
            return f"{where} is written as {_shown(writes)} and read as {_shown(reads)}"
        return self._fault_within(reads, writes, path)

    def _fault_within(self, reads: JsonSchema, writes: JsonSchema, path: str) -> str:
        members = writes.get("properties", {})
        for name, member in reads.get("properties", {}).items():
            inner = f"{path}.{name}" if path else name
            if name not in members:
                return f"field {inner!r} is excluded from its JSON, or has another name there"
            if fault := self.fault(member, members[name], inner):
                return fault
        parts: list[tuple[Any, Any]] = [
            (reads.get(key), writes.get(key)) for key in ("items", "additionalProperties")
        ]
        parts += zip(reads.get("prefixItems", ()), writes.get("prefixItems", ()), strict=False)
        patterns = (schema.get("patternProperties", {}).values() for schema in (reads, writes))
        parts += zip(*patterns, strict=False)
        both = [pair for pair in parts if all(isinstance(one, dict) for one in pair)]
        faults = [self.fault(read, written, f"{path}[]") for read, written in both]
        return next(filter(None, faults), "")


def _options(schema: JsonSchema) -> list[JsonSchema] | None:
    return schema.get("anyOf") or schema.get("oneOf") or schema.get("allOf")


def _values(schema: JsonSchema) -> list[Any] | None:
    return [schema["const"]] if "const" in schema else schema.get("enum")


def _types(schema: JsonSchema) -> set[str]:
    """The types that the schema names. A number may be an integer."""
    found = schema.get("type", [])
    names = {found} if isinstance(found, str) else set(found)
    return names | {"integer"} if "number" in names else names


def _shown(schema: JsonSchema) -> str:
    return str(schema.get("format") or schema.get("type") or "any value")
