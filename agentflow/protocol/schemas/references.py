"""Replaces the references in a JSON schema by pointers from its root.

A reference may be relative to an ``$id``, name an ``$anchor``, or point into a keyword that holds no schemas,
such as OpenAPI's ``components``. Its readers then need to know pointers only.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Final, NamedTuple
from urllib.parse import quote, unquote, urljoin

from agentflow.protocol.schemas.walk import HOLD_NAMED, SchemaPath, find_part, inner_with_paths, pointer_steps

ANCHORS: Final = ("$anchor", "$dynamicAnchor")
IDS: Final = ("$id", "id")
_IN_FRAGMENTS: Final = "!$&'()*+,;=:@?~"


def point_references(schema: dict[str, Any]) -> None:
    """Makes every reference to a part of the schema a pointer to a place of schemas, as a valid URI.
    References to other documents stay. Ids and anchors are dropped.

    >>> schema = {"$ref": "#size", "$defs": {"Größe": {"$anchor": "size", "type": "integer"}}}
    >>> point_references(schema), schema
    (None, {'$ref': '#/$defs/Gr%C3%B6%C3%9Fe', '$defs': {'Größe': {'type': 'integer'}}})
    """
    targets = _Targets(schema)
    for part in targets.parts:  # grows
        if (path := targets.resolve(part)) is not None:
            part.schema["$ref"] = pointer(targets.hold(path))
    for part in targets.parts:
        for key in (*IDS, *ANCHORS):
            if isinstance(part.schema.get(key), str):
                del part.schema[key]


def pointer(path: Iterable[str]) -> str:
    """Returns the reference to the part of a schema to which the keys lead from its root.

    >>> pointer(["$defs", "a/b c"])
    '#/$defs/a~1b%20c'
    """
    return "/".join(["#", *map(_pointer_step, path)])


class _SchemaPart(NamedTuple):
    """A schema in a schema. ``base``: the URI against which its references are resolved, and the path of the
    schema there."""

    schema: dict[str, Any]
    base: str
    base_path: SchemaPath


class _Targets:
    """The schemas in a schema, and the ids and anchors by which references name them."""

    def __init__(self, root: dict[str, Any]) -> None:
        self.parts: list[_SchemaPart] = []
        self._root = root
        self._places: dict[SchemaPath, SchemaPath] = {}
        self._place_of: dict[int, SchemaPath] = {}  # by the id of a schema: it is walked once
        self._of_uri: dict[str, SchemaPath] = {"": ()}
        self._of_anchor: dict[tuple[SchemaPath, str], SchemaPath] = {}
        # "id" is the older name of "$id" (draft 4), and means nothing in later drafts.
        draft = re.search("draft-0([3-7])", str(root.get("$schema")))
        self._id = "id" if draft and draft[1] in "34" else "$id"
        self._has_refs_alone = draft is not None
        self._walk(root, ())

    def _walk(self, start: Any, at: SchemaPath) -> None:
        """Adds the schemas in ``start``, which is at the path ``at``."""
        pending: list[tuple[Any, SchemaPath, str, SchemaPath]] = [(start, at, "", ())]
        while pending:
            schema, path, base, base_path = pending.pop()
            if not isinstance(schema, dict):
                self._places[path] = path
                continue
            self._places[path] = self._place_of.setdefault(id(schema), path)
            if self._places[path] != path:
                continue
            own = None if self._has_refs_alone and "$ref" in schema else schema.get(self._id)
            uri, _, anchor = own.partition("#") if isinstance(own, str) else ("", "", "")
            if uri:
                base, base_path = _joined(base, uri), path
                self._of_uri.setdefault(base, path)
            for name in (anchor, *[schema.get(key) for key in ANCHORS]):
                if isinstance(name, str) and name:
                    self._of_anchor.setdefault((base_path, name), path)
            self.parts.append(_SchemaPart(schema, base, base_path))
            inner = [(one, (*path, *keys), base, base_path) for keys, one in inner_with_paths(schema)]
            pending += reversed(inner)

    def resolve(self, part: _SchemaPart) -> SchemaPath | None:
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
        steps = pointer_steps(f"#{fragment}")
        return self._of_anchor.get((start, unquote(fragment))) if steps is None else (*start, *steps)

    def hold(self, path: SchemaPath) -> SchemaPath:
        """Returns a place of schemas that has the target at ``path``: itself, or a new definition."""
        if path in self._places:
            return self._places[path]
        schema, definitions = find_part(path, self._root), self._root.get("$defs", {})
        if id(schema) in self._place_of:
            return self._place_of[id(schema)]
        is_schema = isinstance(schema, dict | bool) and path[-1] not in HOLD_NAMED
        if not is_schema or not isinstance(definitions, dict):
            return path
        name = "/".join(path)
        while name in definitions:
            name += "="
        self._root.setdefault("$defs", definitions)[name] = schema
        self._places[path] = "$defs", name
        self._walk(schema, ("$defs", name))
        return self._places[path]


def _joined(base: str, uri: str) -> str:
    try:
        return urljoin(base, uri)
    except ValueError:  # not a URI: found only by the same text
        return uri


def _pointer_step(step: str) -> str:
    return quote(step.replace("~", "~0").replace("/", "~1").encode(errors="replace"), safe=_IN_FRAGMENTS)
