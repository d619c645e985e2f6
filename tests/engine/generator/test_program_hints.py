"""The scheduling hints that requests of a session have when they come to the engine."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import pytest
from support.fake_engine import FakeEngine

import agentflow as af
from agentflow.engine.request import PATIENT_GROUPS, Origin
from agentflow.engine.scheduling.liveness import Liveness

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
