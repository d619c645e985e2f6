"""``POST /v1/completions``, as OpenAI's API has it: texts are gone on with, without a chat template."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Literal, cast

from agentflow.engine.generator import EngineGenerator
from agentflow.server.completion.completion import answers_of, completing
from agentflow.server.completion.completion_set import completing_all
from agentflow.server.completion.request import Answer, CompletionDelta, CompletionRequest, TokenIds
from agentflow.server.http.call import ApiCall
from agentflow.server.openai.openai_completion_types import Prompt, TextAnswer, TextChoice, TextRequest
from agentflow.server.openai.openai_text_chunks import OffsetLogprobs, TextChunks
from agentflow.server.openai.sampling import (
    check_fields,
    check_told,
    constraint_of,
    faults_placed,
    sampling_of,
    wrong,
)
from agentflow.server.openai.stream import AnswerIdentity, DeltaSource, stream_answers
from agentflow.server.openai.usage import usage_body, usage_of_prompts

DEFAULT_MAX_TOKENS = 16


async def create_completion(call: ApiCall) -> None:
    """Goes on with one text or with several."""
    body = await call.beside(call.read, TextRequest)
    generator = call.generator(body.model, priority=body.priority)
    requests = await call.beside(_requests_of, call, body, generator)
    n = requests[0].n
    num_answers = n * len(requests)
    identity = AnswerIdentity.new("cmpl", generator.capabilities.model)
    with faults_placed("prompt", requests[0].constraint):
        async with _completing(generator, requests) as source:
            if body.stream:
                include_usage = bool(body.stream_options and body.stream_options.include_usage)
                chunks = TextChunks(identity, num_answers, include_usage=include_usage)
                await stream_answers(call, source, chunks, n=n, include_usage=include_usage)
                return
            deltas: list[CompletionDelta] = []
            while some := await source.next():
                deltas += some
    answers = answers_of(deltas, num_answers)
    usage = usage_of_prompts([answer.usage for answer in answers], n)
    await call.reply(
        TextAnswer(
            id=identity.id,
            created=identity.created,
            model=identity.model,
            system_fingerprint=identity.system_fingerprint,
            choices=[
                _choice(index, answer, body.logprobs is not None) for index, answer in enumerate(answers)
            ],
            usage=usage_body(usage, call.record),
        )
    )


def _completing(
    generator: EngineGenerator, requests: Sequence[CompletionRequest]
) -> AbstractAsyncContextManager[DeltaSource]:
    if len(requests) == 1:
        return completing(generator, requests[0])
    return completing_all(generator, requests)


def _requests_of(call: ApiCall, body: TextRequest, generator: EngineGenerator) -> list[CompletionRequest]:
    """One for each prompt."""
    limits = call.service.http_limits
    check_fields(body, limits.max_n)
    prompts = prompts_of(body.prompt)
    n = body.n or 1
    if n * len(prompts) > limits.max_n:
        asked = f"{len(prompts)} prompts with {n} answers each"
        raise wrong("prompt", f"{asked}: this server gives at most {limits.max_n} answers to a request")
    params = sampling_of(body, generator, body.max_tokens or DEFAULT_MAX_TOKENS, body.logprobs)
    check_told(params, generator, n * len(prompts), "logprobs")
    return [
        CompletionRequest(
            prompt,
            params,
            constraint=constraint_of(body),
            n=n,
            cache_salt=body.cache_salt or "",
            priority=body.priority or 0,
            max_prompt_tokens=limits.prompt_tokens,
        )
        for prompt in prompts
    ]


def prompts_of(prompt: Prompt) -> list[str | TokenIds]:
    """What is to be gone on with. ``Refusal`` for a list of different things."""
    if isinstance(prompt, str):
        return [prompt]
    kinds = {type(member) for member in prompt}
    if len(kinds) > 1:
        raise wrong("prompt", "'prompt' is a text, a list of texts, token ids, or a list of lists of them")
    if kinds == {int}:
        return [TokenIds(tuple(cast("list[int]", prompt)))]
    return [TokenIds(tuple(member)) if isinstance(member, list) else cast(str, member) for member in prompt]


def _choice(index: int, answer: Answer, has_logprobs: bool) -> TextChoice:
    reason: Literal["stop", "length"] = "length" if answer.finish_reason == "length" else "stop"
    return TextChoice(
        index=index,
        text=answer.text,
        logprobs=OffsetLogprobs().push(answer.tokens) if has_logprobs else None,
        finish_reason=reason,
    )
