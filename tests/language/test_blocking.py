"""Code that blocks the event loop: which line is blamed, and which code is not."""

from __future__ import annotations

import sys
import threading
import time
import warnings
from collections import Counter

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.faults import has_param

import agentflow as af
from agentflow.language.failures.stack_frames import program_frames
from agentflow.language.observing.blocking import (
    BlockingDetector,
    LoopWatch,
    ThreadUsage,
    thread_usage,
    threshold_s,
)

pytestmark = pytest.mark.on_trio

FILE = "test_blocking.py"


@pytest.fixture
def shown(monkeypatch) -> list[warnings.WarningMessage]:
    """The warnings that are shown; ``arrived`` is set by the first."""
    monkeypatch.setenv("AGENTFLOW_BLOCKING_MS", "20")
    arrived.clear()
    found: list[warnings.WarningMessage] = []
    with warnings.catch_warnings():
        warnings.simplefilter("default", af.errors.BlockingWarning)

        def show(message, category, filename, lineno, file=None, line=None) -> None:
            found.append(warnings.WarningMessage(message, category, filename, lineno))
            arrived.set()

        monkeypatch.setattr(warnings, "showwarning", show)
        yield found


arrived = threading.Event()


def sleeps() -> None:
    arrived.wait(timeout=60)


def computes() -> None:
    while not arrived.is_set():
        sum(range(1000))


@pytest.mark.anyio
@pytest.mark.parametrize("blocks", [sleeps, computes])
async def test_a_blocking_line_of_a_program_is_named_once(shown, blocks):
    async def program(s: af.State) -> str:
        s += af.gen("x")
        blocks()  # until the warning is there
        return await s["x"]

    async with af.session(backend=af.Scripted(lambda call: "yes")) as flow:
        for _ in range(2):
            assert await flow.run(program) == "yes"
    (warning,) = shown
    lines = blocks.__code__.co_firstlineno, program.__code__.co_firstlineno
    assert warning.filename == __file__
    assert lines[0] < warning.lineno <= lines[0] + 2
    assert issubclass(warning.category, af.errors.BlockingWarning)
    assert issubclass(warning.category, RuntimeWarning)
    assert f"{FILE}:{warning.lineno}, in {blocks.__name__}" in str(warning.message)
    assert "anyio.to_thread.run_sync" in str(warning.message)


@pytest.mark.anyio
async def test_a_blocking_function_of_map_is_named(shown):
    def shout(text: str) -> str:
        arrived.wait(timeout=60)
        return text.upper()

    async with af.session(backend=af.Scripted(lambda call: "yes")) as flow, flow.state() as s:
        s += af.gen("x")
        assert await s["x"].map(shout) == "YES"
    assert [warning.lineno for warning in shown] == [shout.__code__.co_firstlineno + 1]


@pytest.mark.anyio
async def test_if_warnings_are_errors_the_session_ends(shown):
    async def program(s: af.State) -> str:
        s += af.gen("x")
        while threading.main_thread().is_alive() and not arrived.is_set():
            sum(range(1000))
        return await s["x"]

    warnings.simplefilter("error", af.errors.BlockingWarning)
    async with af.session(backend=af.Scripted(lambda call: "yes")) as flow:
        watch = flow._link._watch
        call_in_loop = watch._call_in_loop

        def call(function) -> None:
            call_in_loop(function)
            if function.__name__ == "<lambda>":  # the program must go on for this call to run
                arrived.set()

        watch._call_in_loop = call
        with pytest.raises(af.errors.ProgramError, match=f"{FILE}:.*blocked the event loop"):
            await flow.run(program)
        assert not flow.is_alive
    assert shown == []


@pytest.mark.anyio
async def test_a_waiting_task_has_no_blocking_frames():
    """The stack of the loop's thread while it waits, as the watch sees it from its thread."""
    loop = threading.get_ident()
    found = []

    def look() -> None:
        found.append(program_frames(sys._current_frames()[loop]))

    await anyio.to_thread.run_sync(look)
    look()  # this thread's own stack, in the loop: this test runs
    assert found[0] == []
    names = [frame.f_code.co_name for frame in found[1]]
    assert names[:2] == ["look", "test_a_waiting_task_has_no_blocking_frames"]  # then the test runner


def outside() -> list[str]:
    return [frame.f_code.co_name for frame in program_frames(sys._getframe())]


def test_code_outside_an_event_loop_has_no_frames():
    assert outside() == []


@pytest.mark.anyio
async def test_libraries_imports_and_this_package_are_not_blamed(monkeypatch, tmp_path):
    class Key:
        def __init__(self, number: int) -> None:
            self.number = number

        def __lt__(self, other: object) -> bool:
            names.append(outside())
            return False

    names: list[list[str]] = []
    Counter("ab").most_common()
    __import__("heapq").nsmallest(1, [Key(1), Key(2)])  # through the standard library
    test = "test_libraries_imports_and_this_package_are_not_blamed"
    assert names[0][:3] == ["outside", "__lt__", test]  # then the test runner
    (tmp_path / "slow_to_import.py").write_text("import sys\nfound = sys.modules['probe'].outside()\n")
    monkeypatch.setitem(sys.modules, "probe", sys.modules[__name__])
    monkeypatch.syspath_prepend(str(tmp_path))
    assert __import__("slow_to_import").found == []

    class Choices:
        def __iter__(self):  # called by this package
            names.append(outside())
            return iter(["yes", "no"])

    af.select("x", Choices())
    assert names[-1] == ["outside", "__iter__"]  # and nothing beyond the package


A, B, C = object(), object(), object()
ASLEEP = ThreadUsage(1.0, True, 7)


def seen(*samples) -> list[object | None]:
    detector = BlockingDetector(0.1)
    return [detector.see(*sample) for sample in samples]


def test_a_thread_that_sleeps_in_one_frame_blocks():
    samples = [(0.03 * i, [B, A], ASLEEP) for i in range(5)]
    assert seen(*samples) == [None, None, None, None, B]


def test_a_thread_that_computes_in_one_frame_blocks():
    samples = [(0.03 * i, [object(), A], ThreadUsage(0.03 * i, False, i)) for i in range(5)]
    assert seen(*samples) == [None, None, None, None, A]  # the innermost of the frames that stay


@pytest.mark.parametrize(
    "usage",
    [
        lambda i: ThreadUsage(1.0 + 0.002 * i, True, 7 + i),  # it wakes: it waits for the interpreter's lock
        lambda i: ThreadUsage(1.0 + 0.002 * i, False, 7),  # it waits for a processor
        lambda i: ThreadUsage(1.0 + 0.002 * i, False, 7 + i),
    ],
)
def test_a_busy_machine_is_no_blocking_line(usage):
    assert set(seen(*[(0.03 * i, [A], usage(i)) for i in range(40)])) == {None}


def test_late_samples_count_for_nothing():
    """The machine was suspended, or so busy that the watch did not run either."""
    assert set(seen(*[(0.06 * i, [A], ASLEEP) for i in range(40)])) == {None}


def test_many_short_steps_are_no_blocking_line():
    assert set(seen(*[(0.03 * i, [object()], ThreadUsage(0.03 * i, False, i)) for i in range(40)])) == {None}


def test_where_the_system_reports_nothing_only_time_counts():
    assert seen(*[(0.03 * i, [A], ThreadUsage()) for i in range(5)]) == [None] * 4 + [A]


@given(
    st.lists(
        st.tuples(
            st.floats(0.001, 0.08),
            st.lists(st.sampled_from([A, B, C]), max_size=3, unique=True),
            st.floats(0, 0.05),
            st.booleans(),
            st.integers(0, 1),
        ),
        max_size=30,
    )
)
def test_a_blamed_frame_was_there_for_the_whole_time(steps):
    """Against the definition: some window of samples that all hold the frame, in which the thread computed
    for 0.1 s, or slept for 0.1 s."""
    samples, now_s, cpu_s, num_waits = [], 0.0, 0.0, 0
    for wait_s, frames, spent_s, is_asleep, waits in steps:
        now_s, cpu_s, num_waits = now_s + wait_s, cpu_s + spent_s, num_waits + waits
        samples.append((now_s, frames, ThreadUsage(cpu_s, is_asleep, num_waits)))

    def may_be_blamed(end: int, frame: object) -> bool:
        for start in range(end):
            window = samples[start : end + 1]
            if not all(frame in frames for _, frames, _ in window):
                continue
            (first_s, _, first), (last_s, _, last) = window[0], window[-1]
            computed = last.cpu_s - first.cpu_s >= 0.1
            slept = last_s - first_s >= 0.1 and all(
                usage.is_asleep and usage.num_waits == first.num_waits and usage.cpu_s - first.cpu_s < 0.005
                for _, _, usage in window[1:]
            )
            if computed or slept:
                return True
        return False

    for end, frame in enumerate(seen(*samples)):
        assert frame is None or may_be_blamed(end, frame)


def test_the_usage_of_a_thread_is_its_own():
    begun, ended = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        ended.wait(timeout=60)

    other = threading.Thread(target=wait)
    other.start()
    try:
        begun.wait(timeout=60)
        assert other.ident is not None
        assert other.native_id is not None
        before = thread_usage(other.ident, other.native_id)
        own = thread_usage(threading.get_ident(), threading.get_native_id())
        while time.thread_time() < own.cpu_s + 0.05:
            sum(range(1000))
        after = thread_usage(other.ident, other.native_id)
        assert thread_usage(threading.get_ident(), threading.get_native_id()).cpu_s >= own.cpu_s + 0.05
        assert after.cpu_s - before.cpu_s < 0.05
        assert after.is_asleep
    finally:
        ended.set()
        other.join()


def test_the_time_is_set_by_the_environment():
    assert threshold_s({}) == 0.1
    assert threshold_s({"AGENTFLOW_BLOCKING_MS": "250"}) == 0.25
    assert threshold_s({"AGENTFLOW_BLOCKING_MS": "0"}) == 0
    for wrong in ("no", "-1", "nan"):
        with pytest.raises(af.errors.BadArgument, check=has_param("AGENTFLOW_BLOCKING_MS")):
            threshold_s({"AGENTFLOW_BLOCKING_MS": wrong})


@pytest.mark.anyio
async def test_the_watch_can_be_turned_off(monkeypatch):
    monkeypatch.setenv("AGENTFLOW_BLOCKING_MS", "0")
    async with af.session(backend=af.Scripted([])) as flow, flow.state():
        assert flow._link._watch is None


@pytest.mark.anyio
async def test_the_watch_pauses_while_nothing_runs_and_ends_with_its_session():
    is_active, asked = threading.Event(), threading.Semaphore(0)

    def active() -> bool:
        asked.release()
        return is_active.is_set()

    watch = LoopWatch(0.1, active, print)
    watch.wake()
    for _ in range(2):  # it asks twice, and then pauses
        await anyio.to_thread.run_sync(asked.acquire)
    while watch._woken.is_set():
        await anyio.lowlevel.checkpoint()
    thread = watch._thread
    assert not asked.acquire(blocking=False)
    is_active.set()
    watch.wake()
    await anyio.to_thread.run_sync(asked.acquire)
    assert watch._thread is thread
    watch.stop()
    await anyio.to_thread.run_sync(thread.join)
