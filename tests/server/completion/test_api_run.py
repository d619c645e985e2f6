"""Every HTTP API answers with models behind APIs, of either vendor, as it does with an engine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import anyio
import httpx2
import openai
import pytest
from support.apis import anthropic_answers as of_anthropic
from support.apis import openai_answers as of_openai
from support.apis.fake_server import Answer, Hold, RawAnswer
from support.server.api_models import SECRET, Served, served_apis
from support.server.apis import (
    APIS,
    CHAT,
    MESSAGES,
    OLLAMA,
    OLLAMA_TEXT,
    RESPONSES,
    SGLANG,
    TEXT,
    Answered,
    Api,
    events,
)
from support.server.http_clients import only_asyncio

from agentflow.server.completion import api_run
from agentflow.server.config.limits import HttpLimits

pytestmark = pytest.mark.anyio
anyio_backend = pytest.fixture(only_asyncio)

MODELS = {"gpt": "openai:gpt-4.1-mini", "claude": "anthropic:claude-opus-5-5", "own": "compatible:m"}
CONVERSING = [CHAT, RESPONSES, MESSAGES, OLLAMA, OLLAMA_TEXT]
each_api = pytest.mark.parametrize("api", CONVERSING, ids=lambda api: api.name)
each_tool_api = pytest.mark.parametrize("api", [CHAT, RESPONSES, MESSAGES, OLLAMA], ids=lambda api: api.name)
each_model = pytest.mark.parametrize("model", ["gpt", "claude"])
each_form = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
WEATHER = {
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


def words(model: str, *pieces: str) -> Answer:
    """A vendor's answer of text, with 9 tokens in its prompt and 3 in its output."""
    return of_anthropic.text_stream(*pieces) if model == "claude" else of_openai.text_stream(*pieces)


def calls(model: str, *made: tuple[str, str, Sequence[str]]) -> Answer:
    """A vendor's answer with tool calls."""
    return of_anthropic.call_stream(*made) if model == "claude" else of_openai.call_stream(*made)


async def post(served: Served, api: Api, body: Any, **headers: str) -> httpx2.Response:
    async with httpx2.AsyncClient(timeout=30) as client:
        return await client.post(f"{served.url}{api.path}", json=body, headers=headers)


async def ask(
    served: Served, api: Api, prompt: Any, *, model: str = "gpt", stream: bool = False, **fields: Any
) -> Answered:
    response = await post(served, api, {**api.body(prompt, **fields), "model": model, "stream": stream})
    assert response.status_code == 200, response.text
    return api.streamed(response.text) if stream else api.whole(response.json())


async def refused(
    served: Served, api: Api, prompt: Any, *, model: str = "gpt", **fields: Any
) -> tuple[int, str, str | None]:
    """The status, the code and the field of the error."""
    response = await post(served, api, {**api.body(prompt, **fields), "model": model, "stream": False})
    assert response.status_code >= 400, response.text
    assert SECRET not in response.text
    return response.status_code, *api.error(response.json())


@each_api
@each_model
@each_form
async def test_text(api: Api, model: str, stream: bool) -> None:
    async with served_apis([words(model, "Su", "gar.")], MODELS) as served:
        answer = await ask(served, api, "What do plants make?", model=model, stream=stream)
    assert (answer.text, answer.reason) == ("Sugar.", "stop")
    if answer.prompt_tokens:
        assert (answer.prompt_tokens, answer.output_tokens) == (9, 3)
    assert "What do plants make?" in json.dumps(served.vendor.last.json["messages"])


@each_tool_api
@each_model
@each_form
async def test_tool_calls_and_their_results(api: Api, model: str, stream: bool) -> None:
    made = [("call_1", "weather", ['{"city": ', '"Oslo"}']), ("call_2", "weather", ['{"city": "Rome"}'])]
    async with served_apis([calls(model, *made), words(model, "Cold.")], MODELS) as served:
        asked = [{"role": "user", "content": "Weather in Oslo and Rome?"}]
        answer = await ask(served, api, asked, model=model, stream=stream, tools=[WEATHER])
        assert [(call.name, call.arguments) for call in answer.calls] == [
            ("weather", {"city": "Oslo"}),
            ("weather", {"city": "Rome"}),
        ]
        assert answer.reason == "calls"
        if stream:
            return
        history = [*asked, *answer.turns, *api.results(answer.calls, ["-3 C", "18 C"])]
        again = await ask(served, api, history, model=model, tools=[WEATHER])
    assert again.text == "Cold."
    sent = json.dumps(served.vendor.last.json["messages"])
    assert all(result in sent for result in ("-3 C", "18 C"))


@each_tool_api
async def test_reasoning_is_passed_on(api: Api) -> None:
    chunks = (of_openai.reasoning_chunks("Hm, ", "hm."), of_openai.text_chunks("Yes."), of_openai.ending())
    async with served_apis([of_openai.stream(*chunks)], MODELS) as served:
        answer = await ask(served, api, "Is it?", model="own")
    assert (answer.text, answer.reasoning) == ("Yes.", "Hm, hm.")


@each_tool_api
@each_form
async def test_f37_reasoning_is_apart_wherever_it_comes(api: Api, stream: bool) -> None:
    begun, *arguments = of_openai.call_chunks(("call_1", "weather", ['{"city": ', '"Os', 'lo"}']))
    chunks = [
        of_openai.text_chunks("I look."),
        of_openai.reasoning_chunks("Oslo"),
        begun,
        arguments[0],
        of_openai.reasoning_chunks(", hm"),
        arguments[1],
        of_openai.reasoning_chunks("."),
        arguments[2],
        of_openai.ending("tool_calls"),
    ]
    async with served_apis([of_openai.stream(*chunks)], MODELS) as served:
        answer = await ask(served, api, "Is it cold in Oslo?", model="own", stream=stream, tools=[WEATHER])
    assert (answer.text, answer.reasoning) == ("I look.", "Oslo, hm.")
    assert answer.arguments == [{"city": "Oslo"}]
    assert answer.reason == "calls"


async def test_plain_text_goes_to_servers_that_continue_text() -> None:
    chunk = {"choices": [{"index": 0, "text": " there", "finish_reason": "stop"}]}
    body = [f"data: {json.dumps(chunk)}\n\n".encode(), of_openai.DONE]
    answer = Answer(body, content_type=of_openai.EVENT_STREAM)
    async with served_apis([answer], MODELS) as served:
        assert (await ask(served, TEXT, "Hello", model="own")).text == " there"
    assert served.vendor.last.path == "/v1/completions"
    assert served.vendor.last.json["prompt"] == "Hello"


@each_api
async def test_only_given_parameters_are_sent(api: Api) -> None:
    async with served_apis([words("gpt", "a"), words("gpt", "b")], MODELS) as served:
        fields = {} if api is not MESSAGES else {"max_tokens": 7}
        await ask(served, api, "Hi", **fields)
        sent = served.vendor.last.json
        assert {"temperature", "top_p", "seed", "stop"}.isdisjoint(sent)
        assert ("max_completion_tokens" in sent or "max_tokens" in sent) == (api is MESSAGES)
        await ask(served, api, "Hi", temperature=1.0, top_p=1.0, max_tokens=7)
        sent = served.vendor.last.json
        assert (sent["temperature"], sent["top_p"]) == (1.0, 1.0)


async def test_several_answers_are_several_calls() -> None:
    async with served_apis([words("gpt", "a"), words("gpt", "b")], MODELS) as served:
        body = {**CHAT.body("Hi", seed=5), "model": "gpt", "n": 2}
        answer = (await post(served, CHAT, body)).json()
    assert {choice["message"]["content"] for choice in answer["choices"]} == {"a", "b"}
    assert {one.json["seed"] for one in served.vendor.received} == {5, 6}
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (9, 6)


async def test_a_schema_is_the_vendors_to_keep() -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    async with served_apis([words("gpt", '{"a": 1}')], MODELS) as served:
        answer = await ask(served, CHAT, "Hi", extra={"response_format": form})
    assert answer.text == '{"a": 1}'
    assert served.vendor.last.json["response_format"]["json_schema"]["schema"] == schema


@each_form
async def test_answers_are_checked_where_the_operator_wants_it(stream: bool) -> None:
    answers = [words("gpt", "many"), words("gpt", "12")]
    async with served_apis(answers, MODELS, on_unsupported="retry") as served:
        answer = await ask(served, CHAT, "How many?", stream=stream, extra={"regex": "[0-9]+"})
    assert answer.text == "12"


async def test_answers_that_never_fit_are_a_failure_of_the_model() -> None:
    async with served_apis([words("gpt", "many")] * 3, MODELS, on_unsupported="retry") as served:
        found = await refused(served, CHAT, "How many?", extra={"regex": "[0-9]+"})
    assert found == (500, "engine_failed", None)


@each_form
async def test_a_server_that_breaks_its_promise_is_a_failure_of_the_model(stream: bool) -> None:
    async with served_apis(lambda _: words("own", "12 or so"), MODELS) as served:
        body = {**CHAT.body("How many?", extra={"regex": "[0-9]+"}), "model": "own", "stream": stream}
        answer = (await post(served, CHAT, body)).text
    assert "engine_failed" in answer
    assert served.vendor.url not in answer


UNSUPPORTED: list[tuple[Api, dict[str, Any], str]] = [
    (CHAT, {"logprobs": True}, "logprobs"),
    (CHAT, {"prompt_logprobs": 1}, "prompt_logprobs"),
    (CHAT, {"return_token_ids": True}, "return_token_ids"),
    (CHAT, {"bad_words": ["no"]}, "bad_words"),
    (CHAT, {"chat_template_kwargs": {"a": 1}}, "chat_template_kwargs"),
    (CHAT, {"add_generation_prompt": False}, "add_generation_prompt"),
    (CHAT, {"min_tokens": 2}, "min_tokens"),
    (CHAT, {"top_k": 5}, "top_k"),
    (CHAT, {"ignore_eos": True}, "ignore_eos"),
    (CHAT, {"regex": "[0-9]+"}, "regex"),
    (CHAT, {"grammar": 'start: "a"'}, "grammar"),
    (CHAT, {"reasoning_effort": "high"}, "reasoning_effort"),
    (TEXT, {}, "prompt"),
    (TEXT, {"echo": True}, "echo"),
    (TEXT, {"logprobs": 0}, "logprobs"),
    (TEXT, {"best_of": 2}, "best_of"),
    (RESPONSES, {"top_logprobs": 2}, "top_logprobs"),
    (RESPONSES, {"truncation": "auto"}, "truncation"),
    (RESPONSES, {"reasoning": {"effort": "high"}}, "reasoning.effort"),
    (MESSAGES, {"top_k": 5}, "top_k"),
    (MESSAGES, {"output_config": {"effort": "high"}}, "output_config.effort"),
    (OLLAMA, {"logprobs": True}, "logprobs"),
    (OLLAMA, {"think": "high"}, "think"),
    (OLLAMA_TEXT, {"context": [1, 2]}, "context"),
    (OLLAMA_TEXT, {"raw": True}, "prompt"),
    (SGLANG, {}, "model"),
]


@pytest.mark.parametrize(
    ("api", "extra", "param"), UNSUPPORTED, ids=[f"{api.name} {param}" for api, _, param in UNSUPPORTED]
)
async def test_unsupported_parameters_are_refused_by_name(
    api: Api, extra: dict[str, Any], param: str
) -> None:
    async with served_apis([], MODELS) as served:
        assert await refused(served, api, "Hi", extra=extra) == (400, "unsupported", param)
    assert served.vendor.received == []


@pytest.mark.parametrize(
    ("api", "extra", "param"),
    [
        (CHAT, {"enable_thinking": False}, "enable_thinking"),
        (MESSAGES, {"thinking": {"type": "disabled"}}, "thinking"),
        (OLLAMA, {"think": False}, "think"),
        (OLLAMA_TEXT, {"think": False}, "think"),
    ],
    ids=lambda value: getattr(value, "name", None),
)
async def test_reasoning_that_cannot_be_turned_off_is_refused_by_name(
    api: Api, extra: dict[str, Any], param: str
) -> None:
    """Models that are not known to reason are served."""
    others = {"any": "generic:m", "own": "llamacpp:m"}
    replies = [words("gpt", "a"), words("m", "a"), words("m", "a")]
    async with served_apis(replies, MODELS | others | {"o3": "openai:o3"}) as served:
        found = await refused(served, api, "Hi", model="o3", extra=extra)
        assert found == (400, "unsupported", param)
        assert served.vendor.received == []
        for model in ("gpt", *others):
            answer = await ask(served, api, "Hi", model=model, extra=extra)
            assert answer.text == "a"
            assert "reasoning_effort" not in served.vendor.last.json


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/tokenize", {"prompt": "a"}),
        ("POST", "/detokenize", {"tokens": [1]}),
        ("GET", "/tokenizer_info?model=gpt", None),
        ("POST", "/v1/embeddings", {"input": "a"}),
        ("POST", "/api/embed", {"input": "a"}),
        ("POST", "/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "a"}]}),
        ("POST", "/generate", {"text": "a"}),
        ("GET", "/get_model_info?model=gpt", None),
        ("GET", "/get_server_info", None),
    ],
)
async def test_routes_that_need_an_engine_say_so(method: str, path: str, body: Any) -> None:
    async with served_apis([], MODELS) as served, httpx2.AsyncClient() as client:
        sent = None if body is None else {"model": "gpt", **body}
        response = await client.request(method, f"{served.url}{path}", json=sent)
    assert response.status_code == 400
    assert "unsupported" in response.text or "is behind an API" in response.text


@each_form
@pytest.mark.parametrize(
    ("answer", "status", "code"),
    [
        (of_openai.WRONG_KEY, 500, "engine_failed"),
        (of_openai.NO_MODEL, 500, "engine_failed"),
        (of_openai.BROKEN, 500, "engine_failed"),
        (of_openai.rate_limited(s=7), 503, "overloaded"),
        (of_openai.TOO_LONG, 400, "context_length_exceeded"),
        (RawAnswer([]), 503, "engine_down"),
    ],
)
async def test_faults_of_the_vendor_have_a_status(answer: Any, status: int, code: str, stream: bool) -> None:
    async with served_apis([answer], MODELS) as served:
        response = await post(served, CHAT, {**CHAT.body("Hi"), "model": "gpt", "stream": stream})
    assert (response.status_code, response.json()["error"]["code"]) == (status, code)
    assert SECRET not in response.text
    if code == "overloaded":
        assert response.headers["retry-after"] == "7"


async def test_a_refusal_of_the_vendor_names_the_parameter_and_no_address() -> None:
    async with served_apis([of_openai.REFUSED_PARAMETER], MODELS) as served:
        response = await post(served, CHAT, {**CHAT.body("Hi"), "model": "own"})
    assert (response.status_code, CHAT.error(response.json())[1]) == (400, "stop")
    assert "127.0.0.1" not in response.text


async def test_a_fault_in_the_middle_is_the_last_event_of_a_stream() -> None:
    broken = of_openai.stream(of_openai.text_chunks("one"), of_openai.error_event("It broke."), done=False)
    async with served_apis([broken], MODELS) as served:
        response = await post(served, CHAT, {**CHAT.body("Hi"), "model": "gpt", "stream": True})
    assert response.status_code == 200
    assert '"one"' in response.text
    last = [line for line in response.text.splitlines() if line.startswith("data: ")][-1]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "engine_failed"


@each_form
async def test_a_client_that_leaves_cancels_the_vendors_call(stream: bool) -> None:
    hold = Hold()
    async with served_apis([of_openai.stream(of_openai.text_chunks("one"), hold)], MODELS) as served:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="any") as client:
            with anyio.CancelScope() as scope:
                async with anyio.create_task_group() as group:

                    async def leave() -> None:
                        await hold.reached.wait()
                        scope.cancel()

                    group.start_soon(leave)
                    found: Any = await client.chat.completions.create(
                        model="gpt", messages=[{"role": "user", "content": "Hi"}], stream=stream
                    )
                    async for _ in found:
                        pass
        await served.vendor.wait_until_gone()


async def test_a_shutdown_waits_for_the_calls() -> None:
    hold = Hold()
    answer = of_openai.stream(of_openai.text_chunks("one"), hold, of_openai.ending())
    async with served_apis([answer], MODELS) as served, anyio.create_task_group() as group:
        texts: list[str] = []

        async def client() -> None:
            texts.append((await ask(served, CHAT, "Hi")).text)

        group.start_soon(client)
        with anyio.fail_after(20):
            await hold.reached.wait()
            assert not await served.server.service.drain(0.0)
            hold.go_on()
            assert await served.server.service.drain(20.0)
    assert texts == ["one"]


async def test_the_lists_of_models_have_them() -> None:
    async with served_apis([], MODELS) as served, httpx2.AsyncClient() as client:
        listed = (await client.get(f"{served.url}/v1/models")).json()["data"]
        assert [model["id"] for model in listed] == ["gpt", "claude", "own"]
        assert (await client.get(f"{served.url}/v1/models/claude")).json()["id"] == "claude"
        named = {"anthropic-version": "2023-06-01"}
        listed = (await client.get(f"{served.url}/v1/models", headers=named)).json()["data"]
        assert [model["id"] for model in listed] == ["gpt", "claude", "own"]
        ready = await client.get(f"{served.url}/health/ready")
        assert (ready.status_code, ready.json()["models"]) == (200, ["gpt", "claude", "own"])
        for path in ("/api/tags", "/api/ps", "/openapi.json", "/metrics"):
            assert (await client.get(f"{served.url}{path}")).status_code == 200
    assert served.vendor.received == []


async def test_a_trace_goes_on_to_the_vendor() -> None:
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    async with served_apis([words("gpt", "a")], MODELS) as served:
        await post(served, CHAT, {**CHAT.body("Hi"), "model": "gpt"}, traceparent=trace)
        assert served.vendor.last.headers["traceparent"] == trace


def test_every_api_is_tested() -> None:
    assert {*APIS.values()} == {*CONVERSING, TEXT, SGLANG}


async def test_a_background_response_runs_on_the_vendors_model() -> None:
    async with served_apis([words("gpt", "Sugar.")], MODELS) as served, httpx2.AsyncClient() as client:
        body = {**RESPONSES.body("Hi"), "model": "gpt", "background": True}
        begun = (await client.post(f"{served.url}/v1/responses", json=body)).json()
        address = f"{served.url}/v1/responses/{begun['id']}"
        await served.server.service.models.until_idle()
        with anyio.fail_after(20):
            while (found := (await client.get(address)).json())["status"] in ("queued", "in_progress"):
                pass
    assert RESPONSES.whole(found).text == "Sugar."


async def test_the_stream_of_a_slow_vendor_begins_before_its_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(api_run, "ACCEPTED_AFTER_S", 0.0)
    hold = Hold()
    answer = of_openai.stream(hold, of_openai.text_chunks("late"), of_openai.ending())
    async with served_apis([answer], MODELS) as served, httpx2.AsyncClient(timeout=30) as client:
        body = {**CHAT.body("Hi"), "model": "gpt", "stream": True}
        async with client.stream("POST", f"{served.url}{CHAT.path}", json=body) as response:
            assert response.status_code == 200
            await hold.reached.wait()
            hold.go_on()
            assert CHAT.streamed((await response.aread()).decode()).text == "late"


async def test_the_usage_at_the_end_of_a_stream_is_the_vendors() -> None:
    usage = of_openai.usage(100, 20, cached=60, reasoning=5)
    async with served_apis([of_openai.text_stream("a", usage=usage)], MODELS) as served:
        extra = {"stream_options": {"include_usage": True}}
        body = {**CHAT.body("Hi", extra=extra), "model": "gpt", "stream": True}
        found = list(events((await post(served, CHAT, body)).text))[-1]["usage"]
    assert (found["prompt_tokens"], found["completion_tokens"]) == (100, 20)
    assert found["prompt_tokens_details"]["cached_tokens"] == 60
    assert found["completion_tokens_details"]["reasoning_tokens"] == 5


async def test_a_stored_response_is_continued() -> None:
    async with served_apis([words("gpt", "Sugar."), words("gpt", "And air.")], MODELS) as served:
        first = await ask(served, RESPONSES, "What do plants make?")
        again = await ask(served, RESPONSES, "And?", extra={"previous_response_id": first.id})
    assert again.text == "And air."
    contents = [message["content"] for message in served.vendor.last.json["messages"]]
    assert contents == ["What do plants make?", "Sugar.", "And?"]


async def test_the_operators_limit_of_prompts_applies_by_estimate() -> None:
    async with served_apis([], MODELS, http_limits=HttpLimits(max_prompt_tokens=10)) as served:
        found = await refused(served, CHAT, "word " * 100)
    assert found == (400, "context_length_exceeded", "messages")
    assert served.vendor.received == []


@pytest.mark.parametrize("api", [CHAT, MESSAGES, OLLAMA, OLLAMA_TEXT], ids=lambda api: api.name)
async def test_a_stop_ends_the_text(api: Api) -> None:
    async with served_apis([words("gpt", "one, two, three")], MODELS) as served:
        answer = await ask(served, api, "Count.", stop=[", th"])
    assert (answer.text, answer.reason) == ("one, two", "stop")
