"""Retrieval: what the index ranks first is wired into the question."""

import pytest
import retrieval
from hypothesis import given
from hypothesis import strategies as st
from retrieval import PASSAGES, Index, ask
from scripted_example import Asked, run, scripted, shown

pytestmark = pytest.mark.anyio


def answerer(prompt: str) -> str:
    if prompt.endswith("Search for:"):
        return " soft feathers\nand so on"
    return " Because it is so. "


async def test_the_query_finds_what_the_answer_is_made_of():
    asked = Asked(answerer)
    found = await run(ask, scripted(asked), "Why?", Index(PASSAGES))
    owls = next(passage for passage in PASSAGES if "feathers" in passage)
    assert (found.query, found.passages, found.answer) == ("soft feathers", owls, "Because it is so.")
    assert asked.prompts == [
        "<user>Which words should I search for to find out: Why?</user><assistant>Search for:",
        f"<user>{owls}\n\nWhy? Answer in one sentence.</user><assistant>",
    ]


async def test_an_empty_search_result_is_part_of_the_prompt():
    asked = Asked(lambda prompt: " xyz")
    found = await run(ask, scripted(asked), "Qqq?", Index(PASSAGES))
    assert found.passages == "(nothing was found)"
    assert "<user>(nothing was found)\n\nQqq?" in asked.prompts[1]


@pytest.mark.parametrize("passage", PASSAGES)
def test_a_passage_is_found_by_its_own_words(passage):
    assert Index(PASSAGES).search(passage, 2)[0] == passage


def test_rare_words_short_passages_and_repetition_count():
    common = ["cold sea", "cold hill", "cold wind", "cold warm"]
    assert Index(common).search("cold warm", 1) == ["cold warm"]
    assert Index(["sea and a long grey hill", "sea", "wind"]).search("sea", 3) == [
        "sea",
        "sea and a long grey hill",
    ]
    assert Index(["sea hill", "sea sea", "wind"]).search("sea", 1) == ["sea sea"]


WORDS = st.lists(st.sampled_from(["sea", "hill", "wind", "rain", "snow"]), min_size=1, max_size=6).map(
    " ".join
)


@given(passages=st.lists(WORDS, min_size=1, max_size=6), query=WORDS, count=st.integers(1, 4))
def test_what_is_found_shares_a_word_with_the_query(passages, query, count):
    found = Index(passages).search(query, count)
    sharing = [passage for passage in passages if set(passage.split()) & set(query.split())]
    assert len(found) == min(count, len(sharing))
    assert all(passage in sharing for passage in found)


async def test_the_answers_are_shown():
    page = await shown(retrieval.main, scripted(answerer))
    assert page.count("Because it is so.") == len(retrieval.QUESTIONS)
    assert "about one metre a day" in page
