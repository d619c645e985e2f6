"""``POST /v1/chat/completions``, as OpenAI's API has it."""

from __future__ import annotations

from agentflow.server.completion.completion import completing
from agentflow.server.completion.request import Answer
from agentflow.server.http.call import ApiCall
from agentflow.server.openai.openai_chat_chunks import ChatChunks, chat_logprobs
from agentflow.server.openai.openai_chat_request import completion_of_chat
from agentflow.server.openai.sampling import faults_placed
from agentflow.server.openai.stream import AnswerIdentity, stream_answers
from agentflow.server.openai.types import (
    AnsweredFunction,
    AnsweredToolCall,
    AnswerMessage,
    ChatAnswer,
    ChatChoice,
    ChatRequest,
)
from agentflow.server.openai.usage import usage_body, usage_of_prompts


async def create_chat_completion(call: ApiCall) -> None:
    """Goes on with a conversation."""
    body = await call.beside(call.read, ChatRequest)
    generator = call.generator(body.model, priority=body.priority)
    request = await call.beside(completion_of_chat, call, body, generator)
    identity = AnswerIdentity.new("chatcmpl", generator.capabilities.model)
    has_logprobs = request.params.wants_logprobs
    with faults_placed("messages", request.constraint):
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
