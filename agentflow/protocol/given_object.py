"""Objects in a request's body that are not decoded with it: schemas, parameters of tools, inputs of tool
calls. They are counted by themselves first (json_scan.py), and a schema and a call's input go on as text, so
that no object is made of them here at all.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from agentflow.errors import BadArgument
from agentflow.protocol.constraint import MAX_SOURCE_CHARS, Constraint
from agentflow.protocol.json_bounds import JsonBounds, JsonScan, TooMuchJson, pieces_of
from agentflow.protocol.json_nesting import MOST_NESTING

OBJECT_BOUNDS: Final = JsonBounds(values=40_000, parts=20_000, depth=MOST_NESTING)
"""Of all tools of a request together, of all arguments of its tool calls, and of its schema: templates and
compilers walk through them."""
_MOST_BYTES: Final = 4  # of a character in UTF-8


def object_text(given: msgspec.Raw, param: str, scan: JsonScan) -> str:
    """The object as JSON in one line. ``scan`` counts it with others that it shares ``OBJECT_BOUNDS`` with.
    ``BadArgument``, of the field ``param``, where they are exceeded or this is no object."""
    data = memoryview(given)
    if bytes(data[:1]) != b"{":
        raise BadArgument(f"{param}: Expected `object`", param=param)
    try:
        for piece in pieces_of(data):
            scan.push(piece)
        return msgspec.json.format(bytes(data), indent=-1).decode()
    except TooMuchJson as error:
        raise BadArgument(f"{param}: with this, there are {error}, which is the limit", param=param) from None
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise BadArgument(f"{param}: it is no JSON: {error}", param=param) from None


def object_of(given: msgspec.Raw, param: str, scan: JsonScan) -> dict[str, Any]:
    """The object. ``BadArgument`` as above."""
    found: dict[str, Any] = msgspec.json.decode(object_text(given, param, scan))
    return found


def schema_constraint(given: msgspec.Raw, param: str) -> Constraint:
    """Of a JSON schema. ``BadArgument`` as above, and where it is too long for one."""
    num_bytes = len(memoryview(given))
    if num_bytes > _MOST_BYTES * MAX_SOURCE_CHARS:
        raise BadArgument(
            f"{param}: the schema has {num_bytes:,} bytes, and {MAX_SOURCE_CHARS:,} characters are the limit",
            param=param,
        )
    return Constraint("schema", object_text(given, param, JsonScan(OBJECT_BOUNDS)))
