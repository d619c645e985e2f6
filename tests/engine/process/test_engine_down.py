"""An engine process that hangs, that dies repeatedly, or that another one cannot replace."""

from __future__ import annotations

import logging
import os
import resource
import signal

import anyio
import psutil
import pytest
from msgspec.structs import replace
from support.commands import engines_of
from support.engine_loaders import POISON, start
from support.fake_engine import TOKENIZER
from support.holds import Hold, until
from support.process_engine import PLAIN, Ticks, generate, kill, process_engine, text_after
from support.processes import has_ended, signal_child

from agentflow.engine.messages import SIGN_OF_LIFE_S, UpdateHint
from agentflow.engine.process.deadlines import Deadlines, StepPace
from agentflow.engine.process.shutdown_budget import AFTER_DRAIN_S, DRAIN_S, ShutdownBudget
from agentflow.engine.process.supervisor import EngineSupervisor, restart_delay_s, supervised_engine
from agentflow.engine.request import Origin, Submit
from agentflow.errors import EngineDown, EngineFailed

pytestmark = [pytest.mark.anyio, pytest.mark.trio_in_full]


def errors_of(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]


# Hangs


@pytest.mark.parametrize("how", ["a step that never ends", "stopped while idle"])
async def test_a_hung_engine_is_killed_and_its_requests_continue(tmp_path, caplog, how):
    ticks, results = Ticks(), []
    hold = Hold(tmp_path / "hold")
    options = {"hold_at": {"7": hold.path}} if how == "a step that never ends" else {}

    async def run() -> None:
        results.append(await generate(client))

    async with process_engine(ticks=ticks, **options) as client:
        hung = client.engine.pid
        async with anyio.create_task_group() as group:
            if not options:
                signal_child(hung, signal.SIGSTOP)
            group.start_soon(run)
            if options:
                await hold.reached()
            await ticks.until(lambda: client.engine.restarts == 1)
        [(end, deltas)] = results
        assert (end.text, "".join(deltas)) == (PLAIN.text, PLAIN.text)
        assert client.engine.pid != hung
        [line] = errors_of(caplog)
        assert "the engine hung" in line
    if options:
        hold.release()


async def test_a_stats_call_detects_a_stopped_idle_engine():
    ticks = Ticks()
    async with process_engine(ticks=ticks) as client:
        signal_child(client.engine.pid, signal.SIGSTOP)
        for _ in range(1000):
            await ticks.tick()
        assert client.engine.restarts == 0  # nothing is owed: nothing is measured

        async def ask() -> None:
            with pytest.raises(EngineDown):
                await client.stats()

        async with anyio.create_task_group() as group:
            group.start_soon(ask)
            await ticks.until(lambda: client.engine.restarts == 1)
        assert (await generate(client))[0].text == PLAIN.text


async def test_a_load_that_exceeds_its_deadline_is_killed(tmp_path, caplog):
    ticks, ends = Ticks(), []
    hold = Hold(tmp_path / "hold")

    async def run() -> None:
        async with process_engine(ticks=ticks, hold_load=hold.path) as client:
            ends.append(await generate(client))
            assert client.engine.restarts == 1

    async with anyio.create_task_group() as group:
        group.start_soon(run)
        await hold.reached()
        [hung] = engines_of()
        await ticks.until(lambda: has_ended(hung))
    hold.release()
    assert [end.text for end, _ in ends] == [PLAIN.text]
    [line] = errors_of(caplog)
    assert "had not loaded" in line


async def test_time_in_which_the_server_was_stopped_does_not_count():
    """Each slice counts its planned time, for any time on the clock."""
    slept: list[float] = []

    async def sleep(delay_s: float) -> None:
        slept.append(delay_s)

    deadlines = Deadlines(step_s=40.0, sleep=sleep)
    assert await deadlines.passes(100.0, lambda: False)
    assert slept == [10.0] * 10
    assert not await deadlines.passes(100.0, lambda: len(slept) == 12)


def test_a_step_may_take_what_others_of_its_size_took():
    pace = StepPace(Deadlines(step_s=30.0, first_step_s=300.0))
    assert pace.limit_s == 300.0  # it may compile
    pace.received(0.0, 1)
    assert pace.limit_s == 300.0
    pace.received(100.0, 1)  # it did
    assert pace.limit_s == 300.0
    now_s = 100.0
    for _ in range(60):
        now_s += 0.01
        pace.received(now_s, 1)
    assert pace.limit_s == 30.0
    pace.received(now_s + 0.01, 256)  # none of that size has run
    assert pace.limit_s == 300.0
    pace.received(now_s + 2.01, 200)
    assert pace.limit_s == 20 * 2.0
    pace.received(now_s + 2.02, None)
    assert pace.limit_s == 30.0


def test_f37_a_limit_of_steps_leaves_time_for_signs_of_life_between_them():
    """While all requests wait for a program to be resumed, they come less often than steps end."""
    pace = StepPace(Deadlines(step_s=2.0, first_step_s=2.0))
    pace.received(0.0, 1)
    pace.received(0.1, None)
    assert pace.limit_s > SIGN_OF_LIFE_S
    pace.received(0.2, 1)
    assert pace.limit_s == 2.0


# Between two processes


async def test_a_hint_is_kept_also_between_two_processes():
    supervisor = EngineSupervisor(
        start(),
        deadlines=Deadlines(),
        exits_when_down=False,
        shutdown=ShutdownBudget(0.0),
    )
    origin = Origin(state=5, program=1)
    supervisor.send(Submit(1, [1], None, origin=origin))
    supervisor.send(UpdateHint(5, 7, 8, "throughput"))
    [submit] = supervisor._journal.take_ready()
    assert submit.origin == origin.at(7, 8, "throughput")


# Repeated deaths


def test_the_delay_before_a_restart_grows_up_to_a_bound():
    delays = [restart_delay_s(number) for number in range(50)]
    assert delays == sorted(delays)
    assert (delays[0], delays[2], delays[-1]) == (0.0, 1.0, 60.0)


async def test_a_model_that_cannot_be_reloaded_is_retried_with_growing_delays(tmp_path):
    model = tmp_path / "model"
    model.touch()
    hold = Hold(tmp_path / "hold")
    ticks, reasons = Ticks(), []

    async def run() -> None:
        with pytest.raises(EngineFailed) as failure:
            await generate(client)
        reasons.append(str(failure.value))

    options = {"missing": str(model), "hold_at": {"2": hold.path}}
    async with process_engine(ticks=ticks, **options) as client:
        async with anyio.create_task_group() as group:
            group.start_soon(run)
            group.start_soon(run)
            await hold.reached()
            model.unlink()
            kill(client, hold)
            await until(lambda: len(reasons) == 2)
        for use in (lambda: generate(client), client.stats):
            with pytest.raises(EngineFailed) as failure:
                await use()
            reasons.append(str(failure.value))
        client.compute_ahead([5, 6], origin=Origin())  # is dropped
        assert len(client.engine._journal) == len(client._unfinished) == 0
        await until(lambda: client.engine.restarts >= 5)
        assert ticks.delays[:4] == [1.0, 2.0, 4.0, 8.0]
        model.touch()
        await until(lambda: client.engine.is_ready)
        assert (await generate(client))[0].text == PLAIN.text
    assert len(reasons) == 4
    assert all("the engine is down" in reason for reason in reasons)
    assert str(model) not in reasons[0]


async def test_an_idle_engine_that_dies_is_restarted_with_growing_delays():
    ticks = Ticks()
    async with process_engine(ticks=ticks) as client:
        for number in range(1, 4):
            signal_child(client.engine.pid, signal.SIGKILL)
            await until(lambda: client.engine.restarts == number)  # noqa: B023
            await until(lambda: client.engine.is_ready)
        assert ticks.delays == [1.0, 2.0]
        assert (await generate(client))[0].text == PLAIN.text


async def test_with_exits_when_down_repeated_deaths_end_the_server(tmp_path):
    model = tmp_path / "model"
    model.touch()

    async def run() -> None:
        ticks = Ticks()
        async with process_engine(ticks=ticks, exits_when_down=True, missing=str(model)) as client:
            model.unlink()
            signal_child(client.engine.pid, signal.SIGKILL)
            await until(lambda: False)

    with pytest.raises(EngineFailed, match=r"\b3\b"):
        await run()


async def test_without_file_descriptors_the_start_is_tried_again(caplog):
    ticks = Ticks(holds_delays=True)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with process_engine(ticks=ticks) as client:
        free = os.dup(0)
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
        try:
            client.engine._child.signal(signal.SIGKILL)
            await ticks.until(lambda: client.engine.restarts == 4)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        await ticks.tick()
        await until(lambda: client.engine.is_ready)
        assert (await generate(client))[0].text == PLAIN.text
    assert "cannot be started" in caplog.text


# Other engines


@pytest.mark.parametrize("what", ["model", "tokenizer"])
async def test_ids_are_not_resumed_on_another_model(tmp_path, caplog, what):
    other, hold, ticks = tmp_path / "other", Hold(tmp_path / "hold"), Ticks(holds_delays=True)
    texts: list[str] = []

    async def run() -> None:
        end, _ = await generate(client)
        texts.append(end.text)

    options = {"other": str(other), "hold_at": {"7": hold.path}}
    async with process_engine(ticks=ticks, **options) as client, anyio.create_task_group() as group:
        group.start_soon(run)
        await hold.reached()
        other.write_text(what)
        kill(client, hold)
        await until(lambda: ticks.delays == [1.0])
        other.unlink()  # before the third load
        await ticks.tick()
        await until(lambda: client.engine.is_ready)
    assert texts == [PLAIN.text]
    assert f"the {what} differs from the one" in caplog.text


async def test_a_process_of_another_version_is_refused() -> None:
    """Versions differ after an upgrade while the server runs, or on a node of Ray with another version."""
    starting = replace(start(), version="0.0.1")
    with pytest.raises(EngineFailed, match=r"and the server 0\.0\.1"):
        async with supervised_engine(starting, lambda: TOKENIZER):
            pytest.fail("it runs")


# Forward passes that fail


async def test_after_an_accelerator_fault_another_process_continues(tmp_path):
    fault = tmp_path / "fault"
    fault.touch()
    texts: dict[int, str] = {}

    async def run(number: int) -> None:
        end, deltas = await generate(client, [number])
        assert "".join(deltas) == end.text
        texts[number] = end.text

    async with process_engine(fault_at={"7": str(fault)}) as client:
        async with anyio.create_task_group() as group:
            for number in (20, 21, 22):
                group.start_soon(run, number)
        assert texts == {number: text_after([number]) for number in (20, 21, 22)}
        assert client.engine.restarts == 1


async def test_after_three_failed_passes_in_a_row_another_process_continues(tmp_path):
    failing, hold = tmp_path / "failing", Hold(tmp_path / "hold")
    failed: list[int] = []
    texts: dict[int, str] = {}

    async def run(number: int) -> None:
        try:
            texts[number] = (await generate(client, [number]))[0].text
        except EngineFailed:
            failed.append(number)

    async with process_engine(hold_at={"7": hold.path}, failing=str(failing)) as client:
        async with anyio.create_task_group() as group:
            for number in (20, 21, 22, 23):
                group.start_soon(run, number)
            await hold.reached()
            failing.touch()
            hold.release()
            await until(lambda: client.engine.restarts > 0)
            failing.unlink()
        assert client.engine.restarts in (1, 2)
        assert len(failed) <= 2
        assert texts == {n: text_after([n]) for n in (20, 21, 22, 23) if n not in failed}


async def test_a_request_whose_pass_always_fails_fails_alone_without_a_restart():
    texts: dict[int, str] = {}
    failures: list[str] = []

    async def run(number: int) -> None:
        try:
            texts[number] = (await generate(client, [number]))[0].text
        except EngineFailed as error:
            failures.append(str(error))

    async with process_engine(poison="fails") as client:
        async with anyio.create_task_group() as group:
            for number in (20, POISON, 21, 22, 23):
                group.start_soon(run, number)
        assert texts == {number: text_after([number]) for number in (20, 21, 22, 23)}
        assert len(failures) == 1
        assert "Arithmetic" not in failures[0]
        assert client.engine.restarts == 0


# The end


async def test_a_hung_engine_does_not_delay_the_servers_shutdown(tmp_path):
    now_s = [0.0]
    budget = ShutdownBudget(DRAIN_S, lambda: now_s[0])
    assert budget.take(budget.drain_s) == DRAIN_S
    now_s[0] = DRAIN_S + AFTER_DRAIN_S  # the phases before have taken all of it
    async with process_engine(shutdown=budget) as client:
        process = psutil.Process(client.engine.pid)
        process.suspend()
    assert has_ended(process)


def test_all_phases_of_an_end_stay_under_25_s():
    from agentflow.engine.machine.child_process import KILL_S
    from agentflow.engine.process.supervisor import END_S
    from agentflow.server.config.schema import OverloadConfig
    from agentflow.server.serve import SHUTDOWN_S

    now_s = [0.0]
    budget = ShutdownBudget(OverloadConfig().drain_s, lambda: now_s[0])
    phases = [budget.drain_s, SHUTDOWN_S, *[END_S] * 10]  # ten engines, all of which hang
    for most_s in phases:
        now_s[0] += budget.take(most_s)
    assert now_s[0] + KILL_S < 25
    assert budget.drain_s >= 10


async def test_the_clock_of_an_end_starts_with_its_first_phase():
    now_s = [0.0]
    budget = ShutdownBudget(5.0, lambda: now_s[0])
    now_s[0] = 1_000.0
    assert budget.take(5.0) == 5.0
    now_s[0] += 5.0 + AFTER_DRAIN_S - 1.0
    assert budget.take(6.0) == 1.0
