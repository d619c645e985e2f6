"""examples/pydantic_ai_agent.py on a server, and pydantic-ai's other ways to a value."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest
from support.commands import run_python

EXAMPLE = Path(__file__).parents[2] / "examples" / "pydantic_ai_agent.py"


@pytest.fixture(scope="module")
def url(model_url: str) -> str:
    return model_url.replace("ws://", "http://") + "/v1"


def test_the_example(url: str) -> None:
    done = run_python(EXAMPLE, "--url", url)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("the model calls weather({") == 2
    assert done.stdout.count("Report(city='") == 2
    assert "the tool says  24 degrees and sun in Rome" in done.stdout


def test_the_example_without_a_server(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from pydantic_ai_agent import main

    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), "--url", "http://127.0.0.1:1/v1"])
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)  # else pydantic-ai would leave one open
    try:
        assert main() == 1
    finally:
        asyncio.set_event_loop(None)
        loop.close()
    assert "`agentflow serve`" in " ".join(capsys.readouterr().out.split())


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_value_is_the_answer_itself_beside_tools(url: str) -> None:
    """A response format, as OpenAI calls it: with tools, an answer is either calls or the value."""
    import openai
    from pydantic_ai import Agent, ModelSettings, NativeOutput, Tool
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider
    from pydantic_ai_agent import Report, until_first_result, weather

    async with openai.AsyncOpenAI(base_url=url, api_key="none") as client:
        agent = Agent(
            OpenAIChatModel("smollm2-135m", provider=OpenAIProvider(openai_client=client)),
            output_type=NativeOutput(Report),
            tools=[Tool(weather, prepare=until_first_result)],
            model_settings=ModelSettings(temperature=0.0, max_tokens=100, parallel_tool_calls=False),
        )
        found = await agent.run("What is the weather in Rome?")
    assert isinstance(found.output, Report)
