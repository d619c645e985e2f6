"""``with_structured_output``: three ways to a value, all of them decoded under a grammar; and the form of an
answer as OpenAI's API asks for it, which agents of LangChain's do."""

from __future__ import annotations

from operator import itemgetter
from typing import TYPE_CHECKING, Any, Literal

from langchain_core.language_models import LanguageModelInput
from langchain_core.output_parsers import BaseOutputParser, JsonOutputParser, PydanticOutputParser
from langchain_core.output_parsers.openai_tools import JsonOutputKeyToolsParser, PydanticToolsParser
from langchain_core.runnables import Runnable, RunnableMap, RunnablePassthrough
from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool
from langchain_core.utils.pydantic import is_basemodel_subclass

import agentflow as af
from langchain_agentflow.tools import as_openai

if TYPE_CHECKING:
    from langchain_agentflow.chat_model import ChatAgentflow

Method = Literal["json_schema", "function_calling", "json_mode"]


def structured(
    model: ChatAgentflow, schema: dict[str, Any] | type, *, method: Method, include_raw: bool, **kwargs: Any
) -> Runnable[LanguageModelInput, Any]:
    """The model and a parser behind it; with ``include_raw`` a dict of both, and of the failure."""
    if method == "function_calling":
        asking, parser = _by_call(model, schema, kwargs)
    elif method in ("json_schema", "json_mode"):
        asking, parser = _by_answer(model, schema, method, kwargs)
    else:
        raise ValueError(f"method must be 'json_schema', 'function_calling' or 'json_mode', not {method!r}")
    return _with_raw(asking, parser) if include_raw else asking | parser


def constraint_of(response_format: Any) -> dict[str, Any]:
    """The argument of ``af.reply`` for what stands as ``response_format``. ``BadArgument`` for others."""
    match response_format:
        case None | {"type": "text"}:
            return {}
        case {"type": "json_object"}:
            return {"schema": {"type": "object"}}
        case {"type": "json_schema", "json_schema": {"schema": schema}}:
            return {"schema": schema}
        case type():
            return {"schema": convert_to_json_schema(response_format)}
    known = "text, json_object, or json_schema with a schema"
    raise af.BadArgument(f"response_format has a type ({known}), not {response_format!r}")


def _by_call(
    model: ChatAgentflow, schema: dict[str, Any] | type, kwargs: dict[str, Any]
) -> tuple[Runnable[Any, Any], Any]:
    name = convert_to_openai_tool(schema)["function"]["name"]
    asking = model.bind_tools(
        [schema], tool_choice=name, ls_structured_output_format=_traced("function_calling", schema), **kwargs
    )
    if _is_pydantic(schema):
        return asking, PydanticToolsParser(tools=[schema], first_tool_only=True)  # type: ignore[list-item]
    return asking, JsonOutputKeyToolsParser(key_name=name, first_tool_only=True)


def _by_answer(
    model: ChatAgentflow, schema: dict[str, Any] | type, method: Method, kwargs: dict[str, Any]
) -> tuple[Runnable[Any, Any], BaseOutputParser[Any]]:
    if tools := kwargs.pop("tools", None):
        kwargs["tools"] = as_openai(tools)
    asking = model.bind(
        schema=convert_to_json_schema(schema), ls_structured_output_format=_traced(method, schema), **kwargs
    )
    if _is_pydantic(schema):
        return asking, PydanticOutputParser(pydantic_object=schema)  # type: ignore[arg-type]
    return asking, JsonOutputParser()


def _is_pydantic(schema: dict[str, Any] | type) -> bool:
    return isinstance(schema, type) and is_basemodel_subclass(schema)


def _traced(method: Method, schema: dict[str, Any] | type) -> dict[str, Any]:
    return {"kwargs": {"method": method}, "schema": schema}


def _with_raw(asking: Runnable[Any, Any], parser: Runnable[Any, Any]) -> Runnable[Any, Any]:
    parsed = RunnablePassthrough.assign(parsed=itemgetter("raw") | parser, parsing_error=lambda _: None)
    failed = RunnablePassthrough.assign(parsed=lambda _: None)
    return RunnableMap(raw=asking) | parsed.with_fallbacks([failed], exception_key="parsing_error")
