"""Maps that continue from a file, run failures again, and read tables."""

from __future__ import annotations

import dataclasses
import datetime
import json
import signal
import subprocess
import types
from collections import Counter
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, Field, SecretStr, computed_field
from support.faults import has_param
from support.observed_backends import Stepped, assert_idle, settle, unconstrained
from support.process_template import start_python
from support.programs import ask, echo

import agentflow as af
from agentflow.language.batch import retries as retries_module
from agentflow.language.batch.inputs import iterate_rows
from agentflow.language.batch.retries import MAX_PAUSE_S, pause_s

pytestmark = pytest.mark.anyio


class Asked:
    """A program that counts how often it ran on each input. Inputs in ``failing`` fail."""

    def __init__(self, failing: set[Any] = frozenset()) -> None:
        self.runs: Counter[Any] = Counter()
        self.failing = failing

    async def __call__(self, s: af.State, item: Any) -> Any:
        self.runs[json.dumps(item)] += 1
        if item in self.failing:
            raise KeyError(item)
        return {"of": item}


def entries_of(path: Path) -> list[Any]:
    """The entries of the log next to a file of results."""
    return [json.loads(line) for line in Path(f"{path}.resume").read_text().splitlines()[1:]]


# Resumed maps.


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    inputs=st.lists(st.integers(0, 5) | st.sampled_from("ab"), max_size=12),
    stops=st.lists(st.integers(0, 12), max_size=3),
    concurrency=st.integers(1, 4),
    failing=st.sets(st.integers(0, 5), max_size=2),
)
async def test_a_map_that_is_stopped_anywhere_runs_each_input_once(
    inputs, stops, concurrency, failing, tmp_path_factory
):
    path = tmp_path_factory.mktemp("map") / "run.jsonl"
    program = Asked(failing)
    async with af.session(backend=af.Scripted(echo)) as flow:
        for stop in stops:
            options: dict[str, Any] = {"concurrency": concurrency, "resume": path, "on_error": "return"}
            async with flow.map(program, inputs, **options) as results:
                for _ in range(stop):
                    if await anext(results, None) is None:
                        break
        program.failing = set()
        assert await flow.map(program, inputs, resume=path) == [{"of": item} for item in inputs]
        program.runs.clear()
        assert await flow.map(program, inputs, resume=path) == [{"of": item} for item in inputs]
        assert program.runs == {}
    assert [json.loads(line) for line in path.read_text().splitlines()] == [{"of": item} for item in inputs]
    assert len({entry["key"] for entry in entries_of(path)}) == len(inputs)


@pytest.mark.parametrize("ending", [".csv", ".TSV", ".json", ".parquet"])
async def test_f37_a_name_of_another_format_is_rejected(flow, tmp_path, ending):
    path = tmp_path / f"run{ending}"
    with pytest.raises(af.errors.BadArgument, check=has_param("resume")):
        flow.map(Asked(set()), ["a"], resume=path)
    assert list(tmp_path.iterdir()) == []


async def test_f37_a_key_that_a_file_cannot_hold_runs_nothing(flow, tmp_path):
    program = Asked()
    with pytest.raises(af.errors.BadArgument, check=has_param("key")):
        await flow.map(program, [("\ud800",)], resume=tmp_path / "run.jsonl", key=lambda item: item[0])
    assert program.runs == {}


async def test_failures_are_kept_and_run_again(flow, tmp_path):
    path = tmp_path / "run.jsonl"
    program = Asked({"b"})
    results = await flow.map(program, list("abc"), resume=path, on_error="return")
    assert [type(result) for result in results] == [dict, KeyError, dict]
    assert [entry.get("error") for entry in entries_of(path)] == [
        None,
        {"code": "KeyError", "message": "'b'"},
        None,
    ]
    with pytest.raises(KeyError):
        await flow.map(program, list("abc"), resume=path)
    program.failing = set()
    await flow.map(program, list("abc"), resume=path)
    assert program.runs == {'"a"': 1, '"b"': 3, '"c"': 1}


async def test_a_key_identifies_an_input_whose_text_changes(flow, tmp_path):
    path = tmp_path / "run.jsonl"

    async def program(s: af.State, id: int, text: str) -> str:
        return text

    first = [{"id": 1, "text": "a"}, {"id": 2, "text": "b"}]
    assert await flow.map(program, first, resume=path, key="id") == ["a", "b"]
    second = [{"id": 2, "text": "changed"}, {"id": 3, "text": "c"}]
    assert await flow.map(program, second, resume=path, key=lambda row: row["id"]) == ["b", "c"]


@dataclasses.dataclass
class Grade:
    mark: int


async def test_results_are_what_the_file_gives_back_also_the_first_time(flow, tmp_path):
    async def typed(s: af.State, mark: int) -> Grade:
        return Grade(mark)

    async def untyped(s, mark):
        return Grade(mark), {1: 2}

    for _ in range(2):
        assert await flow.map(typed, [1, 2], resume=tmp_path / "typed.jsonl") == [Grade(1), Grade(2)]
        found = await flow.map(untyped, [1], resume=tmp_path / "untyped.jsonl")
        assert found == [[{"mark": 1}, {"1": 2}]]


async def test_a_result_without_a_form_in_json_ends_the_map(flow, tmp_path):
    async def program(s, item):
        return object()

    with pytest.raises(af.errors.BadArgument, check=has_param("resume")):
        await flow.map(program, [1], resume=tmp_path / "run.jsonl", on_error="return")


async def test_seeds_of_the_rest_are_those_of_an_uninterrupted_map(tmp_path):
    async def seeded(s: af.State, item: int) -> int:
        return s._node.run.index

    path = tmp_path / "run.jsonl"
    async with (
        af.session(backend=af.Scripted(echo)) as flow,
        flow.map(seeded, range(10), resume=path, concurrency=2) as results,
    ):
        assert [await anext(results) for _ in range(3)] == [0, 1, 2]
    async with af.session(backend=af.Scripted(echo)) as flow:
        assert await flow.map(seeded, range(10), resume=path) == list(range(10))


async def test_a_map_without_resume_takes_no_key(flow, tmp_path):
    for options in ({"key": "id"}, {"resume": 3}, {"retries": -1}, {"resume": "x", "key": 3}):
        with pytest.raises(af.errors.BadArgument):
            flow.map(ask, [], **options)


async def test_a_graph_resumes(flow, tmp_path):
    graph = ask.trace(mark="")
    for _ in range(2):
        assert await flow.map(graph, ["a", "b"], resume=tmp_path / "run.jsonl") == ["<a>", "<b>"]


CHILD = """
import sys
import agentflow as af

@af.program
async def double(s: af.State, number: int) -> str:
    s += f"twice {number} is" + af.gen("x")
    answer = await s["x"]
    print(number, flush=True)
    return answer

answers = lambda prompt: str(2 * int(prompt.split()[1]))
flow = af.session(backend=af.Scripted(answers))
found = af.map(double, range(500), resume=sys.argv[1], concurrency=16, session=flow)
assert found == [str(2 * number) for number in range(500)], found
print("done", flush=True)
"""


def test_each_input_is_once_in_a_file_whose_writers_were_killed(tmp_path):
    script, path = tmp_path / "child.py", tmp_path / "run.jsonl"
    script.write_text(CHILD)
    ran: Counter[str] = Counter()
    kills = iter([1, 170, 60])
    while True:
        with start_python("-P", script, path, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            limit = next(kills, None)
            lines = []
            for line in child.stdout:
                lines.append(line.strip())
                if len(lines) == limit:
                    child.send_signal(signal.SIGKILL)
                    break
            lines += [line.strip() for line in child.stdout]
        ran.update(lines)
        if limit is None:
            assert child.returncode == 0
            break
        assert child.returncode == -signal.SIGKILL
        # A result that was written stays: no one of these runs again.
        whole = path.read_bytes().split(b"\n")[:-1]
        assert len(whole) == len(set(whole))
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert found == [str(2 * number) for number in range(500)]
    assert ran["done"] == 1
    # Only inputs that ran when a process was killed ran twice.
    assert sum(ran.values()) - 1 - 500 <= 3 * 16


# Retries.


async def test_a_failure_that_may_pass_runs_again(monkeypatch):
    monkeypatch.setattr(retries_module, "FIRST_PAUSE_S", 0.0)
    overloaded = af.Overloaded("busy")
    overloaded.retry_after_s = 0.0
    answers = [af.errors.EngineFailed("x"), overloaded, "none", "12"]

    async def number(s: af.State, item: int) -> int:
        s += af.gen("x", type=int)
        return await s["x"]

    async with af.session(backend=unconstrained(answers)) as flow:
        assert await flow.map(number, [1], retries=3) == [12]
    async with af.session(backend=unconstrained(answers)) as flow:
        with pytest.raises(af.InvalidValue):
            await flow.map(number, [1], retries=2)


@pytest.mark.parametrize("error", [KeyError("a bug"), af.errors.BadArgument("x"), af.BudgetExceeded("x")])
async def test_a_failure_that_stays_does_not_run_again(flow, error):
    runs = []

    async def program(s: af.State, item: int) -> None:
        runs.append(item)
        raise error

    with pytest.raises(type(error)):
        await flow.map(program, [1], retries=5)
    assert runs == [1]


async def test_a_retry_samples_anew_and_changes_no_other_input(flow):
    indices = []

    async def program(s: af.State, item: int) -> int:
        indices.append(s._node.run.index)
        if item == 0 and len(indices) == 1:
            raise TimeoutError
        return item

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(retries_module, "FIRST_PAUSE_S", 0.0)
        assert await flow.map(program, [0, 1, 2], retries=1, concurrency=1) == [0, 1, 2]
    assert len(set(indices)) == 4
    assert [index for index in indices if index < 2**32] == [0, 1, 2]


async def test_leaving_a_map_ends_a_pause():
    failing = af.Scripted(lambda prompt: af.errors.EngineFailed("down"))
    async with af.session(backend=failing) as flow, flow.map(ask, ["a"], retries=10):
        await settle()
    assert_idle(failing)


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


def asking(seconds: float | None) -> af.Overloaded:
    error = af.errors.RateLimited("slow down")
    error.retry_after_s = seconds
    return error


@pytest.mark.parametrize(
    ("error", "pauses"),
    [
        (af.errors.EngineFailed("x"), [0.5, 1.0, 2.0]),
        (asking(None), [0.5, 1.0]),
        (asking(7.5), [7.5, 7.5]),
        (asking(0.0), [0.0]),
        (af.InvalidValue("x"), [0.0, 0.0]),
        (caused(af.errors.RunFailed("x"), asking(3.0)), [3.0]),
        (caused(af.Cancelled("x"), af.errors.EngineDown("y")), [0.5]),
        (ExceptionGroup("x", [asking(3.0), ConnectionResetError()]), [3.0]),
        (ExceptionGroup("x", [asking(3.0), KeyError()]), [None]),
        (af.errors.RunFailed("x"), [None]),
        (af.errors.ScriptMismatch("x"), [None]),
        (af.errors.NotAuthorized("x"), [None]),
        (af.PromptTooLong("x"), [None]),
        (caused(KeyError("a bug"), asking(3.0)), [None]),
    ],
)
def test_the_pauses(error, pauses):
    assert [pause_s(error, number) for number in range(1, len(pauses) + 1)] == pauses
    assert pause_s(error, 100) in (None, 0.0, MAX_PAUSE_S, *pauses)


# Tables.


class Arrow:
    """A table of which only the Arrow stream is known."""

    def __init__(self, table: Any) -> None:
        self._table = table

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        return self._table.__arrow_c_stream__(requested_schema)


def tables() -> list[Any]:
    import pandas
    import polars

    columns = {"id": [1, 2], "question": ["a", "b"], "score": [1.5, None], "note": [None, "x"]}
    return [polars.DataFrame(columns), Arrow(polars.DataFrame(columns)), pandas.DataFrame(columns)]


async def test_the_rows_of_dataframes(flow, tmp_path):
    wanted = [
        {"id": 1, "question": "a", "score": 1.5, "note": None},
        {"id": 2, "question": "b", "score": None, "note": "x"},
    ]
    for number, table in enumerate(tables()):
        assert [dict(row) for row in iterate_rows(table)] == wanted
        path = tmp_path / f"{number}.jsonl"
        for _ in range(2):
            found = await flow.map(ask, table, resume=path, key="id").to_dicts()
            assert found == [row | {"result": f"<{row['question']}>"} for row in wanted]
        assert await flow.map(ask, table).pairs() == list(zip(wanted, ["<a>", "<b>"], strict=True))
        assert type(table).__module__.partition(".")[0] in (__name__, "pandas", "polars")


THING = object()


@dataclasses.dataclass
class Kept:
    day: datetime.date
    thing: Any


class KeptStruct(msgspec.Struct, rename="camel"):
    the_day: datetime.date
    the_thing: Any


class KeptModel(BaseModel):
    day: datetime.date = Field(serialization_alias="theDay")
    thing: Any
    token: SecretStr = SecretStr("x")
    hidden: int = Field(1, exclude=True)

    @computed_field
    def year(self) -> int:
        return self.day.year


class Untold(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


DAY = datetime.date(2024, 5, 1)


@pytest.mark.parametrize(
    ("result", "columns"),
    [
        ({"days": [DAY], "thing": THING, 3: 4}, {"days": ["2024-05-01"], "thing": THING, "3": 4}),
        ({("a", 1): 2}, {"('a', 1)": 2}),
        (Kept(DAY, THING), {"day": "2024-05-01", "thing": THING}),
        (KeptStruct(DAY, THING), {"theDay": "2024-05-01", "theThing": THING}),
        (
            KeptModel(day=DAY, thing=THING),
            {"theDay": "2024-05-01", "thing": THING, "token": SecretStr("x"), "year": 2024},
        ),
        (types.MappingProxyType({"thing": THING}), {"thing": THING}),
        (Kept, {"result": Kept}),
        (THING, {"result": THING}),
        (Untold(), {"error": "Untold: Untold"}),
    ],
)
async def test_f37_rows_have_values_without_a_form_in_json(flow, result, columns):
    """The rows of all results are lost otherwise, since the map gives each result once."""

    async def made(s: af.State, question: str) -> Any:
        if question == "a":
            return {"now": "yes"}
        if isinstance(result, Exception):
            raise result
        return result

    first, second = await flow.map(made, ["a", "b"], on_error="return").to_dicts()
    missing = dict.fromkeys({"now", *columns})
    assert first == missing | {"question": "a", "now": "yes"}
    assert second == missing | {"question": "b"} | columns


async def test_f37_columns_of_a_table_may_have_any_name(flow):
    import pandas
    import polars

    async def typed(s: af.State, question: str, type: str) -> str:
        return f"{question} {type}"

    rows = [{"question": "a", "type": "x", "dtype": "y"}, {"question": "b", "type": "z", "dtype": ""}]
    for table in (pandas.DataFrame(rows), polars.DataFrame(rows), Arrow(polars.DataFrame(rows))):
        assert await flow.map(ask, table).pairs() == list(zip(rows, ["<a>", "<b>"], strict=True))
        assert await flow.map(typed, table) == ["a x", "b z"]


async def test_a_missing_column_is_named(flow):
    for table in tables():
        with pytest.raises(af.errors.BadArgument, match=r"'item'.*'question'"):
            await flow.map(Asked(), table)


async def test_a_column_is_a_list_of_values(flow):
    for table in (tables()[0], tables()[2]):
        assert await flow.map(ask, table["question"]) == ["<a>", "<b>"]


async def test_inputs_beside_results(flow):
    results = flow.map(ask, ["a", ("b", "c")][:1])
    async with results.pairs() as pairs:
        assert [pair async for pair in pairs] == [("a", "<a>")]

    async def graded(s: af.State, question: str, mark: int = 0) -> Any:
        if mark == 3:
            raise KeyError("three")
        return Grade(mark) if mark else question

    rows = await flow.map(
        graded, ["a", ("b", 2), {"question": "c", "mark": 3}, (1, 2, 3)], on_error="return"
    ).to_dicts()
    assert rows[0] == {
        "question": "a", "result": "a", "mark": None, "result_mark": None, "error": None, "input": None
    }  # fmt: skip
    assert (rows[1]["mark"], rows[1]["result_mark"]) == (2, 2)
    assert rows[2]["error"] == "KeyError: 'three'"
    assert rows[3]["input"] == (1, 2, 3)
    assert rows[3]["error"].startswith("TypeError")


async def test_dropping_a_map_and_its_pairs_ends_the_runs():
    backend = Stepped({"": "never ever"})
    async with af.session(backend=backend) as flow:
        pairs = flow.map(ask, ["a", "b"]).pairs()
        async with anyio.create_task_group() as group:
            group.start_soon(anext, pairs)
            await settle()
            assert backend.generator.num_running == 2
            group.cancel_scope.cancel()
        del pairs
        await settle()
        assert backend.generator.num_running == 0
