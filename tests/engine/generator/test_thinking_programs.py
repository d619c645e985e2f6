"""Programs on reasoning models: thoughts are no part of values, and later turns have what templates want."""

from __future__ import annotations

import pytest
from support.fake_engine import ConstrainedEngine
from support.thinking_models import DEEPSEEK_MODEL, QWEN_MODEL, ThinkingModel

import agentflow as af

pytestmark = pytest.mark.anyio

THOUGHTS, ANSWER = "It is a greeting.", "Hello!"
SCRIPT = f"<think>\n{THOUGHTS}\n</think>\n\n{ANSWER}"
EACH = pytest.mark.parametrize("model", [QWEN_MODEL, DEEPSEEK_MODEL], ids=["qwen", "deepseek"])


def engine_of(model: ThinkingModel) -> ConstrainedEngine:
    return ConstrainedEngine(runner=model.runner(), tokenizer=model.tokenizer, template=model.template)


@EACH
async def test_thoughts_are_no_part_of_a_value(model: ThinkingModel) -> None:
    async with af.session(backend=engine_of(model)) as flow, flow.state() as s:
        s += af.user(SCRIPT) + af.assistant(af.gen("answer", logprobs=True))
        deltas = [delta async for delta in s["answer"]]
        assert "".join(deltas) == await s["answer"] == ANSWER
        answer = s["answer"]
        assert answer.reasoning == THOUGHTS
        assert 0 < answer.usage.thought_tokens < answer.usage.output_tokens
        assert answer.logprobs is not None
        assert len(answer.logprobs) < answer.usage.output_tokens - answer.usage.thought_tokens + 1
        s += af.user(f"{answer}") + af.assistant(af.gen("again", max_tokens=1))
        await s
        text = await s.text()
        # The next turn has the answer without its thoughts.
        assert text.count(THOUGHTS) == 1
        assert text.count(ANSWER) == 3


@EACH
async def test_a_reply_has_no_thoughts_and_keeps_its_calls(model: ThinkingModel) -> None:
    @af.tool
    def look() -> str:
        """Looks."""
        return "A bear."

    async with af.session(backend=engine_of(model)) as flow, flow.state() as s:
        s += af.conversation([{"role": "user", "content": SCRIPT}])
        s += af.reply("reply")
        assert (await s["reply"]).text == ANSWER
        assert s["reply"].reasoning == THOUGHTS
    if model is DEEPSEEK_MODEL:
        return
    call = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
    async with af.session(backend=engine_of(model)) as flow, flow.state() as s:
        asked = f"<think>\nI call {call}.\n</think>\n\n{call}"
        s += af.conversation([{"role": "user", "content": asked}], tools=[look])
        s += af.reply("reply")
        reply = await s["reply"]
        assert [called.name for called in reply.tool_calls] == ["look"]
        assert reply.text == ""
        assert s["reply"].reasoning == f"I call {call}."


async def test_past_thoughts_of_a_conversation_are_given_to_the_template() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    turns = [
        {"role": "user", "content": SCRIPT},
        {"role": "assistant", "tool_calls": [call], "reasoning_content": "I look."},
        {"role": "tool", "content": "A bear.", "tool_call_id": "c1"},
    ]
    async with af.session(backend=engine_of(QWEN_MODEL)) as flow, flow.state() as s:
        s += af.conversation(turns)
        assert "<think>\nI look.\n</think>" in await s.text()


@EACH
async def test_a_constrained_gen_does_not_think(model: ThinkingModel) -> None:
    async with af.session(backend=engine_of(model)) as flow, flow.state() as s:
        script = "<think>\nIt may be 8.\n</think>\n\n42 or more"
        s += af.user(script) + af.assistant(af.gen("number", regex="[0-9]{2}", max_tokens=8))
        assert (await s["number"]).isdigit()
        assert "It may be" not in (await s.text()).rpartition("42 or more")[2]
        assert s["number"].reasoning is None


@EACH
async def test_a_gen_that_ends_within_thoughts_has_an_empty_value(model: ThinkingModel) -> None:
    async with af.session(backend=engine_of(model)) as flow, flow.state() as s:
        s += af.user(SCRIPT) + af.assistant(af.gen("answer", max_tokens=5))
        assert await s["answer"] == ""
        assert s["answer"].finish_reason == "length"
        assert THOUGHTS.startswith(s["answer"].reasoning or "-")
