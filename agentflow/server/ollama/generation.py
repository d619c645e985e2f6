"""``POST /api/chat`` and ``POST /api/generate``: continue a conversation, or answer one message.

Clients send a request without messages or a prompt to load a model. Here all models are loaded, so it is
answered immediately.
"""

from __future__ import annotations

import time

from agentflow.engine.generator.generator import EngineGenerator
from agentflow.server.compatible.field_errors import naming_field
from agentflow.server.completion.completion import completing
from agentflow.server.completion.large_answers import count_logprobs, write_beside
from agentflow.server.completion.request import CompletionRequest
from agentflow.server.completion.streaming import report, stream_completion
from agentflow.server.http.call import ApiCall
from agentflow.server.models.models import TextGenerator
from agentflow.server.ollama.answer import AnswerLines
from agentflow.server.ollama.request import (
    asks_to_reason,
    check_generation,
    list_unset,
    read_constraint,
    read_conversation,
    read_effort,
    read_prompt,
    read_sampling,
    read_tools,
    resolve_name,
)
from agentflow.server.ollama.types import OllamaChatRequest, OllamaGenerateRequest


async def chat(call: ApiCall) -> None:
    """Continues a conversation."""
    began_ns = time.perf_counter_ns()
    body = await call.process(call.read, OllamaChatRequest)
    generator = call.text_generator(resolve_name(call, body.model), body, to_generate=bool(body.messages))
    request = await call.process(_make_chat, call, body, generator)
    await _answer(call, body, request, generator, began_ns)


async def generate(call: ApiCall) -> None:
    """Answers a message, or continues a text."""
    began_ns = time.perf_counter_ns()
    body = await call.process(call.read, OllamaGenerateRequest)
    generator = call.text_generator(resolve_name(call, body.model), body, to_generate=bool(body.prompt))
    request = await call.process(_make_generation, call, body, generator)
    await _answer(call, body, request, generator, began_ns)


def _make_chat(call: ApiCall, body: OllamaChatRequest, generator: TextGenerator) -> CompletionRequest:
    check_generation(body, generator)
    return CompletionRequest(
        read_conversation(body.messages or (), generator),
        read_sampling(body, generator),
        constraint=read_constraint(body.format),
        tools=read_tools(body.tools or ()),
        max_prompt_tokens=call.service.http_limits.max_prompt_tokens,
        reasons=asks_to_reason(body),
        effort=read_effort(body),
        unset=list_unset(body),
    )


def _make_generation(
    call: ApiCall, body: OllamaGenerateRequest, generator: TextGenerator
) -> CompletionRequest:
    check_generation(body, generator)
    return CompletionRequest(
        read_prompt(body, generator),
        read_sampling(body, generator),
        constraint=read_constraint(body.format),
        max_prompt_tokens=call.service.http_limits.max_prompt_tokens,
        reasons=asks_to_reason(body),
        effort=read_effort(body),
        unset=list_unset(body),
        returns_prompt=not body.raw and isinstance(generator, EngineGenerator),
    )


async def _answer(
    call: ApiCall,
    body: OllamaChatRequest | OllamaGenerateRequest,
    request: CompletionRequest,
    generator: TextGenerator,
    began_ns: int,
) -> None:
    is_chat = isinstance(body, OllamaChatRequest)
    lines = AnswerLines(body.model, began_ns, is_chat=is_chat, has_context=request.returns_prompt)
    if not (body.messages if isinstance(body, OllamaChatRequest) else body.prompt):
        async with generator.metered():
            await call.reply(lines.loaded())
        return
    with naming_field(generator, "messages" if is_chat else "prompt", "format", effort="think"):
        async with completing(generator, request, caller=call.caller, on_cut=call.record.count) as completion:
            lines.times = completion.times
            if body.stream is not False:
                await stream_completion(call, completion, lines)
                return
            [answer] = await completion.answers()
    report(call, completion)
    await call.reply(await write_beside(call, count_logprobs([answer]), lines.whole, answer))
