"""``POST /generate``: continues one text or several without a chat template, as SGLang's API does."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import cast

from agentflow.engine.generator.generator import EngineGenerator
from agentflow.errors import AgentflowError
from agentflow.protocol.constraint import Constraint
from agentflow.protocol.sampling import SamplingParams
from agentflow.server.compatible.field_errors import (
    check_num_logprobs,
    check_unsupported,
    naming_field,
    naming_param,
)
from agentflow.server.compatible.forms import only_form, read_forms
from agentflow.server.compatible.prompts import Prompt, read_prompts
from agentflow.server.compatible.sampling import read_nucleus, read_stops
from agentflow.server.completion.completion import completing
from agentflow.server.completion.large_answers import (
    AnswerMemory,
    answer_memory,
    count_logprobs,
    reply_beside,
)
from agentflow.server.completion.request import CompletionRequest, TokenIds
from agentflow.server.completion.streaming import report, stream_completion
from agentflow.server.errors import invalid_field, make_api_error
from agentflow.server.http.call import ApiCall
from agentflow.server.sglang.answer import AnswerEvents, AnswerForm, LogprobForm
from agentflow.server.sglang.types import SamplingFields, SglangAnswer, SglangRequest

# The defaults of SGLang.
MAX_NEW_TOKENS = 128
TEMPERATURE = 1.0

_SAMPLING = "sampling_params"
# Fields whose names differ from the engine's.
_NAMES = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens", "seed": "sampling_seed"}
_WHY_UNSUPPORTED = {
    "lora_path": "an adapter is a separate model: give its name as 'model' (GET /v1/models lists them)",
    "session_params": "the cache keeps common prefixes of requests: send the whole prompt",
    "return_hidden_states": "the engine returns tokens only",
    "return_routed_experts": "the engine returns tokens only",
    "return_indexer_topk": "the engine returns tokens only",
    "token_ids_logprob": "use top_logprobs_num",
    "custom_logit_processor": "the server runs no code of clients",
    "input_embeds": "give text or input_ids",
    "image_data": "this endpoint accepts only text: use /v1/chat/completions",
    "video_data": "this endpoint accepts only text: use /v1/chat/completions",
    "audio_data": "the models accept no audio",
}
_WHY_UNSUPPORTED_SAMPLING = {
    "skip_special_tokens": "answers have no special tokens",
    "spaces_between_special_tokens": "answers have no special tokens",
    "no_stop_trim": "the stop string is not part of the answer",
    "structural_tag": "use json_schema, regex or ebnf",
    "custom_params": "they are for custom_logit_processor, which is not supported",
}
# The values that are accepted, because they have no effect.
_NEUTRAL = {
    "return_hidden_states": False,
    "return_routed_experts": False,
    "return_indexer_topk": False,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "no_stop_trim": False,
}


async def generate(call: ApiCall) -> None:
    """Continues one text or several, as SGLang does."""
    with answer_memory(call) as memory:
        await _answer(call, memory)


async def _answer(call: ApiCall, memory: AnswerMemory) -> None:
    began_s = time.perf_counter()
    body = await call.process(call.read, SglangRequest)
    generator = call.generator(body.model, priority=body.priority)
    constraint_field, requests = await call.process(_make_requests, call, body, generator)
    form = _make_form(body, requests, began_s)
    prompt_field = "input_ids" if body.text is None else "text"
    with naming_field(generator, prompt_field, constraint_field), _naming_sampling():
        async with completing(
            generator, *requests, caller=call.caller, on_cut=call.record.count, on_scored=memory.reserve
        ) as completion:
            if body.stream:
                await stream_completion(call, completion, AnswerEvents(form, completion))
                return
            answers = await completion.answers()
    report(call, completion)

    def answer() -> SglangAnswer | list[SglangAnswer]:
        shown = [form.ended(index, answer) for index, answer in enumerate(answers)]
        return shown if form.is_list else shown[0]

    await reply_beside(call, count_logprobs(answers), answer)


def _make_requests(
    call: ApiCall, body: SglangRequest, generator: EngineGenerator
) -> tuple[str, list[CompletionRequest]]:
    """Returns the field of the constraint, and a request for each prompt."""
    limits, fields = call.service.http_limits, body.sampling_params or SamplingFields()
    check_unsupported(body, _WHY_UNSUPPORTED, _NEUTRAL)
    check_unsupported(fields, _WHY_UNSUPPORTED_SAMPLING, _NEUTRAL, f"{_SAMPLING}.")
    prompts, n = _list_prompts(body), fields.n or 1
    if n * len(prompts) > limits.max_n:
        asked = f"{len(prompts)} prompts with {n} answers each"
        param = f"{_SAMPLING}.n" if len(prompts) == 1 else "input_ids" if body.text is None else "text"
        raise invalid_field(param, f"{asked} exceed the limit of {limits.max_n} answers to a request")
    max_new_tokens = MAX_NEW_TOKENS if fields.max_new_tokens is None else fields.max_new_tokens
    params = _read_sampling(body, fields, generator, max_new_tokens)
    check_num_logprobs(params, generator, n * len(prompts), "top_logprobs_num")
    constraint_field, constraint = _read_constraint(fields)
    scores_prompt = _logprob_start(body) >= 0
    return constraint_field, [
        CompletionRequest(
            prompt,
            params,
            constraint=constraint,
            n=n,
            cache_salt=body.extra_key or "",
            priority=body.priority or 0,
            max_prompt_tokens=limits.max_prompt_tokens,
            prompt_logprobs=params.top_logprobs if scores_prompt else None,
            generates=max_new_tokens > 0,
        )
        for prompt in prompts
    ]


def _list_prompts(body: SglangRequest) -> list[str | TokenIds]:
    if (body.text is None) == (body.input_ids is None):
        raise invalid_field("text", "give either 'text' or 'input_ids'")
    if body.text is not None:
        return read_prompts(cast(Prompt, body.text), "text")
    return read_prompts(cast(Prompt, body.input_ids), "input_ids")


def _read_sampling(
    body: SglangRequest, fields: SamplingFields, generator: EngineGenerator, max_new_tokens: int
) -> SamplingParams:
    """The sampling parameters, with SGLang's defaults."""
    if (fields.min_new_tokens or 0) > max_new_tokens:
        text = f"it must be at most 'max_new_tokens', which is {max_new_tokens}"
        raise invalid_field(f"{_SAMPLING}.min_new_tokens", text)
    top_p, top_k = read_nucleus(fields.top_p, fields.top_k)
    pattern = fields.stop_regex or None  # clients send an empty list
    has_logprobs = bool(body.return_logprob)
    params = SamplingParams(
        max_tokens=max_new_tokens or 1,
        min_tokens=fields.min_new_tokens or 0,
        temperature=TEMPERATURE if fields.temperature is None else fields.temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=fields.min_p or 0.0,
        frequency_penalty=fields.frequency_penalty or 0.0,
        presence_penalty=fields.presence_penalty or 0.0,
        repetition_penalty=fields.repetition_penalty or 1.0,
        logit_bias=tuple((fields.logit_bias or {}).items()),
        seed=fields.sampling_seed,
        stop=read_stops(fields.stop),
        stop_regex=pattern[0] if isinstance(pattern, list) else pattern,
        stop_token_ids=tuple(fields.stop_token_ids or ()),
        ignore_eos=bool(fields.ignore_eos),
        logprobs=has_logprobs,
        top_logprobs=(body.top_logprobs_num or 0) if has_logprobs else 0,
    )
    with _naming_sampling():
        params.check()
    for name, ids in (
        ("logit_bias", tuple(fields.logit_bias or ())),
        ("stop_token_ids", params.stop_token_ids),
    ):
        with naming_param(f"{_SAMPLING}.{name}"):
            generator.limits.check_ids(ids)
    return params


def _read_constraint(fields: SamplingFields) -> tuple[str, Constraint | None]:
    """The field of the constraint, and the constraint."""
    prefix = f"{_SAMPLING}."
    with naming_param():
        found = [*read_forms(prefix, regex=fields.regex, json_schema=fields.json_schema, ebnf=fields.ebnf)]
    return only_form(found, _SAMPLING)


def _logprob_start(body: SglangRequest) -> int:
    """Where in the prompt its log-probabilities begin; -1: it has none."""
    if not body.return_logprob or body.logprob_start_len is None:
        return -1
    return body.logprob_start_len


def _make_form(body: SglangRequest, requests: list[CompletionRequest], began_s: float) -> AnswerForm:
    ids = body.input_ids or ()
    is_single = isinstance(body.text, str) or any(isinstance(one, int) for one in ids[:1])
    logprobs: LogprobForm | None = None
    if body.return_logprob:
        has_texts = bool(body.return_text_in_logprobs)
        logprobs = LogprobForm(_logprob_start(body), body.top_logprobs_num or 0, has_texts)
    return AnswerForm(
        body.rid or secrets.token_hex(16),
        began_s,
        is_list=not is_single or requests[0].n > 1,
        logprobs=logprobs,
    )


@contextmanager
def _naming_sampling() -> Iterator[None]:
    """Converts the names of sampling parameters in errors of the engine to the request's fields."""
    try:
        yield
    except AgentflowError as error:
        if error.param not in SamplingParams.__struct_fields__:
            raise
        shown, param = make_api_error(error), f"{_SAMPLING}.{_NAMES.get(error.param, error.param)}"
        raise replace(shown, message=shown.message.removeprefix("gen: "), param=param) from error
