"""The clients of the APIs' makers, and those that pass requests on."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import anthropic
import litellm
import llm
import openai
import pytest
from conftest import Server
from subjects import ANSWER, LONG, MODEL, TOO_LONG, WEATHER_SCHEMA, WEATHER_TOOL, Person, weather

HELLO: Any = [{"role": "user", "content": "Hello there"}]
TOOLS: Any = [{"type": "function", "function": WEATHER_TOOL}]
ANTHROPIC_TOOLS: Any = [
    {"name": "weather", "description": "Returns the weather.", "input_schema": WEATHER_SCHEMA}
]


@pytest.mark.client("openai")
class TestOpenai:
    """Chat Completions and Responses."""

    @pytest.fixture
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(max_retries=0)

    def test_chat(self, client: openai.OpenAI) -> None:
        answer = client.chat.completions.create(model=MODEL, messages=HELLO)
        assert answer.choices[0].message.content == "Hello there"
        assert client.responses.create(model=MODEL, input="Hello there").output_text == "Hello there"

    def test_stream(self, client: openai.OpenAI) -> None:
        with client.chat.completions.stream(model=MODEL, messages=HELLO) as chat:
            assert chat.get_final_completion().choices[0].message.content == "Hello there"
        with client.responses.stream(model=MODEL, input="Hello there") as response:
            kinds = [event.type for event in response]
            assert response.get_final_response().output_text == "Hello there"
        assert "response.output_text.delta" in kinds

    def test_tools(self, client: openai.OpenAI) -> None:
        messages = [*HELLO]
        first = client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS).choices[0]
        assert first.message.tool_calls is not None
        call: Any = first.message.tool_calls[0]
        result = weather(**json.loads(call.function.arguments))
        messages += [first.message, {"role": "tool", "tool_call_id": call.id, "content": result}]
        second = client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS)
        assert second.choices[0].message.content == ANSWER

    def test_tools_of_responses(self, client: openai.OpenAI) -> None:
        tools: Any = [{"type": "function", "strict": False, **WEATHER_TOOL}]
        first = client.responses.create(model=MODEL, input="Hello there", tools=tools)
        [call] = [item for item in first.output if item.type == "function_call"]
        result = weather(**json.loads(call.arguments))
        results: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": result}]
        second = client.responses.create(
            model=MODEL, previous_response_id=first.id, input=results, tools=tools
        )
        assert second.output_text == ANSWER

    def test_typed_answers(self, client: openai.OpenAI) -> None:
        schema = Person.model_json_schema()
        schema["additionalProperties"] = False
        form: Any = {"type": "json_schema", "json_schema": {"name": "Person", "schema": schema}}
        answer = client.chat.completions.create(model=MODEL, messages=HELLO, response_format=form)
        Person.model_validate_json(answer.choices[0].message.content or "")

    def test_errors(self, client: openai.OpenAI) -> None:
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(model="nothing", messages=HELLO)
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": TOO_LONG}])

    def test_aborts(self, client: openai.OpenAI, server: Server) -> None:
        messages: Any = [{"role": "user", "content": LONG}]
        with (
            server.aborts(),
            client.chat.completions.create(model=MODEL, messages=messages, stream=True) as chunks,
        ):
            next(iter(chunks))
        with (
            server.aborts(),
            client.responses.create(model=MODEL, input=LONG, stream=True, store=False) as events,
        ):
            next(event for event in events if event.type == "response.output_text.delta")


@pytest.mark.client("anthropic")
class TestAnthropic:
    @pytest.fixture
    def client(self) -> anthropic.Anthropic:
        return anthropic.Anthropic(max_retries=0)

    def test_chat(self, client: anthropic.Anthropic) -> None:
        answer = client.messages.create(model=MODEL, messages=HELLO, max_tokens=100)
        assert [block.text for block in answer.content if block.type == "text"] == ["Hello there"]

    def test_stream(self, client: anthropic.Anthropic) -> None:
        with client.messages.stream(model=MODEL, messages=HELLO, max_tokens=100) as stream:
            assert "".join(stream.text_stream) == "Hello there"

    def test_tools(self, client: anthropic.Anthropic) -> None:
        messages = [*HELLO]
        first = client.messages.create(model=MODEL, messages=messages, max_tokens=200, tools=ANTHROPIC_TOOLS)
        [call] = [block for block in first.content if block.type == "tool_use"]
        arguments: Any = call.input
        result = {"type": "tool_result", "tool_use_id": call.id, "content": weather(**arguments)}
        messages += [
            {"role": "assistant", "content": first.content},
            {"role": "user", "content": [result]},
        ]
        second = client.messages.create(model=MODEL, messages=messages, max_tokens=200, tools=ANTHROPIC_TOOLS)
        assert [block.text for block in second.content if block.type == "text"] == [ANSWER]

    def test_typed_answers(self, client: anthropic.Anthropic) -> None:
        answer = client.messages.parse(model=MODEL, messages=HELLO, max_tokens=200, output_format=Person)
        assert isinstance(answer.parsed_output, Person)

    def test_errors(self, client: anthropic.Anthropic) -> None:
        with pytest.raises(anthropic.NotFoundError):
            client.messages.create(model="nothing", messages=HELLO, max_tokens=10)
        with pytest.raises(anthropic.BadRequestError):
            client.messages.create(
                model=MODEL, messages=[{"role": "user", "content": TOO_LONG}], max_tokens=10
            )

    def test_aborts(self, client: anthropic.Anthropic, server: Server) -> None:
        messages: Any = [{"role": "user", "content": LONG}]
        with (
            server.aborts(),
            client.messages.stream(model=MODEL, messages=messages, max_tokens=30_000) as stream,
        ):
            next(stream.text_stream)


@pytest.mark.client("litellm")
class TestLitellm:
    """Its bridges to Chat Completions, to the Responses API and to Anthropic's."""

    def test_chat(self, server: Server) -> None:
        for name, base in (("openai", server.v1), ("anthropic", server.url), ("hosted_vllm", server.v1)):
            answer: Any = litellm.completion(f"{name}/{MODEL}", HELLO, api_base=base, max_tokens=100)
            assert answer.choices[0].message.content == "Hello there"

    def test_responses(self, server: Server) -> None:
        answer: Any = litellm.responses(model=f"openai/{MODEL}", input="Hello there", api_base=server.v1)
        assert answer.output_text == "Hello there"

    def test_stream(self, server: Server) -> None:
        chunks: Any = litellm.completion(f"openai/{MODEL}", HELLO, api_base=server.v1, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Hello there"

    @pytest.mark.parametrize("name", ["openai", "anthropic"])
    def test_tools(self, server: Server, name: str) -> None:
        base = server.url if name == "anthropic" else server.v1
        messages = [*HELLO]
        first: Any = litellm.completion(f"{name}/{MODEL}", messages, tools=TOOLS, api_base=base)
        [call] = first.choices[0].message.tool_calls
        result = weather(**json.loads(call.function.arguments))
        messages += [first.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": result}]
        second: Any = litellm.completion(f"{name}/{MODEL}", messages, tools=TOOLS, api_base=base)
        assert second.choices[0].message.content == ANSWER

    def test_typed_answers(self, server: Server) -> None:
        answer: Any = litellm.completion(
            f"hosted_vllm/{MODEL}", HELLO, response_format=Person, api_base=server.v1
        )
        Person.model_validate_json(answer.choices[0].message.content)

    def test_errors(self, server: Server) -> None:
        with pytest.raises(litellm.NotFoundError):
            litellm.completion("openai/nothing", HELLO, api_base=server.v1, num_retries=0)
        too_long = [{"role": "user", "content": TOO_LONG}]
        with pytest.raises(litellm.ContextWindowExceededError):
            litellm.completion(f"openai/{MODEL}", too_long, api_base=server.v1, num_retries=0)

    @pytest.mark.parametrize("name", ["openai", "anthropic"])
    def test_aborts(self, server: Server, name: str) -> None:
        base = server.url if name == "anthropic" else server.v1
        messages = [{"role": "user", "content": LONG}]

        async def run() -> None:
            chunks: Any = await litellm.acompletion(
                f"{name}/{MODEL}", messages, api_base=base, stream=True, max_tokens=30_000
            )
            await anext(aiter(chunks))
            await chunks.aclose()

        with server.aborts():
            asyncio.run(run())


@pytest.mark.client("llm")
class TestLlm:
    @pytest.fixture
    def model(self, server: Server, tmp_path: Any) -> llm.Model:
        known = {"model_id": "ours", "model_name": MODEL, "api_base": server.v1, "api_key_name": "none"}
        (tmp_path / "extra-openai-models.yaml").write_text(
            json.dumps([{**known, "supports_tools": True, "supports_schema": True}]), encoding="utf-8"
        )
        return llm.get_model("ours")

    def test_chat(self, model: llm.Model) -> None:
        assert model.prompt("Hello there", stream=False).text() == "Hello there"

    def test_stream(self, model: llm.Model) -> None:
        assert "".join(model.prompt("Hello there")) == "Hello there"

    def test_tools(self, model: llm.Model) -> None:
        assert model.chain("Hello there", tools=[weather]).text() == ANSWER

    def test_typed_answers(self, model: llm.Model) -> None:
        Person.model_validate_json(model.prompt("Hello there", schema=Person).text())

    def test_errors(self, model: llm.Model) -> None:
        with pytest.raises(openai.BadRequestError):
            model.prompt(TOO_LONG).text()

    def test_aborts(self, model: llm.Model, server: Server) -> None:
        with server.aborts():
            chunks: Any = iter(model.prompt(LONG))
            next(chunks)
            chunks.close()
