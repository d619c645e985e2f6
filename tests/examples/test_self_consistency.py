"""Self-consistency: every line of thought has its own vote, and the votes are counted."""

import pytest
import self_consistency
from scripted_example import Asked, in_turn, run, scripted, shown
from self_consistency import number_in, poll

pytestmark = pytest.mark.anyio

VOTES = {
    "so twice nine": "18",
    "nine and nine": " it is 2 x 9 = 18.",
    "two and nine": " 11",
    "no idea": " unclear",
    "nine twice": " 18\n19",
}


def voters(num_rounds: int = 1) -> Asked:
    think = in_turn(list(VOTES) * num_rounds)
    lead = "\nThe answer is"

    def answer(prompt: str) -> str:
        if not prompt.endswith(lead):
            return think(prompt)
        return VOTES[prompt.removesuffix(lead).partition("Let us think:")[2]]

    return Asked(answer)


async def test_each_line_of_thought_votes_and_the_most_votes_win():
    asked = voters()
    result = await run(poll, scripted(asked), "What is 2 times 9?", num_voters=len(VOTES))
    votes = dict(zip(VOTES, [18, 18, 11, None, 18], strict=True))
    assert result.winner == 18
    assert dict(result.thoughts).items() <= votes.items()
    assert [vote for _, vote in result.thoughts].count(18) >= 2
    assert len(result.thoughts) + result.num_cancelled == len(VOTES)
    questions = asked.ending("Let us think:")
    assert questions == ["<user>What is 2 times 9?</user><assistant>Let us think:"] * len(VOTES)


async def test_without_a_number_there_is_no_answer():
    result = await run(poll, scripted(voters_without_a_number()), "What is 2 times 9?", num_voters=3)
    assert result.winner is None
    assert len(result.thoughts) == 3


def voters_without_a_number() -> Asked:
    return Asked(lambda prompt: " none")


@pytest.mark.parametrize(
    ("text", "number"),
    [("", None), (" twelve", None), ("12", 12), (" 3 x 4 = 12 apples", 12), ("007", 7), ("x1y2", 2)],
)
def test_a_vote_is_the_last_number(text, number):
    assert number_in(text) == number


async def test_the_votes_and_the_answer_are_shown():
    page = await shown(self_consistency.main, scripted(voters(num_rounds=2)))
    assert "The answer: 18" in page
    assert page.count(" 18 ") >= 4
    assert "were cancelled" in page
