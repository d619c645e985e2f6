"""An event loop in a background thread: called from threads and other loops, cancelled, closed, forked."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar

import anyio
import anyio.to_thread
import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry import trace
from support.processes import run_in_fork
from support.spans import recording_spans

from agentflow.errors import BadArgument, Cancelled, ProgramError, RunFailed
from agentflow.integrations.background_loop import MAX_THREADS, BackgroundLoop, Mailbox


@pytest.fixture
def thread() -> Iterator[BackgroundLoop]:
    thread = BackgroundLoop("loop under test")
    yield thread
    thread.close()
    for one in threading.enumerate():  # one that closed its own loop ends soon after
        if one.name == "loop under test":
            one.join(30)
            assert not one.is_alive()


async def count(to: int) -> AsyncGenerator[int, None]:
    for number in range(to):
        await anyio.lowlevel.checkpoint()
        yield number


async def name_of_thread() -> str:
    return threading.current_thread().name


class Endless:
    """Yields one item, then waits until it is cancelled."""

    def __init__(self) -> None:
        self.was_cancelled = threading.Event()

    async def __call__(self) -> AsyncGenerator[str, None]:
        try:
            yield "first"
            await anyio.sleep_forever()
        finally:
            self.was_cancelled.set()


def test_functions_and_streams_from_a_thread_without_a_loop(thread):
    assert thread.run(name_of_thread) == "loop under test"
    assert list(thread.stream(lambda: count(100))) == list(range(100))
    assert list(thread.stream(lambda: count(0))) == []


@pytest.mark.anyio
async def test_functions_and_streams_from_another_loop(thread):
    assert await thread.arun(name_of_thread) == "loop under test"
    found: list[list[int]] = [[], []]

    async def read(into: list[int]) -> None:
        async for number in thread.astream(lambda: count(100)):
            into.append(number)

    async with anyio.create_task_group() as group:
        for into in found:
            group.start_soon(read, into)
    assert found == [list(range(100))] * 2


def test_many_threads_at_once(thread):
    with ThreadPoolExecutor(16) as threads:
        found = list(threads.map(lambda n: list(thread.stream(lambda: count(n))), range(50)))
    assert found == [list(range(n)) for n in range(50)]


async def fail_after_one() -> AsyncGenerator[int, None]:
    yield 1
    raise BadArgument("no more")


def test_an_error_is_raised_after_the_items_before_it(thread):
    stream = thread.stream(fail_after_one)
    assert next(stream) == 1
    with pytest.raises(BadArgument, match="no more"):
        next(stream)
    assert thread.run(name_of_thread) == "loop under test"


def test_closing_a_stream_cancels_its_task(thread):
    source = Endless()
    stream = thread.stream(source)
    assert next(stream) == "first"
    stream.close()
    assert source.was_cancelled.wait(10)


@pytest.mark.anyio
async def test_cancelling_the_reader_cancels_the_task(thread):
    source = Endless()
    received = anyio.Event()

    async def read() -> None:
        async for _ in thread.astream(source):
            received.set()

    async with anyio.create_task_group() as group:
        group.start_soon(read)
        await received.wait()
        group.cancel_scope.cancel()
    assert await anyio.to_thread.run_sync(source.was_cancelled.wait, 10)


def test_closing_cancels_waiting_calls_and_the_next_call_starts_a_new_loop(thread):
    source = Endless()
    stream = thread.stream(source)
    assert next(stream) == "first"
    closing = threading.Thread(target=thread.close)
    closing.start()
    with pytest.raises(Cancelled):
        next(stream)
    closing.join()
    assert source.was_cancelled.is_set()
    assert thread.run(name_of_thread) == "loop under test"


def test_a_fork_of_the_process_has_a_loop_of_its_own(thread):
    assert thread.run(name_of_thread) == "loop under test"
    assert run_in_fork(lambda: thread.run(name_of_thread) == "loop under test") == 0


def test_a_scheduled_function_that_fails_is_logged(thread, caplog):
    thread.run(name_of_thread)
    thread.call_soon(lambda: 1 / 0)
    assert thread.run(name_of_thread) == "loop under test"
    assert "ZeroDivisionError" in caplog.text


_caller: ContextVar[str] = ContextVar("caller", default="none")


def test_tasks_do_not_see_the_callers_context(thread):
    async def caller() -> str:
        return _caller.get()

    token = _caller.set("a test")
    try:
        assert [thread.run(caller), thread.run(caller)] == ["none", "none"]
    finally:
        _caller.reset(token)


@given(st.lists(st.sampled_from(["put", "take"]), max_size=30), st.booleans())
def test_a_mailbox_gives_each_item_once_and_wakes_once_until_take(steps, fails):
    num_woken = 0

    def wake() -> None:
        nonlocal num_woken
        num_woken += 1

    mailbox: Mailbox[int] = Mailbox(wake)
    put: list[int] = []
    taken: list[int] = []
    num_due, is_awake = 0, False
    for number, step in enumerate(steps):
        if step == "put":
            mailbox.put(number)
            put.append(number)
            num_due, is_awake = num_due + (not is_awake), True
        else:
            items = mailbox.take()
            assert items is not None
            taken += items
            is_awake = False
        assert num_woken == num_due
    mailbox.end(ValueError("at the end") if fails else None)
    if len(taken) < len(put):
        taken += mailbox.take() or []
    assert taken == put
    if fails:
        with pytest.raises(ValueError, match="at the end"):
            mailbox.take()
    else:
        assert mailbox.take() is None


def test_the_error_of_a_loop_that_cannot_be_created_is_raised_and_the_next_call_tries_again(
    thread, monkeypatch
):
    def no_loop(*args: object) -> None:
        raise OSError("too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(anyio, "run", no_loop)
        for _ in range(2):  # the lock is free again
            with pytest.raises(OSError, match="too many open files"):
                thread.run(name_of_thread)
    assert thread.run(name_of_thread) == "loop under test"


def test_f12d_a_blocking_call_in_the_thread_of_the_loop_raises(thread):
    async def blocks() -> None:
        thread.run(nothing)

    async def nothing() -> None:
        pass

    with pytest.raises(ProgramError):
        thread.run(blocks)
    thread.run(nothing)


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError()])
def test_f12d_the_loop_survives_a_function_that_ends_oddly(thread, error):
    async def ends() -> None:
        raise error

    async def number() -> int:
        return 1

    with pytest.raises(RunFailed):
        thread.run(ends)
    assert thread.run(number) == 1


@contextlib.contextmanager
def slow_start() -> Iterator[tuple[threading.Event, threading.Event]]:
    """New event loops wait for the second event, after they have set the first."""
    begun, go_on = threading.Event(), threading.Event()

    class Slow(asyncio.DefaultEventLoopPolicy):
        def new_event_loop(self) -> asyncio.AbstractEventLoop:
            begun.set()
            go_on.wait()
            return super().new_event_loop()

    before = asyncio.get_event_loop_policy()
    asyncio.set_event_loop_policy(Slow())
    try:
        yield begun, go_on
    finally:
        go_on.set()
        asyncio.set_event_loop_policy(before)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_f21h_a_fork_while_another_thread_starts_the_loop(thread):
    """The thread holds a lock, which nothing releases in the child."""
    with slow_start() as (begun, go_on):
        starter = threading.Thread(target=thread.run, args=(name_of_thread,))
        starter.start()
        begun.wait()

        def is_another_loop() -> bool:
            go_on.set()
            return thread.run(name_of_thread) == "loop under test"

        status = run_in_fork(is_another_loop)
        go_on.set()
        starter.join()
    assert status == 0


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_f21i_a_stream_of_the_parent_ends_in_a_forked_process(thread):
    stream = thread.stream(Endless())
    assert next(stream) == "first"

    def is_cancelled() -> bool:
        with pytest.raises(Cancelled):
            next(stream)
        return True

    assert run_in_fork(is_cancelled) == 0
    stream.close()


@contextlib.contextmanager
def many_loops() -> Iterator[list[BackgroundLoop]]:
    loops = [BackgroundLoop(f"loop {number}") for number in range(MAX_THREADS + 2)]
    try:
        yield loops
    finally:
        for one in loops:
            one.close()


def test_f21j_the_idle_loops_that_were_used_least_recently_end_and_start_again():
    with many_loops() as loops:
        source = Endless()
        busy = loops[0].stream(source)
        assert next(busy) == "first"
        for one in loops[1:-1]:
            one.run(name_of_thread)
        loops[1].run(name_of_thread)
        loops[-1].run(name_of_thread)
        running = [number for number, one in enumerate(loops) if one.is_running]
        assert len(running) == MAX_THREADS
        assert {0, 1, len(loops) - 1} <= set(running)
        assert not source.was_cancelled.is_set()
        assert loops[2].run(name_of_thread) == "loop 2"
        busy.close()


def test_f21k_a_loop_closed_in_its_own_thread_ends(thread):
    """The garbage collector may close a loop in this way."""

    async def close() -> None:
        thread.close()

    thread.run(close)
    assert thread.run(name_of_thread) == "loop under test"


def test_f21l_a_call_is_in_the_trace_of_its_caller(thread):
    async def trace_id() -> int:
        return trace.get_current_span().get_span_context().trace_id

    with recording_spans() as recorded:
        for _ in range(2):
            with recorded.provider.get_tracer("test").start_as_current_span("caller") as span:
                assert thread.run(trace_id) == span.get_span_context().trace_id
        assert thread.run(trace_id) == 0
