"""Answers with many log-probabilities, of all APIs that have them: a thread of the tenant writes them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import httpx2
import pytest
from support.api_server import ApiServer
from support.server.apis import CHAT, OLLAMA, RESPONSES, SGLANG, TEXT, Api, post, refused
from support.server.module_servers import module_fixture
from support.server.scripted_model import scripted_server

from agentflow.errors import Overloaded
from agentflow.runtime.limits import MemoryBudget, TenantMemory, tenant_part
from agentflow.server.completion import engine_run, large_answers
from agentflow.server.completion.large_answers import LOGPROB_BYTES, AnswerMemory
from agentflow.server.completion.logprobs import LogprobReader
from agentflow.server.completion.request import MAX_LOGPROB_TOKENS
from agentflow.server.config.limits import HttpLimits
from agentflow.server.ollama import answer as ollama_answer
from agentflow.server.openai import chat, completions
from agentflow.server.openai.responses import answer as responses_answer
from agentflow.server.sglang.answer import LogprobForm

pytestmark = pytest.mark.timeout(60)
MAX_INLINE_LOGPROBS = 300
NUM_TOP = 20
WORDS = "Plants make sugar of light, water and air. " * 30
LONG = "What do plants make of light? " * 10  # with 5 alternatives to each token, they are many
FEW: dict[str, Any] = {"max_tokens": 2, "temperature": 0}


server = module_fixture(scripted_server, lambda _: WORDS)


@pytest.fixture(autouse=True)
def few_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small answers count as large ones."""
    monkeypatch.setattr(large_answers, "MAX_INLINE_LOGPROBS", MAX_INLINE_LOGPROBS)


def prompt_body(api: Api, *, num_top: int = NUM_TOP, stream: bool = False) -> Any:
    """A request for the log-probabilities of a long prompt."""
    if api is SGLANG:
        fields: dict[str, Any] = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": num_top}
    elif api is TEXT:
        fields = {"echo": True, "logprobs": min(num_top, 5)}
        fields |= {} if stream else {"prompt_logprobs": num_top}
    else:
        fields = {"prompt_logprobs": num_top}
    return {**api.body(LONG, extra=fields, **FEW), "stream": stream}


class Threads:
    """The threads that ran functions."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch = patch
        self.names: list[str] = []

    def watch(self, place: Any, name: str) -> None:
        """Notes where the function runs, which is called as before."""
        function: Callable[..., Any] = getattr(place, name)

        def noted(*arguments: Any, **named: Any) -> Any:
            self.names.append(threading.current_thread().name)
            return function(*arguments, **named)

        self._patch.setattr(place, name, noted)


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Threads:
    """The threads that make the parts of answers with log-probabilities."""
    found = Threads(monkeypatch)
    found.watch(chat, "make_prompt_logprobs")
    found.watch(chat, "token_logprob")
    found.watch(completions._OffsetLogprobs, "push")
    found.watch(completions, "make_prompt_logprobs")
    found.watch(ollama_answer, "token_logprob")
    found.watch(responses_answer, "token_logprob")
    found.watch(responses_answer.ResponseWriter, "_close")
    found.watch(LogprobForm, "of_tokens")
    return found


def loop_thread(server: ApiServer) -> str:
    return server.call(lambda: threading.current_thread().name)


def output_body(api: Api, *, num_top: int, **fields: Any) -> Any:
    """A request for the log-probabilities of a long answer."""
    names = {
        TEXT: {"logprobs": min(num_top, 5)},
        RESPONSES: {"top_logprobs": num_top},
        SGLANG: {"return_logprob": True, "top_logprobs_num": num_top},
    }
    extra = {**names.get(api, {"logprobs": True, "top_logprobs": num_top}), **fields}
    num_tokens = 60 if api is TEXT else 20  # of 6 or 21 log-probabilities
    return api.body("Hi", extra=extra, max_tokens=num_tokens, temperature=0)


@pytest.mark.parametrize("api", [CHAT, TEXT, SGLANG], ids=lambda api: api.name)
def test_f37_many_log_probabilities_of_a_prompt_are_written_in_a_thread(
    server: ApiServer, threads: Threads, api: Api
) -> None:
    answer = post(server, api, prompt_body(api))
    assert answer.status_code == 200, answer.text
    assert answer.text.count("-") > MAX_INLINE_LOGPROBS  # each is negative
    assert threads.names
    assert loop_thread(server) not in threads.names
    threads.names.clear()
    few = post(
        server, api, {**prompt_body(api, num_top=1), api.prompt_field: api.body("Hi")[api.prompt_field]}
    )
    assert few.status_code == 200, few.text
    assert {*threads.names} == {loop_thread(server)}


@pytest.mark.parametrize("api", [TEXT, SGLANG], ids=lambda api: api.name)
def test_f37_many_log_probabilities_of_a_prompt_are_streamed_from_a_thread(
    server: ApiServer, threads: Threads, api: Api
) -> None:
    whole = post(server, api, prompt_body(api))
    threads.names.clear()
    streamed = post(server, api, prompt_body(api, stream=True))
    assert api.streamed(streamed.text).text == api.whole(whole.json()).text
    assert streamed.text.count("-") > MAX_INLINE_LOGPROBS
    assert threads.names[0] != loop_thread(server)


@pytest.mark.parametrize("api", [CHAT, TEXT, RESPONSES, OLLAMA, SGLANG], ids=lambda api: api.name)
def test_f37_many_log_probabilities_of_an_answer_are_written_in_a_thread(
    server: ApiServer, threads: Threads, api: Api
) -> None:
    answer = post(server, api, {**output_body(api, num_top=NUM_TOP), "stream": False})
    assert answer.status_code == 200, answer.text
    assert answer.text.count("-") > MAX_INLINE_LOGPROBS
    assert threads.names
    assert loop_thread(server) not in threads.names
    threads.names.clear()
    few = post(server, api, {**output_body(api, num_top=0), "stream": False})
    assert few.status_code == 200, few.text
    assert {*threads.names} == {loop_thread(server)}
    assert api.whole(few.json()).text == api.whole(answer.json()).text


@pytest.mark.parametrize("api", [CHAT, RESPONSES, SGLANG], ids=lambda api: api.name)
def test_f37_the_end_of_a_stream_with_all_log_probabilities_is_written_in_a_thread(
    server: ApiServer, threads: Threads, api: Api
) -> None:
    """Under a constraint, all tokens come at the end. SGLang's and the Responses API write them only there,
    or again."""
    form: dict[str, Any] = {} if api is RESPONSES else {"regex": "[A-Z][a-z, .]{20,}"}
    if api is CHAT:
        body = output_body(api, num_top=NUM_TOP, **form)
    elif api is SGLANG:
        body = output_body(api, num_top=NUM_TOP, sampling_params=form)
    else:
        body = output_body(api, num_top=NUM_TOP)
    streamed = post(server, api, {**body, "stream": True})
    assert streamed.status_code == 200, streamed.text
    assert api.streamed(streamed.text).text
    assert streamed.text.count("-") > MAX_INLINE_LOGPROBS
    assert threads.names[-1] != loop_thread(server)


def test_f37_background_responses_with_many_log_probabilities_are_written_in_a_thread(
    server: ApiServer, threads: Threads
) -> None:
    asked = output_body(RESPONSES, num_top=NUM_TOP, background=True, stream=True)
    events_text = post(server, RESPONSES, asked).text
    assert RESPONSES.streamed(events_text).text
    assert threads.names[-1] != loop_thread(server)
    stored = httpx2.get(f"{server.url}/v1/responses/{RESPONSES.streamed(events_text).id}", timeout=60)
    assert RESPONSES.whole(stored.json()).text == RESPONSES.streamed(events_text).text


def test_f37_many_tokens_that_come_at_the_end_are_read_in_a_thread(
    server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under a constraint, the tokens of an answer are known only at its end."""
    found = Threads(monkeypatch)
    found.watch(LogprobReader, "finish")
    for num_top in (NUM_TOP, 0):
        body = output_body(CHAT, num_top=num_top, regex="[A-Z][a-z, .]{200,}", max_completion_tokens=200)
        answer = post(server, CHAT, body)
        assert answer.status_code == 200, answer.text
    many, few = found.names
    assert many != few == loop_thread(server)


@pytest.mark.parametrize(
    ("api", "stream"), [(CHAT, False), (TEXT, False), (TEXT, True), (SGLANG, False), (SGLANG, True)]
)
def test_f37_log_probabilities_of_prompts_count_as_memory_of_the_tenant(
    server: ApiServer, monkeypatch: pytest.MonkeyPatch, api: Api, stream: bool
) -> None:
    bodies = server.service.bodies
    held: list[int] = []
    prompt_delta = engine_run.prompt_delta

    def noted(*arguments: Any) -> Any:
        held.append(bodies.num_bytes)
        return prompt_delta(*arguments)

    monkeypatch.setattr(engine_run, "prompt_delta", noted)
    body = prompt_body(api, num_top=5, stream=stream)
    assert post(server, api, body).status_code == 200
    assert held[0] > MAX_INLINE_LOGPROBS * LOGPROB_BYTES
    server.call(server.service.calls.until_none)
    assert bodies.num_bytes == 0
    other = MemoryBudget(within=bodies.of(""))
    server.call(other.reserve, server.service.http_limits.bodies_bytes - held[0] + 1)
    try:
        assert refused(server, api, body)[:2] == (503, "overloaded")
        few = prompt_body(api, num_top=0, stream=stream)
        assert post(server, api, few).status_code == 200  # small answers do not count
    finally:
        server.call(other.close)
    assert post(server, api, body).status_code == 200


@pytest.mark.parametrize("tenant", ["", "alice"])
def test_f37_the_largest_answers_fit_into_the_memory_of_a_tenant(tenant: str) -> None:
    most_bytes = HttpLimits().bodies_bytes
    bodies = TenantMemory(most_bytes, "they may have", "wait")
    first, second, third = [
        AnswerMemory(bodies.of(tenant), tenant_part(most_bytes, tenant)) for _ in range(3)
    ]
    first.reserve(MAX_LOGPROB_TOKENS // 2)
    first.reserve(MAX_LOGPROB_TOKENS // 2)  # another prompt of the request
    second.reserve(MAX_LOGPROB_TOKENS // 100)
    with pytest.raises(Overloaded, match="wait"):
        third.reserve(MAX_LOGPROB_TOKENS)
    first.close()
    third.reserve(MAX_LOGPROB_TOKENS)
    second.close()
    third.close()
    assert bodies.num_bytes == 0
