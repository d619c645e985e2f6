"""An event loop in a thread: asked from threads and from other loops, cancelled, closed, forked."""

from __future__ import annotations

import os
import threading
from collections.abc import AsyncGenerator, Iterator
from concurrent.futures import ThreadPoolExecutor

import anyio
import anyio.to_thread
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentflow.errors import BadArgument, Cancelled
from agentflow.integrations.background_loop import BackgroundLoop, Mailbox


@pytest.fixture
def thread() -> Iterator[BackgroundLoop]:
    thread = BackgroundLoop("a loop for a test")
    yield thread
    thread.close()
    assert all(one.name != "a loop for a test" for one in threading.enumerate())


async def count(to: int) -> AsyncGenerator[int, None]:
    for number in range(to):
        await anyio.lowlevel.checkpoint()
        yield number


async def name_of_thread() -> str:
    return threading.current_thread().name


class Endless:
    """Gives one thing, and then nothing until it is cancelled."""

    def __init__(self) -> None:
        self.was_cancelled = threading.Event()

    async def __call__(self) -> AsyncGenerator[str, None]:
        try:
            yield "first"
            await anyio.sleep_forever()
        finally:
            self.was_cancelled.set()


def test_functions_and_streams_from_a_thread_without_a_loop(thread):
    assert thread.run(name_of_thread) == "a loop for a test"
    assert list(thread.stream(lambda: count(100))) == list(range(100))
    assert list(thread.stream(lambda: count(0))) == []


@pytest.mark.anyio
async def test_functions_and_streams_from_a_loop_that_goes_on(thread):
    assert await thread.arun(name_of_thread) == "a loop for a test"
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


def test_what_fails_fails_the_caller_after_what_came_before(thread):
    stream = thread.stream(fail_after_one)
    assert next(stream) == 1
    with pytest.raises(BadArgument, match="no more"):
        next(stream)
    assert thread.run(name_of_thread) == "a loop for a test"


def test_a_stream_that_is_left_is_cancelled(thread):
    source = Endless()
    stream = thread.stream(source)
    assert next(stream) == "first"
    stream.close()
    assert source.was_cancelled.wait(10)


@pytest.mark.anyio
async def test_cancelling_who_waits_cancels_what_runs(thread):
    source = Endless()
    heard = anyio.Event()

    async def read() -> None:
        async for _ in thread.astream(source):
            heard.set()

    async with anyio.create_task_group() as group:
        group.start_soon(read)
        await heard.wait()
        group.cancel_scope.cancel()
    assert await anyio.to_thread.run_sync(source.was_cancelled.wait, 10)


def test_closing_ends_who_waits_and_the_next_call_starts_anew(thread):
    source = Endless()
    stream = thread.stream(source)
    assert next(stream) == "first"
    closing = threading.Thread(target=thread.close)
    closing.start()
    with pytest.raises(Cancelled):
        next(stream)
    closing.join()
    assert source.was_cancelled.is_set()
    assert thread.run(name_of_thread) == "a loop for a test"


def test_a_fork_of_the_process_has_a_loop_of_its_own(thread):
    assert thread.run(name_of_thread) == "a loop for a test"
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, thread.run(name_of_thread).encode())
        os._exit(0)
    os.close(write)
    with open(read, "rb") as answer:
        assert answer.read() == b"a loop for a test"
    assert os.waitpid(child, 0)[1] == 0


def test_what_is_called_there_may_fail(thread, caplog):
    thread.run(name_of_thread)
    thread.call_soon(lambda: 1 / 0)
    assert thread.run(name_of_thread) == "a loop for a test"
    assert "ZeroDivisionError" in caplog.text


@given(st.lists(st.sampled_from(["put", "take"]), max_size=30), st.booleans())
def test_a_mailbox_gives_all_once_and_wakes_once_until_it_is_looked_into(steps, fails):
    num_woken = 0

    def wake() -> None:
        nonlocal num_woken
        num_woken += 1

    mailbox: Mailbox[int] = Mailbox(wake)
    put: list[int] = []
    taken: list[int] = []
    num_due, is_told = 0, False
    for number, step in enumerate(steps):
        if step == "put":
            mailbox.put(number)
            put.append(number)
            num_due, is_told = num_due + (not is_told), True
        else:
            items = mailbox.take()
            assert items is not None
            taken += items
            is_told = False
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


def test_a_loop_that_cannot_be_made_is_an_error_and_the_next_call_tries_again(thread, monkeypatch):
    def no_loop(*args: object) -> None:
        raise OSError("too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(anyio, "run", no_loop)
        for _ in range(2):  # the lock is free again
            with pytest.raises(OSError, match="too many open files"):
                thread.run(name_of_thread)
    assert thread.run(name_of_thread) == "a loop for a test"
