"""Functions that a model may call, as OpenAI's API declares them."""

from __future__ import annotations

import msgspec

from agentflow.protocol.bounds.json_bounds import JsonScan, decode_object
from agentflow.protocol.chat import ToolSpec
from agentflow.server.compatible.fields import GivenObject, ToolName, is_given

NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


class FunctionSpec(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``parameters``: the JSON schema of an object; by default the tool has no parameters. If it is not
    ``strict``, keywords that cannot be enforced are relaxed."""

    name: ToolName
    description: str | None = None
    parameters: GivenObject = None
    strict: bool | None = None


def function_tool(function: FunctionSpec, param: str, scan: JsonScan) -> ToolSpec:
    """Makes the tool of a chat template. ``param``: the function's field. ``scan``: bounds all parameters."""
    given, parameters = function.parameters, NO_PARAMETERS
    if given is not None and is_given(given):
        parameters = decode_object(given, f"{param}.parameters", scan)
    return ToolSpec(function.name, function.description or "", parameters, strict=bool(function.strict))
