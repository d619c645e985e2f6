"""Log-probabilities of prompts over HTTP equal transformers', on a small model in float32: in batches,
in chunks, on cached prefixes. The forms of the answers are OpenAI's (``echo``) and vLLM's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
import torch
from support.api_server import MODEL, ApiServer, api_server
from support.engine.random_model import write_random_model
from support.fake_engine import TOKENIZER, FakeEngine

from agentflow.engine.models.torch_runner import TorchRunner

LONG = "The quick brown fox jumps over the lazy dog, and then it answers. " * 8
TEXTS = ["The quick brown fox", LONG, "An answer is Zürich \N{SNOWMAN}"]
BUDGET = 48  # the long prompt takes several steps
TOLERANCE = 2e-5

Rows = list[dict[int, float]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from transformers import LlamaForCausalLM

    folder = write_random_model(
        tmp_path_factory.mktemp("scored"), vocab_size=TOKENIZER.vocab_size, max_position_embeddings=512
    )
    return folder, LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.fixture(scope="module")
def server(model: Any) -> Iterator[ApiServer]:
    runner: Any = TorchRunner(model[0], num_slots=2000, device="cpu", dtype="float32")
    engine = FakeEngine(runner=runner, token_budget=BUDGET)
    with api_server(engine, constraints=False) as running:
        yield running
        running.assert_idle()


def expected(model: Any, ids: list[int]) -> torch.Tensor:
    """The log-probabilities of all tokens after each of ``ids``."""
    with torch.inference_mode():
        scores: torch.Tensor = model[1](torch.tensor([ids])).logits[0].log_softmax(-1)
    return scores


def posted(server: ApiServer, path: str, **body: Any) -> Any:
    answer = httpx2.post(f"{server.url}{path}", json={"model": MODEL, "temperature": 0, **body}, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def check_rows(rows: list[Any], ids: list[int], scores: torch.Tensor, count: int) -> None:
    """vLLM's form: the ``count`` likeliest tokens and the token itself, by id."""
    assert len(rows) == len(ids)
    assert rows[0] is None
    for row, token_id, score in zip(rows[1:], ids[1:], scores, strict=False):
        ranked = sorted(row.values(), key=lambda one: one["rank"])
        assert [one["rank"] for one in ranked[:count]] == list(range(1, count + 1))
        assert [one["logprob"] for one in ranked[:count]] == pytest.approx(
            score.topk(count).values.tolist(), abs=TOLERANCE
        )
        assert len(row) in (count, count + 1)
        for key, one in row.items():
            own = float(score[int(key)])
            assert one["logprob"] == pytest.approx(own, abs=TOLERANCE)
            # Nearly equal numbers may have either order.
            likelier = int((score > own + TOLERANCE).sum()), int((score >= own - TOLERANCE).sum())
            assert likelier[0] < one["rank"] <= likelier[1]
        assert str(token_id) in row


@pytest.mark.parametrize("turn", ["computed", "cached"])
def test_several_prompts_have_the_numbers_of_transformers(server: ApiServer, model: Any, turn: str) -> None:
    answer = posted(server, "/v1/completions", prompt=TEXTS, max_tokens=1, echo=True, logprobs=2, seed=1)
    for text, choice in zip(TEXTS, answer["choices"], strict=True):
        ids = TOKENIZER.encode(text)
        found, scores = choice["logprobs"], expected(model, ids)
        assert choice["text"].startswith(text)
        assert found["token_logprobs"][0] is found["top_logprobs"][0] is None
        assert len(found["tokens"]) == len(ids) + 1
        own = [float(score[token]) for score, token in zip(scores, ids[1:], strict=False)]
        assert found["token_logprobs"][1 : len(ids)] == pytest.approx(own, abs=TOLERANCE)
        # The first generated token is the likeliest, as the temperature is 0.
        assert found["token_logprobs"][-1] == pytest.approx(float(scores[-1].max()), abs=TOLERANCE)
        for position, score in enumerate(scores[:-1], 1):
            top = found["top_logprobs"][position]
            assert max(top.values()) == pytest.approx(float(score.max()), abs=TOLERANCE)
            assert found["token_logprobs"][position] in top.values()
        pieces = [*found["text_offset"], len(choice["text"])]
        for token, start, end in zip(found["tokens"], pieces, pieces[1:], strict=False):
            if not token.startswith("bytes:"):
                assert choice["text"][start:end] == token
    num_prompt = sum(len(TOKENIZER.encode(text)) for text in TEXTS)
    assert answer["usage"]["prompt_tokens"] == num_prompt
    assert answer["usage"]["completion_tokens"] == len(TEXTS)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0  # each is computed again


@pytest.mark.parametrize("count", [0, 3])
def test_f42h_prompts_alone_have_the_rank_of_each_token(server: ApiServer, model: Any, count: int) -> None:
    ids = TOKENIZER.encode(LONG)
    answer = posted(server, "/v1/completions", prompt=ids, max_tokens=0, prompt_logprobs=count)
    [choice] = answer["choices"]
    assert (choice["text"], choice["finish_reason"], choice["logprobs"]) == ("", "length", None)
    check_rows(choice["prompt_logprobs"], ids, expected(model, ids), count)
    assert answer["usage"]["completion_tokens"] == 0


def test_conversations(server: ApiServer, model: Any) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    asked = {"messages": messages, "max_tokens": 2}
    answer = posted(server, "/v1/chat/completions", **asked, prompt_logprobs=1, n=2)
    rendered = httpx2.post(f"{server.url}/tokenize", json={"messages": messages}).json()["tokens"]
    check_rows(answer["prompt_logprobs"], rendered, expected(model, rendered), 1)
    assert "prompt_logprobs" not in posted(server, "/v1/chat/completions", **asked)


def test_echo_without_log_probabilities_computes_nothing(server: ApiServer) -> None:
    before = server.stats().computed_tokens
    answer = posted(server, "/v1/completions", prompt=TEXTS[0], max_tokens=0, echo=True, n=2)
    assert [choice["text"] for choice in answer["choices"]] == [TEXTS[0]] * 2
    assert server.stats().computed_tokens == before


def test_one_token_has_nothing_before_it(server: ApiServer) -> None:
    asked = {"max_tokens": 0, "echo": True, "logprobs": 1, "prompt_logprobs": 1}
    [choice] = posted(server, "/v1/completions", prompt=[40], **asked)["choices"]
    assert choice["logprobs"]["token_logprobs"] == choice["prompt_logprobs"] == [None]


def test_a_stream_begins_with_the_prompt(server: ApiServer) -> None:
    asked = {"prompt": TEXTS[0], "max_tokens": 3, "echo": True, "logprobs": 1, "n": 2, "seed": 1}
    whole = posted(server, "/v1/completions", **asked)
    body = {"model": MODEL, "temperature": 0, "stream": True, **asked}
    texts, logprobs = ["", ""], [[], []]
    with httpx2.stream("POST", f"{server.url}/v1/completions", json=body) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                for choice in httpx2.Response(200, content=line[6:]).json()["choices"]:
                    texts[choice["index"]] += choice["text"]
                    if choice["logprobs"]:
                        logprobs[choice["index"]] += choice["logprobs"]["token_logprobs"]
    assert texts == [choice["text"] for choice in whole["choices"]]
    assert logprobs == [
        pytest.approx(choice["logprobs"]["token_logprobs"], abs=TOLERANCE) for choice in whole["choices"]
    ]


def test_the_best_answers_come_first(server: ApiServer) -> None:
    asked = {"prompt": [TEXTS[0], TEXTS[2]], "max_tokens": 4, "seed": 3, "temperature": 1, "logprobs": 0}
    asked["ignore_eos"] = True
    candidates = posted(server, "/v1/completions", **asked, n=5)["choices"]
    answer = posted(server, "/v1/completions", **asked, n=2, best_of=5)
    assert answer["usage"]["completion_tokens"] == 2 * 5 * 4
    for number in (0, 1):
        group = candidates[5 * number : 5 * number + 5]
        means = sorted((sum(one["logprobs"]["token_logprobs"]) / 4 for one in group), reverse=True)
        chosen = answer["choices"][2 * number : 2 * number + 2]
        found = [sum(one["logprobs"]["token_logprobs"]) / 4 for one in chosen]
        assert found == pytest.approx(means[:2], abs=TOLERANCE)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]


def test_the_tokenizer_is_described(server: ApiServer) -> None:
    info = httpx2.get(f"{server.url}/tokenizer_info").json()
    assert info == httpx2.get(f"{server.url}/tokenizer_info", params={"model": MODEL}).json()
    assert info["model_max_length"] == 512
    assert "<|im_start|>" in info["chat_template"]
    assert httpx2.get(f"{server.url}/tokenizer_info", params={"model": "other"}).status_code == 404
