"""Moves JSON schemas, such as the parameters of tools, into one larger schema.

Each schema was written to stand alone: its references are relative to its root, and its definitions, ``$id``
and ``$anchor`` need to be unique in it only. ``hoisted`` therefore renames its definitions, replaces every
reference by a pointer, and drops the ids and anchors, so that equal names of two schemas do not clash.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import Any, Final, NamedTuple, TypeAlias
from urllib.parse import quote, unquote, urljoin

from agentflow.protocol.schema_walk import HOLD_A_LIST, HOLD_A_SCHEMA, HOLD_NAMED

_Path: TypeAlias = tuple[str, ...]

_DEFINITIONS: Final = ("$defs", "definitions")
_ANCHORS: Final = ("$anchor", "$dynamicAnchor")
_IN_FRAGMENTS: Final = "!$&'()*+,;=:@?~"
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
    names: dict[_Path, str] = {}
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
    targets = _Targets(whole)
    refers_to_root = False
    for part in targets.parts:
        path = targets.resolve(part)
        if path is None:
            continue
        if len(path) > 1 and path[0] in _DEFINITIONS:
            start, rest = names.get(path[:2]) or definition_name(name, path[1]), path[2:]
        else:
            refers_to_root = True
            start, rest = root_name, path
        part.schema["$ref"] = "/".join(["#/$defs", start, *map(_pointer_step, rest)])
    for part in targets.parts:
        for key in ("$id", "id", *_ANCHORS):
            if isinstance(part.schema.get(key), str):
                del part.schema[key]
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
    names = ("$id", "id", "definitions", *_ANCHORS)
    return any(
        any(key in part.schema for key in names) or not _leads_to_definition(part.schema.get("$ref"))
        for part in _Targets(schema).parts
    )


def _leads_to_definition(reference: object) -> bool:
    return not isinstance(reference, str) or reference.startswith("#/$defs/")


class _SchemaPart(NamedTuple):
    """A schema in a schema. ``base``: the URI against which its references are resolved, and the path of the
    schema there."""

    schema: dict[str, Any]
    base: str
    base_path: _Path


class _Targets:
    """The schemas in a schema, and the ids and anchors by which references name them."""

    def __init__(self, root: dict[str, Any]) -> None:
        self.parts: list[_SchemaPart] = []
        self._of_uri: dict[str, _Path] = {"": ()}
        self._of_anchor: dict[tuple[_Path, str], _Path] = {}
        # "id" is the older name of "$id" (draft 4), and means nothing in later drafts.
        is_old = re.search("draft-0[34]", str(root.get("$schema"))) is not None
        pending: list[tuple[Any, _Path, str, _Path]] = [(root, (), "", ())]
        while pending:
            schema, path, base, base_path = pending.pop()
            if not isinstance(schema, dict):
                continue
            own = schema.get("id" if is_old else "$id")
            uri, _, anchor = own.partition("#") if isinstance(own, str) else ("", "", "")
            if uri:
                base, base_path = _joined(base, uri), path
                self._of_uri.setdefault(base, path)
            for name in (anchor, *[schema.get(key) for key in _ANCHORS]):
                if isinstance(name, str) and name:
                    self._of_anchor.setdefault((base_path, name), path)
            self.parts.append(_SchemaPart(schema, base, base_path))
            inner = [(one, (*path, *keys), base, base_path) for keys, one in _inner_schemas(schema)]
            pending += reversed(inner)

    def resolve(self, part: _SchemaPart) -> _Path | None:
        """Returns the path to which the reference of a part leads. None if it has none, or its target is not
        in the schema."""
        reference = part.schema.get("$ref")
        if not isinstance(reference, str):
            return None
        uri, _, fragment = reference.partition("#")
        target = _joined(part.base, uri) if uri else part.base
        start = part.base_path if target == part.base else self._of_uri.get(target)
        if start is None or not fragment:
            return start
        fragment = unquote(fragment)
        if not fragment.startswith("/"):
            return self._of_anchor.get((start, fragment))
        steps = [step.replace("~1", "/").replace("~0", "~") for step in fragment[1:].split("/")]
        return (*start, *steps)


def _inner_schemas(schema: dict[str, Any]) -> Iterator[tuple[_Path, Any]]:
    """Yields the members that may be schemas, one level down, with their paths."""
    for key in HOLD_A_SCHEMA:
        if key in schema:
            yield (key,), schema[key]
    for key in HOLD_A_LIST:
        if isinstance(listed := schema.get(key), list):
            yield from (((key, str(number)), one) for number, one in enumerate(listed))
    for key in HOLD_NAMED:
        if isinstance(named := schema.get(key), dict):
            yield from (((key, name), one) for name, one in named.items())


def _joined(base: str, uri: str) -> str:
    try:
        return urljoin(base, uri)
    except ValueError:  # not a URI: found only by the same text
        return uri


def _pointer_step(step: str) -> str:
    return quote(step.replace("~", "~0").replace("/", "~1").encode(errors="replace"), safe=_IN_FRAGMENTS)


def _escaped(unsafe: str, text: str) -> str:
    return re.sub(unsafe, lambda found: _hex_of(found[0]), text)


def _hex_of(char: str) -> str:
    return "".join([f"={byte:02X}" for byte in char.encode("utf-8", "surrogatepass")])


def _unescaped(found: re.Match[str]) -> str:
    return bytes.fromhex(found[0].replace("=", "")).decode("utf-8", "surrogatepass")
