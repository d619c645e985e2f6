"""``POST /v1/completions``: continues one text or several without a chat template, as OpenAI's API does."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from agentflow.protocol.sampling import MAX_INT
from agentflow.server.compatible.field_errors import check_num_logprobs, naming_field, naming_param
from agentflow.server.compatible.prompts import Prompt, read_prompts
from agentflow.server.completion.completion import completing
from agentflow.server.completion.large_answers import (
    AnswerMemory,
    answer_memory,
    count_logprobs,
    reply_beside,
)
from agentflow.server.completion.request import (
    Answer,
    AnswerEnded,
    AnswerToken,
    CompletionDelta,
    CompletionRequest,
    PromptDelta,
    TextDelta,
    names_of_unset,
)
from agentflow.server.completion.streaming import stream_completion
from agentflow.server.errors import invalid_field
from agentflow.server.http.call import ApiCall
from agentflow.server.http.caller import caller_with, read_priority, read_salt
from agentflow.server.models.models import TextGenerator
from agentflow.server.openai.answer import (
    AnswerIdentity,
    ChunkWriter,
    UsageChunks,
    encode_json,
    list_prompt_ids,
    make_prompt_logprobs,
    usage_body,
)
from agentflow.server.openai.request import check_fields, read_constraint, read_sampling
from agentflow.server.openai.types import PromptLogprobs, SharedFields, UsageBody

# The limit of OpenAI's endpoint.
MAX_LOGPROBS = 5
_DEFAULT_MAX_TOKENS = 16
_KIND = "text_completion"


class TextRequest(SharedFields, kw_only=True):
    """A text to continue, or several. Special tokens in a text are recognised."""

    prompt: Prompt
    max_tokens: Annotated[int, Meta(ge=0, le=MAX_INT)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None


class TextLogprobs(msgspec.Struct, kw_only=True):
    """Each list has one item per token. ``text_offset``: where the token's text begins in the answer, in
    characters. A token that is not valid UTF-8 is written as ``bytes:\\x..``. ``token_logprobs`` is null if
    the text was encoded again, which happens under a constraint. With ``echo``, the tokens of the prompt come
    first, and the very first has no log-probability."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float | None] | None]
    text_offset: list[int]


class TextChoice(msgspec.Struct, kw_only=True):
    """One answer, or a piece of it in a stream. Answers are numbered prompt by prompt."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class TextAnswer(msgspec.Struct, kw_only=True):
    """The whole answer. ``created``: Unix time."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[TextChoice]
    usage: UsageBody
    object: Literal["text_completion"] = "text_completion"


async def create_completion(call: ApiCall) -> None:
    """Continues one text or several."""
    with answer_memory(call) as memory:
        await _answer(call, memory)


async def _answer(call: ApiCall, memory: AnswerMemory) -> None:
    body = await call.process(call.read, TextRequest)
    generator = call.text_generator(body.model, body, priority=read_priority(body.priority, body.nvext))
    form, requests = await call.process(_make_requests, call, body, generator)
    n = requests[0].n
    num_answers = n * len(requests)
    identity = AnswerIdentity.new("cmpl", generator.capabilities.model)
    with naming_field(generator, "prompt", form):
        caller = caller_with(call.caller, body.nvext, body.prompt_cache_key)
        async with completing(
            generator, *requests, caller=caller, on_cut=call.record.count, on_scored=memory.reserve
        ) as completion:
            if body.stream:
                chunks = _TextChunks(identity, num_answers, body, usage=UsageChunks.of(body, completion))
                await stream_completion(call, completion, chunks)
                return
            answers = await completion.answers()
    call.record.count(completion.usage)

    def answer() -> TextAnswer:
        best = [
            answer
            for start in range(0, num_answers, n)
            for answer in _best(answers[start : start + n], body.n or 1)
        ]
        return TextAnswer(
            id=identity.id,
            created=identity.created,
            model=identity.model,
            system_fingerprint=identity.system_fingerprint,
            choices=[_choice(index, answer, body) for index, answer in enumerate(best)],
            usage=usage_body(completion.usage),
        )

    await reply_beside(call, count_logprobs(answers), answer)


def _make_requests(
    call: ApiCall, body: TextRequest, generator: TextGenerator
) -> tuple[str, list[CompletionRequest]]:
    """Returns the field of the constraint, and a request for each prompt."""
    limits = call.service.http_limits
    check_fields(body, limits.max_n, ranks=True)
    prompts = read_prompts(body.prompt)
    n = body.best_of or body.n or 1
    if n * len(prompts) > limits.max_n:
        asked = f"{len(prompts)} prompts with {n} answers each"
        raise invalid_field("prompt", f"{asked} exceed the limit of {limits.max_n} answers to a request")
    max_tokens = _DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    params = read_sampling(body, generator, max_tokens or 1, body.logprobs)
    if n > (body.n or 1):
        params = replace(params, logprobs=True)
    check_num_logprobs(params, generator, n * len(prompts), "logprobs")
    echoed_logprobs = body.logprobs if body.echo else None
    wanted = [count for count in (echoed_logprobs, body.prompt_logprobs) if count is not None]
    with naming_param():
        form, constraint = read_constraint(body)
    return form, [
        CompletionRequest(
            prompt,
            params,
            constraint=constraint,
            n=n,
            cache_salt=read_salt(body.cache_salt, body.nvext),
            priority=read_priority(body.priority, body.nvext),
            max_prompt_tokens=limits.max_prompt_tokens,
            returns_prompt=bool(body.echo or body.return_token_ids or wanted),
            prompt_logprobs=max(wanted, default=None),
            generates=max_tokens > 0,
            unset=names_of_unset(temperature=body.temperature, top_p=body.top_p),
        )
        for prompt in prompts
    ]


def _best(answers: Sequence[Answer], count: int) -> Sequence[Answer]:
    """The answers with the highest log-probability per token, best first."""
    return answers if len(answers) == count else sorted(answers, key=_mean_logprob, reverse=True)[:count]


def _mean_logprob(answer: Answer) -> float:
    logprobs = [token.logprob for token in answer.tokens if token.logprob is not None]
    return sum(logprobs) / len(logprobs) if logprobs else 0.0


def _choice(index: int, answer: Answer, body: TextRequest) -> TextChoice:
    reason: Literal["stop", "length"] = "length" if answer.finish_reason == "length" else "stop"
    prompt = answer.prompt if body.echo else None
    logprobs: TextLogprobs | None = None
    if body.logprobs is not None:
        logprobs = _OffsetLogprobs(body.logprobs, prompt).push(answer.tokens)
    return TextChoice(
        index=index,
        text=answer.text if prompt is None else prompt.text + answer.text,
        logprobs=logprobs,
        finish_reason=reason,
        prompt_logprobs=make_prompt_logprobs(answer, body.prompt_logprobs),
        token_ids=[*answer.token_ids] if body.return_token_ids else msgspec.UNSET,
        prompt_token_ids=list_prompt_ids(answer) if body.return_token_ids else msgspec.UNSET,
    )


class _OffsetLogprobs:
    """The tokens of one answer with the offsets of their texts, and ``num_top`` alternatives. ``prompt``: the
    prompt, if it begins the answer."""

    def __init__(self, num_top: int, prompt: PromptDelta | None = None) -> None:
        self._num_top = num_top
        self._prompt = prompt
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def push(self, tokens: Sequence[AnswerToken]) -> TextLogprobs:
        """The log-probabilities of the next tokens, at first preceded by the prompt's."""
        prompt, self._prompt = self._prompt, None
        num_added = 0
        if prompt is not None:
            tokens, num_added = (*prompt.tokens, *tokens), prompt.num_added
        offsets: list[int] = []
        for number, token in enumerate(tokens):
            offsets.append(self._offset)
            if number >= num_added:
                self._offset += len(self._decoder.decode(token.raw))
        tops: list[dict[str, float | None] | None] = [self._top(token) for token in tokens]
        if prompt is not None:
            tops[0] = None
        return TextLogprobs(
            tokens=[_written(token) for token in tokens],
            token_logprobs=[token.logprob for token in tokens],
            top_logprobs=tops,
            text_offset=offsets,
        )

    def _top(self, token: AnswerToken) -> dict[str, float | None]:
        """The most likely tokens, and always the token itself."""
        top = {_written(one): one.logprob for one in token.top[: self._num_top]}
        top.setdefault(_written(token), token.logprob)
        return top


def _written(token: AnswerToken) -> str:
    if "\ufffd" not in token.text or not token.raw:
        return token.text
    return "bytes:" + "".join([f"\\x{byte:02x}" for byte in token.raw])


class _TextChunks(ChunkWriter):
    def __init__(
        self, identity: AnswerIdentity, num_answers: int, body: TextRequest, *, usage: UsageChunks
    ) -> None:
        super().__init__(identity, _KIND, "text", num_answers, usage=usage)
        self._echo = bool(body.echo)
        self._num_top = body.logprobs
        self._logprobs = [_OffsetLogprobs(body.logprobs or 0) for _ in range(num_answers)]

    def write(self, deltas: Sequence[CompletionDelta]) -> bytes:
        """The events of these deltas."""
        self.show_usage()
        parts: list[bytes] = []
        for delta in deltas:
            front = self.fronts[delta.index]
            if isinstance(delta, PromptDelta) and self._echo:
                parts += (front, encode_json(delta.text))
                self._logprobs[delta.index] = _OffsetLogprobs(self._num_top or 0, delta)
                parts.append(self._encode_rest(delta.index, ()) if delta.tokens else self.rest)
            elif isinstance(delta, TextDelta):
                parts += (front, encode_json(delta.text))
                parts.append(self._encode_rest(delta.index, delta.tokens) if delta.tokens else self.rest)
            elif isinstance(delta, AnswerEnded):
                reason = encode_json(delta.finish_reason)
                parts += (front, b'"","logprobs":null,"finish_reason":', reason, self.tail)
        return b"".join(parts)

    def _encode_rest(self, index: int, tokens: Sequence[AnswerToken]) -> bytes:
        logprobs = encode_json(self._logprobs[index].push(tokens))
        return b',"logprobs":' + logprobs + b',"finish_reason":null' + self.tail
