"""The evaluation: answers are scored, kept, and not asked for again."""

import evaluation
import pytest
from evaluation import CASES, Case, is_right
from scripted_example import Asked, scripted, shown

pytestmark = pytest.mark.anyio


def answer(prompt: str) -> str:
    """Right, but the brief answers to half of the questions."""
    [(index, case)] = [(i, case) for i, case in enumerate(CASES) if f"<user>{case.question}</user>" in prompt]
    return "none" if "<system>" in prompt and index % 2 else f"It is {case.expected}."


async def test_the_scores_are_shown_and_a_second_run_asks_nothing(tmp_path):
    asked = Asked(answer)
    page = await shown(evaluation.main, scripted(asked), folder=tmp_path)
    assert "100% right" in page
    assert "50% right" in page
    assert len(asked.prompts) == 2 * len(CASES)
    assert await shown(evaluation.main, scripted(asked), folder=tmp_path) == page
    assert len(asked.prompts) == 2 * len(CASES)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "brief.jsonl",
        "brief.jsonl.resume",
        "direct.jsonl",
        "direct.jsonl.resume",
    ]


def test_an_answer_is_right_in_any_case_and_sentence():
    case = Case("What is the chemical symbol of water?", "H2O")
    assert is_right("it is h2o, of course", case)
    assert not is_right("water", case)
