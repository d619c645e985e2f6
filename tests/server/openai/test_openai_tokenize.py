"""Tokenize and detokenize return the tokens that the engine receives."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest
from support.api_server import MODEL, ApiServer
from support.fake_engine import TOKENIZER, FakeEngine
from support.server.module_servers import module_server
from support.server.openai_peer import (
    MAX_CONTEXT,
    MESSAGES,
    logit_server,
    sync_client,
)
from support.small_tokenizers import sentencepiece

from agentflow.engine.generator.requests import MAX_INLINE_CHARS
from agentflow.engine.text.tokenizer import Tokenizer

TEXT = "The quick brown fox"


server = pytest.fixture(logit_server, scope="module")


def post(server: ApiServer, path: str, **body: Any) -> tuple[int, dict[str, Any]]:
    answer = httpx2.post(f"{server.url}{path}", json={"model": MODEL, **body})
    return answer.status_code, answer.json()


@pytest.mark.parametrize("path", ["/tokenize", "/v1/tokenize"])
def test_a_conversation_is_tokenized_as_for_the_engine(server: ApiServer, path: str) -> None:
    sent = server.observe_requests()
    with sync_client(server) as client:
        client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=1)
    status, reported = post(server, path, messages=MESSAGES)
    assert status == 200
    assert reported["tokens"] == list(sent.submits[0].token_ids)
    assert (reported["count"], reported["max_model_len"]) == (len(reported["tokens"]), MAX_CONTEXT)
    assert reported["token_strs"] is None
    _, closed = post(server, path, messages=MESSAGES, add_generation_prompt=False)
    opening = TOKENIZER.encode_markup("<|im_start|>assistant\n")
    assert reported["tokens"] == [*closed["tokens"], *opening]


@pytest.mark.parametrize(
    "text", ["The quick brown fox", "<|im_start|>user\nHi", "ä" * (MAX_INLINE_CHARS + 1)]
)
def test_a_text_is_tokenized_as_it_is_encoded(server: ApiServer, text: str) -> None:
    for path in ("/tokenize", "/v1/tokenize"):
        status, reported = post(server, path, prompt=text, return_token_strs=True)
        assert (status, reported["tokens"]) == (200, TOKENIZER.encode_markup(text))
        assert post(server, path, prompt=text, add_special_tokens=False)[1]["tokens"] == reported["tokens"]
    if text.isascii():
        assert "".join(reported["token_strs"]) == text
    for path in ("/detokenize", "/v1/detokenize"):
        assert post(server, path, tokens=reported["tokens"]) == (200, {"prompt": text})


def test_an_empty_text_has_no_tokens(server: ApiServer) -> None:
    assert post(server, "/tokenize", prompt="")[1]["count"] == 0
    assert post(server, "/detokenize", tokens=[]) == (200, {"prompt": ""})


prefixed = module_server(lambda: FakeEngine(tokenizer=Tokenizer(sentencepiece())), constraints=False)
"""Its tokenizer puts ``<s>`` in front of every text."""


@pytest.mark.parametrize(
    ("path", "field", "more"),
    [
        ("/v1/completions", "prompt", {"max_tokens": 2}),
        ("/v1/completions", "prompt", {"max_tokens": 2, "echo": True}),
        ("/generate", "text", {"sampling_params": {"max_new_tokens": 2}}),
        ("/api/generate", "prompt", {"raw": True, "stream": False, "options": {"num_predict": 2}}),
    ],
)
def test_f40a_a_prompt_with_its_first_token_gets_no_second(
    prefixed: ApiServer, path: str, field: str, more: dict[str, Any]
) -> None:
    """Clients that render chat templates write such text."""
    sent = prefixed.observe_requests()
    texts = [TEXT, f"<s>{TEXT}", f"<s><s>{TEXT}"]
    answers = [post(prefixed, path, **{field: text}, **more) for text in texts]
    assert [status for status, _ in answers] == [200] * 3
    plain, written, twice = (list(submit.token_ids) for submit in sent.submits)
    first = prefixed.engine.tokenizer.find_id("<s>")
    assert (plain.count(first), written.count(first), twice.count(first)) == (1, 1, 2)
    assert written == [first, *prefixed.engine.tokenizer.encode_markup(f"<s>{TEXT}")[1:]]
    for text, ids in zip(texts, (plain, written, twice), strict=True):
        _, reported = post(prefixed, "/tokenize", prompt=text)
        assert reported["tokens"] == ids
    if "echo" in more:
        for text, (_, answer) in zip(texts, answers, strict=True):
            assert answer["choices"][0]["text"].startswith(text)
