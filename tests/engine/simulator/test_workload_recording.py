"""The recording of a server has the requests that it served, and the simulator replays it."""

from __future__ import annotations

import errno
import gzip
import io
import itertools
import logging
import os
import stat
import threading
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest
from support.fake_engine import StepGate
from support.holds import Hold
from support.plain_model import END_ID, PLAIN_IDS, plain_model_engine
from support.process_engine import PLAIN, PROMPT, generate, kill, process_engine

from agentflow.cli import main as cli
from agentflow.engine.client import EngineClient
from agentflow.engine.request import Origin
from agentflow.engine.scheduling.scheduler import SchedulerConfig
from agentflow.engine.simulator import recording as workload_recording
from agentflow.engine.simulator.recording import recording
from agentflow.engine.simulator.simulation import simulate
from agentflow.engine.simulator.workload import Arrival
from agentflow.engine.simulator.workload_file import open_sink, read_workload
from agentflow.errors import BadArgument, PromptTooLong
from agentflow.protocol.sampling import SamplingParams

pytestmark = pytest.mark.anyio

NOWHERE = Origin()


@asynccontextmanager
async def recorded(client: EngineClient, path: Path):
    """Records with a clock by which every request has ended before the next one arrives."""
    clock = itertools.count(0, 1000)
    with open_sink(path) as sink:
        async with recording(client, sink, name="served", clock=lambda: float(next(clock))):
            yield


def read(path: Path) -> list[Arrival]:
    return list(read_workload(path).arrivals)


async def ask(client: EngineClient, prompt: list[int], origin: Origin = NOWHERE, **params) -> list[int]:
    """Generates. The state that comes after it, as ids."""
    end = await client.generate(
        prompt, SamplingParams(**({"max_tokens": 12} | params)), seed=0, origin=origin, on_text=lambda _: None
    )
    return prompt + end.token_ids


# The recording


async def test_a_request_is_recorded_as_it_was_served(tmp_path):
    path = tmp_path / "served.jsonl"
    origin = Origin("ann", "salt", "throughput", state=7, task_group=8)
    async with plain_model_engine() as client, recorded(client, path):
        await ask(client, PROMPT, origin, max_tokens=5, ignore_eos=True)
    workload = read_workload(path)
    assert (workload.name, workload.kv_tokens) == ("served", 4096)
    [arrival] = workload.arrivals
    assert arrival.prompt.tolist() == PROMPT
    assert arrival.output.tolist() == PLAIN.ids[:5]
    assert (arrival.at_s, arrival.after, arrival.max_new_tokens) == (1000.0, None, 5)
    assert (arrival.tenant, arrival.salt, arrival.objective) == ("1", "1", "throughput")
    assert (arrival.state, arrival.task_group, arrival.label) == ("7", "8", "")


async def test_an_output_is_what_was_sampled_and_not_what_was_kept_of_it(tmp_path):
    path = tmp_path / "served.jsonl"
    stop = PLAIN.text[3:5]
    number = next(n for n in PLAIN_IDS if n in PLAIN.ids)
    async with plain_model_engine() as client, recorded(client, path):
        await ask(client, PROMPT, stop=(stop,))
        await ask(client, PROMPT, stop_token_ids=(number,), ignore_eos=True, max_tokens=20)
        with_end = await ask(client, [*PROMPT, 9], max_tokens=200)
    by_text, by_id, by_end = read(path)
    num_sampled = len(by_text.output)
    assert by_text.output.tolist() == PLAIN.ids[:num_sampled]
    assert by_id.output.tolist() == PLAIN.ids[: PLAIN.ids.index(number) + 1]
    assert by_end.output.tolist() == [*with_end[len(PROMPT) + 1 :], END_ID]
    assert by_end.max_new_tokens == 200


async def test_a_limit_is_no_longer_than_a_request_can_be(tmp_path):
    path = tmp_path / "served.jsonl"
    async with plain_model_engine() as client, recorded(client, path):
        await ask(client, PROMPT, max_tokens=10**9)
    assert read(path)[0].max_new_tokens == client.info.max_context


async def test_requests_without_generation_have_no_output(tmp_path):
    path = tmp_path / "served.jsonl"
    async with plain_model_engine() as client, recorded(client, path):
        await client.compute([5, 6, 7])
        client.compute_ahead([5, 6, 8], origin=Origin())
        await client.score([5, 6, 7, 8], 3)
        await client.score_choices([5, 6, 9], [[1, 2], [3]])
    by_prompt = sorted(read(path), key=lambda a: a.prompt.tolist())
    assert [(a.prompt.tolist(), a.output.tolist(), a.max_new_tokens, a.label) for a in by_prompt] == [
        ([5, 6, 7], [], 0, ""),
        ([5, 6, 7, 8], [], 0, "score"),
        ([5, 6, 8], [], 0, ""),
        ([5, 6, 9], [], 0, "score"),
    ]
    assert [a.is_extra for a in by_prompt] == [False, False, True, False]


async def test_salts_and_tenants_are_numbered_and_not_named(tmp_path):
    path = tmp_path / "served.jsonl"
    names = ["", "hunter2", "swordfish", "hunter2", "", "swordfish"]
    async with plain_model_engine() as client, recorded(client, path):
        for name in names:
            await ask(client, PROMPT, Origin(cache_salt=name), max_tokens=1)
            await ask(client, PROMPT, Origin(tenant=name), max_tokens=1)
    assert [a.salt for a in read(path)[::2]] == ["", "1", "2", "1", "", "2"]
    assert [a.tenant for a in read(path)[1::2]] == ["", "1", "2", "1", "", "2"]
    assert b"hunter2" not in path.read_bytes()
    assert b"swordfish" not in path.read_bytes()


async def test_aborted_and_failed_requests_are_not_recorded(tmp_path):
    path = tmp_path / "served.jsonl"
    gate = StepGate()
    gate.attach()
    gate.allow(1)
    async with plain_model_engine(on_step=gate) as client, recorded(client, path):
        with pytest.raises(PromptTooLong):
            await ask(client, [5] * 600)
        async with anyio.create_task_group() as group:
            group.start_soon(generate, client, [21, 22])
            await gate.held()
            group.cancel_scope.cancel()
        gate.open()
        await ask(client, PROMPT)
    assert [a.prompt.tolist() for a in read(path)] == [PROMPT]


async def test_lines_come_in_the_order_of_ends_with_their_arrivals(tmp_path):
    path = tmp_path / "served.jsonl"
    gate = StepGate()
    gate.attach()
    gate.allow(1)
    async with (
        plain_model_engine(on_step=gate) as client,
        recorded(client, path),
        anyio.create_task_group() as group,
    ):
        group.start_soon(generate, client, [21, 22])
        await gate.held()
        group.start_soon(lambda: ask(client, [31, 32], max_tokens=1))
        await anyio.wait_all_tasks_blocked()
        gate.open()
    assert [(a.prompt.tolist(), a.at_s) for a in read(path)] == [([31, 32], 2000.0), ([21, 22], 1000.0)]


async def test_a_request_that_lives_through_a_restart_is_recorded_once_and_whole(tmp_path):
    path = tmp_path / "served.jsonl"
    hold = Hold(tmp_path / "hold")
    async with (
        process_engine(hold_at={"7": hold.path}) as client,
        recorded(client, path),
        anyio.create_task_group() as group,
    ):
        group.start_soon(generate, client)
        await hold.reached()
        kill(client, hold)
    assert [(a.prompt.tolist(), a.output.tolist()) for a in read(path)] == [(PROMPT, PLAIN.ids)]


# Replayed


async def serve_conversations(client: EngineClient) -> None:
    """Turns that share prefixes with earlier prompts and answers, under several salts."""
    for salt in ("", "secret"):
        for first in range(3):
            state = [2, 3, 4, *range(20, 50), 5 + first]
            for turn in range(4):
                state = await ask(client, state, Origin(cache_salt=salt), stop=("e",) if turn == 2 else ())
                state = [*state, END_ID, 60 + turn]
            await client.compute([*state, *range(70, 90)], origin=Origin(cache_salt=salt))


@pytest.mark.parametrize("name", ["served.jsonl", "served.jsonl.gz"])
@pytest.mark.parametrize("num_slots", [4096, 200])
async def test_the_simulator_hits_what_the_engine_hit(tmp_path, name, num_slots):
    path = tmp_path / name
    config = SchedulerConfig(max_running=4, token_budget=16)
    async with plain_model_engine(config, num_slots=num_slots) as client:
        async with recorded(client, path):
            await serve_conversations(client)
        stats = await client.stats()
    replayed = simulate(read_workload(path), config, max_context=512).counters
    assert stats.cached_output_tokens > 0
    assert (stats.evicted_tokens > 0) == (num_slots == 200)
    for counter in (
        "prompt_tokens",
        "cached_tokens",
        "cached_output_tokens",
        "computed_tokens",
        "generated_tokens",
        "evicted_tokens",
        "steps",
    ):
        assert getattr(replayed, counter) == getattr(stats, counter), counter


async def test_the_command_replays_a_recording(tmp_path, capsys):
    path = tmp_path / "served.jsonl"
    async with plain_model_engine() as client, recorded(client, path):
        await serve_conversations(client)
        await client.score([2, 3, 4, 5, 6], 3)
    assert cli.main(["simulate", str(path), "--policy", "fcfs"]) == 0
    assert "served: 31 requests, 4,096 KV tokens" in capsys.readouterr().out


# Faults and ends


class BrokenDisk(io.BytesIO):
    """Accepts this many bytes."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room = room
        self.num_refused = 0

    def write(self, data) -> int:
        self.room -= len(data)
        if self.room < 0:
            self.num_refused += 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(data)


@pytest.mark.parametrize("room", [0, 200])
async def test_a_full_disk_ends_the_recording_and_not_the_serving(caplog, room):
    disk = BrokenDisk(room)
    async with plain_model_engine() as client:
        async with recording(client, disk):
            expected = await ask(client, PROMPT)
            for _ in range(10):
                assert await ask(client, PROMPT) == expected
        assert await ask(client, PROMPT) == expected
    assert disk.num_refused == 1
    assert disk.closed
    errors = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert [record.message for record in errors] == [
        "recording the workload has stopped: [Errno 28] No space left on device"
    ]


async def test_a_file_that_cannot_be_closed_is_logged(caplog):
    class Unclosable(io.BytesIO):
        def close(self) -> None:
            super().close()
            raise OSError("no")

    async with plain_model_engine() as client, recording(client, Unclosable()):
        await ask(client, PROMPT)
    assert "recording the workload has stopped: no" in caplog.text


async def test_a_disk_that_is_far_behind_ends_the_recording(caplog, monkeypatch):
    monkeypatch.setattr(workload_recording, "MAX_UNWRITTEN", 2)
    may_write = threading.Event()

    class SlowDisk(io.BytesIO):
        def flush(self) -> None:
            assert may_write.wait(30)

    async with plain_model_engine() as client, recording(client, SlowDisk()):
        for _ in range(10):
            await ask(client, PROMPT, max_tokens=1)
        assert "the file is 2 requests behind" in caplog.text
        assert caplog.text.count("recording the workload has stopped") == 1
        may_write.set()


async def test_all_that_has_ended_is_written_when_the_server_is_cancelled(tmp_path):
    path = tmp_path / "served.jsonl.gz"
    async with plain_model_engine() as client:
        with anyio.CancelScope() as scope:
            async with recorded(client, path):
                for number in range(20):
                    await ask(client, [number + 5], max_tokens=2)
                scope.cancel()
                await anyio.sleep_forever()
    assert [a.prompt.tolist() for a in read(path)] == [[number + 5] for number in range(20)]


async def test_a_recording_can_be_read_while_it_grows(tmp_path):
    path = tmp_path / "served.jsonl"
    has_flushed = threading.Event()

    class Disk(io.FileIO):
        def flush(self) -> None:
            super().flush()
            has_flushed.set()

    async with plain_model_engine() as client, recording(client, Disk(path, "wb")):
        await ask(client, PROMPT)
        assert await anyio.to_thread.run_sync(has_flushed.wait, 30)
        assert [a.prompt.tolist() for a in read(path)] == [PROMPT]


async def test_an_error_of_the_serving_leaves_as_itself_and_closes_the_file(tmp_path):
    path = tmp_path / "served.jsonl.gz"
    async with plain_model_engine() as client:
        with pytest.raises(ZeroDivisionError):
            async with recorded(client, path):
                raise ZeroDivisionError
    assert gzip.decompress(path.read_bytes()).count(b"\n") == 1


@pytest.mark.parametrize("name", ["served.jsonl", "served.jsonl.gz"])
async def test_a_recording_is_its_owners_alone_and_never_written_over(tmp_path, name):
    path = tmp_path / name
    before = os.umask(0)
    try:
        async with plain_model_engine() as client, recorded(client, path):
            await ask(client, PROMPT)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(BadArgument) as refused:
        open_sink(path)
    assert str(path) in str(refused.value)
    (tmp_path / f"link-{name}").symlink_to(tmp_path / f"elsewhere-{name}")
    with pytest.raises(BadArgument):
        open_sink(tmp_path / f"link-{name}")
    assert [a.prompt.tolist() for a in read(path)] == [PROMPT]


@pytest.mark.parametrize("name", ["served.jsonl", "served.jsonl.gz"])
async def test_a_file_that_cannot_be_created_is_an_error(tmp_path, name):
    with pytest.raises(BadArgument, match="No such file"):
        open_sink(tmp_path / "nowhere" / name)
