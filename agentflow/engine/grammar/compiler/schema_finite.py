"""Whether a recursive schema has a value that ends: a list whose every item must have a next one has none."""

from __future__ import annotations

from collections.abc import Set
from typing import Any, Final

Schema = dict[str, Any]

_LITERAL: Final = frozenset({"const", "enum"})


def has_finite_value(root: Schema) -> bool:
    """False only where no value can satisfy ``root``, since each would have to contain another one like it.

    >>> has_finite_value({"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"]})
    False

    Each pass finds schemas whose values can be made of those found before; every other pass goes backwards,
    so that long chains of references need few.
    """
    targets = _targets(root)
    names = list(targets)
    endless = set(names)
    while True:
        num_before = len(endless)
        for name in names:
            if name in endless and _is_finite(targets[name], endless):
                endless.remove(name)
        if len(endless) == num_before:
            return "#" not in endless
        names.reverse()


def _targets(root: Schema) -> dict[str, Any]:
    """What the schema may refer to in itself, by reference."""
    targets: dict[str, Any] = {"#": root}
    for holder in ("$defs", "definitions"):
        named = root.get(holder)
        if isinstance(named, dict):
            targets |= {f"#/{holder}/{name}": schema for name, schema in named.items()}
    return targets


def _is_finite(schema: Any, endless: Set[str]) -> bool:
    """Whether it has a value, where the references that are ``endless`` have none. What is not sure counts
    as one that has."""
    if not isinstance(schema, dict) or _LITERAL & schema.keys():
        return True
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference in endless:
        return False
    for key, wanted in (("anyOf", any), ("oneOf", any), ("allOf", all)):
        options = schema.get(key)
        if isinstance(options, list) and options and not wanted(_is_finite(one, endless) for one in options):
            return False
    types = schema.get("type")
    names = types if isinstance(types, list) else [types]
    if names == ["object"]:
        members, required = schema.get("properties", {}), schema.get("required", [])
        return all(_is_finite(members.get(name), endless) for name in required)
    if names == ["array"]:
        first = schema.get("prefixItems", [])
        least = schema.get("minItems", 0)
        least = max(0, int(least)) if isinstance(least, int | float) else 0
        needed = [*first[:least], *([schema.get("items")] if least > len(first) else [])]
        return all(_is_finite(one, endless) for one in needed)
    return True
