"""The engines by themselves: DSPy's requests as what a model is asked, and what it says as responses."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import dspy
import pytest
from dspy import lm15
from dspy_agentflow import AgentflowEngine, AgentflowLM, AsyncAgentflowEngine
from dspy_agentflow.answers import Asked
from dspy_agentflow.call_notes import CallNotes
from dspy_agentflow.engines import _response_of, asked_of
from dspy_agentflow.lm import EngineSettings
from scripts import Recorded

import agentflow as af
from agentflow.integrations import Answer, connection_through
from agentflow.protocol.chat import ToolChoice
from agentflow.protocol.events import TokenLogprob, Usage

MODEL = "agentflow/some-model"
WEATHER = lm15.FunctionTool(
    "weather", "Of a city.", {"type": "object", "properties": {"city": {"type": "string"}}}
)
CLOCK = lm15.FunctionTool("clock")
CALL = af.Reply("I look.", (af.ToolCall("weather", {"city": "Oslo"}, "c1"), af.ToolCall("clock", {}, "c2")))


def request_of(*messages: lm15.Message, **config: Any) -> lm15.Request:
    said = {name: config.pop(name) for name in ("tools", "system") if name in config}
    told = messages or (lm15.Message.user("What?"),)
    return lm15.Request(model=MODEL, messages=told, config=lm15.Config(**config), **said)


def asked(request: lm15.Request, **settings: Any) -> Asked:
    return asked_of(request, EngineSettings(**settings), CallNotes())


def engines(script: Any) -> tuple[AgentflowEngine, AsyncAgentflowEngine, Recorded]:
    backend = af.Scripted(script)
    backend.generator = model = Recorded(script)
    settings = EngineSettings(backend=backend)
    return AgentflowEngine(settings), AsyncAgentflowEngine(settings), model


def test_a_conversation_with_tools() -> None:
    result = lm15.ToolResultPart("c1", (lm15.TextPart("cold"),), name="weather")
    request = request_of(
        lm15.Message.developer("Mind this."),
        lm15.Message.user(["Is it ", "cold?"]),
        lm15.Message(
            "assistant",
            (
                lm15.ThinkingPart("hm"),
                lm15.TextPart("I look."),
                lm15.ToolCallPart("c1", "weather", {"city": "Malmö"}),
            ),
        ),
        lm15.Message.tool([result, lm15.ToolResultPart("c2", (lm15.DataPart({"at": 3}),))]),
        system="Be brief.",
        tools=(WEATHER,),
    )
    assert asked(request).messages == [
        af.Message("system", "Be brief."),
        af.Message("system", "Mind this."),
        af.Message("user", "Is it cold?"),
        af.Message("assistant", "I look.", tool_calls=(af.ToolCall("weather", {"city": "Malmö"}, "c1"),)),
        af.Message("tool", "cold", tool_call_id="c1", name="weather"),
        af.Message("tool", '{"at": 3}', tool_call_id="c2"),
    ]


CHOICES = [
    (None, ToolChoice("auto")),
    (lm15.ToolChoice("auto", parallel=False), ToolChoice("auto", parallel=False)),
    (lm15.ToolChoice("required"), ToolChoice("required")),
    (lm15.ToolChoice("none"), ToolChoice("none")),
    (lm15.ToolChoice("required", ("clock",)), ToolChoice("required", "clock")),
]


@pytest.mark.parametrize(("said", "meant"), CHOICES)
def test_choices_among_tools(said: Any, meant: ToolChoice) -> None:
    found = asked(request_of(tools=(WEATHER, CLOCK), tool_choice=said))
    assert found.choice == meant
    assert [tool.name for tool in found.tools] == ["weather", "clock"]


def test_where_only_calls_are_read_the_model_has_to_call() -> None:
    request = request_of(tools=(WEATHER,))
    assert asked_of(request, EngineSettings(), CallNotes(must_call=True)).choice == ToolChoice("required")


def test_sampling() -> None:
    config = {
        "max_tokens": 5,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 3,
        "frequency_penalty": 1,
        "presence_penalty": -1,
        "stop": ("a", "b"),
        "seed": 4,
        "logprobs": 0,
        "extensions": {"min_p": 0.1, "logit_bias": {"17": -100}, "regex": "[ab]+"},
    }
    found = asked(request_of(**config), timeout=3.0, cache_salt="s")
    assert found.sampling == {
        "max_tokens": 5,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 3,
        "frequency_penalty": 1.0,
        "presence_penalty": -1.0,
        "stop": ["a", "b"],
        "seed": 4,
        "logprobs": True,
        "top_logprobs": 1,
        "min_p": 0.1,
        "logit_bias": {17: -100},
    }
    assert (found.constraint, found.cache_salt) == ({"regex": "[ab]+"}, "s")
    assert found.call().deadline_s == 3.0
    assert found.call().output.params.max_tokens == 5


def test_response_formats() -> None:
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}}
    as_schema = request_of(response_format={"type": "json_schema", "schema": schema})
    assert asked(as_schema).constraint == {"schema": schema}
    as_json = request_of(response_format={"type": "json_object"})
    assert asked(as_json).constraint == {"schema": {"type": "object"}}
    assert asked(request_of()).constraint == {}


REFUSED = [
    (request_of(reasoning=lm15.Reasoning("high")), "reasoning"),
    (request_of(extensions={"made_up": 1}), "made_up"),
    (request_of(probabilities="required"), "probabilities"),
    (request_of(tools=(lm15.BuiltinTool("web_search"),)), "web_search"),
    (request_of(tools=(WEATHER, CLOCK), tool_choice=lm15.ToolChoice("auto", ("clock",))), "tool_choice"),
    (request_of(lm15.Message.user(lm15.ImagePart(url="https://there/x.png"))), "takes text"),
]


@pytest.mark.parametrize(("request_", "why"), REFUSED, ids=[why for _, why in REFUSED])
def test_what_cannot_be_done_is_refused(request_: lm15.Request, why: str) -> None:
    engine, async_engine, model = engines(["x"])
    with pytest.raises(lm15.UnsupportedFeatureError, match=why):
        engine.complete(request_)
    with pytest.raises(lm15.UnsupportedFeatureError, match=why):
        asyncio.run(async_engine.complete(request_))
    assert not model.prompts


def test_calls_come_back_whole() -> None:
    engine, async_engine, _ = engines([CALL, CALL])
    request = request_of(tools=(WEATHER, CLOCK))
    response = engine.complete(request)
    assert response == asyncio.run(async_engine.complete(request))
    assert response.message.parts == (
        lm15.TextPart("I look."),
        lm15.ToolCallPart("c1", "weather", {"city": "Oslo"}),
        lm15.ToolCallPart("c2", "clock", {}),
    )
    assert (response.finish_reason, response.model) == ("tool_call", "scripted")
    assert response.usage.output_tokens == 2


def test_and_in_pieces() -> None:
    engine, async_engine, _ = engines([CALL, CALL, CALL])
    request = request_of(tools=(WEATHER, CLOCK))
    whole = engine.complete(request)

    async def events() -> list[Any]:
        return [event async for event in async_engine.stream(request)]

    for told in (list(engine.stream(request)), asyncio.run(events())):
        assert (told[0].type, told[-1].type) == ("start", "end")
        stream = lm15.ResponseStream(iter(told), request)
        assert stream.response.message == whole.message
        assert stream.response.usage == whole.usage
        assert stream.response.finish_reason == whole.finish_reason


def test_an_iterator_that_is_left_ends_the_work() -> None:
    engine, _, model = engines(["word " * 5000])
    events = engine.stream(request_of())
    assert [next(events).type, next(events).type] == ["start", "delta"]
    events.close()
    assert model.ended.wait(20)


def test_plain_lms_with_the_engines() -> None:
    engine, async_engine, model = engines(["one", "two", "three"])
    lm = dspy.LM(MODEL, engine=engine, async_engine=async_engine, cache=False)
    assert (lm.supports_function_calling, lm.supports_response_schema) == (True, True)
    assert "response_format" in lm.supported_params
    assert lm("?", n=2) == ["one", "two"]  # DSPy asks twice
    assert asyncio.run(lm.acall("?")) == ["three"]
    assert model.forks == []


def test_typed_requests_and_their_responses() -> None:
    engine, async_engine, _ = engines(["one"])
    lm = dspy.LM(MODEL, engine=engine, async_engine=async_engine, cache=False)
    response = lm(request_of(max_tokens=3))
    assert isinstance(response, lm15.Response)
    assert response.text == "one"


def test_engines_are_saved_without_their_key() -> None:
    engine = AgentflowEngine(base_url="ws://there", api_key="secret", timeout=2.0, cache_salt="s")
    state = engine.dump_state()
    assert "secret" not in json.dumps(state)
    assert "secret" not in repr(engine)
    loaded = AgentflowEngine.load_state(state)
    assert loaded.settings == EngineSettings("ws://there", None, 2.0, "s")
    lm = dspy.LM(MODEL, engine=engine, async_engine=AsyncAgentflowEngine(engine.settings))
    again = dspy.LM.load_state(lm.dump_state(), allow_custom_lm_class=True)
    assert isinstance(again.engine, AgentflowEngine)


def test_the_environment_says_where_the_model_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTFLOW_URL", "ws://there")
    monkeypatch.setenv("AGENTFLOW_API_KEY", "secret")
    settings = EngineSettings()
    assert (settings.base_url, settings.api_key) == ("ws://there", "secret")


def test_what_is_no_request() -> None:
    engine, _, _ = engines(["x"])
    with pytest.raises(TypeError, match="Request"):
        engine.complete("What?")


def test_f37_a_request_is_cached_for_its_server(monkeypatch: pytest.MonkeyPatch) -> None:
    servers = {url: connection_through(af.Scripted([f"from {url}"])) for url in ("ws://a:1", "ws://b:1")}
    monkeypatch.setattr(EngineSettings, "connection", lambda settings, model: servers[settings.base_url])
    request = replace(request_of(lm15.Message.user("f37")), model="agentflow/default")
    for _ in range(2):
        for url in servers:
            lm = AgentflowLM(base_url=url, num_retries=0)
            assert lm(request).text == f"from {url}"
            assert lm(request=request).text == f"from {url}"


def test_f37_the_sampled_token_is_not_among_the_likeliest() -> None:
    top = ((TokenLogprob(5, " Paris", -0.1), TokenLogprob(6, " Oslo", -3.0)), ())
    answer = Answer(0, "m", "stop", Usage(), '[{"text":" Rome."}]', (-3.0, -0.5), top, (" Rome", "."))
    told = _response_of(answer).logprobs
    assert [(one.token, one.logprob) for one in told] == [(" Rome", -3.0), (".", -0.5)]
    assert [one.token for one in told[0].top] == [" Paris", " Oslo"]
    older_server = _response_of(replace(answer, tokens=None)).logprobs
    assert [one.token for one in older_server] == [" Oslo", ""]
