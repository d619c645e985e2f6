"""Packages whose purpose is typed output."""

from __future__ import annotations

from typing import Any

import dspy
import instructor
import openai
import outlines
import pytest
from conftest import Server
from mirascope import llm
from subjects import ANSWER, MODEL, Person, weather


@pytest.mark.client("instructor")
class TestInstructor:
    """Without the modes whose schema is only in the prompt's words: they need a model that reads them."""

    @pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA"])
    def test_typed_answers(self, mode: str) -> None:
        client = instructor.from_openai(openai.OpenAI(max_retries=0), mode=instructor.Mode[mode])
        messages: Any = [{"role": "user", "content": "Hello there"}]
        ask = client.chat.completions.create
        answer = ask(model=MODEL, messages=messages, response_model=Person, max_retries=0)
        assert isinstance(answer, Person)


@pytest.mark.client("outlines")
class TestOutlines:
    def test_chat(self) -> None:
        model = outlines.from_openai(openai.OpenAI(max_retries=0), MODEL)
        assert model("Hello there") == "Hello there"

    def test_typed_answers(self) -> None:
        model = outlines.from_openai(openai.OpenAI(max_retries=0), MODEL)
        Person.model_validate_json(model("Hello there", Person))

    def test_grammars(self) -> None:
        client: Any = openai.OpenAI(max_retries=0)
        model = outlines.from_vllm(client, MODEL)
        assert model("Hello there", outlines.regex("[0-9]{3}")).isdigit()


@pytest.mark.client("mirascope")
class TestMirascope:
    @pytest.fixture(params=["completions", "responses"])
    def model(self, request: Any, server: Server) -> Any:
        llm.register_provider("openai", scope="openai/", base_url=server.v1, api_key="no-key")
        return llm.Model(f"openai/{MODEL}:{request.param}")

    def test_chat(self, model: Any) -> None:
        assert model.call("Hello there").text() == "Hello there"

    def test_stream(self, model: Any) -> None:
        assert "".join(model.stream("Hello there").text_stream()).strip() == "Hello there"

    def test_tools(self, model: Any) -> None:
        first = model.call("Hello there", tools=[llm.tool(weather)])
        assert first.resume(first.execute_tools()).text() == ANSWER


@pytest.mark.client("dspy")
class TestDspy:
    """Its own ``dspy.LM``, which is LiteLLM's."""

    def test_chat(self, server: Server) -> None:
        lm = dspy.LM(f"openai/{MODEL}", api_base=server.v1, api_key="no-key", cache=False)
        assert lm("Hello there") == ["Hello there"]
