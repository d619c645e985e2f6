"""Generative agents: only agents at the same place hear what is said there."""

import itertools
import re

import generative_agents
import pytest
from generative_agents import PEOPLE, PLACES, TIMES, live
from scripted_example import Asked, run, scripted, shown

import agentflow as af

pytestmark = pytest.mark.anyio

# Ada, Ben, Cleo begin in the bakery, the harbour, the market, and never stay where they are.
SCHEDULE = {
    "morning": {"Ada": "market", "Ben": "market", "Cleo": "harbour"},
    "noon": {"Ada": "bakery", "Ben": "bakery", "Cleo": "bakery"},
    "evening": {"Ada": "harbour", "Ben": "market", "Cleo": "market"},
}


def whose(prompt: str) -> str:
    return re.search(r"You are (\w+),", prompt).group(1)


def when(prompt: str) -> str:
    return re.findall(r"It is (\w+)\.", prompt)[-1]


def villager(prompt: str) -> str:
    name, time = whose(prompt), when(prompt)
    if prompt.endswith('I say: "I'):
        return f' am {name} at {time}." And goes'
    if prompt.endswith("I will remember the"):
        return f" {prompt.count('says:')} voices. The end"
    return SCHEDULE[time][name]


def heard_at(time: str, name: str) -> set[str]:
    return {other for other, place in SCHEDULE[time].items() if place == SCHEDULE[time][name]} - {name}


async def test_a_day_passes_as_it_was_lived():
    day = await run(live, scripted(villager), PEOPLE)
    assert [(moment.time, moment.name) for moment in day.moments] == [
        (time, person.name) for time in TIMES for person in PEOPLE
    ]
    for moment in day.moments:
        assert moment.place == SCHEDULE[moment.time][moment.name]
        assert moment.said == f"I am {moment.name} at {moment.time}."
        assert set(moment.heard_by) == heard_at(moment.time, moment.name)
    assert day.memories == {"Ada": " 3 voices", "Ben": " 4 voices", "Cleo": " 3 voices"}


async def test_a_villagers_prompt_has_only_what_was_said_at_the_same_place():
    asked = Asked(villager)
    await run(live, scripted(asked), PEOPLE)
    memories = {whose(prompt): prompt for prompt in asked.ending("I will remember the")}
    assert set(memories) == {person.name for person in PEOPLE}
    for name, memory in memories.items():
        for time in TIMES:
            assert memory.count(f'I say: "I am {name} at {time}."') == 1
            heard = re.findall(rf'(\w+) is there too and says: "I am \1 at {time}\."', memory)
            assert len(heard) == len(set(heard))
            assert set(heard) == heard_at(time, name)


async def test_memories_only_grow():
    asked = Asked(villager)
    await run(live, scripted(asked), PEOPLE)
    for person in PEOPLE:
        own = [prompt for prompt in asked.prompts if whose(prompt) == person.name]
        assert len(own) == 2 * len(TIMES) + 1
        assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(own))


@pytest.mark.parametrize("person", PEOPLE, ids=lambda person: person.name)
async def test_staying_at_home_is_not_among_the_choices(person):
    script = lambda prompt: person.home if prompt.endswith("<assistant>") else "hello"  # noqa: E731
    others = [place for place in PLACES if place != person.home]
    with pytest.raises(af.errors.RunFailed, match=f"none of the choices \\['{others[0]}', '{others[1]}'"):
        await run(live, scripted(script), [person])


async def test_the_day_is_shown():
    page = await shown(generative_agents.main, scripted(villager))
    assert page.count("I am ") == len(PEOPLE) * len(TIMES)
    assert "Ben will remember the 4 voices." in page
    assert "nobody" in page
