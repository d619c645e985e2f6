"""Skeleton of thought: each point is written out knowing the skeleton, and no other paragraph."""

import pytest
import skeleton_of_thought
from scripted_example import Asked, run, scripted, shown
from skeleton_of_thought import answer

pytestmark = pytest.mark.anyio

POINTS = ["go early", "no coffee", "dark room"]


def writer(prompt: str) -> str:
    turn = prompt.rpartition("<assistant>")[2]
    if "explain each tip" in prompt:
        return f" because of {turn.removesuffix(':').partition(') ')[2]}\nand so on"
    return f" {POINTS[turn.count(chr(10))]}. More"


async def test_the_paragraphs_are_joined_in_order():
    text = await run(answer, scripted(writer), "How?", num_points=3)
    assert text == "\n\n".join(f"{i}) {point}: because of {point}" for i, point in enumerate(POINTS, 1))


async def test_each_paragraph_knows_the_skeleton_and_no_other_paragraph():
    asked = Asked(writer)
    await run(answer, scripted(asked), "How?", num_points=3)
    paragraphs = asked.ending(":")
    skeleton = "<assistant>1) go early\n2) no coffee\n3) dark room\n</assistant>"
    assert len(paragraphs) == 3
    for prompt in paragraphs:
        assert skeleton in prompt
        assert "because" not in prompt
    assert sorted(prompt.rpartition("<assistant>")[2] for prompt in paragraphs) == [
        f"{i}) {point}:" for i, point in enumerate(POINTS, 1)
    ]


async def test_the_answer_is_shown():
    page = await shown(skeleton_of_thought.main, scripted(lambda prompt: " rest well. Yes"))
    assert skeleton_of_thought.QUESTION in page
    assert page.count("rest well: rest well") == 4
