"""The scheduling hints that requests of a session have when they come to the engine."""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import nullcontext
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.chat_template_shapes import CHATML
from support.fake_engine import FakeEngine

import agentflow as af
from agentflow.engine.request import PATIENT_GROUPS, Origin
from agentflow.engine.scheduling.liveness import Liveness
from agentflow.engine.text.chat_template import ChatTemplate

pytestmark = pytest.mark.anyio


class Origins(list[Origin]):
    """An observer that notes the origins of all requests."""

    def sent(self, submit: Any) -> None:
        self.append(submit.origin)

    def received(self, messages: Any) -> None:
        pass


async def answer(s: af.State, text: str) -> str:
    s += text + af.gen("answer", max_tokens=2)
    return await s["answer"]


async def test_a_map_is_one_patient_task_group() -> None:
    engine, origins = FakeEngine(), Origins()
    async with af.session(backend=engine) as flow:
        assert engine.client is not None
        engine.client.observe(origins)
        await flow.map(answer, ["a", "b", "c"])
        await flow.run(answer, "d")
    *mapped, alone = origins
    assert [origin.objective for origin in mapped] == ["throughput"] * 3
    assert len({origin.program for origin in mapped}) == 3
    assert len({origin.task_group for origin in mapped}) == 1
    assert mapped[0].task_group >= PATIENT_GROUPS
    assert (alone.objective, alone.task_group) == ("latency", 0)


async def test_a_text_that_is_read_as_it_grows_counts_by_latency() -> None:
    engine, origins = FakeEngine(), Origins()
    async with af.session(backend=engine) as flow, flow.state() as s:
        assert engine.client is not None
        engine.client.observe(origins)
        s += "Plan: " + af.gen("plan", max_tokens=2)
        branches = s.fork(2)
        for branch, label in zip(branches, ("first", "second"), strict=True):
            branch += af.gen(label, max_tokens=2)
        s += f"{branches[0]['first']}{branches[1]['second']}" + af.gen("whole", max_tokens=2)
        assert "".join([text async for text in branches[1]["second"]])
        await s["whole"]
    parts = [origin for origin in origins if origin.task_group]
    assert sorted([origin.objective for origin in parts]) == ["latency", "throughput"]


async def test_a_cancelled_branch_is_superseded(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[bool] = []
    close = Liveness.close

    def note(self: Liveness, state: Hashable, *, is_dropped: bool = False) -> None:
        closed.append(is_dropped)
        close(self, state, is_dropped=is_dropped)

    monkeypatch.setattr(Liveness, "close", note)
    async with af.session(backend=FakeEngine()) as flow, flow.state() as s:
        s += "Once upon a time"
        branches = s.fork(2)
        for branch in branches:
            branch += " there was" + af.gen("rest", max_tokens=2)
        for branch in branches:
            await branch["rest"]
        branches[1].cancel()
        whole = flow.state()
        whole += "Another text" + af.gen("rest", max_tokens=2)
        await whole["rest"]
        whole.cancel()
    assert sorted(closed) == [False, False, True]


def words(most: int) -> st.SearchStrategy[str]:
    return st.text("Helo wrd'1\n", max_size=most)


async def say_with_hints(texts: list[str], *, hints: bool, in_turn: bool) -> tuple[list[int], str]:
    """Returns the prompt with its answer, and the answer, of texts with or without hints between them."""
    async with af.session(backend=FakeEngine()) as flow, flow.state() as s:
        async with s.user() if in_turn else nullcontext():
            for text in texts:
                if hints:
                    s.hint(forks=3)
                s += text
        s += af.gen("x", max_tokens=4, temperature=1.0, seed=7)
        answer = await s["x"]
        return await s.token_ids(), answer


@pytest.mark.parametrize("in_turn", [False, True])
@example(texts=["Hel", "lo world"])
@example(texts=["Hello world " * 12 + "Hel", "lo world"])
@settings(max_examples=15)
@given(texts=st.lists(words(6) | words(6).map(lambda text: text * 12 + "Hel"), min_size=2, max_size=4))
async def test_f37_hints_of_forks_do_not_change_the_tokens(texts: list[str], in_turn: bool) -> None:
    texts = ["Hello", *texts]
    plain = await say_with_hints(texts, hints=False, in_turn=in_turn)
    assert await say_with_hints(texts, hints=True, in_turn=in_turn) == plain


NEEDS_A_USER = ChatTemplate(
    "{%- if not messages | selectattr('role', 'equalto', 'user') | list %}"
    "{{- raise_exception('No user query found in messages.') }}{% endif %}" + CHATML
)
"""As of Qwen3.5: a system turn alone is rejected."""


@pytest.mark.parametrize(("hints", "num_forks"), [(True, 0), (False, 3), (True, 3)])
async def test_f37_prefixes_ahead_of_turns_that_the_template_rejects_alone(
    hints: bool, num_forks: int
) -> None:
    async with af.session(backend=FakeEngine(template=NEEDS_A_USER)) as flow, flow.state() as s:
        s += af.system("You help everybody. " * 12)
        if hints:
            s.hint(forks=3)
        branches = s.fork(num_forks) if num_forks else [s]
        for branch in branches:
            branch += af.user("Hello") + af.assistant(af.gen("x", max_tokens=2))
        for branch in branches:
            await branch["x"]
            assert (await branch.text()).startswith("<|im_start|>system\nYou help everybody. ")


async def test_f37_a_prefix_of_open_text_is_computed_once() -> None:
    engine, origins = FakeEngine(), Origins()
    async with af.session(backend=engine) as flow, flow.state() as s:
        assert engine.client is not None
        engine.client.observe(origins)
        s += "The rules of the house are read to all guests. " * 8 + "Hel"
        s.hint(forks=3)
        s.hint(forks=3)
        branches = s.fork(3)
        for branch in branches:
            branch += "lo" + af.gen("x", max_tokens=2)
        usages = [(await branch["x"], branch["x"].usage)[1] for branch in branches]
    assert len(origins) == 4
    assert all(usage.prompt_tokens - usage.cached_tokens < 4 for usage in usages)
