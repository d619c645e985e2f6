"""A long document: parts without loss, summaries of parts concurrently or one after the other."""

import re

import long_document
import pytest
from hypothesis import given
from hypothesis import strategies as st
from long_document import DOCUMENT, chain, map_reduce, parts_of
from scripted_example import Asked, run, scripted, shown

pytestmark = pytest.mark.anyio

PARTS = ["part-1 text", "part-2 text", "part-3 text", "part-4 text"]


def summariser(prompt: str) -> str:
    """Names the parts and the summaries that it sees."""
    seen = re.findall(r"part-\d|S\(\S*\)", prompt)
    return f"S({'+'.join(seen)})\nand no more"


PARAGRAPHS = st.lists(st.integers(1, 30).map(lambda count: " ".join(["word"] * count)), max_size=12)


@given(paragraphs=PARAGRAPHS, max_words=st.integers(1, 50))
def test_parts_are_whole_paragraphs_and_as_large_as_may_be(paragraphs, max_words):
    parts = parts_of("\n\n".join(paragraphs), max_words)
    assert "\n\n".join(parts) == "\n\n".join(paragraphs)
    lengths = [len(part.split()) for part in parts]
    firsts = [len(part.partition("\n\n")[0].split()) for part in parts]
    assert all(length <= max_words or "\n\n" not in part for length, part in zip(lengths, parts, strict=True))
    assert all(length + first > max_words for length, first in zip(lengths, firsts[1:], strict=False))


async def test_map_reduce_sums_up_each_part_alone_and_then_the_summaries():
    asked = Asked(summariser)
    assert await run(map_reduce, scripted(asked), PARTS) == "S(S(part-1)+S(part-2)+S(part-3)+S(part-4))"
    assert len(asked.prompts) == 5
    notes = "\n\n".join(f"S(part-{i})" for i in range(1, 5))
    assert f"one story:\n\n{notes}\n\nSum up the whole story.</user>" in asked.prompts[-1]


async def test_a_chain_reads_each_part_with_the_summary_of_what_came_before():
    asked = Asked(summariser)
    assert await run(chain, scripted(asked), PARTS) == "S(S(S(S(part-1)+part-2)+part-3)+part-4)"
    assert len(asked.prompts) == 4
    assert "so far: (nothing yet)" in asked.prompts[0]
    for i, prompt in enumerate(asked.prompts[1:], 2):
        assert sum(part in prompt for part in PARTS) == 1
        assert f"so far: {summariser(asked.prompts[i - 2]).partition(chr(10))[0]}\n\npart-{i} text" in prompt


async def test_both_summaries_are_shown_with_what_they_took():
    text = DOCUMENT.read_text(encoding="utf-8")
    page = await shown(long_document.main, scripted(lambda prompt: "A light."), text=text)
    assert f"{len(text.split())} words in {len(parts_of(text))} parts" in page
    assert page.count("A light.") == 2
    assert "map-reduce" in page
    assert "chain" in page
