"""Decisions of models behind APIs: OpenAI's endpoint, and letters where there is none."""

from __future__ import annotations

import math
from typing import Any

import anyio
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types import Decision
from support.apis import openai_answers as answers
from support.apis.api_sessions import ApiSession, compatible_session, openai_session
from support.apis.fake_server import Answer, AnyAnswer, Hold, Received, Script

import agentflow as af
from agentflow.backends.apis.answers.answer import TokenInfo
from agentflow.backends.apis.generation.decisions import LETTERS, letter_probabilities, request_body
from agentflow.errors import BadArgument, NotSupported, ProtocolError, RequestRefused
from agentflow.protocol.chat import CalledTool, Message
from agentflow.protocol.decisions import Question
from agentflow.protocol.events import TokenLogprob

pytestmark = pytest.mark.anyio

ASKED: dict[str, Any] = {
    "spam": af.question("The message is spam.", bool),
    "tone": {"calm": "states facts", "angry": ""},
    "stars": range(1, 4),
}


def decision(*given: dict[str, Any]) -> Answer:
    usage = {
        "input_tokens": 100,
        "input_tokens_details": {"cached_tokens": 40, "cache_write_tokens": 10},
        "output_tokens": 0,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 100,
    }
    made = Decision.model_validate({"answers": list(given), "model": "gpt-6-luna", "usage": usage})
    return Answer(made.to_json(indent=None).encode())


SPAM = {"type": "predicate", "name": "spam", "probability": 0.25}
TONE = {
    "type": "choice",
    "name": "tone",
    "choice": "angry",
    "confidence": 0.5,
    "probabilities": [{"value": "angry", "probability": 0.75}, {"value": "calm", "probability": 0.25}],
}
STARS = {
    "type": "score",
    "name": "stars",
    "score": 0.75,
    "confidence": 0.5,
    "probabilities": [
        {"label": label, "value": value, "probability": probability}
        for value, (label, probability) in enumerate([("1", 0.5), ("2", 0.25), ("3", 0.25)])
    ],
}


def opened(script: Script, model: str = "gpt-6-luna", **session: Any) -> ApiSession:
    return openai_session(script, model, session=session)


async def test_the_endpoint_answers_all_questions_at_once() -> None:
    price = {"gpt-6-luna": af.Price(input=2.0, output=10.0, cached=0.5)}
    async with opened([decision(SPAM, TONE, STARS)], prices=price) as (flow, server), flow.state() as s:
        s += af.system("Be strict.") + af.user("Buy now!")
        asked = s.decide(ASKED)
        found = await asked
        usage, stats = asked.usage, await flow.stats()
        [request] = server.received
    assert request.path == "/v1/decisions"
    body = request.json
    assert body["model"] == "gpt-6-luna"
    assert body["input"] == [
        {"role": "system", "content": "Be strict."},
        {"role": "user", "content": "Buy now!"},
    ]
    assert body["questions"] == [
        {"type": "predicate", "name": "spam", "instructions": "The message is spam."},
        {
            "type": "choice",
            "name": "tone",
            "instructions": "tone",
            "choices": [{"value": "calm", "description": "states facts"}, {"value": "angry"}],
        },
        {
            "type": "score",
            "name": "stars",
            "instructions": "stars",
            "levels": [{"label": "1"}, {"label": "2"}, {"label": "3"}],
        },
    ]
    assert asked.decided_by == "endpoint"
    assert found["spam"] == af.Decision(False, {True: 0.25, False: 0.75})
    assert found["tone"].value == "angry"
    assert found["stars"] == af.Decision(1, {1: 0.5, 2: 0.25, 3: 0.25}, 1.75)
    assert (usage.prompt_tokens, usage.cached_tokens, usage.written_tokens) == (100, 40, 10)
    assert usage.cost == stats.cost > 0


async def test_decisions_that_are_left_cost_about_their_input() -> None:
    hold, found = Hold(), decision(SPAM, TONE, STARS)
    answer: Any = [answers.stream(hold), found]
    price = {"gpt-6-luna": af.Price(input=2.0, output=10.0)}
    opening = opened(answer, prices=price, max_cost=0.01)  # < 128,000 tokens
    async with opening as (flow, server), flow.state() as s:
        s += af.user("Buy now!")
        branch = s.copy()
        branch.decide(ASKED)
        with anyio.fail_after(20):
            await hold.reached.wait()
        branch.cancel()
        await server.wait_until_gone()
        left = (await flow.stats()).cost
        assert 0 < left < 0.001
        asked = s.decide(ASKED)
        assert (await asked)["spam"].value is False
        assert (await flow.stats()).cost == pytest.approx(left + asked.usage.cost)


def test_the_endpoint_reads_tool_calls_and_results() -> None:
    call = CalledTool("c1", "look_up", "{}")
    messages = [
        Message("user", "Look it up."),
        Message("assistant", "", tool_calls=(call,)),
        Message("tool", "broken", tool_call_id="c1", name="look_up"),
    ]
    body = msgspec.json.decode(request_body("m", messages, [Question("a", "predicate")], None))
    assert body["input"] == [
        {"role": "user", "content": "Look it up."},
        {"type": "function_call", "call_id": "c1", "name": "look_up", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "broken"},
    ]


async def test_a_refused_question_has_no_value() -> None:
    answer = decision({"type": "refusal", "name": "spam"}, TONE, STARS)
    async with opened([answer]) as (flow, _), flow.state() as s:
        s += af.user("Buy now!")
        found = await s.decide(ASKED)
    assert found["spam"] == af.Decision(None, {})
    assert found["spam"].probability == 0
    assert found["tone"].value == "angry"


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (decision(SPAM, TONE), ProtocolError),
        (decision(TONE, SPAM, STARS), ProtocolError),
        (decision(SPAM, {**TONE, "probabilities": TONE["probabilities"][:1]}, STARS), ProtocolError),
        (Answer(b'{"answers": 3}'), ProtocolError),
        (Answer(b"no json"), ProtocolError),
        (answers.error(400, "no", param="questions"), RequestRefused),
    ],
    ids=["too few", "another order", "a choice is missing", "no list", "no JSON", "refused"],
)
async def test_an_answer_without_decisions_is_not_asked_for_in_another_way(
    answer: Answer, error: type[af.AgentflowError]
) -> None:
    async with opened(lambda request: answer) as (flow, server), flow.state() as s:
        s += af.user("Buy now!")
        with pytest.raises(error):
            await s.decide(ASKED)
        assert len(server.received) == 1


def lettered(request: Received) -> AnyAnswer:
    """A model that likes the second answer three times as much as the first, and knows no other letter."""
    if request.path != "/v1/chat/completions":
        return answers.error(404, "not found")
    likely = [("B", math.log(0.6)), (" A", math.log(0.1)), ("A", math.log(0.1)), ("I", math.log(0.1))]
    chunk = answers.logprob_chunk("B", likely[0][1], *likely)
    return answers.stream([chunk, *answers.ending("length")])


@pytest.mark.parametrize("name", ["gpt-4.1-mini", "gpt-5.6", "vllm"])
async def test_letters_decide_where_there_is_no_endpoint(name: str) -> None:
    opening = compatible_session(lettered) if name == "vllm" else opened(lettered, name)
    async with opening as (flow, server), flow.state() as s:
        s += af.user("Buy now!")
        for _ in range(2):
            asked = s.decide(ASKED)
            found = await asked
        text = await s.text()
        chats = [request.json for request in server.received if request.path.endswith("completions")]
    assert asked.decided_by == "logprobs"
    assert found["spam"] == af.Decision(False, {True: pytest.approx(0.25), False: pytest.approx(0.75)})
    assert found["stars"].probabilities == {1: pytest.approx(0.25), 2: pytest.approx(0.75), 3: 0}
    assert text == "<user>Buy now!</user>"
    assert len(chats) == 2 * len(ASKED)
    assert len(server.received) - len(chats) <= 1  # the endpoint was looked for once
    for chat in chats:
        assert chat.get("reasoning_effort") == ("none" if name == "gpt-5.6" else None)
        [message] = chat["messages"]
        assert message["content"].startswith("Buy now!\n\n")


async def test_a_written_answer_decides_where_there_are_no_probabilities() -> None:
    def written(request: Received) -> AnyAnswer:
        values = request.json["response_format"]["json_schema"]["schema"]["properties"]
        [schema] = values.values()
        return answers.text_stream(f'{{"{next(iter(values))}": "{schema["enum"][0]}"}}')

    async with opened(written, "gpt-6-astra") as (flow, _), flow.state() as s:
        s += af.user("Buy now!")
        asked = s.decide(ASKED)
        found = await asked
    assert asked.decided_by == "text"
    assert found["spam"] == af.Decision(True, {True: 1.0, False: 0.0})
    assert found["stars"] == af.Decision(1, {1: 1.0, 2: 0.0, 3: 0.0}, 1.0)


async def test_an_open_turn_and_plain_text_are_refused() -> None:
    async with compatible_session(lettered, "llamacpp") as (flow, server):
        async with flow.state() as s:
            s += "Plain text"
            with pytest.raises(NotSupported):
                await s.decide(ASKED)
        async with flow.state() as s, s.assistant() as turn:
            turn += "It is"
            with pytest.raises(BadArgument):
                await turn.decide(ASKED)
    assert server.received == []


async def test_an_endpoint_that_has_answered_is_kept() -> None:
    def answer(request: Received) -> AnyAnswer:
        if request.path != "/v1/decisions":
            return lettered(request)
        if "very long" in request.json["input"][0]["content"]:
            return answers.error(400, "the context length is exceeded")
        return decision(SPAM, TONE, STARS)

    async with compatible_session(answer) as (flow, _):
        for text in ("Buy now!", "very long", "Buy now!"):
            async with flow.state() as s:
                s += af.user(text)
                asked = s.decide(ASKED)
                if text == "very long":
                    with pytest.raises(RequestRefused):
                        await asked
                else:
                    await asked
                    assert asked.decided_by == "endpoint"
        async with flow.state() as s, s.assistant() as turn:
            turn += "It is"
            with pytest.raises(BadArgument):
                await turn.decide(ASKED)


@given(st.lists(st.floats(-20, 0), min_size=2, max_size=20), st.lists(st.floats(-20, 0), max_size=5))
def test_letters_have_the_probabilities_of_their_tokens(logprobs: list[float], others: list[float]) -> None:
    top = [TokenLogprob(-1, LETTERS[place], logprob) for place, logprob in enumerate(logprobs)]
    noise = [TokenLogprob(-1, f"word{place}", logprob) for place, logprob in enumerate(others)]
    token = TokenInfo("A", logprobs[0], (*noise, *top))
    found = letter_probabilities([token], len(logprobs))
    total = sum(map(math.exp, logprobs))
    assert found == pytest.approx([math.exp(logprob) / total for logprob in logprobs])
    assert letter_probabilities([TokenInfo("word", 0.0, tuple(noise))], 2) is None
    assert letter_probabilities([], 2) is None
