"""Text completions with OpenAI's own client, against direct requests to the engine."""

from __future__ import annotations

import codecs
from typing import Any

import openai
import pytest
from support.api_server import MODEL, ApiServer, api_server
from support.fake_engine import TOKENIZER
from support.server.http_clients import CLIENTS, ClientKind, ask_engine
from support.server.openai_peer import (
    called,
    chat_defaults,
    logit_engine_of_server,
    logit_server,
    sync_client,
)

from agentflow.server.completion.request import Answer, AnswerToken, CompletionRequest, TokenIds
from agentflow.server.config.limits import HttpLimits
from agentflow.server.openai.completions import _OffsetLogprobs

CREATE = "completions.create"
SEED = 11
TEXT = "The quick brown fox"
IDS = TOKENIZER.encode(TEXT)
PROMPTS: list[tuple[Any, list[str | TokenIds]]] = [
    (TEXT, [TEXT]),
    ([TEXT, "An answer is", "<|im_start|>user\nHi"], [TEXT, "An answer is", "<|im_start|>user\nHi"]),
    (IDS, [TokenIds(tuple(IDS))]),
    ([IDS, [5, 6, 7]], [TokenIds(tuple(IDS)), TokenIds((5, 6, 7))]),
]


server = pytest.fixture(logit_server, scope="module")


def twins(server: ApiServer, prompts: list[str | TokenIds], n: int, **params: Any) -> list[Answer]:
    """The answers, prompt by prompt."""
    asked = chat_defaults(**({"max_tokens": 16} | params))
    return [
        answer for prompt in prompts for answer in ask_engine(server, CompletionRequest(prompt, asked, n=n))
    ]


@pytest.mark.parametrize("kind", CLIENTS)
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize(("prompt", "meant"), PROMPTS, ids=["text", "texts", "ids", "lists"])
def test_answers_come_prompt_by_prompt(
    server: ApiServer, prompt: Any, meant: list[str | TokenIds], n: int, kind: ClientKind
) -> None:
    answers = twins(server, meant, n)
    common: dict[str, Any] = {"model": MODEL, "prompt": prompt, "seed": SEED, "n": n}
    whole = called(server, kind, CREATE, **common)
    chunks = called(server, kind, CREATE, **common, stream=True, stream_options={"include_usage": True})
    assert (whole.object, whole.model) == ("text_completion", MODEL)
    assert [choice.index for choice in whole.choices] == list(range(len(answers)))
    assert [choice.text for choice in whole.choices] == [answer.text for answer in answers]
    assert [choice.finish_reason for choice in whole.choices] == [answer.finish_reason for answer in answers]
    texts = [""] * len(answers)
    reasons: dict[int, str] = {}
    for chunk in chunks[:-1]:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            if choice.finish_reason is not None:
                reasons[choice.index] = choice.finish_reason
    assert texts == [answer.text for answer in answers]
    assert [reasons[index] for index in range(len(answers))] == [answer.finish_reason for answer in answers]
    assert whole.usage is not None
    assert chunks[-1].usage is not None
    for usage in (whole.usage, chunks[-1].usage):
        assert usage.prompt_tokens == sum(answer.usage.prompt_tokens for answer in answers[::n])
        assert usage.completion_tokens == sum(answer.usage.output_tokens for answer in answers)
        assert usage.prompt_tokens_details is not None
        assert usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens - len(meant)


@pytest.mark.parametrize("kind", CLIENTS)
@pytest.mark.parametrize("count", [0, 1, 5])
def test_log_probabilities_in_the_old_form(server: ApiServer, count: int, kind: ClientKind) -> None:
    [answer] = twins(server, [TEXT], 1, logprobs=True, top_logprobs=count)
    common: dict[str, Any] = {"model": MODEL, "prompt": TEXT, "seed": SEED, "logprobs": count}
    reported = called(server, kind, CREATE, **common).choices[0].logprobs
    chunks = called(server, kind, CREATE, **common, stream=True)
    assert reported is not None
    assert reported.tokens == [token.text for token in answer.tokens]
    assert reported.token_logprobs == [token.logprob for token in answer.tokens]
    assert reported.top_logprobs == [
        {token.text: token.logprob} | {top.text: top.logprob for top in token.top} for token in answer.tokens
    ]
    assert [reported.text_offset, [len(answer.text)]] == [
        [len("".join(reported.tokens[:n])) for n in range(len(reported.tokens))],
        [len("".join(reported.tokens))],
    ]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        parts = [getattr(chunk.choices[0].logprobs, name) for chunk in chunks if chunk.choices[0].logprobs]
        assert [one for part in parts for one in part] == getattr(reported, name)


def test_half_a_character_is_reported_as_bytes() -> None:
    raws = ["ü".encode()[:1], "ü".encode()[1:] + b"x", b"y", b"\xff"]
    tokens = [AnswerToken(n, raw.decode(errors="replace"), raw, -1.0) for n, raw in enumerate(raws)]
    reported = _OffsetLogprobs(0).push(tokens)
    assert reported.tokens == ["bytes:\\xc3", "bytes:\\xbc\\x78", "y", "bytes:\\xff"]
    text = codecs.decode(b"".join(raws), "utf-8", "replace")
    assert text == "üxy\ufffd"
    assert reported.text_offset == [0, 0, 2, 3]


def test_a_server_may_take_only_short_prompts() -> None:
    limits = HttpLimits(max_prompt_tokens=len(IDS), max_n=2)
    with api_server(logit_engine_of_server(), limits=limits, constraints=False) as server:
        with sync_client(server) as client:
            client.completions.create(model=MODEL, prompt=IDS, n=2)
            with pytest.raises(openai.BadRequestError) as caught:
                client.completions.create(model=MODEL, prompt=[*IDS, 5], n=2)
            assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")
            with pytest.raises(openai.BadRequestError) as caught:
                client.completions.create(model=MODEL, prompt=IDS, n=3)
            assert (caught.value.code, caught.value.param) == ("invalid_value", "n")
            with pytest.raises(openai.BadRequestError) as caught:
                client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": TEXT}])
            assert caught.value.param == "messages"
        server.assert_idle()
