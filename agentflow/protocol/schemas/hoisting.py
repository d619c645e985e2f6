"""Moves JSON schemas, such as the parameters of tools, into one larger schema.

Each schema was written to stand alone: its references are relative to its root, and its definitions, ``$id``
and ``$anchor`` need to be unique in it only. ``hoisted`` therefore replaces every reference by a pointer
(``references``) and renames its definitions, so that equal names of two schemas do not clash.
"""

from __future__ import annotations

import copy
import re
from typing import Any, Final

from agentflow.protocol.schemas.references import ANCHORS, IDS, point_references, pointer
from agentflow.protocol.schemas.walk import SchemaPath, pointer_steps, subschemas

_DEFINITIONS: Final = ("$defs", "definitions")
_ESCAPED: Final = re.compile("(?:=[0-9A-F]{2})+")


def hoisted(name: str, schema: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """``schema`` as part of a larger one: its definitions move into ``definitions``, prefixed with the tool's
    ``name``, and its references become pointers to them. A schema that refers to its own root becomes a
    definition. References that the schema cannot resolve stay.

    >>> definitions = {}
    >>> hoisted("tree", {"type": "object", "properties": {"left": {"$ref": "#"}}}, definitions)
    {'$ref': '#/$defs/tree'}
    >>> definitions
    {'tree': {'type': 'object', 'properties': {'left': {'$ref': '#/$defs/tree'}}}}
    """
    whole = copy.deepcopy(schema)
    point_references(whole)
    names: dict[SchemaPath, str] = {}
    taken = {*definitions}

    def new_name(key: str | None = None) -> str:
        found = definition_name(name, key)
        while found in taken:  # in both ``$defs`` and ``definitions``, for example
            found += "="
        taken.add(found)
        return found

    root_name = new_name()
    for keyword in _DEFINITIONS:
        if isinstance(own := whole.get(keyword), dict):
            names |= {(keyword, key): new_name(key) for key in own}
    refers_to_root = False
    for part in {id(part): part for part in subschemas(whole)}.values():  # some are at two places
        path = pointer_steps(part.get("$ref"))
        if path is None:
            continue
        if len(path) > 1 and path[0] in _DEFINITIONS:
            start, rest = names.get(path[:2]) or definition_name(name, path[1]), path[2:]
        else:
            refers_to_root = True
            start, rest = root_name, path
        part["$ref"] = pointer(["$defs", start, *rest])
    for keyword in _DEFINITIONS:
        if isinstance(whole.get(keyword), dict):
            definitions |= {names[keyword, key]: value for key, value in whole.pop(keyword).items()}
    if not refers_to_root:
        return whole
    definitions[root_name] = whole
    return {"$ref": f"#/$defs/{root_name}"}


def definition_name(tool: str, key: str | None = None) -> str:
    """Returns the name of a tool's definition in the larger schema; without a ``key``, of its whole schema.
    Different tools and keys have different names, which need no escapes in a pointer.

    >>> definition_name("fs", "read"), definition_name("fs.read"), definition_name("fs/a")
    ('fs.read', 'fs=2Eread', 'fs=2Fa')
    """
    start = _escaped("[^A-Za-z0-9_-]", tool)
    return start if key is None else f"{start}.{_escaped('[^A-Za-z0-9_.-]', key)}"


def definition_place(tool: str, name: str) -> tuple[str, ...] | None:
    """Returns the path of a definition of the larger schema in the tool's own schema. None if it belongs to
    another tool.

    >>> [definition_place("fs", name) for name in ("fs.Item=5B1=5D", "fs", "fs=2Ea")]
    [('$defs', 'Item[1]'), (), None]
    """
    start, dot, key = name.rstrip("=").partition(".")
    if start != definition_name(tool):
        return None
    return ("$defs", _ESCAPED.sub(_unescaped, key)) if dot else ()


def stands_alone(schema: dict[str, Any]) -> bool:
    """Whether a schema has ids, anchors, or references that lead elsewhere than to its ``$defs``: it cannot
    be a part of a larger schema before it is hoisted."""
    names = ("definitions", *IDS, *ANCHORS)
    return any(
        any(key in part for key in names) or not _leads_to_definition(part.get("$ref"))
        for part in subschemas(schema)
    )


def _leads_to_definition(reference: object) -> bool:
    return not isinstance(reference, str) or reference.startswith("#/$defs/")


def _escaped(unsafe: str, text: str) -> str:
    return re.sub(unsafe, lambda found: _hex_of(found[0]), text)


def _hex_of(char: str) -> str:
    return "".join([f"={byte:02X}" for byte in char.encode("utf-8", "surrogatepass")])


def _unescaped(found: re.Match[str]) -> str:
    return bytes.fromhex(found[0].replace("=", "")).decode("utf-8", "surrogatepass")
