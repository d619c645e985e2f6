"""A pydantic-ai agent on an agentflow server: plain pydantic-ai with another base URL.

The agent calls a tool and returns a value of a type. Both are decoded under their schemas, so even a small
model makes valid calls and valid values.

    pip install "pydantic-ai-slim[openai]"
    agentflow serve
    python examples/pydantic_ai_agent.py [--url http://127.0.0.1:8410/v1]
"""

from __future__ import annotations

import argparse
import sys
from typing import Literal

from pydantic import BaseModel, Field
from pydantic_ai import Agent, ModelResponse, ModelSettings, RunContext, Tool
from pydantic_ai.exceptions import AgentRunError
from pydantic_ai.messages import ModelMessage, RetryPromptPart, ToolCallPart, ToolReturnPart
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.tools import ToolDefinition
from rich.console import Console

DEFAULT_URL = "http://127.0.0.1:8410/v1"
WEATHER = {"Oslo": "3 degrees and rain", "Rome": "24 degrees and sun", "Cairo": "35 degrees and dust"}
QUESTIONS = ["What is the weather in Rome?", "Is it raining in Oslo?"]


class Report(BaseModel):
    """The weather in a city."""

    city: Literal["Oslo", "Rome", "Cairo"]
    degrees: int = Field(ge=-90, le=60)
    sky: Literal["rain", "sun", "dust"]


def weather(city: Literal["Oslo", "Rome", "Cairo"]) -> str:
    """Tells the weather in a city."""
    return f"{WEATHER[city]} in {city}"


async def until_first_result(run: RunContext[None], tool: ToolDefinition) -> ToolDefinition | None:
    """Hides the tool after its first result, because very small models call it forever."""
    parts = [part for message in run.messages for part in message.parts]
    return None if any(isinstance(part, ToolReturnPart) for part in parts) else tool


def agent(url: str) -> Agent[None, Report]:
    """Returns the agent."""
    model = OpenAIChatModel("smollm2-135m", provider=OpenAIProvider(base_url=url, api_key="none"))
    return Agent(
        model,
        deps_type=type(None),
        output_type=Report,
        instructions="Look the weather up, then report it.",
        tools=[Tool(weather, prepare=until_first_result)],
        model_settings=ModelSettings(temperature=0.0, max_tokens=200, parallel_tool_calls=False),
    )


def show(console: Console, messages: list[ModelMessage]) -> None:
    """Prints one line per call and result."""
    for message in messages:
        for part in message.parts:
            if isinstance(part, ToolCallPart):
                console.print(f"  [dim]the model calls[/] {part.tool_name}({part.args_as_json_str()})")
            elif isinstance(part, ToolReturnPart | RetryPromptPart):
                console.print(f"  [dim]the tool says[/]  {part.content}")
        if isinstance(message, ModelResponse):
            prompt, cached = message.usage.input_tokens, message.usage.cache_read_tokens
            console.print(f"  [dim]{prompt} prompt tokens, {cached} of them from the cache[/]")


def main() -> int:
    """Runs the agent and returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--url", default=DEFAULT_URL, help="the server's base URL (default: %(default)s)")
    options = parser.parse_args()
    console = Console()
    reporter = agent(options.url)
    try:
        for question in QUESTIONS:
            console.print(f"\n[bold]{question}[/]")
            result = reporter.run_sync(question)
            show(console, result.all_messages())
            console.print(f"  [bold]{result.output!r}[/]")
    except AgentRunError as error:
        console.print(f"{type(error).__name__}: {error}", style="red", markup=False)
        console.print(f"No server at {options.url}? Start one with `agentflow serve`.", markup=False)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
