"""Tree of thought: kept thoughts are continued, others are dropped, and no judgment is in the story."""

import itertools

import pytest
import tree_of_thought
from scripted_example import Asked, run, scripted, shown
from tree_of_thought import search

pytestmark = pytest.mark.anyio

VERDICT = "good or bad?</user><assistant>"


def sentences(prompt: str) -> list[str]:
    """The thoughts in a prompt, without the given beginning."""
    story = prompt.partition("<assistant>")[2].partition("</assistant>")[0]
    return [sentence.strip() for sentence in story.split(".")[1:] if sentence.strip()]


def storyteller(is_good) -> Asked:
    """Thoughts are numbered in the order of their requests."""
    numbers = itertools.count()

    def answer(prompt: str) -> str:
        if prompt.endswith(VERDICT):
            return "good" if is_good(int(sentences(prompt)[-1].split()[1])) else "bad"
        return f" Thought {next(numbers)}. And more."

    return Asked(answer)


async def test_the_best_thoughts_of_each_level_are_continued():
    asked = storyteller(lambda number: number % 3 == 1)
    thoughts = await run(search, scripted(asked), "Write.", "It begins.", depth=3, breadth=3, num_kept=2)
    levels = [[thought for thought in thoughts if len(thought.path) == depth] for depth in (1, 2, 3)]
    assert [len(level) for level in levels] == [3, 6, 6]
    assert [sum(thought.is_kept for thought in level) for level in levels] == [2, 2, 1]
    for level in levels:
        kept = [thought.score for thought in level if thought.is_kept]
        assert min(kept) >= max(thought.score for thought in level if not thought.is_kept)
    kept_paths = {thought.path for thought in thoughts if thought.is_kept} | {()}
    assert all(thought.path[:-1] in kept_paths for thought in thoughts)
    best = next(thought for thought in reversed(thoughts) if thought.is_kept)
    assert best.score > 0


async def test_a_thought_continues_its_ancestors_and_knows_no_judgment():
    asked = storyteller(lambda number: number % 2 == 0)
    thoughts = await run(search, scripted(asked), "Write.", "It begins.", depth=3, breadth=2, num_kept=1)
    texts = {thought.path: thought.text for thought in thoughts}
    continued = [prompt for prompt in asked.prompts if not prompt.endswith(VERDICT)]
    assert len(continued) == len(thoughts) == 6
    for prompt in continued:
        assert prompt.startswith("<user>Write.</user><assistant>It begins.")
        assert "good or bad" not in prompt
    stories = {tuple(sentences(prompt)) for prompt in continued}
    assert stories == {tuple(texts[path[:i]] for i in range(1, len(path))) for path in texts}


async def test_an_empty_thought_is_kept_last():
    numbers = itertools.count()

    def answer(prompt: str) -> str:
        if prompt.endswith(VERDICT):
            return "bad" if sentences(prompt) else "good"
        return "." if next(numbers) % 2 == 0 else " Something."

    thoughts = await run(search, scripted(answer), "Write.", "It begins.", depth=2, breadth=4, num_kept=2)
    assert sum(not thought.text for thought in thoughts) == 6
    assert all(thought.text for thought in thoughts if thought.is_kept)


async def test_the_tree_and_its_best_story_are_shown():
    asked = storyteller(lambda number: True)
    page = await shown(tree_of_thought.main, scripted(asked))
    assert page.count("Thought ") == 15 + 3
    assert page.rstrip().splitlines()[-1].startswith(tree_of_thought.BEGINNING)
