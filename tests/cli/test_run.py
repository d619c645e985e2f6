"""``agentflow run``: its inputs and output, and its error for each mistake."""

from __future__ import annotations

import csv
import io
import json
import re
import sys
from pathlib import Path

import pytest
from support.commands import run_python

import agentflow as af
from agentflow.backends.local import Embedded
from agentflow.cli.main import main

PROGRAM = """
import agentflow as af

@af.program
async def judge(s: af.State, essay: str, times: int = 1) -> str:
    assert type(times) is int
    s += essay + af.gen("x")
    return (await s["x"]) * times

async def plain(s, item: dict):
    return item

number = 3
"""


def answer(prompt: str) -> str | Exception:
    return af.errors.EngineFailed("no") if prompt == "bad" else f"<{prompt}>"


@pytest.fixture(autouse=True)
def _folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(Embedded, "connect", lambda self, *args: af.Scripted(answer).connect(*args))
    monkeypatch.setattr("agentflow.language.batch.retries.FIRST_PAUSE_S", 0.0)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr("agentflow.cli.run.collect_garbage_rarely", lambda: None)  # others run here later
    monkeypatch.delenv("AGENTFLOW_URL", raising=False)
    monkeypatch.chdir(tmp_path)
    Path("judge.py").write_text(PROGRAM)
    Path("in.jsonl").write_text('{"id": 7, "essay": "a"}\n\n"b"\n{"id": 8, "essay": "c", "times": 2}\n')


def results(name: str = "out.jsonl") -> list[object]:
    return [json.loads(line) for line in Path(name).read_text().splitlines()]


def test_results_are_printed_in_order_and_progress_is_not(capsys):
    assert main(["run", "judge.py:judge", "in.jsonl"]) == 0
    out, err = capsys.readouterr()
    assert [json.loads(line) for line in out.splitlines()] == [
        {"input": {"id": 7, "essay": "a"}, "result": "<a>"},
        {"input": "b", "result": "<b>"},
        {"input": {"id": 8, "essay": "c", "times": 2}, "result": "<c><c>"},
    ]
    assert err.startswith("map: 3/3")
    assert main(["run", "judge.py", "in.jsonl", "--quiet"]) == 0
    assert capsys.readouterr() == (out, "")


def test_csv_standard_input_and_modules(capsys, monkeypatch):
    Path("in.csv").write_text('essay,times,note\n"a, b",2,x\nc,1,\n')
    assert main(["run", "judge:judge", "in.csv", "-q"]) == 0
    monkeypatch.setattr(sys, "stdin", io.StringIO("[1, 2]\nnull\n"))
    assert main(["run", "judge.py:plain", "-", "-q"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        {"input": {"essay": "a, b", "times": 2, "note": "x"}, "result": "<a, b><a, b>"},
        {"input": {"essay": "c", "times": 1, "note": ""}, "result": "<c>"},
        {"input": [1, 2], "result": [1, 2]},
        {"input": None, "result": None},
    ]


@pytest.mark.parametrize("annotation", ["int | None", "Optional[int]", "Union[None, int]"])
def test_f37_a_cell_of_a_number_that_may_be_missing_is_one_or_none(capsys, annotation):
    Path("optional.py").write_text(
        f"from typing import Optional, Union\n\nasync def read(s, times: {annotation} = 1):\n"
        "    return repr(times)\n"
    )
    Path("in.csv").write_text("id,times\na,2\nb,\n")
    assert main(["run", "optional.py:read", "in.csv", "-q"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["result"] for line in lines] == ["2", "None"]
    Path("in.csv").write_text("id,times\na,x\n")
    assert main(["run", "optional.py:read", "in.csv", "-q"]) == 2


def test_f37_a_file_may_be_called_like_a_module(capsys):
    Path("random.py").write_text(PROGRAM)
    module = sys.modules["random"]
    for _ in range(2):
        assert main(["run", "random.py", "in.jsonl", "-q"]) == 0
        assert sys.modules["random"] is module


def test_f37_a_cell_of_a_table_may_be_long(capsys):
    limit = csv.field_size_limit()
    Path("in.csv").write_text(f"essay,times\n{'x' * 200_000},1\n")
    assert main(["run", "judge:judge", "in.csv", "-q"]) == 0
    assert len(capsys.readouterr().out) > 400_000  # the input and the result
    assert csv.field_size_limit() == limit


def test_f37_a_file_that_exits_runs_nothing(capsys):
    Path("exits.py").write_text(f"{PROGRAM}\nimport sys\nsys.exit(0)\n")
    assert main(["run", "exits.py:judge", "in.jsonl"]) == 2
    assert "exits.py" in capsys.readouterr().err


def test_f37_an_output_that_cannot_be_a_file_is_refused_before_anything_runs(capsys):
    for output, why in ((".", ". is a folder"), ("none/out.jsonl", "there is no folder none")):
        assert main(["run", "judge.py:judge", "in.jsonl", "-o", output]) == 2
        assert capsys.readouterr().err.startswith(f"agentflow: {why}")


@pytest.mark.parametrize("name", ["out.csv", "out.JSON", "out.jsonl.gz"])
def test_f37_an_output_of_another_format_is_refused_before_anything_runs(capsys, name):
    command = ["run", "judge.py:judge", "in.jsonl", "-o", name]
    assert main(command) == 2
    assert name in capsys.readouterr().err
    assert not Path(name).exists()
    assert main([*command[:-1], "out.jsonl"]) == 0
    for ending in ("", ".resume"):  # of an earlier version
        Path(f"out.jsonl{ending}").rename(f"{name}{ending}")
    assert main([*command, "--resume"]) == 0


def test_an_output_is_resumed(capsys):
    command = ["run", "judge.py:judge", "in.jsonl", "-o", "out.jsonl"]
    assert main(command) == 0
    assert results() == ["<a>", "<b>", "<c><c>"]
    assert main(command) == 2
    assert "out.jsonl exists" in capsys.readouterr().err
    with open("in.jsonl", "a") as file:
        file.write('"d"\n')
    assert main([*command, "--resume"]) == 0
    assert "4/4" in (err := capsys.readouterr().err)
    assert "3 resumed" in err
    assert results() == ["<a>", "<b>", "<c><c>", "<d>"]
    assert main(["run", "judge.py:plain", "in.jsonl", "-o", "out.jsonl", "--resume"]) == 2
    assert "'judge'" in capsys.readouterr().err


def test_a_program_runs_in_batches(capsys, monkeypatch):
    Path("ask.py").write_text(
        "import agentflow as af\n\n@af.program\nasync def ask(s: af.State, text: str) -> str:\n"
        "    s += text + af.gen('x')\n    return await s['x']\n"
    )
    Path("in.jsonl").write_text('"a"\n"b"\n')
    command = ["run", "ask.py", "in.jsonl", "-q", "--batch"]
    assert main(command) == 1
    assert "batch" in capsys.readouterr().err
    monkeypatch.setattr(Embedded, "batches", lambda self, notes: af.Scripted(answer), raising=False)
    assert main(command) == 0
    assert [json.loads(line)["result"] for line in capsys.readouterr().out.splitlines()] == ["<a>", "<b>"]


def test_failures_have_a_status_of_their_own_and_run_again(capsys, monkeypatch):
    Path("in.jsonl").write_text('"a"\n"bad"\n')
    command = ["run", "judge.py", "in.jsonl", "-o", "out.jsonl", "-q"]
    assert main(command) == 3
    err = capsys.readouterr().err
    assert "1 of 2 inputs failed" in err
    assert "--resume" in err
    monkeypatch.setattr(Embedded, "connect", lambda self, *args: af.Scripted("good").connect(*args))
    assert main([*command, "--resume"]) == 0
    assert results() == ["<a>", "good"]
    Path("in.jsonl").write_text('"bad"\n')
    monkeypatch.setattr(Embedded, "connect", lambda self, *args: af.Scripted(answer).connect(*args))
    assert main(["run", "judge.py", "in.jsonl", "-q"]) == 3
    assert json.loads(capsys.readouterr().out)["error"] == "EngineFailed: no"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["judge.py:juge", "in.jsonl"], "did you mean 'judge'"),
        (["judge.py:zzz", "in.jsonl"], "the programs judge"),
        (["judge.py:number", "in.jsonl"], "no program"),
        (["jugde.py", "in.jsonl"], "no file jugde.py"),
        (["no_such_module:judge", "in.jsonl"], "cannot be loaded: ModuleNotFoundError"),
        (["empty.py", "in.jsonl"], "has no program"),
        (["wrong.py", "in.jsonl"], r"cannot be loaded: NameError: .*\(wrong.py, line 3\)"),
        (["broken.py", "in.jsonl"], "cannot be loaded: SyntaxError: .*broken.py, line 1"),
        (["judge.py", "none.jsonl"], "no file none.jsonl"),
        (["judge.py", "bad.jsonl"], "bad.jsonl, line 3: not JSON"),
        (["judge.py", "column.jsonl"], "column.jsonl, line 2: .*'essay'.*'text'"),
        (["judge.py", "bytes.jsonl"], "bytes.jsonl cannot be read"),
        (["judge.py", "number.csv"], "number.csv, line 3: times is 'two'.*an int"),
        (["judge.py", "ragged.csv"], "ragged.csv, line 3: "),
        (["judge.py", "in.jsonl", "--resume"], "--resume .* -o"),
        (["judge.py", "in.jsonl", "--key", "id"], "--key .* -o"),
        (["judge.py", "in.jsonl", "-o", "in.jsonl", "--resume"], "in.jsonl: it is not a file of results"),
        (["judge.py", "in.jsonl", "--url", "ws://127.0.0.1:1"], "127.0.0.1:1"),
    ],
)
def test_a_mistake_is_one_line(arguments, message, capsys):
    files = {
        "empty.py": "",
        "wrong.py": "\n\nprint(undefined)\n",
        "broken.py": "def (",
        "bad.jsonl": '"a"\n\n{"a\n',
        "column.jsonl": '"a"\n{"text": "b"}\n',
        "number.csv": "essay,times\na,1\nb,two\n",
        "ragged.csv": "essay,times\na,1\nb\n",
    }
    for name, text in files.items():
        Path(name).write_text(text)
    Path("bytes.jsonl").write_bytes(b'"\xff"\n')
    assert main(["run", *arguments, "-q"]) == (1 if "--url" in arguments else 2)
    out, err = capsys.readouterr()
    [line] = err.splitlines()
    assert line.startswith("agentflow: ")
    assert re.search(message, line), line
    assert out == ""


CHILD = """
import os
import signal
import sys
import agentflow as af
from agentflow.backends.local import Embedded
from agentflow.cli.main import main

def answer(prompt):
    if prompt == "long":
        os.kill(os.getpid(), signal.SIGINT)
        return "word " * 100
    return prompt

Embedded.connect = lambda self, *args: af.Scripted(answer).connect(*args)
sys.exit(main(sys.argv[1:]))
"""


WAITING = """
import anyio
import agentflow as af

async def judge(s: af.State, text: str) -> str:
    if text == "waits":
        await anyio.sleep_forever()
    s += text + af.gen("x")
    return await s["x"]
"""


def test_ctrl_c_says_how_to_continue():
    """It counts all inputs that have ended, including inputs after one that runs."""
    Path("child.py").write_text(CHILD)
    Path("waiting.py").write_text(WAITING)
    Path("in.jsonl").write_text('"waits"\n"a"\n"b"\n"long"\n"c"\n')
    options = ["-o", "out.jsonl", "-q", "--concurrency", "2"]
    child = run_python("-P", "child.py", "run", "waiting.py:judge", "in.jsonl", *options)
    assert child.returncode == 130, child.stderr
    assert "interrupted after 2 of 5 inputs" in child.stderr
    assert "--resume" in child.stderr
    assert "Traceback" not in child.stderr
    assert results() == ["a", "b"]


def test_a_vendor_gets_its_own_key_and_a_limit_of_costs(monkeypatch):
    given: list[object] = []

    def connect(self: af.OpenAI, *args):
        given.append((self._settings.api_key, self._settings.costs.spending.max_cost))
        return af.Scripted(answer).connect(*args)

    monkeypatch.setattr(af.OpenAI, "connect", connect)
    monkeypatch.setenv("AGENTFLOW_API_KEY", "of the server")
    monkeypatch.setenv("OPENAI_API_KEY", "of the vendor")
    command = ["run", "judge.py:judge", "in.jsonl", "-q", "--url", "openai:gpt-4o"]
    for options in ([], ["--api-key", "given"], ["--max-cost", "1.5"]):
        assert main([*command, *options]) == 0
    assert given == [("of the vendor", None), ("given", None), ("of the vendor", 1.5)]
