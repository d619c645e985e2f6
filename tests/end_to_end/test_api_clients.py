"""The HTTP APIs and the default model on ``agentflow serve``: clients and sessions receive the same."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import anyio
import jsonschema
import pytest
from support.server.apis import CHAT, MESSAGES, RESPONSES, TEXT, Api, ask, events, post

import agentflow as af

pytestmark = pytest.mark.model

MODEL = {"model": "smollm2-135m"}
QUESTION = "What do plants need?"
NUM_TOKENS = 16
APIS = (CHAT, RESPONSES, MESSAGES)
PLANT = {
    "type": "object",
    "properties": {"kind": {"enum": ["oak", "rose", "grass"]}, "count": {"type": "integer", "maximum": 99}},
    "required": ["kind", "count"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def server(model_url: str) -> Any:
    return SimpleNamespace(url=model_url.replace("ws://", "http://"))


@pytest.fixture(scope="module")
def answers(server: Any, model_url: str) -> dict[Any, Any]:
    """The answer that a session receives, by "session", and the responses with an answer, by the API and
    whether it is a stream. All ask at the same time: a step of the model is for all of them."""

    async def in_session() -> str:
        async with af.session(model_url) as flow, flow.state() as s:
            s += af.user(QUESTION) + af.assistant(af.gen("answer", max_tokens=NUM_TOKENS))
            return await s["answer"]

    def ask_api(api: Api, stream: bool) -> Any:
        body = api.body(QUESTION, max_tokens=NUM_TOKENS, temperature=0, extra=MODEL)
        return post(server, api, {**body, "stream": stream})

    with ThreadPoolExecutor() as pool:
        asked = {(api, stream): pool.submit(ask_api, api, stream) for api in APIS for stream in (False, True)}
        answer = anyio.run(in_session)
    return {"session": answer} | {key: response.result() for key, response in asked.items()}


@pytest.mark.parametrize("api", APIS, ids=lambda api: api.name)
def test_an_answer_is_that_of_a_session(answers: dict[Any, Any], api: Api) -> None:
    stream = answers[api, True].text
    assert api.whole(answers[api, False].json()).text == api.streamed(stream).text == answers["session"]
    assert len(answers["session"]) > 20
    assert len(list(events(stream))) > 10  # an event for each step, not one for all of it


@pytest.mark.parametrize("api", APIS, ids=lambda api: api.name)
def test_a_loop_of_calls_is_found_in_the_cache(server: Any, api: Api) -> None:
    history: list[Any] = [{"role": "user", "content": f"Plant two oaks in my garden, please, {api.name}."}]
    tools = [{"name": "plant", "description": "Plants something in the garden.", "parameters": PLANT}]
    known = -1
    for _ in range(2):
        extra = {**MODEL, **api.alone("required")}
        answer = ask(server, api, history, tools=tools, max_tokens=100, temperature=0, extra=extra)
        [call] = answer.calls
        jsonschema.validate(call.arguments, PLANT)
        assert (call.name, answer.reason) == ("plant", "calls")
        # The second prompt contains the call after the tokens computed for the first.
        assert answer.cached_tokens is not None
        assert answer.cached_tokens > known
        known = answer.prompt_tokens
        history += [*answer.turns, *api.results([call], ["planted"])]


def test_a_text_and_its_tokens(server: Any) -> None:
    text = "The capital of France is"
    asked = {"max_tokens": 6, "temperature": 0, "extra": {**MODEL, "logprobs": 2}}
    body = post(server, TEXT, TEXT.body(text, **asked)).json()
    [choice] = body["choices"]
    assert "Paris" in choice["text"]
    assert "".join(choice["logprobs"]["tokens"]) == choice["text"]
    tokens = post(server, TEXT, {**MODEL, "prompt": text}, path="/tokenize").json()
    assert tokens["count"] == body["usage"]["prompt_tokens"]
    assert ask(server, TEXT, tokens["tokens"], **asked).text == choice["text"]
