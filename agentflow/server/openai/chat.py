"""``POST /v1/chat/completions``, as OpenAI's API has it.

From ``POST /v1/chat/completions`` to what the engine is asked.
"""

from __future__ import annotations

from agentflow.engine.generator import EngineGenerator
from agentflow.protocol.constraint import Constraint
from agentflow.protocol.json_bounds import schema_constraint
from agentflow.server.completion.completion import completing
from agentflow.server.completion.request import Answer, CompletionRequest
from agentflow.server.http.call import ApiCall
from agentflow.server.openai.conversation import conversation_of, tool_choice_of, tools_of
from agentflow.server.openai.sampling import (
    check_fields,
    check_num_logprobs,
    constraint_of,
    is_given,
    naming_field,
    sampling_of,
    wrong,
)
from agentflow.server.openai.stream import AnswerIdentity, ChatChunks, chat_logprobs, stream_answers
from agentflow.server.openai.types import (
    AnsweredFunction,
    AnsweredToolCall,
    AnswerMessage,
    ChatAnswer,
    ChatChoice,
    ChatRequest,
    ObjectFormat,
    SchemaFormat,
)
from agentflow.server.openai.usage import usage_body, usage_of_prompts

ANY_OBJECT = Constraint("schema", '{"type":"object"}')


def completion_of_chat(call: ApiCall, body: ChatRequest, generator: EngineGenerator) -> CompletionRequest:
    """``ApiError`` that names the field, where something cannot be had."""
    limits = call.service.http_limits
    check_fields(body, limits.max_n)
    tools = tools_of(body.tools or ())
    choice = tool_choice_of(body.tool_choice, tools, body.parallel_tool_calls)
    max_tokens = body.max_completion_tokens or body.max_tokens
    params = sampling_of(body, generator, max_tokens, _top_logprobs(body))
    check_num_logprobs(params, generator, body.n or 1, "top_logprobs")
    return CompletionRequest(
        conversation_of(body.messages, generator.capabilities.model),
        params,
        constraint=_form_of(body),
        tools=tools,
        tool_choice=choice,
        n=body.n or 1,
        cache_salt=body.cache_salt or "",
        priority=body.priority or 0,
        max_prompt_tokens=limits.max_prompt_tokens,
    )


def _top_logprobs(body: ChatRequest) -> int | None:
    if body.top_logprobs is not None and not body.logprobs:
        raise wrong("top_logprobs", "'top_logprobs' needs 'logprobs' to be true")
    return (body.top_logprobs or 0) if body.logprobs else None


def _form_of(body: ChatRequest) -> Constraint | None:
    """What the text must look like, where no tool is called."""
    asked = {"regex or grammar": constraint_of(body), "response_format": _response_format(body)}
    names = [name for name, constraint in asked.items() if constraint is not None]
    if len(names) > 1:
        raise wrong("response_format", f"'response_format' excludes {names[0]}: give one of them")
    return asked[names[0]] if names else None


def _response_format(body: ChatRequest) -> Constraint | None:
    match body.response_format:
        case ObjectFormat():
            return ANY_OBJECT
        case SchemaFormat(json_schema=spec):
            if spec.schema is None or not is_given(spec.schema):
                return ANY_OBJECT
            return schema_constraint(spec.schema, "response_format")
    return None


async def create_chat_completion(call: ApiCall) -> None:
    """Goes on with a conversation."""
    body = await call.beside(call.read, ChatRequest)
    generator = call.generator(body.model, priority=body.priority)
    request = await call.beside(completion_of_chat, call, body, generator)
    identity = AnswerIdentity.new("chatcmpl", generator.capabilities.model)
    has_logprobs = request.params.wants_logprobs
    with naming_field("messages", request.constraint):
        async with completing(generator, request) as completion:
            if body.stream:
                include_usage = bool(body.stream_options and body.stream_options.include_usage)
                chunks = ChatChunks(identity, request.n, include_usage=include_usage)
                await stream_answers(call, completion, chunks, n=request.n, include_usage=include_usage)
                return
            answers = await completion.answers()
    usage = usage_of_prompts([answer.usage for answer in answers], request.n)
    await call.reply(
        ChatAnswer(
            id=identity.id,
            created=identity.created,
            model=identity.model,
            system_fingerprint=identity.system_fingerprint,
            choices=[_choice(n, answer, has_logprobs) for n, answer in enumerate(answers)],
            usage=usage_body(usage, call.record),
        )
    )


def _choice(index: int, answer: Answer, has_logprobs: bool) -> ChatChoice:
    calls = [
        AnsweredToolCall(id=called.id, function=AnsweredFunction(called.name, called.arguments))
        for called in answer.tool_calls
    ]
    content = None if calls and not answer.text else answer.text
    return ChatChoice(
        index=index,
        message=AnswerMessage(role="assistant", content=content, refusal=None, tool_calls=calls),
        logprobs=chat_logprobs(answer.tokens) if has_logprobs else None,
        finish_reason=answer.finish_reason,
    )
