"""The file of a map's results: reading it back, and recovering from a write that was interrupted anywhere."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import warnings
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.faults import has_param

import agentflow as af
from agentflow.language.batch.results_file import Keys, ResultsFile, result_form
from agentflow.protocol.events import Usage

USED = Usage(10, 4, 2)


async def program(s: af.State, question: str) -> str:
    return question


async def other(s: af.State, question: str) -> str:
    return question


def opened(path: Path, of: Any = program) -> ResultsFile:
    return ResultsFile.open(path, of, result_form(of))


TEXT = st.text(st.characters(exclude_categories=["Cs"]))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=5,
)


async def untyped(s, item):
    return item


def log_of(path: Path) -> Path:
    return path.with_name(path.name + ".resume")


def entries_of(path: Path) -> list[Any]:
    return [json.loads(line) for line in log_of(path).read_text().splitlines()[1:]]


def add(file: ResultsFile, **results: Any) -> None:
    for key, result in results.items():
        file.add_result(key, result, USED)


def written(folder: Path, of: Any = program, **results: Any) -> Path:
    """A closed file of results."""
    path = folder / "run.jsonl"
    file = opened(path, of)
    add(file, **results)
    file.close()
    return path


def num_kept(path: Path, of: Any, keys: Any) -> list[bool]:
    file = opened(path, of)
    try:
        return [file.has_result(key) for key in keys]
    finally:
        file.close()


def test_f17b_the_file_has_the_results_and_nothing_else(tmp_path):
    path = tmp_path / "run.jsonl"
    file = opened(path, untyped)
    add(file, a={"mark": 1}, b=None)
    file.add_failure("c", af.errors.EngineFailed("no c"), USED)
    file.close()
    assert path.read_text() == '{"mark": 1}\nnull\n'
    header, *entries = map(json.loads, log_of(path).read_text().splitlines())
    assert header["program"] == "untyped"
    assert [entry["key"] for entry in entries] == ["a", "b", "c"]
    assert entries[2]["error"] == {"code": "engine_failed", "message": "no c"}
    assert entries[0]["tokens"] == {"prompt": 10, "cached": 4, "output": 2}


@given(results=st.lists(JSON, max_size=5), data=st.data())
def test_f17b_files_that_were_truncated_anywhere_have_every_result_before(results, data, tmp_path_factory):
    """The process is killed between any two bytes: a result is written before its entry."""
    path = tmp_path_factory.mktemp("results") / "run.jsonl"
    file = opened(path, untyped)
    for key, result in enumerate(results):
        file.add_result(key, result, USED)
    file.close()
    content, log = path.read_bytes(), log_of(path).read_bytes()
    size = data.draw(st.integers(0, len(content)))
    num_whole = content[:size].count(b"\n")
    entries = log.splitlines(keepends=True)
    least = len(b"".join(entries[: 1 + num_whole]))
    if size < len(content) and not content[:size].endswith(b"\n"):
        log_size = least  # the entry of a line comes after it
    else:
        least -= len(entries[num_whole]) if num_whole else len(entries[0])
        log_size = data.draw(st.integers(least + 1, least + len(entries[num_whole])))
        num_whole = max(0, log[:log_size].count(b"\n") - 1)
    path.write_bytes(content[:size])
    log_of(path).write_bytes(log[:log_size])
    if size and not log[:log_size].count(b"\n"):
        return  # no writer leaves this
    file = opened(path, untyped)
    assert [file.has_result(key) for key in range(len(results))] == [
        key < num_whole for key in range(len(results))
    ]
    assert [file.result(key) for key in range(num_whole)] == results[:num_whole]
    for key in range(num_whole, len(results)):
        file.add_result(key, results[key], USED)
    file.close()
    assert path.read_bytes() == content
    assert log_of(path).read_bytes() == log


def test_f17b_each_byte_of_either_file_after_a_crash_of_the_machine(tmp_path, monkeypatch):
    """Any end of either file may be missing, or be zeros."""
    monkeypatch.setattr(ResultsFile, "sync", lambda file: None)
    path = written(tmp_path, a="é", b="\n", c="x")
    content, log = path.read_bytes(), log_of(path).read_bytes()
    first = log.index(b"\n") + 1
    for tail in (b"", b"\0" * 7):
        for size in range(1, len(content) + 1):
            path.write_bytes(content[:size] + tail)
            log_of(path).write_bytes(log)
            num_whole = content[:size].count(b"\n")
            assert num_kept(path, program, "abc") == [index < num_whole for index in range(3)]
        for size in range(first, len(log) + 1):
            path.write_bytes(content)
            log_of(path).write_bytes(log[:size] + tail)
            num_whole = log[:size].count(b"\n") - 1
            assert num_kept(path, program, "abc") == [index < num_whole for index in range(3)]


@pytest.mark.parametrize(
    "content",
    [b'{"question": "my own inputs"}\n', b"[1, 2", b"\n", b'{"a": 1}', b"\x00\x01", b"a,b\n1,2\n"],
)
@pytest.mark.parametrize("log", [None, b"", b'{"agent', b"notes\n"])
def test_a_file_of_something_else_is_refused_and_left_alone(content, log, tmp_path):
    path = tmp_path / "inputs.jsonl"
    path.write_bytes(content)
    if log is not None:
        log_of(path).write_bytes(log)
    with pytest.raises(af.errors.BadArgument, match="not a file of results") as refused:
        opened(path)
    assert refused.value.param == "resume"
    assert path.read_bytes() == content
    assert (log_of(path).read_bytes() if log_of(path).exists() else None) == log


def test_f37_a_file_whose_log_is_missing_is_reported_so(tmp_path):
    path = written(tmp_path, program, a="x")
    log_of(path).unlink()
    with pytest.raises(af.errors.BadArgument, match=r"there is no .*\.resume: put both files there"):
        opened(path)


def test_f17b_a_file_of_an_earlier_version_is_refused_and_left_alone(tmp_path):
    path = tmp_path / "run.jsonl"
    content = '{"agentflow_map":1,"version":"0.1","program":"program"}\n{"key":"a","result":"x"}\n'
    path.write_text(content)
    with pytest.raises(af.errors.BadArgument, match="earlier version"):
        opened(path)
    assert path.read_text() == content


def test_the_file_of_another_program_or_format_is_refused(tmp_path):
    path = written(tmp_path, other, a="x")
    with pytest.raises(af.errors.BadArgument, match=r"'other'.*'program'"):
        opened(path)
    log_of(path).write_text('{"agentflow_map":9,"version":"9","program":"program"}\n')
    with pytest.raises(af.errors.BadArgument, match="format 9"):
        opened(path)
    with pytest.raises(af.errors.BadArgument, check=has_param("resume")):
        opened(tmp_path / "no folder" / "run.jsonl")


@pytest.mark.parametrize(("old", "new"), [(b"one", b"two"), (b'"one"', b'"longer"'), (b'"one"\n', b"")])
def test_f17b_results_that_were_changed_are_refused_and_left_alone(old, new, tmp_path):
    path = written(tmp_path, a="one", b="middle", c="last, which is long")
    changed = path.read_bytes().replace(old, new)
    path.write_bytes(changed)
    with pytest.raises(af.errors.BadArgument, match="not the one that was written"):
        opened(path)
    assert path.read_bytes() == changed


def test_a_damaged_entry_is_named(tmp_path):
    path = written(tmp_path, a="x")
    log_of(path).write_bytes(log_of(path).read_bytes() + b"garbage\n" + b'{"key": "b"}\n')
    with pytest.raises(af.errors.BadArgument, match="line 3"):
        opened(path)


def test_f17b_without_the_results_all_inputs_run_again(tmp_path):
    path = written(tmp_path, other, a="x")
    path.unlink()
    assert num_kept(path, program, "a") == [False]


def test_two_writers_at_once_are_refused_also_after_the_file_was_replaced(tmp_path):
    path = tmp_path / "run.jsonl"
    file = opened(path)
    with pytest.raises(af.errors.BadArgument, check=has_param("resume")):
        opened(path)
    add(file, b="2", a="1")
    file.close(["a", "b"])
    second = opened(path)
    with pytest.raises(af.errors.BadArgument, check=has_param("resume")):
        opened(path)
    assert [second.result(key) for key in "ab"] == ["1", "2"]
    second.close()


def test_closed_files_have_one_line_for_each_input_in_their_order(tmp_path):
    path = tmp_path / "run.jsonl"
    file = opened(path)
    for key in "zcab":
        file.add_failure(key, af.errors.EngineFailed(f"no {key}"), USED)
    add(file, a="A")
    file.close()
    file = opened(path)
    assert not file.has_result("c")
    assert file.has_result("a")
    add(file, z="Z", c="C")
    file.close(["a", "b", "c", "d"])
    assert path.read_text() == '"A"\n"C"\n"Z"\n'
    entries = entries_of(path)
    assert [entry["key"] for entry in entries] == ["a", "b", "c", "z"]
    assert entries[1]["error"] == {"code": "engine_failed", "message": "no b"}
    assert num_kept(path, program, "abcz") == [True, False, True, True]
    assert sorted(os.listdir(tmp_path)) == ["run.jsonl", "run.jsonl.resume"]


@pytest.mark.parametrize("num_replaced", [0, 1])
def test_f17b_a_rewrite_that_was_interrupted_is_finished_or_undone(num_replaced, tmp_path, monkeypatch):
    path = tmp_path / "run.jsonl"
    file = opened(path)
    add(file, c="C", a="A", b="B")
    replaced: list[str] = []

    def replace(old: str, new: str) -> None:
        if len(replaced) == num_replaced:
            raise Killed
        replaced.append(new)
        os.rename(old, new)

    monkeypatch.setattr("agentflow.language.batch.results_file.os.replace", replace)
    monkeypatch.setattr("agentflow.language.batch.results_file.os.unlink", lambda path: None)
    with pytest.raises(Killed):
        file.close(["a", "b", "c"])
    monkeypatch.undo()
    file = opened(path)
    assert [file.result(key) for key in "abc"] == ["A", "B", "C"]
    file.close(["a", "b", "c"])
    assert path.read_text() == '"A"\n"B"\n"C"\n'
    assert sorted(os.listdir(tmp_path)) == ["run.jsonl", "run.jsonl.resume"]


class Killed(BaseException):
    """Ends a rewrite as the end of its process does."""


def test_a_program_that_changed_is_noted(tmp_path):
    path = written(tmp_path, a="x")
    log = log_of(path).read_bytes()
    log_of(path).write_bytes(log.replace(b'"source":"', b'"source":"0'))
    with pytest.warns(UserWarning, match="changed"):
        opened(path).close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        log_of(path).write_bytes(b'{"agentflow_map":2,"version":"0","program":"program"}\n')
        opened(path).close()


@pytest.mark.parametrize("fails_at", [0, 1])
def test_a_full_disk_leaves_no_part_of_a_line(fails_at, tmp_path, monkeypatch):
    path = tmp_path / "run.jsonl"
    file = opened(path)
    add(file, a="A")
    content, log = path.read_bytes(), log_of(path).read_bytes()
    real, num_whole = os.write, 0

    def write(descriptor: int, data: bytes) -> int:
        nonlocal num_whole
        if num_whole < fails_at:
            num_whole += 1
            return real(descriptor, data)
        if len(data) < 10:
            raise OSError(28, "no space left on device")
        return real(descriptor, data[: len(data) // 2])

    monkeypatch.setattr("agentflow.language.batch.results_file.os.write", write)
    with pytest.raises(OSError, match="no space"):
        add(file, b="B" * 100)
    monkeypatch.undo()
    assert (path.read_bytes(), log_of(path).read_bytes()) == (content, log)
    add(file, c="C")
    file.close()
    assert num_kept(path, program, "abc") == [True, False, True]


@dataclasses.dataclass
class Grade:
    mark: int
    when: datetime.date


class Point(msgspec.Struct):
    x: float


async def graded(s: af.State) -> Grade | None: ...


async def pointed(s: af.State) -> list[Point]: ...


async def modelled(s: af.State) -> Model: ...  # noqa: F821  # its name is undefined


async def foreign(s: af.State) -> type: ...


@pytest.mark.parametrize(
    ("of", "result"),
    [
        (graded, Grade(3, datetime.date(2020, 1, 2))),
        (graded, None),
        (pointed, [Point(1.5), Point(2.0)]),
        (modelled, {"a": [1]}),
    ],
)
def test_results_come_back_as_the_annotated_type(of, result):
    form = result_form(of)
    assert form.read(json.dumps(form.plain(result))) == result


def test_a_return_type_without_a_form_in_json_is_refused():
    with pytest.raises(af.errors.BadArgument, match="resume keeps results as JSON"):
        result_form(foreign)


def test_equal_inputs_have_keys_of_their_own():
    keys = Keys(None)
    first = [keys(item) for item in ["a", {"x": 1, "y": 2}, "a", {"y": 2, "x": 1}, "a"]]
    assert len(set(first)) == 5
    again = Keys(None)
    assert [again(item) for item in ["a", {"x": 1, "y": 2}, "a", {"y": 2, "x": 1}, "a"]] == first


def test_keys_of_the_program_are_unique_strings_or_integers():
    by_field = Keys("id")
    assert [by_field({"id": 7}), by_field(Usage_like(8))] == [7, 8]
    with pytest.raises(af.errors.BadArgument, check=has_param("key")):
        by_field({"id": 7})
    with pytest.raises(af.errors.BadArgument, check=has_param("key")):
        by_field({"name": 7})
    with pytest.raises(af.errors.BadArgument, check=has_param("key")):
        Keys(lambda item: item)((1, 2))
    with pytest.raises(af.errors.BadArgument, check=has_param("key")):
        Keys(None)(object())


@dataclasses.dataclass
class Usage_like:
    id: int
