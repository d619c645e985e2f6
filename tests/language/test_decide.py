"""``s.decide``: typed answers, an unchanged state, and refusals."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Any, Literal

import pytest
from support.fake_engine import FakeEngine
from support.faults import has_param
from support.logit_runner import logit_runner

import agentflow as af
from agentflow.errors import BadArgument, ScriptMismatch

pytestmark = pytest.mark.anyio


class Tone(enum.Enum):
    CALM = "calm"
    ANGRY = 2


async def test_each_kind_of_answer_has_its_type() -> None:
    answers = {
        "spam": {"yes": 0.75, "no": 0.25},
        "topic": "a book",
        "tone": {"calm": 0.25, "ANGRY": 0.75},
        "side": "left",
        "stars": {"1": 0.5, "2": 0.125, "3": 0.375},
        "depth": {"low": 0.5, "high": 0.5},
    }
    async with af.session(backend=af.Scripted({"decisions": answers})) as flow, flow.state() as s:
        s += af.user("A message.")
        found = await s.decide(
            {
                "spam": bool,
                "topic": {"a book": "printed", "a film": ""},
                "tone": Tone,
                "side": Literal["left", "right"],
                "stars": range(3, 0, -1),
                "depth": af.question("How deep is it?", ["low", "high"], ordered=True),
            }
        )
    assert found["spam"] == af.Decision(True, {True: 0.75, False: 0.25})
    assert found["topic"] == af.Decision("a book", {"a book": 1.0, "a film": 0.0})
    assert found["tone"] == af.Decision(Tone.ANGRY, {Tone.CALM: 0.25, Tone.ANGRY: 0.75})
    assert found["side"].value == "left"
    assert found["stars"] == af.Decision(1, {1: 0.5, 2: 0.125, 3: 0.375}, 1.875)
    assert (found["depth"].value, found["depth"].mean) == ("low", 0.5)
    assert found["tone"].probability == 0.75


@pytest.mark.parametrize("answer", [Tone.ANGRY, {Tone.CALM: 0.25, Tone.ANGRY: 0.75}])
async def test_scripts_answer_with_members_of_an_enum(answer: Any) -> None:
    script = {"decisions": {"tone": answer}}
    async with af.session(backend=af.Scripted(script)) as flow, flow.state() as s:
        s += af.user("A message.")
        assert (await s.decide({"tone": Tone}))["tone"].value is Tone.ANGRY


@pytest.mark.parametrize(
    "questions",
    [
        {},
        {"": bool},
        ["spam"],
        {"tone": []},
        {"tone": ["calm"]},
        {"tone": ["calm", "calm"]},
        {"tone": ["calm", ""]},
        {"tone": "calm or angry"},
        {"tone": [1, 2]},
        {"stars": range(5, 6)},
        {"stars": range(10**12)},
        {"stars": int},
        {f"q{number}": bool for number in range(401)},
    ],
    ids=repr,
)
async def test_questions_that_cannot_be_asked_are_refused_at_once(questions: Any) -> None:
    async with af.session(backend=af.Scripted("x")) as flow, flow.state() as s:
        with pytest.raises(BadArgument, check=has_param("questions")):
            s.decide(questions)


def test_a_question_needs_its_wording() -> None:
    with pytest.raises(BadArgument, check=has_param("instructions")):
        af.question(" ", bool)
    with pytest.raises(BadArgument, check=has_param("questions")):
        af.question("How many?", int)


async def test_a_script_must_answer_the_questions() -> None:
    for answers in ({"spam": "perhaps"}, {"other": True}, "yes"):
        async with af.session(backend=af.Scripted({"decisions": answers})) as flow, flow.state() as s:
            s += af.user("A message.")
            with pytest.raises(ScriptMismatch):
                await s.decide({"spam": bool})


async def test_the_engine_decides_without_changing_the_state() -> None:
    async with (
        af.session(backend=FakeEngine(runner=logit_runner(max_context=1024))) as flow,
        flow.state() as s,
    ):
        s += af.user("Is it good?")
        asked = s.decide({"good": bool, "stars": range(1, 4)})
        s += af.assistant(af.gen("answer", max_tokens=8))
        answer, found = await s["answer"], await asked
        async with flow.state() as untouched:
            untouched += af.user("Is it good?") + af.assistant(af.gen("answer", max_tokens=8))
            assert await untouched["answer"] == answer
        assert asked.decided_by == "logprobs"
        assert asked.usage.prompt_tokens > 0 == asked.usage.output_tokens
        assert 1 < (found["stars"].mean or 0) < 3
        again = await untouched_decision(flow)
        assert again == found


async def untouched_decision(flow: af.Session) -> dict[str, af.Decision]:
    async with flow.state() as s:
        s += af.user("Is it good?")
        return await s.decide({"good": bool, "stars": range(1, 4)})


@af.program
async def sorted_mail(s: af.State, mail: str) -> str:
    s += af.user(mail)
    decisions = s.decide({"topic": ["order", "other"]})
    s += af.user("Answer about the topic ", decisions.json("topic.value")) + af.assistant(af.gen("reply"))
    return await s["reply"]


async def test_an_answer_is_wired_traced_and_replayed(tmp_path: Any) -> None:
    script = {"decisions": {"topic": "order"}, "reply": "It is on its way."}
    backend = af.Scripted(script)
    file = tmp_path / "run.jsonl"
    async with af.session(backend=backend, record=file) as flow:
        assert await flow.run(sorted_mail, "Where is it?") == "It is on its way."
    assert backend.prompts[-1].endswith("Answer about the topic order</user><assistant>")
    async with af.session(backend=af.Replay(file)) as flow:
        assert await flow.run(sorted_mail, "Where is it?") == "It is on its way."
    backend = af.Scripted(script)
    graph = sorted_mail.trace()
    async with af.session(backend=backend) as flow:
        assert await flow.submit(graph, {"mail": "Where is it?"}) == "It is on its way."
    assert backend.prompts[-1].endswith("Answer about the topic order</user><assistant>")
    assert "decide topic" in graph.draw()


async def test_a_branch_that_is_cancelled_takes_its_questions_along() -> None:
    async with (
        af.session(backend=FakeEngine(runner=logit_runner(max_context=1024))) as flow,
        flow.state() as s,
    ):
        s += af.user("Is it good?")
        branch = s.copy()
        asked = branch.decide({"good": bool})
        branch.cancel()
        with pytest.raises(af.Cancelled):
            await asked
        assert (await s.decide({"good": bool}))["good"].value in (True, False)


async def test_decisions_are_kept_by_a_resumed_map(tmp_path: Path) -> None:
    async def decide(s: af.State, text: str) -> dict[str, af.Decision]:
        s += af.user(text)
        return await s.decide({"spam": bool, "stars": range(1, 3)})

    answers = {"decisions": {"spam": {True: 0.75, False: 0.25}, "stars": {1: 0.25, 2: 0.75}}}
    for script in (answers, {}):
        async with af.session(backend=af.Scripted(script)) as flow:
            [found] = await flow.map(decide, ["Buy now!"], resume=tmp_path / "found.jsonl")
        assert (found["spam"].value, found["spam"].probability) == (True, 0.75)
        assert (found["stars"].value, found["stars"].probability) == (2, 0.75)
