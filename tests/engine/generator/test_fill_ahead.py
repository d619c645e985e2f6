"""While a state waits, the known part of its prompt is computed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from support.fake_engine import ConstrainedEngine, FakeEngine
from support.reasoning_models import QWEN_MODEL
from support.sent_requests import SentRequests

import agentflow as af
from agentflow.engine.generator import select
from agentflow.engine.request import Submit

pytestmark = pytest.mark.anyio

LONG = "The rules of the house are read to all guests before they take their rooms. " * 8


async def computed(flow: Any, at_least: int) -> int:
    """The tokens that the engine has computed, once there are ``at_least`` of them."""
    while (num_tokens := (await flow.stats()).computed_tokens) < at_least:
        pass
    return int(num_tokens)


async def test_the_text_before_an_unfinished_reference_is_computed_while_it_waits() -> None:
    async with af.session(backend=ConstrainedEngine()) as flow, flow.state() as s, flow.state() as t:
        s += "Name: " + af.gen("name", max_tokens=300, min_tokens=300)
        t += LONG + f"{s['name']}" + af.gen("answer", max_tokens=1)
        await t["answer"]
        usage = t["answer"].usage
        assert 100 < usage.cached_tokens < usage.prompt_tokens
        assert (await t.text()).startswith(LONG + await s["name"])


async def test_states_that_wait_for_a_variable_have_no_request_in_the_engine() -> None:
    engine = FakeEngine(max_running=1)
    async with af.session(backend=engine) as flow, flow.state() as s:
        engine.gate.allow(2)
        s += "Name: " + af.gen("name", max_tokens=5, min_tokens=5)
        waiting = [flow.state() for _ in range(3)]
        for one in waiting:
            one += f"So {s['name']}" + af.gen("answer", max_tokens=1)
        await engine.gate.held()
        assert engine.client is not None
        assert engine.client.num_calls == 1
        engine.gate.open()
        for one in waiting:
            await one


async def test_a_turn_that_the_template_rewrites_is_computed_while_the_client_acts() -> None:
    engine = ConstrainedEngine(
        runner=QWEN_MODEL.runner(), tokenizer=QWEN_MODEL.tokenizer, template=QWEN_MODEL.template
    )
    answer = "Hello! " * 60
    async with af.session(backend=engine) as flow, flow.state() as s:
        s += af.user(f"<think>\nIt is a greeting.\n</think>\n\n{answer}") + af.assistant(
            af.gen("answer", max_tokens=500)
        )
        assert await s["answer"] == answer
        usage = s["answer"].usage
        before = usage.prompt_tokens
        await computed(flow, before + usage.output_tokens + 60)
        s += af.user("Again.") + af.assistant(af.gen("again", max_tokens=1))
        await s["again"]
        again = s["again"].usage
        assert again.cached_tokens > before + 60


async def test_f37_the_engine_counts_the_prompts_that_replies_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens that are computed ahead, for waiting states or before forks, and the further requests of a
    select are no prompts of the client."""
    monkeypatch.setattr(select, "MAX_TREE_TOKENS", 8)
    engine, sent = ConstrainedEngine(), list[Submit]()
    async with af.session(backend=engine) as flow, flow.state() as s, flow.state() as t:
        engine.client.observe(SimpleNamespace(sent=sent.append, received=lambda messages: None))
        s += "Name: " + af.gen("name", max_tokens=60, min_tokens=60)
        t += LONG + f"{s['name']}" + af.gen("answer", max_tokens=1)
        await t["answer"]
        t += LONG[:200]
        branches = t.fork(3)
        for number, branch in enumerate(branches):
            branch += f"{number}: " + af.gen("part", max_tokens=4)
        parts = [branch["part"] for branch in branches]
        for part in parts:
            await part
        t += af.select("choice", ["a" + "yes " * 20, "b" + "no, " * 20])
        await t["choice"]
        usages = [value.usage for value in (s["name"], t["answer"], *parts, t["choice"])]
        stats = await flow.stats()
        assert [submit.origin.is_extra for submit in sent].count(False) == len(usages)
        assert len(sent) >= len(usages) + 4
        assert stats.prompt_tokens == sum(usage.prompt_tokens for usage in usages)
        assert stats.cached_tokens == sum(usage.cached_tokens for usage in usages) > 0


async def test_f37_an_answer_that_the_template_keeps_is_not_computed_again_while_the_client_acts() -> None:
    """Only the end of its turn is missing, which is too little for a request."""
    engine, requests = FakeEngine(), SentRequests()
    async with af.session(backend=engine) as flow, flow.state() as s:
        assert engine.client is not None
        engine.client.observe(requests)
        s += af.user("Hello.") + af.assistant(af.gen("answer", max_tokens=60, ignore_eos=True))
        await s["answer"]
        await flow.stats()  # by then, the end of the turn has run
        s += af.user("Again.") + af.assistant(af.gen("again", max_tokens=1))
        await s["again"]
        assert [submit.origin.is_ahead for submit in requests.submits] == [False, False]


async def test_f37_a_turn_that_the_template_rewrites_is_computed_before_forks_need_it() -> None:
    """The forks begin with fewer tokens than were computed before, and with other ones."""
    engine = ConstrainedEngine(
        runner=QWEN_MODEL.runner(), tokenizer=QWEN_MODEL.tokenizer, template=QWEN_MODEL.template
    )
    requests = SentRequests()
    async with af.session(backend=engine) as flow, flow.state() as s:
        assert engine.client is not None
        engine.client.observe(requests)
        s += af.user(f"<think>\n{LONG}\n</think>\n\nHello!") + af.assistant(af.gen("answer", max_tokens=2000))
        s += af.user("The plants live on light, and the animals on plants. " * 3)
        branches = s.fork(2)
        for branch in branches:
            branch += af.user("Why?") + af.assistant(af.gen("why", max_tokens=1))
        await branches
        assert s["answer"].usage.output_tokens > s["answer"].usage.prompt_tokens / 2
    assert [submit.params is None for submit in requests.submits] == [False, True, False, False]
