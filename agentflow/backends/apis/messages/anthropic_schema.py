"""The subset of JSON schema that Anthropic's structured outputs enforce.

It is smaller than OpenAI's: numbers have no bounds, strings no patterns, and no type contains itself.
Anthropic's client (``anthropic/lib/_parse/_transform.py``) moves other keywords into descriptions. Here they
are refused, because the API would not enforce them.
"""

from __future__ import annotations

from typing import Any, Final

from agentflow.backends.apis.strict_schema import STRUCTURE, StrictSchema, strict_schema
from agentflow.errors import NotSupported
from agentflow.protocol.schemas.walk import subschemas

MAX_STRICT_TOOLS: Final = 20
"""The most tools of a request whose schemas the API enforces."""
MAX_UNIONS: Final = 16
"""The most members with several types in all schemas of a request that the API enforces.

Both limits: platform.claude.com/docs/en/build-with-claude/structured-outputs#schema-complexity-limits."""
MAX_TOOL_UNIONS: Final = 8
"""The most of them in the schemas of tools, so that a schema for the answer does not change the tools."""
_KEPT: Final = STRUCTURE | {"minItems", "format"}
_FORMATS: Final = {
    "date-time",
    "time",
    "date",
    "duration",
    "email",
    "hostname",
    "uri",
    "ipv4",
    "ipv6",
    "uuid",
}


def output_schema(schema: Any, max_unions: int = MAX_UNIONS) -> StrictSchema:
    """The schema, narrowed to the subset.

    Args:
        schema: A JSON schema.
        max_unions: The most members with several types.

    Raises:
        NotSupported: The schema cannot be narrowed to the subset.

    >>> output_schema({"type": "object", "properties": {"a": {"type": "integer"}}}).schema["required"]
    ['a']
    """
    found = strict_schema(schema if isinstance(schema, dict) else {})
    for part in subschemas(found.schema):
        _check(part)
    if _is_recursive(found.schema):
        raise _unsupported("a type that contains itself")
    if num_unions(found.schema) > max_unions:
        raise _unsupported(f"more than {max_unions} members with several types")
    return found


def num_unions(schema: dict[str, Any]) -> int:
    """The number of members with several types, as the API counts them: without members of definitions.

    >>> num_unions({"properties": {"a": {"type": ["string", "null"]}, "b": {"type": "string"}}})
    1
    """
    own = {key: value for key, value in schema.items() if key not in ("$defs", "definitions")}
    members = [member for part in subschemas(own) for member in part.get("properties", {}).values()]
    return sum("anyOf" in member or isinstance(member.get("type"), list) for member in members)


def is_enforced(schema: dict[str, Any]) -> bool:
    """Whether the API can enforce the schema of a tool's parameters."""
    try:
        return output_schema(schema).unwrap is None
    except NotSupported:
        return False


def _check(part: dict[str, Any]) -> None:
    for key, value in part.items():
        if key not in _KEPT:
            raise _unsupported(repr(key))
        if key == "minItems" and value not in (0, 1):
            raise _unsupported("minItems above 1")
        if key == "format" and value not in _FORMATS:
            raise _unsupported(f"the format {value!r}")
        if key == "enum" and any(isinstance(member, dict | list) for member in value):
            raise _unsupported("an enum of objects or lists")


def _is_recursive(root: dict[str, Any]) -> bool:
    """Whether a definition refers to itself, directly or through others."""
    definitions = {
        f"#/{key}/{name}": part
        for key in ("$defs", "definitions")
        for name, part in root.get(key, {}).items()
    }
    used = {name: _references(part) for name, part in definitions.items()}
    if any(not name.startswith(("#/$defs/", "#/definitions/")) for name in _references(root)):
        return True  # to the root
    while used:
        done = [name for name, names in used.items() if not names & used.keys()]
        if not done:
            return True
        for name in done:
            del used[name]
    return False


def _references(schema: dict[str, Any]) -> set[str]:
    return {part["$ref"] for part in subschemas(schema) if isinstance(part.get("$ref"), str)}


def _unsupported(what: str) -> NotSupported:
    return NotSupported(
        f"structured outputs of this model do not support {what}: change the schema, or set "
        'on_unsupported="retry" to have answers checked and asked for again'
    )
