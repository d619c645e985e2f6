"""Conversations with tools on the real model, as a user has them: embedded, and over the wire."""

from __future__ import annotations

import jsonschema
import pytest
from support.server.http_clients import only_asyncio

import agentflow as af
from agentflow.protocol.chat import ToolSpec

pytestmark = pytest.mark.anyio

WEATHER = ToolSpec(
    "weather",
    "Tells the weather in a city.",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 20},
            "days": {"type": "integer", "maximum": 9},
        },
        "required": ["city", "days"],
        "additionalProperties": False,
    },
)
NOW = ToolSpec("now", "Tells the time.", {"type": "object", "properties": {}, "additionalProperties": False})
TOOLS = [WEATHER, NOW]
ASKED = [af.Message("user", "What is the weather in Oslo for the next 3 days?")]


anyio_backend = pytest.fixture(only_asyncio, scope="module")


def check(reply: af.Reply, *names: str) -> None:
    known = {tool.name: tool.parameters for tool in TOOLS}
    for call in reply.tool_calls:
        assert call.name in (names or known)
        jsonschema.validate(call.arguments, known[call.name])


async def converse(flow: af.Session) -> None:
    """Calls that are asked for come, and the conversation that goes on from them finds its cache."""
    async with flow.state() as s:
        s += af.conversation(ASKED)
        async with s.fork(2) as branches:
            for branch in branches:
                branch += af.reply("answer", tools=TOOLS, choice="weather", max_tokens=64)
        replies = [await branch["answer"] for branch in branches]
        used = branches[0]["answer"].usage
    for reply in replies:
        check(reply, "weather")
        assert (reply.text, len(reply.tool_calls)) == ("", 1)
    [call] = replies[0].tool_calls

    results = [af.Message("tool", "rain, 3 degrees", tool_call_id=call.id)]
    async with flow.state() as s:
        s += af.conversation([*ASKED, replies[0].message(), *results])
        s += af.reply("answer", tools=TOOLS, max_tokens=24)
        reply = await s["answer"]
        if s["answer"].finish_reason != "length":  # the last call may be truncated
            check(reply)
        assert reply.text or reply.tool_calls
        usage = s["answer"].usage
        # The earlier prompt is cached.
        assert usage.cached_tokens >= used.prompt_tokens


@pytest.mark.full  # test_embedded_and_server compares the engine's two places
async def test_a_conversation_with_tools_embedded(model_folder):
    async with af.session(model=str(model_folder), seed=1) as flow:
        await converse(flow)


async def test_a_conversation_with_tools_over_the_wire(model_url):
    async with af.session(model_url, seed=1) as flow:
        await converse(flow)


async def test_the_methods_of_select(model_url: str) -> None:
    """A word that is likely anyway (``the``) loses where that is taken into account."""
    options = [" Paris", " the", " Lyon"]
    found = {}
    async with af.session(model_url) as flow:
        for method in (
            "token_length_normalized",
            "greedy_token_selection",
            "unconditional_likelihood_normalized",
        ):
            async with flow.state() as s:
                s += "The capital of France is" + af.select("city", options, method=method)
                found[method] = await s["city"]
                scores = s["city"].choices
                assert set(scores) == set(options)
                assert found[method] == max(scores, key=scores.__getitem__)
    assert found["unconditional_likelihood_normalized"] == " Paris"
    assert found["greedy_token_selection"] in options
