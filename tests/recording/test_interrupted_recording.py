"""Recordings whose process or connection ends early, or that two sessions want: nothing written is lost."""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest
from support.process_template import start_python

import agentflow as af
from agentflow.recording.file import read_recording

pytestmark = [pytest.mark.anyio, pytest.mark.on_trio]

CHILD = """
import os, sys
import anyio
import agentflow as af

@af.program
async def greet(s: af.State, name: str) -> str:
    s += af.user(name) + af.assistant(af.gen("greeting"))
    return await s["greeting"]

async def main() -> None:
    async with af.session(backend=af.Scripted(lambda prompt: "hello"), record=sys.argv[1], seed=1) as flow:
        for number in range(30):
            await flow.run(greet, str(number))
        if sys.argv[2] == "fork":
            if os.fork() == 0:
                await flow.run(greet, "in the child")
                return
            os.wait()
        print("ready", flush=True)
        await anyio.sleep_forever()

anyio.run(main)
"""


@af.program
async def greet(s: af.State, name: str) -> str:
    s += af.user(name) + af.assistant(af.gen("greeting"))
    return await s["greeting"]


def scripted() -> af.Scripted:
    return af.Scripted(lambda prompt: "hello")


async def record(path: Path, num_runs: int = 1, *, seed: int = 1) -> None:
    async with af.session(backend=scripted(), record=path, seed=seed) as flow:
        for number in range(num_runs):
            await flow.run(greet, str(number))


def run_child(path: Path, what: str, number: signal.Signals) -> None:
    """Records 30 runs in a process, which is killed while its session is open."""
    with start_python("-c", CHILD, path, what, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        child.send_signal(number)
    assert child.returncode == -number


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_f22a_a_killed_process_leaves_its_recording(path, number):
    run_child(path, "", number)
    assert read_recording(path).is_truncated
    async with af.session(backend=af.Replay(path)) as flow:
        assert [await flow.run(greet, str(number)) for number in range(30)] == ["hello"] * 30
    assert os.listdir(path.parent) == [path.name]


async def test_f22d_a_forked_child_adds_nothing_to_a_recording(path):
    run_child(path, "fork", signal.SIGKILL)
    assert b"in the child" not in path.read_bytes()
    assert {entry.ending for entry in read_recording(path).entries} == {None}


class Unreachable:
    @asynccontextmanager
    async def connect(self, deliver, lost):
        raise af.errors.ServerUnreachable("there is no server")
        yield


async def test_f22e_a_failed_connect_leaves_the_recording_before(path):
    await record(path)
    before = path.read_bytes()
    with pytest.raises(af.errors.ServerUnreachable):
        async with af.session(backend=Unreachable(), record=path):
            pass
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == [path.name]


async def test_f22f_two_sessions_do_not_record_to_one_path(path, tmp_path):
    link = tmp_path / "link.jsonl"
    link.symlink_to(path)
    async with af.session(backend=scripted(), record=path, seed=1) as flow:
        for other in (path, link):
            with pytest.raises(af.errors.BadArgument):
                async with af.session(backend=scripted(), record=other):
                    pass
        await flow.run(greet, "you")
    assert len(read_recording(path).entries) > 3
    await record(link, seed=2)
    assert link.is_symlink()
    assert read_recording(path).header.seed == 2


async def test_f22g_two_sessions_that_connect_do_not_record_to_one_path(path):
    is_connecting, may_connect = anyio.Event(), anyio.Event()

    class Slow:
        @asynccontextmanager
        async def connect(self, deliver, lost):
            is_connecting.set()
            await may_connect.wait()
            async with scripted().connect(deliver, lost) as connection:
                yield connection

    async def slow() -> None:
        async with af.session(backend=Slow(), record=path, seed=1) as flow:
            await flow.run(greet, "you")

    async with anyio.create_task_group() as group:
        group.start_soon(slow)
        await is_connecting.wait()
        with pytest.raises(af.errors.BadArgument):
            await record(path, seed=2)
        may_connect.set()
    assert read_recording(path).header.seed == 1


async def test_f22h_the_rest_of_a_killed_connect_is_replaced(path):
    path.with_name(f"{path.name}.part").write_bytes(b"the rest of a longer file\n" * 100)
    await record(path)
    assert read_recording(path).ending == "complete"


async def test_f22i_the_mode_of_a_replaced_recording_stays(path):
    await record(path)
    path.chmod(0o600)
    await record(path)
    assert path.stat().st_mode & 0o777 == 0o600
