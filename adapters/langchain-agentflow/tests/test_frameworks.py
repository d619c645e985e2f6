"""Programs in LangChain on the default model: graphs, agents, chains, and the OpenAI route."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, TypedDict

import pytest
from langchain.agents import create_agent
from langchain_agentflow import ChatAgentflow
from langchain_core.messages import AIMessage, ToolMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

import agentflow as af

EXAMPLES = Path(__file__).parents[3] / "examples"


class City(BaseModel):
    """A city."""

    name: str = Field(max_length=20)
    people: int = Field(ge=0, le=10**8)


class Answer(TypedDict):
    """An answer."""

    is_true: Annotated[bool, ..., "whether it is"]


@tool
def weather(city: str) -> str:
    """Tells the weather in a city."""
    return f"rain in {city}"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A served engine."""
    command = [sys.executable, "-m", "agentflow", "serve", "--port", "0"]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as server:
        assert server.stdout is not None
        line = next(line for line in server.stdout if "ws://" in line)
        yield "ws://" + line.partition("ws://")[2].split()[0]
        server.terminate()


def test_an_agent_calls_its_tools_and_answers():
    """LangChain's own agent, on a model that would do what it is told."""

    def script(prompt: str) -> af.Reply:
        if "<tool>" in prompt:
            return af.Reply("It rains.")
        return af.Reply("", (af.ToolCall("weather", {"city": "Oslo"}, "call_1"),))

    agent = create_agent(ChatAgentflow(backend=af.Scripted(script)), [weather])
    *_, called, result, answer = agent.invoke({"messages": [("user", "What is the weather in Oslo?")]})[
        "messages"
    ]
    assert isinstance(called, AIMessage)
    assert isinstance(result, ToolMessage)
    assert (result.content, answer.content) == ("rain in Oslo", "It rains.")


def test_an_agent_that_ends_with_a_value():
    """LangChain asks for the form next to the tools: either calls, or a value."""

    def script(prompt: str) -> af.Reply:
        if "<tool>" in prompt:
            return af.Reply('{"name": "Oslo", "people": 700000}')
        return af.Reply("", (af.ToolCall("weather", {"city": "Oslo"}, "call_1"),))

    agent = create_agent(ChatAgentflow(backend=af.Scripted(script)), [weather], response_format=City)
    told = agent.invoke({"messages": [("user", "How many people live where it rains?")]})
    assert told["structured_response"] == City(name="Oslo", people=700000)
    assert [type(message) for message in told["messages"]][1:] == [AIMessage, ToolMessage, AIMessage]


def test_a_form_beside_tools_is_kept_on_the_small_model(url):
    model = ChatAgentflow(base_url=url, temperature=0.7, seed=3, max_tokens=100)
    model = model.with_structured_output(City, include_raw=True, tools=[weather])
    found = model.batch(["Tell me of Oslo.", "Tell me of Rome.", "Is it raining in Lima?", "Hello."])
    whole = [one for one in found if one["raw"].response_metadata["finish_reason"] != "length"]
    for one in whole:
        assert bool(one["raw"].tool_calls) != bool(one["raw"].content)
        assert one["raw"].tool_calls or isinstance(one["parsed"], City)
    assert whole


def test_the_example_of_an_agent():
    command = [sys.executable, str(EXAMPLES / "langchain_agent.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("the model calls weather({'city': '") == 2
    assert done.stdout.count("the tool says") == 2
    first, *_, last = (line for line in done.stdout.splitlines() if "prompt tokens" in line)
    assert int(last.split()[3]) > int(first.split()[0])  # all of the first prompt, and more


def test_the_second_turn_of_a_conversation_is_cached():
    model = ChatAgentflow(max_tokens=24)
    messages = [("user", "Name a bird of prey, and say in one sentence how it hunts.")]
    first = model.invoke(messages)
    second = model.invoke([*messages, first, ("user", "And another one?")])
    assert first.usage_metadata is not None
    assert second.usage_metadata is not None
    known = first.usage_metadata["total_tokens"]
    assert second.usage_metadata["input_token_details"]["cache_read"] >= known - 1


@pytest.mark.parametrize("where", ["embedded", "served"])
def test_structure_on_the_small_model(where, request):
    base_url = request.getfixturevalue("url") if where == "served" else None
    model = ChatAgentflow(base_url=base_url, temperature=1.0, seed=7)
    chain = ChatPromptTemplate.from_messages([("user", "Tell me of a city in {where}.")]) | (
        model.with_structured_output(City)
    )
    cities = chain.batch([{"where": place} for place in ("Norway", "Italy", "Egypt", "Peru")])
    assert all(isinstance(city, City) for city in cities)
    answers = model.with_structured_output(Answer, method="function_calling").batch(["Is it?", "Is it not?"])
    assert all(isinstance(answer["is_true"], bool) for answer in answers)


def test_a_map_and_a_reduce_over_chunks(url):
    model = ChatAgentflow(base_url=url, max_tokens=12)
    told = ChatPromptTemplate.from_messages(
        [("system", "You sum up texts in a few words."), ("user", "{text}")]
    )
    summaries = (told | model | StrOutputParser()).batch(
        [{"text": f"Chunk {n}: the sea is cold."} for n in range(8)]
    )
    assert len(summaries) == 8
    assert (told | model).invoke({"text": "\n".join(summaries)}).content


def test_the_openai_route_unmodified(url):
    model = ChatOpenAI(
        base_url=url.replace("ws://", "http://") + "/v1",
        api_key="none",
        model="smollm2-135m",
        temperature=0,
        max_tokens=60,
    )
    assert model.invoke("Hello.").content
    calls = (
        model.bind_tools([weather], tool_choice="any", parallel_tool_calls=False)
        .invoke("In Oslo?")
        .tool_calls
    )
    assert [call["name"] for call in calls] == ["weather"]
    assert isinstance(model.with_structured_output(City, method="json_schema").invoke("A city."), City)
