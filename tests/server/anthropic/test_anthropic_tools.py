"""Tools over Anthropic's API with its own client: calls, results, and the client's loop that runs functions.

The model of these tests draws its tokens; the tools' schemas keep the calls valid."""

from __future__ import annotations

import anthropic
import anyio.to_thread
import pytest
from support.server.anthropic_peer import HELLO, anthropic_peer, asking
from support.server.module_servers import module_fixture

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"enum": [1, 2]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER = {"name": "weather", "description": "The weather.", "input_schema": SCHEMA}
CLOCK = {"name": "clock", "input_schema": {"type": "object", "properties": {}, "additionalProperties": False}}
ANY = {"type": "any", "disable_parallel_tool_use": True}


peer = module_fixture(anthropic_peer)


def check_call(block) -> None:
    assert (block.type, block.name) == ("tool_use", "weather")
    assert block.id
    assert block.input["city"] in ("Oslo", "Rome")
    assert block.input["days"] in (1, 2)


def test_f34b_the_model_sees_the_examples_of_a_tool(peer):
    examples = [{"city": "Ushuaia"}, {"city": "Tromsø"}]
    message = peer.ask(tools=[{**WEATHER, "input_examples": examples}], tool_choice=ANY, max_tokens=300)
    check_call(message.content[0])
    assert all(example["city"] in peer.requests.prompt for example in examples)
    peer.ask(tools=[{**WEATHER, "input_examples": []}], tool_choice=ANY, max_tokens=300)
    assert '"examples"' not in peer.requests.prompt


def test_the_tools_are_part_of_the_count(peer):
    plain = peer.client.messages.count_tokens(model="fake", messages=HELLO)
    reported = peer.client.messages.count_tokens(model="fake", messages=HELLO, tools=[WEATHER, CLOCK])
    assert reported.input_tokens > plain.input_tokens


@anthropic.beta_tool(name="weather", description="The weather.", input_schema=SCHEMA)
def weather(city: str, days: int) -> str:
    return f"Snow in {city} for {days} days."


def test_the_clients_loop_runs_the_tools(peer):
    """It requests a stored conversation, is rejected, and sends all of it."""
    runner = peer.client.beta.messages.tool_runner(
        **asking(tools=[weather], tool_choice=ANY, max_tokens=300, max_iterations=3)
    )
    messages = list(runner)
    assert [message.stop_reason for message in messages] == ["tool_use"] * 3
    for message in messages:
        check_call(message.content[0])
    for message in messages[:2]:
        asked = message.content[0].input
        assert weather(**asked) in peer.requests.prompt


def test_the_clients_loop_streams(peer):
    runner = peer.client.beta.messages.tool_runner(
        **asking(tools=[weather], tool_choice=ANY, max_tokens=300, max_iterations=2), stream=True
    )
    finals = [stream.get_final_message() for stream in runner]
    assert [final.stop_reason for final in finals] == ["tool_use"] * 2
    assert weather(**finals[0].content[0].input) in peer.requests.prompt


@pytest.mark.anyio
async def test_the_asynchronous_clients_loop_runs_the_tools(peer, anyio_backend):
    @anthropic.beta_async_tool(name="weather", description="The weather.", input_schema=SCHEMA)
    async def report(city: str, days: int) -> str:
        return await anyio.to_thread.run_sync(lambda: weather(city=city, days=days))

    async with anthropic.AsyncAnthropic(api_key="any", base_url=peer.server.url, max_retries=0) as client:
        runner = client.beta.messages.tool_runner(
            **asking(tools=[report], tool_choice=ANY, max_tokens=300, max_iterations=2)
        )
        messages = [message async for message in runner]
    assert len(messages) == 2
    assert weather(**messages[0].content[0].input) in peer.requests.prompt
