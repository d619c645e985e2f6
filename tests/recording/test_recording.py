"""Recordings: the file has every op and event, however the session ends, and the command shows it."""

import contextlib
import io
import os
import re
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated

import anyio
import anyio.lowlevel
import pytest
from pydantic import AfterValidator
from rich.console import Console
from support.fake_engine import FakeEngine
from support.faults import has_param
from support.observed_backends import Observed, Stepped, settle
from support.session_peer import HANG
from support.shallow_stack import LONG_CHAIN, shallow_stack

import agentflow as af
from agentflow.cli.main import main
from agentflow.cli.replay import run_replay
from agentflow.protocol import ops
from agentflow.protocol.backend import Backend
from agentflow.protocol.events import Event, GraphReply, Peeked, Usage, Value, Watched
from agentflow.recording.file import VERSION, read_recording
from agentflow.recording.runs import RecordedRuns

pytestmark = pytest.mark.anyio

SELECT = "really?"


def answer(prompt: str) -> str | Exception:
    if prompt.endswith(SELECT):
        return "yes"
    return (
        af.errors.EngineFailed(f"cannot answer {prompt[-8:]}") if prompt.endswith("!") else "a short answer"
    )


@af.program
async def judge(s: af.State, essay: str) -> str:
    s += (
        af.system("You are strict.")
        + af.user(essay)
        + af.assistant(SELECT, af.select("related", ["yes", "no"]))
    )
    assert await s["related"] == "yes"
    async with s.fork(2) as branches:
        for branch, what in zip(branches, ["clarity", "evidence"], strict=True):
            branch += af.user(what) + af.assistant(af.gen("judgment", max_tokens=5))
    s += af.user(*[branch["judgment"] for branch in branches]) + af.assistant(af.gen("report"))
    return await s["report"]


async def record_judge(path: Path, *, seed: int | None = None) -> None:
    async with af.session(backend=af.Scripted(answer), record=path, seed=seed) as flow:
        await flow.run(judge, "an essay")
        await flow.stats()


async def test_all_ops_and_events_are_recorded(path):
    backend = Observed(af.Scripted(answer))
    async with af.session(backend=backend, record=path, seed=7) as flow:
        assert await flow.run(judge, "an essay") == "a short answer"
        with pytest.raises(af.errors.EngineFailed):
            await flow.run(failing)
        await flow.stats()
        async with flow.state() as s:
            s += "text"
            await s
    recording = read_recording(path)
    assert (recording.header.recording, recording.header.agentflow) == (VERSION, af.__version__)
    assert (recording.header.seed, recording.header.model) == (7, "scripted")
    assert [entry.sent for entry in recording.entries if entry.sent is not None] == backend.ops
    assert [entry.received for entry in recording.entries if entry.received is not None] == backend.events
    # A program sends neither op that the first two answer, and the third is not recorded.
    assert {type(event) for event in backend.events} == set(Event.__args__) - {Watched, Peeked, GraphReply}
    times = [entry.at_s for entry in recording.entries]
    assert times == sorted(times)
    assert (recording.ending, recording.is_truncated) == ("complete", False)


async def test_the_seed_is_recorded_where_none_was_given(path):
    async with af.session(backend=af.Scripted(answer), record=path) as flow:
        pass
    assert read_recording(path).header.seed == flow.seed


async def test_the_real_engine_is_recorded(path):
    async with af.session(backend=FakeEngine(), record=path) as flow, flow.state() as s:
        s += af.user("a question") + af.assistant(af.gen("x", max_tokens=6, ignore_eos=True))
        text = await s["x"]
        usage = s["x"].usage
    ends = [entry.received for entry in read_recording(path).entries if isinstance(entry.received, Value)]
    assert [end.usage for end in ends] == [usage]
    async with af.session(backend=af.Replay(path)) as flow, flow.state() as s:
        s += af.user("a question") + af.assistant(af.gen("x", max_tokens=6, ignore_eos=True))
        assert (await s["x"], s["x"].usage) == (text, usage)


async def test_how_the_session_ended_is_recorded(path):
    with pytest.raises(ZeroDivisionError):
        async with af.session(backend=af.Scripted(answer), record=path):
            raise ZeroDivisionError
    assert (read_recording(path).ending, read_recording(path).is_truncated) == ("failed", False)
    with anyio.CancelScope() as scope:
        async with af.session(backend=af.Scripted(answer), record=path):
            scope.cancel()
            await anyio.lowlevel.checkpoint()
    assert (read_recording(path).ending, read_recording(path).is_truncated) == ("cancelled", True)


async def test_f37_the_end_follows_events_that_arrive_while_the_connection_is_closed(path):
    class Closing:
        def __init__(self, backend: Backend) -> None:
            self._backend = backend

        @asynccontextmanager
        async def connect(self, deliver, lost):
            async with self._backend.connect(deliver, lost) as connection:
                yield connection
                deliver([Value(99, 0, "late", "eos", Usage())])

    async with af.session(backend=Closing(af.Scripted(answer)), record=path):
        pass
    recording = read_recording(path)
    assert (recording.ending, recording.is_truncated) == ("complete", False)
    assert any(isinstance(entry.received, Value) for entry in recording.entries)


async def test_an_exception_handled_outside_is_no_failure_of_the_session(path):
    try:
        raise ZeroDivisionError
    except ZeroDivisionError:
        await record_judge(path)
    assert (read_recording(path).ending, read_recording(path).is_truncated) == ("complete", False)


async def test_a_recorded_replay_ends_as_its_session_does(tmp_path):
    """A replay that is recorded ends as its session does."""
    first, second = tmp_path / "first.jsonl", tmp_path / "second.jsonl"
    await record_judge(first)
    with pytest.raises(af.errors.ReplayDiffers, match="run 0"):
        async with af.session(backend=af.Replay(first), record=second):
            pass
    with pytest.raises(ZeroDivisionError):
        async with af.session(backend=af.Replay(first), record=second):
            raise ZeroDivisionError
    assert read_recording(second).ending == "failed"


async def test_a_lost_backend_is_recorded(path):
    backend = Observed(Stepped({"": "one two"}))
    async with af.session(backend=backend, record=path) as flow, flow.state() as s:
        s += af.gen("x")
        backend.lose(af.ServerLost("it is gone"))
        with pytest.raises(af.ServerLost):
            await s["x"]
    assert [entry.lost.code for entry in read_recording(path).entries if entry.lost] == ["server_lost"]


async def test_an_op_that_cannot_be_recorded_is_not_run(path):
    backend = Observed(af.Scripted(answer))
    async with af.session(backend=backend, record=path) as flow, flow.state() as s:
        with pytest.raises(af.errors.BadArgument):
            s += "\ud800"
    assert not backend.of(ops.Text)


async def test_a_file_that_cannot_be_written_is_rejected_before_the_backend_connects(tmp_path):
    backend = Observed(af.Scripted(answer))
    with pytest.raises(af.errors.BadArgument, check=has_param("record")):
        async with af.session(backend=backend, record=tmp_path / "nowhere" / "run.jsonl"):
            pass
    assert not hasattr(backend, "lose")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a disk that is always full")
async def test_a_full_disk_ends_the_recording_and_not_the_program(caplog):
    async with af.session(backend=af.Scripted(answer), record="/dev/full") as flow:
        assert await flow.run(judge, "an essay" * 10_000) == "a short answer"
    assert [record.message for record in caplog.records] == [
        "the recording /dev/full ends here: [Errno 28] No space left on device"
    ]


async def test_a_truncated_file_is_read_up_to_its_last_whole_line(path):
    await record_judge(path)
    whole = path.read_bytes()
    entries = read_recording(path).entries
    for num_bytes in range(whole.index(b"\n") + 1, len(whole), 97):
        path.write_bytes(whole[:num_bytes])
        cut = read_recording(path)
        assert cut.entries == entries[: whole[:num_bytes].count(b"\n") - 1]
        assert cut.is_truncated


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "it has no complete line"),
        (b"# a page\nof text\n", "its first line is not a header"),
        (b'{"at_s": 1}\n', "its first line is not a header"),
        (
            b'{"recording":2,"agentflow":"1","started":"","seed":1,"model":"m","models":{}}\n',
            "does not describe its model 'm'",
        ),
        (b'{"recording": 99}\n', "has version 99 of the format, and this agentflow reads versions 1 to 2"),
        (b"HEADER\nnonsense\n", "line 2: not a line of a recording"),
        (b'HEADER\n{"at_s": 1, "sent": {"op": "end", "state": 5}}\n', "line 2: there is no state 5"),
        (
            b'HEADER\n{"at_s": 1, "received": {"event": "delta", "var": 5, "at": 0, "text": ""}}\n',
            "line 2: there is no variable 5",
        ),
        (
            b'HEADER\n{"at_s": 1, "sent": {"op": "open", "state": 1}}\n'
            b'{"at_s": 1, "sent": {"op": "gen", "state": 1, "var": 2, "name": "x", "params": {}}}\n'
            b'{"at_s": 1, "received": {"event": "delta", "var": 2, "at": 1, "text": "a"}}\n',
            "line 4: a text of 0 characters goes on at 1",
        ),
    ],
)
async def test_an_invalid_file_is_reported_in_one_line(path, capsys, content, message):
    await record_judge(path)
    path.write_bytes(content.replace(b"HEADER", path.read_bytes().splitlines()[0]))
    with pytest.raises(af.errors.BadRecording, match=message):
        af.Replay(path)
    assert main(["replay", str(path)]) == 1
    captured = capsys.readouterr()
    assert (captured.out, len(captured.err.splitlines())) == ("", 1)
    assert message in captured.err


def test_a_missing_file_is_reported_in_one_line(tmp_path, capsys):
    assert main(["replay", str(tmp_path / "none.jsonl")]) == 1
    assert "No such file" in capsys.readouterr().err


def shown(path: Path, width: int = 80) -> list[str]:
    """The output of the command to a pipe."""
    output = io.StringIO()
    run_replay(path, Console(file=output, width=width))
    return [line.rstrip() for line in output.getvalue().splitlines()]


async def test_the_command_shows_the_fork_tree(path):
    await record_judge(path)
    lines = shown(path, width=100)
    assert all(len(line) <= 100 for line in lines)
    assert lines[0].startswith(str(path)[:60])
    table = [line for line in lines if line.startswith(("run", "├", "│", "└"))]
    first_words = [" ".join(line.split()[:3]) for line in table]
    assert first_words == [
        "run 0 You",
        "├ related yes",
        "├ state (0,)",
        "│ └ judgment",
        "├ state (1,)",
        "│ └ judgment",
        "└ report a",
    ]
    async with af.session(backend=af.Scripted(answer)) as flow, flow.state() as s:
        s += (
            af.system("You are strict.")
            + af.user("an essay")
            + af.assistant(SELECT, af.select("related", ["yes", "no"]))
        )
        await s["related"]
        prompt_tokens = s["related"].usage.prompt_tokens
    numbers = table[1].split()[3:]
    assert numbers[:4] == ["choice", str(prompt_tokens), "0", "0"]
    start, first, end = map(float, numbers[4:])
    assert start <= first <= end
    assert any(line.startswith("1 run, 3 states, 4 variables, ") for line in lines)


async def test_the_command_shows_replies(path):
    said = af.Reply("It is cold.", (af.ToolCall("weather", {"city": "Oslo"}, "c1"),))
    async with af.session(backend=af.Scripted([said]), record=path) as flow, flow.state() as s:
        s += af.conversation([{"role": "user", "content": "?"}]) + af.reply("answer")
        await s
    assert 'It is cold. weather({"city": "Oslo"})' in "\n".join(shown(path, width=160))


async def test_the_command_shows_failures_cancellations_and_strange_text(path):
    backend = Stepped({"": "[bold]one\x1b[31m\ntwo three"})
    async with af.session(backend=backend, record=path) as flow, flow.state() as s:
        doomed, idle = s.fork(2)
        doomed += "x" + af.gen("said")
        await backend.allow(1)
        doomed.cancel()
        idle += af.gen("waiting")
        await settle()
    lines = "\n".join(shown(path, width=120))
    assert "[bold]one·[31m two" not in lines  # the failure is shown instead of the text
    assert "\x1b" not in lines
    assert "cancelled" in lines
    async with af.session(backend=af.Scripted(answer), record=path) as flow:
        with pytest.raises(af.errors.EngineFailed):
            await flow.run(failing)
    lines = "\n".join(shown(path, width=120))
    assert "engine_failed: cannot answer a!" in lines
    assert "(1 without a value)" in lines
    async with af.session(backend=af.Scripted(lambda _: "[bold]one\x1b[31m\ntwo"), record=path) as flow:
        await flow.run(lambda s: s.add(af.gen("x"))["x"].settled())
    assert "[bold]one·[31m two" in "\n".join(shown(path, width=120))
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))
    assert shown(path)[-1] == "The recording ends before the session did."


@pytest.mark.parametrize("width", [52, 60, 80, 100, 160])
async def test_f43l_texts_stay_readable_on_narrow_terminals(path, width):
    """Numbers are left out before texts become narrower than 24 cells."""
    said = "The harbour was quiet that evening, and nobody saw the boat come in."
    async with af.session(backend=af.Scripted(lambda _: said), record=path) as flow, flow.state() as s:
        s += "Tell me." + af.gen("a_rather_long_variable_name")
        await s
    lines = shown(path, width=width)
    [header] = [line for line in lines if line.startswith("variable")]
    [row] = [line for line in lines if line.startswith("└")]
    assert said[:23] in row
    assert all(len(line) <= width for line in (header, row))
    assert header.split()[-1] == ("end" if width >= 60 else "finish")
    assert ("first" in header) == (width >= 100)


async def test_f43f_a_state_that_a_cancellation_failed_is_cancelled(path):
    """The state that waits for a cancelled branch fails, and the reason is the cancellation."""
    backend = Stepped({"": "one two"})
    async with af.session(backend=backend, record=path) as flow, flow.state() as s:
        [branch] = s.fork(1)
        branch += "x" + af.gen("said")
        s += branch["said"]
        await settle()
        branch.cancel()
        with pytest.raises(af.AgentflowError):
            await s
    lines = "\n".join(shown(path, width=120))
    assert "failed" not in lines
    [root] = [line for line in lines.splitlines() if line.startswith("run 0")]
    assert "cancelled" in root


class Silent(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@af.program
async def measure(s: af.State) -> str:
    s += "x" + af.gen("said", schema=Annotated[str, AfterValidator(int)])
    return await s["said"]


async def raising(s: af.State, error: BaseException, in_task: bool) -> None:
    s += "x" + af.gen("said")
    s.fork(1)[0].add(af.gen("waiting"))
    await s["said"]

    async def fail() -> None:
        raise error

    if not in_task:
        await fail()
    async with anyio.create_task_group() as group:
        group.start_soon(fail)


async def in_a_block(flow: af.Session) -> None:
    async with flow.state() as s:
        s += "x"
        raise OSError(28, "No space left on device")


FAILED = {
    "a class": (lambda flow: flow.run(raising, ZeroDivisionError(), False), "ZeroDivisionError"),
    "a task": (lambda flow: flow.run(raising, KeyError("key"), True), "KeyError: 'key'"),
    "a long text": (
        lambda flow: flow.run(raising, ValueError("é" * 2_000 + "\ud800"), False),
        f"ValueError: {'é' * 500}",
    ),
    "half a character": (lambda flow: flow.run(raising, ValueError("a\ud800"), False), "ValueError: a?"),
    "no text": (lambda flow: flow.run(raising, Silent(), False), "Silent: Silent"),
    "a block": (in_a_block, "OSError: [Errno 28] No space left on device"),
    "a graph": (lambda flow: flow.submit(measure.trace()), "InvalidValue: 'said' ended (eos)"),
}


@pytest.mark.parametrize("name", FAILED)
async def test_f37_a_run_that_an_exception_of_the_program_ended_has_failed(path, name):
    use, text = FAILED[name]
    async with af.session(backend=af.Scripted(lambda prompt: '"a"'), record=path) as flow:
        with pytest.raises(Exception):  # noqa: B017, PT011  # each way has another one
            await use(flow)
        assert flow.runs[-1].error
    [run] = RecordedRuns(read_recording(path)).runs
    assert str(run.root.program_failure).startswith(text)
    assert len(run.root.program_failure.message.encode()) <= ops.MAX_FAILURE_BYTES
    [root] = [line for line in shown(path, width=120) if line.startswith("run 0")]
    assert "failed" in root
    assert text[:40] in root
    # A recording of before: it has only the cancellation.
    path.write_bytes(re.sub(rb',"failure":\{[^{}]*\}', b"", path.read_bytes()))
    [root] = [line for line in shown(path, width=120) if line.startswith("run 0")]
    assert "cancelled" in root


@pytest.mark.parametrize("way", ["scope", "state"])
async def test_f37_a_run_that_the_client_cancelled_has_not_failed(path, way):
    async def wait(s: af.State) -> None:
        s += "x" + af.gen("said")
        (s if way == "state" else scope).cancel()
        await s["said"]

    async with af.session(backend=af.Scripted(HANG), record=path) as flow:
        with anyio.CancelScope() as scope, contextlib.suppress(af.Cancelled):
            await flow.run(wait)
    [run] = RecordedRuns(read_recording(path)).runs
    assert (run.root.is_cancelled, run.root.program_failure) == (True, None)
    [root] = [line for line in shown(path, width=120) if line.startswith("run 0")]
    assert "cancelled" in root


async def failing(s: af.State) -> None:
    s += "a!" + af.gen("x")
    await s["x"]


async def test_the_command_shows_a_chain_of_forks_deeper_than_the_stack(path):
    with shallow_stack():
        async with af.session(backend=af.Scripted(answer), record=path) as flow, flow.state() as s:
            for _ in range(LONG_CHAIN):
                s = s.fork(1)[0]
            s += af.gen("deep")
            await s["deep"]
        lines = shown(path, width=120)
        assert any("deep" in line and "a short answer" in line for line in lines)
        assert any(line.startswith(f"1 run, {LONG_CHAIN + 1} states, 1 variable,") for line in lines)
