"""Checks finished tool calls and answers against client schemas that the grammar does not fully enforce."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Any, Final
from urllib.parse import quote

import anyio.to_thread

from agentflow.engine.generator.generator import EngineGenerator
from agentflow.engine.messages import Finished
from agentflow.protocol.bounds.client_pattern import CannotCheck
from agentflow.protocol.bounds.schema_check import SchemaCheck, SchemaPath
from agentflow.server.completion.request import CheckedOutput, CompletionRequest

_MOST_HEADER_CHARS: Final = 900


def violations(schema: dict[str, Any], text: str) -> list[SchemaPath] | None:
    """Returns the paths in the schema of the keywords that the JSON text violates. None if the text cannot
    be checked within the limits.

    >>> violations({"type": "object", "properties": {"a": {"uniqueItems": True}}}, '{"a": [1, 1]}')
    [('properties', 'a', 'uniqueItems')]
    """
    try:
        return SchemaCheck(schema).violations(text).paths
    except CannotCheck:
        return None


async def check_answer(
    generator: EngineGenerator,
    request: CompletionRequest,
    end: Finished,
    outputs: Sequence[tuple[str, str]],
    unkept: Collection[str],
) -> tuple[CheckedOutput, ...]:
    """Checks an answer in a thread of the tenant.

    Args:
        generator: the tenant's generator.
        request: the request with the schemas.
        end: the end of the answer.
        outputs: the names of the called tools, with the arguments; or the text, without a name.
        unkept: the names of the schemas that were relaxed.
    """
    schemas = {tool.name: tool.parameters for tool in request.tools}
    if request.constraint is not None and "" in unkept:
        source = request.constraint.source
        schemas[""] = await generator.requests.run_off_loop(len(source), json.loads, source)
    checks: list[CheckedOutput] = []
    # The last output of a truncated answer is incomplete.
    for name, text in outputs[:-1] if end.finish_reason == "length" else outputs:
        if name in unkept:
            limiter = generator.requests.threads
            found = await anyio.to_thread.run_sync(violations, schemas[name], text, limiter=limiter)
            checks.append(CheckedOutput(name, None if found is None else tuple(found)))
    return tuple(checks)


def write_paths(paths: Sequence[tuple[str, SchemaPath]]) -> str:
    """Writes paths in schemas as the value of a header: JSON pointers as URI fragments, after the name of
    the tool. Paths in the schema of an answer have no name.

    >>> write_paths([("find", ("properties", "a/b", "uniqueItems"))])
    'find#/properties/a~1b/uniqueItems'
    """
    texts: list[str] = []
    num_chars = 0
    for name, path in paths:
        keys = [key.replace("~", "~0").replace("/", "~1") for key in path]
        texts.append(quote(name, safe="") + "#" + "".join([f"/{quote(key, safe='$~')}" for key in keys]))
        num_chars += len(texts[-1]) + 2
        if num_chars > _MOST_HEADER_CHARS:
            rest = len(paths) - len(texts)
            return ", ".join(texts)[:_MOST_HEADER_CHARS] + f", and {rest} more"
    return ", ".join(texts)
