"""``POST /v1/decisions`` by OpenAI's client, as a program's ``decide``, and as the backend of programs."""

from __future__ import annotations

from typing import Any

import httpx2
import msgspec
import pytest
from support.api_server import MODEL, ApiServer
from support.apis.fake_server import Answer
from support.server.api_models import Served, served_apis
from support.server.openai_peer import constrained_logit_server, sync_client

import agentflow as af

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60)]
server = pytest.fixture(constrained_logit_server, scope="module")

COMPLAINT = "You sold me a broken kettle."
ASKED: dict[str, Any] = {
    "spam": af.question("The message is spam.", bool),
    "tone": af.question("How does it sound?", {"calm": "states facts", "angry": "", "very angry": "insults"}),
    "urgency": af.question("How urgent is it?", ["low", "high"], ordered=True),
}
QUESTIONS: list[Any] = [
    {
        "type": "predicate",
        "name": "spam",
        "instructions": [{"type": "input_text", "text": "The message is spam."}],
    },
    {
        "type": "choice",
        "instructions": "How does it sound?",
        "choices": [
            {"value": "calm", "description": "states facts"},
            {"value": "angry"},
            {"value": "very angry", "description": "insults"},
        ],
    },
    {
        "type": "score",
        "name": "urgency",
        "instructions": "How urgent is it?",
        "levels": [{"label": "low"}, {"label": "high"}],
    },
]


async def decided_by_program(
    url: str | None = None, **options: Any
) -> tuple[dict[str, af.Decision], str | None]:
    async with af.session(url, **options) as flow, flow.state() as s:
        s += af.user(COMPLAINT)
        variable = s.decide(ASKED)
        return await variable, variable.decided_by


async def test_answers_are_those_of_a_program(server: ApiServer) -> None:
    by_name, _ = await decided_by_program(server.url.replace("http", "ws"))
    with sync_client(server) as client:
        decision = client.decisions.create(model=MODEL, input=COMPLAINT, questions=QUESTIONS)
    spam, tone, urgency = decision.answers
    assert (spam.type, spam.name, spam.probability) == (
        "predicate",
        "spam",
        by_name["spam"].probabilities[True],
    )
    assert (tone.type, tone.name, tone.choice) == ("choice", None, by_name["tone"].value)
    assert {one.value: one.probability for one in tone.probabilities} == by_name["tone"].probabilities
    assert tone.confidence == by_name["tone"].probability
    assert (urgency.type, urgency.score) == ("score", by_name["urgency"].mean)
    assert [(one.value, one.label) for one in urgency.probabilities] == [(0, "low"), (1, "high")]
    assert urgency.confidence == by_name["urgency"].probability
    assert decision.model == MODEL
    usage = decision.usage
    assert usage.input_tokens > usage.input_tokens_details.cached_tokens > 0
    assert (usage.output_tokens, usage.total_tokens) == (0, usage.input_tokens)
    assert sum(by_name["tone"].probabilities.values()) == pytest.approx(1)


async def test_the_endpoint_decides_for_programs_on_the_api(server: ApiServer) -> None:
    by_name, _ = await decided_by_program(server.url.replace("http", "ws"))
    found, decided_by = await decided_by_program(backend=af.OpenAICompatible(f"{server.url}/v1", MODEL))
    assert decided_by == "endpoint"
    for name, decision in found.items():
        assert decision.value == by_name[name].value
        assert decision.probabilities == pytest.approx(by_name[name].probabilities)
    found, decided_by = await decided_by_program(
        backend=af.OpenAICompatible(f"{server.url}/v1", MODEL, flavour="llamacpp")
    )
    assert decided_by in ("logprobs", "text")
    assert set(found) == set(ASKED)
    assert all(sum(decision.probabilities.values()) == pytest.approx(1) for decision in found.values())


async def test_items_and_json_are_an_input(server: ApiServer) -> None:
    call = {"call_id": "c1", "name": "look_up", "arguments": "{}", "type": "function_call"}
    items: list[Any] = [
        {"role": "developer", "content": "Be strict."},
        {"role": "user", "content": [{"type": "input_json", "data": {"order": 7, "items": ["kettle"]}}]},
        call,
        {"call_id": "c1", "output": "broken", "type": "function_call_output"},
    ]
    with sync_client(server) as client:
        decision = client.decisions.create(model=MODEL, input=items, questions=QUESTIONS[:1])
    assert 0 < decision.answers[0].probability < 1


async def test_an_answer_of_the_assistant_may_come_last(server: ApiServer) -> None:
    async with af.session(server.url.replace("http", "ws")) as flow, flow.state() as s:
        s += af.user(COMPLAINT) + af.assistant("I am sorry.")
        expected = (await s.decide(ASKED))["spam"].probabilities[True]
    items: list[Any] = [
        {"role": "user", "content": COMPLAINT},
        {"role": "assistant", "content": "I am sorry."},
    ]
    with sync_client(server) as client:
        decision = client.decisions.create(model=MODEL, input=items, questions=QUESTIONS[:1])
    assert decision.answers[0].probability == expected


async def test_the_questions_have_the_limit_of_those_of_programs(server: ApiServer) -> None:
    questions = [{"type": "predicate", "instructions": "x" * 2_000}] * 201
    body = {"model": MODEL, "input": "x", "questions": questions}
    async with httpx2.AsyncClient() as client:
        answer = await client.post(f"{server.url}/v1/decisions", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "questions")


@pytest.mark.parametrize(
    "values", [["true", True], [True, False], ["a", "b"]], ids=["a text and a value", "values", "texts"]
)
async def test_choices_keep_their_types(server: ApiServer, values: list[Any]) -> None:
    question: Any = {
        "type": "choice",
        "instructions": "Which?",
        "choices": [{"value": value} for value in values],
    }
    with sync_client(server) as client:
        [answer] = client.decisions.create(model=MODEL, input="x", questions=[question]).answers
    assert [one.value for one in answer.probabilities] == values
    assert [type(one.value) for one in answer.probabilities] == [type(value) for value in values]


async def asked_of(
    served: Served, model: str, content: Any, questions: list[Any]
) -> tuple[int, dict[str, Any]]:
    body = {"model": model, "input": content, "questions": questions}
    async with httpx2.AsyncClient(timeout=30) as client:
        answer = await client.post(f"{served.url}/v1/decisions", json=body)
    return answer.status_code, answer.json()


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_model_behind_an_api_decides() -> None:
    refused = {"type": "refusal", "name": "0"}
    choice = {
        "type": "choice",
        "name": "1",
        "choice": "calm",
        "confidence": 0.5,
        "probabilities": [
            {"value": "calm", "probability": 0.5},
            {"value": "angry", "probability": 0.25},
            {"value": "very angry", "probability": 0.25},
        ],
    }
    usage = {"input_tokens": 9, "output_tokens": 0}
    found = {"answers": [refused, choice], "model": "gpt-6-luna", "usage": usage}
    models = {"luna": "openai:gpt-6-luna", "claude": "anthropic:claude-opus-5-5"}
    async with served_apis([Answer(msgspec.json.encode(found))], models) as served:
        status, answer = await asked_of(served, "luna", COMPLAINT, QUESTIONS[:2])
        assert (status, answer["model"]) == (200, "luna")
        assert answer["answers"] == [{"type": "refusal", "name": "spam"}, {**choice, "name": None}]
        assert answer["usage"]["input_tokens"] == 9
        sent = served.vendor.last.json
        assert (sent["input"], len(sent["questions"])) == ([{"role": "user", "content": COMPLAINT}], 2)
        call = {"call_id": "c1", "name": "look_up", "arguments": "{}", "type": "function_call"}
        status, answer = await asked_of(served, "luna", [call], QUESTIONS[:1])
        assert (status, answer["error"]["param"]) == (400, "input")
        assert len(served.vendor.received) == 1
