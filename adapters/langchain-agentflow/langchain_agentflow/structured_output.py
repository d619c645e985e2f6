"""``with_structured_output`` by three methods, each under a grammar; and OpenAI's ``response_format``."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Literal

from langchain_core.exceptions import OutputParserException
from langchain_core.language_models import LanguageModelInput
from langchain_core.messages import AIMessage
from langchain_core.output_parsers import BaseOutputParser, JsonOutputParser, PydanticOutputParser
from langchain_core.output_parsers.openai_tools import JsonOutputKeyToolsParser, PydanticToolsParser
from langchain_core.outputs import Generation
from langchain_core.runnables import Runnable, RunnableGenerator, RunnableMap, RunnablePassthrough
from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool
from langchain_core.utils.pydantic import is_basemodel_subclass
from pydantic import BaseModel

import agentflow as af
from langchain_agentflow.tools import as_openai

if TYPE_CHECKING:
    from langchain_agentflow.chat_model import ChatAgentflow

# The keys that distinguish dictionaries of tools from JSON schemas.
_OF_TOOLS = {"parameters", "input_schema", "function"}
_OF_SCHEMAS = {"type", "properties", "$ref", "anyOf", "oneOf", "allOf", "enum", "const"}

Method = Literal["json_schema", "function_calling", "json_mode"]


def structured(
    model: ChatAgentflow,
    schema: dict[str, Any] | type | None,
    *,
    method: Method,
    include_raw: bool,
    **kwargs: Any,
) -> Runnable[LanguageModelInput, Any]:
    """Returns the model followed by a parser; with ``include_raw``, a dict of the message, value and
    error."""
    if schema is None:
        if method != "json_mode":
            raise ValueError(f"method {method!r} needs a schema")
        schema = {"type": "object"}
    if method == "function_calling":
        asking, parser = _by_call(model, schema, kwargs)
    elif method in ("json_schema", "json_mode"):
        asking, parser = _by_answer(model, schema, method, kwargs)
    else:
        raise ValueError(f"method must be 'json_schema', 'function_calling' or 'json_mode', not {method!r}")
    whole = RunnableGenerator(reject_truncated, _areject_truncated) | parser
    return _with_raw(asking, whole) if include_raw else asking | whole


def constraint_of(response_format: Any) -> dict[str, Any]:
    """Converts a ``response_format`` to an argument of ``af.reply``. Raises ``BadArgument`` for unknown
    types."""
    match response_format:
        case None | {"type": "text"}:
            return {}
        case {"type": "json_object"}:
            return {"schema": {"type": "object"}}
        case {"type": "json_schema", "json_schema": {"schema": schema}}:
            return {"schema": schema}
        case type():
            return {"schema": json_schema_of(response_format)}
    known = "text, json_object, or json_schema with a schema"
    raise af.errors.BadArgument(f"the type of response_format must be {known}, not {response_format!r}")


def _by_call(
    model: ChatAgentflow, schema: dict[str, Any] | type, kwargs: dict[str, Any]
) -> tuple[Runnable[Any, Any], Any]:
    if "tools" in kwargs:
        raise ValueError("method 'function_calling' makes the schema a tool: use 'json_schema' with tools")
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
        schema=json_schema_of(schema), ls_structured_output_format=_traced(method, schema), **kwargs
    )
    if _is_pydantic(schema):
        return asking, _ModelValue(pydantic_object=schema)  # type: ignore[arg-type]
    return asking, JsonValue()


def json_schema_of(schema: Any) -> dict[str, Any]:
    """Returns the JSON schema of a type that LangChain accepts: a pydantic class, a TypedDict, a tool, or a
    schema, alone or in a dictionary with its name as in OpenAI's API."""
    if isinstance(schema, type) and issubclass(schema, BaseModel):
        return schema.model_json_schema()
    if isinstance(schema, dict):
        inner = schema.get("json_schema", schema).get("schema")
        if isinstance(inner, dict):
            return inner
        if not schema.keys() & _OF_TOOLS and schema.keys() & _OF_SCHEMAS:
            return schema
    return convert_to_json_schema(schema)


class _Whole:
    """Rejects truncated JSON before a lenient parser accepts it. The value is None if the answer calls
    tools."""

    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        if getattr(getattr(result[0], "message", None), "tool_calls", None):
            return None
        if not partial:
            try:
                json.loads(result[0].text)
            except ValueError as error:
                raise OutputParserException(
                    f"the answer is not JSON: {error}", llm_output=result[0].text
                ) from error
        return super().parse_result(result, partial=partial)  # type: ignore[misc]


class JsonValue(_Whole, JsonOutputParser):
    """Parses the answer."""


class _ModelValue(_Whole, PydanticOutputParser):  # type: ignore[type-arg]
    """Parses the answer."""


def reject_truncated(messages: Iterator[AIMessage]) -> Iterator[AIMessage]:
    """Raises ``OutputParserException`` for an answer that ``max_tokens`` truncated."""
    for message in messages:
        _check_whole(message)
        yield message


async def _areject_truncated(messages: AsyncIterator[AIMessage]) -> AsyncIterator[AIMessage]:
    async for message in messages:
        _check_whole(message)
        yield message


def _check_whole(message: AIMessage) -> None:
    if message.response_metadata.get("finish_reason") == "length":
        raise OutputParserException(
            "the answer was truncated by max_tokens: raise max_tokens",
            llm_output=message.text,
        )


def _is_pydantic(schema: dict[str, Any] | type) -> bool:
    return isinstance(schema, type) and is_basemodel_subclass(schema)


def _traced(method: Method, schema: dict[str, Any] | type) -> dict[str, Any]:
    return {"kwargs": {"method": method}, "schema": schema}


def _with_raw(asking: Runnable[Any, Any], parser: Runnable[Any, Any]) -> Runnable[Any, Any]:
    parsed = RunnablePassthrough.assign(parsed=itemgetter("raw") | parser, parsing_error=lambda _: None)
    failed = RunnablePassthrough.assign(parsed=lambda _: None)
    return RunnableMap(raw=asking) | parsed.with_fallbacks([failed], exception_key="parsing_error")
