"""Packages whose purpose is typed output."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import dspy
import instructor
import litellm
import openai
import outlines
import outlines.exceptions
import pytest
from conftest import Server
from instructor.core import InstructorRetryException
from mirascope import llm
from subjects import ANSWER, LONG, MODEL, TOO_LONG, Person, weather


@pytest.mark.client("instructor", tools="a tool is one of its ways to typed output")
class TestInstructor:
    """Without the modes whose schema is only in the prompt's words: they need a model that reads them."""

    @pytest.fixture(params=["TOOLS", "JSON_SCHEMA"])
    def create(self, request: Any) -> Any:
        mode = instructor.Mode[request.param]
        return instructor.from_openai(openai.OpenAI(max_retries=0), mode=mode).chat.completions

    def test_chat(self, create: Any) -> None:
        messages = [{"role": "user", "content": "Hello there"}]
        answer = create.create(model=MODEL, messages=messages, response_model=None)
        assert answer.choices[0].message.content == "Hello there"

    def test_stream(self, create: Any) -> None:
        messages = [{"role": "user", "content": "Hello there"}]
        *_, last = create.create_partial(model=MODEL, messages=messages, response_model=Person)
        Person.model_validate(last.model_dump())

    def test_typed_answers(self, create: Any) -> None:
        messages = [{"role": "user", "content": "Hello there"}]
        answer = create.create(model=MODEL, messages=messages, response_model=Person, max_retries=0)
        assert isinstance(answer, Person)

    def test_errors(self, create: Any) -> None:
        messages = [{"role": "user", "content": TOO_LONG}]
        with pytest.raises(InstructorRetryException):
            create.create(model=MODEL, messages=messages, response_model=Person, max_retries=0)

    def test_aborts(self, server: Server) -> None:
        create: Any = instructor.from_openai(openai.OpenAI(max_retries=0)).chat.completions.create
        with server.aborts():
            messages = [{"role": "user", "content": LONG}]
            chunks = create(model=MODEL, messages=messages, response_model=None, stream=True)
            next(iter(chunks))
            chunks.close()


@pytest.mark.client("outlines", tools="it has none")
class TestOutlines:
    @pytest.fixture
    def model(self) -> Any:
        return outlines.from_openai(openai.OpenAI(max_retries=0), MODEL)

    def test_chat(self, model: Any) -> None:
        assert model("Hello there") == "Hello there"

    def test_stream(self, model: Any) -> None:
        assert "".join(model.stream("Hello there")) == "Hello there"

    def test_typed_answers(self, model: Any) -> None:
        Person.model_validate_json(model("Hello there", Person))

    def test_grammars(self) -> None:
        client: Any = openai.OpenAI(max_retries=0)
        model = outlines.from_vllm(client, MODEL)
        assert model("Hello there", outlines.regex("[0-9]{3}")).isdigit()

    def test_errors(self, model: Any) -> None:
        with pytest.raises(outlines.exceptions.BadRequestError):
            model(TOO_LONG)

    def test_aborts(self, model: Any, server: Server) -> None:
        with server.aborts():
            chunks = model.stream(LONG)
            next(chunks)
            chunks.close()


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

    @pytest.mark.parametrize("mode", ["tool", "strict"])
    def test_typed_answers(self, model: Any, mode: Any) -> None:
        answer = model.call("Hello there", format=llm.format(Person, mode=mode))
        assert isinstance(answer.parse(), Person)

    def test_errors(self, model: Any) -> None:
        with pytest.raises(llm.BadRequestError):
            model.call(TOO_LONG)

    def test_aborts(self, model: Any, server: Server) -> None:
        with server.aborts():
            chunks = model.stream(LONG).text_stream()
            next(chunks)
            chunks.close()


class Weather(dspy.Signature):
    """A question to a tool."""

    question: str = dspy.InputField()
    tools: list[dspy.Tool] = dspy.InputField()
    calls: dspy.ToolCalls = dspy.OutputField()


@pytest.mark.client("dspy")
class TestDspy:
    """Its own ``dspy.LM``, which is LiteLLM's: what LiteLLM does not know, a model cannot do."""

    @pytest.fixture
    def lm(self, server: Server) -> Iterator[Any]:
        abilities = {"supports_function_calling": True, "supports_response_schema": True}
        litellm.register_model({MODEL: {"litellm_provider": "openai", "mode": "chat", **abilities}})
        lm = dspy.LM(f"openai/{MODEL}", api_base=server.v1, api_key="no-key", cache=False, num_retries=0)
        with dspy.context(lm=lm, adapter=dspy.JSONAdapter()):
            yield lm

    def test_chat(self, lm: Any) -> None:
        assert lm("Hello there") == ["Hello there"]

    def test_stream(self, lm: Any) -> None:
        async def run() -> list[Any]:
            program: Any = dspy.streamify(dspy.Predict("question -> answer: int"))
            return [part async for part in program(question="Hello there")]

        *chunks, prediction = asyncio.run(run())
        assert len(chunks) > 1
        assert isinstance(prediction.answer, int)

    def test_tools(self, lm: Any) -> None:
        tool = dspy.Tool(weather)
        calls = dspy.Predict(Weather)(question="Hello there", tools=[tool]).calls
        assert [call.execute([tool]) for call in calls.tool_calls] == ["sunny"]

    def test_typed_answers(self, lm: Any) -> None:
        signature = dspy.Signature("question -> person: Person", custom_types={"Person": Person})
        assert isinstance(dspy.Predict(signature)(question="Hello there").person, Person)

    def test_errors(self, lm: Any) -> None:
        with pytest.raises(dspy.ContextWindowExceededError):
            lm(TOO_LONG)

    def test_aborts(self, lm: Any, server: Server) -> None:
        async def run() -> None:
            program: Any = dspy.streamify(dspy.Predict("question -> answer: int"))
            parts = program(question=LONG)
            await anext(parts)
            await parts.aclose()

        with server.aborts():
            asyncio.run(run())
