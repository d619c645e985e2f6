"""Few-shot: the cases are turns before the question."""

import few_shot
import pytest
from scripted_example import Asked, run, scripted, shown

pytestmark = pytest.mark.anyio

SYSTEM = "<system>You name the capital of a country.</system>"
CASES = [("France", "Paris"), ("Peru", "Lima")]


def answer(prompt: str) -> str:
    return " Rome\nand more" if "Paris" in prompt else "a country"


@pytest.mark.parametrize(
    ("cases", "turns", "told"),
    [
        ([], "", "a country"),
        (
            CASES,
            "<user>France</user><assistant>Paris</assistant><user>Peru</user><assistant>Lima</assistant>",
            "Rome",
        ),
    ],
)
async def test_the_cases_stand_before_the_question(cases, turns, told):
    asked = Asked(answer)
    assert await run(few_shot.capital, scripted(asked), "Italy", cases) == told
    assert asked.prompts == [f"{SYSTEM}{turns}<user>Italy</user><assistant>"]


async def test_all_countries_are_asked_both_ways():
    asked = Asked(answer)
    table = await shown(few_shot.main, scripted(asked))
    num_countries = len(few_shot.COUNTRIES)
    assert len(asked.prompts) == 2 * num_countries
    assert sum("Tokyo" in prompt for prompt in asked.prompts) == num_countries
    assert table.count("a country") - table.count("of a country") == table.count("Rome") == num_countries
