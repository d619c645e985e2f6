"""The base of records that programs receive, such as ``Usage``, and may return from a web framework."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, get_type_hints

import msgspec


class Record:
    """A mixin of structs and dataclasses that are shown as JSON objects.

    ``to_dict`` and ``dict(record)`` return this object, and pydantic describes, reads and writes the record
    as one, so that an endpoint of FastAPI can return it.
    """

    __slots__ = ()

    def to_dict(self) -> dict[str, Any]:
        """The record as a dict of JSON values.

        >>> af.Usage(prompt_tokens=12, output_tokens=5).to_dict()["prompt_tokens"]
        12
        """
        return {name: msgspec.to_builtins(getattr(self, name)) for name in self._shown_fields()}

    @classmethod
    def _shown_fields(cls) -> tuple[str, ...]:
        return cls.__match_args__  # type: ignore[attr-defined, no-any-return]  # of every struct and dataclass

    @classmethod
    def _from_json(cls, value: Any) -> Any:
        """The record of its JSON value. ``ValueError`` for another one."""
        if is_sent_as_array(cls) and isinstance(value, Mapping):
            value = [value.get(name) for name in cls._shown_fields()]
        return msgspec.convert(value, cls)

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return iter(self.to_dict().items())

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        from pydantic import PlainSerializer, PlainValidator

        def read(value: Any) -> Any:
            return value if isinstance(value, cls) else cls._from_json(value)

        return handler.generate_schema(Annotated[Any, PlainValidator(read), PlainSerializer(cls.to_dict)])

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: Any, handler: Any) -> dict[str, Any]:
        hints = get_type_hints(cls)
        members = {name: _make_schema(hints[name]) for name in cls._shown_fields()}
        return {"type": "object", "title": cls.__name__, "properties": members}


def is_sent_as_array(kind: type[Record]) -> bool:
    """Whether msgspec writes and reads the record as an array."""
    return issubclass(kind, msgspec.Struct) and kind.__struct_config__.array_like


def _make_schema(kind: Any) -> dict[str, Any]:
    """The schema of a field; empty for a type that JSON Schema cannot describe in one place."""
    try:
        schema = msgspec.json.schema(kind)
    except (TypeError, RecursionError):
        return {}
    return {} if "$defs" in schema else schema
