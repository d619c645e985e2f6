"""LangChain's tools and tool choices, converted to agentflow's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_openai_tool

import agentflow as af
from agentflow.integrations import ToolChoice, ToolSpec

Tool = dict[str, Any] | type | Callable[..., Any] | BaseTool
Choice = str | bool | dict[str, Any] | None

_MODES = {"auto": "auto", "none": "none", "any": "required", "required": "required"}


def as_openai(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Returns the tools in the form of OpenAI's API. Raises ``BadArgument`` for other objects."""
    described = []
    for tool in tools:
        try:
            described.append(convert_to_openai_tool(tool))
        except (ValueError, TypeError) as error:
            raise af.errors.BadArgument(f"{tool!r} cannot be made a tool: {error}") from error
    return described


def specs_of(tools: Sequence[dict[str, Any]]) -> tuple[ToolSpec, ...]:
    """Converts tools from the form of OpenAI's API."""
    specs = []
    for tool in tools:
        if tool.get("type") != "function" or "function" not in tool:
            raise af.errors.BadArgument(
                f"tools of type {tool.get('type')!r} are not supported: pass functions or schemas"
            )
        function = tool["function"]
        parameters = function.get("parameters") or {"type": "object", "properties": {}}
        is_strict = bool(function.get("strict"))
        specs.append(
            ToolSpec(function["name"], function.get("description") or "", parameters, strict=is_strict)
        )
    return tuple(specs)


def choice_of(choice: Choice, names: Sequence[str], *, parallel: bool | None) -> ToolChoice:
    """Converts ``tool_choice``. Raises ``BadArgument`` for a tool that is not in ``names``."""
    asked: str
    if isinstance(choice, dict):
        asked = choice.get("function", choice).get("name") or choice.get("type", "")
    elif isinstance(choice, str):
        asked = choice
    else:
        asked = "required" if choice else "auto" if names else "none"
    # The default is one call, because a small model that must call and may call several tools does not stop.
    one = ToolChoice("required", parallel=parallel is True)
    if asked in _MODES and asked not in names:
        mode = _MODES[asked]
        return one if mode == "required" else ToolChoice(mode, parallel=parallel is not False)  # type: ignore[arg-type]
    if asked not in names:
        raise af.errors.BadArgument(
            f"tool_choice names {asked!r}, and the tools are: {', '.join(names) or 'none'}"
        )
    return ToolChoice("required", asked, parallel=False)
