"""Parameters over each API: the engine gets them, and its answer comes back whole and streamed."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import asdict
from support.api_server import ApiServer
from support.server.apis import APIS, CHAT, MESSAGES, OLLAMA, OLLAMA_TEXT, RESPONSES, SGLANG, TEXT, Api, ask
from support.server.http_clients import ask_engine
from support.server.openai_peer import ASK, MAX_CONTEXT, constrained_logit_server
from support.server.openai_peer import MESSAGES as TURNS

from agentflow.protocol.chat import Message
from agentflow.protocol.sampling import SamplingParams
from agentflow.server.completion.request import CompletionRequest

pytestmark = pytest.mark.timeout(60)
SEED, NUM_TOKENS = 11, 6
COMMON = {"seed": SEED, "max_tokens": NUM_TOKENS}
QUESTION = "What do plants do?"
Row = tuple[dict[str, Any], dict[str, Any]]
Prompt = str | tuple[Message, ...]

# A body, and the request and prompt that the engine gets.
PROMPTS: dict[Api, tuple[Any, Prompt]] = {
    CHAT: (TURNS, ASK),
    **{api: (QUESTION, (Message("user", QUESTION),)) for api in (RESPONSES, MESSAGES, OLLAMA, OLLAMA_TEXT)},
    **dict.fromkeys((TEXT, SGLANG), (QUESTION, QUESTION)),
}
# The parameters of a request that has none.
OLLAMAS = {"max_tokens": MAX_CONTEXT, "temperature": 0.8, "top_k": 40, "top_p": 0.9}
DEFAULTS: dict[Api, dict[str, Any]] = {
    **{api: {"max_tokens": MAX_CONTEXT, "temperature": 1.0} for api in (CHAT, RESPONSES)},
    TEXT: {"max_tokens": 16, "temperature": 1.0},
    MESSAGES: {"max_tokens": 300, "temperature": 1.0},  # it is required
    OLLAMA: OLLAMAS,
    OLLAMA_TEXT: OLLAMAS,
    SGLANG: {"max_tokens": 128, "temperature": 1.0},
}
PENALTIES = {"presence_penalty": 0.5, "frequency_penalty": -0.5}
OPENAIS: list[Row] = [
    ({}, {}),
    ({"temperature": 0}, {"temperature": 0.0}),
    ({"temperature": None, "top_p": None, "stop": None, "logit_bias": None}, {}),
    ({"top_p": 0.5}, {"top_p": 0.5}),
    ({"top_p": 0}, {"top_k": 1}),
    ({"top_k": 3}, {"top_k": 3}),
    ({"top_k": -1}, {"top_k": 0}),
    ({"min_p": 0.25}, {"min_p": 0.25}),
    (
        {"frequency_penalty": 1.5, "presence_penalty": -1},
        {"frequency_penalty": 1.5, "presence_penalty": -1.0},
    ),
    ({"repetition_penalty": 1.25}, {"repetition_penalty": 1.25}),
    ({"logit_bias": {"40": 12, "41": -3}}, {"logit_bias": ((40, 12.0), (41, -3.0))}),
    ({"stop": "e"}, {"stop": ("e",)}),
    ({"stop": ["zq", "a"]}, {"stop": ("zq", "a")}),
    ({"stop_token_ids": [40, 50]}, {"stop_token_ids": (40, 50)}),
    ({"max_tokens": 3}, {"max_tokens": 3}),
    ({"max_tokens": 12, "min_tokens": 8}, {"max_tokens": 12, "min_tokens": 8}),
    ({"max_tokens": 20, "ignore_eos": True}, {"max_tokens": 20, "ignore_eos": True}),
    ({"user": "me", "best_of": 1, "echo": False}, {}),
]
CHATS: list[Row] = [
    ({"max_tokens": 3, "max_completion_tokens": 5}, {"max_tokens": 5}),
    ({"metadata": {"a": "b"}, "store": False, "service_tier": "flex", "safety_identifier": "x"}, {}),
    ({"prompt_cache_key": "y", "prompt_cache_options": {"mode": "explicit", "ttl": "30m"}}, {}),
    ({"prompt_cache_retention": "24h", "prediction": {"type": "content", "content": "Plants"}}, {}),
    ({"verbosity": "low", "reasoning_effort": "high", "modalities": ["text"]}, {}),
    ({"parallel_tool_calls": True, "priority": 1}, {}),
]
RESPONSE_FIELDS: list[Row] = [
    ({}, {}),
    ({"max_output_tokens": 5}, {"max_tokens": 5}),
    ({"temperature": 0.5, "top_p": 0.9}, {"temperature": 0.5, "top_p": 0.9}),
    ({"top_p": 0}, {"top_k": 1}),
    ({"top_logprobs": 2}, {"logprobs": True, "top_logprobs": 2}),
    ({"include": ["message.output_text.logprobs"]}, {"logprobs": True}),
    ({"reasoning": {"effort": "low"}, "service_tier": "flex", "text": {"verbosity": "low"}}, {}),
    ({"user": "me", "metadata": {"a": "b"}, "max_tool_calls": 3, "prompt_cache_key": "x"}, {}),
]
KEEP_ALL = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
MESSAGE_FIELDS: list[Row] = [
    ({}, {}),
    ({"max_tokens": 5}, {"max_tokens": 5}),
    ({"stop_sequences": ["never this", "nor that"]}, {"stop": ("never this", "nor that")}),
    ({"temperature": 0.5}, {"temperature": 0.5}),
    ({"top_p": 0.9}, {"top_p": 0.9}),
    ({"top_k": 7}, {"top_k": 7}),
    ({"temperature": None, "top_p": None, "top_k": None, "cache_salt": None}, {}),
    ({"metadata": {"user_id": "somebody"}, "service_tier": "auto", "speed": "standard"}, {}),
    ({"service_tier": "standard_only", "tool_choice": {"type": "auto"}}, {}),
    ({"top_p": 0}, {"top_k": 1}),
    ({"thinking": {"type": "disabled"}}, {}),
    ({"thinking": {"type": "adaptive"}}, {}),
    ({"output_config": {"effort": "low"}}, {}),
    ({"context_management": {"edits": []}, "mcp_servers": []}, {}),
    ({"context_management": KEEP_ALL}, {}),
    ({"max_tokens": 5.0, "top_k": 7.0, "seed": 12.0}, {"max_tokens": 5, "top_k": 7, "seed": 12}),
    ({"cache_control": {"type": "ephemeral"}}, {}),
    ({"cache_control": {"type": "ephemeral", "ttl": "1h", "scope": "global"}}, {}),
    ({"container": None, "diagnostics": None, "inference_geo": None}, {}),
]
NEUTRAL = {"mirostat": 0, "typical_p": 1.0, "tfs_z": 1, "num_gpu": 99, "use_mmap": True, "num_thread": 4}
OLLAMA_OPTIONS: list[Row] = [
    ({}, {}),
    ({"temperature": 0, "top_k": -1, "top_p": 1}, {"temperature": 0.0, "top_k": 0, "top_p": 1.0}),
    ({"top_p": 0}, {"top_p": 1.0, "top_k": 1}),
    ({"num_predict": 7, "stop": "z"}, {"max_tokens": 7, "stop": ("z",)}),
    ({"num_predict": -2, "stop": ["y", "z"], "num_ctx": 16}, {"max_tokens": MAX_CONTEXT, "stop": ("y", "z")}),
    ({"min_p": 0.1, "repeat_penalty": 1.1}, {"min_p": 0.1, "repetition_penalty": 1.1}),
    (PENALTIES, PENALTIES),
    ({"repeat_penalty": 1.1, "repeat_last_n": 0}, {}),
    (NEUTRAL, {}),
    ({"num_ctx": 8192.0, "num_predict": 7.0, "mirostat": 0.0, "warmth": 9}, {"max_tokens": 7}),
    ({"warmth": 9, "draft_model": {"name": "x"}, "numa_nodes": [1, 2.0]}, {}),
]
SGLANG_PARAMS: list[Row] = [
    ({}, {}),
    ({"max_new_tokens": 7, "min_new_tokens": 3}, {"max_tokens": 7, "min_tokens": 3}),
    ({"temperature": 0}, {"temperature": 0.0}),
    ({"top_p": 0.5, "top_k": 5, "min_p": 0.1}, {"top_p": 0.5, "top_k": 5, "min_p": 0.1}),
    ({"top_k": -1, "top_p": 0}, {"top_k": 1}),
    (PENALTIES, PENALTIES),
    ({"repetition_penalty": 1.5}, {"repetition_penalty": 1.5}),
    ({"stop": "z"}, {"stop": ("z",)}),
    ({"stop": ["y", "z"], "stop_token_ids": [9]}, {"stop": ("y", "z"), "stop_token_ids": (9,)}),
    ({"stop_regex": "Q+"}, {"stop_regex": "Q+"}),
    ({"stop_regex": ["Q+"], "stop": []}, {"stop_regex": "Q+"}),
    ({"stop_regex": []}, {}),
    ({"ignore_eos": True}, {"ignore_eos": True}),
    ({"logit_bias": {"9": -5}}, {"logit_bias": ((9, -5.0),)}),
    ({"skip_special_tokens": True, "spaces_between_special_tokens": True, "no_stop_trim": False}, {}),
]
TABLES: dict[Api, list[Row]] = {
    CHAT: [*OPENAIS, *CHATS],
    TEXT: OPENAIS,
    RESPONSES: RESPONSE_FIELDS,
    MESSAGES: MESSAGE_FIELDS,
    OLLAMA: OLLAMA_OPTIONS,
    SGLANG: SGLANG_PARAMS,
}
CASES = [
    pytest.param(api, *row, id=f"{api.name} {' '.join(row[0]) or 'none'}")
    for api, rows in TABLES.items()
    for row in rows
]


server = pytest.fixture(constrained_logit_server, scope="module")


@pytest.mark.parametrize(("api", "fields", "meant"), CASES)
def test_a_parameter(server: ApiServer, api: Api, fields: dict[str, Any], meant: dict[str, Any]) -> None:
    params = SamplingParams(**(DEFAULTS[api] | COMMON | meant))
    prompt, means = PROMPTS[api]
    [answer] = ask_engine(server, CompletionRequest(means, params))
    requests = server.observe_requests()
    extra = {api.nested: fields} if api.nested else fields
    whole, streamed = (
        ask(server, api, prompt, stream=stream, extra=extra, **COMMON) for stream in (False, True)
    )
    assert [submit.params for submit in requests.submits] == [params, params]
    assert whole.text == streamed.text == answer.text
    assert whole.reason == streamed.reason == answer.finish_reason
    assert (whole.reasoning, whole.calls) == ("", [])
    assert whole.prompt_tokens == answer.usage.prompt_tokens
    assert whole.output_tokens == answer.usage.output_tokens


@pytest.mark.parametrize("api", APIS.values(), ids=APIS)
def test_a_request_without_parameters_has_the_defaults_of_its_api(server: ApiServer, api: Api) -> None:
    requests = server.observe_requests()
    for _ in range(2):
        assert ask(server, api, PROMPTS[api][0]).output_tokens
    found = [asdict(submit.params) for submit in requests.submits]
    first, second = (params.pop("seed") for params in found)
    assert first != second
    expected = asdict(SamplingParams(**DEFAULTS[api]))
    expected.pop("seed")
    assert found == [expected] * 2


SALTED = [(CHAT, "cache_salt"), (TEXT, "cache_salt"), (MESSAGES, "cache_salt"), (SGLANG, "extra_key")]


@pytest.mark.parametrize(("api", "name"), SALTED, ids=[api.name for api, _ in SALTED])
def test_a_salt_and_a_priority(server: ApiServer, api: Api, name: str) -> None:
    requests = server.observe_requests()
    prompt = f"Something that is cached under a salt only, {api.name}."
    salts = [f"{salt} {api.name}" for salt in "aab"]
    answers = [
        ask(server, api, prompt, max_tokens=2, extra={name: salt, "priority": priority})
        for salt, priority in zip(salts, (7, -10, 0), strict=True)
    ]
    assert [answer.cached_tokens for answer in answers] == [0, answers[0].prompt_tokens - 1, 0]
    assert [submit.origin.cache_salt for submit in requests.submits] == salts
    assert [submit.origin.priority for submit in requests.submits] == [7, -10, 0]
    ask(server, api, prompt, max_tokens=2)
    origin = requests.submits[-1].origin
    assert (origin.cache_salt, origin.priority) == ("", 0)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", [CHAT, TEXT, MESSAGES, OLLAMA, SGLANG], ids=lambda api: api.name)
def test_a_stop_is_not_part_of_the_answer(server: ApiServer, api: Api, stream: bool) -> None:
    text = ask(server, api, QUESTION, seed=3, max_tokens=NUM_TOKENS).text
    stop = text[2:4]
    asked = {"stop": ["never", stop], "seed": 3, "max_tokens": NUM_TOKENS}
    stopped = ask(server, api, QUESTION, stream=stream, **asked)
    assert (stopped.text, stopped.reason) == (text[: text.index(stop)], "stop")
