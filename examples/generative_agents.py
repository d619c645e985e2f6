"""Generative agents: villagers go about their day, meet, hear each other, and look back at the end.

After Park et al., 2023, in small. Each agent is one state, and the state is its memory: what it did and
heard is appended, never sent again. All agents live at the same time. Only where they go is awaited, since
it decides who meets whom; what they say reaches the others inside the engine.

    python examples/generative_agents.py [--url ws://127.0.0.1:8410]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from example_session import example_parser, run_example
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import agentflow as af

PLACES = ("market", "harbour", "bakery")
TIMES = ("morning", "noon", "evening")


@dataclass(frozen=True)
class Person:
    """Who somebody is, and where the day begins."""

    name: str
    about: str
    home: str


PEOPLE = [
    Person("Ada", "the baker, who wants to hold a feast", "bakery"),
    Person("Ben", "a fisherman, who lost his boat in the storm", "harbour"),
    Person("Cleo", "a young painter, who looks for something to paint", "market"),
]


class Villager:
    """A person who lives: ``memory`` is all that happened, ``place`` where the villager is."""

    def __init__(self, person: Person, memory: af.State) -> None:
        self.name, self.place, self.memory = person.name, person.home, memory
        memory += af.user(f"You are {person.name}, {person.about}. Who are you?")
        memory += af.assistant(f"I am {person.name}, {person.about}.")

    def go(self, time: str) -> None:
        """Chooses among the other places, and speaks there."""
        others = [place for place in PLACES if place != self.place]
        self.memory += af.user(f"It is {time}. Where do you go now?")
        self.memory += af.assistant(af.select("place", others))
        self.memory += af.user("What do you say to the people there?")
        rest = af.gen("rest", max_tokens=24, stop=['"', "\n", "."], temperature=0.8, top_p=0.9)
        self.memory += af.assistant('I say: "I', rest, '."')
        self.memory.set("said", f"I{self.memory['rest']}.")

    def hear(self, other: Villager) -> None:
        """Remembers what another says, which need not have been said to its end."""
        self.memory += af.user(f'{other.name} is there too and says: "{other.memory["said"]}"')

    def look_back(self) -> af.Variable[str]:
        """What stays of the day."""
        self.memory += af.user("It is night. What will you remember of this day?")
        self.memory += af.assistant("I will remember the", af.gen("memory", max_tokens=24, stop=["\n", "."]))
        return self.memory["memory"]


@dataclass(frozen=True)
class Moment:
    """What one villager did at one time. ``heard_by``: who else was there."""

    time: str
    name: str
    place: str
    said: str
    heard_by: tuple[str, ...]


@dataclass(frozen=True)
class Day:
    """Everything that happened, and what each villager remembers in the end."""

    moments: list[Moment]
    memories: dict[str, str]


@af.program
async def live(s: af.State, people: Sequence[Person], times: Sequence[str] = TIMES) -> Day:
    """One day in the life of some people."""
    s += af.system(
        f"You live in a village by the sea. Its places: {', '.join(PLACES)}. You speak plain English."
    )
    villagers = [Villager(person, memory) for person, memory in zip(people, s.fork(len(people)), strict=True)]
    moments = [moment for time in times for moment in await pass_time(villagers, time)]
    memories = {villager.name: villager.look_back() for villager in villagers}
    return Day(moments, {name: await memory for name, memory in memories.items()})


async def pass_time(villagers: list[Villager], time: str) -> list[Moment]:
    """All go somewhere and speak; whoever is there too hears it."""
    for villager in villagers:
        villager.go(time)
    for villager in villagers:
        villager.place = await villager.memory["place"]
    meetings = {
        villager.name: [
            other for other in villagers if other.place == villager.place and other is not villager
        ]
        for villager in villagers
    }
    for villager in villagers:
        for other in meetings[villager.name]:
            villager.hear(other)
    return [
        Moment(
            time,
            villager.name,
            villager.place,
            await villager.memory["said"],
            tuple(other.name for other in meetings[villager.name]),
        )
        for villager in villagers
    ]


async def main(flow: af.Session, console: Console) -> None:
    """Shows the day as a table, and what everybody remembers."""
    day = await flow.run(live, PEOPLE)
    table = Table("time", "who", "where", "says", "heard by", title="A day in the village")
    for moment in day.moments:
        heard_by = ", ".join(moment.heard_by) or "nobody"
        table.add_row(moment.time, moment.name, moment.place, escape(moment.said), heard_by)
    console.print(table)
    for name, memory in day.memories.items():
        console.print(f"[bold]{name}[/] will remember the{escape(memory)}.")


if __name__ == "__main__":
    sys.exit(run_example(main, example_parser(__doc__).parse_args()))
