"""Self-consistency: every line of thought has its own vote, and the votes are counted."""

import pytest
import self_consistency
from scripted_example import Asked, in_turn, run, scripted, shown
from self_consistency import Poll, number_in, poll

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
    assert dict(result.thoughts) == dict(zip(VOTES, [18, 18, 11, None, 18], strict=True))
    assert result.votes == {18: 3, 11: 1}
    assert result.winner == 18
    questions = asked.ending("Let us think:")
    assert questions == ["<user>What is 2 times 9?</user><assistant>Let us think:"] * len(VOTES)
    assert len(asked.prompts) == 2 * len(VOTES)


@pytest.mark.parametrize(
    ("votes", "winner"),
    [([], None), ([None, None], None), ([None, 4], 4), ([3, 4, 4], 4), ([7, 5, 5, 7], 7), ([0], 0)],
)
def test_the_first_of_equal_votes_wins_and_abstentions_do_not_count(votes, winner):
    assert Poll([("", vote) for vote in votes]).winner == winner


@pytest.mark.parametrize(
    ("text", "number"),
    [("", None), (" twelve", None), ("12", 12), (" 3 x 4 = 12 apples", 12), ("007", 7), ("x1y2", 2)],
)
def test_a_vote_is_the_last_number(text, number):
    assert number_in(text) == number


async def test_the_count_is_shown():
    page = await shown(self_consistency.main, scripted(voters(num_rounds=2)))
    assert "18 █████ 5" in page
    assert "11 ██ 2" in page
    assert page.count("abstains") == 1
