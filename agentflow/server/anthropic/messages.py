"""``POST /v1/messages`` and ``POST /v1/messages/count_tokens``, as in Anthropic's API.

A request is decoded, with errors for unsupported fields, translated into the common form of all APIs, and
answered whole or as a stream of events.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TypeVar

import msgspec

from agentflow.protocol.bounds.json_bounds import schema_constraint
from agentflow.protocol.constraint import Constraint
from agentflow.protocol.events import Capabilities
from agentflow.protocol.sampling import SamplingParams
from agentflow.server.anthropic.answer import AnswerEvents, AnswerFrame
from agentflow.server.anthropic.conversation import read_conversation, read_tool_choice, read_tools
from agentflow.server.anthropic.types import CountAnswer, CountRequest, MessagesRequest, Thinking
from agentflow.server.compatible.field_errors import naming_field
from agentflow.server.compatible.sampling import read_nucleus
from agentflow.server.completion.completion import completing
from agentflow.server.completion.engine_run import prompt_ids
from agentflow.server.completion.request import CompletionRequest, names_of_unset
from agentflow.server.completion.streaming import report, stream_completion
from agentflow.server.errors import ApiError, invalid_field
from agentflow.server.http.call import ApiCall
from agentflow.server.http.json_body import ALLOWED
from agentflow.server.models.api_model import TenantGenerator
from agentflow.server.models.models import TextGenerator

T = TypeVar("T")

# The default of Anthropic's API.
TEMPERATURE = 1.0
# Only at this code, Anthropic's client falls back to a conversation without a thread.
_THREAD_CODE = "thread_unsupported_request"
# Beginnings of msgspec's messages.
_BAD_VALUES = ("Invalid value '", "Invalid enum value '")
_NOT_NULL = "Expected `null`, got "


class _AnyTool(msgspec.Struct):
    type: str | None = None


class _AnyTools(msgspec.Struct):
    tools: list[_AnyTool] = []


def read_request(call: ApiCall, kind: type[T]) -> T:
    """The decoded body. ``ApiError``, with the field, for a field that is wrong or not supported."""
    try:
        return call.read(kind)
    except ApiError as error:
        raise _explained(error, call) from None


def _explained(error: ApiError, call: ApiCall) -> ApiError:
    """The error of a body, with ``unsupported`` for values that Anthropic's own API accepts."""
    param, message = error.param or "", error.message
    of_tools = _tools_error(call) if param.startswith("tools[") else None
    if of_tools is not None:
        return of_tools
    if param == "thread":
        text = "'thread' is not supported: the server keeps no conversations, send all messages"
        return ApiError(400, _THREAD_CODE, text, param)
    if param.startswith("context_management.edits["):
        text = f"{param}: not supported: the only edit is clear_thinking that keeps all thinking"
        return ApiError(400, "unsupported", text, param)
    fault = message.removeprefix(f"{param}: ")
    if fault.startswith(_BAD_VALUES):
        value, _, allowed = fault[fault.index("'") :].partition(ALLOWED)
        there = f": use one of {allowed}" if allowed else ""
        if ".content[" in param:
            there = ": use text, tool_use and tool_result blocks"
        return ApiError(400, "unsupported", f"{param}: {value} is not supported{there}", param)
    if fault.startswith(_NOT_NULL):
        return ApiError(400, "unsupported", f"{param!r} is not supported", param)
    return error


def _tools_error(call: ApiCall) -> ApiError | None:
    """The error for a tool that Anthropic's servers run. An error about other fields of such a tool would be
    misleading."""
    try:
        tools = call.read(_AnyTools).tools
    except ApiError:
        return None
    for number, tool in enumerate(tools):
        if tool.type not in (None, "custom"):
            param = f"tools[{number}].type"
            text = f"{param}: {tool.type[:100]!r} is not supported: the server runs no tools; define your own"
            return ApiError(400, "unsupported", text, param)
    return None


def read_prompt(body: CountRequest, model: Capabilities) -> CompletionRequest:
    """The request with only its prompt. ``ApiError``, with the field, for a field that is wrong. ``model``:
    the features of the model."""
    messages, kept = read_conversation(body, model)
    return CompletionRequest(
        messages,
        SamplingParams(),
        kept=kept,
        tools=read_tools(body.tools or ()),
        tool_choice=read_tool_choice(body),
        reasons=_asks_to_reason(body.thinking),
        reasoning_budget=None if body.thinking is None else body.thinking.budget_tokens,
        effort=None if body.output_config is None else body.output_config.effort,
    )


def _asks_to_reason(thinking: Thinking | None) -> bool | None:
    """Whether the model reasons before its answer; None: its chat template decides. In this API, the default
    is False."""
    match None if thinking is None else thinking.type:
        case "enabled":
            if thinking is None or thinking.budget_tokens is None:
                raise invalid_field("thinking.budget_tokens", "it is required if thinking is enabled")
            return True
        case "adaptive":
            return None
    return False


def make_completion(call: ApiCall, body: MessagesRequest, model: Capabilities) -> CompletionRequest:
    """The whole request in the common form of all APIs. ``model``: the features of the model."""
    request = read_prompt(body, model)
    top_p, top_k = read_nucleus(body.top_p, body.top_k)
    params = SamplingParams(
        max_tokens=body.max_tokens,
        temperature=TEMPERATURE if body.temperature is None else body.temperature,
        top_p=top_p,
        top_k=top_k,
        seed=body.seed,
        stop=tuple(body.stop_sequences or ()),
    )
    return replace(
        request,
        params=params.check(),
        constraint=_read_form(body, request),
        cache_salt=body.cache_salt or "",
        priority=body.priority or 0,
        max_prompt_tokens=call.service.http_limits.max_prompt_tokens,
        unset=names_of_unset(temperature=body.temperature, top_p=body.top_p),
    )


def _read_form(body: CountRequest, request: CompletionRequest) -> Constraint | None:
    form = body.output_config.format if body.output_config is not None else None
    if form is not None and body.output_format is not None:
        raise invalid_field("output_format", "it excludes output_config.format: give one of them")
    form = form or body.output_format
    if form is None:
        return None
    assert isinstance(request.prompt, tuple)
    if request.prompt[-1].role == "assistant":
        text = (
            "a last message of the assistant excludes output_config.format, which applies to the whole text"
        )
        raise invalid_field("messages", text)
    return schema_constraint(form.schema, "output_config.format.schema")


def _make_count_request(body: CountRequest, model: Capabilities) -> CompletionRequest:
    """The request with only its prompt, after a check of all other fields."""
    request = read_prompt(body, model)
    _read_form(body, request)
    return request


def _naming_fields(generator: TextGenerator) -> AbstractContextManager[None]:
    return naming_field(
        generator,
        "messages",
        "output_config.format.schema",
        "input_schema",
        effort="output_config.effort",
        budget="thinking",
        too_long="prompt is too long",
    )


async def create_message(call: ApiCall) -> None:
    """Continues a conversation."""
    body = await call.process(read_request, call, MessagesRequest)
    generator = call.text_generator(body.model, body, priority=body.priority)
    request = await call.process(make_completion, call, body, generator.capabilities)
    if body.thinking is None and isinstance(generator, TenantGenerator):
        request = replace(request, reasons=None)  # some models of vendors always reason
    capabilities = generator.capabilities
    shows_reasoning = body.thinking is None or body.thinking.display != "omitted"
    frame = AnswerFrame.new(capabilities.model, body.max_tokens, capabilities.max_context, shows_reasoning)
    with _naming_fields(generator):
        async with completing(generator, request, caller=call.caller, on_cut=call.record.count) as completion:
            if body.stream:
                await stream_completion(call, completion, AnswerEvents(frame))
                return
            deltas = await completion.rest()
    answer = frame.whole(deltas)
    report(call, completion)
    await call.reply(answer)


async def count_tokens(call: ApiCall) -> None:
    """Counts the tokens of the prompt without running the model."""
    body = await call.process(read_request, call, CountRequest)
    generator = call.generator(body.model, to_generate=False)
    request = await call.process(_make_count_request, body, generator.capabilities)
    async with generator.metered():
        with _naming_fields(generator):
            token_ids = await prompt_ids(generator, request)
    call.record.prompt_tokens = len(token_ids)
    await call.reply(CountAnswer(len(token_ids)))
