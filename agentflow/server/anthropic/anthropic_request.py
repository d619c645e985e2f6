"""Requests of Anthropic's API: their bodies, read; what is not supported, named; and what the engine is asked
for them."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

import msgspec

from agentflow.protocol.constraint import Constraint
from agentflow.protocol.given_object import schema_constraint
from agentflow.protocol.sampling import SamplingParams
from agentflow.server.anthropic.conversation import conversation_of, tool_choice_of, tools_of, wrong
from agentflow.server.anthropic.types import CountRequest, MessagesRequest
from agentflow.server.completion.request import CompletionRequest
from agentflow.server.http.call import ApiCall
from agentflow.server.http.errors import Refusal

T = TypeVar("T")

# Answers are drawn, where nothing else is said, as they are in Anthropic's API.
TEMPERATURE = 1.0
# The client asks for a thread, and goes on without where it is told exactly this.
_THREAD_CODE = "thread_unsupported_request"
# How msgspec's messages begin.
_BAD_VALUES = ("Invalid value '", "Invalid enum value '")
_NOT_NULL = "Expected `null`, got "


class _AnyTool(msgspec.Struct):
    type: str | None = None


class _AnyTools(msgspec.Struct):
    tools: list[_AnyTool] = []


def read_request(call: ApiCall, kind: type[T]) -> T:
    """The body. ``Refusal`` that names what is not supported."""
    try:
        return call.read(kind)
    except Refusal as refusal:
        raise _named(refusal, call) from None


def _named(refusal: Refusal, call: ApiCall) -> Refusal:
    """The refusal of a body, in words that say what is there instead."""
    param, message = refusal.param or "", refusal.message
    of_tools = _of_tools(call) if param.startswith("tools[") else None
    if of_tools is not None:
        return of_tools
    if param == "thread":
        text = "'thread' is not supported: no conversations are kept here, send all messages"
        return Refusal(400, _THREAD_CODE, text, param)
    fault = message.removeprefix(f"{param}: ")
    if fault.startswith(_BAD_VALUES):
        value = fault[fault.index("'") :]
        there = ": messages consist of text, tool_use and tool_result" if ".content[" in param else ""
        return Refusal(400, "unsupported", f"{param}: {value} is not supported{there}", param)
    if fault.startswith(_NOT_NULL):
        return Refusal(400, "unsupported", f"{param!r} is not supported", param)
    return refusal


def _of_tools(call: ApiCall) -> Refusal | None:
    """Tools that Anthropic's own servers run have fields of their own: what is wrong is not those."""
    try:
        tools = call.read(_AnyTools).tools
    except Refusal:
        return None
    for number, tool in enumerate(tools):
        if tool.type not in (None, "custom"):
            param = f"tools[{number}].type"
            text = f"{param}: {tool.type[:100]!r} is not supported: this server runs no tools, give your own"
            return Refusal(400, "unsupported", text, param)
    return None


def prompt_of(body: CountRequest) -> CompletionRequest:
    """Of a request the prompt. ``Refusal`` that names the field that is wrong."""
    tools = tools_of(body.tools or ())
    choice = tool_choice_of(body, tools)
    return CompletionRequest(conversation_of(body), SamplingParams(), tools=tools, tool_choice=choice)


def completion_of(call: ApiCall, body: MessagesRequest) -> CompletionRequest:
    """All of it."""
    request = prompt_of(body)
    params = SamplingParams(
        max_tokens=body.max_tokens,
        temperature=TEMPERATURE if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=body.top_k or 0,
        seed=body.seed,
        stop=tuple(body.stop_sequences or ()),
    )
    return replace(
        request,
        params=params,
        constraint=_form_of(body, request),
        cache_salt=body.cache_salt or "",
        priority=body.priority or 0,
        max_prompt_tokens=call.service.http_limits.prompt_tokens,
    )


def _form_of(body: MessagesRequest, request: CompletionRequest) -> Constraint | None:
    asked = body.output_config.format if body.output_config is not None else None
    if asked is not None and body.output_format is not None:
        raise wrong("output_format", "output_config.format says it already: give one of them")
    asked = asked or body.output_format
    if asked is None:
        return None
    assert isinstance(request.prompt, tuple)
    if request.prompt[-1].role == "assistant":
        text = (
            "a message of the assistant's at the end excludes output_config.format, which is of all the text"
        )
        raise wrong("messages", text)
    return schema_constraint(asked.schema, "output_config.format.schema")
