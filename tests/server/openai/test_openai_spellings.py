"""The spellings of vLLM and SGLang for parameters of the engine."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import pytest
from support.api_server import MODEL, ApiServer
from support.fake_engine import TOKENIZER
from support.server.module_servers import module_server
from support.server.openai_peer import MESSAGES, logit_engine_of_server

from agentflow.engine.text.chat_template import ChatTemplate

# ChatML that shows a variable, and closes an empty thought as Qwen3's template does.
TEMPLATE = ChatTemplate(
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}(no reasoning)\n{% endif %}"
    "{{ mood | default('') }}{% endif %}"
)


server = module_server(logit_engine_of_server, template=TEMPLATE)


def post(server: ApiServer, path: str, **body: Any) -> httpx2.Response:
    body = {"model": MODEL, "seed": 1, "max_tokens": 60, **body}
    return httpx2.post(f"{server.url}{path}", json=body, timeout=60)


def chat(server: ApiServer, **body: Any) -> Any:
    answer = post(server, "/v1/chat/completions", messages=MESSAGES, **body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def prompt_of(server: ApiServer, **asked: Any) -> str:
    """The prompt that the engine is given, as text."""
    [token_ids] = [chat(server, return_token_ids=True, **asked)["prompt_token_ids"]]
    return TOKENIZER.decode(token_ids, skip_special=False)


def test_the_template_gets_variables(server: ApiServer) -> None:
    plain = prompt_of(server)
    assert prompt_of(server, chat_template_kwargs={}) == plain
    assert prompt_of(server, chat_template_kwargs={"enable_thinking": True}) == plain
    silent = prompt_of(server, chat_template_kwargs={"enable_thinking": False, "mood": "sad"})
    assert silent == plain + "(no reasoning)\nsad"
    assert prompt_of(server) == plain


def test_the_opening_of_the_turn_is_left_out(server: ApiServer) -> None:
    opening = "<|im_start|>assistant\n"
    assert prompt_of(server, add_generation_prompt=False) == prompt_of(server).removesuffix(opening)
    begun = [*MESSAGES, {"role": "assistant", "content": "Plants"}]
    asked = {"messages": begun, "return_token_ids": True}
    prompts = [
        post(server, "/v1/chat/completions", **asked, **more).json()["prompt_token_ids"]
        for more in ({}, {"continue_final_message": True}, {"add_generation_prompt": False})
    ]
    assert prompts == [prompts[0]] * 3
    assert TOKENIZER.decode(prompts[0], skip_special=False).endswith(f"{opening}Plants")


def test_token_ids(server: ApiServer) -> None:
    sent = server.observe_requests()
    [choice] = chat(server, return_token_ids=True)["choices"]
    assert TOKENIZER.decode(choice["token_ids"]) == choice["message"]["content"]
    answer = post(server, "/v1/completions", prompt=["One", "Two"], n=2, return_token_ids=True).json()
    for choice in answer["choices"]:
        assert TOKENIZER.decode(choice["token_ids"]) == choice["text"]
    prompts = [[*submit.token_ids] for submit in sent.submits[1:]]
    assert sorted(prompts) == sorted(choice["prompt_token_ids"] for choice in answer["choices"])


def test_usage_in_each_chunk(server: ApiServer) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    for path, asked in (
        ("/v1/chat/completions", {"messages": MESSAGES}),
        ("/v1/completions", {"prompt": "Say:"}),
    ):
        answer = post(server, path, stream=True, stream_options=options, **asked)
        chunks = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == sorted(counts)
        assert counts[0] < counts[-1]
        assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {chunks[-1]["usage"]["prompt_tokens"]}


def test_banned_words_are_biased(server: ApiServer) -> None:
    sent = server.observe_requests()
    chat(server, bad_words=["e"], logit_bias={"50": 3})
    [submit] = sent.submits
    assert submit.params is not None
    banned = set(TOKENIZER.encode("e", continues=True))
    assert dict(submit.params.logit_bias) | {50: 3.0} == dict(submit.params.logit_bias)
    assert banned <= {token for token, bias in submit.params.logit_bias if bias == -100}


@pytest.mark.parametrize("path", ["/health", "/ping", "/version"])
def test_probes(server: ApiServer, path: str) -> None:
    assert httpx2.get(f"{server.url}{path}").status_code == 200
