"""The same program on the embedded engine and on a server gives the same, in fp32; the demo runs."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
from end_to_end.typed_cases import Person
from support.commands import run_python, served

import agentflow as af

EXAMPLES = Path(__file__).parents[2] / "examples"
THING = "an old oak"
TOPICS = ["its colour", "its roots", "its age"]


@af.program
async def describe(s: af.State, thing: str) -> dict[str, str]:
    """Uses all of these together: turns, select, fork, wiring, sums, f-strings, stops, sampling."""
    s += af.system("You answer in short sentences.")
    s += af.user(f"Think of {thing}. Is it alive? Answer yes or no.")
    s += af.assistant(af.select("alive", ["yes", "no"]))
    async with s.fork(len(TOPICS)) as branches:
        for branch, topic in zip(branches, TOPICS, strict=True):
            branch += af.user(f"Describe {topic}.")
            branch += af.assistant(
                af.gen("part", min_tokens=8, max_tokens=12, stop=["\n", "."], temperature=1.0)
            )
    s += af.user(
        "Notes:\n", *["- " + branch["part"] + ".\n" for branch in branches], f"First: {branches[0]['part']}"
    )
    penalties = {"frequency_penalty": 0.5, "presence_penalty": 0.2, "repetition_penalty": 1.1}
    async with s.assistant():
        s += "Well, " + af.gen("whole", min_tokens=12, max_tokens=12) + "\nPS: "
        s += af.gen("sampled", min_tokens=8, max_tokens=8, temperature=0.8, top_p=0.9)
        s += af.gen("edited", max_tokens=8, temperature=0.9, min_tokens=5, stop_regex=r"[.!?]\s", **penalties)
    values = {f"part{i}": await branch["part"] for i, branch in enumerate(branches)}
    return values | {name: await s[name] for name in ("alive", "whole", "sampled", "edited")}


@af.program
async def invent(s: af.State) -> list[Any]:
    """Typed values, wired and selected."""
    s += af.user("Invent people.")
    async with s.fork(4) as branches:
        for branch in branches:
            branch += af.assistant(af.gen("person", schema=Person, max_tokens=60, temperature=1.0))
    s += af.user(
        "First: ", branches[0]["person"], f" Second: {branches[1]['person'].json('name')}. Who is older?"
    )
    s += af.assistant(
        "It is ", af.select("older", ["the first", "the second"]), ": ", af.gen("age", type=int)
    )
    people = await branches.gather("person")
    return [people, await s["older"], await s["age"], (await s.messages())[1]["content"]]


PROGRAMS = [(describe, THING), (invent,)]


async def run_on(*programs, **kwargs) -> list[Any]:
    async with af.session(seed=7, **kwargs) as flow:
        return [await flow.run(*program) for program in programs]


@pytest.fixture(scope="module")
def embedded_results(tiny):
    backend = af.Embedded(str(tiny), dtype="float32", kv_tokens=6000, threads=1)
    return anyio.run(lambda: run_on(*PROGRAMS, backend=backend))


@pytest.fixture(scope="module")
def url(tiny: Path) -> Iterator[str]:
    options = ("--dtype", "float32", "--kv-tokens", "8000", "--threads", "1")
    with served("--model", f"smollm2-135m={tiny}", *options) as (url, _):
        yield url


def test_the_values_are_worth_comparing(embedded_results):
    described, (people, older, age, told) = embedded_results
    assert described["alive"] in ("yes", "no")
    assert all(len(value) > 5 for name, value in described.items() if name != "alive")
    assert len({described[f"part{i}"] for i in range(3)}) > 1
    assert all(isinstance(person, Person) for person in people)
    assert len({person.name for person in people}) > 2
    assert older in ("the first", "the second")
    assert isinstance(age, int)
    shown = msgspec.json.encode(people[0]).decode().replace(",", ", ").replace(":", ": ")
    assert told == f"First: {shown} Second: {people[1].name}. Who is older?"


@pytest.mark.parametrize("backend", ["asyncio", pytest.param("trio", marks=pytest.mark.full)])
def test_a_server_gives_its_clients_what_the_embedded_engine_gives(embedded_results, url, backend):
    results: list[list[Any]] = []

    async def client(num_programs: int) -> None:
        results.append(await run_on(*PROGRAMS[:num_programs], url=url))

    async def main() -> None:
        async with anyio.create_task_group() as group:
            for num_programs in (1, 1, 2):
                group.start_soon(client, num_programs)

    anyio.run(main, backend=backend)
    assert results == [embedded_results[:1], embedded_results[:1], embedded_results]


def test_the_demo_answers_on_a_server(url):
    result = run_python(EXAMPLES / "essay_judge.py", "--url", url)
    assert result.returncode == 0, result.stderr
    assert "grade" in result.stdout
    for figure in (
        "prompt tokens",
        "of which cached",
        "hit rate",
        "forward steps",
        "tokens per second",
        "peak memory",
    ):
        assert figure in result.stdout


def test_the_demo_reports_in_one_line_that_no_server_answers():
    result = run_python(EXAMPLES / "essay_judge.py", "--url", "ws://127.0.0.1:1")
    assert result.returncode == 1
    assert "agentflow serve" in result.stdout.replace("\n", " ")
    assert "Traceback" not in result.stdout + result.stderr
