"""Each prompt of which many tokens were not cached says why."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from msgspec.structs import replace
from support.fake_engine import TEMPLATE, FakeEngine
from support.reasoning_models import QWEN_MODEL

from agentflow.engine.client import EngineClient
from agentflow.engine.generator.generator import EngineGenerator
from agentflow.engine.simulator.fake_runner import FakeRunner
from agentflow.engine.tenant import Tenant
from agentflow.protocol.chat import Conversation, Message, ToolChoice, ToolSpec
from agentflow.protocol.events import Usage
from agentflow.protocol.sampling import GenParams, SamplingParams
from agentflow.server.completion.completion import completing
from agentflow.server.completion.request import CompletionRequest

pytestmark = pytest.mark.anyio

LONG = "The quick brown fox jumps over the lazy dog. " * 60
ASKED = (Message("system", f"Be brief. {LONG}"), Message("user", f"What is this? {LONG}"))
LOOK = ToolSpec("look", "Looks.", {"type": "object", "properties": {}})
# The model sees the tool and may not call it, so no constraint is compiled.
SHOWN: Any = {"tools": (LOOK,), "tool_choice": ToolChoice("none")}
FEW = SamplingParams(max_tokens=2)


@asynccontextmanager
async def client_on(engine: FakeEngine) -> AsyncIterator[EngineClient]:
    async with engine.open_client() as client:
        yield client


def big_engine(num_slots: int = 40_000) -> FakeEngine:
    runner = FakeRunner(vocab_size=700, num_slots=num_slots, max_context=16_000)
    return FakeEngine(runner=runner)


async def usage_of(
    generator: EngineGenerator, messages: Sequence[Message], params: SamplingParams = FEW, **fields: Any
) -> Usage:
    async with completing(generator, CompletionRequest(tuple(messages), params, **fields)) as completion:
        await completion.answers()
        return completion.usage


async def test_a_first_prompt_and_its_repetition():
    async with client_on(big_engine()) as client:
        generator = EngineGenerator(client, TEMPLATE)
        first, again = [await usage_of(generator, ASKED) for _ in range(2)]
        short = await usage_of(generator, [Message("user", "Hello")])
        longer = [*ASKED, Message("assistant", "It is."), Message("user", f"Other. {LONG}")]
        later = await usage_of(generator, longer)
    assert first.prompt_tokens - first.cached_tokens >= 256
    assert [u.miss_reason for u in (first, again, short, later)] == ["first_seen", "", "", "first_seen"]


async def test_a_prompt_that_is_scored_is_no_miss():
    async with client_on(big_engine()) as client:
        generator = EngineGenerator(client, TEMPLATE)
        await usage_of(generator, ASKED)
        assert (await usage_of(generator, ASKED, prompt_logprobs=0)).miss_reason == ""


async def test_an_evicted_prompt():
    async with client_on(big_engine(num_slots=2_500)) as client:
        generator = EngineGenerator(client, TEMPLATE)
        await usage_of(generator, ASKED)
        for number in range(6):
            await usage_of(generator, [Message("user", f"{number} {LONG}")])
        assert (await usage_of(generator, ASKED)).miss_reason == "evicted"


async def test_another_salt_and_another_tenant():
    async with client_on(big_engine()) as client:
        one, other = [EngineGenerator(client, TEMPLATE, tenant=Tenant(name)) for name in ("one", "other")]
        await usage_of(one, ASKED, cache_salt="a")
        assert (await usage_of(one, ASKED, cache_salt="b")).miss_reason == "salt"
        assert (await usage_of(other, ASKED)).miss_reason == "first_seen"


def qwen_engine() -> FakeEngine:
    runner = QWEN_MODEL.runner(max_context=16_000, num_slots=40_000, next_token=None)
    return FakeEngine(runner=runner, tokenizer=QWEN_MODEL.tokenizer)


async def test_another_system_message_and_other_tools():
    async with client_on(qwen_engine()) as client:
        generator = EngineGenerator(client, QWEN_MODEL.template)
        await usage_of(generator, ASKED)
        changed = (replace(ASKED[0], content=f"Be long. {LONG}"), ASKED[1])
        assert (await usage_of(generator, changed)).miss_reason == "system_changed"
        assert (await usage_of(generator, changed, **SHOWN)).miss_reason == "tools_changed"
        more = (*changed, Message("assistant", "It is."), Message("user", "And?"))
        assert (await usage_of(generator, more, **SHOWN)).miss_reason == ""
        other: Any = {"tools": (replace(LOOK, name="see"),), "tool_choice": ToolChoice("none")}
        assert (await usage_of(generator, more, **other)).miss_reason == "tools_changed"


async def test_a_template_that_drops_reasoning():
    thought = Message("assistant", "Hm.", reasoning=f"I think. {LONG}")
    history = (Message("user", "What?"), thought, Message("tool", "It is.", tool_call_id="1"))
    more = (*history, Message("assistant", f"Yes. {LONG}"), Message("user", "And?"))
    async with client_on(qwen_engine()) as client:
        generator = EngineGenerator(client, QWEN_MODEL.template)
        assert (await usage_of(generator, history)).miss_reason == "first_seen"
        assert (await usage_of(generator, more)).miss_reason == "rerendered"


async def test_a_state_whose_tools_change():
    async with client_on(qwen_engine()) as client:
        generator = EngineGenerator(client, QWEN_MODEL.template)
        context = generator.open("")
        await generator.converse(context, Conversation(ASKED, (LOOK,), ToolChoice("none")))
        reply = await generator.reply(context, GenParams(max_tokens=2), lambda _: None)
        assert reply.usage.miss_reason == "first_seen"
        generator.end_role(context)
        await generator.offer_tools(context, (replace(LOOK, name="see"),), ToolChoice("none"))
        generator.begin_role(context, "user")
        generator.fill(context, "And?")
        generator.end_role(context)
        generator.begin_role(context, "assistant")
        reply = await generator.reply(context, GenParams(max_tokens=2), lambda _: None)
        assert reply.usage.miss_reason == "tools_changed"
        generator.free(context)


def test_sums():
    one, none, other = Usage(miss_reason="salt"), Usage(), Usage(miss_reason="evicted")
    assert ((one + none).miss_reason, (none + one).miss_reason) == ("salt", "salt")
    assert ((one + one).miss_reason, (one + other).miss_reason) == ("salt", "several")
