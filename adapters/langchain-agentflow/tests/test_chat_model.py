"""The chat model as chains use it: tools, structure, many answers, many prompts, cancellation."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from langchain_agentflow import Agentflow, AgentflowInvalidRequestError, ChatAgentflow
from langchain_agentflow.messages import logprobs_of
from langchain_agentflow.tools import choice_of
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.globals import set_llm_cache
from langchain_core.load import dumpd, load
from langchain_core.prompts import ChatPromptTemplate
from pydantic import BaseModel, ValidationError
from settling import until

import agentflow as af
from agentflow.backends.scripted_generator import ScriptedGenerator
from agentflow.integrations import Answer
from agentflow.protocol.events import TokenLogprob

PROMPTS: list[str] = []


class Joke(BaseModel):
    """A joke."""

    setup: str
    punchline: str


def weather(city: str) -> str:
    """The weather in a city."""
    return f"rain in {city}"


def echo(prompt: str) -> str:
    PROMPTS.append(prompt)
    return f"Answer to {prompt.partition('</user>')[0].rpartition('>')[2]}"


def on_script(script: Any = echo, **fields: Any) -> ChatAgentflow:
    PROMPTS.clear()
    return ChatAgentflow(backend=af.Scripted(script), **fields)


# Tools and structure


@pytest.mark.parametrize(
    ("choice", "parallel", "expected"),
    [
        (None, None, ("auto", None, True)),
        (False, None, ("auto", None, True)),
        ("auto", False, ("auto", None, False)),
        ("none", None, ("none", None, True)),
        ("any", None, ("required", None, False)),
        ("required", True, ("required", None, True)),
        (True, None, ("required", None, False)),
        ("weather", True, ("required", "weather", False)),
        ({"type": "function", "function": {"name": "weather"}}, None, ("required", "weather", False)),
        ({"type": "tool", "name": "weather"}, None, ("required", "weather", False)),
        ({"type": "any"}, None, ("required", None, False)),
    ],
)
def test_every_tool_choice(choice, parallel, expected):
    chosen = choice_of(choice, ["weather"], parallel=parallel)
    assert (chosen.mode, chosen.name, chosen.parallel) == expected


def test_a_tool_choice_that_is_not_there_is_refused_at_once():
    with pytest.raises(AgentflowInvalidRequestError, match="names 'sing', and the tools are: weather"):
        on_script().bind_tools([weather], tool_choice="sing")


@pytest.mark.parametrize("method", ["json_schema", "json_mode", "function_calling"])
def test_structured_output_by_each_method(method):
    value = '{"setup": "Why?", "punchline": "So."}'
    answer = af.ToolCall("Joke", json.loads(value)) if method == "function_calling" else value
    model = on_script(lambda _: answer)
    assert model.with_structured_output(Joke, method=method).invoke("A joke.") == Joke(
        setup="Why?", punchline="So."
    )
    as_dict = model.with_structured_output(Joke.model_json_schema(), method=method).invoke("A joke.")
    assert as_dict == {"setup": "Why?", "punchline": "So."}
    raw = model.with_structured_output(Joke, method=method, include_raw=True).invoke("A joke.")
    assert (raw["parsed"].setup, raw["parsing_error"]) == ("Why?", None)


def test_a_value_that_was_cut_off_is_a_parsing_error():
    model = on_script(lambda _: '{"setup": "Why is it so"}', max_tokens=2)
    raw = model.with_structured_output(Joke, include_raw=True).invoke("A joke.")
    assert raw["parsed"] is None
    assert raw["parsing_error"] is not None
    assert raw["raw"].response_metadata["finish_reason"] == "length"


def test_a_constraint_can_be_bound():
    model = on_script(["maybe", "yes"])
    with pytest.raises(Exception, match="which violates the regex constraint"):
        model.bind(regex="yes|no").invoke("Is it?")
    assert model.bind(regex="yes|no").invoke("Is it?").content == "yes"


# Many answers, many prompts


def test_n_answers_are_a_fork_of_one_prompt():
    answers = iter(["One.", "Two.", "Three."])
    model = on_script(lambda _: next(answers), n=3)
    result = model._generate(_messages("Say."))
    assert sorted(one.message.content for one in result.generations) == ["One.", "Three.", "Two."]


def _messages(text: str) -> list[Any]:
    return ChatPromptTemplate.from_messages([("user", "{text}")]).invoke({"text": text}).to_messages()


def test_a_batch_is_answered_in_order():
    questions = [f"question {n}" for n in range(40)]
    answers = on_script().batch(questions)
    assert [answer.content for answer in answers] == [f"Answer to {question}" for question in questions]


class AllAtOnce(BaseCallbackHandler):
    """No call continues before all have begun."""

    raise_error = True

    def __init__(self, count: int) -> None:
        self._barrier = threading.Barrier(count, timeout=30)

    def on_chat_model_start(self, *args: Any, **kwargs: Any) -> None:
        self._barrier.wait()


@pytest.mark.parametrize("chained", [False, True])
def test_all_of_a_batch_is_asked_at_once(chained):
    model = on_script()
    asked = [{"x": str(n)} for n in range(50)] if chained else [str(n) for n in range(50)]
    asking = (ChatPromptTemplate.from_messages([("user", "{x}")]) | model) if chained else model
    assert len(asking.batch(asked, {"callbacks": [AllAtOnce(50)]})) == 50


async def test_a_batch_without_threads():
    questions = [f"question {n}" for n in range(40)]
    before = threading.active_count()
    answers = await on_script().abatch(questions)
    assert [answer.content for answer in answers] == [f"Answer to {question}" for question in questions]
    assert threading.active_count() <= before + 2  # the session's, and the watch of its event loop


def test_a_failure_in_a_batch_can_be_returned():
    model = on_script(lambda p: ValueError("no") if "bad" in p else "fine")
    good, bad = model.batch(["good", "bad"], return_exceptions=True)
    assert good.content == "fine"
    assert isinstance(bad, Exception)


class EndlessGenerator(ScriptedGenerator):
    """Says some words, and then nothing until it is cancelled."""

    async def _stream(self, context: Any, answer: str, name: str, params: Any, on_text: Any, _: Any) -> Any:
        self.num_running += 1
        try:
            for _ in range(4):  # a chain may look one ahead
                on_text("word ")
                await anyio.lowlevel.checkpoint()
            await anyio.sleep_forever()
        finally:
            self.num_running -= 1


def endless() -> af.Scripted:
    backend = af.Scripted([])
    backend.generator = EndlessGenerator(lambda _: "")
    return backend


# Ways to call it


async def test_one_model_in_several_loops_and_threads():
    model = on_script()
    assert (await model.ainvoke("a")).content == "Answer to a"
    assert await asyncio.to_thread(lambda: asyncio.run(model.ainvoke("b")).content) == "Answer to b"
    assert (await asyncio.to_thread(model.invoke, "c")).content == "Answer to c"
    assert [chunk.content async for chunk in model.astream("d")] == ["Answer", " to", " d", ""]
    assert [chunk.content for chunk in model.stream("e")] == ["Answer", " to", " e", ""]


async def test_cancelling_a_chain_cancels_the_work():
    backend = endless()
    model = ChatAgentflow(backend=backend)
    chain = ChatPromptTemplate.from_messages([("user", "{x}")]) | model
    begun = asyncio.Event()

    async def read() -> None:
        async for _ in chain.astream({"x": "Go on."}):
            begun.set()

    async with anyio.create_task_group() as group:
        group.start_soon(read)
        await begun.wait()
        assert backend.generator.num_running == 1
        group.cancel_scope.cancel()
    # In a thread: LangChain closes its iterators in this loop.
    generator = backend.generator
    await asyncio.to_thread(until, model, lambda: (generator.num_running, generator.num_open) == (0, 0))


def test_leaving_a_stream_cancels_the_work():
    backend = endless()
    model = ChatAgentflow(backend=backend)
    for _ in model.stream("Go on."):
        break
    until(model, lambda: (backend.generator.num_running, backend.generator.num_open) == (0, 0))


def test_a_model_can_be_saved_without_its_key():
    model = ChatAgentflow(model="smollm2-135m", api_key="hunter2", temperature=0.5)
    saved = dumpd(model)
    assert "hunter2" not in str(saved)
    again = load(
        saved,
        valid_namespaces=["langchain_agentflow"],
        secrets_map={"AGENTFLOW_API_KEY": "hunter2"},
        allowed_objects=[ChatAgentflow],
    )
    assert again == model


@pytest.mark.parametrize(("asked", "stops"), [(None, ("a",)), ("END", ("END",)), (["b", "c"], ("b", "c"))])
def test_a_calls_own_stop_takes_the_place_of_the_models(asked, stops):
    told = ChatAgentflow(stop="a")._call([], asked, {})
    assert told.output.params.stop == stops


def test_models_on_one_backend_share_a_session():
    backend = af.Scripted(lambda _: "Yes.")
    first, second = ChatAgentflow(backend=backend), ChatAgentflow(backend=backend, temperature=1.0)
    assert first.connection() is second.connection()
    assert ChatAgentflow(backend=af.Scripted([])).connection() is not first.connection()
    assert "max_input_tokens" not in first.profile


SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}}}


@pytest.mark.parametrize(
    ("asked", "source"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, {"type": "object"}),
        ({"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}, SCHEMA),
    ],
)
def test_the_form_of_an_answer_as_openai_asks_for_it(asked, source):
    told = ChatAgentflow()._call([], None, {"response_format": asked, "strict": True})
    constraint = told.output.value_type.constraint
    assert (None if constraint is None else json.loads(constraint.source)) == source


def test_a_form_that_is_none_is_refused():
    with pytest.raises(AgentflowInvalidRequestError, match="response_format"):
        ChatAgentflow().invoke("Hello.", response_format={"type": "xml"})


def test_what_there_is_no_parameter_for_is_refused():
    with pytest.raises(AgentflowInvalidRequestError, match="there is no parameter temprature"):
        on_script().invoke("x", temprature=1)


# Text


def test_the_text_model_goes_on_with_each_prompt():
    model = Agentflow(backend=af.Scripted(lambda prompt: f"{len(prompt)} and more words"), max_tokens=2)
    assert model.invoke("12345") == "5 and"
    assert model.batch(["1", "22"]) == ["1 and", "2 and"]
    result = model.generate(["1", "22", "333"])
    assert result.llm_output == {
        "model_name": "scripted",
        "token_usage": {
            "prompt_tokens": 3,
            "cached_tokens": 0,
            "completion_tokens": 6,
            "total_tokens": 9,
        },
    }
    assert list(model.stream("4444")) == ["4", " and", ""]


async def test_the_text_model_in_a_loop():
    model = Agentflow(backend=af.Scripted(lambda prompt: f"{len(prompt)} and more words"), max_tokens=2)
    assert await model.ainvoke("12345") == "5 and"
    assert await model.abatch(["1", "22"]) == ["1 and", "2 and"]
    assert [piece async for piece in model.astream("4444")] == ["4", " and", ""]


# As for ChatOpenAI


@pytest.mark.parametrize(
    ("pasted", "fields"),
    [
        ({"max_completion_tokens": 7}, {"max_tokens": 7}),
        ({"model_kwargs": {"top_k": 3, "seed": 5}}, {"top_k": 3, "seed": 5}),
        ({"extra_body": {"repetition_penalty": 1.2}, "model_kwargs": None}, {"repetition_penalty": 1.2}),
        ({"openai_api_base": "http://127.0.0.1:8410/v1"}, {"base_url": "ws://127.0.0.1:8410"}),
        ({"base_url": "https://models.example/v1/"}, {"base_url": "wss://models.example"}),
        ({"request_timeout": 9.0, "stop_sequences": ["z"], "stream_usage": True}, {"timeout": 9.0}),
    ],
)
def test_f25a_the_names_of_chat_openai_are_taken(pasted: dict[str, Any], fields: dict[str, Any]) -> None:
    model = ChatAgentflow(**pasted)
    assert {name: getattr(model, name) for name in fields} == fields
    key = ChatAgentflow(openai_api_key="af-ann").api_key
    assert key is not None
    assert key.get_secret_value() == "af-ann"


@pytest.mark.parametrize("call", [{"max_completion_tokens": 2}, {"extra_body": {"max_tokens": 2}}])
def test_f25a_a_call_takes_them_too(call: dict[str, Any]) -> None:
    backend = af.Scripted(lambda _: "one two three four")
    assert Agentflow(backend=backend).invoke("Hi", **call) == "one two"
    assert ChatAgentflow(backend=backend).bind(**call).invoke("Hi").content == "one two"


@pytest.mark.parametrize(
    ("pasted", "name"),
    [
        ({"default_headers": {"a": "b"}}, "default_headers"),
        ({"model_kwargs": {"nothing": 1}}, "nothing"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
    ],
)
def test_f25a_what_has_no_counterpart_is_rejected_by_name(pasted: dict[str, Any], name: str) -> None:
    with pytest.raises(ValidationError, match=name):
        ChatAgentflow(**pasted)


def test_f25b_log_probabilities_have_the_tokens_text_and_bytes() -> None:
    likeliest = (TokenLogprob(4, "b", -0.5), TokenLogprob(5, "\N{REPLACEMENT CHARACTER}", -2.0))
    answer = Answer(
        0,
        "m",
        "eos",
        af.Usage(1, 0, 2),
        "a\N{SNOWMAN}",
        (-0.1, -0.5),
        (None, likeliest),
        ("a", "\N{SNOWMAN}"),
    )
    assert logprobs_of(answer) == [
        {"token": "a", "bytes": [97], "logprob": -0.1, "top_logprobs": []},
        {
            "token": "\N{SNOWMAN}",
            "bytes": [0xE2, 0x98, 0x83],
            "logprob": -0.5,
            "top_logprobs": [
                {"token": "b", "bytes": [98], "logprob": -0.5},
                {"token": "\N{REPLACEMENT CHARACTER}", "bytes": None, "logprob": -2.0},
            ],
        },
    ]
    assert logprobs_of(replace(answer, tokens=None))[0]["token"] is None


# LangChain's cache


@pytest.fixture
def llm_cache() -> Iterator[InMemoryCache]:
    cache = InMemoryCache()
    set_llm_cache(cache)
    yield cache
    set_llm_cache(None)


@pytest.mark.parametrize("kind", [ChatAgentflow, Agentflow])
def test_f37_the_global_cache_does_not_mix_backends(kind: Any, llm_cache: InMemoryCache) -> None:
    for name in "AB":
        model = kind(backend=af.Scripted(lambda prompt, name=name: f"from {name}"))
        for answer in (model.invoke("hi"), asyncio.run(model.ainvoke("hi"))):
            assert getattr(answer, "content", answer) == f"from {name}"
        assert model.cache is False  # as wired chains read it
    assert not llm_cache._cache


@pytest.mark.parametrize("kind", [ChatAgentflow, Agentflow])
def test_f37_a_given_cache_does_not_mix_backends(kind: Any) -> None:
    cache, backends = InMemoryCache(), [af.Scripted([f"from {name}"]) for name in "AB"]
    for _ in range(2):
        for name, backend in zip("AB", backends, strict=True):
            answer = kind(backend=backend, cache=cache).invoke("hi")
            assert getattr(answer, "content", answer) == f"from {name}"
    assert len(cache._cache) == 2


_KEY_OF_CACHE = """
import agentflow as af, langchain_agentflow as lc
for model in ("a", "b"):
    for backend in (af.Embedded(model), af.Remote("ws://there", model=model, api_key="secret")):
        print(lc.ChatAgentflow(backend=backend)._get_llm_string())
        print(lc.Agentflow(backend=backend).dict())
print(lc.ChatAgentflow(backend=af.OpenAICompatible("http://ann:secret@there/v1", "a"))._get_llm_string())
"""


def test_f37_a_persistent_cache_finds_the_answers_of_a_backend_again() -> None:
    commands = [[sys.executable, "-c", _KEY_OF_CACHE]] * 2
    first, second = [
        subprocess.run(one, capture_output=True, check=True, text=True).stdout for one in commands
    ]
    assert first == second
    assert len({*first.splitlines()}) == 9
    assert "secret" not in first


@pytest.mark.parametrize("kind", [ChatAgentflow, Agentflow])
def test_f37_a_given_cache_is_used_with_a_backend(kind: Any, llm_cache: InMemoryCache) -> None:
    own = InMemoryCache()
    for cache, used in ((True, llm_cache), (own, own)):
        model = kind(backend=af.Scripted(["once"]), cache=cache)
        assert model.invoke("hi") is not None
        assert model.invoke("hi") is not None
        assert len(used._cache) == 1
    assert kind(base_url="ws://there").cache is None  # the key has the address
