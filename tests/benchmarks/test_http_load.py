"""The clients of the benchmarks over HTTP: chats and trees of calls, on a real server."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest
from support.api_server import MODEL, api_server
from support.fake_engine import TOKENIZER

from benchmarks.server.http_load import WORDS, Load

pytestmark = pytest.mark.timeout(60)


def put(**load: Any) -> tuple[list[dict[str, Any]], list[list[str]]]:
    """Runs a load. Returns the outcomes, and the turns of each prompt after the template's system prompt."""
    with api_server() as server:
        sent = server.observe_requests()
        port = int(server.url.rpartition(":")[2])
        answer = asyncio.run(Load(port, model=MODEL, **load).put())
        prompts = [TOKENIZER.decode(submit.token_ids, skip_special=False) for submit in sent.submits]
        server.assert_idle()
    return answer["outcomes"], [prompt.split("<|im_start|>")[2:] for prompt in prompts]


def num_words(turn: str) -> int:
    words = turn.removeprefix("user\n").removesuffix("<|im_end|>\n").split()
    return sum(word in WORDS for word in words)


def test_a_chat_keeps_its_answers() -> None:
    outcomes, prompts = put(streams=2, turns=4, prompt_words=3, shared_words=5, max_tokens=4)
    assert [(each["status"], each["num_tokens"]) for each in outcomes] == [(200, 4)] * 8
    chats = {prompt[0]: [other for other in prompts if other[0] == prompt[0]] for prompt in prompts}
    assert len(chats) == 2
    for turns in chats.values():
        assert [len(prompt) for prompt in turns] == [2, 4, 6, 8]
        for before, after in itertools.pairwise(turns):
            assert after[: len(before) - 1] == before[:-1]
            answer = after[len(before) - 1].removeprefix("assistant\n").removesuffix("<|im_end|>\n")
            assert answer
            assert num_words(after[-2]) == 3
        assert num_words(turns[0][0]) == 8


def test_a_tree_is_one_call_its_branches_and_one_that_reads_them() -> None:
    outcomes, prompts = put(requests=2, branches=3, prompt_words=6, max_tokens=4)
    assert [(each["status"], each["num_tokens"]) for each in outcomes] == [(200, 4)] * 10
    for first, *branches, last in (prompts[:5], prompts[5:]):
        assert len(first) == 2
        assert [len(prompt) for prompt in (*branches, last)] == [4] * 4
        assert {tuple(prompt[:2]) for prompt in branches} == {tuple(last[:2])}
        assert last[0] == first[0]
        assert len({prompt[2] for prompt in branches}) == 3
        assert [num_words(prompt[2]) for prompt in branches] == [6] * 3
        assert len(last[2]) > max(len(prompt[2]) for prompt in branches)


def test_a_single_request_has_the_same_words_as_ever() -> None:
    """Figures are followed over time, so a seed keeps its prompts."""
    _, [[prompt, _]] = put(seed=7, prompt_words=4, shared_words=2)
    assert prompt == "user\ngarden light bridge paper river seven<|im_end|>\n"
