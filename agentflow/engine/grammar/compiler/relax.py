"""Relaxes keywords that a grammar cannot enforce, in schemas of clients that are not strict.

OpenAI's API accepts any schema for a tool that is not strict. ``relax`` drops the keywords that cannot be
enforced, or replaces them by the nearest looser form, and returns their paths. Each step only allows more
values, so that no valid value is lost; the server checks finished calls against the original.
``compile_parts`` relaxes the parts of a constraint, in steps that go further only if the schema still does
not compile. A strict part is rejected instead, with the path of the keyword.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeAlias

import msgspec

from agentflow.engine.grammar.compiler.explicit_schema import (
    MOST_UNIQUE_LISTS,
    Schema,
    allow_overlap,
    check_schema,
    exclude_each_other,
    least_members,
    parse_schema,
    subschemas_with_paths,
    unique_lists,
)
from agentflow.engine.grammar.compiler.messages import (
    CompiledConstraint,
    PartedConstraint,
    Relaxed,
    SchemaPart,
)
from agentflow.errors import AgentflowError, BadArgument, RequestRefused
from agentflow.protocol.constraint import Constraint
from agentflow.protocol.grammars.pattern_parts import pattern_parts
from agentflow.protocol.schemas.hoisting import definition_name, definition_place
from agentflow.protocol.schemas.walk import SchemaPath, find_part, pointer_steps

Compiles: TypeAlias = Callable[[Schema], bool]
"""Whether a schema compiles."""

_NEVER_KEPT: Final[tuple[str, ...]] = (
    "not",
    "if",
    "then",
    "else",
    "contains",
    "minContains",
    "maxContains",
    "propertyNames",
    "dependencies",
    "dependentRequired",
    "dependentSchemas",
    "unevaluatedItems",
    "unevaluatedProperties",
    "$dynamicRef",
    "$recursiveRef",
)
_WHY: Final = {
    "uniqueItems": f"is supported for items of few values only (at most {MOST_UNIQUE_LISTS} lists)",
    "pattern": "is supported without look-arounds only",
    "minProperties": "above 1 needs additionalProperties: false, or as many names in required",
    "exclusiveMinimum": "must be a number, as in draft 6 and later",
    "exclusiveMaximum": "must be a number, as in draft 6 and later",
}
_WHY_NOT: Final = "is not supported: check it in the program"


def relax(root: Schema, start: Schema | None = None, base: SchemaPath = ()) -> list[SchemaPath]:
    """Relaxes the keywords of ``start`` (``root``, by default) that are known to be unenforceable. ``base``:
    the path of ``start``. Returns the path of each keyword that was dropped or changed.

    >>> schema = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}
    >>> relax(schema), schema
    ([('uniqueItems',)], {'type': 'array', 'items': {'type': 'string'}})
    """
    found: list[SchemaPath] = []
    for path, schema in list(subschemas_with_paths(root if start is None else start, base)):
        for key in [key for key in _NEVER_KEPT if key in schema]:
            del schema[key]
            found.append((*path, key))
        for key in _unkept(schema, root):
            found.append((*path, key))
    return found


def _unkept(schema: Schema, root: Schema) -> Iterator[str]:
    """Relaxes the keywords that can be enforced in some schemas only. Yields the relaxed ones."""
    if schema.get("uniqueItems") is True and unique_lists(schema, root) is None:
        del schema["uniqueItems"]
        yield "uniqueItems"
    for key in ("exclusiveMinimum", "exclusiveMaximum"):
        # In draft 4 it makes the limit open; without it, the limit is closed.
        if isinstance(schema.get(key), bool) and schema.pop(key):
            yield key
    if (most := least_members(schema)) is not None:
        schema["minProperties"] = most
        yield "minProperties"
    pattern = schema.get("pattern")
    if isinstance(pattern, str) and (looser := without_look_arounds(pattern)) != pattern:
        schema["pattern"] = looser
        yield "pattern"
    if isinstance(schema.get("$ref"), str):
        path = pointer_steps(schema["$ref"])
        if path is None or not isinstance(find_part(path, root), dict | bool):
            del schema["$ref"]
            yield "$ref"


def without_look_arounds(pattern: str) -> str:
    """Replaces each look-around by an empty group. The result matches all texts that the pattern matches.

    >>> without_look_arounds(r"^(?!^[-+.]*$)[+-]?0*\\d*\\.?\\d*$")
    '^(?:)[+-]?0*\\\\d*\\\\.?\\\\d*$'
    """
    kept: list[str] = []
    depth, dropped_from = 0, 0
    for found in pattern_parts(pattern):
        part = found[0]
        if part == "(":
            depth += 1
            if not dropped_from and pattern.startswith(("(?=", "(?!", "(?<=", "(?<!"), found.start()):
                dropped_from = depth
        elif part == ")":
            if dropped_from and depth == dropped_from:
                dropped_from, part = 0, "(?:)"
            depth -= 1
        if not dropped_from:
            kept.append(part)
    return pattern if dropped_from else "".join(kept)


def check_kept(schema: Schema) -> None:
    """Raises ``BadArgument``, with the path, for a keyword that cannot be enforced."""
    for path in relax(copy.deepcopy(schema)):
        raise BadArgument(f"schema: {'.'.join(path)} {_why(schema, path)}")


def _why(schema: Schema, path: SchemaPath) -> str:
    """Returns why the keyword at the end of the path cannot be enforced."""
    if path[-1] != "$ref":
        return _WHY.get(path[-1], _WHY_NOT)
    value: Any = schema
    for key in path:
        value = value[int(key) if isinstance(value, list) else key]
    return f"refers to {value[:200]!r}, which is not in the schema and is not fetched: write it into $defs"


class _Part:
    """A part of a schema, with the definitions that only it uses."""

    def __init__(self, root: Schema, part: SchemaPart) -> None:
        self.part = part
        self._root = root
        start: Any = root
        for key in part.path:
            start = start[key]
        self._start: Schema = start
        self._definitions = _some(root, "$defs", "definitions")
        self._schemas: list[tuple[SchemaPath, Any]] = [((), self._start)]
        if part.path:
            self._schemas += [
                (place, one)
                for name, one in root.get("$defs", {}).items()
                if (place := definition_place(part.name, name)) is not None
            ]

    @property
    def alone(self) -> Schema:
        """Returns the part as a separate schema."""
        return {**self._start, **self._definitions} if self.part.path else self._root

    def check(self) -> None:
        """Like ``check_schema``, but also raises ``BadArgument`` for a keyword of a strict part that cannot
        be enforced."""
        for base, one in self._schemas:
            try:
                check_schema(one, base)
            except BadArgument as error:
                raise self.error(error) from None
        for base, one in self._schemas if self.part.is_strict else ():
            for path in relax(self._root, copy.deepcopy(one), base):
                text = f"{'.'.join(path)} {_why(one, path[len(base) :])}"
                if self.part.path:
                    text = text.replace(f"#/$defs/{definition_name(self.part.name)}.", "#/$defs/")
                raise self.error(BadArgument(text), path)

    def relax(self) -> list[SchemaPath]:
        """Relaxes the keywords that are known to be unenforceable."""
        return [path for base, one in self._schemas for path in relax(self._root, one, base)]

    def error(self, error: AgentflowError, path: SchemaPath = ()) -> AgentflowError:
        """Returns the error with this part's ``param``, at a path in the part."""
        part, text = self.part, str(error).removeprefix("schema: ")
        if not part.name:
            return type(error)(str(error))
        return type(error)(f"tool {part.name!r}: {text}", param=".".join((part.param, *path)))

    def fault(self, compiles: Compiles, error: AgentflowError) -> AgentflowError:
        """Returns the error of compiling this part, at the first path that does not compile by itself."""
        for found in self.relax_until(compiles):
            if found and found[0]:
                where = ".".join(found[0])
                return self.error(type(error)(f"{where}: {str(error).removeprefix('schema: ')}"), found[0])
        return self.error(error)

    def relax_until(self, compiles: Compiles) -> Iterator[list[SchemaPath]]:
        """Relaxes in steps, each of which goes further."""
        yield self._relax_keywords(compiles)
        yield self._relax_members(compiles)
        yield self._allow_all()

    def _relax_keywords(self, compiles: Compiles) -> list[SchemaPath]:
        """Relaxes the keywords that do not compile by themselves."""
        found: list[SchemaPath] = []
        every = [pair for base, one in self._schemas for pair in subschemas_with_paths(one, base)]
        for path, schema in every:
            if "pattern" in schema and not compiles({"type": "string", "pattern": schema["pattern"]}):
                del schema["pattern"]
                found.append((*path, "pattern"))
            if "patternProperties" in schema:
                names = _some(schema, "properties", "patternProperties")
                if not compiles({"type": "object", **names, **self._definitions}):
                    del schema["patternProperties"]
                    schema["additionalProperties"] = True
                    found.append((*path, "patternProperties"))
            for key in ("minProperties", "maxProperties"):
                names = _some(schema, "properties", "required", "additionalProperties", key)
                if key in schema and not compiles({"type": "object", **names, **self._definitions}):
                    del schema[key]
                    schema.setdefault("additionalProperties", True)
                    found.append((*path, key))
        for path, schema in every:
            options = schema.get("oneOf")
            if not isinstance(options, list) or exclude_each_other(options, self._root):
                continue
            if not compiles({"oneOf": options, **self._definitions}):
                allow_overlap(schema)
                found.append((*path, "oneOf"))
        return found

    def _relax_members(self, compiles: Compiles) -> list[SchemaPath]:
        """Allows any value for each member whose schema does not compile by itself."""
        found: list[SchemaPath] = []
        for base, schema in self._schemas:
            members = schema.get("properties")
            for name, member in members.items() if isinstance(members, dict) else ():
                if isinstance(member, dict) and not compiles({**member, **self._definitions}):
                    members[name] = {}
                    found.append((*base, "properties", name))
        return found

    def _allow_all(self) -> list[SchemaPath]:
        """Allows any value; any object, for arguments."""
        self._start.clear()
        if self.part.name:
            self._start["type"] = "object"
        return [()]


def _some(schema: Schema, *keys: str) -> Schema:
    return {key: schema[key] for key in keys if key in schema}


def compile_parts(
    constraint: PartedConstraint,
    compile_whole: Callable[[Constraint], CompiledConstraint],
    compile_schema: Callable[[Schema], object],
) -> tuple[PartedConstraint, CompiledConstraint]:
    """Compiles a constraint with parts, and relaxes parts that cannot be enforced and are not strict. Also
    returns the relaxed constraint. Raises ``BadArgument`` for a strict part that cannot be enforced, with the
    part's ``param`` and the path of the keyword."""
    root = parse_schema(constraint.schema_source())
    parts = [_Part(root, part) for part in constraint.parts]
    relaxed: list[Relaxed] = []
    for one in parts:
        one.check()
        if not one.part.is_strict:
            relaxed += [Relaxed(one.part.name, path) for path in one.relax()]

    def compiles(schema: Schema) -> bool:
        try:
            compile_schema(json.loads(json.dumps(schema)))
        except (BadArgument, RequestRefused):
            return False
        return True

    def compiled() -> tuple[PartedConstraint, CompiledConstraint]:
        whole = constraint.with_schema(json.dumps(root, ensure_ascii=False)) if relaxed else constraint
        return whole, msgspec.structs.replace(compile_whole(whole), relaxed=tuple(relaxed))

    try:
        return compiled()
    except (BadArgument, RequestRefused) as error:
        wrong = [one for one in parts if not compiles(one.alone)]
        if error.param is not None or not wrong:
            raise
    for one in wrong:
        if one.part.is_strict:
            try:
                compile_schema(json.loads(json.dumps(one.alone)))
            except (BadArgument, RequestRefused) as error:
                raise one.fault(compiles, error) from None
        steps = one.relax_until(compiles)
        while not compiles(one.alone):
            relaxed += [Relaxed(one.part.name, path) for path in next(steps)]
    return compiled()
