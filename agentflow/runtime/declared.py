"""Settings that are declared once, on the struct that uses them.

A field's annotation has its type and range, and its ``Meta.description`` has its help; the default is the
field's own. ``Declared`` checks the ranges when a struct is made, and ``server/config`` derives the flags,
environment variables and keys of the configuration file from the fields that have a description.
"""

from __future__ import annotations

import math
import re
from functools import cache
from typing import Annotated, Any

import msgspec
from msgspec import Meta, inspect

from agentflow.errors import BadArgument

Count = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(gt=0)]
SecondsOrZero = Annotated[float, Meta(ge=0)]
Fraction = Annotated[float, Meta(gt=0, le=1)]


def doc(text: str, **extra: Any) -> Meta:
    """The help of a setting."""
    return Meta(description=text, extra=extra or None)


class Declared(msgspec.Struct, frozen=True, kw_only=True):
    """Base of a struct whose field types have ranges. A value outside its range raises ``BadArgument``."""

    def __post_init__(self) -> None:
        for name, field_type in _field_types(type(self)):
            value = getattr(self, name)
            try:
                convert_checked(value, field_type)
            except msgspec.ValidationError:
                allowed = allowed_values(plain_type(inspect.type_info(field_type)))
                message = f"{type(self).__name__}: {name} must be {allowed}, not {value!r}"
                raise BadArgument(message, param=name) from None


@cache
def _field_types(struct: type[msgspec.Struct]) -> tuple[tuple[str, Any], ...]:
    return tuple((field.name, field.type) for field in msgspec.structs.fields(struct))


def convert_checked(value: Any, field_type: Any, *, strict: bool = True) -> Any:
    """``msgspec.convert``, which also rejects infinity and NaN."""
    converted = msgspec.convert(value, field_type, strict=strict)
    if isinstance(converted, float) and not math.isfinite(converted):
        raise msgspec.ValidationError("not finite")
    return converted


def plain_type(kind: inspect.Type) -> inspect.Type:
    """The type without its description and without None."""
    while True:
        match kind:
            case inspect.Metadata(type=inner):
                kind = inner
            case inspect.UnionType(types=types):
                (kind,) = (one for one in types if not isinstance(one, inspect.NoneType))
            case _:
                return kind


def allowed_values(kind: inspect.Type) -> str:
    """The values of a plain type, in words.

    >>> allowed_values(inspect.IntType(ge=0, le=65535))
    'an integer from 0 to 65535'
    """
    match kind:
        case inspect.BoolType():
            return "true or false"
        case inspect.IntType():
            return f"an integer{_range(kind)}"
        case inspect.FloatType():
            return f"a number{_range(kind)}"
        case inspect.LiteralType(values=values):
            return f"one of {', '.join(map(str, values))}"
        case inspect.VarTupleType(item_type=item):
            return f"a list in which each item is {allowed_values(plain_type(item))}"
        case inspect.StrType(pattern=str() as pattern):
            return _pattern_in_words(pattern)
        case _:
            return "a non-empty string"


def _pattern_in_words(pattern: str) -> str:
    """A simple pattern as in the usage of a command.

    >>> _pattern_in_words(r"^(cpu|cuda(:\\d{1,3})?)$")
    'cpu or cuda[:N]'
    """
    text = re.sub(r"\\d(\{1,\d\}|\+)", "N", pattern.strip("^$").removeprefix("(").removesuffix(")"))
    return re.sub(r"\(([^()|]*)\)\?", r"[\1]", text).replace("|", " or ")


def _range(kind: inspect.IntType | inspect.FloatType) -> str:
    if kind.ge is not None and kind.le is not None:
        return f" from {kind.ge} to {kind.le}"
    low = f" of at least {kind.ge:g}" if kind.ge is not None else f" greater than {kind.gt:g}"
    return low + (f" and at most {kind.le:g}" if kind.le is not None else "")
