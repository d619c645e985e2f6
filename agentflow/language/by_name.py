"""Pickles the result of a decorator as the name under which it replaced the function."""

from __future__ import annotations

from collections.abc import Callable
from pkgutil import resolve_name
from typing import Any


def by_name(made: object, function: Any) -> tuple[Callable[..., Any], tuple[str]] | None:
    """For ``__reduce__``: how to find ``made`` under the name of ``function``. None if the name does not lead
    to it: the function is local, or the name still belongs to the function."""
    name = f"{getattr(function, '__module__', '')}:{getattr(function, '__qualname__', '')}"
    try:
        found = resolve_name(name)
    except (ImportError, AttributeError, ValueError):
        return None
    return (resolve_name, (name,)) if found is made else None
