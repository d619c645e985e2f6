"""Behaviour that the backends of OpenAI's two APIs and of Anthropic's API share, against a fake server.
Answers and requests have the types of the vendors' clients."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from anthropic.types.message_create_params import MessageCreateParamsStreaming
from openai.types.chat.completion_create_params import CompletionCreateParamsStreaming
from openai.types.responses.response_create_params import ResponseCreateParamsStreaming
from pydantic import BaseModel, TypeAdapter
from support.apis import anthropic_answers, openai_answers, responses_answers
from support.apis.api_sessions import anthropic_session, failure, openai_session
from support.apis.fake_server import Answer, AnyAnswer, FakeServer, Received, Script

import agentflow as af
from agentflow.errors import (
    AgentflowError,
    BadArgument,
    EngineFailed,
    NotAuthorized,
    NotSupported,
    Overloaded,
    PromptTooLong,
    RateLimited,
    RequestRefused,
    RunFailed,
    ServerLost,
    UnknownModel,
)

pytestmark = pytest.mark.anyio

KEY = "sk-very-secret"
OLD = "claude-opus-4-5"  # it continues text, and takes a temperature
TYPES: dict[str, Any] = {
    "chat": CompletionCreateParamsStreaming,
    "responses": ResponseCreateParamsStreaming,
    "messages": MessageCreateParamsStreaming,
}
ANSWERS: dict[str, Any] = {
    "chat": openai_answers,
    "responses": responses_answers,
    "messages": anthropic_answers,
}
EACH = pytest.mark.parametrize("api", TYPES)
OPENAIS = pytest.mark.parametrize("api", ["chat", "responses"])


@asynccontextmanager
async def opened(
    api: str, script: Script, model: str = "", **options: Any
) -> AsyncIterator[tuple[af.Session, FakeServer]]:
    """A session over one of the APIs, all of whose requests have the vendor's type."""
    options = {"api_key": KEY, **options}
    opening = (
        anthropic_session(script, model or OLD, **options)
        if api == "messages"
        else openai_session(script, model or "gpt-4o", api=api, **options)
    )
    async with opening as (flow, server):
        yield flow, server
        types, known = TypeAdapter(TYPES[api]), set(TYPES[api].__annotations__)
        for request in server.received:
            if request.headers.get("anthropic-version") == "2023-06-01":  # the client speaks the later one
                known |= {"temperature", "top_p", "top_k"}
            assert request.json.keys() <= known
            types.dump_json(types.validate_python(request.json))  # lists are validated during serialisation


def said(api: str, *pieces: str) -> AnyAnswer:
    answer: AnyAnswer = ANSWERS[api].text_stream(*pieces)
    return answer


def turns(api: str, request: Received) -> list[dict[str, Any]]:
    """The conversation of a request, with the text of each turn in place of Anthropic's blocks."""
    found = request.json["input" if api == "responses" else "messages"]
    if api == "messages":
        found = [{**turn, "content": "".join(block["text"] for block in turn["content"])} for turn in found]
    return found


FIRST: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"max_completion_tokens": 90}),
    "responses": ("/v1/responses", {"max_output_tokens": 90, "stream": True, "store": False}),
    "messages": ("/v1/messages", {"max_tokens": 90, "system": [{"type": "text", "text": "Be brief."}]}),
}
"""The path of a first request, and some of its fields."""
BYE: dict[str, AnyAnswer] = {
    "chat": openai_answers.text_stream("Bye", usage=openai_answers.usage(28, 1, cached=16)),
    "responses": responses_answers.text_stream("Bye", usage=responses_answers.usage(28, 1, cached=16)),
    "messages": anthropic_answers.stream(
        anthropic_answers.beginning(4, cached=16, written=8),
        anthropic_answers.text_block("Bye"),
        anthropic_answers.ending(output=1),
    ),
}


@EACH
async def test_a_conversation_is_sent_and_its_answer_streamed(api: str) -> None:
    more = {"top_p": 0.9} if api == "responses" else {}
    async with opened(api, [said(api, "He", "llo"), BYE[api]]) as (flow, server), flow.state() as s:
        s += af.system("Be brief.") + af.user("Hi")
        s += af.assistant(af.gen("x", max_tokens=90, temperature=0.5, **more))
        deltas = [delta async for delta in s["x"]]
        s += af.user("Go") + af.assistant(af.gen("y"))
        assert await s["y"] == "Bye"
        assert "".join(deltas) == "Hello"
        assert (s["x"].finish_reason, s["x"].usage.prompt_tokens, s["x"].usage.output_tokens) == ("eos", 9, 3)
        usage = s["y"].usage
        assert (usage.prompt_tokens, usage.cached_tokens, usage.output_tokens) == (28, 16, 1)
        assert usage.written_tokens == (8 if api == "messages" else 0)
        stats = await flow.stats()
    first, last = server.received
    path, fields = FIRST[api]
    assert first.path == path
    assert first.headers["authorization"] == f"Bearer {KEY}"
    fields = {**fields, **more, "temperature": 0.5, "model": OLD if api == "messages" else "gpt-4o"}
    assert first.json.items() >= fields.items()
    unset = {"include", "reasoning", "text", "tools", "instructions", "previous_response_id"}
    assert not unset & first.json.keys()
    system = [] if api == "messages" else [{"role": "system", "content": "Be brief."}]
    assert turns(api, first) == [*system, {"role": "user", "content": "Hi"}]
    assert turns(api, last) == [
        *turns(api, first),
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "Go"},
    ]
    end = b"]}]," if api == "messages" else b"]"
    assert last.body.startswith(first.body.partition(end)[0])  # equal to the byte, for the provider's cache
    assert api != "responses" or last.json["prompt_cache_key"] == first.json["prompt_cache_key"]
    assert server.num_connections == 1
    assert (stats.prompt_tokens, stats.cached_tokens, stats.generated_tokens) == (37, 16, 4)


ENDLESS: dict[str, AnyAnswer] = {
    "chat": openai_answers.stream(openai_answers.text_chunks("one ", "two <", "/end> three"), done=False),
    "responses": responses_answers.stream(responses_answers.message("one ", "two <", "/end> three")),
    "messages": anthropic_answers.stream(
        anthropic_answers.beginning(), anthropic_answers.text_block("one ", "two <", "/end> three")
    ),
}


@EACH
async def test_stops_are_applied_to_the_received_text(api: str) -> None:
    async with opened(api, [ENDLESS[api]]) as (flow, server), flow.state() as s:
        s += af.user("Hi") + af.assistant(af.gen("x", stop=["</end>"]))
        assert "".join([delta async for delta in s["x"]]) == "one two "
        assert s["x"].finish_reason == "stop"
        assert s["x"].usage.output_tokens > 0
        assert s["x"].usage.prompt_tokens == 9 or api != "messages"
    assert api != "responses" or "stop" not in server.last.json


@OPENAIS
async def test_log_probabilities_cover_the_text(api: str) -> None:
    tokens = [
        ("A", -0.1, ("A", -0.1), ("B", -2.5)),
        ("é", -0.2, ("é", -0.2), ("C", -2.0)),
        ("END", -0.3, ("END", -0.3)),
    ]
    if api == "chat":
        parts: list[Any] = [openai_answers.logprob_chunk(*token) for token in tokens]
        asked = {"logprobs": True, "top_logprobs": 2}
    else:
        parts = responses_answers.message(*[responses_answers.logprob(*token) for token in tokens])
        asked = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    answer = ANSWERS[api].stream(parts, ANSWERS[api].ending())
    async with opened(api, [answer]) as (flow, server), flow.state() as s:
        s += af.user("Hi") + af.assistant(af.gen("x", top_logprobs=2, stop="END"))
        assert await s["x"] == "Aé"
        assert s["x"].logprobs == (-0.1, -0.2)
        assert [[top.text for top in tops] for tops in s["x"].top_logprobs] == [["A", "B"], ["é", "C"]]
    assert server.last.json.items() >= asked.items()


CALLING: dict[str, AnyAnswer] = {
    "chat": openai_answers.call_stream(("c1", "weather", ["{}"])),
    "responses": responses_answers.stream(
        responses_answers.call("c1", "weather", "{}"), responses_answers.ending()
    ),
    "messages": anthropic_answers.call_stream(("c1", "weather", ["{}"])),
}


@EACH
async def test_a_call_where_none_is_allowed_is_an_error(api: str) -> None:
    await failure(opened(api, [CALLING[api]]), RunFailed)


class Report(BaseModel):
    title: str
    pages: int = 1


def form(api: str, request: Received) -> dict[str, Any]:
    """The requested format of an answer, which contains its schema."""
    body = request.json
    match api:
        case "chat":
            found: dict[str, Any] = body["response_format"]["json_schema"]
        case "responses":
            found = body["text"]["format"]
        case _:
            found = body["output_config"]["format"]
    return found


@EACH
async def test_schemas_are_sent_in_the_strict_subset(api: str) -> None:
    """Values that are no objects are taken out of one."""
    script = [said(api, '{"title":"A"', ',"pages":3}'), said(api, '{"value', '": [1, 2]}')]
    async with opened(api, script) as (flow, server), flow.state() as s:
        report = af.gen("x", schema=Report)
        s += af.user("Hi") + af.assistant(report) + af.user("Hi")
        s += af.assistant(af.gen("y", schema=list[int]))
        assert await s[report] == Report(title="A", pages=3)
        assert await s["y"] == [1, 2]
    found = form(api, server.received[0])
    assert found["schema"]["required"] == ["title", "pages"]
    assert found["schema"]["additionalProperties"] is False
    assert found.get("type", "json_schema") == "json_schema"
    assert api == "messages" or (found["strict"], bool(found["name"])) == (True, True)


@EACH
async def test_a_type_is_a_schema(api: str) -> None:
    async with opened(api, [said(api, '{"value": 12}')]) as (flow, server), flow.state() as s:
        s += af.user("How many?") + af.assistant(af.gen("x", type=int))
        assert await s["x"] == 12
    assert form(api, server.last)["schema"]["properties"]["value"] == {"type": "integer"}


@OPENAIS
async def test_reasoning_can_be_turned_off(api: str) -> None:
    async with opened(api, [said(api, "Hello")], "gpt-5.6") as (flow, server), flow.state() as s:
        s += af.user("Hi") + af.assistant(af.gen("x", temperature=0.5, max_reasoning_tokens=0))
        await s["x"]
        off = {"reasoning_effort": "none"} if api == "chat" else {"reasoning": {"effort": "none"}}
        assert server.last.json.items() >= {**off, "temperature": 0.5}.items()
        assert "include" not in server.last.json
        s += af.user("Hi") + af.assistant(af.gen("y", temperature=0.5))
        with pytest.raises(NotSupported) as caught:
            await s["y"]
    assert caught.value.param == "temperature"
    assert len(server.received) == 1


REASONED: dict[str, AnyAnswer] = {
    "responses": responses_answers.stream(
        responses_answers.reasoning([], encrypted="gAAA"),
        responses_answers.message("Yes. No", index=1),
        responses_answers.ending(),
    ),
    "messages": anthropic_answers.stream(
        anthropic_answers.beginning(),
        anthropic_answers.thinking_block("Hm."),
        anthropic_answers.text_block("Yes. No", index=1),
        anthropic_answers.ending(),
    ),
}


@pytest.mark.parametrize(
    ("api", "model", "stop", "content"),
    [
        ("responses", "gpt-5.5", {"stop": "."}, "Yes"),
        ("messages", "claude-opus-5-5", {"stop_regex": r"\."}, [{"type": "text", "text": "Yes"}]),
    ],
)
async def test_a_text_that_was_cut_is_given_back_without_its_reasoning(
    api: str, model: str, stop: dict[str, Any], content: Any
) -> None:
    """The API would not accept a signature for another text."""
    async with opened(api, [REASONED[api], said(api, "Hello")], model) as (flow, server), flow.state() as s:
        s += af.user("Hi") + af.assistant(af.gen("x", **stop)) + af.user("Go") + af.assistant(af.gen("y"))
        assert (await s["x"], await s["y"]) == ("Yes", "Hello")
    sent = server.last.json["input" if api == "responses" else "messages"]
    assert sent[1] == {"role": "assistant", "content": content}


IMPORTED = [
    {"role": "user", "content": "How is it?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
    },
    {"role": "tool", "content": "cold", "tool_call_id": "c1"},
]
SENT: dict[str, Any] = {
    "chat": [IMPORTED[0], {**IMPORTED[1], "content": None}, IMPORTED[2]],
    "responses": [
        IMPORTED[0],
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "cold"},
    ],
}


@OPENAIS
async def test_conversations_are_sent_as_messages_or_items(api: str) -> None:
    async with opened(api, [said(api, "Hello")]) as (flow, server), flow.state() as s:
        s += af.conversation(IMPORTED) + af.gen("x")
        assert await s["x"] == "Hello"
    assert server.last.json["messages" if api == "chat" else "input"] == SENT[api]


@pytest.mark.parametrize(
    ("api", "options"),
    [
        ("chat", {}),
        ("responses", {}),
        ("messages", {"model": "claude-opus-5-5"}),
        ("messages", {"model": "claude-opus-4-8"}),
        ("messages", {"model": "claude-next"}),
        ("messages", {"reasoning": True}),
    ],
)
async def test_a_turn_that_cannot_be_continued_is_refused(api: str, options: dict[str, Any]) -> None:
    async with opened(api, [], speculate=False, **options) as (flow, server), flow.state() as s:
        s += af.user("Capital?") + af.assistant("It is" + af.gen("x"))
        with pytest.raises(NotSupported):
            await s["x"]
    assert server.received == []


@EACH
async def test_text_without_turns_is_refused(api: str) -> None:
    async with opened(api, []) as (flow, server), flow.state() as s:
        s += "Once upon a time" + af.gen("x")
        with pytest.raises(NotSupported):
            await s["x"]
    assert server.received == []


def openai_error(status: int, text: str, **fields: Any) -> Answer:
    return openai_answers.error(status, text, **fields)


def anthropic_error(status: int, text: str, kind: str = "invalid_request_error") -> Answer:
    return anthropic_answers.error(status, text, kind=kind)


def streamed(api: str, *parts: Any) -> AnyAnswer:
    answer: AnyAnswer = ANSWERS[api].stream(*parts)
    return answer


FULL = openai_answers.error_event("Overloaded", kind="overloaded_error")
TEXT = anthropic_answers.text_block("x")
BEGUN = anthropic_answers.beginning()
ERRORS: dict[str, list[tuple[AnyAnswer, type[AgentflowError], str | None]]] = {
    "chat": [
        (openai_answers.WRONG_KEY, NotAuthorized, None),
        (openai_answers.NO_MODEL, UnknownModel, "model"),
        (openai_answers.REFUSED_PARAMETER, NotSupported, "stop"),
        (openai_answers.TOO_LONG, PromptTooLong, None),
        (openai_answers.BROKEN, EngineFailed, None),
        (openai_answers.OVERLOADED, Overloaded, None),
        (openai_answers.rate_limited(s=2.5), RateLimited, None),
        (openai_answers.rate_limited(code="insufficient_quota"), NotAuthorized, None),
        (
            openai_error(400, "Bad value.", code="invalid_value", param="max_completion_tokens"),
            RequestRefused,
            "max_tokens",
        ),
        (openai_error(400, "Blocked.", code="content_filter"), RequestRefused, "messages"),
        (openai_error(403, "No."), NotAuthorized, None),
        (openai_error(413, "Too large."), PromptTooLong, None),
        (
            openai_error(500, "input (1001 tokens) is too large to process.", kind="server_error"),
            PromptTooLong,
            None,
        ),
        (openai_error(404, "Not Found"), BadArgument, "url"),
        (
            openai_error(
                400, "the request exceeds the available context size", kind="exceed_context_size_error"
            ),
            PromptTooLong,
            None,
        ),
        (
            streamed("chat", openai_answers.refusal_chunks("I ", "cannot."), openai_answers.ending()),
            RequestRefused,
            None,
        ),
        (openai_answers.text_stream(finish_reason="content_filter"), RequestRefused, None),
        (streamed("chat", FULL), Overloaded, None),
        (streamed("chat", openai_answers.error_event("Oh")), EngineFailed, None),
        (Answer(b'{"error": {"message": "no", "type": "authentication_error"}}'), NotAuthorized, None),
        (Answer(b'{"detail": [{"loc": ["body"], "msg": "wrong"}]}', 422), RequestRefused, None),
        (
            Answer(b'{"object": "error", "message": "model `x` does not exist", "code": 404}', 404),
            UnknownModel,
            "model",
        ),
    ],
    "responses": [
        (openai_answers.WRONG_KEY, NotAuthorized, None),
        (openai_answers.TOO_LONG, PromptTooLong, None),
        (openai_answers.BROKEN, EngineFailed, None),
        (openai_answers.rate_limited(s=2.5), RateLimited, None),
        (
            openai_error(
                400, "Expected a value >= 16.", code="integer_below_min_value", param="max_output_tokens"
            ),
            RequestRefused,
            "max_tokens",
        ),
        (
            openai_error(400, "Not verified.", code="unsupported_value", param="reasoning.summary"),
            NotSupported,
            "stream_reasoning",
        ),
        (
            streamed("responses", responses_answers.refusal("I ", "cannot."), responses_answers.ending()),
            RequestRefused,
            None,
        ),
        (responses_answers.text_stream("Hi", incomplete="content_filter"), RequestRefused, None),
        (streamed("responses", responses_answers.failed("server_error", "Oh")), EngineFailed, None),
        (streamed("responses", responses_answers.failed("rate_limit_exceeded", "Slow.")), RateLimited, None),
        (streamed("responses", responses_answers.failed("invalid_prompt", "No.")), RequestRefused, None),
        (
            streamed("responses", responses_answers.error_event("rate_limit_exceeded", "Slow.")),
            RateLimited,
            None,
        ),
        (streamed("responses", responses_answers.error_event(None, "Oh")), EngineFailed, None),
        (streamed("responses", FULL), Overloaded, None),
        (streamed("responses", b"event: error\n" + FULL), Overloaded, None),
    ],
    "messages": [
        (anthropic_answers.WRONG_KEY, NotAuthorized, None),
        (anthropic_answers.NO_MODEL, UnknownModel, "model"),
        (anthropic_answers.REFUSED_PARAMETER, NotSupported, "temperature"),
        (anthropic_answers.NO_PREFILL, NotSupported, None),
        (anthropic_answers.TOO_LONG, PromptTooLong, None),
        (
            anthropic_error(
                400, "output_config.format.schema: Invalid schema: The compiled grammar is too large."
            ),
            NotSupported,
            "schema",
        ),
        (anthropic_answers.BROKEN, EngineFailed, None),
        (anthropic_answers.OVERLOADED, Overloaded, None),
        (anthropic_answers.rate_limited(ms=1500), RateLimited, None),
        (anthropic_error(402, "Your credit is too low.", "billing_error"), NotAuthorized, None),
        (anthropic_error(403, "Not allowed.", "permission_error"), NotAuthorized, None),
        (anthropic_error(413, "Request too large."), PromptTooLong, None),
        (
            anthropic_error(400, "max_tokens: 1 > 0, which is the maximum"),
            RequestRefused,
            "max_tokens",
        ),
        (streamed("messages", BEGUN, anthropic_answers.error_event("Overloaded")), Overloaded, None),
        (
            streamed("messages", BEGUN, TEXT, anthropic_answers.error_event("x", kind="api_error")),
            EngineFailed,
            None,
        ),
    ],
}


@pytest.mark.parametrize(
    ("api", "answer", "kind", "param"), [(api, *row) for api, rows in ERRORS.items() for row in rows]
)
async def test_errors_of_the_api(
    api: str, answer: AnyAnswer, kind: type[AgentflowError], param: str | None
) -> None:
    error = await failure(opened(api, [answer]), kind)
    assert (type(error), error.param) == (kind, param)
    assert KEY not in str(error)


@pytest.mark.parametrize(
    ("api", "answer"),
    [("chat", openai_answers.rate_limited(s=120)), ("messages", anthropic_answers.rate_limited(s=120))],
)
async def test_the_wait_that_a_server_asks_for_is_reported(api: str, answer: AnyAnswer) -> None:
    error = await failure(opened(api, [answer], max_retries=5), RateLimited)
    assert isinstance(error, RateLimited)
    assert error.retry_after_s == 120


CUT: dict[str, AnyAnswer] = {
    "chat": openai_answers.stream(openai_answers.text_chunks("Hi"), done=False),
    "responses": responses_answers.stream(responses_answers.message("Hi")),
    "messages": anthropic_answers.stream(BEGUN, anthropic_answers.text_block("Hi")),
}


@EACH
async def test_a_lost_connection_is_an_error(api: str) -> None:
    error = await failure(opened(api, [CUT[api]]), ServerLost)
    assert (OLD if api == "messages" else "gpt-4o") in str(error)
