"""``POST /generate``: answers, lists, streams, parameters, forms, log-probabilities and rejections."""

from __future__ import annotations

import itertools
import json
from typing import Any
from unittest.mock import patch

import httpx2
import pytest
from support.api_server import MODEL, ApiServer, api_server
from support.fake_engine import TOKENIZER
from support.server.openai_peer import constrained_logit_server

from agentflow.server.sglang.answer import GROWTH

pytestmark = pytest.mark.timeout(60)
PROMPT = "The quick brown fox"
SAME = {"sampling_seed": 3, "max_new_tokens": 12}
"""Parameters for a short answer that repeats."""
SCHEMA = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}


server = pytest.fixture(constrained_logit_server, scope="module")


def post(server: ApiServer, headers: dict[str, str] | None = None, **fields: Any) -> httpx2.Response:
    return httpx2.post(f"{server.url}/generate", json=fields, headers=headers, timeout=60)


def answer(server: ApiServer, sampling: dict[str, Any] = SAME, **fields: Any) -> Any:
    """The whole answer, or the list of them."""
    fields = {"sampling_params": sampling, **fields}
    response = post(server, **fields if "input_ids" in fields else {"text": PROMPT} | fields)
    assert response.status_code == 200, response.text
    return response.json()


def events(server: ApiServer, sampling: dict[str, Any] = SAME, **fields: Any) -> list[Any]:
    """The events of the stream, but for the mark of its end."""
    response = post(server, **{"text": PROMPT} | fields, sampling_params=sampling, stream=True)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    *found, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(one.removeprefix("data: ")) for one in found]


def error(server: ApiServer, headers: dict[str, str] | None = None, **fields: Any) -> tuple[int, str, str]:
    """The status, the code and the field of an error."""
    response = post(server, headers, **fields)
    body = response.json()["error"]
    return response.status_code, body["code"], body["param"]


def completion(server: ApiServer, **fields: Any) -> Any:
    """The same of OpenAI's API."""
    body = {"model": MODEL, "prompt": PROMPT, "seed": 3, "max_tokens": 12, **fields}
    response = httpx2.post(f"{server.url}/v1/completions", json=body, timeout=60)
    assert response.status_code == 200, response.text
    return response.json()


def test_an_answer_is_that_of_openais_api(server: ApiServer) -> None:
    found = answer(server, SAME | {"ignore_eos": True}, rid="mine")
    other = completion(server, ignore_eos=True, return_token_ids=True)
    [choice] = other["choices"]
    assert (found["text"], found["output_ids"]) == (choice["text"], choice["token_ids"])
    meta = found["meta_info"]
    assert (meta["id"], meta["prompt_tokens"]) == ("mine", other["usage"]["prompt_tokens"])
    assert meta["completion_tokens"] == other["usage"]["completion_tokens"] == 12
    assert meta["finish_reason"] == {"type": "length", "length": 12}
    assert meta["e2e_latency"] > 0
    assert set(found) == {"text", "output_ids", "meta_info"}
    assert not any("logprobs" in name for name in meta)
    again = answer(server, input_ids=TOKENIZER.encode_markup(PROMPT), model=MODEL)
    assert found["text"].startswith(again["text"])
    assert again["meta_info"]["cached_tokens"] == meta["prompt_tokens"] - 1


def test_log_probabilities_under_a_constraint(server: ApiServer) -> None:
    found = answer(server, {"max_new_tokens": 40, "regex": "a{2,4}b"}, return_logprob=True)
    assert found["meta_info"]["finish_reason"]["type"] == "stop"
    assert [one[1] for one in found["meta_info"]["output_token_logprobs"]] == found["output_ids"]


def test_the_end_names_what_matched(server: ApiServer) -> None:
    text = answer(server)["text"]
    stopped = answer(server, SAME | {"stop": text[2:4]})
    assert (stopped["text"], stopped["meta_info"]["finish_reason"]) == (
        text[: text.index(text[2:4])],
        {"type": "stop", "matched": text[2:4]},
    )
    token_id = answer(server)["output_ids"][2]
    by_id = answer(server, SAME | {"stop_token_ids": [token_id]})
    assert by_id["meta_info"]["finish_reason"] == {"type": "stop", "matched": token_id}
    by_model = answer(server, {"max_new_tokens": 400, "sampling_seed": 3})
    assert by_model["meta_info"]["finish_reason"] == {"type": "stop", "matched": None}
    for ended in (by_id, by_model):
        assert len(ended["output_ids"]) == ended["meta_info"]["completion_tokens"] - 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "n"),
    [
        ({"text": ["a fox", "a dog"]}, 1),
        ({"text": ["a fox"]}, 1),
        ({"text": "a fox"}, 2),
        ({"text": ["a fox", "a dog"]}, 2),
        ({"input_ids": [[30, 31], [32]]}, 2),
    ],
)
def test_several_answers_are_a_list_in_the_order_of_the_prompts(
    server: ApiServer, stream: bool, fields: dict[str, Any], n: int
) -> None:
    prompt = fields.get("text", fields.get("input_ids"))
    other = completion(server, prompt=prompt, n=n)
    if stream:
        body = {"sampling_params": SAME | {"n": n}, "rid": "r", "stream": True, **fields}
        lines = post(server, **body).text.split("\n\n")[:-2]
        shown = [json.loads(line.removeprefix("data: ")) for line in lines]
        last = {one["index"]: one for one in shown}
        found = [last[index] for index in range(len(last))]
        for one in shown:
            meta, end = one["meta_info"], last[one["index"]]["meta_info"]
            assert (meta["id"], meta["prompt_tokens"]) == (end["id"], end["prompt_tokens"])
            assert 0 < meta["completion_tokens"] <= end["completion_tokens"]
    else:
        found = answer(server, SAME | {"n": n}, rid="r", **fields)
    assert [one["text"] for one in found] == [choice["text"] for choice in other["choices"]]
    assert [one["meta_info"]["id"] for one in found] == [f"r_{index}" for index in range(len(found))]
    assert ["index" in one for one in found] == [stream] * len(found)
    total = sum(one["meta_info"]["completion_tokens"] for one in found)
    assert total == other["usage"]["completion_tokens"]


@pytest.mark.parametrize("has_texts", [True, False])
@pytest.mark.parametrize("stream", [True, False])
def test_log_probabilities(server: ApiServer, stream: bool, has_texts: bool) -> None:
    fields: dict[str, Any] = {
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 2,
        "return_text_in_logprobs": has_texts,
    }
    found = events(server, **fields)[-1] if stream else answer(server, **fields)
    meta = found["meta_info"]
    [choice] = completion(server, echo=True, logprobs=2)["choices"]
    shown = [*meta["input_token_logprobs"], *meta["output_token_logprobs"]]
    ids = [*TOKENIZER.encode_markup(PROMPT), *found["output_ids"]]
    assert [one[1] for one in shown] == ids
    assert [one[0] for one in shown] == choice["logprobs"]["token_logprobs"]
    assert [one[2] for one in shown] == (choice["logprobs"]["tokens"] if has_texts else [None] * len(shown))
    first, *tops = [*meta["input_top_logprobs"], *meta["output_top_logprobs"]]
    assert first is None
    assert {len(top) for top in tops} == {2}
    for top, other in zip(tops, choice["logprobs"]["top_logprobs"][1:], strict=True):
        assert max(one[0] for one in top) == max(other.values())


def test_log_probabilities_of_the_prompt_begin_where_the_request_says(server: ApiServer) -> None:
    fields: dict[str, Any] = {"return_logprob": True, "top_logprobs_num": 1}
    whole = answer(server, logprob_start_len=0, **fields)["meta_info"]
    num_prompt = whole["prompt_tokens"]
    for start in (1, num_prompt - 2, num_prompt, num_prompt + 5):
        meta = answer(server, logprob_start_len=start, **fields)["meta_info"]
        for name, first in (("input_token_logprobs", [None]), ("input_top_logprobs", None)):
            expected = whole[name][start:]
            if expected:
                expected[0] = first if first is None else [None, *expected[0][1:]]
            assert meta[name] == expected
        assert meta["output_token_logprobs"] == whole["output_token_logprobs"]
    for none in ({}, {"logprob_start_len": -1}):
        meta = answer(server, **none, **fields)["meta_info"]
        assert meta["input_token_logprobs"] == meta["input_top_logprobs"] == []
        assert len(meta["output_top_logprobs"]) == len(meta["output_token_logprobs"]) > 0


def test_a_prompt_alone_is_scored(server: ApiServer) -> None:
    found = answer(server, {"max_new_tokens": 0}, return_logprob=True, logprob_start_len=0)
    meta = found["meta_info"]
    assert (found["text"], found["output_ids"], meta["completion_tokens"]) == ("", [], 0)
    assert meta["finish_reason"] == {"type": "length", "length": 0}
    assert len(meta["input_token_logprobs"]) == meta["prompt_tokens"]
    assert "input_top_logprobs" not in meta
    assert [one["output_ids"] for one in events(server, {"max_new_tokens": 0})] == [[]]


def test_events_have_the_whole_text_and_are_bounded_in_size() -> None:
    sampling = {"max_new_tokens": 900, "temperature": 0}
    with api_server(constraints=False) as server:
        whole = answer(server, sampling)
        found = events(server, sampling)
    texts = [one["text"] for one in found]
    assert texts[-1] == whole["text"]
    assert len(texts) > 2
    for before, after in itertools.pairwise(texts[:-1]):
        assert after.startswith(before)
        assert (len(after) - len(before)) * GROWTH >= len(before)
    assert sum(map(len, texts)) <= (GROWTH + 1) * len(texts[-1])
    for one in found[:-1]:
        assert (one["output_ids"], one["meta_info"]["finish_reason"]) == ([], None)
        assert one["meta_info"]["prompt_tokens"] == whole["meta_info"]["prompt_tokens"]
    counts = [one["meta_info"]["completion_tokens"] for one in found]
    assert counts == sorted(counts)
    assert counts[0] > 0
    assert counts[-1] == 900
    assert found[-1]["output_ids"] == whole["output_ids"]


def test_hints_about_kv_change_no_answer(server: ApiServer) -> None:
    payload = {"source_control_endpoint": "tcp://127.0.0.1:9", "block_hashes": [11, 22]}
    action = {"action_id": "a", "action_type": "kv.fetch", "action_version": "1.0"}
    envelope = {"protocol_version": "0.1", "message_id": "m"}
    sampling = SAME | {"ignore_eos": True}
    expected = answer(server, sampling)["text"]
    for actions in ([action | {"payload": payload}], [action], [action | {"action_type": "kv.demote"}] * 3):
        assert answer(server, sampling, kv_hints=envelope | {"actions": actions})["text"] == expected
    assert answer(server, sampling, kv_hints=envelope)["text"] == expected
    assert answer(server, sampling, kv_hints=[envelope])["text"] == expected
    assert answer(server, sampling, kv_hints=[None])["text"] == expected
    assert error(server, text="a", kv_hints={"protocol_version": "0.1"})[0] == 400
    assert error(server, text="a", kv_hints=envelope | {"actions": [{"action_id": "a"}]})[0] == 400


def test_f37_neutral_fields_of_sglangs_own_clients_are_accepted(server: ApiServer) -> None:
    """Its benchmark and trainers send them with each request."""
    neutral = {"return_routed_experts": False, "return_indexer_topk": False, "lora_path": None}
    assert answer(server, **neutral, modalities=None)["text"] == answer(server)["text"]


def test_too_many_log_probabilities_are_rejected(server: ApiServer) -> None:
    asked = {"return_logprob": True, "top_logprobs_num": 20}
    with patch("agentflow.server.compatible.field_errors.MAX_LOGPROB_TOKENS", 2_000):
        found = error(server, text="a", sampling_params={"max_new_tokens": 100}, **asked)
    assert found == (400, "invalid_value", "top_logprobs_num")


@pytest.mark.parametrize("path", ["/get_model_info", "/model_info"])
def test_the_model_is_described(server: ApiServer, path: str) -> None:
    expected = {"model_path": MODEL, "tokenizer_path": MODEL, "is_generation": True}
    assert httpx2.get(server.url + path).json() == expected
    assert httpx2.get(server.url + path, params={"model": MODEL}).json() == expected
    assert httpx2.get(server.url + path, params={"model": "other"}).status_code == 404


@pytest.mark.parametrize("path", ["/get_server_info", "/server_info"])
def test_the_server_is_described(server: ApiServer, path: str) -> None:
    found = httpx2.get(server.url + path).json()
    assert found["version"] == httpx2.get(f"{server.url}/version").json()["version"]
    assert found["served_model_name"] == found["model_path"] == MODEL
    assert found["context_length"] == server.generator.info.max_context


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_health_has_sglangs_path_and_the_cache_cannot_be_flushed(server: ApiServer, method: str) -> None:
    found = httpx2.request(method, f"{server.url}/health_generate")
    assert (found.status_code, found.content) == (200, b"")
    refused = httpx2.request(method, f"{server.url}/flush_cache")
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "not_found")
