"""Programs on reasoning models: values contain no reasoning, and templates place it in later turns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.fake_engine import ConstrainedEngine
from support.reasoning_models import DEEPSEEK_MODEL, QWEN_MODEL, ReasoningModel

import agentflow as af
from agentflow.engine.text.common_prefix import common_prefix

pytestmark = pytest.mark.anyio

REASONING, ANSWER = "It is a greeting.", "Hello!"
SCRIPT = f"<think>\n{REASONING}\n</think>\n\n{ANSWER}"
EACH = pytest.mark.parametrize("model", [QWEN_MODEL, DEEPSEEK_MODEL], ids=["qwen", "deepseek"])


def engine_of(model: ReasoningModel) -> ConstrainedEngine:
    return ConstrainedEngine(runner=model.runner(), tokenizer=model.tokenizer, template=model.template)


@EACH
async def test_reasoning_are_no_part_of_a_value(model: ReasoningModel) -> None:
    async with af.session(backend=engine_of(model)) as flow, flow.state() as s:
        s += af.user(SCRIPT) + af.assistant(af.gen("answer", logprobs=True))
        deltas = [delta async for delta in s["answer"]]
        assert "".join(deltas) == await s["answer"] == ANSWER
        answer = s["answer"]
        assert answer.reasoning == REASONING
        assert 0 < answer.usage.reasoning_tokens < answer.usage.output_tokens
        assert answer.logprobs is not None
        assert len(answer.logprobs) < answer.usage.output_tokens - answer.usage.reasoning_tokens + 1
        s += af.user(f"{answer}") + af.assistant(af.gen("again", max_tokens=1))
        await s
        text = await s.text()
        # The next turn has the answer without its reasoning.
        assert text.count(REASONING) == 1
        assert text.count(ANSWER) == 3


@EACH
async def test_a_reply_has_no_reasoning_and_keeps_its_calls(model: ReasoningModel) -> None:
    @af.tool
    def look() -> str:
        """Looks."""
        return "A bear."

    async with af.session(backend=engine_of(model)) as flow, flow.state() as s:
        s += af.conversation([{"role": "user", "content": SCRIPT}])
        s += af.reply("reply")
        assert (await s["reply"]).text == ANSWER
        assert s["reply"].reasoning == REASONING
    if model is DEEPSEEK_MODEL:
        return
    call = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
    async with af.session(backend=engine_of(model)) as flow, flow.state() as s:
        asked = f"<think>\nI call {call}.\n</think>\n\n{call}"
        s += af.conversation([{"role": "user", "content": asked}])
        s += af.reply("reply", tools=[look])
        reply = await s["reply"]
        assert [called.name for called in reply.tool_calls] == ["look"]
        assert reply.text == ""
        assert s["reply"].reasoning == f"I call {call}."


async def test_past_reasoning_of_a_conversation_are_given_to_the_template() -> None:
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
async def test_a_constrained_gen_does_not_think(model: ReasoningModel) -> None:
    async with af.session(backend=engine_of(model)) as flow, flow.state() as s:
        script = "<think>\nIt may be 8.\n</think>\n\n42 or more"
        s += af.user(script) + af.assistant(af.gen("number", regex="[0-9]{2}", max_tokens=8))
        assert (await s["number"]).isdigit()
        assert "It may be" not in (await s.text()).rpartition("42 or more")[2]
        assert s["number"].reasoning is None


@EACH
async def test_a_program_sets_the_budget_of_reasoning(model: ReasoningModel) -> None:
    @af.program
    async def asked(s: af.State, budget: int | None) -> str:
        s += af.user(SCRIPT) + af.assistant(af.gen("answer", max_reasoning_tokens=budget))
        return await s["answer"]

    async with af.session(backend=engine_of(model)) as flow:
        free = await flow.run(asked, None)
        assert free == ANSWER
        graph = asked.trace(2)
        for budget in (0, 2):
            async with flow.state() as s:
                s += af.user(SCRIPT) + af.assistant(af.gen("answer", max_reasoning_tokens=budget))
                assert await s["answer"] == ANSWER
                assert REASONING.startswith(s["answer"].reasoning or "")
                assert bool(s["answer"].reasoning) == (budget > 0)
                num_reasoning = s["answer"].usage.reasoning_tokens
            assert num_reasoning <= budget + 20
            # Reasoning of a reply, and before a constrained text.
            async with flow.state() as s:
                s += af.conversation([{"role": "user", "content": SCRIPT}])
                s += af.reply("reply", max_reasoning_tokens=budget)
                assert (await s["reply"]).text == ANSWER
                assert s["reply"].usage.reasoning_tokens == num_reasoning
                script = SCRIPT.replace(ANSWER, "42")
                s += af.user(script)
                s += af.assistant(af.gen("number", regex="[0-9]{2}", max_reasoning_tokens=budget))
                assert (await s["number"]).isdigit()
                assert bool(s["number"].reasoning) == (budget > 0)
        assert await flow.submit(graph) == ANSWER


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_reasoning_and_its_budget_are_replayed(is_streamed: bool, tmp_path: Path) -> None:
    async def asked(s: af.State, budget: int | None) -> str:
        gen = af.gen("answer", max_reasoning_tokens=budget, stream_reasoning=is_streamed)
        s += af.user(SCRIPT) + af.assistant(gen)
        if not is_streamed:
            await s["answer"]
        reasoning = "".join([delta async for delta in s["answer"].reasoning_deltas()])
        assert await s["answer"] == ANSWER
        assert reasoning == s["answer"].reasoning
        return reasoning

    path = tmp_path / "run.jsonl"
    async with af.session(backend=engine_of(QWEN_MODEL), record=path) as flow:
        assert await flow.run(asked, None) == REASONING
        reasoning = await flow.run(asked, 2)
    assert 0 < len(reasoning) < len(REASONING)
    assert '"max_reasoning_tokens":2' in path.read_text().replace(" ", "")
    async with af.session(backend=af.Replay(path)) as flow:
        assert await flow.run(asked, None) == REASONING
        assert await flow.run(asked, 2) == reasoning
    with pytest.raises(af.errors.ReplayDiffers):
        async with af.session(backend=af.Replay(path)) as flow:
            await flow.run(asked, 3)


@EACH
@pytest.mark.parametrize("is_reply", [False, True])
async def test_reasoning_are_streamed_before_the_text(model: ReasoningModel, is_reply: bool) -> None:
    async with af.session(backend=engine_of(model)) as flow, flow.state() as s:
        if is_reply:
            s += af.conversation([{"role": "user", "content": SCRIPT}])
            s += af.reply("answer", stream_reasoning=True)
        else:
            s += af.user(SCRIPT) + af.assistant(af.gen("answer", stream_reasoning=True))
        deltas = [delta async for delta in s["answer"].reasoning_deltas()]
        assert "".join(deltas) == REASONING
        await s["answer"]
        assert s["answer"].text == ANSWER
        assert s["answer"].reasoning == REASONING
        # Without the option they come whole, with the value.
        s += af.user(SCRIPT) + af.gen("whole")
        await s["whole"]
        assert [delta async for delta in s["whole"].reasoning_deltas()] == [REASONING]


@pytest.mark.parametrize("budget", [-1, True, 1.5, "2"])
def test_a_budget_is_a_whole_number(budget: Any) -> None:
    with pytest.raises(af.errors.BadArgument) as caught:
        af.gen("answer", max_reasoning_tokens=budget)
    assert caught.value.param == "max_reasoning_tokens"


@EACH
async def test_a_gen_that_ends_within_reasoning_has_an_empty_value(model: ReasoningModel) -> None:
    async with af.session(backend=engine_of(model)) as flow, flow.state() as s:
        s += af.user(SCRIPT) + af.assistant(af.gen("answer", max_tokens=5))
        assert await s["answer"] == ""
        assert s["answer"].finish_reason == "length"
        assert REASONING.startswith(s["answer"].reasoning or "-")


async def test_f37_tokens_that_a_template_renders_again_count_while_their_state_is_open() -> None:
    async with af.session(backend=engine_of(QWEN_MODEL)) as flow:
        async with flow.state() as s:
            s += af.user(SCRIPT)
            async with s.assistant():
                s += af.gen("answer")
                before = await s.token_ids()
            s += af.user("Again.") + af.assistant(af.gen("again", max_tokens=1))
            await s["again"]
            num_rerendered = len(before) - common_prefix(before, await s.token_ids())
            assert num_rerendered > 0
            assert (await flow.stats()).rerendered_tokens == num_rerendered
        assert (await flow.stats()).rerendered_tokens == num_rerendered


async def test_f37_a_prompt_whose_reasoning_the_template_drops_is_missed_as_rendered_again() -> None:
    async with af.session(backend=engine_of(QWEN_MODEL)) as flow, flow.state() as s:
        s += af.user(f"<think>\n{REASONING}\n</think>\n\n{'Hello! ' * 120}") + af.assistant(
            af.gen("answer", max_tokens=2000)
        )
        s += af.user("Again.") + af.assistant(af.gen("again", max_tokens=1))  # follows immediately
        await s
        assert s["answer"].usage.miss_reason == "first_seen"
        assert s["again"].usage.miss_reason == "rerendered"
