"""Generative agents: villagers spend a day, meet, talk to each other, and look back at the end.

After Park et al., 2023, on a small scale. Each agent is one state, which is its memory: each thing that it
does or perceives is appended once. All agents run in parallel. The program awaits only where they go, which
decides who meets whom; the engine passes what they say to the other states.

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
    """A person, and the place where the day begins."""

    name: str
    about: str
    home: str


PEOPLE = [
    Person("Ada", "the baker, who wants to hold a feast", "bakery"),
    Person("Ben", "a fisherman, who lost his boat in the storm", "harbour"),
    Person("Cleo", "a young painter, who looks for something to paint", "market"),
]


class Villager:
    """A person during the day. ``memory``: everything that happened. ``place``: where the villager is now."""

    def __init__(self, person: Person, memory: af.State) -> None:
        self.name, self.place, self.memory = person.name, person.home, memory
        memory += af.user(f"You are {person.name}, {person.about}. Who are you?")
        memory += af.assistant(f"I am {person.name}, {person.about}.")

    def go(self, time: str) -> None:
        """Chooses one of the other places and speaks there."""
        others = [place for place in PLACES if place != self.place]
        self.memory += af.user(f"It is {time}. Where do you go now?")
        self.memory += af.assistant(af.select("place", others))
        self.memory += af.user("What do you say to the people there?")
        rest = af.gen("rest", max_tokens=24, stop=['"', "\n", "."], temperature=0.8, top_p=0.9)
        self.memory += af.assistant('I say: "I', rest, '."')
        self.memory.set("said", f"I{self.memory['rest']}.")

    def hear(self, other: Villager) -> None:
        """Appends what another villager says, which may still be generating."""
        self.memory += af.user(f'{other.name} is there too and says: "{other.memory["said"]}"')

    def look_back(self) -> af.Variable[str]:
        """Returns the memory of the day."""
        self.memory += af.user("It is night. What will you remember of this day?")
        self.memory += af.assistant("I will remember the", af.gen("memory", max_tokens=24, stop=["\n", "."]))
        return self.memory["memory"]


@dataclass(frozen=True)
class Moment:
    """What one villager did at one time. ``heard_by``: the others at the same place."""

    time: str
    name: str
    place: str
    said: str
    heard_by: tuple[str, ...]


@dataclass(frozen=True)
class Day:
    """Everything that happened, and what each villager remembers at night."""

    moments: list[Moment]
    memories: dict[str, str]


@af.program
async def live(s: af.State, people: Sequence[Person], times: Sequence[str] = TIMES) -> Day:
    """Simulates one day of some people."""
    s += af.system(
        f"You live in a village by the sea. Its places: {', '.join(PLACES)}. You speak plain English."
    )
    villagers = [Villager(person, memory) for person, memory in zip(people, s.fork(len(people)), strict=True)]
    moments = [moment for time in times for moment in await pass_time(villagers, time)]
    memories = {villager.name: villager.look_back() for villager in villagers}
    return Day(moments, {name: await memory for name, memory in memories.items()})


async def pass_time(villagers: list[Villager], time: str) -> list[Moment]:
    """Lets every villager go somewhere and speak, and the others there hear it."""
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
    """Prints the day as a table, and the memories."""
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
