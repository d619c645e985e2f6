"""Frameworks that run a loop of tools, to its end."""

from __future__ import annotations

import asyncio
import warnings
from pathlib import Path
from typing import Any

import agents
import openai
import pydantic_ai
import pytest
import smolagents
from autogen_agentchat.agents import AssistantAgent
from autogen_core import CancellationToken
from autogen_core.models import ModelFamily, UserMessage
from autogen_ext.models.openai import OpenAIChatCompletionClient
from conftest import Server
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from subjects import ANSWER, LONG, MODEL, TOO_LONG, Person, weather


@pytest.mark.client("openai-agents")
class TestOpenaiAgents:
    """The default model is that of the Responses API."""

    @pytest.fixture(params=["responses", "chat"])
    def agent(self, request: Any) -> agents.Agent[None]:
        agents.set_default_openai_api("responses" if request.param == "responses" else "chat_completions")
        return agents.Agent("one", model=MODEL)

    def test_chat(self, agent: agents.Agent[None]) -> None:
        assert asyncio.run(agents.Runner.run(agent, "Hello there")).final_output == "Hello there"

    def test_stream(self, agent: agents.Agent[None]) -> None:
        async def run() -> Any:
            result = agents.Runner.run_streamed(agent, "Hello there")
            kinds = {event.type async for event in result.stream_events()}
            return kinds, result.final_output

        kinds, output = asyncio.run(run())
        assert "raw_response_event" in kinds
        assert output == "Hello there"

    def test_tools(self, agent: agents.Agent[None]) -> None:
        agent.tools = [agents.function_tool(weather)]
        assert asyncio.run(agents.Runner.run(agent, "Hello there")).final_output == ANSWER

    def test_typed_answers(self, agent: agents.Agent[None]) -> None:
        agent.output_type = agents.AgentOutputSchema(Person, strict_json_schema=False)
        assert isinstance(asyncio.run(agents.Runner.run(agent, "Hello there")).final_output, Person)

    def test_handoffs(self, agent: agents.Agent[None]) -> None:
        other = agents.Agent("other", model=MODEL)
        agent.handoffs = [other]
        result = asyncio.run(agents.Runner.run(agent, "Hello there"))
        assert result.last_agent is other

    def test_errors(self, agent: agents.Agent[None]) -> None:
        with pytest.raises(openai.BadRequestError):
            asyncio.run(agents.Runner.run(agent, TOO_LONG))

    def test_aborts(self, agent: agents.Agent[None], server: Server) -> None:
        async def run() -> None:
            result = agents.Runner.run_streamed(agent, LONG)
            async for event in result.stream_events():
                if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
                    result.cancel()

        with server.aborts():
            asyncio.run(run())


@pytest.mark.client("pydantic-ai-slim")
class TestPydanticAi:
    """Not its model for Anthropic: this version passes options that Anthropic's package no longer takes."""

    @pytest.fixture(params=[OpenAIResponsesModel, OpenAIChatModel])
    def model(self, request: Any) -> Any:
        return request.param(MODEL)

    def test_chat(self, model: Any) -> None:
        assert pydantic_ai.Agent(model).run_sync("Hello there").output == "Hello there"

    def test_stream(self, model: Any) -> None:
        async def run() -> list[str]:
            async with pydantic_ai.Agent(model).run_stream("Hello there") as result:
                return [text async for text in result.stream_text(debounce_by=None)]

        assert asyncio.run(run())[-1] == "Hello there"

    def test_tools(self, model: Any) -> None:
        agent = pydantic_ai.Agent(model, tools=[weather])
        assert agent.run_sync("Hello there").output == ANSWER

    def test_tools_of_any_schema(self, model: Any) -> None:
        """The grammar keeps the nearest looser form of what it cannot express."""

        def forecast(city: str, days: set[str], station: Path) -> str:
            return weather(city)

        assert pydantic_ai.Agent(model, tools=[forecast]).run_sync("Hello there").output == ANSWER

    def test_typed_answers(self, model: Any) -> None:
        agent = pydantic_ai.Agent(model, output_type=Person)
        assert isinstance(agent.run_sync("Hello there").output, Person)

    def test_native_typed_answers(self, model: Any) -> None:
        agent = pydantic_ai.Agent(model, output_type=pydantic_ai.NativeOutput(Person, strict=False))
        assert isinstance(agent.run_sync("Hello there").output, Person)

    def test_errors(self) -> None:
        with pytest.raises(pydantic_ai.ModelHTTPError) as raised:
            pydantic_ai.Agent(OpenAIChatModel("nothing")).run_sync("Hello there")
        assert raised.value.status_code == 404

    def test_aborts(self, model: Any, server: Server) -> None:
        async def run() -> None:
            async with pydantic_ai.Agent(model).run_stream(LONG) as result:
                async for _ in result.stream_text(debounce_by=None):
                    task = asyncio.current_task()
                    assert task is not None
                    task.cancel()

        with server.aborts(), pytest.raises(asyncio.CancelledError):
            asyncio.run(run())


@pytest.mark.client("smolagents")
class TestSmolagents:
    @pytest.fixture
    def model(self, server: Server) -> Any:
        return smolagents.OpenAIModel(MODEL, api_base=server.v1, api_key="no-key")

    def test_chat(self, model: Any) -> None:
        assert model([{"role": "user", "content": "Hello there"}]).content == "Hello there"

    def test_stream(self, model: Any) -> None:
        deltas = model.generate_stream([{"role": "user", "content": "Hello there"}])
        assert "".join(delta.content or "" for delta in deltas) == "Hello there"

    def test_tools(self, model: Any) -> None:
        agent = smolagents.ToolCallingAgent([smolagents.tool(weather)], model, max_steps=3, verbosity_level=0)
        assert agent.run("Hello there", return_full_result=True).state == "success"

    def test_typed_answers(self, model: Any) -> None:
        form = {
            "type": "json_schema",
            "json_schema": {"name": "Person", "schema": Person.model_json_schema()},
        }
        answer = model([{"role": "user", "content": "Hello there"}], response_format=form)
        Person.model_validate_json(answer.content)

    def test_errors(self, model: Any) -> None:
        agent = smolagents.ToolCallingAgent([], model, max_steps=1, verbosity_level=0)
        with pytest.raises(smolagents.AgentGenerationError):
            agent.run(TOO_LONG)

    def test_aborts(self, model: Any, server: Server) -> None:
        with server.aborts():
            deltas = model.generate_stream([{"role": "user", "content": LONG}])
            next(delta for delta in deltas if delta.content)
            deltas.close()


@pytest.mark.client("autogen-ext")
class TestAutogen:
    @pytest.fixture
    def client(self, server: Server) -> Any:
        info: Any = {
            "vision": False,
            "function_calling": True,
            "json_output": True,
            "structured_output": True,
            "family": ModelFamily.UNKNOWN,
        }
        return OpenAIChatCompletionClient(
            model=MODEL, base_url=server.v1, api_key="no-key", model_info=info, max_retries=0
        )

    def test_chat(self, client: Any) -> None:
        answer = asyncio.run(client.create([UserMessage(content="Hello there", source="user")]))
        assert answer.content == "Hello there"

    def test_stream(self, client: Any) -> None:
        async def run() -> list[Any]:
            messages = [UserMessage(content="Hello there", source="user")]
            return [chunk async for chunk in client.create_stream(messages)]

        *pieces, whole = asyncio.run(run())
        assert "".join(pieces) == whole.content == "Hello there"

    def test_tools(self, client: Any) -> None:
        agent = AssistantAgent("one", client, tools=[weather], reflect_on_tool_use=True)
        result: Any = asyncio.run(agent.run(task="Hello there"))
        assert result.messages[-1].content == ANSWER

    def test_typed_answers(self, client: Any) -> None:
        messages = [UserMessage(content="Hello there", source="user")]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            answer = asyncio.run(client.create(messages, json_output=Person))
        Person.model_validate_json(answer.content)

    def test_errors(self, client: Any) -> None:
        with pytest.raises(openai.BadRequestError):
            asyncio.run(client.create([UserMessage(content=TOO_LONG, source="user")]))

    def test_aborts(self, client: Any, server: Server) -> None:
        async def run() -> None:
            token = CancellationToken()
            messages = [UserMessage(content=LONG, source="user")]
            async for _ in client.create_stream(messages, cancellation_token=token):
                token.cancel()

        with server.aborts(), pytest.raises(asyncio.CancelledError):
            asyncio.run(run())
