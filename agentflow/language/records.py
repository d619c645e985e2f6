"""Records: dataclasses, msgspec structs, pydantic models and classes of attrs, read and copied without
running their code."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from types import ModuleType
from typing import Any

import msgspec


def is_record(value: Any) -> bool:
    """Whether ``copy_with`` can copy it."""
    return (
        (is_dataclass(value) and not isinstance(value, type))
        or isinstance(value, msgspec.Struct)
        or hasattr(type(value), "model_copy")
        or hasattr(type(value), "__attrs_attrs__")
    )


def members(value: Any) -> dict[str, Any]:
    """The members of an object, without running code of its class."""
    kind: Any = type(value)
    names: list[str] = []
    if isinstance(value, msgspec.Struct):
        names += value.__struct_fields__
    elif is_dataclass(value) and not isinstance(value, type):
        names += [one.name for one in fields(value)]
    elif isinstance(value, type | ModuleType):
        return {}
    elif kind.__module__.startswith("agentflow.") and not hasattr(kind, "model_copy"):
        return {}  # a state refers to its whole run
    else:
        for base in kind.__mro__:
            slots = vars(base).get("__slots__", ())
            names += [slots] if isinstance(slots, str) else slots
        names = [name for name in names if not name.startswith("__")]
    if isinstance(value, BaseException):
        return {"args": value.args, **vars(value)}
    found = dict(getattr(value, "__dict__", {})) | (getattr(value, "__pydantic_extra__", None) or {})
    for name in names:
        try:
            found[name] = object.__getattribute__(value, name)
        except AttributeError:  # it was not set
            continue
    return found


def copy_with(original: Any, members: Mapping[str, Any]) -> Any:
    """A copy with other members. Its checks do not run: they have seen the object in the trace."""
    if hasattr(type(original), "model_copy"):
        return original.model_copy(update=members)
    made = copy.copy(original)
    for name, member in members.items():
        if isinstance(made, msgspec.Struct):
            msgspec.structs.force_setattr(made, name, member)
        else:
            object.__setattr__(made, name, member)
    return made
