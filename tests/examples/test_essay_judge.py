"""The essay judge: four judgments side by side, wired into one summary."""

import io

import essay_judge
import pytest
from essay_judge import DIMENSIONS, ESSAY, judge
from rich.console import Console
from scripted_example import Asked, run, scripted

import agentflow as af

pytestmark = pytest.mark.anyio


def judging(prompt: str) -> str:
    question = prompt.rpartition("<user>")[2]
    if "grade" in question:
        return "B"
    if "Four judges" in question:
        return "A fine essay.\nReally"
    if "science" in question:
        return "yes"
    return f"On {next(name for name, asked in DIMENSIONS.items() if asked in question)}: good.\nMore"


async def test_the_judgments_reach_the_summary_in_order():
    asked = Asked(judging)
    report = await run(judge, scripted(asked), ESSAY)
    assert (report.related, report.summary, report.grade) == (True, "A fine essay.", "B")
    assert len(asked.prompts) == len(DIMENSIONS) + 3
    notes = "".join(f"{name}: On {name}: good.\n" for name in DIMENSIONS)
    assert asked.prompts[-2].endswith(
        f"Four judges wrote:\n{notes}"
        "What do the judges say about the essay? Answer in two sentences.</user><assistant>"
    )
    judged = [prompt for prompt in asked.prompts if "Give your reason" in prompt]
    assert len(judged) == len(DIMENSIONS)
    assert len({prompt.rpartition("<user>")[0] for prompt in judged}) == 1


async def test_an_essay_on_something_else_is_not_judged():
    asked = Asked(lambda prompt: "no")
    assert await run(judge, scripted(asked), "A poem.") == essay_judge.Report(related=False)
    assert len(asked.prompts) == 1


async def test_the_board_shows_every_branch():
    printed = io.StringIO()
    async with af.session(backend=scripted(judging)) as flow:
        report, _ = await essay_judge.follow(flow, ESSAY, Console(file=printed, width=100))
    assert report.grade == "B"
    assert all(f"On {name}: good." in printed.getvalue() for name in DIMENSIONS)
