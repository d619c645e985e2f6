"""The file of a map's results: what is read back, and what survives a write that was interrupted anywhere."""

from __future__ import annotations

import dataclasses
import datetime
import json
import warnings
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

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


@given(results=st.lists(JSON, max_size=5), data=st.data())
def test_a_file_that_was_truncated_anywhere_has_every_line_before(results, data, tmp_path_factory):
    path = tmp_path_factory.mktemp("results") / "run.jsonl"
    file = opened(path, untyped)
    for key, result in enumerate(results):
        file.add_result(key, result, result, USED)
    file.close()
    content = path.read_bytes()
    size = data.draw(st.integers(0, len(content)))
    path.write_bytes(content[:size])
    num_whole = max(0, content[:size].count(b"\n") - 1)
    file = opened(path, untyped)
    assert [file.has_result(key) for key in range(len(results))] == [
        key < num_whole for key in range(len(results))
    ]
    assert [file.result(key) for key in range(num_whole)] == results[:num_whole]
    for key in range(num_whole, len(results)):
        file.add_result(key, results[key], results[key], USED)
    file.close()
    assert path.read_bytes() == content


def test_each_byte_of_a_whole_file(tmp_path, monkeypatch):
    """The same for every position of one file, with zeros that a crash of the machine may leave behind."""
    monkeypatch.setattr(ResultsFile, "sync", lambda file: None)
    path = tmp_path / "run.jsonl"
    file = opened(path)
    for key in range(3):
        file.add_result(key, "é", "\n", USED)
    file.close()
    content = path.read_bytes()
    for size in range(len(content) + 1):
        for tail in (b"", b"\0" * 7):
            if tail and not content[:size].count(b"\n"):
                continue  # not even a header: then it may be any file
            path.write_bytes(content[:size] + tail)
            file = opened(path)
            num_whole = content[:size].count(b"\n") - 1
            assert [file.has_result(key) for key in range(3)] == [key < num_whole for key in range(3)]
            file.close()


@pytest.mark.parametrize(
    "content",
    [b'{"question": "my own inputs"}\n', b"[1, 2", b"\n", b'{"a": 1}', b"\x00\x01", b"a,b\n1,2\n"],
)
def test_a_file_of_something_else_is_refused_and_left_alone(content, tmp_path):
    path = tmp_path / "inputs.jsonl"
    path.write_bytes(content)
    with pytest.raises(af.BadArgument, match="not a file of results") as refused:
        opened(path)
    assert refused.value.param == "resume"
    assert path.read_bytes() == content


def test_the_file_of_another_program_or_format_is_refused(tmp_path):
    path = tmp_path / "run.jsonl"
    opened(path, other).close()
    with pytest.raises(af.BadArgument, match=r"'other'.*'program'"):
        opened(path)
    path.write_text('{"agentflow_map":2,"version":"9","program":"program"}\n')
    with pytest.raises(af.BadArgument, match="format 2"):
        opened(path)
    with pytest.raises(af.BadArgument, match="cannot be opened"):
        opened(tmp_path / "no folder" / "run.jsonl")


def test_a_damaged_line_is_named(tmp_path):
    path = tmp_path / "run.jsonl"
    file = opened(path)
    file.add_result("a", "a", "x", USED)
    file.close()
    path.write_bytes(path.read_bytes() + b"garbage\n" + b'{"key": "b", "result": 1}\n')
    with pytest.raises(af.BadArgument, match="line 3"):
        opened(path)


def test_two_writers_at_once_are_refused_also_after_the_file_was_replaced(tmp_path):
    path = tmp_path / "run.jsonl"
    file = opened(path)
    with pytest.raises(af.BadArgument, match="another map"):
        opened(path)
    file.add_result("b", "b", "2", USED)
    file.add_result("a", "a", "1", USED)
    file.close(["a", "b"])
    second = opened(path)
    with pytest.raises(af.BadArgument, match="another map"):
        opened(path)
    assert [second.result(key) for key in "ab"] == ["1", "2"]
    second.close()


def test_a_closed_file_has_one_line_for_each_input_in_their_order(tmp_path):
    path = tmp_path / "run.jsonl"
    file = opened(path)
    for key in "zcab":
        file.add_failure(key, key, af.EngineFailed(f"no {key}"), USED)
    file.add_result("a", "a", "A", USED)
    file.close()
    assert len(path.read_text().splitlines()) == 6
    file = opened(path)
    assert not file.has_result("c")
    assert file.has_result("a")
    file.add_result("c", "c", "C", USED)
    file.close(["a", "b", "c", "d"])
    header, *lines = map(json.loads, path.read_text().splitlines())
    assert header["program"] == "program"
    assert [line["key"] for line in lines] == ["a", "b", "c", "z"]
    assert [line.get("result") for line in lines] == ["A", None, "C", None]
    assert lines[1]["error"] == {"code": "engine_failed", "message": "no b"}
    assert lines[0]["tokens"] == {"prompt": 10, "cached": 4, "output": 2}
    opened(path).close()


def test_a_program_that_changed_is_noted(tmp_path):
    path = tmp_path / "run.jsonl"
    opened(path).close()
    changed = path.read_bytes().replace(b'"source":"', b'"source":"0')
    path.write_bytes(changed)
    with pytest.warns(UserWarning, match="changed"):
        opened(path).close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        path.write_bytes(b'{"agentflow_map":1,"version":"0","program":"program"}\n')
        opened(path).close()


def test_a_full_disk_leaves_no_part_of_a_line(tmp_path, monkeypatch):
    path = tmp_path / "run.jsonl"
    file = opened(path)
    file.add_result("a", "a", "A", USED)
    real = __import__("os").write

    def half(descriptor: int, data: bytes) -> int:
        if len(data) < 10:
            raise OSError(28, "no space left on device")
        return real(descriptor, data[: len(data) // 2])

    monkeypatch.setattr("agentflow.language.batch.results_file.os.write", half)
    with pytest.raises(OSError, match="no space"):
        file.add_result("b", "b", "B", USED)
    monkeypatch.undo()
    file.add_result("c", "c", "C", USED)
    file.close()
    file = opened(path)
    assert [file.has_result(key) for key in "abc"] == [True, False, True]
    file.close()


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
    with pytest.raises(af.BadArgument, match="resume keeps results as JSON"):
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
    with pytest.raises(af.BadArgument, match="two inputs"):
        by_field({"id": 7})
    with pytest.raises(af.BadArgument, match="no such field"):
        by_field({"name": 7})
    with pytest.raises(af.BadArgument, match="string or an integer"):
        Keys(lambda item: item)((1, 2))
    with pytest.raises(af.BadArgument, match="give key="):
        Keys(None)(object())


@dataclasses.dataclass
class Usage_like:
    id: int
