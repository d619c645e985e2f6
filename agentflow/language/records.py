"""Records: dataclasses, msgspec structs, pydantic models and classes of attrs, read and copied without
running their code."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from types import ModuleType
from typing import Any

import msgspec


def is_record(value: Any) -> bool:
    """Whether ``copy_with`` can copy it."""
    kind: Any = type(value)
    return _is_record_type(kind)


@functools.lru_cache(maxsize=256)
def _is_record_type(kind: type) -> bool:
    return (
        is_dataclass(kind)
        or issubclass(kind, msgspec.Struct)
        or hasattr(kind, "model_copy")
        or hasattr(kind, "__attrs_attrs__")
    )


def members(value: Any) -> dict[str, Any]:
    """The members of an object, without running code of its class."""
    if isinstance(value, type | ModuleType):
        return {}
    kind: Any = type(value)
    names = _member_names(kind)
    if names is None:
        return {}
    if isinstance(value, BaseException):
        return {"args": value.args, **vars(value)}
    found = dict(getattr(value, "__dict__", ()))
    found |= getattr(value, "__pydantic_extra__", None) or ()
    for name in names:
        try:
            found[name] = object.__getattribute__(value, name)
        except AttributeError:  # it was not set
            continue
    return found


@functools.lru_cache(maxsize=256)
def _member_names(kind: Any) -> tuple[str, ...] | None:
    """The names of fields and slots. None for a class whose members are not to be read."""
    if issubclass(kind, msgspec.Struct):
        return tuple(kind.__struct_fields__)
    if is_dataclass(kind):
        return tuple([one.name for one in fields(kind)])
    if kind.__module__.startswith("agentflow.") and not hasattr(kind, "model_copy"):
        return None  # a state refers to its whole run
    names: list[str] = []
    for base in kind.__mro__:
        slots = vars(base).get("__slots__", ())
        names += [slots] if isinstance(slots, str) else slots
    return tuple([name for name in names if not name.startswith("__")])


def copy_with(original: Any, members: Mapping[str, Any]) -> Any:
    """A copy with other members, which its class does not check."""
    made = original.model_copy() if hasattr(type(original), "model_copy") else copy.copy(original)
    set_members(made, members)
    return made


def set_members(record: Any, members: Mapping[str, Any]) -> None:
    """Sets members, which the record's class does not check, also if it is frozen."""
    extra = getattr(record, "__pydantic_extra__", None) or {}
    for name, member in members.items():
        if isinstance(record, msgspec.Struct):
            msgspec.structs.force_setattr(record, name, member)
        elif name in extra:
            extra[name] = member
        else:
            object.__setattr__(record, name, member)
